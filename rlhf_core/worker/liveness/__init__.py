"""Liveness of a worker: its heartbeats, its current collective, and its state in ``/proc``."""
