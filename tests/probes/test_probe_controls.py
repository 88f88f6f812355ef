"""Negative controls: without a probe, the same mistakes hang or form separate worlds, and no node is named.

Two "nodes" on this machine are started as by launch scripts: ranks and world size follow from NNODES, NODE_RANK and
NPROC_PER_NODE of each node.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.training

TIMEOUT_S = 12

# One process imports torch and forks the ranks of all worlds. Each writes a line or nothing; then their exits follow.
TRAIN = f"""
import json, os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist

def train(node, local):
    get = node.get
    nproc = int(get("NPROC_PER_NODE", "1"))
    rank = int(get("NODE_RANK", "0")) * nproc + local
    world = int(get("NNODES", "1")) * nproc
    total = torch.ones(1)
    if world > 1:
        address, patience = f"tcp://127.0.0.1:{{get('MASTER_PORT')}}", timedelta(seconds={TIMEOUT_S})
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=patience)
        dist.all_reduce(total)
    return f"trained in a world of {{int(total)}}"

ranks = []
for node in json.loads(sys.argv[1]):
    for local in range(int(node.get("NPROC_PER_NODE", "1"))):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm({TIMEOUT_S * 3})
            try:
                os.write(writer, train(node, local).encode())
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        ranks.append((node["world"], pid, reader))
for world, pid, reader in ranks:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps([world, code, os.read(reader, 1000).decode()]), flush=True)
"""


@dataclass(frozen=True)
class End:
    """Exit of one process."""

    code: int
    output: str


WORLDS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "nodes that agree": [{"NNODES": "2", "NODE_RANK": "0"}, {"NNODES": "2", "NODE_RANK": "1"}],
    "NNODES unset on one": [{"NNODES": "2", "NODE_RANK": "0"}, {"NODE_RANK": "1"}],
    "NPROC_PER_NODE differs": [
        {"NNODES": "2", "NODE_RANK": "0", "NPROC_PER_NODE": "2"},
        {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "1"},
    ],
    "the same NODE_RANK": [
        {"NNODES": "3", "NODE_RANK": "0"},
        {"NNODES": "3", "NODE_RANK": "1"},
        {"NNODES": "3", "NODE_RANK": "1"},
    ],
}
"""Variables of the nodes, by what they do."""


@pytest.fixture(scope="module")
def ends() -> dict[str, list[End]]:
    """Exits of the ranks of all worlds, which wait side by side."""
    nodes = []
    for world, own in WORLDS.items():
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        nodes += [{"world": world, "MASTER_PORT": port, **node} for node in own]
    command = [sys.executable, "-c", TRAIN, json.dumps(nodes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, list[End]] = {world: [] for world in WORLDS}
    for line in output.splitlines():
        world, code, text = json.loads(line)
        found[world].append(End(code, text))
    return found


def test_nodes_that_agree_train_together(ends: dict[str, list[End]]) -> None:
    assert ends["nodes that agree"] == [End(0, "trained in a world of 2")] * 2


def test_nnodes_unset_on_one_node_trains_separately_and_reports_success(ends: dict[str, list[End]]) -> None:
    waited, alone = ends["NNODES unset on one"]
    assert waited.code != 0  # in vain
    assert alone == End(0, "trained in a world of 1")


def test_different_nproc_never_forms_a_world(ends: dict[str, list[End]]) -> None:
    own = ends["NPROC_PER_NODE differs"]
    assert len(own) == 3
    assert all(end.code != 0 for end in own), own
    assert not any("world of 4" in end.output for end in own)


def test_a_duplicate_node_rank_never_forms_a_world(ends: dict[str, list[End]]) -> None:
    own = ends["the same NODE_RANK"]
    assert len(own) == 3
    assert all(end.code != 0 for end in own), own
