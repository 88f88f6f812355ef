/*
Recurring faults: attempts with incidents of the same fingerprint

Without trials. A fingerprint is a hash of the error without its numbers. One that recurs in several runs is a bug or a
bad node, not chance.

days (number) = 30: length of the period
at_least (number) = 2: minimum number of attempts
*/
SELECT i.fingerprint, MIN(i.failure_kind) AS failure_kind, COUNT(DISTINCT i.run_id || '/' || i.attempt) AS num_attempts,
       COUNT(DISTINCT i.run_id) AS num_runs, MIN(i.seen_at) AS first_seen_at, MAX(i.seen_at) AS last_seen_at,
       MAX(i.run_id) AS one_run, MIN(i.message) AS message
FROM incidents i
JOIN runs r ON r.run_id = i.run_id AND r.trial_of = ''
WHERE i.fingerprint <> '' AND i.seen_at >= @days_ago(:days)
GROUP BY i.fingerprint
HAVING COUNT(DISTINCT i.run_id || '/' || i.attempt) >= :at_least
ORDER BY num_attempts DESC, i.fingerprint
