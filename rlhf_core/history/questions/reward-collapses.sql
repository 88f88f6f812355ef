/*
Which runs lost their reward after they went back to a checkpoint

Compares the mean reward of the steps before a restart or a new attempt with that of the steps after it. A sign of a
resume that did not bring back what it should have: weights, optimizer state, data position.

days (number) = 30: how far back to look
steps (number) = 10: so many steps on either side are compared
share (number) = 0.5: this share of the reward must be gone
*/
WITH compared AS (
    SELECT s.run_id, s.attempt, s.restart, s.first_step, s.started_at,
           (SELECT AVG(v.value) FROM run_curve v
             WHERE v.run_id = s.run_id AND v.key = 'reward/mean' AND v.step < s.first_step
               AND v.step >= s.first_step - CAST(:steps AS integer)
               AND (v.attempt, v.restart) < (s.attempt, s.restart)) AS reward_before,
           (SELECT AVG(v.value) FROM run_curve v
             WHERE v.run_id = s.run_id AND v.key = 'reward/mean' AND v.attempt = s.attempt AND v.restart = s.restart
               AND v.step < s.first_step + CAST(:steps AS integer)) AS reward_after
    FROM restarts s
    WHERE s.first_step > 1 AND s.started_at >= @days_ago(:days)
)
SELECT run_id, attempt, restart, first_step, reward_before, reward_after
FROM compared
WHERE reward_after < reward_before - CAST(:share AS double precision) * ABS(reward_before)
ORDER BY started_at DESC, run_id, attempt, restart
