/*
Number of failures by kind

An incident that an agent and the controller have both found counts once.
num_stopped: incidents that ended their run, without a possible recovery.

days (number) = 30: length of the period
*/
SELECT i.failure_kind, COUNT(*) AS num_incidents, COUNT(DISTINCT i.run_id) AS num_runs,
       SUM(CASE WHEN d.action = 'stop' THEN 1 ELSE 0 END) AS num_stopped, MAX(i.seen_at) AS last_seen_at
FROM incidents i
LEFT JOIN decisions d ON d.run_id = i.run_id AND d.decision_id = i.incident_id
WHERE i.seen_at >= @days_ago(:days)
  AND NOT EXISTS (SELECT 1 FROM duplicate_incidents u WHERE u.run_id = i.run_id AND u.incident_id = i.incident_id)
GROUP BY i.failure_kind
ORDER BY num_incidents DESC, i.failure_kind
