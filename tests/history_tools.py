"""Helpers for the tests of history, ingestion and their commands.

Run directories made by hand, database dumps, and a throw-away PostgreSQL server.
"""

import atexit
import functools
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from control_fakes import make_run
from history_template import sqlite_template
from made_reports import checkpoint_manifest, decision_of, evaluation_report, incident_of, rank_status, stored_spec
from postgres_server import PostgresServer
from sqlalchemy import Engine, create_engine, text

from rlhf_core.config.site import Site, load_site
from rlhf_core.files.appended import append_lines
from rlhf_core.files.whole import write_model
from rlhf_core.history import migrate, saved_queries
from rlhf_core.history.database import parse_url
from rlhf_core.history.saved_queries import SqlResult
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import CleanJson, CleanText, UtcDateTime, metadata
from rlhf_core.launch.journal import Journal
from rlhf_core.launch.lease import Owner
from rlhf_core.machine.accounts import user_name
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import AttemptState, Role, RunState, StageName, StageState
from rlhf_core.schemas.checkpoint_files import FileChecksum
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.data import DataSpec
from rlhf_core.schemas.evaluation import EvaluationSample
from rlhf_core.schemas.failures import Action, FailureKind, Incident
from rlhf_core.schemas.journal import (
    AttemptMoved,
    AttemptPlanned,
    AttemptSubmitted,
    ChecksMade,
    ControlEvent,
    DecisionMade,
    IncidentFound,
    JournalLine,
    RunCreated,
    RunMoved,
    StageEnded,
    StageStarted,
)
from rlhf_core.schemas.loops import LoopsSpec
from rlhf_core.schemas.model import ModelSpec
from rlhf_core.schemas.probe import NodeSpeed, PairSpeed, ProbeReport
from rlhf_core.schemas.reports import AgentEvent, AgentStatus, AttemptOutcome, MetricsLine, TelemetryLine
from rlhf_core.schemas.resources import GroupPlan, Placement, Submission, in_order
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.weight_sync import WeightSyncLine
from rlhf_core.watchdog.ingest import sync

T0 = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
"""Creation time of the runs made here."""


def small_loops(num_steps: int, warm_start: int = 0) -> LoopsSpec:
    """The loops of a GRPO run after a supervised warm start of a few steps."""
    supervised = {"num_steps": warm_start, "algorithm": {"name": "sft"}, "optimizer": {"learning_rate": 1e-4}}
    main = {"num_steps": num_steps, "algorithm": {"name": "grpo"}, "optimizer": {"learning_rate": 1e-6}}
    return LoopsSpec.model_validate({"warm_start": supervised, "main": main})


def at(seconds: float) -> datetime:
    """A point in time, in seconds after :data:`T0`."""
    return T0 + timedelta(seconds=seconds)


