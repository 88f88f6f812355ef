/*
Nodes by cost of their incidents

lost_s: cost of an incident as in `time-lost`, from the last good step to the first new one, plus repeated steps;
node_hours: that time on all nodes of the attempt. An incident counts for every suspected node, also in trials.

days (number) = 30: length of the period, by the time of the incident
*/
SELECT node, CAST(SUM(num_strikes) AS bigint) AS num_strikes, COUNT(DISTINCT run_id) AS num_runs,
       SUM(lost_s) AS lost_s, SUM(lost_s * num_nodes) / 3600.0 AS node_hours, MAX(last_seen_at) AS last_seen_at
FROM (
    SELECT s.node, s.run_id, a.num_nodes, COUNT(*) AS num_strikes, SUM(l.lost_s) AS lost_s,
           MAX(i.seen_at) AS last_seen_at
    FROM node_strikes s
    JOIN incidents i ON i.run_id = s.run_id AND i.incident_id = s.incident_id
    JOIN incident_lost_time l ON l.run_id = i.run_id AND l.incident_id = i.incident_id
    JOIN attempts a ON a.run_id = i.run_id AND a.number = i.attempt
    WHERE i.seen_at >= @days_ago(:days)
    GROUP BY s.node, s.run_id, a.num_nodes
) runs_of_nodes
GROUP BY node
ORDER BY node_hours DESC, node
