"""Helpers of the control-plane tests: a spec, an in-memory scheduler, and a fake agent that writes the real files."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from made_reports import checkpoint_manifest, evaluation_report, incident_of, rank_status

from rlhf_core.errors import SubmissionFailed
from rlhf_core.files.appended import append_lines
from rlhf_core.files.whole import write_model
from rlhf_core.launch.journal import Journal
from rlhf_core.launch.prepare import prepare
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest, JobState, JobStatus, LivingJob
from rlhf_core.schemas.attempts import AttemptState, Role, RunState, StageName, StageState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import FailureKind, Incident
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import AgentEvent, AgentStatus, AttemptOutcome, MetricsLine
from rlhf_core.schemas.resources import Inventory, Submission, job_marker
from rlhf_core.schemas.run import RunSpec

if TYPE_CHECKING:
    import pytest  # not when this runs as an agent

    from rlhf_core.watchdog.watcher import AttemptSnapshot

NODE = "n1"


def make_spec(**sections: Any) -> RunSpec:
    """A small spec that can run; keyword arguments replace whole sections or single fields."""
    content: dict[str, Any] = {
        "name": "small",
        "model": {"tokenizer": "char", "config": {"model_type": "qwen3", "hidden_size": 32}},
        "data": {"generator": "rlhf_core.training.tasks:sort_digits"},
        "train": {"num_steps": 8},
        "sft": {"num_steps": 2},
        "resources": {"ranks_per_node": 2},
        "supervise": {"backoff_s": 0},
    }
    for name, value in sections.items():
        content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
    return RunSpec.model_validate(content)


def training_snapshot(step: int, metrics: Mapping[str, float], **changes: Any) -> "AttemptSnapshot":
    """A snapshot of a first attempt that trains.

    Args:
        changes: to its progress.
    """
    from rlhf_core.watchdog.evidence import AttemptProgress
    from rlhf_core.watchdog.watcher import AttemptSnapshot, AttemptVerdict

    running = AttemptProgress(restart=0, role=Role.TRAINER, phase="train", loop="grpo", restart_of_step=0)
    return AttemptSnapshot(
        attempt=1,
        verdict=AttemptVerdict(AttemptState.RUNNING, ""),
        job=JobStatus(JobState.RUNNING, nodes=(NODE,)),
        progress=replace(running, step=step, metrics=metrics, **changes),
        events=(),
        outcome=None,
        history_behind="",
    )


def make_run(runs: Path, spec: RunSpec | None = None) -> RunDir:
    """A run directory as `rlhf run` creates it."""
    folder = runs.parent / "empty"
    folder.mkdir(parents=True, exist_ok=True)
    return prepare(spec or make_spec(), runs, config_source="small.toml", folder=folder)


def checked_run(runs: Path) -> RunDir:
    """A run that has passed preflight: the next controller submits its first attempt."""
    run_dir = make_run(runs)
    with closing(Journal(run_dir, 0)) as journal:
        journal.move_run(RunState.PREFLIGHT, "started")
        journal.end_stage(journal.begin_stage(StageName.PREFLIGHT, 0), StageState.COMPLETED)
        journal.move_run(RunState.QUEUED, "checked")
    return run_dir


class Clock:
    """A monotonic clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeJob:
    """A job of the fake scheduler."""

    run_id: str
    submission: Submission
    state: JobState = JobState.RUNNING


