"""Causes of failure in logs: lines without their prefixes, tracebacks, classes of errors, locations in code, and the
search that weighs them. The phrases are in ``signatures``."""
