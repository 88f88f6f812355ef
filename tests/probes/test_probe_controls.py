"""Negative controls: the same mistakes without a probe hang, or make separate worlds, and no node is named.

Two "nodes" on this machine are started as launch scripts do it: ranks and world follow from NNODES, NODE_RANK and
NPROC_PER_NODE of each node.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.training

TIMEOUT_S = 12

TRAIN = f"""
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist

local, get = int(sys.argv[1]), os.environ.get
nproc = int(get("NPROC_PER_NODE", "1"))
rank = int(get("NODE_RANK", "0")) * nproc + local
world = int(get("NNODES", "1")) * nproc
total = torch.ones(1)
if world > 1:
    address, patience = f"tcp://127.0.0.1:{{get('MASTER_PORT')}}", timedelta(seconds={TIMEOUT_S})
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=patience)
    dist.all_reduce(total)
print(f"trained in a world of {{int(total)}}", flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class End:
    """End of one process."""

    code: int
    said: str


def launch(nodes: list[Mapping[str, str]]) -> list[End]:
    """Start the ranks of two nodes with their own ideas of the world."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    started = []
    for node in nodes:
        for local in range(int(node.get("NPROC_PER_NODE", "1"))):
            env = {**os.environ, "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **node}
            words = [sys.executable, "-c", TRAIN, str(local)]
            started.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    ends = []
    for process in started:
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S * 3)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        ends.append(End(process.returncode, said.strip()))
    return ends


def test_nodes_that_agree_train_together() -> None:
    ends = launch([{"NNODES": "2", "NODE_RANK": "0"}, {"NNODES": "2", "NODE_RANK": "1"}])
    assert [end.said for end in ends] == ["trained in a world of 2"] * 2


def test_nnodes_unset_on_one_node_trains_apart_and_calls_it_done() -> None:
    ends = launch([{"NNODES": "2", "NODE_RANK": "0"}, {"NODE_RANK": "1"}])
    assert ends[0].code != 0  # waited in vain
    assert ends[1] == End(0, "trained in a world of 1")


def test_nproc_that_differs_never_becomes_a_world() -> None:
    ends = launch(
        [
            {"NNODES": "2", "NODE_RANK": "0", "NPROC_PER_NODE": "2"},
            {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "1"},
        ]
    )
    assert all(end.code != 0 for end in ends), ends
    assert not any("world of 4" in end.said for end in ends)


def test_the_same_node_rank_twice_never_becomes_a_world() -> None:
    ends = launch(
        [{"NNODES": "3", "NODE_RANK": "0"}, {"NNODES": "3", "NODE_RANK": "1"}, {"NNODES": "3", "NODE_RANK": "1"}]
    )
    assert all(end.code != 0 for end in ends), ends
