/*
Which nodes cost most

An incident costs what `time-lost` counts for it: lost_s, from the last good step to the first new one and the steps that
had to be made again; node_hours is that time on all nodes of its attempt. It counts for every node that was blamed.

days (number) = 30: how far back to look, by the time of the incident
*/
SELECT s.node, COUNT(*) AS num_strikes, COUNT(DISTINCT s.run_id) AS num_runs, SUM(l.lost_s) AS lost_s,
       SUM(l.lost_s * a.num_nodes) / 3600.0 AS node_hours, MAX(i.seen_at) AS last_seen_at
FROM node_strikes s
JOIN incidents i ON i.run_id = s.run_id AND i.incident_id = s.incident_id
JOIN incident_lost_time l ON l.run_id = i.run_id AND l.incident_id = i.incident_id
JOIN attempts a ON a.run_id = i.run_id AND a.number = i.attempt
WHERE i.seen_at >= @days_ago(:days)
GROUP BY s.node
ORDER BY node_hours DESC, s.node
