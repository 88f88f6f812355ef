"""How people ask for runs in Prefect: a flat form, the configs it stands for, and their deployments."""
