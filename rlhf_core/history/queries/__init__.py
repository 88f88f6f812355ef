"""Reads: one function per question. Plain data comes back: dictionaries and lists that are ready for JSON.

Times are ISO 8601 text in UTC. A metric that is not finite is the text ``NaN``, ``Infinity`` or ``-Infinity``, as in
the files; only :func:`curve`, which is for plotting, gives it as a float.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from statistics import median
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Subquery, Table, column, func, select, table, true

from rlhf_core.errors import BadInput, UnknownRun
from rlhf_core.formatting import missing_steps
from rlhf_core.history import database, sql_limits
from rlhf_core.history.sql_limits import WorkClock
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import VIEWS, UtcDateTime, metadata
from rlhf_core.history.writers import (
    ATTEMPTS,
    CHECKPOINTS,
    CHECKS,
    CONTROLLERS,
    DECISIONS,
    EVALUATIONS,
    EVENTS,
    INCIDENTS,
    KEPT_GOODPUT,
    KEYS,
    LATEST,
    METRICS,
    NODES,
    PROMOTIONS,
    RESTARTS,
    RUNS,
    SAMPLES,
    SPEEDS,
    STAGES,
    STRIKES,
    TAGS,
    TELEMETRY,
)
from rlhf_core.schemas.attempts import ATTEMPT_ENDS, RUN_ENDS, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.failures import Action
from rlhf_core.schemas.regression import regressions

Facts = dict[str, Any]

CURVE = table("run_curve", *map(column, ("run_id", "key", "step", "attempt", "restart", "value", "non_finite")))
GOODPUT = table(
    "run_goodput",
    *map(column, ("run_id", "wall_s", "queue_s", "productive_s", "repeated_s", "lost_s", "ettr")),
)
ALL_GOODPUT = table(
    "all_goodput",
    *map(column, ("run_id", "name", "state")),
    column("created_at", UtcDateTime),
    *map(column, ("wall_s", "queue_s", "productive_s", "repeated_s", "lost_s", "ettr")),
)
LOST_TIME = table(
    "run_lost_time",
    *map(column, ("run_id", "failure_kind", "num_incidents", "downtime_s", "repeated_s", "lost_s")),
)

STEP_SECONDS = "time/step_s"
"""The metric that every step has."""

_ENDED_ATTEMPTS = frozenset(state.value for state in ATTEMPT_ENDS)


# ---------------------------------------------------------------------------------------------------------------------
# Over all runs


def node_strikes(store: HistoryStore, since: datetime) -> list[tuple[str, str, datetime]]:
    """Incidents that count against nodes: node, kind of failure, when; oldest first."""
    question = (
        select(STRIKES.c.node, STRIKES.c.failure_kind, STRIKES.c.struck_at)
        .where(STRIKES.c.struck_at >= since)
        .order_by(STRIKES.c.struck_at)
    )
    with store.reading() as connection:
        return [(row.node, row.failure_kind, row.struck_at) for row in connection.execute(question)]


def restarts_since(store: HistoryStore, since: datetime) -> int:
    """Restarts in place and new attempts that were decided on, of all runs."""
    again = (Action.RESTART_IN_PLACE.value, Action.NEW_ATTEMPT.value)
    question = select(func.count()).where(DECISIONS.c.decided_at >= since, DECISIONS.c.action.in_(again))
    with store.reading() as connection:
        return int(connection.execute(question).scalar_one())


def usual_speeds(
    store: HistoryStore, since: datetime, min_earlier: int = 3, num_newest: int = 10
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians of the newest probes of every node: node to device to ``matmul_tflops`` and ``bandwidth_gb_s``.

    Args:
        since: Older ones do not count.
        min_earlier: A node with fewer on a device has nothing that is usual yet.
        num_newest: So many count.
    """
    question = (
        select(SPEEDS.c.node, SPEEDS.c.device, SPEEDS.c.matmul_tflops, SPEEDS.c.bandwidth_gb_s)
        .where(SPEEDS.c.measured_at >= since, SPEEDS.c.device != "")
        .order_by(SPEEDS.c.measured_at.desc())
    )
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with store.reading() as connection:
        for node, device, tflops, gb_s in connection.execute(question):
            readings = measured.setdefault((node, device), [])
            if len(readings) < num_newest:
                readings.append((tflops, gb_s))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (node, device), readings in measured.items():
        if len(readings) >= min_earlier:
            usual = {
                "matmul_tflops": median(tflops for tflops, _ in readings),
                "bandwidth_gb_s": median(gb_s for _, gb_s in readings),
            }
            found.setdefault(node, {})[device] = usual
    return found


