"""Process of a rollout engine: its start, its HTTP server, and the worker that samples and takes weights."""
