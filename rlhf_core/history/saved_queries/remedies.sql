/*
Settings changed for recovery

One row for each setting changed by a decision, without trials. failure_kind is that of the attempt. run_state shows
whether it helped.

days (number) = 30: length of the period
*/
SELECT d.decided_at, d.run_id, d.attempt, a.failure_kind, @leaf_name(leaf) AS setting, @leaf_value(leaf) AS new_value,
       d.action, r.state AS run_state
FROM decisions d
CROSS JOIN @leaves(d.config_diff) leaf
JOIN runs r ON r.run_id = d.run_id AND r.trial_of = ''
LEFT JOIN attempts a ON a.run_id = d.run_id AND a.number = d.attempt
WHERE d.decided_at >= @days_ago(:days) AND @is_leaf(leaf)
ORDER BY d.decided_at DESC, d.run_id, setting
