"""The Prefect side: a run as a flow, deployments, notifications and services. Only this package imports Prefect."""
