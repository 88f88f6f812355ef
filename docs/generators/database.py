"""``docs/database.md`` and its picture: every table, view and column of the history, and queries to start from."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from generators import entity_picture
from generators.shared import GENERATED, cell, code
from rlhf_core.history import saved_queries
from rlhf_core.history.renamed import RENAMED
from rlhf_core.history.tables import SCHEMA_REVISION, Base, ViewBase, metadata
from rlhf_core.schemas.base import strings_under_names

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Course of a run": ("stages", "controllers", "checks", "events", "promotions"),
    "Attempts and nodes": ("attempts", "restarts", "attempt_nodes", "node_speeds", "node_telemetry"),
    "Incidents": ("incidents", "node_strikes", "decisions"),
    "Metrics": ("metric_keys", "latest_metrics", "metrics"),
    "Results": ("checkpoints", "weight_versions", "weight_syncs", "evaluations", "evaluation_samples"),
    "Bookkeeping": ("run_tags", "goodput_cache", "ingest_offsets", "leases"),
}
"""Tables by topic; beside them there is ``runs``."""

HEAD = """\
# The database

The history of all runs is a SQL database: a SQLite file in `RLHF_HOME`, or the PostgreSQL server in
`RLHF_DATABASE_URL` ([operations](operations.md)). It is derived from the files of the run directories, and
`rlhf db rebuild` rebuilds it from them. Tables and views are the same on both databases, and any program can read them:
`rlhf sql`, psql, Grafana, a notebook.

```console
$ rlhf sql "SELECT run_id, state, message FROM runs ORDER BY created_at DESC LIMIT 5"
$ rlhf sql --list                    # saved queries, by name
$ rlhf sql goodput days=7
$ rlhf sql goodput --show            # print the statement behind a name, to adapt it
```

`rlhf sql` only reads: the database itself refuses every change. This page describes schema {revision}.

## What every table has in common

- `run_id` is the id of a run. A run is submitted as one or more **attempts** (from 1). Within an attempt, each start of
  its workers is a **restart** (from 0). `step` counts optimizer steps from 1, across the warm start and the main
  algorithm.
- Times are UTC. On PostgreSQL they have a time zone; on SQLite they are text that sorts by time.
- Names of columns and metrics contain their units: `_s` seconds, `_gb_s` gigabytes per second, `num_` counts.
- A step that was repeated after a restart has several rows in `metrics`. The view `run_curve` has the one that counts.
- Columns of the primary key are marked as *key*. An empty text means "none" where the table says so; null means that
  there is no value yet.

## The tables in one picture

![Tables of the history and their references](images/database.svg)

Blue columns are primary keys; an arrow points to the table that a foreign key references.

## Ten questions and their SQL

Each statement runs unchanged on SQLite and PostgreSQL; a test runs them all against a history with runs.
"""

QUESTIONS: Mapping[str, str] = {
    "Which runs are active, and how far are they?": """
        SELECT r.run_id, r.state, r.owner,
               (SELECT m.step FROM latest_metrics m WHERE m.run_id = r.run_id
                 ORDER BY m.attempt DESC, m.restart DESC, m.step DESC LIMIT 1) AS step,
               r.total_steps, r.progress_at
        FROM runs r
        WHERE r.ended_at IS NULL
        ORDER BY r.progress_at DESC""",
    "How much better did each run make its model?": """
        SELECT a.run_id, a.name, a.metric, b.value AS before, a.value AS after,
               CASE WHEN a.name = 'loss' THEN b.value - a.value ELSE a.value - b.value END AS gain
        FROM evaluations a
        JOIN evaluations b ON b.run_id = a.run_id AND b.name = a.name AND b.when_made = 'before'
        WHERE a.when_made = 'after'
        ORDER BY gain DESC""",
    "What share of its time did each run spend training?": """
        SELECT run_id, name, state, ettr, wall_s / 3600 AS hours, queue_s / 3600 AS hours_in_queue
        FROM all_goodput
        ORDER BY created_at DESC""",
    "What did each kind of failure cost?": """
        SELECT failure_kind, COUNT(*) AS num_incidents, SUM(lost_s) / 3600 AS hours_lost
        FROM incident_lost_time
        GROUP BY failure_kind
        ORDER BY hours_lost DESC""",
    "What went wrong in the newest runs, and what was done about it?": """
        SELECT i.run_id, i.seen_at, i.failure_kind, i.phase, i.step, i.suspect_nodes, i.message, d.action, d.reason
        FROM incidents i
        LEFT JOIN decisions d ON d.run_id = i.run_id AND (d.decision_id = i.incident_id
            OR (i.found_by = 'controller' AND d.decided_by = 'controller' AND d.attempt = i.attempt))
        ORDER BY i.seen_at DESC
        LIMIT 20""",
    "How long did recovery take, from an incident to the next step?": """
        SELECT failure_kind, COUNT(*) AS num_recovered, AVG(recovery_s) AS mean_s, MAX(recovery_s) AS longest_s
        FROM run_recoveries
        WHERE recovery_s IS NOT NULL
        GROUP BY failure_kind
        ORDER BY mean_s DESC""",
    "Which nodes fail?": """
        SELECT node, num_strikes, num_attempts, last_failure_kind, last_strike_at
        FROM node_health
        WHERE num_strikes > 0
        ORDER BY num_strikes DESC, node""",
    "How did a metric develop over the steps that count?": """
        SELECT run_id, step, value
        FROM run_curve
        WHERE key = 'train/loss' AND run_id = (SELECT run_id FROM runs ORDER BY created_at DESC LIMIT 1)
        ORDER BY step""",
    "Where does the time of a step go?": """
        SELECT key, COUNT(*) AS num_steps, AVG(value) AS mean_s, SUM(value) AS total_s
        FROM run_curve
        WHERE key LIKE 'time/%' AND run_id = (SELECT run_id FROM runs ORDER BY created_at DESC LIMIT 1)
        GROUP BY key
        ORDER BY total_s DESC""",
    "Which checkpoints still exist, and how large are they?": """
        SELECT c.run_id, c.step, c.loop, r.run_dir || '/' || c.path AS folder, c.bytes / 1e9 AS gigabytes, w.sha256
        FROM checkpoints c
        JOIN runs r ON r.run_id = c.run_id
        LEFT JOIN weight_versions w ON w.run_id = c.run_id AND w.checkpoint_step = c.step
        WHERE c.removed_at IS NULL
        ORDER BY c.run_id, c.step""",
}
"""Titles and statements; the same statement for both databases."""

SAVED = """
## Saved queries

