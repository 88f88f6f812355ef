"""Rollout workers beside the trainers: a failed one is found, blamed and restarted alone while training continues."""

import pytest
from agent_runs import AgentRun, MakeRun
from process_tools import is_alive, until

from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import read_all
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import Action, Decision, FailureKind, Incident
from rlhf_core.schemas.reports import MetricsLine

pytestmark = pytest.mark.end_to_end

SUPERVISE = {"floor_s": 60.0, "setup_floor_s": 60.0, "suspect_s": 0.5, "evidence_s": 10.0}
STEPS = 40

NOBODY_WAITS = """
from rlhf_core.diagnosis.hangs import liveness
liveness.WAITS_FOR = {}
"""
"""Takes away the rule that a trainer waits for the rollout workers."""


def incidents(run: AgentRun) -> list[tuple[Incident, Decision]]:
    """All incidents of an attempt with their decisions, in order."""
    found = read_all([path for restart in run.dir.restarts() for path in restart.incident_files()], Incident)
    decided = read_all([path for restart in run.dir.restarts() for path in restart.decision_files()], Decision)
    assert [incident.number for incident in found] == [decision.number for decision in decided]
    return list(zip(found, decided, strict=True))


def assert_training_was_untouched(run: AgentRun) -> None:
    """Check that the trainers started once and made every step once."""
    assert [restart.restart for restart in run.dir.restarts()] == [0]
    assert len(run.pids(0)) == 2
    steps = [line.step for line in read_models(run.restart(0).metrics, MetricsLine)]
    assert steps == [*range(1, STEPS + 1)]
    assert run.outcome().num_restarts == 0


def test_rollout_workers_are_restarted_alone(agent_run: MakeRun) -> None:
    """One is killed, the other stopped, and the first hangs after its restart."""
    run = agent_run(rollouts=2, train={"num_steps": STEPS}, supervise=SUPERVISE)
    run.script(
        {"role": "rollout", "generation": 0, "rank": 1, "step": 8, "do": "kill"},
        {"role": "rollout", "generation": 0, "rank": 0, "step": 16, "do": "stop"},
        {"role": "rollout", "generation": 1, "rank": 1, "step": 24, "do": "deadlock"},
    )
    code, output = run.run_through()
    assert (code, run.outcome().state) == (0, AttemptState.COMPLETED), output
    assert_training_was_untouched(run)
    found = incidents(run)
    assert [(one.number, one.failure_kind, one.suspect_ranks) for one, _ in found] == [
        (1, FailureKind.WORKER_KILLED, (1,)),
        (2, FailureKind.HANG, (0,)),
        (3, FailureKind.HANG, (1,)),
    ]
    assert {(one.role, decision.action) for one, decision in found} == {(Role.ROLLOUT, Action.RESTART_WORKERS)}
    for (incident, _), words in zip(found, ("SIGKILL", "state T", "a lock of its own"), strict=True):
        assert incident.message.startswith("Group rollout: "), "not the rank of a trainer"
        assert words in incident.message
    starts = [(generation, sorted(pids)) for generation, pids in run.beside()]
    assert starts == [(0, [0, 1]), (1, [1]), (2, [0]), (3, [1])], "the other one has stayed at work"
    for (incident, _), generation in zip(found, (0, 0, 1), strict=True):
        evidence = run.run_dir.root / incident.evidence_dir
        assert evidence == run.dir.group("rollout", generation).evidence_dir
        if incident.failure_kind is FailureKind.HANG:
            (rank,) = incident.suspect_ranks
            assert "_do (" in (evidence / f"stack-{incident.suspect_nodes[0]}-{rank}.txt").read_text(encoding="utf-8")
            assert not list(evidence.glob(f"stack-*-{1 - rank}.txt")), "the others are left alone"


