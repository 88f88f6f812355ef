/*
Time of a step by part

Means over valid steps. "other": time of a step outside rollout, reward, train, weight_sync and evaluate. The other
times are parts of these, or of no step: checkpoints are written between two steps or beside them.

run (run) = last: run
*/
WITH part AS (
    SELECT v.step, v.key AS part, v.value AS seconds
    FROM run_curve v
    WHERE v.run_id = :run AND v.key LIKE 'time/%' AND v.value IS NOT NULL
    UNION ALL
    SELECT s.step, 'other', CASE WHEN s.seconds > 0 THEN s.seconds ELSE 0 END
    FROM (
        SELECT v.step, SUM(CASE WHEN v.key = 'time/step_s' THEN v.value ELSE -v.value END) AS seconds
        FROM run_curve v
        WHERE v.run_id = :run AND v.value IS NOT NULL AND v.key IN ('time/step_s', 'time/rollout_s', 'time/reward_s',
              'time/train_s', 'time/weight_sync_s', 'time/evaluate_s')
        GROUP BY v.step
        HAVING MAX(CASE WHEN v.key = 'time/step_s' THEN 1 ELSE 0 END) = 1
    ) s
)
SELECT part, COUNT(*) AS num_steps, AVG(seconds) AS mean_s, MAX(seconds) AS longest_s, SUM(seconds) AS total_s,
       SUM(seconds) / (SELECT NULLIF(SUM(w.seconds), 0) FROM part w WHERE w.part = 'time/step_s') AS share
FROM part
GROUP BY part
ORDER BY total_s DESC, part