`rlhf sql NAME` runs one; arguments are given as `NAME=VALUE`.

| name | meaning | arguments |
|---|---|---|
"""

OLD_NAMES = """
## Old names

Names that changed since version 0.1. `rlhf sql` answers a statement with an old name with the new one; statements
elsewhere (Grafana, notebooks) must be changed by hand. One case gets no message: `owner` in a subquery on `leases`
inside of a query on `runs` now means `runs.owner`.

| old | new | reason |
|---|---|---|
"""

UNITS = {
    "_gb_s": "GB/s",
    "gb_per_s": "GB/s",
    "_tflops": "TFLOP/s",
    "_ms": "ms",
    "_s": "s",
    "seconds": "s",
    "bytes": "bytes",
    "share": "0 to 1",
    "ettr": "0 to 1",
}
"""Units by the ends of names; the first that fits."""


def database() -> str:
    """Every table, view and column with its meaning and unit."""
    tables = {str(mapper.local_table.name): mapper.class_ for mapper in Base.registry.mappers}
    views = {str(mapper.local_table.name): mapper.class_ for mapper in ViewBase.registry.mappers}
    parts = [GENERATED, HEAD.format(revision=SCHEMA_REVISION)]
    for title, statement in QUESTIONS.items():
        parts += [f"### {title}\n", f"```sql\n{textwrap.dedent(statement).strip()}\n```\n"]
    parts += ["## Runs", *_described(tables["runs"], "runs")]
    for title, names in GROUPS.items():
        parts.append(f"\n## {title}")
        for name in names:
            parts += _described(tables[name], name)
    parts.append("\n## Views")
    for name in ViewBase.metadata.tables:
        parts += _described(views[name], name)
    return "\n".join(parts) + "\n" + SAVED + "\n".join(_saved()) + "\n" + OLD_NAMES + "\n".join(_renamed()) + "\n"


def picture() -> str:
    """The tables and their references, as SVG."""
    return entity_picture.draw(metadata, GROUPS, "runs")


def _described(described: type[Any], name: str) -> Iterator[str]:
    yield f"\n### `{name}`\n"
    yield f"{_plain(inspect.cleandoc(described.__doc__ or ''))}\n"
    yield "| column | type | unit | meaning |"
    yield "|---|---|---|---|"
    for column in described.__table__.columns:
        key = ", *key*" if column.primary_key and described.__table__.metadata is metadata else ""
        meaning = _plain(_meaning(described, column))
        yield f"| `{column.name}` | {_kind(column)}{key} | {_unit(column)} | {cell(meaning)} |"


def _meaning(described: type[Any], column: Any) -> str:
    """The string under a column of a table or view, or under the table's column that a view shows."""
    shown = column.info.get("as_in")
    return strings_under_names(shown.class_)[shown.key] if shown else strings_under_names(described)[column.name]


def _plain(text: str) -> str:
    """A docstring without the roles of Sphinx."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


def _kind(column: Any) -> str:
    kinds = {
        "CleanText": "text",
        "CleanJson": "JSON",
        "UtcDateTime": "time",
        "Double": "number",
        "Integer": "integer",
        "BigInteger": "integer (64 bits)",
        "Boolean": "boolean",
    }
    return kinds[type(column.type).__name__] + (" or null" if column.nullable else "")


def _unit(column: Any) -> str:
    if type(column.type).__name__ == "UtcDateTime":
        return "UTC"
    if type(column.type).__name__ not in ("Double", "Integer", "BigInteger", "CleanJson"):
        return ""
    return next((unit for end, unit in UNITS.items() if column.name.endswith(end)), "")


def _saved() -> Iterator[str]:
    for one in saved_queries.saved():
        arguments = ", ".join(
            code(argument.name + ("" if argument.default is None else f"={argument.default or repr('')}"))
            for argument in one.arguments
        )
        yield f"| `{one.name}` | {cell(one.title)} | {arguments} |"


def _renamed() -> Iterator[str]:
    reason = ""
    for one in RENAMED:
        reason = reason if one.why == "as above" else one.why
        old, now = (f"{one.table}.{one.column}", f"{one.table}.{one.now}") if one.column else (one.table, one.now)
        yield f"| `{old}` | `{now}` | {cell(reason)} |"
    yield "| `events.kind` beginning with `keeper_` | `reconcile_` | the site daemon reconciles |"