def longest_gaps(store: HistoryStore, shape: str, num_runs: int = 5) -> dict[str, float]:
    """Longest silences that ended well in the newest completed runs of a shape: ``role/phase`` to seconds."""
    found: dict[str, float] = {}
    with store.reading() as connection:
        runs = list(connection.execute(_newest_completed(shape, num_runs)).scalars())
        question = select(NODES.c.longest_gaps_s).where(NODES.c.run_id.in_(runs), NODES.c.node_index == 0)
        for gaps in connection.execute(question).scalars():
            for place, seconds in gaps.items():
                found[place] = max(found.get(place, 0.0), float(seconds))
    return found


def seconds_per_step(store: HistoryStore, shape: str, num_runs: int = 5) -> float | None:
    """How long a step takes: the median over the newest completed runs of a shape, each with the mean of its steps.
    None where there is no such run. Trials do not count: their few steps are mostly warming up."""
    newest = _newest_completed(shape, num_runs).where(RUNS.c.trial_of == "")
    means = (
        select(func.avg(METRICS.c.value))
        .join(KEYS, KEYS.c.key_id == METRICS.c.key_id)
        .where(METRICS.c.run_id.in_(newest), KEYS.c.name == STEP_SECONDS, METRICS.c.value.is_not(None))
        .group_by(METRICS.c.run_id)
    )
    with store.reading() as connection:
        found = list(connection.execute(means).scalars())
    return median(found) if found else None


def last_good(store: HistoryStore, name: str, run_id: str = "") -> Facts | None:
    """The last completed run of a name: ``run_id, spec, basis`` (what its check ``trial.basis`` found). A trial
    counts, but not for the run that it was made for (``run_id``), which knows its trials itself."""
    newest = (
        select(RUNS.c.run_id, RUNS.c.spec)
        .where(RUNS.c.name == name, RUNS.c.state == RunState.COMPLETED.value)
        .where((RUNS.c.trial_of == "") | (RUNS.c.trial_of != run_id))
        .order_by(RUNS.c.ended_at.desc())  # a trial is made later than its run, and ends before it
        .limit(1)
    )
    with store.reading() as connection:
        run = connection.execute(newest).one_or_none()
        if run is None:
            return None
        basis = (
            select(CHECKS.c.found)
            .where(
                CHECKS.c.run_id == run.run_id,
                CHECKS.c.check_id == "trial.basis",
                CHECKS.c.status == CheckStatus.PASSED.value,
            )
            .order_by(CHECKS.c.round.desc())
            .limit(1)
        )
        return {"run_id": run.run_id, "spec": run.spec, "basis": connection.execute(basis).scalar() or ""}


def _newest_completed(shape: str, num_runs: int) -> Select[tuple[str]]:
    return (
        select(RUNS.c.run_id)
        .where(RUNS.c.shape == shape, RUNS.c.state == RunState.COMPLETED.value)
        .order_by(RUNS.c.created_at.desc())
        .limit(num_runs)
    )


