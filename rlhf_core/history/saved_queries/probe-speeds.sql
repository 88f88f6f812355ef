/*
Speeds of a run's nodes in the probes of its attempts

matmul_tflops: of the slowest device of a node; compute_share: relative to the mean of the nodes in the same probe.
bandwidth_gb_s: to the fastest neighbour.

run (run) = last: run
*/
SELECT s.attempt, s.node, s.device, s.matmul_tflops,
       s.matmul_tflops / NULLIF(AVG(s.matmul_tflops) OVER (PARTITION BY s.attempt, s.device), 0) AS compute_share,
       NULLIF(s.bandwidth_gb_s, 0) AS bandwidth_gb_s, s.latency_ms, s.core_share
FROM node_speeds s
WHERE s.run_id = :run
ORDER BY s.attempt, s.node
