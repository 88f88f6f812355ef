"""Injects faults inside a worker at an exact moment. It enters a run as user code (``code.paths``); the product knows
nothing of it.

It serves as the generator, the reward function and the scorer of the run, so every worker imports it before its first
step. Beside it lies ``saboteur.json``: the faults of the run, each with the step, the phase and the rank at which it
strikes. Every fault strikes once in the life of a run: a file in the folder of the run's faults records when and where
it did, and in which process. These files are the truth with which a diagnosis is compared.

All its patches are limited to the worker's own process.
"""

import ctypes
import hashlib
import json
import operator
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PLAN: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""``struck``: folder for what has struck. ``pace_s``: sleep per reward call. ``faults``: a list of

    name         identity within the run
    moment       ``beat`` (of ``phase``), ``slow`` (the same), ``reward``, ``metrics``, ``loss``, ``sync`` or ``probe``
    what         which fault of that moment
    step         training step
    rank         rank that is struck; -1 for every rank
    phase        phase whose beat is meant
    after_beats  beats of that phase and step that go well first
    seconds, gap_s, odd_rank, group   what the single fault needs
"""


def digits(split: str, seed: int, **arguments: Any) -> list[dict[str, Any]]:
    """The task of the quickstart."""
    from rlhf_core.training.tasks import sort_digits

    return sort_digits(split, seed, **arguments)


def reward(*, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Score of the completions; also the moment for faults in a reward function."""
    time.sleep(_PLAN["pace_s"])
    for fault in _due("reward"):
        _REWARD_FAULTS[fault["what"]](fault)
    return score(prompts=prompts, completions=completions, answer=answer)


def score(*, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Share of correct characters.

    The score is not all or nothing: a model that never gets a whole answer right would have no gradient, and runs with
    the same weights at every step are equal whatever was lost.
    """
    return [
        sum(map(operator.eq, found.strip(), expected.strip())) / len(expected.strip())
        for found, expected in zip(completions, answer, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Moments of faults

_now = {"step": 0}
_beats: Counter[tuple[str, int]] = Counter()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _node() -> str:
    arguments = sys.argv
    return arguments[arguments.index("--node") + 1] if "--node" in arguments else ""


def _mine(moment: str) -> list[dict[str, Any]]:
    return [fault for fault in _PLAN["faults"] if fault["moment"] == moment and fault["rank"] in (-1, _rank())]


def _due(moment: str) -> list[dict[str, Any]]:
    """Claim the faults of this moment and step that have not struck yet."""
    return [fault for fault in _mine(moment) if fault["step"] == _now["step"] and _strike(fault)]


def _strike(fault: dict[str, Any]) -> bool:
    folder = Path(_PLAN["struck"])
    name = f"{fault['name']}.{_rank()}" if fault["rank"] == -1 else fault["name"]
    try:
        descriptor = os.open(folder / f"{name}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    truth = {"time": time.time(), "rank": _rank(), "node": _node(), "pid": os.getpid(), "step": _now["step"]}
    os.write(descriptor, json.dumps(truth).encode())
    os.close(descriptor)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Faults on a beat: at any point of the worker between two signs of life


def _stop(fault: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _cuda_oom(fault: dict[str, Any]) -> None:
    import torch

    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is "
        "free. Process 4242 has 78.08 GiB memory in use."
    )


def _host_oom(fault: dict[str, Any]) -> None:
    """A real kill by the kernel: this process enters a memory group of its own, and allocates more than its limit."""
    group = Path(fault["group"])
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text("64M")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)) * 16)


_BEAT_FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "stop": _stop,
    "cuda_oom": _cuda_oom,
    "host_oom": _host_oom,
}


def _patch_beats() -> None:
    from rlhf_core.worker.liveness.heartbeat import Beat

    plain, faults = Beat.beat, _mine("beat")
    slow = [_Slow(fault) for fault in _mine("slow")]

    def beat(self: Any, phase: Any, step: int) -> None:
        plain(self, phase, step)
        _now["step"] = step
        _beats[str(phase), step] += 1
        for one in slow:
            one.pause(str(phase), step)
        for fault in faults:
            is_due = (fault["phase"], fault["step"]) == (str(phase), step)
            if is_due and _beats[str(phase), step] > fault.get("after_beats", 0) and _strike(fault):
                _BEAT_FAULTS[fault["what"]](fault)

    Beat.beat = beat  # type: ignore[method-assign]


class _Slow:
    """Prolongs one phase of one step: it pauses at every beat until the given time has been slept."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self._fault = fault
        self._left_s = 0.0
        self._begun = False

    def pause(self, phase: str, step: int) -> None:
        fault = self._fault
        if (phase, step) != (fault["phase"], fault["step"]):
            return
        if not self._begun:
            self._begun = True
            self._left_s = fault["seconds"] if _strike(fault) else 0.0
        pause_s = min(self._left_s, fault["gap_s"])
        if pause_s > 0:
            self._left_s -= pause_s
            time.sleep(pause_s)


# ---------------------------------------------------------------------------------------------------------------------
# Faults in the reward function


def _sleep(fault: dict[str, Any]) -> None:
    time.sleep(fault["seconds"])


def _endless_loop(fault: dict[str, Any]) -> None:
    while True:
        pass


def _hold_gil(fault: dict[str, Any]) -> None:
    ctypes.PyDLL(None).sleep(100_000)  # PyDLL, unlike CDLL, keeps the interpreter lock during the call


def _fork(fault: dict[str, Any]) -> None:
    for _ in range(300):
        subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, start_new_session=True)


