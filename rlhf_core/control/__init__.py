"""The controller of a run, without Prefect: its steps, what follows a failure, and what looks after all runs."""