class RunFiles:
    """A run directory written by hand, with the same files as controller, agents and trainer write."""

    def __init__(
        self, runs: Path, name: str = "sort", tail: str = "aaaaaa", created: float = 0.0, trial_of: str = ""
    ) -> None:
        self.run_id = f"{name}-{at(created):%Y%m%d-%H%M%S}-{tail}"
        self.dir = RunDir.of(runs, self.run_id)
        self._sequence = 0
        self.token = 1
        spec = RunSpec(
            name=name,
            seed=7,
            model=ModelSpec(config={"model_type": "qwen3"}, tokenizer="char"),
            data=DataSpec(train="train.jsonl"),
            loops=small_loops(8, 2),
        )
        stored = stored_spec(
            self.run_id,
            spec,
            at(created),
            owner="anna",
            config_source="sort.toml",
            overrides=("train.num_steps=8",),
            package_version="0.1.0",
            trial_of=trial_of,
            tags=("nightly", name),
        )
        write_model(self.dir.spec, stored)

    def journal(self, event: ControlEvent, seconds: float, token: int | None = None) -> None:
        """Write a journal line of the controller."""
        line = JournalLine(
            sequence=self._sequence, token=self.token if token is None else token, time=at(seconds), event=event
        )
        self._sequence += 1
        append_lines(self.dir.control, line)

    def created(self) -> Self:
        """Write the first journal line."""
        self.journal(RunCreated(name="sort", owner="anna", config_source="sort.toml"), 0, token=0)
        return self

    def moved(self, state: RunState, seconds: float, cause: str = "because", token: int | None = None) -> None:
        """Record a state change of the run."""
        self.journal(RunMoved(state=state, cause=cause), seconds, token)

    def metrics(self, attempt: int, restart: int, step: int, seconds: float, **more: float) -> None:
        """Write a metrics line of trainer rank 0; each step takes two seconds."""
        values = {"train/loss": 1.0 / step + attempt + restart / 10, "time/step_s": 2.0, **more}
        line = MetricsLine(step=step, time=at(seconds), loop="sft" if step <= 2 else "grpo", metrics=values)
        append_lines(self.dir.attempt(attempt).restart(restart).metrics, line)

    def weight_sync(self, attempt: int, restart: int, number: int, seconds: float, **more: Any) -> None:
        """Write the lines of trainer rank 0 about a weight sync to two engines.

        The request, and the answers of the number of engines that ``acknowledged``.
        """
        file = self.dir.attempt(attempt).restart(restart).weight_syncs
        requested = WeightSyncLine(number=number, time=at(seconds), version=number + 2, engines=2)
        append_lines(file, requested)
        if "acknowledged" in more:
            answers = {"transport": "broadcast", "bytes": 2_000_000_000, "seconds": 0.5, "wire_s": 0.25, **more}
            append_lines(file, requested.model_copy(update={"time": at(seconds + 0.5), **answers}))

    def event(
        self,
        attempt: int,
        restart: int,
        kind: Any,
        seconds: float,
        node: str = "n1",
        role: Role = Role.TRAINER,
        **data: Any,
    ) -> None:
        """Write an event line of an agent."""
        message = f"{kind} on {node}"
        event = AgentEvent(time=at(seconds), kind=kind, node=node, message=message, role=role, data=data)
        append_lines(self.dir.attempt(attempt).restart(restart).events(node), event)

    def status(self, attempt: int, restart: int, sequence: int, node: str = "n1") -> None:
        """Build the status that an agent publishes."""
        rank = rank_status(0, pid=4711, sequence=9 * sequence, collectives=3, age_s=0.2, process_state="R")
        status = AgentStatus(
            node=node,
            node_index=int(node[1:]) - 1,
            attempt=attempt,
            restart=restart,
            sequence=sequence,
            role=Role.TRAINER,
            ranks=(rank,),
            telemetry={"cpu_percent": 42.0, "broken_sensor": float("nan")},
            longest_gaps_s={"trainer/rollout": 3.5, "trainer/train": 0.5},
        )
        write_model(self.dir.attempt(attempt).restart(restart).agent_status(node), status)

    def telemetry(self, attempt: int, restart: int, seconds: float, node: str = "n1", **figures: float) -> None:
        """Write a telemetry line of an agent, for ten seconds of its node."""
        line = TelemetryLine(time=at(seconds), seconds=10.0, figures={"cpu_percent": 42.0, **figures})
        append_lines(self.dir.attempt(attempt).restart(restart).telemetry(node), line)

    def incident(self, attempt: int, restart: int, kind: FailureKind, seconds: float, **more: Any) -> Incident:
        """Record an incident found by agent 0."""
        facts = {"suspect_ranks": (1,), "suspect_nodes": ("n2",), "step": 4, "phase": "rollout", **more}
        incident = incident_of(
            kind,
            attempt,
            restart,
            message=f"{kind.value} in {attempt}.{restart}",
            seen_at=at(seconds),
            evidence_dir=f"attempts/{attempt}/restarts/{restart}/incident",
            **facts,
        )
        write_model(self.dir.attempt(attempt).restart(restart).incident(incident.number), incident)
        return incident

    def decision(self, attempt: int, restart: int, action: Action, seconds: float, number: int = 0) -> None:
        """Record a decision of agent 0."""
        decision = decision_of(action, attempt, restart, number=number, decided_at=at(seconds))
        write_model(self.dir.attempt(attempt).restart(restart).decision(number), decision)

    def planned(self, attempt: int, seconds: float, resumed_from: int = 0, num_nodes: int = 1) -> None:
        """Record an attempt that the controller planned and submitted and whose agents started."""
        placement = Placement(
            attempt=attempt,
            num_nodes=num_nodes,
            phases=in_order(GroupPlan.on_all_nodes(Role.TRAINER, 2, 1)),
            resume_checkpoint=f"step-{resumed_from:06d}" if resumed_from else "",
            resumed_from_step=resumed_from,
        )
        submission = Submission(attempt=attempt, scheduler="local", job_id=f"j{attempt}", command=("python",))
        self.journal(AttemptPlanned(placement=placement), seconds)
        self.journal(AttemptSubmitted(submission=submission), seconds + 0.5)
        self.journal(AttemptMoved(attempt=attempt, state=AttemptState.RUNNING, cause="agents are there"), seconds + 1.5)

    def without_nodes(self, attempt: int, seconds: float, kind: FailureKind = FailureKind.NO_NODES) -> None:
        """Record an attempt whose nodes did not start, and the decision for the next one."""
        self.planned(attempt, seconds)
        self.journal(IncidentFound(incident=incident_of(kind, attempt, message="down~", seen_at=at(seconds))), seconds)
        decision = decision_of(Action.NEW_ATTEMPT, attempt, reason="it waits", decided_at=at(seconds))
        self.journal(DecisionMade(decision=decision), seconds)
        self.journal(AttemptMoved(attempt=attempt, state=AttemptState.LOST, cause="down~", failure_kind=kind), seconds)

    def probe(self, attempt: int, nodes: Sequence[str], seconds: float, matmul_tflops: float = 0.1) -> None:
        """Build the probe report of a healthy attempt, with the speeds of its nodes."""
        found = CheckResult(id="node.content", status=CheckStatus.PASSED, found=f"the same on all {len(nodes)} nodes")
        pairs = (PairSpeed(peer=1, gb_s=2.0, latency_ms=0.1),)
        speeds = tuple(
            NodeSpeed(node=node, device="cpu x 1 threads", matmul_tflops=matmul_tflops, pairs=pairs, reached=("done",))
            for node in nodes
        )
        report = ProbeReport(attempt=attempt, results=(found,), speeds=speeds, seconds=4.0, made_at=at(seconds))
        write_model(self.dir.attempt(attempt).probe_report, report)

    def outcome(self, attempt: int, state: AttemptState, seconds: float, last_step: int) -> None:
        """Write the outcome of agent 0."""
        outcome = AttemptOutcome(
            attempt=attempt, state=state, message="it ended", last_step=last_step, time=at(seconds)
        )
        write_model(self.dir.attempt(attempt).outcome, outcome)

    def checkpoint(self, step: int, seconds: float, weights: str = "aa") -> None:
        """Write a checkpoint of the trainer."""
        files = {
            "model/config.json": FileChecksum(bytes=10, sha256="00"),
            "model/model.safetensors": FileChecksum(bytes=1000, sha256=weights),
            "trainer_state/rank-0.pt": FileChecksum(bytes=500, sha256="11"),
        }
        manifest = checkpoint_manifest(step, loop="grpo", num_ranks=2, spec_hash="feed", files=files, time=at(seconds))
        write_model(self.dir.checkpoint(step).complete, manifest)

    def evaluation(self, when: Any, name: Any, value: float, seconds: float) -> None:
        """Write a report of the evaluator."""
        samples = tuple(
            EvaluationSample(
                prompt_uid=f"p{i}", sample_index=0, prompt=f"{i}>", completion=f"{i}\x00", answer=str(i), score=i % 2
            )
            for i in range(3)
        )
        report = evaluation_report(
            when,
            name,
            value,
            ci_low=value - 0.05,
            ci_high=value + 0.05,
            num_prompts=512,
            num_samples=512,
            seconds=1.5,
            time=at(seconds),
            samples=samples,
        )
        write_model(self.dir.evaluation(when, name), report)


