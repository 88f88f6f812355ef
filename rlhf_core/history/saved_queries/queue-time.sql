/*
Queue time of attempts by week

From submission to start, without trials; for attempts that never started, to their end, and for those that still wait
(num_waiting), to now. Weeks start on Monday (UTC).

days (number) = 90: length of the period
*/
SELECT @week(w.submitted_at) AS week, COUNT(*) AS num_attempts, AVG(w.seconds) AS mean_s, MAX(w.seconds) AS longest_s,
       SUM(CASE WHEN w.started_at IS NULL AND w.ended_at IS NOT NULL THEN 1 ELSE 0 END) AS num_never_started,
       SUM(CASE WHEN w.started_at IS NULL AND w.ended_at IS NULL THEN 1 ELSE 0 END) AS num_waiting
FROM (
    SELECT a.submitted_at, a.started_at, COALESCE(a.ended_at, r.ended_at) AS ended_at,
           @seconds(a.submitted_at, COALESCE(a.started_at, a.ended_at, r.ended_at, @days_ago(0))) AS seconds
    FROM attempt_times a
    JOIN runs r ON r.run_id = a.run_id AND r.trial_of = ''
    WHERE a.submitted_at >= @days_ago(:days)
) w
GROUP BY @week(w.submitted_at)
ORDER BY week
