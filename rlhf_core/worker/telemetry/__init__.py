"""Telemetry of a node: its figures and those of its GPUs, their series over time, and anomalies among all nodes."""
