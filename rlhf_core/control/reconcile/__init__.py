"""Reconciliation of a site: history, scheduler and Prefect are compared, and disagreements are repaired."""
