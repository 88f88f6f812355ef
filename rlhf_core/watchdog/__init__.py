"""Supervision of a run: ingestion of its files, evidence from scheduler and files, and the next action (watcher)."""
