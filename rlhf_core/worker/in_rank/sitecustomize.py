"""Startup hook that Python loads in every process of an external trainer.

In a rank it starts a thread that publishes the number of collectives the rank has entered, read from torch's flight
recorder, and dumps the recorder when the worker asks. The thread does not interfere with the program: it calls torch
only once the program itself has created a process group, and never beats for it.

It then loads the ``sitecustomize`` that it hides, if the environment has one.
"""

import importlib.machinery
import importlib.util
import os
import sys
import threading
import time

INTERVAL_S = 0.25
THREAD_NAME = b"rlhf-collective"
"""The thread's name in the kernel; inspections of a rank's threads ignore it."""
_PR_SET_NAME = 15
_HERE = os.path.dirname(os.path.abspath(__file__))


def _follow(status) -> None:  # type: ignore[no-untyped-def]  # untyped: must run on Python 3.8
    import rlhf_flight_recorder as recorder
    import rlhf_rank_file as words

    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD_NAME, 0, 0, 0)
    except (OSError, AttributeError, ImportError):
        pass  # the thread then counts as one of the program's
    answered = status.get(words.QUESTION)
    while True:
        time.sleep(INTERVAL_S)
        try:
            distributed = sys.modules.get("torch.distributed")
            if distributed is None or not hasattr(distributed, "is_initialized"):
                continue
            if not distributed.is_initialized():
                # A program destroys its process group when it is done.
                if status.get(words.GROUP) != words.HAS_GROUP:
                    status.set(words.GROUP, words.NO_GROUP)
                continue
            status.set(words.GROUP, words.HAS_GROUP)
            entered, left, moves = _counts(recorder.dumps("pg_status"))
            status.set(words.ENTERED, entered)
            status.set(words.LEFT, left)
            status.set(words.MOVES, moves)
            if status.get(words.QUESTION) != answered:
                answered = status.get(words.QUESTION)
                with open(status.answer_path + ".tmp", "w") as file:
                    file.write(recorder.contents())
                os.replace(status.answer_path + ".tmp", status.answer_path)
                status.set(words.ANSWERED, answered)
        except Exception:  # an incompatible torch must not disturb the program; the worker notices the silence
            time.sleep(10 * INTERVAL_S)


def _turn_on_recorder() -> None:
    """Let torch before 2.6 record, too: it reads another variable, 0 by default, and later versions warn of that."""
    import importlib.metadata

    try:
        version = importlib.metadata.version("torch").split(".")
        is_old = (int(version[0]), int(version[1])) < (2, 6)
    except (importlib.metadata.PackageNotFoundError, AttributeError, ValueError, IndexError):
        return
    if is_old and "TORCH_FR_BUFFER_SIZE" in os.environ:
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", os.environ["TORCH_FR_BUFFER_SIZE"])


def _counts(dumps):  # type: ignore[no-untyped-def]
    """Collectives of the default process group that were entered, those that were left, and a sum of all groups.

    Many programs train in other groups alone: DeepSpeed in a copy of the default one, Megatron and FSDP in subgroups.
    Their numbers cannot be compared between ranks; while the rank is in such a collective, it has left one fewer.
    """
    recorded = [content["pg_status"] for content in dumps]
    if not recorded:
        return 0, 0, 0
    counts = [_counts_of_group(status) for groups in recorded for status in groups.values()]
    entered, left = _counts_of_group(recorded[0][min(recorded[0], key=lambda name: (len(name), name))])
    if any(one > other for one, other in counts):
        left = min(left, entered - 1)
    return entered, left, sum(map(sum, counts))


def _counts_of_group(status):  # type: ignore[no-untyped-def]
    entered = max(int(status["last_enqueued_collective"]), 0)
    return entered, max(min(int(status["last_completed_collective"]), entered), 0)


def _load_hidden() -> None:
    """Load the ``sitecustomize`` hidden by this one."""
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if found is not None and found.loader is not None:
        module = importlib.util.module_from_spec(found)
        sys.modules["sitecustomize"] = module
        found.loader.exec_module(module)


class _OwnPackage:
    """Finds ``rlhf_core.callback`` if the program's environment does not have the package."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        root = os.path.dirname(os.path.dirname(_HERE))
        if name == "rlhf_core":
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        if name == "rlhf_core.callback":
            return importlib.util.spec_from_file_location(name, os.path.join(root, "callback.py"))
        return None


def _begin() -> None:
    import rlhf_rank_file as words

    sys.meta_path.append(_OwnPackage)
    status = words.own_file()
    if status is not None and os.environ.get("RLHF_RECORD_COLLECTIVES") == "1":
        _turn_on_recorder()
        threading.Thread(target=_follow, args=(status,), name="rlhf-collective", daemon=True).start()


_begin()
_load_hidden()
