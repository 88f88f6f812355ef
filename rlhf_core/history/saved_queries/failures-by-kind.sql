/*
Number of failures by kind

Without trials. An incident that an agent and the controller have both found counts once.
num_stopped: incidents after which the controller stopped the run.

days (number) = 30: length of the period
*/
WITH stopped AS (
    SELECT d.run_id, (SELECT e.incident_id FROM interruptions e
                       WHERE e.run_id = d.run_id AND e.attempt = d.attempt
                       ORDER BY e.seen_at DESC, e.incident_id LIMIT 1) AS incident_id
    FROM decisions d
    WHERE d.decided_by = 'controller' AND d.action = 'stop'
)
SELECT i.failure_kind, COUNT(*) AS num_incidents, COUNT(DISTINCT i.run_id) AS num_runs,
       COUNT(s.incident_id) AS num_stopped, MAX(i.seen_at) AS last_seen_at
FROM incidents i
JOIN runs r ON r.run_id = i.run_id AND r.trial_of = ''
LEFT JOIN stopped s ON s.run_id = i.run_id AND s.incident_id = i.incident_id
WHERE i.seen_at >= @days_ago(:days)
  AND NOT EXISTS (SELECT 1 FROM duplicate_incidents u WHERE u.run_id = i.run_id AND u.incident_id = i.incident_id)
GROUP BY i.failure_kind
ORDER BY num_incidents DESC, i.failure_kind
