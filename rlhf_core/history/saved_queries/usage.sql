/*
Hours of nodes and GPUs by owner

From start to end of each attempt, as far as it is in the period, times its nodes and the GPUs that it requested; trials
count too, except in num_runs. An attempt without an outcome, for instance because its nodes were lost, ends when a
controller notices it. failed_share: share of node_hours in attempts that failed or were lost.

days (number) = 30: length of the period
*/
WITH used AS (
    SELECT r.owner, CASE WHEN r.trial_of = '' THEN r.run_id END AS run_id, a.state, a.num_nodes,
           a.num_nodes * COALESCE(@number(a.placement, gpus_per_node), 0) AS num_gpus,
           @seconds(CASE WHEN t.started_at < @days_ago(:days) THEN @days_ago(:days) ELSE t.started_at END,
                    COALESCE(t.ended_at, r.progress_at)) / 3600.0 AS hours
    FROM attempt_times t
    JOIN attempts a ON a.run_id = t.run_id AND a.number = t.attempt
    JOIN runs r ON r.run_id = t.run_id
    WHERE COALESCE(t.ended_at, r.progress_at) >= @days_ago(:days) AND t.started_at IS NOT NULL
)
SELECT owner, COUNT(DISTINCT run_id) AS num_runs, SUM(hours * num_nodes) AS node_hours,
       SUM(hours * num_gpus) AS gpu_hours,
       SUM(CASE WHEN state IN ('failed', 'lost') THEN hours * num_nodes ELSE 0 END)
           / NULLIF(SUM(hours * num_nodes), 0) AS failed_share
FROM used
GROUP BY owner
ORDER BY node_hours DESC, owner
