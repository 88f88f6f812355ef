"""Steps and metrics that another rank than the first prints: recorded by the worker of the first, once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program_contexts import context_of
from watched_programs import append, watched

from rlhf_core.files.appended import read_models
from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.worker.command import follower
from rlhf_core.worker.command.follower import Follower
from rlhf_core.worker.command.observation import Reading, StepFigures
from rlhf_core.worker.command.peer_output import MAX_WAIT_S, PeerOutput
from rlhf_core.worker.command.sources.stdout import Stdout
from rlhf_core.worker.liveness.heartbeat import Beat, SlotFile
from rlhf_core.worker.worker_process import SLOTS_VARIABLE

PATTERN = r"step (?P<step>\d+) loss (?P<loss>\S+)"


def peers_of(logs: Path, first_step: int = 0) -> PeerOutput:
    of_first = watched(logs, first_step=first_step, stdout_patterns=[PATTERN])
    return PeerOutput(of_first, lambda: sorted(logs.glob("*.log")))


def poll(peers: PeerOutput, now_s: float) -> Reading:
    ((kind, reading),) = peers.poll(now_s)
    assert kind is ProgressSource.STDOUT
    return reading


def test_the_output_of_the_rank_that_prints_is_found_and_read_on(tmp_path: Path) -> None:
    """Nothing that it printed before it was found is lost, and none of it is progress of the first rank."""
    peers = peers_of(tmp_path)
    append(tmp_path / "node1-1.log", "loaded\n")
    append(tmp_path / "node2-1.log", "step 1 loss 0.5\nstep 2 loss 0.25\n")
    found = poll(peers, 0.0)
    assert (found.metrics, found.moved, peers.step) == (
        [StepFigures(1, {"loss": 0.5}), StepFigures(2, {"loss": 0.25})],
        False,
        2,
    )
    append(tmp_path / "node1-1.log", "step 3 loss 9\n")
    append(tmp_path / "node2-1.log", "step 3 loss 0.125\n")
    assert poll(peers, 0.1).metrics == [StepFigures(3, {"loss": 0.125})]


def test_a_number_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    """Such as an epoch, printed by a rank after a resume."""
    append(tmp_path / "a.log", "step 3 loss 9\n")
    append(tmp_path / "b.log", "step 41 loss 1\n")
    assert poll(peers_of(tmp_path, first_step=40), 0.0).metrics == [StepFigures(41, {"loss": 1.0})]


def test_logs_without_steps_are_searched_less_and_less_often(tmp_path: Path) -> None:
    num_searches = 0

    def count() -> Sequence[Path]:
        nonlocal num_searches
        num_searches += 1
        return ()

    peers = PeerOutput(watched(tmp_path, stdout_patterns=[PATTERN]), count)
    for second in range(3600):
        peers.poll(float(second))
    assert 3600 / MAX_WAIT_S <= num_searches < 70


def test_a_failing_file_system_is_reported(tmp_path: Path) -> None:
    def fail() -> Sequence[Path]:
        raise OSError(5, "Input/output error")

    found = poll(PeerOutput(watched(tmp_path, stdout_patterns=[PATTERN]), fail), 0.0)
    assert "Input/output error" in found.problem


# ---------------------------------------------------------------------------------------------------------------------
# Recorded by the worker of the first rank


MakeFollower = Callable[..., Follower]


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: SlotFile) -> MakeFollower:
    """Make the worker of rank 0 on two nodes, which reads only what ranks print."""
    monkeypatch.setenv(SLOTS_VARIABLE, str(slots.path))

    def make(**trainer: Any) -> Follower:
        context = context_of(tmp_path, num_nodes=2, stdout_patterns=[PATTERN], progress=["stdout"], **trainer)
        one = Follower(replace(context, reporter=Beat(slots.path, 0)))
        of_rank = one._watched()
        one._sources = [Stdout(of_rank)]
        one._peers = PeerOutput(of_rank, one._logs_of_peers)
        return one

    return make


def print_from(one: Follower, place: str, *lines: str) -> None:
    append(one._context.restart_dir.logs / f"trainer-{place}.log", "".join(f"{line}\n" for line in lines))


def recorded(one: Follower) -> list[tuple[int, float]]:
    lines = read_models(one._context.restart_dir.metrics, MetricsLine)
    return [(line.step, line.metrics["train/loss"]) for line in lines]


def test_metrics_that_only_the_last_rank_prints_are_recorded(first: MakeFollower, slots: SlotFile) -> None:
    one = first()
    print_from(one, "node1-1", "step 1 loss 0.5", "step 2 loss 0.25")
    one._poll(1.0)
    assert one._peers is not None
    assert one._peers.step == 0, "agent 0 has told of no step yet: no log is searched"
    slots.show_step(2)
    one._poll(2.0)
    print_from(one, "node1-1", "step 3 loss 0.125")
    one._drain(3.0)
    assert recorded(one) == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert one._last_step() == 3
    assert slots.read(0).sequence == 1, "none of it is a sign of life of rank 0"


def test_each_step_is_recorded_once_although_all_ranks_print_it(first: MakeFollower, slots: SlotFile) -> None:
    """The metrics are those of the first rank, even if its output is the last to arrive: others have other losses."""
    one = first()
    others = ("node0-1", "node1-0", "node1-1")
    for place in others:
        print_from(one, place, "step 1 loss 9")
    slots.show_step(1)
    one._poll(1.0)
    print_from(one, "node0-0", "step 1 loss 1")
    one._poll(2.0)
    for step in (2, 3):
        for place in (*others, "node0-0"):
            print_from(one, place, f"step {step} loss {step if place == 'node0-0' else 9}")
    one._drain(3.0)
    assert recorded(one) == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("timeout_s", [60.0, 0.0], ids=["", "control: without waiting"])
def test_the_last_step_of_another_rank_is_awaited(
    first: MakeFollower, slots: SlotFile, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    """The program has exited, but the worker of the rank that prints has not copied its last lines yet."""
    one = first(num_steps=2)
    monkeypatch.setattr(follower, "LAST_STEP_TIMEOUT_S", timeout_s)
    monkeypatch.setattr(one, "_beat_again", lambda: print_from(one, "node1-1", "step 2 loss 0.25"))
    print_from(one, "node1-1", "step 1 loss 0.5")
    slots.show_step(1)
    one._drain(1.0)
    one._await_last_step()
    assert one._last_step() == (2 if timeout_s else 1)
    assert recorded(one) == [(1, 0.5), (2, 0.25)][: one._last_step()]
