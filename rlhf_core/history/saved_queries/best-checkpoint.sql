/*
Best evaluated checkpoints

Only checkpoints that still exist, without those of trials, which measure a few prompts. A checkpoint may appear twice:
measured during training, and by the evaluation stage, which also gives a confidence interval.

evaluation (text) = greedy: evaluation
name (text) = '': only runs of this name
limit (number) = 10: maximum number
*/
WITH present AS (
    SELECT c.run_id, c.step, c.path
    FROM checkpoints c
    JOIN runs r ON r.run_id = c.run_id
    WHERE c.removed_at IS NULL AND r.trial_of = '' AND (CAST(:name AS text) = '' OR r.name = :name)
),
scores AS (
    SELECT p.run_id, p.step, p.path, e.value, e.ci_low, e.ci_high, e.metric, e.when_made AS measured
    FROM present p
    JOIN evaluations e ON e.run_id = p.run_id AND e.checkpoint_step = p.step
    WHERE e.name = :evaluation AND e.value IS NOT NULL
    UNION ALL
    SELECT p.run_id, p.step, p.path, v.value, NULL, NULL, '', 'in training'
    FROM present p
    JOIN run_curve v ON v.run_id = p.run_id AND v.step = p.step
    WHERE v.key = 'eval/' || CAST(:evaluation AS text) AND v.value IS NOT NULL
)
SELECT s.run_id, s.step, s.path, s.value, s.ci_low, s.ci_high, s.metric, s.measured
FROM scores s
ORDER BY CASE WHEN CAST(:evaluation AS text) = 'loss' THEN s.value ELSE -s.value END, s.run_id, s.step, s.measured
LIMIT :limit
