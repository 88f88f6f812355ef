/*
What failures cost, by kind

downtime_s: from the last good step to the first new one. repeated_s: steps that had to be made again. share: of all that
was lost to failures.

days (number) = 30: how far back to look, by the time at which a run was asked for
*/
SELECT l.failure_kind, SUM(l.num_incidents) AS num_incidents, COUNT(DISTINCT l.run_id) AS num_runs,
       SUM(l.downtime_s) AS downtime_s, SUM(l.repeated_s) AS repeated_s, SUM(l.lost_s) AS lost_s,
       SUM(l.lost_s) / NULLIF(SUM(SUM(l.lost_s)) OVER (), 0) AS share
FROM run_lost_time l
JOIN runs r ON r.run_id = l.run_id
WHERE r.created_at >= @days_ago(:days)
GROUP BY l.failure_kind
ORDER BY lost_s DESC, l.failure_kind
