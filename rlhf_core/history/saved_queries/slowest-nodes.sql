/*
Slow nodes in probes

Means over the probes of a node, also those of trials, and relative to the mean over all nodes with the same device: 1
is as fast as the others. Sorted by the lower of both shares.

days (number) = 90: length of the period
*/
WITH measured AS (
    SELECT s.node, s.device, COUNT(*) AS num_probes, AVG(s.matmul_tflops) AS matmul_tflops,
           AVG(NULLIF(s.bandwidth_gb_s, 0)) AS bandwidth_gb_s, MIN(s.core_share) AS lowest_core_share
    FROM node_speeds s
    WHERE s.measured_at >= @days_ago(:days)
    GROUP BY s.node, s.device
),
compared AS (
    SELECT m.*, m.matmul_tflops / NULLIF(AVG(m.matmul_tflops) OVER (PARTITION BY m.device), 0) AS compute_share,
           m.bandwidth_gb_s / NULLIF(AVG(m.bandwidth_gb_s) OVER (PARTITION BY m.device), 0) AS bandwidth_share
    FROM measured m
)
SELECT node, device, num_probes, matmul_tflops, compute_share, bandwidth_gb_s, bandwidth_share, lowest_core_share
FROM compared
ORDER BY CASE WHEN bandwidth_share < compute_share THEN bandwidth_share ELSE compute_share END, node