def whole_run(runs: Path, name: str = "sort", tail: str = "aaaaaa", created: float = 0.0) -> RunFiles:
    """Write a complete run: a restart in place at step 4 (back to 3), a second attempt from step 4, and its end."""
    run = RunFiles(runs, name, tail, created).created()
    run.moved(RunState.PREFLIGHT, 1, "checking")
    run.journal(StageStarted(stage_index=0, name=StageName.PREFLIGHT, attempt=0), 1)
    passed = CheckResult(id="batch.divides_ranks", status=CheckStatus.PASSED, found="32 over 2 ranks")
    warned = CheckResult(
        id="disk.free", status=CheckStatus.WARNING, found="3 GiB free", expected="10 GiB", advice="make room"
    )
    run.journal(ChecksMade(results=(passed, warned)), 2)
    run.journal(StageEnded(stage_index=0, state=StageState.COMPLETED), 3)
    run.moved(RunState.QUEUED, 3, "checks passed")
    run.journal(StageStarted(stage_index=1, name=StageName.ALLOCATE, attempt=1), 3)
    run.planned(1, 4)  # submitted at 4.5, running at 5.5
    run.journal(StageEnded(stage_index=1, state=StageState.COMPLETED), 5.5)
    run.moved(RunState.TRAINING, 6, "workers are there")
    run.journal(StageStarted(stage_index=2, name=StageName.TRAIN, attempt=1), 6)
    run.event(1, 0, "agent_started", 6)
    run.probe(1, ("n1", "n2"), 6.5)
    for step in (1, 2, 3, 4):
        run.metrics(1, 0, step, 8 + 2 * step)  # ends at 10, 12, 14, 16
    for number in (0, 1):
        run.weight_sync(1, 0, number, 12.8 + number, acknowledged=2, apply_s=0.2)
    run.weight_sync(1, 1, 0, 18.5, acknowledged=1)
    run.weight_sync(1, 1, 1, 29)  # the attempt ends here
    run.checkpoint(2, 12.5)
    run.evaluation("before", "greedy", 0.75, 12.6)
    run.evaluation("before", "sampled", 0.30, 12.7)
    run.status(1, 0, 7)
    run.incident(1, 0, FailureKind.WORKER_KILLED, 17, detected_after_s=0.3)
    run.decision(1, 0, Action.RESTART_IN_PLACE, 17.1)
    run.event(1, 1, "role_started", 18)
    for step in (3, 4, 5):
        run.metrics(1, 1, step, 16 + 2 * step)  # ends at 22, 24, 26
    run.checkpoint(4, 24.5)
    run.status(1, 1, 12)
    run.status(1, 1, 12, node="n2")
    for seconds in (20, 30):
        run.telemetry(1, 1, seconds)
        run.telemetry(1, 1, seconds, node="n2", gpu0_power_w=seconds * 10.0, broken_sensor=float("nan"))
    run.incident(1, 1, FailureKind.NODE_LOST, 30)
    run.outcome(1, AttemptState.FAILED, 31, 5)
    run.journal(
        AttemptMoved(
            attempt=1, state=AttemptState.FAILED, cause="node n2 was lost", failure_kind=FailureKind.NODE_LOST
        ),
        32,
    )
    run.journal(StageEnded(stage_index=2, state=StageState.FAILED, message="node n2 was lost"), 32)
    run.moved(RunState.QUEUED, 32, "another attempt without n2")
    run.journal(StageStarted(stage_index=3, name=StageName.ALLOCATE, attempt=2), 32)
    run.planned(2, 33, resumed_from=4)
    run.journal(StageEnded(stage_index=3, state=StageState.COMPLETED), 35)
    run.moved(RunState.TRAINING, 35, "workers are there")
    run.journal(StageStarted(stage_index=4, name=StageName.TRAIN, attempt=2), 35)
    for step in (5, 6, 7, 8, 9, 10):
        run.metrics(2, 0, step, 30 + 2 * step)  # ends at 40, 42 ... 50
    run.checkpoint(8, 46.5)
    run.checkpoint(10, 50.5, weights="bb")
    run.status(2, 0, 20)
    run.journal(StageEnded(stage_index=4, state=StageState.COMPLETED), 51)
    run.moved(RunState.EVALUATING, 51, "training is done")
    run.journal(StageStarted(stage_index=5, name=StageName.EVALUATE, attempt=2), 51)
    run.evaluation("after", "greedy", 0.93, 52)
    run.evaluation("after", "sampled", 0.80, 53)
    run.outcome(2, AttemptState.COMPLETED, 54, 10)
    run.journal(AttemptMoved(attempt=2, state=AttemptState.COMPLETED, cause="all roles ended well"), 54)
    run.journal(StageEnded(stage_index=5, state=StageState.COMPLETED), 54)
    run.moved(RunState.COMPLETED, 55, "exact match went from 0.75 to 0.93")
    return run


