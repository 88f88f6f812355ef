/*
Which checkpoints were evaluated best

Only those that are still there. A checkpoint may come twice: measured in training, and by the evaluation stage, which
alone gives an interval.

evaluation (text) = greedy: which evaluation
name (text) = '': only runs of this name
limit (number) = 10: at most so many
*/
WITH scores AS (
    SELECT e.run_id, e.checkpoint_step AS step, e.value, e.ci_low, e.ci_high, e.metric, e.when_made AS measured
    FROM evaluations e
    WHERE e.name = :evaluation AND e.value IS NOT NULL
    UNION ALL
    SELECT v.run_id, v.step, v.value, NULL, NULL, '', 'in training'
    FROM run_curve v
    WHERE v.key = 'eval/' || CAST(:evaluation AS text) AND v.value IS NOT NULL
)
SELECT s.run_id, s.step, c.path, s.value, s.ci_low, s.ci_high, s.metric, s.measured
FROM scores s
JOIN checkpoints c ON c.run_id = s.run_id AND c.step = s.step AND c.removed_at IS NULL
JOIN runs r ON r.run_id = s.run_id
WHERE CAST(:name AS text) = '' OR r.name = :name
ORDER BY s.value DESC, s.run_id, s.step, s.measured
LIMIT :limit