@pytest.mark.parametrize("waits", [True, False], ids=["", "without the rule"])
def test_a_trainer_waiting_for_a_rollout_worker_is_not_hung(agent_run: MakeRun, waits: bool) -> None:
    """With the negative control: without the rule, the trainers are blamed and restarted for nothing."""
    limit_s = 1.0
    run = agent_run(
        rollouts=1,
        train={"num_steps": STEPS},
        supervise={**SUPERVISE, "floor_s": limit_s, "gap_factor": 1.0, "max_restarts": 1},
    )
    # The second start is slow, like one that loads a large model.
    run.script(
        {"role": "rollout", "generation": 0, "rank": 0, "step": 20, "do": "kill"},
        {"role": "rollout", "generation": 1, "rank": 0, "step": 0, "do": "await_go"},
    )
    if not waits:
        run.change = NOBODY_WAITS
    run.start()
    until(lambda: longest_silence_s(run) > 4 * limit_s if waits else Role.TRAINER in blamed(run))
    (run.run_dir.root / "go").touch()
    code, output = run.finish()
    assert code == 0, output
    assert blamed(run) == ([Role.ROLLOUT] if waits else [Role.ROLLOUT, Role.TRAINER])
    if waits:
        assert_training_was_untouched(run)


def longest_silence_s(run: AgentRun) -> float:
    """Longest silence of the trainers, as last published by the agent."""
    status = run.status(0)
    return max((rank.age_s for rank in status.ranks if rank.role is Role.TRAINER), default=0.0) if status else 0.0


def blamed(run: AgentRun) -> list[Role | None]:
    """Roles of all incidents, in order; their decisions may not exist yet."""
    paths = [path for restart in run.dir.restarts() for path in restart.incident_files()]
    return [incident.role for incident in read_all(paths, Incident)]


def test_trainers_are_restarted_while_rollout_workers_live_on(agent_run: MakeRun) -> None:
    run = agent_run(evaluator=True, rollouts=2, train={"num_steps": STEPS}, supervise=SUPERVISE)
    run.script({"restart": 0, "rank": 1, "step": 8, "do": "kill"})
    run.start()
    until(lambda: run.reached(1, 3))
    ((generation, pids),) = run.beside()
    assert (generation, len(pids)) == (0, 2)
    assert all(map(is_alive, pids.values())), "the same processes, beside new trainers"
    code, output = run.finish()
    assert (code, run.outcome().state, run.outcome().num_restarts) == (0, AttemptState.COMPLETED, 1), output
    ((incident, decision),) = incidents(run)
    assert (incident.role, decision.action) == (Role.TRAINER, Action.RESTART_IN_PLACE)
    assert not any(map(is_alive, pids.values())), "they ended with the phase"
    assert (run.run_dir.root / "evaluated-1").exists()
    # They are restarted for the evaluator, and nothing is overwritten.
    assert [(number, sorted(pids)) for number, pids in run.beside()] == [(0, [0, 1]), (1, [0, 1])]
    assert [folder.restart for folder in run.dir.groups()] == [0, 1]


def test_a_rollout_worker_that_always_fails_ends_the_attempt(agent_run: MakeRun) -> None:
    run = agent_run(rollouts=1, train={"num_steps": 1000}, supervise=SUPERVISE)
    run.script({"role": "rollout", "rank": 0, "step": 3, "do": "reward"})
    code, output = run.run_through()
    outcome = run.outcome()
    assert (code, outcome.state) == (1, AttemptState.FAILED), output
    assert outcome.failure_kind is FailureKind.REWARD_FUNCTION
    ((incident, decision),) = incidents(run)
    assert (incident.role, decision.action) == (Role.ROLLOUT, Action.STOP)


NO_START = """
from rlhf_core.worker.groups.fork_server import ForkServer
start, starts = ForkServer.start, []
def limited(server, command, environment):
    starts.append(environment.get("RLHF_GROUP"))
    if environment.get("RLHF_GROUP") == "rollout/1" and starts.count("rollout/1") == NUMBER:
        raise OSError(12, "Cannot allocate memory")
    return start(server, command, environment)
ForkServer.start = limited
"""
"""Lets one start of rank 1 of the rollout workers fail, as on a node without memory."""


