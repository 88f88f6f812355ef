"""The comparison of history, scheduler and Prefect, and what is done where they disagree."""
