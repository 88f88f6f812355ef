"""Details of one run."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import Connection, func, literal, select

from rlhf_core.errors import UnknownRun
from rlhf_core.history.queries.metrics import STEP_SECONDS, are_pruned, newest_metrics
from rlhf_core.history.queries.plain import Facts, plain, plain_value, rows_of, without_run
from rlhf_core.history.queries.rows import (
    AttemptRow,
    CheckpointRow,
    CheckResultRow,
    DecisionRow,
    EvaluationRow,
    GoodputRow,
    IncidentRow,
    LostTimeRow,
    MetricValue,
    PromotionRow,
    RestartRow,
    RunControllerRow,
    RunRow,
    StageRow,
    WeightSyncs,
)
from rlhf_core.history.queries.runs import (
    driven_seconds,
    lasted_until,
    missing_steps_of,
    no_nodes_since,
    undriven_seconds,
)
from rlhf_core.history.queries.weight_syncs import summarised_syncs
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.sqlalchemy_core import (
    ATTEMPTS,
    CHECKPOINTS,
    CHECKS,
    CONTROLLERS,
    DECISIONS,
    EVALUATIONS,
    GOODPUT,
    GOODPUT_CACHE,
    INCIDENTS,
    KEYS,
    LEASES,
    LOST_TIME,
    METRICS,
    NODES,
    PROMOTIONS,
    RESTARTS,
    RUNS,
    SAMPLES,
    STAGES,
)
from rlhf_core.schemas.attempts import ATTEMPT_ENDS
from rlhf_core.schemas.evaluation import display_order
from rlhf_core.schemas.failures import Action
from rlhf_core.schemas.regression import Regression, regressions


@dataclass(frozen=True)
class RunDetails:
    """All details of a run, as of one moment."""

    run: RunRow
    stages: list[StageRow]
    checks: list[CheckResultRow]
    """Those of the newest preflight, and the newest result of each on nodes."""
    attempts: list[AttemptRow]
    controllers: list[RunControllerRow]
    """Newest last."""
    promotion: PromotionRow | None
    restarts: list[RestartRow]
    incidents: list[IncidentRow]
    """Oldest first."""
    decisions: list[DecisionRow]
    """Oldest first."""
    checkpoints: list[CheckpointRow]
    """By step."""
    evaluations: list[EvaluationRow]
    regressed: tuple[Regression, ...]
    """Held-out scores that became worse."""
    metrics: dict[str, MetricValue]
    """Newest value of each metric."""
    metric_keys: list[str]
    goodput: GoodputRow
    weight_syncs: WeightSyncs | None
    """None if the rollout engines have no weights of their own."""
    lost_time: list[LostTimeRow]

    @property
    def last_step(self) -> int:
        """The last optimizer step, by the newest metrics; 0 without any.

        That of the newest start of the workers: after a rewind, a rarely logged metric still has its value of a later
        step.
        """
        starts = ((one["attempt"], one["restart"], one["step"]) for one in self.metrics.values())
        return max(starts, default=(0, 0, 0))[-1]

    @property
    def counted_incidents(self) -> list[IncidentRow]:
        """The incidents, each once: without those that view ``duplicate_incidents`` has."""
        places = {(one["attempt"], one["restart"]) for one in self.incidents if one["found_by"] == "controller"}
        survived = {one["decision_id"] for one in self.decisions if Action(one["action"]).leaves_running}
        return [
            one
            for one in self.incidents
            if one["found_by"] == "controller"
            or (one["attempt"], one["restart"]) not in places
            or one["incident_id"] in survived
        ]

    def document(self) -> Facts:
        """The format of ``rlhf show --json``, in which a promotion or weight syncs that the run lacks are empty."""
        return {
            **vars(self),
            "promotion": self.promotion or {},
            "regressed": [one.model_dump() for one in self.regressed],
            "weight_syncs": self.weight_syncs or {},
        }


def show_run(store: HistoryStore, run_id: str) -> RunDetails:
    """Read all details of a run.

    Raises:
        UnknownRun: the run does not exist.
    """
    with store.reading() as connection:
        columns = (*RUNS.c, LEASES.c.expires_at, no_nodes_since().label("no_nodes_since"))
        with_lease = select(*columns).outerjoin_from(RUNS, LEASES, LEASES.c.run_id == RUNS.c.run_id)
        run = connection.execute(with_lease.where(RUNS.c.run_id == run_id)).one_or_none()
        if run is None:
            raise UnknownRun(f"the history has no run {run_id!r}. `rlhf runs` lists them.")
        attempts = _attempts(connection, run_id)
        metrics = newest_metrics(connection, run_id)
        incidents = rows_of(connection, INCIDENTS, IncidentRow, run_id, "seen_at", "incident_id")
        evaluations = _evaluations(connection, run_id)
        until = lasted_until(run, store.time(connection))
        return RunDetails(
            run=_run(connection, run, len(attempts), until),
            stages=_stages(connection, run_id, until),
            checks=_checks(connection, run_id),
            attempts=attempts,
            controllers=rows_of(connection, CONTROLLERS, RunControllerRow, run_id, "position"),
            promotion=next(iter(rows_of(connection, PROMOTIONS, PromotionRow, run_id)), None),
            restarts=_restarts(connection, run_id),
            incidents=incidents,
            decisions=rows_of(connection, DECISIONS, DecisionRow, run_id, "decided_at", "decision_id"),
            checkpoints=rows_of(connection, CHECKPOINTS, CheckpointRow, run_id, "step"),
            evaluations=evaluations,
            regressed=regressions(evaluations),
            metrics=metrics,
            metric_keys=sorted(metrics),
            goodput=_goodput(connection, run_id),
            weight_syncs=summarised_syncs(connection, run_id, is_active=run.ended_at is None),
            lost_time=rows_of(connection, LOST_TIME, LostTimeRow, run_id, "failure_kind") if incidents else [],
        )


def _run(connection: Connection, row: Any, num_attempts: int, until: datetime) -> RunRow:
    facts = plain(row._mapping)
    for internal in ("journal_token", "ingest_stamp", "expires_at"):
        del facts[internal]
    undriven_s = connection.execute(select(undriven_seconds(literal(row.run_id)))).scalar() or 0.0
    facts |= {
        "num_attempts": num_attempts,
        "missing_steps": missing_steps_of(connection, [row]).get(row.run_id, ""),
        "seconds": driven_seconds(row, until, undriven_s),
        "undriven_s": undriven_s,
        "metrics_pruned": are_pruned(connection, row.run_id),
    }
    return cast("RunRow", facts)


def _stages(connection: Connection, run_id: str, until: datetime) -> list[StageRow]:
    """Read the stages of a run; one that has not ended lasts as long as the run."""
    rows = connection.execute(select(STAGES).where(STAGES.c.run_id == run_id).order_by(STAGES.c.stage_index)).all()
    found = []
    for row in rows:
        seconds = row.seconds if row.seconds is not None else max((until - row.started_at).total_seconds(), 0.0)
        found.append(cast("StageRow", {**without_run(row), "seconds": seconds}))
    return found


def _checks(connection: Connection, run_id: str) -> list[CheckResultRow]:
    rows = connection.execute(
        select(CHECKS).where(CHECKS.c.run_id == run_id).order_by(CHECKS.c.attempt, CHECKS.c.round, CHECKS.c.check_index)
    ).all()
    # Each round before the attempts has all findings: those that it lacks were fixed, and many checks pass silently.
    last = max((row.round for row in rows if not row.attempt), default=0)
    rows = [row for row in rows if row.attempt or row.round == last]
    # A check may have several findings in a round, for instance one for each data file.
    newest = {(row.check_id, row.node): (row.attempt, row.round) for row in rows}
    found = []
    for row in rows:
        if (row.attempt, row.round) == newest[row.check_id, row.node]:
            facts = without_run(row)
            for internal in ("round", "check_index"):
                del facts[internal]
            found.append(cast("CheckResultRow", {"id": facts.pop("check_id"), **facts}))
    return found


def _attempts(connection: Connection, run_id: str) -> list[AttemptRow]:
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
        # A lost attempt has no outcome: its state is then the one found by its controller.
        ended_as = row.state if row.state in ATTEMPT_ENDS else None
        more = {"nodes": nodes.get(row.number, []), "outcome": row.outcome_state or ended_as}
        found.append(cast("AttemptRow", without_run(row) | more))
    return found


def _restarts(connection: Connection, run_id: str) -> list[RestartRow]:
    first = (
        select(METRICS.c.attempt, METRICS.c.restart, func.min(METRICS.c.time).label("first_step_at"))
        .where(METRICS.c.run_id == run_id)
        .group_by(METRICS.c.attempt, METRICS.c.restart)
    )
    timed = first.join(KEYS, KEYS.c.key_id == METRICS.c.key_id).where(KEYS.c.name == STEP_SECONDS)
    found = connection.execute(timed).all() or connection.execute(first).all()
    done = {(row.attempt, row.restart): plain_value(row.first_step_at) for row in found}
    rows = rows_of(connection, RESTARTS, RestartRow, run_id, "attempt", "restart")
    return [{**row, "first_step_at": done.get((row["attempt"], row["restart"]))} for row in rows]


def _evaluations(connection: Connection, run_id: str) -> list[EvaluationRow]:
    rows = connection.execute(select(EVALUATIONS).where(EVALUATIONS.c.run_id == run_id)).all()
    found = []
    for row in sorted(rows, key=lambda row: (row.when_made != "before", display_order(row.name))):
        facts = without_run(row)
        found.append(cast("EvaluationRow", {"name": facts.pop("name"), "when": facts.pop("when_made"), **facts}))
    return found


def _goodput(connection: Connection, run_id: str) -> GoodputRow:
    """Read view ``run_goodput`` or its cache: PostgreSQL takes longer to plan the view than to run it."""
    columns = [column for column in GOODPUT_CACHE.c if column.name != "ingest_stamp"]
    cached = (
        select(*columns)
        .join(RUNS, (RUNS.c.run_id == GOODPUT_CACHE.c.run_id) & (RUNS.c.ingest_stamp == GOODPUT_CACHE.c.ingest_stamp))
        .where(GOODPUT_CACHE.c.run_id == run_id)
    )
    found = connection.execute(cached).one_or_none()
    if found is None:
        view = select(*(GOODPUT.c[column.name] for column in columns)).where(GOODPUT.c.run_id == run_id)
        found = connection.execute(view).one()
    return cast("GoodputRow", without_run(found))


def evaluation_samples(store: HistoryStore, run_id: str, when: str, name: str) -> list[Facts]:
    """Read the samples of one evaluation."""
    query = (
        select(SAMPLES)
        .where(SAMPLES.c.run_id == run_id, SAMPLES.c.when_made == when, SAMPLES.c.name == name)
        .order_by(SAMPLES.c.row_index)
    )
    with store.reading() as connection:
        return [without_run(row) for row in connection.execute(query)]
