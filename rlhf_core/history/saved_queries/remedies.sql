/*
Settings changed for recovery

One row for each setting changed by a decision. run_state shows whether it helped.

days (number) = 30: length of the period
*/
SELECT d.decided_at, d.run_id, d.attempt, i.failure_kind, @leaf_name(leaf) AS setting, @leaf_value(leaf) AS new_value,
       d.action, r.state AS run_state
FROM decisions d
CROSS JOIN @leaves(d.config_diff) leaf
JOIN runs r ON r.run_id = d.run_id
LEFT JOIN incidents i ON i.run_id = d.run_id AND i.incident_id = d.decision_id
WHERE d.decided_at >= @days_ago(:days) AND @is_leaf(leaf)
ORDER BY d.decided_at DESC, d.run_id, setting
