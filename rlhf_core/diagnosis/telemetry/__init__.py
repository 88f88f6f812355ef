"""Anomalies in the telemetry of all nodes: lagging nodes, hot or broken GPUs, spinning collectives."""
