"""A script for torchrun that knows nothing of this project: a small model on all ranks, saved every few steps.

    wrapped_script.py PLAN OUTPUT STEPS EVERY [--resume CHECKPOINT]

It prints its steps. ``PLAN`` is the saboteur's file: of its faults, those with the moments ``step`` and ``pair`` strike
here, once each.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

plan = json.loads(Path(sys.argv[1]).read_text())
output, num_steps, every = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])


def struck(fault: dict[str, Any], step: int, rank: int) -> bool:
    """Record that a fault strikes; return False if it has done so before."""
    try:
        descriptor = os.open(
            Path(plan["struck"]) / f"{fault['name']}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644
        )
    except FileExistsError:
        return False
    node = os.environ.get("SLURMD_NODENAME", "")
    os.write(descriptor, json.dumps({"time": time.time(), "rank": rank, "node": node, "step": step}).encode())
    os.close(descriptor)
    return True


def disturb(moment: str, step: int, rank: int) -> list[str]:
    """Inject the planned faults of this moment, step and rank; return what the rank has to do in another way."""
    found: list[str] = []
    for fault in plan["faults"]:
        if (fault["moment"], fault["step"], fault["rank"]) == (moment, step, rank) and struck(fault, step, rank):
            if fault["what"] == "disagree":
                dist.broadcast(torch.ones(3), src=rank)  # the others are in the reduction of their gradients
            elif fault["what"] == "sleep":
                time.sleep(fault["seconds"])
            found.append(fault["what"])
    return found


def main() -> None:
    """Train, from a checkpoint if one is given."""
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), 0
    rows, columns = [[dist.new_group(list(pair)) for pair in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)))]
    row, column = rows[rank // 2], columns[rank % 2]
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if len(sys.argv) > 6:
        saved = torch.load(Path(sys.argv[6]) / "model.pt")
        first = saved["step"]
        model.load_state_dict(saved["model"])
    for step in range(first + 1, num_steps + 1):
        disturb("step", step, rank)
        loss = model(torch.randn(4, 16)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # As trainers do that split a model over some ranks and the data over others.
        pairs = [row, column, row, column] if not disturb("pair", step, rank) else [column, column, row, row]
        for group in pairs:
            dist.all_reduce(torch.ones(1), group=group)
        time.sleep(plan["pace_s"])
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step % every == 0 or step == num_steps:
                folder = output / f"checkpoint-{step}"
                folder.mkdir(exist_ok=True)
                torch.save({"step": step, "model": model.state_dict()}, folder / "model.pt")


main()
