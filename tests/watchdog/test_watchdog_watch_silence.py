"""The second net: a job that runs and whose agents are all silent. With what must never be taken for that."""

from pathlib import Path

import pytest
from control_fakes import FakeAgent, make_run, make_spec

from rlhf_core.errors import SchedulerError
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir import RunDir, write_model
from rlhf_core.scheduler.base import JobState, JobStatus
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, FailureKind, Incident
from rlhf_core.schemas.journal import IncidentFound
from rlhf_core.schemas.resources import Placement, Role, Submission
from rlhf_core.watchdog import evidence
from rlhf_core.watchdog.watch import BLIND_S, SILENT_S, Look, Watcher, explain

RUNNING = JobStatus(JobState.RUNNING, scheduler_state="RUNNING")
SUSPENDED = JobStatus(JobState.RUNNING, scheduler_state="SUSPENDED")
LOOK_EVERY_S = 10.0


class World:
    """One attempt, its job and a clock; nothing happens unless a test says so."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.answer: JobStatus | Exception = RUNNING
        self.run_dir = make_run(folder / "runs")
        self.agent = FakeAgent(self.run_dir)
        placement = Placement(attempt=1, num_nodes=1, roles=())
        write_model(self.run_dir.attempt(1).placement, placement)
        submission = Submission(attempt=1, scheduler="slurm", job_id="101", command=())
        self.watcher = Watcher(self.run_dir, placement, submission, self, None, lambda: self.now)  # type: ignore[arg-type]

    def status(self, submissions: object) -> dict[str, JobStatus]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"101": self.answer}

    def pass_by(self, seconds: float, every_s: float = LOOK_EVERY_S) -> Look:
        """Look again and again for so long; the last look."""
        until = self.now + seconds
        look = self.watcher.look()
        while self.now < until:
            self.now += every_s
            look = self.watcher.look()
        return look


@pytest.fixture
def world(tmp_path: Path) -> World:
    one = World(tmp_path)
    one.agent.begin()
    one.agent.role(Role.TRAINER)
    return one


def test_a_job_whose_agents_are_all_silent_is_given_up(world: World) -> None:
    assert world.pass_by(SILENT_S).verdict.state is AttemptState.RUNNING
    look = world.pass_by(LOOK_EVERY_S)
    assert (look.verdict.state, look.verdict.failure_kind) == (AttemptState.LOST, FailureKind.AGENT_KILLED)
    failure = explain(world.run_dir, look, make_spec(), first_attempt=1)
    assert failure.decision.action is Action.NEW_ATTEMPT
    assert "have said nothing for 130 s" in failure.message
    assert "ended without" not in failure.message, "they have not ended"


def test_agents_that_are_heard_are_left_alone(world: World) -> None:
    """Negative control: ten times as long, with a sign of life now and then."""
    for sequence in range(2, 22):
        world.agent.status(sequence=sequence)
        assert world.pass_by(SILENT_S / 2).verdict.state is AttemptState.RUNNING


@pytest.mark.parametrize(
    "answer",
    [SUSPENDED, JobStatus(JobState.PENDING), JobStatus(JobState.UNKNOWN), SchedulerError("no answer")],
    ids=["suspended", "waiting", "unknown", "no answer"],
)
def test_silence_counts_only_while_the_scheduler_says_that_the_job_runs(
    world: World, answer: JobStatus | Exception
) -> None:
    world.pass_by(LOOK_EVERY_S)
    world.answer = answer
    assert world.pass_by(10 * SILENT_S).verdict.state is not AttemptState.LOST
    world.answer = RUNNING
    assert world.pass_by(SILENT_S - LOOK_EVERY_S).verdict.state is AttemptState.RUNNING, "counted from here"
    assert world.pass_by(2 * LOOK_EVERY_S).verdict.state is AttemptState.LOST


def test_agents_that_have_not_begun_are_waited_for(tmp_path: Path) -> None:
    assert World(tmp_path).pass_by(10 * SILENT_S).verdict.state is AttemptState.RUNNING


def test_a_controller_that_stood_still_blames_nobody(world: World) -> None:
    look = world.pass_by(10 * SILENT_S, every_s=BLIND_S + 1)
    assert look.verdict.state is AttemptState.RUNNING


def test_a_full_disk_makes_agents_silent_but_not_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "can_be_written", lambda attempt: False)
    assert world.pass_by(2 * SILENT_S).verdict.state is AttemptState.RUNNING
    monkeypatch.undo()
    assert world.pass_by(LOOK_EVERY_S).verdict.state is AttemptState.LOST
    assert sorted(path.name for path in world.run_dir.attempt(1).root.glob(".can*")) == []


def test_who_was_given_up_stays_so_but_an_outcome_counts(world: World) -> None:
    """Between finding and deciding the agents may wake up; the finding must not change under the decision."""
    world.pass_by(SILENT_S + LOOK_EVERY_S)
    world.agent.status(sequence=2)
    assert world.pass_by(LOOK_EVERY_S).verdict.state is AttemptState.LOST
    world.agent.end(AttemptState.COMPLETED)
    assert world.pass_by(LOOK_EVERY_S).verdict.state is AttemptState.COMPLETED


# ---------------------------------------------------------------------------------------------------------------------
# Strikes that the controller finds itself


def agent_killed(run_dir: RunDir, attempt: int) -> Incident:
    return Incident(
        attempt=attempt,
        restart=0,
        failure_kind=FailureKind.AGENT_KILLED,
        message=f"task of node3 was killed in attempt {attempt}",
        suspect_nodes=("node3",),
        seen_at=utc_now(),
    )


def test_what_the_controller_finds_is_a_strike_too(world: World) -> None:
    """An agent that is killed writes no incident; so the second time its node could never be excluded."""
    journal = Journal(world.run_dir, 1)
    first = agent_killed(world.run_dir, 1)
    assert evidence.strikes(world.run_dir, first) == {"node3": 1}
    journal.append(IncidentFound(incident=first))
    assert evidence.strikes(world.run_dir, first) == {"node3": 1}, "written down already: no second strike"
    assert evidence.strikes(world.run_dir, agent_killed(world.run_dir, 2)) == {"node3": 2}
    journal.close()


def test_a_node_whose_agent_is_killed_twice_is_excluded(world: World) -> None:
    log = "srun: error: node3: task 2: Killed\n"
    excluded = []
    journal = Journal(world.run_dir, 1)
    for number in (1, 2):
        attempt = world.run_dir.attempt(number)
        placement = Placement(attempt=number, num_nodes=1, roles=())
        write_model(attempt.placement, placement)
        FakeAgent(world.run_dir, attempt=number).begin()
        attempt.scheduler_dir.mkdir(parents=True)
        (attempt.scheduler_dir / "7_0_log.out").write_text(log)
        one = Watcher(world.run_dir, placement, None, world, None, lambda: world.now)  # type: ignore[arg-type]
        one.look()
        world.now += 10
        failure = explain(world.run_dir, one.look(), make_spec(), first_attempt=1)
        assert failure.kind is FailureKind.AGENT_KILLED
        assert failure.incident is not None
        journal.append(IncidentFound(incident=failure.incident))
        excluded.append(failure.decision.excluded_nodes)
    journal.close()
    assert excluded == [(), ("node3",)]
