/*
Checkpoint of each evaluation

weights: start of their hash; evaluations with the same hash measured the same model. checkpoint: empty if it was never
complete, for instance for the model before the first step.

run (run) = last: run
*/
SELECT e.when_made, e.name, e.metric, e.value, e.checkpoint_step, c.path AS checkpoint,
       CASE WHEN c.path IS NULL THEN '' WHEN c.removed_at IS NULL THEN 'there' ELSE 'removed' END AS now,
       substr(w.sha256, 1, 12) AS weights
FROM evaluations e
LEFT JOIN checkpoints c ON c.run_id = e.run_id AND c.step = e.checkpoint_step
LEFT JOIN weight_versions w ON w.run_id = e.run_id AND w.checkpoint_step = e.checkpoint_step
WHERE e.run_id = :run
ORDER BY e.made_at, e.name