@dataclass
class FakeScheduler:
    """An in-memory scheduler. Jobs start at once unless ``first_state`` says otherwise.

    ``tests/scheduler/test_scheduler_contract.py`` checks that it behaves like the real ones.
    """

    name: str = "local"
    nodes: tuple[str, ...] = (NODE,)
    cpus_per_node: int = 8
    memory_gb: float = 32.0
    gpus_per_node: int = 0
    node_gpus: dict[str, int] = field(default_factory=dict)
    node_gpu_types: dict[str, str] = field(default_factory=dict)
    out_of_service: dict[str, str] = field(default_factory=dict)
    node_partitions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    node_features: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reservations: dict[str, str] = field(default_factory=dict)
    default_partition: str = ""
    first_state: JobState = JobState.RUNNING
    on_submit: Callable[[JobRequest], None] = lambda request: None
    """Called when a job is accepted: the immediate actions of its agent."""
    on_status: Callable[[], None] = lambda: None
    """Called before each answer: actions in the meantime."""
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    submitted: list[JobRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    output: str = ""
    """Text that a job leaves in the log of its folder; no log, where it is empty."""
    stubborn: bool = False
    """Jobs that cannot be ended."""

    def inventory(self) -> Inventory:
        return Inventory(
            node_names=self.nodes,
            cpus_per_node=self.cpus_per_node,
            memory_gb=self.memory_gb,
            gpus_per_node=self.gpus_per_node,
            node_gpus=self.node_gpus,
            node_gpu_types=self.node_gpu_types,
            out_of_service=self.out_of_service,
            node_partitions=self.node_partitions,
            node_features=self.node_features,
            reservations=self.reservations,
            default_partition=self.default_partition,
        )

    def script(self, request: JobRequest) -> str:
        return " ".join(request.command)

    def submit(self, request: JobRequest) -> Submission:
        if request.placement.num_nodes > len(self.nodes):
            raise SubmissionFailed(f"there are {len(self.nodes)} nodes, asked for {request.placement.num_nodes}")
        request.passed.values()  # as the real schedulers do: without the secrets nothing is submitted
        self.submitted.append(request)
        submission = Submission(
            attempt=request.placement.attempt,
            scheduler=self.name,
            job_id=str(100 + len(self.submitted)),
            command=request.command,
            marker=job_marker(request.run_id, request.placement.attempt),
        )
        if self.output:
            request.scheduler_dir.mkdir(parents=True, exist_ok=True)
            (request.scheduler_dir / f"{submission.job_id}_0_log.out").write_text(self.output)
        self.jobs[submission.job_id] = FakeJob(request.run_id, submission, self.first_state)
        self.on_submit(request)
        return submission

    def status(self, submissions: Sequence[Submission]) -> dict[str, JobStatus]:
        self.on_status()
        known = {job_id: job.state for job_id, job in self.jobs.items()}
        return {
            one.job_id: JobStatus(known.get(one.job_id, JobState.ENDED), nodes=self.nodes[:1]) for one in submissions
        }

    def find(self, run_id: str, attempt: int, cluster: str = "") -> Submission | None:
        for job in self.jobs.values():
            if (job.run_id, job.submission.attempt) == (run_id, attempt) and job.state is not JobState.ENDED:
                return job.submission
        return None

    def living(self) -> list[LivingJob]:
        return [LivingJob(job.run_id, job.submission) for job in self.jobs.values() if job.state is not JobState.ENDED]

    def cancel(self, submission: Submission) -> bool:
        self.cancelled.append(submission.job_id)
        job = self.jobs.get(submission.job_id)
        if job is None or job.state is JobState.ENDED:
            return True
        if not self.stubborn:
            job.state = JobState.ENDED
        return not self.stubborn

    def end_all(self) -> None:
        """End every job, as if everything had been killed."""
        for job in self.jobs.values():
            job.state = JobState.ENDED


@dataclass
class FakeAgent:
    """Agent that writes the files of a real agent and its workers."""

    run_dir: RunDir
    attempt: int = 1
    restart: int = 0

    def begin(self) -> None:
        """Claim the attempt."""
        path = self.run_dir.attempt(self.attempt).claim
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")

    def start(self) -> None:
        """Claim the attempt and start the trainer."""
        self.begin()
        self.role(Role.TRAINER)

    def role(self, role: Role) -> None:
        """Start a role and publish a status."""
        folder = self.run_dir.attempt(self.attempt).restart(self.restart)
        event = AgentEvent(time=utc_now(), kind="role_started", node=NODE, message=f"role {role} starts", role=role)
        append_lines(folder.events(NODE), event)
        self.status(role)

    def status(self, role: Role = Role.TRAINER, sequence: int = 1) -> None:
        """Publish a status."""
        folder = self.run_dir.attempt(self.attempt).restart(self.restart)
        ranks = tuple(rank_status(rank, role=role, step=0, process_state="R") for rank in (0, 1))
        status = AgentStatus(
            node=NODE,
            node_index=0,
            attempt=self.attempt,
            restart=self.restart,
            sequence=sequence,
            role=role,
            ranks=ranks,
        )
        write_model(folder.agent_status(NODE), status)

    def step(self, number: int, **metrics: float) -> None:
        """Make one optimizer step."""
        stage = "sft" if number <= 2 else "grpo"
        line = MetricsLine(step=number, time=utc_now(), stage=stage, metrics={"train/loss": 0.5, **metrics})
        append_lines(self.run_dir.attempt(self.attempt).restart(self.restart).metrics, line)

    def checkpoint(self, step: int, num_ranks: int = 2) -> None:
        """Publish a complete checkpoint without files."""
        manifest = checkpoint_manifest(step, loop="grpo", num_ranks=num_ranks)
        write_model(self.run_dir.checkpoint(step).complete, manifest)

    def evaluation(self, when: str, name: str, value: float) -> None:
        """Write an evaluation report."""
        write_model(self.run_dir.evaluation(when, name), evaluation_report(when, name, value))

    def probe(self, unfit: str) -> None:
        """Build the probe report that agent 0 writes if a node is too slow."""
        found = CheckResult(id="probe.matmul", status=CheckStatus.BLOCKED, found="slow", expected="fast", node=unfit)
        report = ProbeReport(attempt=self.attempt, results=(found,), made_at=utc_now())
        write_model(self.run_dir.attempt(self.attempt).probe_report, report)

    def incident(
        self, kind: FailureKind, fingerprint: str = "", health_rule: str = "", role: Role | None = None, phase: str = ""
    ) -> Incident:
        """Build the incident that agent 0 writes after a failure."""
        folder = self.run_dir.attempt(self.attempt).restart(self.restart)
        incident = incident_of(
            kind,
            self.attempt,
            self.restart,
            step=3,
            suspect_ranks=(1,),
            suspect_nodes=(NODE,),
            fingerprint=fingerprint,
            health_rule=health_rule,
            role=role,
            phase=phase,
            evidence_dir=str(folder.evidence_dir.relative_to(self.run_dir.root)),
        )
        folder.evidence_dir.mkdir(parents=True, exist_ok=True)
        write_model(folder.incident(0), incident)
        return incident

    def end(self, state: AttemptState, kind: FailureKind | None = None, message: str = "") -> None:
        """Write the outcome."""
        outcome = AttemptOutcome(
            attempt=self.attempt, state=state, failure_kind=kind, message=message or f"it {state.value}", time=utc_now()
        )
        write_model(self.run_dir.attempt(self.attempt).outcome, outcome)

    def fail(self, kind: FailureKind, *, message: str = "", **incident: Any) -> None:
        """Write an incident and the outcome that it has."""
        self.incident(kind, **incident)
        self.end(AttemptState.FAILED, kind, message)

    def whole_run(self, from_step: int = 0) -> None:
        """Write everything that a successful attempt leaves behind."""
        self.start()
        for step in range(from_step + 1, 11):
            self.step(step)
        self.checkpoint(10)
        self.evaluation("before", "greedy", 0.2)
        self.evaluation("after", "greedy", 0.9)
        self.role(Role.EVALUATOR)
        self.end(AttemptState.COMPLETED)


def only_scheduler(monkeypatch: "pytest.MonkeyPatch") -> FakeScheduler:
    """Make a fake the scheduler of this site for controllers and commands, without checks and without waiting."""
    found = FakeScheduler()
    for module in ("scheduler", "control.controller", "control.cancel", "control.gone_directory"):
        monkeypatch.setattr(f"rlhf_core.{module}.get_scheduler", lambda name: found)
    monkeypatch.setattr("rlhf_core.control.stages.make_checks", lambda spec, around, tick: ())
    monkeypatch.setattr("rlhf_core.control.cancel.CANCEL_TIMEOUT_S", 0.0)
    return found
