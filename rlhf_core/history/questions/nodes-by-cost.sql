/*
Which nodes cost most

An incident costs the time from its detection to the first new step, or to the next incident or the end of the run
where that came first; node_hours is that time on all nodes of the attempt. It counts for every node that was blamed.

days (number) = 30: how far back to look
*/
WITH incident AS (
    SELECT i.run_id, i.incident_id, i.attempt, i.seen_at,
           COALESCE((SELECT MIN(m.time) FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id
                      WHERE k.name = 'time/step_s' AND m.run_id = i.run_id AND m.time > i.seen_at
                        AND (m.attempt, m.restart) > (i.attempt, i.restart)),
                    r.ended_at, r.progress_at) AS next_step_at,
           COALESCE(LEAD(i.seen_at) OVER (PARTITION BY i.run_id ORDER BY i.seen_at, i.incident_id),
                    r.ended_at, r.progress_at) AS next_incident_at
    FROM incidents i
    JOIN runs r ON r.run_id = i.run_id
),
cost AS (
    SELECT run_id, incident_id, attempt, seen_at,
           @seconds(seen_at, CASE WHEN next_step_at < next_incident_at THEN next_step_at ELSE next_incident_at END)
               AS lost_s
    FROM incident
)
SELECT s.node, COUNT(*) AS num_strikes, COUNT(DISTINCT s.run_id) AS num_runs, SUM(c.lost_s) AS lost_s,
       SUM(c.lost_s * a.num_nodes) / 3600.0 AS node_hours, MAX(c.seen_at) AS last_seen_at
FROM node_strikes s
JOIN cost c ON c.run_id = s.run_id AND c.incident_id = s.incident_id
JOIN attempts a ON a.run_id = c.run_id AND a.number = c.attempt
WHERE c.seen_at >= @days_ago(:days)
GROUP BY s.node
ORDER BY node_hours DESC, s.node
