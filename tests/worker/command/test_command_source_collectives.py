"""Collectives of a real program that trains in a subgroup, as DeepSpeed, Megatron and FSDP do."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from process_tools import until
from watched_programs import Polls

from rlhf_core.worker.command.launch import IN_RANK
from rlhf_core.worker.command.sources.collectives import CollectivesSource
from rlhf_core.worker.in_rank.rlhf_rank_file import ENTERED, LEFT, PATH_VARIABLE, RankFile, rank_path
from rlhf_core.worker.liveness.collectives import BUFFER_SIZE, BUFFER_VARIABLE

pytestmark = pytest.mark.training

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
rank, num_steps, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
dist.barrier()
group = dist.new_group([0, 1])
for step in range(num_steps if rank == 1 else 100_000):
    dist.all_reduce(torch.ones(4), group=group)
    time.sleep(0.05)
time.sleep(600)
"""
"""Two ranks that meet in the default group once; the second one leaves the loop after some steps."""
StartRanks = Callable[[int], list[RankFile]]


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[StartRanks]:
    prefix = str(tmp_path / "ranks")
    given = {PATH_VARIABLE: prefix, "RLHF_RECORD_COLLECTIVES": "1", BUFFER_VARIABLE: BUFFER_SIZE}
    with ExitStack() as running:

        def start(num_steps: int) -> list[RankFile]:
            found = []
            for rank in (0, 1):
                found.append(RankFile(rank_path(prefix, rank), create=True))
                process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, str(rank), str(num_steps), str(tmp_path)],
                    env={**os.environ, **given, "PYTHONPATH": str(IN_RANK), "LOCAL_RANK": str(rank)},
                )
                running.callback(process.wait)
                running.callback(process.kill)
            return found

        yield start


def test_a_healthy_program_that_trains_in_a_subgroup_makes_progress(start_ranks: StartRanks) -> None:
    for status in start_ranks(100_000):
        Polls(CollectivesSource(status)).until_moved_again()
        assert status.get(ENTERED) == 1, "the number that is compared with other ranks' stays that of the default group"


def test_a_hang_in_a_subgroup_is_one_in_a_collective(start_ranks: StartRanks) -> None:
    waiting, outside = start_ranks(20)
    source = Polls(CollectivesSource(waiting))
    source.until_moved_again()
    until(lambda: not any(reading.moved for reading in source.polls(10)))
    assert waiting.get(ENTERED) > waiting.get(LEFT)
    assert outside.get(ENTERED) == outside.get(LEFT)
