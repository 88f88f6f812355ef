/*
Time of a step by part

Means over valid steps. "other": time of a step outside all parts. Checkpoints are written between two steps and are not
part of either.

run (run) = last: run
*/
WITH part AS (
    SELECT v.step, v.key AS part, v.value AS seconds
    FROM run_curve v
    WHERE v.run_id = :run AND v.key LIKE 'time/%' AND v.value IS NOT NULL
    UNION ALL
    SELECT v.step, 'other',
           SUM(CASE WHEN v.key = 'time/step_s' THEN v.value WHEN v.key = 'time/checkpoint_s' THEN 0 ELSE -v.value END)
    FROM run_curve v
    WHERE v.run_id = :run AND v.key LIKE 'time/%' AND v.value IS NOT NULL
    GROUP BY v.step
    HAVING MAX(CASE WHEN v.key = 'time/step_s' THEN 1 ELSE 0 END) = 1
)
SELECT part, COUNT(*) AS num_steps, AVG(seconds) AS mean_s, MAX(seconds) AS longest_s, SUM(seconds) AS total_s,
       SUM(seconds) / (SELECT NULLIF(SUM(w.seconds), 0) FROM part w WHERE w.part = 'time/step_s') AS share
FROM part
GROUP BY part
ORDER BY total_s DESC, part
