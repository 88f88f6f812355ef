"""Tables and views of the history.

Conventions: ids are text; times are UTC and aware (:class:`UtcDateTime`); units are in names. ``attempt`` counts from
1, ``restart`` from 0. Every key comes from the run directory (a step, a position in a file, the number of an attempt)
and never from a counter of the database, so that reading the same file twice cannot make two rows.
``metric_keys.key_id`` is the one exception: names of metrics are stored once.

``docs/database.md`` is generated from the docstrings of these classes and their columns. Views are declared here for
queries and for that page; the migrations create them.
"""

from rlhf_core.history.tables.attempts import Attempt, AttemptNode, NodeSpeed, NodeTelemetry, Restart
from rlhf_core.history.tables.base import Base, CleanJson, CleanText, UtcDateTime
from rlhf_core.history.tables.incidents import Decision, Incident, NodeStrike
from rlhf_core.history.tables.metrics import LatestMetric, Metric, MetricKey
from rlhf_core.history.tables.results import Checkpoint, Evaluation, EvaluationSample, WeightVersion
from rlhf_core.history.tables.runs import (
    CheckResult,
    GoodputCache,
    IngestOffset,
    Promotion,
    Run,
    RunController,
    RunEvent,
    RunLease,
    RunTag,
    Stage,
)
from rlhf_core.history.tables.views import ViewBase

SCHEMA_REVISION = "0010"
"""The newest migration: the schema that this program reads and writes."""

metadata = Base.metadata
"""All tables."""

VIEWS = tuple(ViewBase.metadata.tables)
"""Names of the views."""

__all__ = [
    "SCHEMA_REVISION",
    "VIEWS",
    "Attempt",
    "AttemptNode",
    "Base",
    "CheckResult",
    "Checkpoint",
    "CleanJson",
    "CleanText",
    "Decision",
    "Evaluation",
    "EvaluationSample",
    "GoodputCache",
    "Incident",
    "IngestOffset",
    "LatestMetric",
    "Metric",
    "MetricKey",
    "NodeSpeed",
    "NodeStrike",
    "NodeTelemetry",
    "Promotion",
    "Restart",
    "Run",
    "RunController",
    "RunEvent",
    "RunLease",
    "RunTag",
    "Stage",
    "UtcDateTime",
    "ViewBase",
    "WeightVersion",
    "metadata",
]
