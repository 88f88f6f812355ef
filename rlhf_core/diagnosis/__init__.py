"""Diagnosis of failures and choice of the next action. Pure functions: no files, no clock, no scheduler.

Agents use them on the nodes, the controller between attempts; both use the same tables.

A failure on its way from a worker's log to the history:

- ``logs.lines.LogLine``: line of a log; those of a traceback become a ``logs.tracebacks.Raised``.
- ``logs.events.FailureEvent``: the line or error as a row of the tables explains it.
- ``classify.Evidence``: the ends of all workers with their logs, the verdict on a hang, the state of the job.
- ``failure.Failure``: what ``classify`` concludes from the evidence, with the ranks and nodes to blame.
- ``policy.Choice``: the response to it.
- ``schemas.failures.Incident`` and ``Decision``: failure and choice, as they are stored.
"""
