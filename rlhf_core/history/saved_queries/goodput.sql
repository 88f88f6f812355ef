/*
Which share of its time each run spent on steps that count

ettr is productive_s / (wall_s - queue_s); the worst run comes first. repeated_s: steps made again after a rewind.
lost_s: from the last good step to the first new one, over all incidents, steps made again included.

days (number) = 30: how far back to look
name (text) = '': only runs of this name
*/
SELECT g.run_id, g.state, g.ettr, g.wall_s, g.queue_s, g.productive_s, g.repeated_s, g.lost_s
FROM all_goodput g
JOIN runs r ON r.run_id = g.run_id AND r.trial_of = ''
WHERE g.created_at >= @days_ago(:days) AND (CAST(:name AS text) = '' OR g.name = :name)
ORDER BY g.ettr IS NULL, g.ettr, g.run_id
