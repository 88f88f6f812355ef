/*
Runs that lost their reward after a resume or because training learned nothing

Without trials. After a resume, it compares the mean reward of the steps before the checkpoint with that of the steps
after it: a drop suggests that the resume did not restore something (weights, optimizer state, data position). If
training was ended because it learned nothing (degenerate_rl), it compares the best step of that start of the workers
with its last ones.

days (number) = 30: length of the period
steps (number) = 10: number of steps to compare on either side
share (number) = 0.5: minimum share of the reward lost after a resume
*/
WITH resumed AS (
    SELECT s.run_id, s.attempt, s.restart, s.first_step AS step, s.started_at AS found_at,
           (SELECT AVG(v.value) FROM run_curve v
             WHERE v.run_id = s.run_id AND v.key = 'reward/mean' AND v.step < s.first_step
               AND v.step >= s.first_step - CAST(:steps AS integer)
               AND (v.attempt, v.restart) < (s.attempt, s.restart)) AS reward_before,
           (SELECT AVG(v.value) FROM run_curve v
             WHERE v.run_id = s.run_id AND v.key = 'reward/mean' AND v.attempt = s.attempt AND v.restart = s.restart
               AND v.step < s.first_step + CAST(:steps AS integer)) AS reward_after,
           'after a resume' AS why
    FROM restarts s
    JOIN runs r ON r.run_id = s.run_id AND r.trial_of = ''
    WHERE s.first_step > 1 AND s.started_at >= @days_ago(:days)
),
ended AS (
    SELECT i.run_id, i.attempt, i.restart, i.step, i.seen_at AS found_at,
           (SELECT MAX(m.value) FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id
             WHERE m.run_id = i.run_id AND k.name = 'reward/mean' AND m.attempt = i.attempt AND m.restart = i.restart)
             AS reward_before,
           (SELECT AVG(m.value) FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id
             WHERE m.run_id = i.run_id AND k.name = 'reward/mean' AND m.attempt = i.attempt AND m.restart = i.restart
               AND m.step > i.step - CAST(:steps AS integer)) AS reward_after,
           i.message AS why
    FROM incidents i
    JOIN interruptions e ON e.run_id = i.run_id AND e.incident_id = i.incident_id
    JOIN runs r ON r.run_id = i.run_id AND r.trial_of = ''
    WHERE i.failure_kind = 'degenerate_rl' AND i.seen_at >= @days_ago(:days)
),
found AS (
    SELECT * FROM resumed WHERE reward_after < reward_before - CAST(:share AS double precision) * ABS(reward_before)
    UNION ALL
    SELECT * FROM ended
)
SELECT run_id, attempt, restart, step, reward_before, reward_after, why
FROM found
ORDER BY found_at DESC, run_id, attempt, restart
