/*
Weight syncs to rollout engines

One row for each start of the workers and transport. Seconds: means over completed syncs. missing: syncs that not every
engine has acknowledged; the newest of an active run may still be in progress.

run (run) = last: run
*/
SELECT attempt, restart, transport, COUNT(*) AS num_syncs, MIN(version) AS first_version, MAX(version) AS last_version,
       MAX(engines) AS engines, SUM(CASE WHEN acknowledged < engines THEN 1 ELSE 0 END) AS missing,
       AVG(seconds) AS mean_s, AVG(CASE WHEN seconds IS NOT NULL THEN wire_s END) AS mean_wire_s,
       AVG(CASE WHEN seconds IS NOT NULL THEN apply_s END) AS mean_apply_s, MAX(seconds) AS longest_s,
       AVG(gb_per_s) AS mean_gb_per_s, SUM(bytes) AS bytes
FROM weight_syncs
WHERE run_id = :run
GROUP BY attempt, restart, transport
ORDER BY attempt, restart, transport