def synced(run: RunFiles, store: HistoryStore) -> RunFiles:
    """The same run, ingested into the history."""
    sync(run.dir, store)
    return run


def ingested(run: RunFiles) -> RunFiles:
    """The same run, ingested into the history of the site that the environment describes."""
    with HistoryStore(load_site().database_url) as store:
        return synced(run, store)


# ---------------------------------------------------------------------------------------------------------------------
# What the history has


def run_sql(store: HistoryStore, text: str, limit: int | None = None) -> SqlResult:
    """Result of a statement of a user."""
    return saved_queries.run(store, saved_queries.parse(text), {}, limit)


def table_row(table: str, now: datetime = T0, /, **facts: Any) -> dict[str, Any]:
    """A row of a table: what it must have and is not given is empty, or ``now``."""
    row = dict(facts)
    for column in metadata.tables[table].columns:
        if not (column.nullable or column.server_default or column.name in row or column.autoincrement is True):
            match column.type:
                case UtcDateTime():
                    row[column.name] = now
                case CleanJson():
                    row[column.name] = {}
                case CleanText():
                    row[column.name] = ""
                case plain:
                    row[column.name] = plain.python_type()
    return row


def events_of(store: HistoryStore, run_id: str) -> list[dict[str, Any]]:
    """Events of a run, by time."""
    events = metadata.tables["events"]
    of_run = events.select().where(events.c.run_id == run_id)
    by_time = of_run.order_by(events.c.time, events.c.source, events.c.position)
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(by_time).mappings()]


