"""Small roles without torch: real processes, real beats, and a collective over a Unix socket that breaks like gloo's.

``script.json`` in the run directory defines the behaviour of each role: a list of ``{"restart": r, "rank": k, "step":
s, "do": what}``.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from rlhf_core.errors import DiskFull, RewardFailed
from rlhf_core.files.appended import LineWriter
from rlhf_core.files.whole import remove_tree, write_model
from rlhf_core.run_dir.checkpoint import CheckpointDir, checksum
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.schemas.reports import MetricsLine, Phase
from rlhf_core.training.types import RoleResult, WorkerContext

STEP_S = 0.05
SLEEP_S = 8.0


class Ring:
    """A sum over the ranks: all send to rank 0, which replies. A peer that dies closes its connection."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._peers: list[socket.socket] = []
        path = context.restart_dir.root / f"ring-{context.role}"
        # Unix socket paths are limited in length and the run directory may be deep: the socket is opened from within.
        os.chdir(path.parent)
        if context.rank == 0:
            server = socket.socket(socket.AF_UNIX)
            server.bind(path.name)
            server.listen()
            self._peers = [server.accept()[0] for _ in range(context.num_ranks - 1)]
        else:
            peer = socket.socket(socket.AF_UNIX)
            while peer.connect_ex(path.name) != 0:
                time.sleep(0.01)
            self._peers = [peer]

    def sum(self, value: int) -> int:
        with self._context.reporter.collective():
            if self._context.rank == 0:
                total = value + sum(self._receive(peer) for peer in self._peers)
                for peer in self._peers:
                    peer.sendall(total.to_bytes(8, "little"))
                return total
            self._peers[0].sendall(value.to_bytes(8, "little"))
            return self._receive(self._peers[0])

    def _receive(self, peer: socket.socket) -> int:
        data = peer.recv(8)
        if len(data) < 8:
            raise RuntimeError("Connection closed by peer")
        return int.from_bytes(data, "little")


def train(context: WorkerContext) -> RoleResult:
    """Make steps with a rollout, a sum, and an occasional checkpoint."""
    step = _whole_checkpoint(context)
    ring = Ring(context)
    metrics = LineWriter(context.restart_dir.metrics) if context.rank == 0 else None
    while step < context.spec.total_steps:
        step += 1
        context.reporter.beat(Phase.ROLLOUT, step)
        _obey_script(context, step)
        if context.rank == 0:
            _await_rollouts(context, step)
        time.sleep(STEP_S)
        context.reporter.beat(Phase.TRAIN, step)
        votes = ring.sum(context.reporter.request() == "stop")
        if metrics is not None:
            line = MetricsLine(step=step, time=utc_now(), loop="sft", metrics={"loss/value": 1.0 / step})
            metrics.write(line)
        if votes or step % context.spec.checkpoint.every_num_steps == 0:
            context.reporter.beat(Phase.CHECKPOINT, step)
            if context.rank == 0:
                _save(context, step)
            ring.sum(0)
        if votes:
            return RoleResult.STOPPED_EARLY
    return RoleResult.DONE


def serve(context: WorkerContext) -> RoleResult:
    """Act as a rollout worker at the trainers' step: beat, and count in a file for the trainers that wait for it."""
    wanted = context.run_dir.root / "wanted"
    step = 0
    _obey_script(context, step)
    while True:
        context.reporter.beat(Phase.ROLLOUT, step)
        now = int(wanted.read_text(encoding="utf-8") or step) if wanted.exists() else 0
        if now != step:
            step = now
            _obey_script(context, step)
        served = _served(context, context.rank)
        served.with_suffix(".new").write_text(str(time.monotonic_ns()), encoding="utf-8")
        served.with_suffix(".new").rename(served)
        time.sleep(STEP_S / 2)


def _served(context: WorkerContext, rank: int) -> Path:
    return context.run_dir.root / f"served-{rank}"


def _await_rollouts(context: WorkerContext, step: int) -> None:
    """Wait for news from every rollout worker, if there are any; without a beat, as a request would."""
    groups = context.placement.groups
    files = [_served(context, k) for one in groups if one.role is Role.ROLLOUT for k in range(one.num_workers)]
    if files:
        (context.run_dir.root / "wanted").write_text(str(step), encoding="utf-8")
    before = {path: path.read_text(encoding="utf-8") if path.exists() else "" for path in files}
    for path in files:
        while not path.exists() or path.read_text(encoding="utf-8") == before[path]:
            time.sleep(0.01)


