"""Reconciliation of runs, Prefect and the scheduler's queue: facts and decisions. ``control.reconcile`` executes
them."""
