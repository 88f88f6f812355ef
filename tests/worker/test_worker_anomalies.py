"""Comparison of nodes by agent 0: findings while they last, with an event at the start and at the end of each."""

import pytest
from made_reports import rank_status

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.agent_messages import GroupState, NodeState
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import AgentEvent
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.telemetry.anomalies import Anomalies

PERIOD_S = 2.0
SAME_WORK = dict.fromkeys(("node1", "node2", "node3"), "")


def state(number: int, busy: float) -> NodeState:
    rank = rank_status(0, sequence=number, collectives=number, step=number, age_s=0.0, process_state="R")
    groups = (GroupState(role=Role.TRAINER, start=0, ranks=(rank,)),)
    return NodeState(wall_s=0.0, groups=groups, published=number, telemetry={"cpu_percent": busy})


def update(found: Anomalies, first: int, last: int, busy_on_node2: float) -> tuple[str, ...]:
    present: tuple[str, ...] = ()
    for number in range(first, last):
        busy = {"node1": 20.0, "node2": busy_on_node2, "node3": 22.0}
        states = {node: state(number, one) for node, one in busy.items()}
        present = found.update(states, SAME_WORK, number * PERIOD_S)
    return present


def recorded_findings(restart_dir: RestartDir) -> list[tuple[object, str]]:
    events = read_models(restart_dir.events("here"), AgentEvent)
    return [(event.data["finding"], event.message) for event in events if event.kind == "telemetry"]


def test_the_start_and_the_end_of_a_finding_are_events(events: EventLog, restart_dir: RestartDir) -> None:
    found = Anomalies(events)
    (text,) = update(found, 0, 200, 95.0)
    assert "node2 is an outlier" in text
    assert recorded_findings(restart_dir) == [("begins", text)]
    assert update(found, 200, 400, 21.0) == ()
    assert recorded_findings(restart_dir) == [("begins", text), ("ends", f"no longer: {text}")]


def test_similar_nodes_cause_no_event(events: EventLog, restart_dir: RestartDir) -> None:
    """Negative control."""
    assert update(Anomalies(events), 0, 200, 25.0) == ()
    assert recorded_findings(restart_dir) == []


@pytest.mark.parametrize(("work", "stands_out"), [("rollout", False), ("trainer", True)])
def test_a_node_of_engines_is_no_outlier_among_trainers(
    events: EventLog, restart_dir: RestartDir, work: str, stands_out: bool
) -> None:
    """With the negative control: as another trainer node, it would be an outlier."""
    found = Anomalies(events)
    for number in range(200):
        states = {f"node{one}": state(number, 20.0 + one) for one in range(3)} | {"node3": state(number, 95.0)}
        found.update(states, {**dict.fromkeys(states, "trainer"), "node3": work}, number * PERIOD_S)
    assert bool(recorded_findings(restart_dir)) is stands_out


def test_an_unchanged_status_is_not_counted_again(events: EventLog) -> None:
    """A silent node must not keep voting with its last reading."""
    found = Anomalies(events)
    for number in range(200):
        states = {"node1": state(number, 20.0), "node2": state(7, 95.0), "node3": state(number, 22.0)}
        assert found.update(states, SAME_WORK, number * PERIOD_S) == ()


def test_a_restart_resets_the_findings_silently(events: EventLog, restart_dir: RestartDir) -> None:
    found = Anomalies(events)
    update(found, 0, 200, 95.0)
    found.begin_restart()
    assert update(found, 0, 5, 95.0) == ()
    assert [what for what, _ in recorded_findings(restart_dir)] == ["begins"]
