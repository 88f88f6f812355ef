/*
Time from an incident to the next step

To the end of the first step of a later start, by kind of failure, without trials and without the time in which nothing
drove the run, for instance between its end and its resume. num_without: incidents without a later step, which have no
time.

days (number) = 30: length of the period
*/
WITH ranked AS (
    SELECT failure_kind, recovery_s, COUNT(recovery_s) OVER (PARTITION BY failure_kind) AS num,
           ROW_NUMBER() OVER (PARTITION BY failure_kind ORDER BY recovery_s NULLS LAST) AS nth
    FROM run_recoveries
    WHERE run_id IN (SELECT r.run_id FROM runs r WHERE r.trial_of = '') AND seen_at >= @days_ago(:days)
)
SELECT failure_kind, COUNT(recovery_s) AS num_recovered, COUNT(*) - COUNT(recovery_s) AS num_without,
       MIN(recovery_s) AS fastest_s,
       AVG(CASE WHEN nth IN ((num + 1) / 2, (num + 2) / 2) THEN recovery_s END) AS median_s,
       MAX(recovery_s) AS slowest_s
FROM ranked
GROUP BY failure_kind
ORDER BY num_recovered DESC, failure_kind