def test_a_rollout_worker_that_cannot_be_started_is_tried_again(agent_run: MakeRun) -> None:
    run = agent_run(rollouts=2, train={"num_steps": STEPS}, supervise=SUPERVISE)
    run.change = NO_START.replace("NUMBER", "1")
    code, output = run.run_through()
    assert (code, run.outcome().state) == (0, AttemptState.COMPLETED), output
    assert_training_was_untouched(run)
    ((incident, decision),) = incidents(run)
    assert (incident.role, incident.failure_kind) == (Role.ROLLOUT, FailureKind.HOST_OOM)
    assert "Group rollout: Workers could not be run" in incident.message
    assert incident.message.endswith("Cannot allocate memory")
    assert decision.action is Action.RESTART_WORKERS
    assert [(generation, sorted(pids)) for generation, pids in run.beside()] == [(0, [0]), (1, [1])]


def test_a_restart_that_fails_is_an_incident_of_its_group(agent_run: MakeRun) -> None:
    """The budget has no further restart for it, so the attempt ends."""
    run = agent_run(rollouts=2, train={"num_steps": 1000}, supervise=SUPERVISE, checkpoint={"every_num_steps": 1000})
    run.change = NO_START.replace("NUMBER", "2")
    run.script({"role": "rollout", "generation": 0, "rank": 1, "step": 5, "do": "kill"})
    code, output = run.run_through()
    assert (code, run.outcome().failure_kind) == (1, FailureKind.HOST_OOM), output
    (killed, again), (unstarted, end) = incidents(run)
    assert (killed.failure_kind, again.action) == (FailureKind.WORKER_KILLED, Action.RESTART_WORKERS)
    assert (unstarted.role, end.action) == (Role.ROLLOUT, Action.NEW_ATTEMPT)
    assert "could not be run" in run.outcome().message


UNKILLABLE = """
from rlhf_core.worker import processes
from rlhf_core.worker.groups import independent
independent.KILL_TIMEOUT_S = 1.0
processes.kill_group = lambda pid: None
"""
"""Lets no worker end when it is killed, until the end of the attempt."""


def test_a_rollout_worker_that_cannot_be_killed_ends_the_attempt(agent_run: MakeRun) -> None:
    """It would never be restarted, and the trainers that wait for it would never be judged."""
    run = agent_run(rollouts=1, train={"num_steps": 1000}, supervise=SUPERVISE)
    run.change = UNKILLABLE
    run.script({"role": "rollout", "generation": 0, "rank": 0, "step": 5, "do": "stop"})
    code, output = run.run_through()
    assert (code, run.outcome().failure_kind) == (1, FailureKind.HANG), output
    ((incident, decision),) = incidents(run)
    assert (incident.role, incident.suspect_ranks, len(incident.suspect_nodes)) == (Role.ROLLOUT, (0,), 1)
    assert decision.action is Action.NEW_ATTEMPT
    assert "killed processes have not ended" in decision.reason


def test_a_worker_is_blamed_for_the_process_it_beats_for(agent_run: MakeRun) -> None:
    """A rank of a wrapped trainer does not beat by itself: the state and stack of its own process count."""
    run = agent_run(rollouts=1, train={"num_steps": STEPS}, supervise=SUPERVISE)
    run.script({"role": "rollout", "generation": 0, "rank": 0, "step": 20, "do": "child_stops"})
    code, output = run.run_through()
    assert code == 0, output
    ((incident, decision),) = incidents(run)
    child = (run.run_dir.root / "child").read_text(encoding="utf-8")
    assert (incident.failure_kind, decision.action) == (FailureKind.HANG, Action.RESTART_WORKERS)
    assert f"process {child}" in incident.message
    evidence = run.run_dir.root / incident.evidence_dir
    assert list(evidence.glob(f"stack-*-0-pid{child}.txt"))
    assert not is_alive(int(child)), "it ended with the worker"
