"""Prefect, which lives here: the flow of a run (``run``), deployments, publishing, and the services of a site."""
