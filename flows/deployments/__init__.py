"""Deployments in Prefect: how they are registered and submitted, the form that they show, the work pool and its queues,
and the requests that have made no run yet."""
