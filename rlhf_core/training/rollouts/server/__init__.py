"""The process of a rollout engine: its start, its HTTP server, and the worker that samples and loads weights."""
