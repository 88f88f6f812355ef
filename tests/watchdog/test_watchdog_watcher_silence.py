"""The second net: a running job whose agents are all silent, and conditions that only look like it."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from control_fakes import FakeAgent, make_run, make_spec
from made_reports import incident_of

from rlhf_core.diagnosis.policy import excluded_after
from rlhf_core.errors import SchedulerError
from rlhf_core.files.appended import append_lines
from rlhf_core.files.whole import write_model
from rlhf_core.launch.journal import Journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState, JobStatus
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, FailureKind, Incident
from rlhf_core.schemas.journal import IncidentFound, JournalLine
from rlhf_core.schemas.reports import AgentEvent, AgentStatus, AttemptOutcome
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.watchdog import evidence
from rlhf_core.watchdog.attempt_failure import explain
from rlhf_core.watchdog.silence import BLIND_S, SILENT_S, UNSTARTED_S
from rlhf_core.watchdog.watcher import LEADER_LOST_TIMEOUT_S, AttemptSnapshot, Watcher

RUNNING = JobStatus(JobState.RUNNING, scheduler_state="RUNNING")
SUSPENDED = JobStatus(JobState.RUNNING, scheduler_state="SUSPENDED")
POLL_INTERVAL_S = 10.0


class World:
    """One attempt, its job and a clock; nothing happens except through the test."""

    def __init__(self, folder: Path, *nodes: str) -> None:
        self.now = 0.0
        self.job: JobStatus | Exception = replace(RUNNING, nodes=nodes)
        self.run_dir = make_run(folder / "runs")
        self.agent = FakeAgent(self.run_dir)
        placement = Placement(attempt=1, num_nodes=max(1, len(nodes)), phases=())
        write_model(self.run_dir.attempt(1).placement, placement)
        submission = Submission(attempt=1, scheduler="slurm", job_id="101", command=())
        self.watcher = Watcher(self.run_dir, placement, submission, self, None, lambda: self.now)  # type: ignore[arg-type]
        self._sequence = 0

    def status(self, submissions: object) -> dict[str, JobStatus]:
        if isinstance(self.job, Exception):
            raise self.job
        return {"101": self.job}

    def publish(self, *nodes: str) -> None:
        """Have the agents of some of the nodes n1 and n2 publish their status."""
        self._sequence += 1
        restart = self.run_dir.attempt(1).restart(0)
        for index, node in enumerate(("n1", "n2")):
            if node in nodes:
                numbers = {"attempt": 1, "restart": 0, "sequence": self._sequence, "node_index": index}
                write_model(restart.agent_status(node), AgentStatus(node=node, role=Role.TRAINER, ranks=(), **numbers))

    def add_event(self, node: str, **data: object) -> None:
        event = {"time": utc_now(), "kind": "peer", "node": node, "message": "lost", "data": data}
        append_lines(self.run_dir.attempt(1).restart(0).events(node), AgentEvent.model_validate(event))

    def pass_by(self, seconds: float, *publishing: str, every_s: float = POLL_INTERVAL_S) -> AttemptSnapshot:
        """Poll repeatedly for a period, while the agents of these nodes publish; returns the last poll."""
        until = self.now + seconds
        snapshot = self.watcher.poll()
        while self.now < until:
            self.now += every_s
            self.publish(*publishing)
            snapshot = self.watcher.poll()
        return snapshot


@pytest.fixture
def world(tmp_path: Path) -> World:
    one = World(tmp_path)
    one.agent.begin()
    one.agent.role(Role.TRAINER)
    return one


def test_a_job_whose_agents_are_all_silent_is_abandoned(world: World) -> None:
    assert world.pass_by(SILENT_S).verdict.state is AttemptState.RUNNING
    snapshot = world.pass_by(POLL_INTERVAL_S)
    assert (snapshot.verdict.state, snapshot.verdict.failure_kind) == (AttemptState.LOST, FailureKind.AGENT_KILLED)
    failure = explain(world.run_dir, snapshot, make_spec(), first_attempt=1)
    assert failure.decision.action is Action.NEW_ATTEMPT
    assert "have been silent for 130 s" in failure.message
    assert "ended without" not in failure.message, "they have not ended"


def test_agents_that_report_are_left_alone(world: World) -> None:
    """Negative control: ten times as long, with an occasional sign of life."""
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
    world.pass_by(POLL_INTERVAL_S)
    world.job = answer
    assert world.pass_by(10 * SILENT_S).verdict.state is not AttemptState.LOST
    world.job = RUNNING
    assert world.pass_by(SILENT_S - POLL_INTERVAL_S).verdict.state is AttemptState.RUNNING, "counted from here"
    assert world.pass_by(2 * POLL_INTERVAL_S).verdict.state is AttemptState.LOST


def test_agents_that_have_not_started_are_awaited(tmp_path: Path) -> None:
    assert World(tmp_path).pass_by(10 * SILENT_S).verdict.state is AttemptState.RUNNING


def test_a_job_whose_agents_never_start_is_abandoned(tmp_path: Path) -> None:
    world = World(tmp_path)
    limit_s = make_spec().supervise.join_s + UNSTARTED_S
    assert world.pass_by(limit_s).verdict.state is AttemptState.RUNNING
    snapshot = world.pass_by(POLL_INTERVAL_S)
    assert (snapshot.verdict.state, snapshot.verdict.failure_kind) == (AttemptState.LOST, FailureKind.RENDEZVOUS)
    failure = explain(world.run_dir, snapshot, make_spec(), first_attempt=1)
    assert (failure.decision.action, failure.decision.excluded_nodes) == (Action.NEW_ATTEMPT, ())
    assert "no agent has started for 4210 s" in failure.message


@pytest.mark.parametrize("trace", ["claim", "restarts/0"])
def test_agents_that_have_started_are_not_missed(tmp_path: Path, trace: str) -> None:
    """They wait for each other, and end the attempt by themselves."""
    world = World(tmp_path)
    (world.run_dir.attempt(1).root / trace).mkdir(parents=True)
    assert world.pass_by(2 * (make_spec().supervise.join_s + UNSTARTED_S)).verdict.state is AttemptState.RUNNING


def test_a_controller_that_was_paused_blames_no_node(world: World) -> None:
    snapshot = world.pass_by(10 * SILENT_S, every_s=BLIND_S + 1)
    assert snapshot.verdict.state is AttemptState.RUNNING


def test_a_full_disk_makes_agents_silent_but_not_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "can_be_written", lambda attempt: False)
    assert world.pass_by(2 * SILENT_S).verdict.state is AttemptState.RUNNING
    monkeypatch.undo()
    assert world.pass_by(POLL_INTERVAL_S).verdict.state is AttemptState.LOST
    assert sorted(path.name for path in world.run_dir.attempt(1).root.glob(".can*")) == []


def test_an_abandoned_job_stays_abandoned_but_an_outcome_counts(world: World) -> None:
    """Agents may wake up between finding and decision; the finding must not change before the decision."""
    world.pass_by(SILENT_S + POLL_INTERVAL_S)
    world.agent.status(sequence=2)
    assert world.pass_by(POLL_INTERVAL_S).verdict.state is AttemptState.LOST
    world.agent.end(AttemptState.COMPLETED)
    assert world.pass_by(POLL_INTERVAL_S).verdict.state is AttemptState.COMPLETED


# ---------------------------------------------------------------------------------------------------------------------
# Each agent by itself


@pytest.fixture
def pair(tmp_path: Path) -> World:
    """An attempt on two nodes."""
    one = World(tmp_path, "n1", "n2")
    one.publish("n1", "n2")
    return one


@pytest.mark.parametrize("silent", ["n1", "n2"])
def test_one_silent_agent_is_not_hidden_by_the_others(pair: World, silent: str) -> None:
    (other,) = {"n1", "n2"} - {silent}
    assert pair.pass_by(SILENT_S, other).verdict.state is AttemptState.RUNNING
    snapshot = pair.pass_by(2 * POLL_INTERVAL_S, other)
    assert (snapshot.verdict.state, snapshot.verdict.nodes) == (AttemptState.LOST, (silent,))
    failure = explain(pair.run_dir, snapshot, make_spec(), first_attempt=1)
    assert (failure.kind, failure.decision.excluded_nodes) == (FailureKind.NODE_LOST, (silent,))
    assert f"the agents of {silent} have been silent for" in failure.message.lower()


def test_a_file_system_that_stalls_for_all_blames_no_node(pair: World) -> None:
    """Control: nothing happens within the allowed time; after that the job is abandoned, and no node gets a strike."""
    assert pair.pass_by(SILENT_S).verdict.state is AttemptState.RUNNING
    pair.publish("n1", "n2")
    assert pair.pass_by(SILENT_S).verdict.state is AttemptState.RUNNING
    snapshot = pair.pass_by(2 * POLL_INTERVAL_S)
    assert (snapshot.verdict.failure_kind, snapshot.verdict.nodes) == (FailureKind.AGENT_KILLED, ())


@pytest.mark.parametrize(("reporting", "is_lost"), [(("n2", "n3"), True), (("n2",), False), ((), False)])
def test_the_node_of_agent_0_is_lost_when_all_others_have_lost_it(
    tmp_path: Path, reporting: tuple[str, ...], is_lost: bool
) -> None:
    """They report it within seconds, long before the scheduler notices. Controls: some are still at work."""
    world = World(tmp_path, "n1", "n2", "n3")
    for node in reporting:
        world.add_event(node, leader_lost=True)
    assert world.watcher.poll().verdict.state is AttemptState.RUNNING
    world.now += LEADER_LOST_TIMEOUT_S + 1
    snapshot = world.watcher.poll()
    assert snapshot.verdict.state is (AttemptState.LOST if is_lost else AttemptState.RUNNING)
    if is_lost:
        failure = explain(world.run_dir, snapshot, make_spec(), first_attempt=1)
        assert failure.incident is not None
        assert (failure.kind, failure.incident.suspect_nodes) == (FailureKind.NODE_LOST, ("n1",))
        assert (failure.decision.action, failure.decision.excluded_nodes) == (Action.NEW_ATTEMPT, ("n1",))


def test_a_job_ended_by_slurm_after_the_loss_of_agent_0_has_a_lost_node(pair: World) -> None:
    """The other agent ends at once, and the job with it: it is over before the wait for an outcome ends."""
    pair.add_event("n2", leader_lost=True)
    pair.job = JobStatus(JobState.ENDED, nodes=("n1", "n2"), scheduler_state="FAILED")
    assert pair.watcher.poll().verdict.state is AttemptState.RUNNING
    pair.now += LEADER_LOST_TIMEOUT_S / 2
    snapshot = pair.watcher.poll()
    assert (snapshot.verdict.failure_kind, snapshot.verdict.nodes) == (FailureKind.NODE_LOST, ("n1",))


def test_the_nodes_of_a_completing_job_are_those_it_had(tmp_path: Path) -> None:
    """Slurm names those that are not done yet: the first of them is not that of agent 0, and the last one is alone."""
    pair = World(tmp_path, "n1", "n2")
    pair.job = replace(RUNNING, nodes=("n1", "n2", "n3"))
    pair.watcher.poll()
    for node in ("n2", "n3"):
        pair.add_event(node, leader_lost=True)
    for left in (("n2", "n3"), ("n3",)):
        pair.job = JobStatus(JobState.RUNNING, nodes=left, scheduler_state="COMPLETING")
        pair.watcher.poll()
        pair.now += LEADER_LOST_TIMEOUT_S / 2 + 1
    snapshot = pair.watcher.poll()
    assert (snapshot.verdict.failure_kind, snapshot.verdict.nodes) == (FailureKind.NODE_LOST, ("n1",))


def outcome(seconds_ago: float, kind: FailureKind = FailureKind.PREEMPTION) -> AttemptOutcome:
    time = utc_now() - timedelta(seconds=seconds_ago)
    return AttemptOutcome(attempt=1, state=AttemptState.FAILED, failure_kind=kind, message="so it says", time=time)


def test_an_agent_0_that_wakes_up_does_not_explain_its_loss(pair: World) -> None:
    """Slurm wakes it to end the job, and that signal is all it knows about."""
    pair.add_event("n2", leader_lost=True)
    write_model(pair.run_dir.attempt(1).outcome, outcome(0.0))
    snapshot = pair.watcher.poll()
    assert (snapshot.verdict.failure_kind, snapshot.verdict.nodes) == (FailureKind.NODE_LOST, ("n1",))


def test_an_outcome_from_before_the_loss_of_agent_0_counts(pair: World) -> None:
    """Control: agent 0 had ended, and the other agent noticed late."""
    pair.add_event("n2", leader_lost=True)
    write_model(pair.run_dir.attempt(1).outcome, outcome(15.0, FailureKind.SHAPE))
    assert pair.watcher.poll().verdict.failure_kind is FailureKind.SHAPE


def test_two_nodes_that_have_lost_each_other_are_both_suspect(pair: World) -> None:
    """Both were alive, and it is unknown whose link drops packets; a first strike excludes neither."""
    pair.add_event("n2", leader_lost=True)
    pair.add_event("n1", node_lost="n2")
    accused = {"failure_kind": FailureKind.NODE_LOST, "message": "n2 is not heard", "suspect_nodes": ("n2",)}
    incident = Incident(attempt=1, restart=0, seen_at=utc_now(), **accused)
    write_model(pair.run_dir.attempt(1).restart(0).incident(0), incident)
    pair.watcher.poll()
    pair.now += LEADER_LOST_TIMEOUT_S + 1
    failure = explain(pair.run_dir, pair.watcher.poll(), make_spec(), first_attempt=1)
    assert failure.incident is not None
    assert (failure.kind, failure.incident.suspect_nodes) == (FailureKind.NETWORK, ("n1", "n2"))
    assert (failure.decision.action, failure.decision.excluded_nodes) == (Action.NEW_ATTEMPT, ())


# ---------------------------------------------------------------------------------------------------------------------
# Agents that never connected


def not_met(pair: World) -> None:
    """The agent of n2 reports that agent 0 did not connect, and exits; srun reports its exit."""
    message = "The agent of n1 did not arrive within 600 s (supervise.join_s), those of n2 did."
    pair.add_event("n2", not_met=message, blamed=["n1"])
    log = pair.run_dir.attempt(1).scheduler_dir / "7_0_log.out"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("srun: error: n2: task 1: Exited with exit code 1\n")
    pair.job = JobStatus(JobState.ENDED, nodes=("n1", "n2"), scheduler_state="FAILED")


def test_the_agent_that_waited_is_not_blamed_for_the_absent_one(pair: World) -> None:
    not_met(pair)
    failure = explain(pair.run_dir, pair.watcher.poll(), make_spec(), first_attempt=1)
    assert failure.incident is not None
    assert (failure.kind, failure.incident.suspect_nodes) == (FailureKind.RENDEZVOUS, ("n1",))
    assert (failure.decision.action, failure.decision.excluded_nodes) == (Action.NEW_ATTEMPT, ("n1",))
    assert failure.message.startswith("The agent of n1 did not arrive within 600 s")


def test_an_agent_0_that_starts_too_late_does_not_explain_its_absence(pair: World) -> None:
    """Slurm ends it with the job, and that signal is all it knows about."""
    not_met(pair)
    write_model(pair.run_dir.attempt(1).outcome, outcome(-1.0))
    snapshot = pair.watcher.poll()
    assert (snapshot.verdict.failure_kind, snapshot.verdict.nodes) == (FailureKind.RENDEZVOUS, ("n1",))


def test_an_outcome_from_before_an_agent_left_counts(pair: World) -> None:
    """Control: agent 0 decided first."""
    not_met(pair)
    write_model(pair.run_dir.attempt(1).outcome, outcome(5.0, FailureKind.NODE_UNFIT))
    assert pair.watcher.poll().verdict.failure_kind is FailureKind.NODE_UNFIT


def test_a_job_that_its_user_cancels_while_agents_wait_is_cancelled(pair: World) -> None:
    not_met(pair)
    pair.job = JobStatus(JobState.ENDED, nodes=("n1", "n2"), scheduler_state="CANCELLED")
    assert pair.watcher.poll().verdict.failure_kind is FailureKind.USER_CANCEL


def test_agents_that_cannot_connect_blame_no_node(pair: World) -> None:
    """Not even the one whose exit the log names. Only the first report counts, because its agent ended the job."""
    pair.add_event("n2", not_met="The agents of n1 and n2 both arrived, but did not connect: refused.", blamed=[])
    not_met(pair)
    failure = explain(pair.run_dir, pair.watcher.poll(), make_spec(), first_attempt=1)
    assert failure.incident is not None
    assert (failure.kind, failure.incident.suspect_nodes) == (FailureKind.RENDEZVOUS, ())
    assert failure.decision.excluded_nodes == ()


def test_a_node_whose_agent_is_still_awaited_is_not_silent(tmp_path: Path) -> None:
    """Agent 0 waits for it longer than the allowed silence."""
    one = World(tmp_path, "n1", "n2")
    one.publish("n1")
    assert one.pass_by(2 * SILENT_S, "n1").verdict.state is AttemptState.RUNNING


# ---------------------------------------------------------------------------------------------------------------------
# Strikes found by the controller itself


def agent_killed(run_dir: RunDir, attempt: int) -> Incident:
    return incident_of(FailureKind.AGENT_KILLED, attempt, suspect_nodes=("node3",))


def test_findings_of_the_controller_are_strikes_too(world: World) -> None:
    """A killed agent writes no incident, so without this its node could never be excluded the second time."""
    journal = Journal(world.run_dir, 1)
    first = agent_killed(world.run_dir, 1)
    assert evidence.strikes(world.run_dir, first) == {"node3": 1}
    journal.append(IncidentFound(incident=first))
    assert evidence.strikes(world.run_dir, first) == {"node3": 1}, "already recorded: no second strike"
    assert evidence.strikes(world.run_dir, agent_killed(world.run_dir, 2)) == {"node3": 2}
    journal.close()


def test_findings_of_a_controller_that_had_lost_the_run_are_no_strikes(world: World) -> None:
    journal = Journal(world.run_dir, 5)
    journal.append(IncidentFound(incident=agent_killed(world.run_dir, 1)))
    journal.close()
    event = IncidentFound(incident=agent_killed(world.run_dir, 2))
    with world.run_dir.control.open("a") as file:
        file.write(f"{JournalLine(sequence=1, token=4, time=utc_now(), event=event).model_dump_json()}\n")
    assert evidence.strikes(world.run_dir, None) == {"node3": 1}


@pytest.mark.parametrize(("first", "strikes"), [(FailureKind.CUDA_OOM, 1), (FailureKind.HANG, 2)])
def test_only_failures_that_may_be_those_of_a_node_are_strikes(world: World, first: FailureKind, strikes: int) -> None:
    """The first hang after a GPU ran out of memory there would have a healthy node excluded."""
    journal = Journal(world.run_dir, 1)
    journal.append(IncidentFound(incident=incident_of(first, 1, suspect_nodes=("n1",))))
    found = evidence.strikes(world.run_dir, incident_of(FailureKind.HANG, 2, suspect_nodes=("n1",)))
    journal.close()
    assert found == {"n1": strikes}
    assert excluded_after(FailureKind.HANG, ("n1",), found, (), 4) == (("n1",) if strikes > 1 else ())


def test_a_node_whose_agent_is_killed_twice_is_excluded(world: World) -> None:
    log = "srun: error: node3: task 2: Killed\n"
    excluded = []
    journal = Journal(world.run_dir, 1)
    for number in (1, 2):
        attempt = world.run_dir.attempt(number)
        placement = Placement(attempt=number, num_nodes=1, phases=())
        write_model(attempt.placement, placement)
        FakeAgent(world.run_dir, attempt=number).begin()
        attempt.scheduler_dir.mkdir(parents=True)
        (attempt.scheduler_dir / "7_0_log.out").write_text(log)
        one = Watcher(world.run_dir, placement, None, world, None, lambda: world.now)  # type: ignore[arg-type]
        one.poll()
        world.now += 10
        failure = explain(world.run_dir, one.poll(), make_spec(), first_attempt=1)
        assert failure.kind is FailureKind.AGENT_KILLED
        assert failure.incident is not None
        journal.append(IncidentFound(incident=failure.incident))
        excluded.append(failure.decision.excluded_nodes)
    journal.close()
    assert excluded == [(), ("node3",)]
