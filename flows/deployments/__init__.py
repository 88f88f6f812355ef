"""Prefect deployments: registration and submission, their forms, the work pool and its queues, and pending requests."""
