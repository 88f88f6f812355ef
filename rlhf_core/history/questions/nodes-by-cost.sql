/*
Which nodes cost most

An incident costs the time from its detection to the first step of a later start, or to the next incident or the end of
the run where that came first; node_hours is that time on all nodes of the attempt. It counts for every node that was
blamed.

days (number) = 30: how far back to look
*/
WITH incident AS (
    SELECT c.run_id, c.incident_id, c.attempt, c.seen_at,
           COALESCE(c.first_step_at, r.ended_at, r.progress_at) AS next_step_at,
           COALESCE(LEAD(c.seen_at) OVER (PARTITION BY c.run_id ORDER BY c.seen_at, c.incident_id),
                    r.ended_at, r.progress_at) AS next_incident_at
    FROM run_recoveries c
    JOIN runs r ON r.run_id = c.run_id
    WHERE c.seen_at >= @days_ago(:days)
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
GROUP BY s.node
ORDER BY node_hours DESC, s.node
