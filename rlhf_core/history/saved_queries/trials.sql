/*
Trials with results and costs

A trial tests a run before it starts. node_hours: from start to end of its attempts, times their nodes; `usage` counts
them too.

days (number) = 90: length of the period
*/
SELECT r.run_id AS trial, r.trial_of, r.state, r.message, g.wall_s,
       COALESCE((SELECT SUM(@seconds(t.started_at, COALESCE(t.ended_at, r.progress_at)) * a.num_nodes)
                   FROM attempt_times t JOIN attempts a ON a.run_id = t.run_id AND a.number = t.attempt
                   WHERE t.run_id = r.run_id AND t.started_at IS NOT NULL), 0) / 3600.0 AS node_hours,
       (SELECT o.state FROM runs o WHERE o.run_id = r.trial_of) AS run_state
FROM runs r
JOIN run_goodput g ON g.run_id = r.run_id
WHERE r.trial_of <> '' AND r.created_at >= @days_ago(:days)
ORDER BY r.created_at DESC, r.run_id
