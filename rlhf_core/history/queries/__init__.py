"""Reads of the history: one function per query. They return plain data, dictionaries and lists, ready for JSON, except
for held-out scores that became worse, which are a ``Regression`` each. :func:`show_run` has them in a
:class:`RunDetails`. The types of the rows are in module ``rows``.

Times are ISO 8601 text in UTC. A non-finite metric is the text ``NaN``, ``Infinity`` or ``-Infinity``, as in the files;
only :func:`curve`, which is for plotting, returns a float.

Reads with a single caller are in separate modules: ``controllers``, ``exports``, ``open_runs``.
"""

from rlhf_core.history.queries.baselines import (
    last_good,
    longest_gaps,
    node_strikes,
    restarts_since,
    seconds_per_step,
    usual_speeds,
)
from rlhf_core.history.queries.details import RunDetails, evaluation_samples, show_run
from rlhf_core.history.queries.measured import measured_shape
from rlhf_core.history.queries.metrics import STEP_SECONDS, curve
from rlhf_core.history.queries.plain import Facts
from rlhf_core.history.queries.runs import list_runs, resolve_run, run_dir_of
from rlhf_core.history.queries.sql import SqlStream, stream_sql

__all__ = [
    "STEP_SECONDS",
    "Facts",
    "RunDetails",
    "SqlStream",
    "curve",
    "evaluation_samples",
    "last_good",
    "list_runs",
    "longest_gaps",
    "measured_shape",
    "node_strikes",
    "resolve_run",
    "restarts_since",
    "run_dir_of",
    "seconds_per_step",
    "show_run",
    "stream_sql",
    "usual_speeds",
]