def _deadlock(fault: dict[str, Any]) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _wait_for_service(fault: dict[str, Any]) -> None:
    """Wait without a timeout for a slow reward service that this function starts."""
    service = subprocess.Popen(
        [sys.executable, "-c", _SERVICE, str(fault["seconds"])], stdout=subprocess.PIPE, start_new_session=True
    )
    assert service.stdout is not None
    with socket.create_connection(("127.0.0.1", int(service.stdout.readline()))) as connection:
        connection.recv(1)
    service.wait()


_SERVICE = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
time.sleep(float(sys.argv[1]))
connection.sendall(b"1")
"""


def _fifo(fault: dict[str, Any]) -> str:
    """A file whose content arrives late."""
    path = Path(tempfile.mkdtemp()) / "late"
    os.mkfifo(path)
    subprocess.Popen(["sh", "-c", f"sleep {fault['seconds']}; echo late > {path}"], start_new_session=True)
    return str(path)


def _wait_for_file(fault: dict[str, Any]) -> None:
    Path(_fifo(fault)).read_bytes()


def _block_in_kernel(fault: dict[str, Any]) -> None:
    """State D: the child opens the file before it becomes another program; the kernel holds its parent meanwhile."""
    opened = (os.POSIX_SPAWN_OPEN, 0, _fifo(fault), os.O_RDONLY, 0)
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opened]), 0)


def _compile(fault: dict[str, Any]) -> None:
    """A real compiler, started by a build tool that waits for it."""
    source = Path(tempfile.mkdtemp()) / "big.cpp"
    source.write_text("#include <algorithm>\n#include <iostream>\n#include <map>\n#include <regex>\nint main() {}\n")
    build = (
        f"while [ $(date +%s) -lt {int(time.time() + fault['seconds'])} ]; do g++ -O2 -c {source} -o {source}.o; done"
    )
    subprocess.run(["sh", "-c", build], check=True)


def _wait_for_compilation(fault: dict[str, Any]) -> None:
    """Wait as torch waits for another process that compiles the same extension: by polling its lock."""
    from torch.utils.file_baton import FileBaton

    lock = Path(tempfile.mkdtemp()) / "lock"
    lock.touch()
    subprocess.Popen(["sh", "-c", f"sleep {fault['seconds']}; rm {lock}"], start_new_session=True)
    FileBaton(str(lock)).wait()


def _compute(fault: dict[str, Any]) -> None:
    until_s = time.monotonic() + fault["seconds"]
    while time.monotonic() < until_s:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)


def _delegate(fault: dict[str, Any]) -> None:
    """Let the main thread wait for a lock without a timeout, as in a deadlock, while its own thread works."""
    thread = threading.Thread(target=_compute, args=(fault,))
    thread.start()
    thread.join()


_REWARD_FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "endless_loop": _endless_loop,
    "hold_gil": _hold_gil,
    "fork": _fork,
    "sleep": _sleep,
    "deadlock": _deadlock,
    "wait_for_service": _wait_for_service,
    "wait_for_file": _wait_for_file,
    "block_in_kernel": _block_in_kernel,
    "compile": _compile,
    "wait_for_compilation": _wait_for_compilation,
    "compute": _compute,
    "delegate": _delegate,
}


# ---------------------------------------------------------------------------------------------------------------------
# Faults in collectives and in the loss


def _patch_metrics() -> None:
    """Add a collective right before the reduction of the metrics, in which one rank deviates from the rest."""
    from rlhf_core.training.metrics import StepMetrics

    plain: Any = StepMetrics.reduced

    def reduced(metrics: Any, request: str = "") -> Any:
        for fault in _due("metrics"):
            _odd_collective(fault, metrics._ranks)
        return plain(metrics, request)

    StepMetrics.reduced = reduced


def _odd_collective(fault: dict[str, Any], ranks: Any) -> None:
    from rlhf_core.training.metrics import VECTOR_SIZE

    if fault["what"] == "another_operation":
        ranks.from_first("another") if ranks.rank == fault["odd_rank"] else ranks.sum([0.0])
        return
    length = {"skip_equal_shape": VECTOR_SIZE, "skip_other_shape": 17, "wrong_shape": 1000}[fault["what"]]
    odd = ranks.rank == fault["odd_rank"]
    if fault["what"] == "wrong_shape":
        ranks.sum([0.0] * (length + 24 * odd))
    elif not odd:
        ranks.gather_numbers([0.0] * length)


def _patch_loss() -> None:
    from rlhf_core.training.algorithms.policy_gradient import PolicyGradient

    plain = PolicyGradient.loss

    def broken(*arguments: Any) -> Any:
        loss, stats = plain(*arguments)
        return (loss * float("nan") if _due("loss") else loss), stats

    PolicyGradient.loss = broken  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------------------------
# Faults in a weight sync


def _patch_sync() -> None:
    """Signal an engine once all engines wait for the bytes of a version, before these arrive.

    The fault strikes at its step or the first one after it with a sync: an evaluation has given the engines the
    weights.
    """
    from rlhf_core.weight_sync.sender import Transfer

    plain = Transfer.send

    def send(self: Any, beat: Any) -> Any:
        for fault in _mine("sync"):
            if _now["step"] < fault["step"] or not _strike(fault):
                continue
            os.kill(_engine_pid(fault["engine"]), getattr(signal, fault["what"]))
        return plain(self, beat)

    Transfer.send = send  # type: ignore[method-assign]


def _patch_probe() -> None:
    """Make an engine report numbers other than the trainer's in two consecutive syncs, from the step of the fault
    on."""
    from rlhf_core.errors import StaleWeights
    from rlhf_core.training.rollouts.remote.client import HttpEngineControl

    plain, begun = HttpEngineControl._require_match, Counter[str]()

    def require_match(self: Any, committed: Any) -> None:
        for fault in _mine("probe"):
            if self.name != f"engine-{fault['engine']}" or _now["step"] < fault["step"]:
                continue
            if begun[fault["name"]] == 1 or _strike(fault):
                begun[fault["name"]] += 1
                raise StaleWeights(f"{self.name} shows other numbers")
        plain(self, committed)

    HttpEngineControl._require_match = require_match  # type: ignore[method-assign]


def _engine_pid(rank: int) -> int:
    """Process id of the newest start of an engine: the process that listens at its registered address."""
    import psutil

    from rlhf_core.files.whole import read_model
    from rlhf_core.run_dir.run import RunDir
    from rlhf_core.schemas.engines import EngineAddress

    options = dict(zip(sys.argv, sys.argv[1:], strict=False))
    address = read_model(
        RunDir(Path(options["--run-dir"])).attempt(int(options["--attempt"])).engine(rank), EngineAddress
    )
    assert address is not None
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return next(int(one.pid) for one in listening if one.pid and one.laddr.port == address.port)


if "RLHF_SLOTS" in os.environ:
    # Only in a worker: preflight imports this module too, without torch and without faults to inject.
    _patch_beats()
    if _mine("metrics"):
        _patch_metrics()
    if _mine("loss"):
        _patch_loss()
    if _mine("sync"):
        _patch_sync()
    if _mine("probe"):
        _patch_probe()