def evaluate(context: WorkerContext) -> RoleResult:
    """Make a few beats, and write a note that the role ran."""
    _obey_script(context, 0)
    _whole_checkpoint(context)
    for _ in range(3):
        context.reporter.beat(Phase.EVALUATE, context.spec.total_steps)
        time.sleep(STEP_S)
    (context.run_dir.root / f"evaluated-{context.rank}").write_text(str(context.restart), encoding="utf-8")
    return RoleResult.DONE


def _whole_checkpoint(context: WorkerContext) -> int:
    """Step of the newest checkpoint not known to be damaged, verified like the native trainer; 0 if there is none."""
    saved = [one for one in context.run_dir.saved_checkpoints() if one.root.name not in context.damaged]
    if not saved:
        return 0
    saved[-1].verify()
    return saved[-1].step


def _save(context: WorkerContext, step: int) -> None:
    checkpoint = context.run_dir.checkpoint(step)
    partial = CheckpointDir(checkpoint.root.with_name(".partial"), step)
    partial.root.mkdir(parents=True)
    (partial.root / "weights").write_text(str(step), encoding="utf-8")
    manifest = CheckpointManifest(
        step=step,
        loop="sft",
        loop_finished=False,
        num_ranks=context.num_ranks,
        spec_hash="",
        files={"weights": checksum(partial.root / "weights")},
        time=utc_now(),
    )
    write_model(partial.complete, manifest)
    remove_tree(checkpoint.root)
    partial.root.rename(checkpoint.root)


def _obey_script(context: WorkerContext, step: int) -> None:
    path = context.run_dir.root / "script.json"
    if not path.exists():
        return
    for line in json.loads(path.read_bytes()):
        # Lines without a role apply to the groups whose restarts are counted.
        if line.get("role", "" if context.generation is not None else context.role.value) != context.role.value:
            continue
        if line.get("restart", context.restart) != context.restart or line["rank"] != context.rank:
            continue
        if line.get("generation", context.generation) != context.generation:
            continue
        if line["step"] == step:
            _do(line["do"], context)


def _do(what: str, context: WorkerContext) -> None:
    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "damage_newest" | "damage_two" | "damage_all":
            saved = context.run_dir.saved_checkpoints()
            for checkpoint in saved[{"damage_newest": -1, "damage_two": -2, "damage_all": 0}[what] :]:
                (checkpoint.root / "weights").write_text("0", encoding="utf-8")
            if context.role == "trainer":
                os.kill(os.getpid(), signal.SIGKILL)
        case "loop":
            while True:
                pass
        case "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "sleep":
            time.sleep(SLEEP_S)
        case "hold_interpreter":
            ctypes.PyDLL(None).sleep(100000)
        case "reward":
            raise RewardFailed("reward function broken:always answered 'x', expected a number")
        case "full_disk":
            _fill_disk(context)
        case "value":
            raise ValueError(f"something never seen before, number {context.restart}")
        case "child_stops":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
            context.reporter.represent([child.pid])  # type: ignore[attr-defined]
            (context.run_dir.root / "child").write_text(str(child.pid), encoding="utf-8")
            child.send_signal(signal.SIGSTOP)
            child.wait()
        case "await_go":
            while not (context.run_dir.root / "go").exists():
                time.sleep(0.01)
        case "exit":
            os._exit(0)
        case "children":
            _leave_children(context)


def _fill_disk(context: WorkerContext) -> None:
    try:
        with (context.run_dir.root / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError as error:
        raise DiskFull(f"no room for the checkpoint of step 3: {error}") from error


DAEMON = """
import os, sys, time
if os.fork():
    sys.exit()
os.setsid()
with open("daemon.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename("daemon.tmp", "daemon")
time.sleep(120)
"""


def _leave_children(context: WorkerContext) -> None:
    """Leave a child, and a daemon detached from session and parent, as reward functions may do."""
    folder = context.run_dir.root
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    subprocess.run([sys.executable, "-c", DAEMON], cwd=folder, check=True)
    while not (folder / "daemon").exists():
        time.sleep(0.01)
    (folder / "child").write_text(str(child.pid), encoding="utf-8")
