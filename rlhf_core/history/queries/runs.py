"""Reads of the list of runs."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, ScalarSelect, Subquery, func, select, true

from rlhf_core.errors import UnknownRun
from rlhf_core.history.queries.metrics import STEP_SECONDS
from rlhf_core.history.queries.plain import Facts, plain
from rlhf_core.history.queries.rows import ListedRun
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.sqlalchemy_core import (
    ATTEMPTS,
    EVALUATIONS,
    KEYS,
    LATEST,
    LEASES,
    METRICS,
    RUNS,
    TAGS,
    UNDRIVEN,
)
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RUN_ENDS, RunState
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.regression import regressions
from rlhf_core.schemas.run import NEWEST_RUN
from rlhf_core.text.formatting import missing_steps


def list_runs(
    store: HistoryStore,
    state: str | None = None,
    name: str | None = None,
    limit: int | None = 50,
    *,
    trials: bool = False,
    owner: str | None = None,
    tag: str | None = None,
) -> list[ListedRun]:
    """List runs, newest first.

    Args:
        state: only runs in this state.
        name: only runs of this name.
        limit: maximum number; None for all.
        trials: include the trials of runs.
        owner: only runs that this user requested.
        tag: only runs with this tag.
    """
    # First the ids, from narrow indexes, then counts only for those.
    newest_first = (RUNS.c.created_at.desc(), RUNS.c.run_id.desc())
    wanted = select(RUNS.c.run_id).order_by(*newest_first).limit(limit)
    for value, condition in (
        (state, RUNS.c.state == state),
        (name, RUNS.c.name == name),
        (owner, RUNS.c.owner == owner),
        (tag, RUNS.c.run_id.in_(select(TAGS.c.run_id).where(TAGS.c.tag == tag))),
    ):
        if value is not None:
            wanted = wanted.where(condition)
    if not trials:
        wanted = wanted.where(RUNS.c.trial_of == "")
    chosen = wanted.subquery()
    num_attempts = select(func.count()).where(ATTEMPTS.c.run_id == RUNS.c.run_id).scalar_subquery()
    # After a rewind, a rarely logged metric still has its value of a later step, which no longer counts.
    newest = (LATEST.c.attempt.desc(), LATEST.c.restart.desc(), LATEST.c.step.desc())
    last_step = select(LATEST.c.step).where(LATEST.c.run_id == RUNS.c.run_id).order_by(*newest).limit(1)
    undriven_s = func.coalesce(undriven_seconds(RUNS.c.run_id), 0.0)
    query = (
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
            LEASES.c.expires_at,
            last_step.scalar_subquery().label("last_step"),
            RUNS.c.total_steps,
            RUNS.c.message,
            RUNS.c.trial_of,
            undriven_s.label("undriven_s"),
            no_nodes_since().label("no_nodes_since"),
        )
        .join(chosen, chosen.c.run_id == RUNS.c.run_id)
        .outerjoin(LEASES, LEASES.c.run_id == RUNS.c.run_id)
        .order_by(*newest_first)
    )
    with store.reading() as connection:
        rows = connection.execute(query).all()
        now = store.time(connection)
        whole = _with_every_step(connection, chosen)
        missing = missing_steps_of(connection, [row for row in rows if row.run_id not in whole])
        measured = connection.execute(
            select(EVALUATIONS).join(chosen, chosen.c.run_id == EVALUATIONS.c.run_id).order_by(EVALUATIONS.c.name)
        ).all()
    evaluations: dict[str, list[Facts]] = {}
    for row in measured:
        evaluations.setdefault(row.run_id, []).append({**row._mapping, "when": row.when_made})
    return [
        _listed_run(row, lasted_until(row, now), missing.get(row.run_id, ""), evaluations.get(row.run_id, ()))
        for row in rows
    ]


def _step_times() -> ColumnElement[bool]:
    """Condition for rows of the metric that every step of the native trainers has."""
    return METRICS.c.key_id == select(KEYS.c.key_id).where(KEYS.c.name == STEP_SECONDS).scalar_subquery()


def _with_every_step(connection: Connection, chosen: Subquery) -> set[str]:
    """Find the runs that have metrics for each step, counted by the database for the whole list at once."""
    counted = (
        select(METRICS.c.run_id)
        .join(chosen, chosen.c.run_id == METRICS.c.run_id)
        .join(RUNS, RUNS.c.run_id == METRICS.c.run_id)
        .where(_step_times())
        .group_by(METRICS.c.run_id, RUNS.c.total_steps)
        .having(func.count(METRICS.c.step.distinct()) >= RUNS.c.total_steps)
    )
    return set(connection.execute(counted).scalars())


def missing_steps_of(connection: Connection, rows: Iterable[Any]) -> dict[str, str]:
    """List the steps without metrics of each ended run; see :func:`missing_steps`. External trainers are left out,
    because they may log only every tenth step, or none."""
    ended = {row.run_id: row for row in rows if row.state in RUN_ENDS}
    if not ended:
        return {}
    is_external = RUNS.c.spec["trainer"]["kind"].as_string() == "command"
    external = connection.execute(select(RUNS.c.run_id).where(RUNS.c.run_id.in_(ended), is_external)).scalars()
    known: dict[str, set[int]] = {run_id: set() for run_id in ended.keys() - set(external)}
    # From the index of that metric, or from all metrics if it is missing.
    for condition in (_step_times(), true()):
        runs = [run_id for run_id, steps in known.items() if not steps]
        for run_id, step in connection.execute(
            select(METRICS.c.run_id, METRICS.c.step).distinct().where(METRICS.c.run_id.in_(runs), condition)
        ):
            known[run_id].add(step)
    return {
        run_id: missing_steps(steps, ended[run_id].total_steps, ended[run_id].state) for run_id, steps in known.items()
    }


def undriven_seconds(run_id: ColumnElement[str]) -> ScalarSelect[float]:
    """Total time in which nothing drove a run, as a part of a query; null without such a time."""
    return select(func.sum(UNDRIVEN.c.seconds)).where(UNDRIVEN.c.run_id == run_id).scalar_subquery()


def no_nodes_since() -> ScalarSelect[datetime]:
    """Time since when no attempt of a queued run has got its nodes, as a part of a query of ``runs``; null for others.

    Counted from the end of the first of these attempts.
    """
    kind, others = FailureKind.NO_NODES.value, ATTEMPTS.alias()
    had_nodes = func.coalesce(others.c.failure_kind, "") != kind
    last_with_nodes = (
        select(func.coalesce(func.max(others.c.number), 0))
        .where(others.c.run_id == RUNS.c.run_id, others.c.ended_at.is_not(None), had_nodes)
        .correlate(RUNS)
        .scalar_subquery()
    )
    return (
        select(func.min(ATTEMPTS.c.ended_at))
        .where(ATTEMPTS.c.run_id == RUNS.c.run_id, RUNS.c.state == RunState.QUEUED.value)
        .where(ATTEMPTS.c.failure_kind == kind, ATTEMPTS.c.number > last_with_nodes)
        .correlate(RUNS)
        .scalar_subquery()
    )


def lasted_until(row: Any, now: datetime) -> datetime:
    """End of a run. One that has not ended lasts until now while a controller renews its lease, although a job in a
    queue writes nothing; otherwise until the lease expired, or the newest ingested line if that is later.

    Args:
        row: columns of the run, with ``expires_at`` of its lease; None without one.
        now: time by the clock for leases.
    """
    progress_at: datetime = row.progress_at
    return row.ended_at or max(progress_at, min(now, row.expires_at or progress_at))


def driven_seconds(run: Any, until: datetime, undriven_s: float) -> float:
    """Time from the request of a run to its end, without the undriven time."""
    return float((until - run.created_at).total_seconds() - undriven_s)


def _listed_run(row: Any, until: datetime, missing: str, evaluations: Sequence[Facts]) -> ListedRun:
    facts = plain(row._mapping)
    for internal in ("progress_at", "expires_at"):
        del facts[internal]
    facts |= {
        "missing_steps": missing,
        "seconds": driven_seconds(row, until, row.undriven_s),
        "regressed": regressions(evaluations),
    }
    return cast("ListedRun", facts)


def resolve_run(store: HistoryStore, text: str) -> str:
    """Find a run by its id, ``last`` for the newest, a name for the newest of that name, or a unique prefix of an id. A
    trial is found only by its id, or by a prefix of it with which no other run begins.

    Raises:
        UnknownRun: no run or several runs match.
    """
    newest_first = (RUNS.c.created_at.desc(), RUNS.c.run_id.desc())
    own = select(RUNS.c.run_id).where(RUNS.c.trial_of == "").order_by(*newest_first).limit(1)
    with store.reading() as connection:
        queries = [select(RUNS.c.run_id).where(RUNS.c.run_id == text)]
        if text == NEWEST_RUN:
            queries.append(own)
        queries.append(own.where(RUNS.c.name == text))
        for query in queries:
            found = connection.execute(query).scalar()
            if found is not None:
                return str(found)
        fitting: list[str] = []
        beginning = select(RUNS.c.run_id).where(RUNS.c.run_id.startswith(text, autoescape=True))
        # Trials have the names of their runs, so most prefixes of a run fit its trials too.
        for query in (beginning.where(RUNS.c.trial_of == ""), beginning) if text else ():
            fitting = fitting or list(connection.execute(query.order_by(*newest_first).limit(6)).scalars())
    if len(fitting) == 1:
        return str(fitting[0])
    if fitting:
        listed = ", ".join(fitting[:5]) + (" ..." if len(fitting) > 5 else "")
        raise UnknownRun(f"{text!r} matches several runs: {listed}. Give more characters of the id.")
    if text == NEWEST_RUN:
        raise UnknownRun("the history has no run yet. `rlhf run CONFIG` starts one.")
    raise UnknownRun(f"the history has no run {text!r}. `rlhf runs` lists them; `last` is the newest.")


def run_dir_of(store: HistoryStore, run_id: str) -> RunDir:
    """Find the directory of a run, as of its last ingestion.

    Raises:
        UnknownRun: the run does not exist.
    """
    with store.reading() as connection:
        found = connection.execute(select(RUNS.c.run_dir).where(RUNS.c.run_id == run_id)).scalar()
    if found is None:
        raise UnknownRun(f"the history has no run {run_id!r}. `rlhf runs` lists them.")
    return RunDir(Path(found))
