"""Everything that uses Prefect: the flow of a run (``run``), deployments, publishing, and the services of a site."""
