/*
Nodes by cost of their incidents

lost_s: cost of an incident as in `time-lost`, from the last good step to the first new one, plus repeated steps;
node_hours: that time on all nodes of the attempt. An incident counts for every suspected node.

days (number) = 30: length of the period, by the time of the incident
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
