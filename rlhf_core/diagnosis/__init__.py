"""Diagnosis of failures and choice of the next action. Pure functions: no files, no clock, no scheduler.

Agents use them on the nodes, the controller between attempts; both use the same tables.
"""
