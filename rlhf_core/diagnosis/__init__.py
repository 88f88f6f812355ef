"""Diagnosis of failures and choice of the next action, as pure functions: no files, no clock, no scheduler.

Agents use them on the nodes and the controller uses them between attempts; both read the same tables.
"""
