"""A training script that knows nothing of this project and needs no torch: one process for each rank, started by hand.

    external_program.py OUTPUT STEPS [--every N] [--resume CHECKPOINT] [--fault RANK:STEP:KIND] [--forgets] [--leaves]
        [--refuses] [--daemon] [--uploads SECONDS] [--printer RANK]

The first rank saves, and prints its steps unless another one does. A fault strikes once: a file in the output folder
remembers it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("output", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--resume", type=Path)
parser.add_argument("--fault", default="")
parser.add_argument("--forgets", action="store_true", help="begin anew whatever it is told")
parser.add_argument("--refuses", action="store_true", help="fail to load the first checkpoint that it is told to")
parser.add_argument("--daemon", action="store_true", help="leave a process behind")
parser.add_argument("--leaves", action="store_true", help="exit once it has saved on a signal")
parser.add_argument("--uploads", type=float, default=0.0, help="seconds of silent work after the last step")
parser.add_argument("--pause", type=float, default=0.1)
parser.add_argument("--printer", type=int, default=0, help="rank that prints its steps")
given = parser.parse_args()

rank = int(os.environ["RANK"])
struck_at, struck_rank, kind = 0, -1, ""
if given.fault:
    first, second, kind = given.fault.split(":")
    struck_rank, struck_at = int(first), int(second)
wanted = False


def request_save(number: int, frame: object) -> None:
    global wanted
    wanted = True


signal.signal(signal.SIGUSR1, request_save)


def save(step: int) -> None:
    folder = given.output / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes(step.to_bytes(8, "little") * 64)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


start = 0
if given.resume and not given.forgets:
    start = json.loads((given.resume / "trainer_state.json").read_text())["global_step"]
    refused = given.output / "refused"
    if given.refuses and (not refused.exists() or refused.read_text() in ("", str(start))):
        refused.write_text(str(start))
        raise RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory")
if given.daemon and rank == 0:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (given.output / "daemon").write_text(str(left.pid))
for step in range(start + 1, given.steps + 1):
    time.sleep(given.pause)
    once = given.output / "struck"
    if rank == struck_rank and step == struck_at and not once.exists():
        once.touch()
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "leave":
                sys.exit(0)
            case "raise":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
    leaves = wanted and given.leaves
    if rank == given.printer:
        print(f"step {step} loss {1 / step:.4f} reward_std {0.0 if kind == 'flat' else 0.5}", flush=True)
    elif struck_rank != rank:
        print(f"rank {rank} at {step}", flush=True)
    if rank == 0 and (step % given.every == 0 or wanted):
        wanted = False
        save(step)
    if leaves:
        sys.exit(0)
time.sleep(given.uploads)
