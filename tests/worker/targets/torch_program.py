"""A training script around a process group that prints nothing: its collectives are all there is to see.

torch_program.py STEPS STEP_OF_FAULT KIND [--last-rank-prints]
"""

import sys
import time

import torch
import torch.distributed as dist

steps, struck_at, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if kind == "alone":
    for step in range(1, steps + 1):
        time.sleep(0.2)
        print(f"step {step}", flush=True)
    sys.exit(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, steps + 1):
    value = torch.ones(4)
    if step == struck_at and kind == "loop" and rank == 1:
        # To the agent, a tenth of a core looks as busy as a whole one, which other tests would lack.
        while True:
            until_s = time.process_time() + 0.01
            while time.process_time() < until_s:
                sum(range(1000))
            time.sleep(0.09)
    if step == struck_at and kind == "disagree" and rank == 1:
        dist.broadcast(value, src=0)
    elif step == struck_at and kind == "disagree":
        dist.barrier()
    else:
        dist.all_reduce(value)
    if "--last-rank-prints" in sys.argv and rank == dist.get_world_size() - 1:
        print(f"step {step} loss {1 / step:.4f}", flush=True)
    time.sleep(0.05)
if kind == "leave":
    print(f"step {steps}", flush=True)
    dist.destroy_process_group()
    time.sleep(2.0)
