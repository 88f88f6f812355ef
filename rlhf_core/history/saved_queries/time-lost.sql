/*
Cost of failures by kind

Without trials. downtime_s: from the last good step to the first new one. repeated_s: repeated steps. share: of all time
lost to failures.

days (number) = 30: length of the period, by the time of a run's request
*/
SELECT failure_kind, num_incidents, num_runs, downtime_s, repeated_s, downtime_s + repeated_s AS lost_s,
       (downtime_s + repeated_s) / NULLIF(SUM(downtime_s + repeated_s) OVER (), 0) AS share
FROM (
    SELECT l.failure_kind, COUNT(*) AS num_incidents, COUNT(DISTINCT l.run_id) AS num_runs,
           SUM(l.downtime_s) AS downtime_s, SUM(l.repeated_s) AS repeated_s
    FROM incident_lost_time l
    WHERE l.run_id IN (SELECT r.run_id FROM runs r WHERE r.trial_of = '' AND r.created_at >= @days_ago(:days))
    GROUP BY l.failure_kind
) kinds
ORDER BY lost_s DESC, failure_kind
