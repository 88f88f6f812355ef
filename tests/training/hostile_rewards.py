"""Reward functions that misbehave when a completion is ``bad``, each in a different way; other answers are correct."""

import ctypes
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _do_for_bad(harm: Callable[[], object], completions: list[str]) -> list[float]:
    for text in completions:
        if text == "bad":
            harm()
    return [1.0 for _ in completions]


def well(*, completions: list[str], **columns: Any) -> list[float]:
    """Behave correctly."""
    return [1.0 for _ in completions]


def endless(*, completions: list[str], **columns: Any) -> list[float]:
    """Never return."""

    def loop() -> None:
        while True:
            pass

    return _do_for_bad(loop, completions)


def forking(*, completions: list[str], **columns: Any) -> list[float]:
    """Start a process that leaves its session, and never return."""

    def fork() -> None:
        if os.fork() == 0:
            os.setsid()
            subprocess.run(["sleep", "600"], check=False)
        time.sleep(600)

    return _do_for_bad(fork, completions)


def orphaning(*, completions: list[str], **columns: Any) -> list[float]:
    """Exit and leave a child process behind."""

    def leave() -> None:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        os._exit(4)

    return _do_for_bad(leave, completions)


def exiting(*, completions: list[str], **columns: Any) -> list[float]:
    """Exit."""
    return _do_for_bad(lambda: os._exit(3), completions)


def crashing(*, completions: list[str], **columns: Any) -> list[float]:
    """Read from unmapped memory."""
    return _do_for_bad(lambda: ctypes.string_at(0), completions)


def killed(*, completions: list[str], **columns: Any) -> list[float]:
    """End as if killed by the kernel for lack of memory."""
    return _do_for_bad(lambda: os.kill(os.getpid(), 9), completions)


def leaving(*, completions: list[str], **columns: Any) -> list[float]:
    """Ask the interpreter to exit."""
    return _do_for_bad(lambda: sys.exit(5), completions)


def greedy(*, completions: list[str], **columns: Any) -> list[float]:
    """Ask for more memory than there is."""
    return _do_for_bad(lambda: bytearray(1 << 60), completions)


def raising(*, completions: list[str], **columns: Any) -> list[float]:
    """Raise an exception."""
    return _do_for_bad(lambda: {}["level"], completions)


def closing(*, completions: list[str], **columns: Any) -> list[float]:
    """Close file descriptors that it did not open."""
    return _do_for_bad(lambda: os.closerange(3, 256), completions)


def not_a_number(*, completions: list[str], **columns: Any) -> list[float]:
    """Return a value that is not a number for some completions."""
    return [float("nan") if text == "bad" else 1.0 for text in completions]


def too_large(*, completions: list[str], **columns: Any) -> list[float]:
    """Return an integer that no float can hold for some completions."""
    return [10**400 if text == "bad" else 1.0 for text in completions]


def printing(*, completions: list[str], **columns: Any) -> list[float]:
    """Write text to standard output that looks like an answer."""
    print(json.dumps({"values": [5.0] * len(completions)}))
    os.write(1, b"\x00\x00\x00\x00\x00\x00\x00\x02{}")
    return [1.0 for _ in completions]


def returning_twice(*, completions: list[str], **columns: Any) -> list[float]:
    """Fork, and return in both processes."""
    return [2.0 if os.fork() == 0 else 1.0 for _ in completions[:1]] * len(completions)


def noisy(*, completions: list[str], **columns: Any) -> list[float]:
    """Draw from two global generators, one of which is imported late."""
    import numpy as np

    return [random.random() + float(np.random.rand()) for _ in completions]


def not_by_one(*, completions: list[str], **columns: Any) -> list[float]:
    """Fail for several completions together, but for no single one."""
    if len(completions) > 4:
        raise ValueError("too many at once")
    return [1.0 for _ in completions]


calls: list[int] = []


def failing_once(*, completions: list[str], **columns: Any) -> list[float]:
    """Fail in the first call of its process, as a service does that is not there for a moment; then draw at random."""
    calls.append(len(completions))
    if len(calls) == 1:
        raise ConnectionError("502 Bad Gateway")
    return [random.random() for _ in completions]


def killed_by_many(*, completions: list[str], **columns: Any) -> list[float]:
    """End as if killed by the kernel for lack of memory, for many completions; write a line for each call."""
    with Path(os.environ["CALLS"]).open("a") as file:
        file.write(f"{len(completions)}\n")
    if len(completions) > 4:
        os.kill(os.getpid(), 9)
    return [1.0 for _ in completions]


def slow_for_many(*, completions: list[str], **columns: Any) -> list[float]:
    """Does not respond in time for many completions."""
    if len(completions) > 4:
        time.sleep(600)
    return [1.0 for _ in completions]


def failing_on_rank_1(*, completions: list[str], **columns: Any) -> list[float]:
    """Return no number for the first completion of rank 1."""
    is_first = [os.environ["RANK"] == "1" and index == 0 for index in range(len(completions))]
    return [math.nan if first else len(text) for first, text in zip(is_first, completions, strict=True)]


def on_digits(*, completions: list[str], **columns: Any) -> list[float | None]:
    """Judge only completions that are numbers."""
    return [float(text) if text.isdigit() else None for text in completions]


def on_letters(*, completions: list[str], **columns: Any) -> list[float | None]:
    """Judge only completions of letters."""
    return [float(len(text)) if text.isalpha() else None for text in completions]