def dump(store: HistoryStore) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, without values that may differ between two ingestions of the same files.

    These are surrogate keys (replaced by the entities they identify), timestamps, leases, and the time at which a
    checkpoint was found to be removed.
    """
    found = {}
    with store.reading() as connection:
        names = dict(connection.execute(text("SELECT key_id, name FROM metric_keys")).all())
        for table in metadata.sorted_tables:
            if table.name in ("leases", "metric_keys"):
                continue
            rows = []
            for row in connection.execute(table.select()).mappings():
                facts = dict(row)
                facts.pop("ingest_stamp", None)
                if "key_id" in facts:
                    facts["key_id"] = names[facts["key_id"]]
                if facts.get("removed_at") is not None:
                    facts["removed_at"] = "removed"
                if table.name == "goodput_cache":  # SQLite's julianday() is off by some microseconds
                    facts = {
                        name: round(value, 3) if isinstance(value, float) else value for name, value in facts.items()
                    }
                rows.append(tuple(sorted((name, _stable(value)) for name, value in facts.items())))
            found[table.name] = sorted(rows)
    return found


def _stable(value: Any) -> str:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else repr(value)


GONE = str(Owner.this_process()).rpartition(":")[0] + ":1.00"
"""This process as if it had been started long ago: its number was given to another one since."""


@contextmanager
def living_controller() -> Iterator[Owner]:
    """A process that lives as long as the block and could be a controller."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield Owner(user_name(), socket.gethostname(), process.pid, psutil.Process(process.pid).create_time())
    finally:
        process.kill()
        process.wait()


