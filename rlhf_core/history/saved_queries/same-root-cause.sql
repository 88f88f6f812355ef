/*
Which fault came back: attempts whose incidents have the same fingerprint

A fingerprint is a hash of the error without its numbers. One that comes back in several runs is a bug or a bad node, and
no chance.

days (number) = 30: how far back to look
at_least (number) = 2: in so many attempts
*/
SELECT i.fingerprint, MIN(i.failure_kind) AS failure_kind, COUNT(DISTINCT i.run_id || '/' || i.attempt) AS num_attempts,
       COUNT(DISTINCT i.run_id) AS num_runs, MIN(i.seen_at) AS first_seen_at, MAX(i.seen_at) AS last_seen_at,
       MAX(i.run_id) AS one_run, MIN(i.message) AS message
FROM incidents i
WHERE i.fingerprint <> '' AND i.seen_at >= @days_ago(:days)
GROUP BY i.fingerprint
HAVING COUNT(DISTINCT i.run_id || '/' || i.attempt) >= :at_least
ORDER BY num_attempts DESC, i.fingerprint
