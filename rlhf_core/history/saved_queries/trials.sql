/*
Trials with results and costs

A trial tests a run before it starts. node_hours: from start to end of its attempts, times their nodes.

days (number) = 90: length of the period
*/
SELECT r.run_id AS trial, r.trial_of, r.state, r.message, g.wall_s,
       COALESCE((SELECT SUM(@seconds(a.started_at, COALESCE(a.ended_at, r.progress_at)) * a.num_nodes)
                   FROM attempts a WHERE a.run_id = r.run_id AND a.started_at IS NOT NULL), 0) / 3600.0 AS node_hours,
       (SELECT o.state FROM runs o WHERE o.run_id = r.trial_of) AS run_state
FROM runs r
JOIN run_goodput g ON g.run_id = r.run_id
WHERE r.trial_of <> '' AND r.created_at >= @days_ago(:days)
ORDER BY r.created_at DESC, r.run_id
