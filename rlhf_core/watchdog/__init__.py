"""One look at a run: files into rows (ingest), what the scheduler and the files say (evidence), what to do (watch)."""
