"""The controller of a run, without Prefect."""
