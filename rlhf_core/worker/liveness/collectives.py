"""The collective that a worker is in: asked from torch's flight recorder while the worker itself can say nothing.

A worker that waits in a collective is busy in C++ without the interpreter lock, so a thread beside it can still write
down what the flight recorder knows. The agent asks through a word in the header of the slot file. A worker that is
stopped, or that holds the lock, gives no answer; that is not waited for.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rlhf_core.schemas.reports import STOPPED_STATES, RankStatus
from rlhf_core.worker import processes
from rlhf_core.worker.liveness.heartbeat import Beat

ANSWER_TIMEOUT_S = 2.0
"""Time for which the agent waits for answers."""
INSPECTION_INTERVAL_S = 0.2
BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""Number of collectives that torch remembers; without it none."""
BUFFER_SIZE = "256"

THREAD_NAME = "rlhf-collective"
"""As the kernel knows the answering thread; it keeps 15 characters."""

_MODULE = "torch._C._distributed_c10d"
_DEFAULT_GROUP = "default_pg"


def answer_path(slots: Path, local_rank: int, number: int) -> Path:
    """Path of a worker's answer: beside the slots, on the node."""
    return slots.with_name(f"{slots.name}.collectives-{local_rank}-{number}.json")


# ---------------------------------------------------------------------------------------------------------------------
# In the worker


def answer_in_background(beat: Beat, slots: Path, local_rank: int) -> None:
    """Answer the agent's questions from now on, in a thread of its own. It never beats."""
    threading.Thread(target=_answer, args=(beat, slots, local_rank), name="collectives", daemon=True).start()


def _answer(beat: Beat, slots: Path, local_rank: int) -> None:
    # So a look at the worker's threads can tell this one, which never rests, from those that do its work.
    processes.name_thread(THREAD_NAME)
    answered = beat.questions()
    while True:
        time.sleep(INSPECTION_INTERVAL_S)
        number = beat.questions()
        if number == answered:
            continue
        answered = number
        path = answer_path(slots, local_rank, number)
        with contextlib.suppress(OSError, RuntimeError):
            path.with_suffix(".tmp").write_text(_source[-1](), encoding="utf-8")
            path.with_suffix(".tmp").replace(path)


def answer_from(read: Callable[[], str]) -> None:
    """Answer with the flight recorder of a process that this worker speaks for, from now on."""
    _source.append(read)


def _recorded() -> str:
    """The content of torch's flight recorder; an empty object where torch is not in use."""
    dump = getattr(sys.modules.get(_MODULE), "_dump_fr_trace_json", None)
    if dump is None:
        return "{}"
    content = dump(includeCollectives=True, onlyActive=False)
    return content.decode() if isinstance(content, bytes) else str(content)


_source: list[Callable[[], str]] = [_recorded]
"""Ways to read the flight recorder; the last one counts."""

# ---------------------------------------------------------------------------------------------------------------------
# In the agent


def read_answers(
    ranks: Sequence[RankStatus], slots: Path, number: int, timeout_s: float = ANSWER_TIMEOUT_S
) -> dict[int, str]:
    """The answers to a question by local rank, once all are there that can be expected, or the patience is over."""
    deadline = time.monotonic() + timeout_s
    waiting = {
        rank.local_rank: answer_path(slots, rank.local_rank, number)
        for rank in ranks
        # One that has not beaten yet has not begun to listen.
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


def with_collectives(ranks: Iterable[RankStatus], answers: Mapping[int, str]) -> list[RankStatus]:
    """Statuses that also say which collective each worker has entered last, as far as it has answered."""
    return [with_collective(rank, answers.get(rank.local_rank, "{}")) for rank in ranks]


def with_collective(rank: RankStatus, content: str) -> RankStatus:
    """A status that also says which collective the worker has entered last.

    Only the default process group counts: the numbers of two groups cannot be compared.

    Args:
        rank: As read from its slot.
        content: Its answer; anything that cannot be understood leaves the status as it was.
    """
    try:
        entries = [entry for entry in json.loads(content).get("entries", ()) if not entry["is_p2p"]]
        if not entries or _DEFAULT_GROUP not in entries[-1]["process_group"]:
            return rank
        last = entries[-1]
        found = {
            "collective": str(last["profiling_name"]),
            "collective_sequence": int(last["collective_seq_id"]),
            "collective_shape": f"{'/'.join(last['input_dtypes'])} {json.dumps(last['input_sizes'])}",
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return rank
    return rank.model_copy(update=found)
