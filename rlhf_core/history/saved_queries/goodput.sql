/*
Share of its time that each run spent on valid steps

Without trials. ettr is productive_s / (wall_s - queue_s); the worst run is first. repeated_s: steps repeated after a
rewind. lost_s: from the last good step to the first new one, over all incidents, including repeated steps.

days (number) = 30: length of the period
name (text) = '': only runs of this name
*/
SELECT g.run_id, g.state, g.ettr, g.wall_s, g.queue_s, g.productive_s, g.repeated_s, g.lost_s
FROM all_goodput g
JOIN runs r ON r.run_id = g.run_id AND r.trial_of = ''
WHERE g.created_at >= @days_ago(:days) AND (CAST(:name AS text) = '' OR g.name = :name)
ORDER BY g.ettr IS NULL, g.ettr, g.run_id