def goodput_of_runs(store: HistoryStore, since: datetime | None = None, until: datetime | None = None) -> list[Facts]:
    """Where the time of every run went that was asked for from ``since`` on and before ``until`` (view
    ``all_goodput``), oldest first."""
    question = select(ALL_GOODPUT).order_by(ALL_GOODPUT.c.created_at, ALL_GOODPUT.c.run_id)
    if since is not None:
        question = question.where(ALL_GOODPUT.c.created_at >= since)
    if until is not None:
        question = question.where(ALL_GOODPUT.c.created_at < until)
    with store.reading() as connection:
        # Row by row: thousands of them held at once make Python search its whole heap for garbage every few questions.
        rows = connection.execute(question)
        names = tuple(rows.keys())
        return [{**dict(zip(names, row, strict=True)), "created_at": row.created_at.isoformat()} for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# Which run


def list_runs(
    store: HistoryStore,
    state: str | None = None,
    name: str | None = None,
    limit: int | None = 50,
    *,
    trials: bool = False,
    owner: str | None = None,
    tag: str | None = None,
) -> list[Facts]:
    """Runs, newest first.

    Args:
        state: only those in this state.
        name: only those of this name.
        limit: at most so many; None for all.
        trials: also the trials of runs.
        owner: only those that this user asked for.
        tag: only those with this tag.

    Returns: For each: ``run_id, name, state, created_at, num_attempts, owner, tags, ended_at, seconds, last_step,
        total_steps, missing_steps, message, trial_of, regressed``. ``seconds`` is from the request to the end, or to
        the newest sign of it; ``missing_steps`` says of which steps a run that is over has no metrics; ``regressed``
        has the held-out scores that fell (``name, metric, before, after``).
    """
    # Which runs first, from narrow indexes; what is counted per run, only for those.
    newest_first = (RUNS.c.created_at.desc(), RUNS.c.run_id.desc())
    wanted = select(RUNS.c.run_id).order_by(*newest_first).limit(limit)
    for asked, is_so in (
        (state, RUNS.c.state == state),
        (name, RUNS.c.name == name),
        (owner, RUNS.c.owner == owner),
        (tag, RUNS.c.run_id.in_(select(TAGS.c.run_id).where(TAGS.c.tag == tag))),
    ):
        if asked is not None:
            wanted = wanted.where(is_so)
    if not trials:
        wanted = wanted.where(RUNS.c.trial_of == "")
    chosen = wanted.subquery()
    num_attempts = select(func.count()).where(ATTEMPTS.c.run_id == RUNS.c.run_id).scalar_subquery()
    last_step = select(func.max(LATEST.c.step)).where(LATEST.c.run_id == RUNS.c.run_id).scalar_subquery()
    question = (
        select(
            RUNS.c.run_id,
            RUNS.c.name,
            RUNS.c.state,
            RUNS.c.created_at,
            num_attempts.label("num_attempts"),
            RUNS.c.owner,
            RUNS.c.tags,
            RUNS.c.ended_at,
            RUNS.c.progress_at,
            last_step.label("last_step"),
            RUNS.c.total_steps,
            RUNS.c.message,
            RUNS.c.trial_of,
        )
        .join(chosen, chosen.c.run_id == RUNS.c.run_id)
        .order_by(*newest_first)
    )
    with store.reading() as connection:
        rows = connection.execute(question).all()
        whole = _with_every_step(connection, chosen)
        missing = {row.run_id: _missing_steps(connection, row) for row in rows if row.run_id not in whole}
        measured = connection.execute(
            select(EVALUATIONS).join(chosen, chosen.c.run_id == EVALUATIONS.c.run_id).order_by(EVALUATIONS.c.name)
        ).all()
    evaluations: dict[str, list[Facts]] = {}
    for row in measured:
        evaluations.setdefault(row.run_id, []).append({**row._mapping, "when": row.when_made})
    return [_listed_run(row, missing.get(row.run_id, ""), evaluations.get(row.run_id, ())) for row in rows]


def _step_times() -> ColumnElement[bool]:
    """Rows of the one metric that every step of our trainers has."""
    return METRICS.c.key_id == select(KEYS.c.key_id).where(KEYS.c.name == "time/step_s").scalar_subquery()


def _with_every_step(connection: Connection, chosen: Subquery) -> set[str]:
    """Runs that have a metric of each step, counted by the database for all of a list at once."""
    counted = (
        select(METRICS.c.run_id)
        .join(chosen, chosen.c.run_id == METRICS.c.run_id)
        .join(RUNS, RUNS.c.run_id == METRICS.c.run_id)
        .where(_step_times())
        .group_by(METRICS.c.run_id, RUNS.c.total_steps)
        .having(func.count(METRICS.c.step.distinct()) >= RUNS.c.total_steps)
    )
    return set(connection.execute(counted).scalars())


def _missing_steps(connection: Connection, row: Any) -> str:
    """Steps without metrics of a run that is over; see :func:`missing_steps`."""
    if row.state not in {state.value for state in RUN_ENDS}:
        return ""
    # Of that one metric, from the index; of all where a foreign trainer does not write it.
    known: set[int] = set()
    for condition in (_step_times(), true()):
        known = known or set(
            connection.execute(
                select(METRICS.c.step).distinct().where(METRICS.c.run_id == row.run_id, condition)
            ).scalars()
        )
    return missing_steps(known, row.total_steps, row.state)


def _listed_run(row: Any, missing: str, evaluations: Sequence[Facts]) -> Facts:
    facts = {**row._mapping, "missing_steps": missing}
    progress_at = facts.pop("progress_at")
    facts["seconds"] = ((row.ended_at or progress_at) - row.created_at).total_seconds()
    return {**_plain(facts), "regressed": _regressed(evaluations)}


def _regressed(evaluations: Iterable[Facts]) -> list[Facts]:
    """The held-out scores that fell, ready for JSON."""
    return [one.model_dump() for one in regressions(evaluations)]


def resolve_run(store: HistoryStore, text: str) -> str:
    """The run that a person means: its id, ``last`` for the newest, a name for the newest of that name, or the
    beginning of one id. A trial is meant only by its id.

    Raises:
        UnknownRun: there is none, or the beginning fits several.
    """
    newest_first = (RUNS.c.created_at.desc(), RUNS.c.run_id.desc())
    own = select(RUNS.c.run_id).where(RUNS.c.trial_of == "").order_by(*newest_first).limit(1)
    with store.reading() as connection:
        questions = [select(RUNS.c.run_id).where(RUNS.c.run_id == text)]
        if text == "last":
            questions.append(own)
        questions.append(own.where(RUNS.c.name == text))
        for question in questions:
            found = connection.execute(question).scalar()
            if found is not None:
                return str(found)
        beginning = select(RUNS.c.run_id).where(RUNS.c.run_id.startswith(text, autoescape=True))
        fitting = list(connection.execute(beginning.order_by(*newest_first).limit(6)).scalars()) if text else []
    if len(fitting) == 1:
        return str(fitting[0])
    if fitting:
        listed = ", ".join(fitting[:5]) + (" ..." if len(fitting) > 5 else "")
        raise UnknownRun(f"{text!r} fits several runs: {listed}. Give more of the id.")
    raise UnknownRun(f"the history has no run {text!r}. `rlhf runs` lists them; `last` is the newest.")


def run_dir_of(store: HistoryStore, run_id: str) -> str:
    """Where the run's directory lay when it was ingested.

    Raises:
        UnknownRun: there is no such run.
    """
    with store.reading() as connection:
        found = connection.execute(select(RUNS.c.run_dir).where(RUNS.c.run_id == run_id)).scalar()
    if found is None:
        raise UnknownRun(f"the history has no run {run_id!r}. `rlhf runs` lists them.")
    return str(found)


# ---------------------------------------------------------------------------------------------------------------------
# One run


def show_run(store: HistoryStore, run_id: str) -> Facts:
    """Everything about a run, in the shape of ``rlhf show --json``, as of one moment.

    Returns: ``run`` (with ``spec``), ``stages``, ``checks`` (the newest finding of each), ``attempts``, ``restarts``,
        ``incidents``, ``decisions``, ``checkpoints``, ``evaluations``, ``regressed`` (held-out scores
        that fell: ``name, metric, before, after``); further ``controllers`` (who drove it, with the
        page in Prefect, the newest last), ``promotion`` (where that of its model stands; empty without one),
        ``metrics`` (newest value of each), ``metric_keys``, ``goodput`` (view ``run_goodput``) and ``lost_time`` (view
        ``run_lost_time``).

    Raises:
        UnknownRun: there is no such run.
    """
    with store.reading() as connection:
        run = connection.execute(select(RUNS).where(RUNS.c.run_id == run_id)).one_or_none()
        if run is None:
            raise UnknownRun(f"the history has no run {run_id!r}. `rlhf runs` lists them.")
        attempts = _attempts(connection, run_id)
        metrics = _latest_metrics(connection, run_id)
        incidents = _parts(connection, INCIDENTS, run_id, "seen_at", "incident_id")
        evaluations = _evaluations(connection, run_id)
        return {
            "run": {**_run(run, len(attempts)), "missing_steps": _missing_steps(connection, run)},
            "stages": _stages(connection, run_id),
            "checks": _checks(connection, run_id),
            "attempts": attempts,
            "controllers": _parts(connection, CONTROLLERS, run_id, "position"),
            "promotion": next(iter(_parts(connection, PROMOTIONS, run_id)), {}),
            "restarts": _restarts(connection, run_id),
            "incidents": incidents,
            "decisions": _parts(connection, DECISIONS, run_id, "decided_at", "decision_id"),
            "checkpoints": _parts(connection, CHECKPOINTS, run_id, "step"),
            "evaluations": evaluations,
            "regressed": _regressed(evaluations),
            "metrics": metrics,
            "metric_keys": sorted(metrics),
            "goodput": _goodput(connection, run_id),
            "lost_time": _view(connection, LOST_TIME, run_id, "failure_kind") if incidents else [],
        }


def _run(row: Any, num_attempts: int) -> Facts:
    facts = _plain(row._mapping)
    for internal in ("journal_token", "ingest_stamp"):
        del facts[internal]
    return {**facts, "num_attempts": num_attempts}


def _stages(connection: Connection, run_id: str) -> list[Facts]:
    rows = connection.execute(select(STAGES).where(STAGES.c.run_id == run_id).order_by(STAGES.c.stage_index)).all()
    found = []
    for row in rows:
        seconds = row.seconds if row.seconds is not None else (utc_now() - row.started_at).total_seconds()
        found.append({**_without_run(row), "seconds": seconds})
    return found


def _checks(connection: Connection, run_id: str) -> list[Facts]:
    rows = connection.execute(
        select(CHECKS).where(CHECKS.c.run_id == run_id).order_by(CHECKS.c.attempt, CHECKS.c.round, CHECKS.c.position)
    ).all()
    newest: dict[tuple[str, str], Facts] = {}
    for row in rows:
        facts = _without_run(row)
        identity = facts.pop("check_id")
        for internal in ("round", "position"):
            del facts[internal]
        newest.pop((identity, row.node), None)  # so that the order is that of the newest round
        newest[identity, row.node] = {"id": identity, **facts}
    return list(newest.values())


def _attempts(connection: Connection, run_id: str) -> list[Facts]:
    rows = connection.execute(select(ATTEMPTS).where(ATTEMPTS.c.run_id == run_id).order_by(ATTEMPTS.c.number)).all()
    nodes: dict[int, list[str]] = {}
    for attempt, node in connection.execute(
        select(NODES.c.attempt, NODES.c.node)
        .where(NODES.c.run_id == run_id)
        .order_by(NODES.c.attempt, NODES.c.node_index, NODES.c.node)
    ):
        nodes.setdefault(attempt, []).append(node)
    found = []
    for row in rows:
        facts = _without_run(row)
        # An attempt that was lost left no outcome; how it ended is then what its controller found.
        ended_as = row.state if row.state in _ENDED_ATTEMPTS else None
        found.append({**facts, "nodes": nodes.get(row.number, []), "outcome": row.outcome_state or ended_as})
    return found


def _restarts(connection: Connection, run_id: str) -> list[Facts]:
    """With ``first_step_at``, when the first step was done: null where none was."""
    first = (
        select(METRICS.c.attempt, METRICS.c.restart, func.min(METRICS.c.time).label("first_step_at"))
        .join(KEYS, KEYS.c.key_id == METRICS.c.key_id)
        .where(METRICS.c.run_id == run_id, KEYS.c.name == STEP_SECONDS)
        .group_by(METRICS.c.attempt, METRICS.c.restart)
    )
    done = {(row.attempt, row.restart): _plain_value(row.first_step_at) for row in connection.execute(first)}
    rows = _parts(connection, RESTARTS, run_id, "attempt", "restart")
    return [{**row, "first_step_at": done.get((row["attempt"], row["restart"]))} for row in rows]


def _evaluations(connection: Connection, run_id: str) -> list[Facts]:
    rows = connection.execute(select(EVALUATIONS).where(EVALUATIONS.c.run_id == run_id)).all()
    found = []
    for row in sorted(rows, key=lambda row: (row.when_made != "before", row.name)):
        facts = _without_run(row)
        found.append({"name": facts.pop("name"), "when": facts.pop("when_made"), **facts})
    return found


def _latest_metrics(connection: Connection, run_id: str) -> dict[str, Facts]:
    rows = connection.execute(
        select(KEYS.c.name, LATEST)
        .join(KEYS, KEYS.c.key_id == LATEST.c.key_id)
        .where(LATEST.c.run_id == run_id)
        .order_by(KEYS.c.name)
    ).all()
    return {
        row.name: {
            "value": row.non_finite or row.value,
            "step": row.step,
            "attempt": row.attempt,
            "restart": row.restart,
            "time": _plain_value(row.time),
        }
        for row in rows
    }


def _goodput(connection: Connection, run_id: str) -> Facts:
    """View ``run_goodput``, or what was kept of it: PostgreSQL takes longer to plan the view than to answer it."""
    kept = (
        select(*(column for column in KEPT_GOODPUT.c if column.name != "ingest_stamp"))
        .join(RUNS, (RUNS.c.run_id == KEPT_GOODPUT.c.run_id) & (RUNS.c.ingest_stamp == KEPT_GOODPUT.c.ingest_stamp))
        .where(KEPT_GOODPUT.c.run_id == run_id)
    )
    found = connection.execute(kept).one_or_none()
    if found is not None:
        return _without_run(found)
    rows = _view(connection, GOODPUT, run_id)
    return rows[0] if rows else {}


def latest_metrics(store: HistoryStore, run_id: str) -> dict[str, Facts]:
    """The newest value of each metric: ``value, step, attempt, restart, time``."""
    with store.reading() as connection:
        return _latest_metrics(connection, run_id)


def curve(store: HistoryStore, run_id: str, keys: Iterable[str] | None = None) -> dict[str, list[tuple[int, float]]]:
    """Effective metrics by step: where a step was made more than once, the value of the last time.

    Args:
        keys: names of metrics; None for all.

    Returns:
        Name -> (step, value) in the order of steps; values that are not finite are NaN or infinite floats.
    """
    question = select(CURVE.c.key, CURVE.c.step, CURVE.c.value, CURVE.c.non_finite).where(CURVE.c.run_id == run_id)
    wanted = None if keys is None else list(keys)
    if wanted is not None:
        question = question.where(CURVE.c.key.in_(wanted))
    found: dict[str, list[tuple[int, float]]] = {key: [] for key in wanted or ()}
    with store.reading() as connection:
        for key, step, value, non_finite in connection.execute(question.order_by(CURVE.c.key, CURVE.c.step)):
            found.setdefault(key, []).append((step, float(non_finite) if value is None else value))
    return found


def events(store: HistoryStore, run_id: str) -> list[Facts]:
    """What happened in a run, in the order of time."""
    with store.reading() as connection:
        return _parts(connection, EVENTS, run_id, "time", "source", "position")


def telemetry(store: HistoryStore, run_id: str, keys: Iterable[str] | None = None) -> dict[str, list[Facts]]:
    """Figures of the nodes over time: node -> readings in the order of time, each ``time, seconds, attempt, restart,
    figures``.

    Args:
        keys: names of figures; None for all.
    """
    wanted = None if keys is None else set(keys)
    question = (
        select(TELEMETRY)
        .where(TELEMETRY.c.run_id == run_id)
        .order_by(TELEMETRY.c.node, TELEMETRY.c.attempt, TELEMETRY.c.restart, TELEMETRY.c.position)
    )
    found: dict[str, list[Facts]] = {}
    with store.reading() as connection:
        for row in connection.execute(question):
            figures = {name: value for name, value in row.figures.items() if wanted is None or name in wanted}
            reading = {"time": _plain_value(row.time), "seconds": row.seconds}
            where = {"attempt": row.attempt, "restart": row.restart}
            found.setdefault(row.node, []).append({**reading, **where, "figures": figures})
    return found


def evaluation_samples(store: HistoryStore, run_id: str, when: str, name: str) -> list[Facts]:
    """The sample table of one evaluation."""
    question = (
        select(SAMPLES)
        .where(SAMPLES.c.run_id == run_id, SAMPLES.c.when_made == when, SAMPLES.c.name == name)
        .order_by(SAMPLES.c.position)
    )
    with store.reading() as connection:
        return [_without_run(row) for row in connection.execute(question)]


# ---------------------------------------------------------------------------------------------------------------------
# Any question


@dataclass(frozen=True)
class SqlResult:
    """Answer to a question in SQL."""

    columns: list[str]
    """Names of the columns."""
    rows: list[list[Any]]
    """Rows, in the order of the columns."""
    truncated: bool
    """Whether there were more rows than the limit."""


@dataclass(frozen=True)
class SqlAnswer:
    """Answer to a question in SQL, row by row."""

    columns: list[str]
    """Names of the columns."""
    rows: Iterator[list[Any]]
    """Rows, read as they are asked for; raises what :func:`answering` raises."""


def run_sql(
    store: HistoryStore,
    text: str,
    limit: int | None = None,
    values: Mapping[str, Any] | None = None,
    *,
    shipped: bool = False,
    clock: WorkClock | None = None,
) -> SqlResult:
    """Answer one SQL statement, in memory; see :func:`answering`.

    Args:
        limit: at most so many rows; None for all.

    Raises:
        BadInput: as :func:`answering`; or the answer is larger than 256 MiB.
    """
    rows: list[list[Any]] = []
    size = 0
    with answering(store, text, values, shipped=shipped, clock=clock) as answer:
        for row in answer.rows:
            rows.append(row)
            size += sum(map(sql_limits.size_of, row))
            if size > sql_limits.MAX_ANSWER_BYTES:
                raise BadInput(
                    f"the answer is larger than {sql_limits.MAX_ANSWER_BYTES >> 20} MiB after {len(rows)} rows: ask "
                    f"for fewer columns or rows (LIMIT), or have it printed row by row with --json"
                )
            if limit is not None and len(rows) > limit:
                break
    kept = rows if limit is None else rows[:limit]
    return SqlResult(answer.columns, kept, len(kept) < len(rows))


@contextmanager
def answering(
    store: HistoryStore,
    text: str,
    values: Mapping[str, Any] | None = None,
    *,
    shipped: bool = False,
    clock: WorkClock | None = None,
) -> Iterator[SqlAnswer]:
    """Answer one SQL statement, row by row. It cannot change anything, whatever it says: the database itself refuses
    (``database.forbid_writing``, ``database.ask_postgres``).

    Args:
        values: what is bound to the places for values in the text, in the form of the database's driver.
        shipped: the text comes with this program.
        clock: how long the database may work on it; five minutes where none is given.

    Raises:
        BadInput: it is not SQL, wants to change something, asks for what is not there, for a value that is too large,
            or takes too long.
        UnsafeDatabase: PostgreSQL could not be kept from changing something, as it is set up.
        DatabaseUnavailable: the database does not answer.
    """
    clock = clock or WorkClock(database.QUESTION_TIMEOUT_S)
    with store.reading() as connection:
        driver: Any = connection.connection.driver_connection
        connection.detach()  # closed afterwards: nobody else gets a connection that the user's text has touched
        is_sqlite = connection.dialect.name == "sqlite"
        errors = connection.dialect.loaded_dbapi.Error
        try:
            with _in_our_words(text, errors, clock):
                if is_sqlite:
                    database.forbid_writing(driver)
                    sql_limits.limit_sqlite(driver, clock)
                    batches = _sqlite_rows(driver, text, values, clock)
                else:
                    batches = database.ask_postgres(driver, text, values, store.url, clock, shipped=shipped)
                columns = next(batches)
            yield SqlAnswer([str(name) for name in columns], _plain_rows(batches, text, errors, clock))
        finally:
            if is_sqlite:
                driver.set_progress_handler(None, 0)
                driver.set_authorizer(None)  # the end of the transaction is ours
            else:
                driver.rollback()  # before 16, a read-only transaction may make large objects


def _sqlite_rows(
    driver: Any, text: str, values: Mapping[str, Any] | None, clock: WorkClock
) -> Iterator[Sequence[Sequence[Any]]]:
    """The names of the columns, then rows."""
    with clock.working():
        cursor = driver.execute(text, values or {})
    yield [described[0] for described in cursor.description or ()]
    while True:
        with clock.working():
            row = cursor.fetchone()
        if row is None:
            return
        yield [row]


def _plain_rows(
    batches: Iterator[Sequence[Any]], text: str, errors: type[Exception], clock: WorkClock
) -> Iterator[list[Any]]:
    while True:
        with _in_our_words(text, errors, clock):
            batch = next(batches, None)
        if batch is None:
            return
        for row in batch:
            yield [_plain_value(value) for value in row]


@contextmanager
def _in_our_words(text: str, errors: type[Exception], clock: WorkClock) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise BadInput("the database has no memory for this question: ask for fewer or smaller values") from None
    except errors as error:
        if "interrupted" in str(error) and clock.left_s > 0:
            raise KeyboardInterrupt from None
        raise _bad_question(text, error) from None


_NOT_THERE = ("no such table", "no such column", "does not exist")
_TOO_LONG = ("interrupted", "statement timeout")
_FORBIDDEN = (
    *("not authorized", "prohibited", "read-only", "readonly", "multiple commands", "one statement", "VACUUM"),
    *(
        "permission denied",
        "must be superuser",
        "must be a member",
        "must not contain data-modifying",
        "must not be",
        "not allowed",
    ),
)


_NO_QUESTION = re.compile(
    r'at or near "(ABORT|ALTER|ANALYZE|BEGIN|CALL|CHECKPOINT|CLOSE|CLUSTER|COMMENT|COMMIT|COPY|CREATE|DEALLOCATE'
    r"|DECLARE|DELETE|DISCARD|DO|DROP|EXECUTE|EXPLAIN|FETCH|GRANT|IMPORT|INSERT|LISTEN|LOAD|LOCK|MERGE|MOVE|NOTIFY|PREPARE"
    r"|REASSIGN|REFRESH|REINDEX|RELEASE|RESET|REVOKE|ROLLBACK|SAVEPOINT|SECURITY|SET|SHOW|START|TRUNCATE|UNLISTEN|UPDATE"
    r'|VACUUM)"',
    re.IGNORECASE,
)
"""What PostgreSQL's parser says of a statement that is no query; only for the words of the refusal."""


def _bad_question(text: str, error: Exception) -> BadInput:
    said = " ".join(str(error).split())
    if any(sign in said for sign in _FORBIDDEN) or _NO_QUESTION.search(said):
        return BadInput(
            f"refused: {text.strip()!r}. `rlhf sql` answers one reading statement (SELECT) at a time and changes "
            f"nothing. (The database says: {said})"
        )
    if any(sign in said for sign in _TOO_LONG):
        return BadInput(
            f"the question took longer than {database.QUESTION_TIMEOUT_S:g} s of the database's time and was given up: "
            f"ask about fewer runs, or with a join that has a condition"
        )
    if "too big" in said:
        return BadInput(
            f"a value of the question or of its answer is larger than {sql_limits.MAX_VALUE_BYTES >> 20} MiB, which "
            f"`rlhf sql` does not read: leave its column out"
        )
    if any(sign in said for sign in _NOT_THERE):
        names = sorted([*metadata.tables, *VIEWS])
        return BadInput(f"the question does not fit the tables: {said}. There are: {', '.join(names)}.")
    return BadInput(f"the database did not understand the question: {said}")


# ---------------------------------------------------------------------------------------------------------------------
# Plain data


def _parts(connection: Connection, part: Table, run_id: str, *order: str) -> list[Facts]:
    question = select(part).where(part.c.run_id == run_id).order_by(*(part.c[name] for name in order))
    return [_without_run(row) for row in connection.execute(question)]


def _view(connection: Connection, view: Any, run_id: str, *order: str) -> list[Facts]:
    question = select(view).where(view.c.run_id == run_id).order_by(*(view.c[name] for name in order))
    return [_without_run(row) for row in connection.execute(question)]


def _without_run(row: Any) -> Facts:
    facts = _plain(row._mapping)
    del facts["run_id"]
    return facts


def _plain(mapping: Mapping[str, Any]) -> Facts:
    return {name: _plain_value(value) for name, value in mapping.items()}


def _plain_value(value: Any) -> Any:
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case bytes():
            return value.hex()
        case None | bool() | int() | float() | str() | list() | dict():
            return value
        case _:
            return str(value)
