"""Causes of failure in logs: lines without prefixes, tracebacks, error classes, locations in code, and the search that
ranks them. The phrases are in ``signatures``."""
