"""The controller of a run, independent of Prefect: its steps, its recovery from failures, and the site daemon's
reconciler."""
