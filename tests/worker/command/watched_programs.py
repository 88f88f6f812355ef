"""Real programs that make steps, and sources that read them, for the tests of the sources of progress."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process_tools import until

from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.worker.command.observation import Reading, Source, Watched
from rlhf_core.worker.processes import process_state

FIXTURES = Path(__file__).parent / "fixtures"

STEPS = """
import itertools, json, os, sys, time
from pathlib import Path
path = Path(sys.argv[1])
for step in itertools.count(1):
    if sys.argv[2] == "lines":
        with path.open("a") as file:
            file.write(sys.argv[3].replace("STEP", str(step)))
    else:
        folder = path / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"0" * 100)
        (folder / "trainer_state.json").write_text("{}")
    time.sleep(0.02)
"""
"""Makes a step every 20 ms: appends a line to a file, or saves a checkpoint."""


@dataclass(frozen=True)
class Program:
    """A running program."""

    process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """Send SIGSTOP and wait until the program is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: process_state(self.pid) == "T")


Start = Callable[..., Program]


@contextmanager
def started(code: str, *arguments: object) -> Iterator[Program]:
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], start_new_session=True)
    try:
        yield Program(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trainer(**changes: Any) -> CommandTrainer:
    return CommandTrainer.model_validate({"argv": ["python", "train.py"], "num_steps": 100, **changes})


def watched(
    folder: Path,
    *,
    started_at_s: float | None = None,
    ahead_s: float = 0.0,
    first_step: int = 0,
    logs: Sequence[Path] = (),
    pids: Sequence[int] = (),
    **changes: Any,
) -> Watched:
    """A program with this output folder; started shortly before by default, on a file server whose clock is ahead."""
    at_s = time.time() - 1 if started_at_s is None else started_at_s
    return Watched(trainer(**changes), folder, at_s, at_s + ahead_s, first_step, lambda: logs, lambda: pids)


class Polls:
    """A source that is polled with a fake clock, which advances far enough for a new reading at every poll."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now_s = 1000.0

    def poll(self) -> Reading:
        self.now_s += 10
        return self.source.poll(self.now_s)

    def polls(self, num: int, wait_s: float = 0.1) -> list[Reading]:
        found = []
        for _ in range(num):
            found.append(self.poll())
            time.sleep(wait_s)
        return found

    def until_moved(self) -> Reading:
        found: list[Reading] = []

        def has_moved() -> bool:
            found.append(self.poll())
            return found[-1].moved

        until(has_moved)
        return found[-1]

    def until_moved_again(self) -> None:
        """Poll until the source has moved three times more."""
        for _ in range(3):
            self.until_moved()


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def make_old(path: Path, age_s: float = 1000.0) -> None:
    """Give a file the timestamps of one that was written before the program started."""
    then = time.time() - age_s
    os.utime(path, (then, then))
