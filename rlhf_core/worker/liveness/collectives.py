"""The current collective of a worker, read from torch's flight recorder while its main thread is blocked.

A worker that waits in a collective is in C++ code without the GIL, so a helper thread can still dump the flight
recorder. The agent asks through a word in the header of the slot file. A worker that is stopped or holds the GIL does
not answer, and the agent does not wait for it beyond a timeout.
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
"""Time that the agent waits for answers, in seconds."""
INSPECTION_INTERVAL_S = 0.2
BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""Environment variable with the number of collectives that torch records; none are recorded if it is unset."""
BUFFER_SIZE = "256"

THREAD_NAME = "rlhf-collective"
"""The answering thread's name in the kernel, which keeps 15 characters."""

_MODULE = "torch._C._distributed_c10d"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of that module, each for one recorder: NCCL keeps its own, and torch without CUDA has only the other."""
_DEFAULT_GROUP = "default_pg"


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
        with contextlib.suppress(OSError, RuntimeError):
            path.with_suffix(".tmp").write_text(_source[-1](), encoding="utf-8")
            path.with_suffix(".tmp").replace(path)


def answer_from(read: Callable[[], str]) -> None:
    """Answer with the flight recorder of a process that this worker represents, from now on."""
    _source.append(read)


def _recorded() -> str:
    """The content of torch's flight recorder, of NCCL's if it has any; an empty object if torch is not in use."""
    text = "{}"
    for name in _DUMPS:
        dump = getattr(sys.modules.get(_MODULE), name, None)
        if dump is not None:
            content = dump(includeCollectives=True, onlyActive=False)
            text = content.decode() if isinstance(content, bytes) else str(content)
            if json.loads(text).get("entries"):
                break
    return text


_source: list[Callable[[], str]] = [_recorded]
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


def with_collectives(ranks: Iterable[RankStatus], answers: Mapping[int, str]) -> list[RankStatus]:
    """Add to each status the collective that the worker entered last, if it has answered."""
    return [with_collective(rank, answers.get(rank.local_rank, "{}")) for rank in ranks]


def with_collective(rank: RankStatus, content: str) -> RankStatus:
    """Add to a status the collective that the worker entered last.

    Only the default process group counts: sequence numbers of different groups cannot be compared.

    Args:
        rank: Status read from the worker's slot.
        content: The worker's answer; the status is unchanged if it cannot be parsed.
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
