/*
How long it takes from an incident to the next new step

By kind of failure. num_without: no step was made afterwards; those have no time.

days (number) = 30: how far back to look
*/
WITH recovery AS (
    SELECT i.failure_kind,
           @seconds(i.seen_at,
                    (SELECT MIN(m.time) FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id
                      WHERE k.name = 'time/step_s' AND m.run_id = i.run_id AND m.time > i.seen_at
                        AND (m.attempt, m.restart) > (i.attempt, i.restart))) AS seconds
    FROM incidents i
    WHERE i.seen_at >= @days_ago(:days)
),
ranked AS (
    SELECT failure_kind, seconds, COUNT(seconds) OVER (PARTITION BY failure_kind) AS num,
           ROW_NUMBER() OVER (PARTITION BY failure_kind ORDER BY seconds IS NULL, seconds) AS nth
    FROM recovery
)
SELECT failure_kind, COUNT(seconds) AS num_recovered, COUNT(*) - COUNT(seconds) AS num_without,
       MIN(seconds) AS fastest_s, AVG(CASE WHEN nth IN ((num + 1) / 2, (num + 2) / 2) THEN seconds END) AS median_s,
       MAX(seconds) AS slowest_s
FROM ranked
GROUP BY failure_kind
ORDER BY num_recovered DESC, failure_kind
