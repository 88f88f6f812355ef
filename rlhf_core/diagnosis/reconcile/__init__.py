"""Reconciliation of runs, Prefect and the scheduler's queue: the facts, and the decisions from them.
``control.reconcile`` carries them out."""
