"""Followers without an agent: what they watch before their rank is found, and when mere signs of life count."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_tools import until
from program_contexts import context_of, trainer_of

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command import launch_order
from rlhf_core.worker.command.follower import Follower
from rlhf_core.worker.command.launch import LaunchOrder
from rlhf_core.worker.command.observation import Reading
from rlhf_core.worker.command.progress import STEADY_POLLS
from rlhf_core.worker.command.rank_process import RankSearch
from rlhf_core.worker.command.sources.stdout import Stdout
from rlhf_core.worker.in_rank.rlhf_rank_file import ENTERED, LEFT, PID, RankFile, rank_path
from rlhf_core.worker.liveness.heartbeat import Beat, SlotFile
from rlhf_core.worker.worker_process import SLOTS_VARIABLE

PROGRAM = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
"""A launch line whose rank, as with Ray, has none of the variables of a rank."""
MakeFollowers = Callable[..., list[Follower]]


@pytest.fixture
def followers(tmp_path: Path, slots: SlotFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFollowers]:
    """Make the followers of both ranks of a node."""
    monkeypatch.setenv(SLOTS_VARIABLE, str(slots.path))
    with ExitStack() as started:

        def make(**trainer: Any) -> list[Follower]:
            first = context_of(tmp_path, argv=[sys.executable, "-c", PROGRAM], resume="", **trainer)
            found = []
            for rank in (0, 1):
                context = replace(first, rank=rank, local_rank=rank, reporter=Beat(slots.path, rank))
                found.append(Follower(context))
            started.enter_context(found[0]._program.launched())
            return found

        yield make


@dataclass
class Fake:
    """A source whose next reading a test sets."""

    kind: ProgressSource
    reading: Reading = field(default_factory=Reading)
    num_polls: int = 0

    def poll(self, now_s: float) -> Reading:
        self.num_polls += 1
        return self.reading


def test_ranks_that_are_not_found_are_those_of_the_launcher(followers: MakeFollowers) -> None:
    """As with Ray. The worker that has neither a rank nor a child must not call a hang while the program works."""
    first, second = followers()
    launcher = first._program.launcher
    assert launcher is not None
    child = until(lambda: [one.pid for one in psutil.Process(launcher).children()])
    assert [one._program.pids() for one in (first, second)] == [[launcher, *child]] * 2
    assert (first._program.has_ended(), second._program.has_ended()) == (False, False)
    psutil.Process(child[0]).kill()
    until(first._program.has_ended)
    assert second._program.has_ended(), "with the launcher"
    assert second._program.pids() == []


def test_a_worker_without_a_rank_follows_the_log_of_the_first(followers: MakeFollowers) -> None:
    first, second = followers(stdout_patterns=[r"step (?P<step>\d+)"])
    (log,) = first._logs_of_rank()
    source = Stdout(second._watched())
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write("step 7\n")
    assert source.poll(0.0).step == 7
    second._status.set(PID, os.getpid())
    second._program.has_ended()
    with log.open("a") as file:
        file.write("step 8\n")
    assert not source.poll(1.0).moved, "a rank of its own is not judged by the first"


def test_work_between_the_collectives_of_a_set_up_is_a_sign_of_life(followers: MakeFollowers) -> None:
    """One rank prepares data while the others, which have initialised together, wait in a barrier."""
    follower = followers()[0]
    strong, weak = Fake(ProgressSource.STDOUT, Reading(moved=True)), Fake(ProgressSource.ACTIVITY)
    follower._sources = [strong, weak]
    polls = iter(range(1, 100))

    def beats(entered: int = 0, left: int = 0) -> bool:
        follower._status.set(ENTERED, entered)
        follower._status.set(LEFT, left)
        before = follower._beat._sequence
        follower._poll(float(next(polls)))
        return follower._beat._sequence > before

    assert beats()
    strong.reading, weak.reading = Reading(), Reading(moved=True)
    assert beats(3, 3)
    assert not beats(4, 3), "in a collective, it waits for others"
    strong.reading = Reading(moved=True, step=1)
    assert beats(4, 4)
    assert follower._progress.phase is Phase.TRAIN
    strong.reading, num_polls = Reading(), weak.num_polls
    assert not beats(4, 4), "an endless loop is no progress"
    assert weak.num_polls == num_polls, "what does not count is not looked for"


def test_a_rank_trains_once_any_other_has_printed_a_step(followers: MakeFollowers, slots: SlotFile) -> None:
    """In its set-up, a rank may be silent for half an hour; later, it is at the step that agent 0 shows to all."""
    follower = followers(stdout_patterns=[r"step (?P<step>\d+)/"])[1]
    follower._sources = [Fake(ProgressSource.COLLECTIVES, Reading(moved=True))]
    for now_s in range(1, 2 * STEADY_POLLS):
        follower._poll(float(now_s))
    assert follower._progress.phase is Phase.SETUP
    slots.show_step(1)
    for now_s in range(100, 102):
        follower._poll(float(now_s))
    assert (slots.read(1).phase, slots.read(1).step) == (Phase.TRAIN, 1)


def test_the_processes_of_a_node_are_searched_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[None] = []
    monkeypatch.setattr(psutil, "process_iter", lambda: searches.append(None) or [])
    prefix = str(tmp_path / "ranks")
    status = RankFile(rank_path(prefix, 0), create=True)
    search = RankSearch(status, prefix, 0)
    assert {search.find(tenth / 10) for tenth in range(36_000)} == {None}
    assert 100 < len(searches) < 150
    status.set(PID, 4711)
    assert search.find(3600.0) == 4711, "a report is seen at once"


def test_a_failing_file_system_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context: WorkerContext = context_of(tmp_path, rank=1)
    answers = iter([OSError(5, "Input/output error"), None, LaunchOrder(address="a", port=1)])

    def read(path: Path, schema: type[LaunchOrder]) -> LaunchOrder | None:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(launch_order, "read_model", read)
    assert launch_order.agree(context, trainer_of(context)).port == 1
