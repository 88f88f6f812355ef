"""Telemetry of a node: metrics of the node and its GPUs, their time series, and anomalies across nodes."""
