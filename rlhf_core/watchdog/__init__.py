"""Supervision of a run: files into rows (ingest), scheduler and files as evidence, and the next action (watcher)."""
