"""The current collective of a worker, read from torch's flight recorder while its main thread is blocked.

A worker that waits in a collective is in C++ code without the GIL, so a helper thread can still dump the flight
recorder. The agent asks through a word in the header of the slot file. A worker that is stopped or holds the GIL does
not answer, and the agent does not wait for it beyond a timeout.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_core.schemas.reports import STOPPED_STATES, RankStatus
from rlhf_core.worker import processes
from rlhf_core.worker.in_rank import rlhf_flight_recorder
from rlhf_core.worker.liveness.heartbeat import Beat

ANSWER_TIMEOUT_S = 2.0
"""Time that the agent waits for answers, in seconds."""
INSPECTION_INTERVAL_S = 0.2
BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""Environment variable with the number of collectives that torch records; none are recorded if it is unset."""
BUFFER_SIZE = "256"

THREAD_NAME = "rlhf-collective"
"""The answering thread's name in the kernel, which keeps 15 characters."""


def answer_path(slots: Path, local_rank: int, number: int) -> Path:
    """Path of a worker's answer, next to the slot file on the node."""
    return slots.with_name(f"{slots.name}.collectives-{local_rank}-{number}.json")


# ---------------------------------------------------------------------------------------------------------------------
# In the worker


def answer_in_background(beat: Beat, slots: Path, local_rank: int) -> None:
    """Start a thread that answers the agent's questions. It never beats."""
    threading.Thread(target=_answer, args=(beat, slots, local_rank), name="collectives", daemon=True).start()


def _answer(beat: Beat, slots: Path, local_rank: int) -> None:
    # The name lets an inspection tell this thread, which is always active, from those doing the worker's work.
    processes.name_thread(THREAD_NAME)
    answered = beat.questions()
    while True:
        time.sleep(INSPECTION_INTERVAL_S)
        number = beat.questions()
        if number == answered:
            continue
        # The agent reads an answer before it asks again, or never: in memory, they would add up over a long run.
        with contextlib.suppress(OSError):
            answer_path(slots, local_rank, answered).unlink()
        answered = number
        path = answer_path(slots, local_rank, number)
        with contextlib.suppress(OSError, RuntimeError, AttributeError):  # the last: another torch
            path.with_suffix(".tmp").write_text(_source[-1](), encoding="utf-8")
            path.with_suffix(".tmp").replace(path)


def answer_from(read: Callable[[], str]) -> None:
    """Answer with the flight recorder of a process that this worker represents, from now on."""
    _source.append(read)


_source: list[Callable[[], str]] = [rlhf_flight_recorder.contents]
"""Functions that read the flight recorder; the last one is used."""

# ---------------------------------------------------------------------------------------------------------------------
# In the agent


def read_answers(
    ranks: Sequence[RankStatus], slots: Path, number: int, timeout_s: float = ANSWER_TIMEOUT_S
) -> dict[int, str]:
    """Answers to a question by local rank, once all expected ones have arrived or the timeout has passed."""
    deadline = time.monotonic() + timeout_s
    waiting = {
        rank.local_rank: answer_path(slots, rank.local_rank, number)
        for rank in ranks
        # A worker that has not beaten yet is not listening yet.
        if rank.process_state not in STOPPED_STATES and rank.sequence > 0
    }
    found: dict[int, str] = {}
    while waiting:
        for local_rank, path in list(waiting.items()):
            with contextlib.suppress(OSError):
                found[local_rank] = path.read_text(encoding="utf-8")
                path.unlink()
                del waiting[local_rank]
        if time.monotonic() >= deadline:
            break
        if waiting:
            time.sleep(0.05)
    return found
