/*
Queue time of attempts by week

From submission to start; for attempts that never started, to their end. Weeks start on Monday (UTC).

days (number) = 90: length of the period
*/
SELECT @week(a.submitted_at) AS week, COUNT(*) AS num_attempts,
       AVG(@seconds(a.submitted_at, COALESCE(a.started_at, a.ended_at))) AS mean_s,
       MAX(@seconds(a.submitted_at, COALESCE(a.started_at, a.ended_at))) AS longest_s,
       SUM(CASE WHEN a.started_at IS NULL THEN 1 ELSE 0 END) AS num_never_started
FROM attempts a
WHERE a.submitted_at >= @days_ago(:days) AND COALESCE(a.started_at, a.ended_at) IS NOT NULL
GROUP BY @week(a.submitted_at)
ORDER BY week
