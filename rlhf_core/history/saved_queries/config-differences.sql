/*
Settings that differ between two runs

Every setting of the resolved config counts, including defaults. Empty if a run does not have the setting. Runs ingested by
rlhf-flows 0.1 have the names of their settings of that time until `rlhf db rebuild`; `rlhf compare` translates them.

a (run): one run
b (run) = last: the other run
*/
WITH setting AS (
    SELECT r.run_id, @leaf_name(leaf) AS setting, @leaf_value(leaf) AS value
    FROM runs r
    CROSS JOIN @leaves(r.spec) leaf
    WHERE r.run_id IN (:a, :b) AND @is_leaf(leaf)
),
paired AS (
    SELECT setting, MAX(CASE WHEN run_id = :a THEN value END) AS in_a, MAX(CASE WHEN run_id = :b THEN value END) AS in_b
    FROM setting
    GROUP BY setting
)
SELECT setting, in_a, in_b
FROM paired
WHERE in_a <> in_b OR (in_a IS NULL) <> (in_b IS NULL)
ORDER BY setting
