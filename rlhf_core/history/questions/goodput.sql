/*
Which share of its time each run spent on steps that count

ettr is productive_s / (wall_s - queue_s); the worst run comes first. repeated_s: steps made again after a rewind.
lost_s: from the last good step to the first new one, over all incidents, steps made again included.

days (number) = 30: how far back to look
name (text) = '': only runs of this name
*/
SELECT r.run_id, r.state, g.ettr, g.wall_s, g.queue_s, g.productive_s, g.repeated_s, g.lost_s
FROM runs r
JOIN run_goodput g ON g.run_id = r.run_id
WHERE r.trial_of = '' AND r.created_at >= @days_ago(:days) AND (CAST(:name AS text) = '' OR r.name = :name)
ORDER BY g.ettr IS NULL, g.ettr, r.run_id