def orphaned_run(site: Site) -> RunDir:
    """A run whose controller is dead."""
    run_dir = make_run(site.runs_dir)
    with closing(Journal(run_dir, 1)) as journal:
        journal.move_run(RunState.PREFLIGHT, "started")
    with HistoryStore(site.database_url) as store:
        store.acquire_lease(run_dir.run_id, GONE, 60)
        sync(run_dir, store)
    return run_dir


def remove_run(store: HistoryStore, run_id: str) -> None:
    """Remove every row of a run except its lease."""
    with store.writing() as connection:
        connection.execute(text("DELETE FROM runs WHERE run_id = :run"), {"run": run_id})


# ---------------------------------------------------------------------------------------------------------------------
# Databases


def new_sqlite(folder: Path) -> str:
    """URL of a new, migrated SQLite file."""
    file = folder / "history.db"
    shutil.copy(sqlite_template(), file)
    return f"sqlite:///{file}"


class PostgresDatabases(PostgresServer):
    """A PostgreSQL server for this test session, and its databases; stopped at the end of the session."""

    def __init__(self) -> None:
        super().__init__()
        atexit.register(self.remove)
        self._count = 0
        self._migrated = self.empty_database()
        migrate.upgrade(parse_url(self._migrated))
        self.make_reader(self._migrated, "rlhf")  # connects as a superuser, limited to this role

    def migrated_database(self) -> str:
        """URL of a migrated database without rows.

        Always the same database, because making one takes longer than most tests. Emptied by DELETE, because TRUNCATE
        creates every table and index anew.
        """
        import psycopg

        deletions = [f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables)]
        with psycopg.connect(self._migrated) as connection:
            connection.execute("; ".join([*deletions, "SELECT setval('metric_keys_key_id_seq', 1, false)"]))
        return self._migrated

    def empty_database(self, encoding: str = "UTF8", settings: Sequence[str] = ()) -> str:
        """URL of a new database without tables.

        Args:
            settings: server settings that differ in this database, as ``name = value``.
        """
        self._count += 1
        engine = self._admin()
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE test_{self._count} TEMPLATE template0 ENCODING '{encoding}'"))
            for setting in settings:
                connection.execute(text(f"ALTER DATABASE test_{self._count} SET {setting}"))
        engine.dispose()
        return self.url(f"test_{self._count}")

    def admin_environment(self) -> dict[str, str]:
        """Environment variables with which PostgreSQL's own programs connect to this server as its superuser."""
        return {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGUSER": "rlhf", "PGDATABASE": "postgres"}

    def make_reader(self, url: str, owner: str) -> None:
        """Create the read-only role in a database, as ``infra/reader.sql`` defines it."""
        psql = shutil.which("psql") or self._programs / "psql"
        script = Path(__file__).parents[1] / "infra" / "reader.sql"
        subprocess.run([psql, "-q", "-d", url, "-v", f"owner={owner}", "-f", script], check=True)

    def superuser(self) -> Any:
        """Connect as the server's superuser, without SQLAlchemy."""
        import psycopg

        return psycopg.connect(self.url(), autocommit=True)

    def _admin(self) -> Engine:
        return create_engine(parse_url(self.url()), isolation_level="AUTOCOMMIT")


@functools.cache
def _postgres() -> PostgresDatabases | str:
    try:
        return PostgresDatabases()
    except LookupError as missing:
        return str(missing)


def postgres() -> PostgresDatabases:
    """PostgreSQL server, started on first use; skips the test if it is not available."""
    server = _postgres()
    if isinstance(server, str):
        pytest.skip(server)
    return server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a new, migrated database; every test that uses it runs on both kinds."""
    return new_sqlite(tmp_path) if request.param == "sqlite" else postgres().migrated_database()


@pytest.fixture
def store(database_url: str) -> Iterator[HistoryStore]:
    """A history in a new database."""
    with HistoryStore(database_url) as store:
        yield store


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Folder of run directories."""
    return tmp_path / "runs"
