"""Comparison of nodes by agent 0: findings while they last, with an event at the start and at the end of each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from made_reports import rank_status

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import AgentEvent
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.telemetry.anomalies import Anomalies, NodeReading

PERIOD_S = 2.0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[EventLog, Path]]:
    restart = RunDir(tmp_path).attempt(1).restart(0)
    events = EventLog("node1", restart)
    yield events, restart.events("node1")
    events.close()


def reading(node: str, number: int, busy: float, work: str = "") -> NodeReading:
    rank = rank_status(0, sequence=number, collectives=number, step=number, age_s=0.0, process_state="R")
    return NodeReading(node, number, {"cpu_percent": busy}, (rank,), work)


def update(found: Anomalies, first: int, last: int, busy_on_node2: float) -> tuple[str, ...]:
    present: tuple[str, ...] = ()
    for number in range(first, last):
        busy = {"node1": 20.0, "node2": busy_on_node2, "node3": 22.0}
        present = found.update([reading(node, number, one) for node, one in busy.items()], number * PERIOD_S)
    return present


def recorded_findings(path: Path) -> list[tuple[object, str]]:
    events = read_models(path, AgentEvent) if path.exists() else []
    return [(event.data["finding"], event.message) for event in events if event.kind == "telemetry"]


def test_the_start_and_the_end_of_a_finding_are_events(log: tuple[EventLog, Path]) -> None:
    events, path = log
    found = Anomalies(events)
    (text,) = update(found, 0, 200, 95.0)
    assert "node2 is an outlier" in text
    assert recorded_findings(path) == [("begins", text)]
    assert update(found, 200, 400, 21.0) == ()
    assert recorded_findings(path) == [("begins", text), ("ends", f"no longer: {text}")]


def test_similar_nodes_cause_no_event(log: tuple[EventLog, Path]) -> None:
    """Negative control."""
    events, path = log
    assert update(Anomalies(events), 0, 200, 25.0) == ()
    assert recorded_findings(path) == []


@pytest.mark.parametrize(("work", "stands_out"), [("rollout", False), ("trainer", True)])
def test_a_node_of_engines_is_no_outlier_among_trainers(
    log: tuple[EventLog, Path], work: str, stands_out: bool
) -> None:
    """With the negative control: as another trainer node, it would be an outlier."""
    events, path = log
    found = Anomalies(events)
    for number in range(200):
        readings = [reading(f"node{one}", number, 20.0 + one, "trainer") for one in range(3)]
        found.update([*readings, reading("node3", number, 95.0, work)], number * PERIOD_S)
    assert bool(recorded_findings(path)) is stands_out


def test_an_unchanged_status_is_not_counted_again(log: tuple[EventLog, Path]) -> None:
    """A silent node must not keep voting with its last reading."""
    events, _ = log
    found = Anomalies(events)
    for number in range(200):
        readings = [reading("node1", number, 20.0), reading("node2", 7, 95.0), reading("node3", number, 22.0)]
        assert found.update(readings, number * PERIOD_S) == ()


def test_a_restart_resets_the_findings_silently(log: tuple[EventLog, Path]) -> None:
    events, path = log
    found = Anomalies(events)
    update(found, 0, 200, 95.0)
    found.begin_restart()
    assert update(found, 0, 5, 95.0) == ()
    assert [what for what, _ in recorded_findings(path)] == ["begins"]
