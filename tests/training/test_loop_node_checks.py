"""Measurements of a node: the pairs that communicate, and wrong sums."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.training.probes.node import rounds

pytestmark = pytest.mark.training


@pytest.mark.parametrize("num", range(2, 20))
def test_every_node_has_two_partners_and_never_two_at_once(num: int) -> None:
    made = rounds(num)
    for pairs in made:
        busy = Counter(node for pair in pairs for node in pair)
        assert max(busy.values()) == 1
    partners = Counter(node for pairs in made for pair in pairs for node in pair)
    assert set(partners) == set(range(num))
    assert set(partners.values()) == {1 if num == 2 else 2}
    assert len({frozenset(pair) for pairs in made for pair in pairs}) == sum(map(len, made))


def test_one_node_speaks_with_nobody() -> None:
    assert rounds(1) == []


def measure(tmp_path: Path, ranks: int, before: str = "", **fields: Any) -> list[list[dict[str, Any]]]:
    """Measure one node with so many ranks, after some code."""
    started = []
    for local_rank in range(ranks):
        place = {
            "node": 0,
            "num_nodes": 1,
            "local_rank": local_rank,
            "ranks_per_node": ranks,
            "store": str(tmp_path / "store"),
            "prefix": "probe",
            "gpu": False,
            "start_s": 60.0,
            "timeout_s": 30.0,
            **fields,
        }
        code = f"import json, sys\nfrom rlhf_core.training.probes import node as n\n{before}\n"
        code += "sys.exit(n.run(json.loads(sys.argv[1])))"
        words = [sys.executable, "-c", code, json.dumps(place)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env))
    return [[json.loads(line) for line in process.communicate(timeout=120)[0].splitlines()] for process in started]


BROKEN_NETWORK = """
class AddsOne:
    def __init__(self, group):
        self.group = group

    def allreduce(self, tensors):
        work = self.group.allreduce(tensors)
        work.wait()
        tensors[0].add_(1)
        return work

    def allgather(self, outputs, inputs):
        work = self.group.allgather(outputs, inputs)
        work.wait()
        for part in outputs[0]:
            part.add_(1)
        return work

made = n._group
n._group = lambda *words: AddsOne(made(*words))
"""


def test_two_ranks_get_through_all_steps(tmp_path: Path) -> None:
    for lines in measure(tmp_path, 2):
        steps = [line["step"] for line in lines]
        assert steps == ["started", "met", "matmul", "pairs", "all_reduce", "all_gather", "done"]
        assert not any("problem" in line for line in lines)
        assert lines[-1]["tflops"] > 0


def test_a_wrong_sum_is_seen_by_every_rank(tmp_path: Path) -> None:
    found = [{line.get("problem") for line in lines} - {None} for lines in measure(tmp_path, 2, BROKEN_NETWORK)]
    assert found == [{"all_reduce: 1024 of 1024 sums are wrong", "all_gather: the parts of ranks 0, 1 are wrong"}] * 2


def test_a_rank_that_does_not_come_is_counted(tmp_path: Path) -> None:
    (lines,) = measure(tmp_path, 1, ranks_per_node=2, start_s=1.0)
    assert [line.get("step") for line in lines] == ["started", None]
    assert lines[-1]["problem"] == "Late: 1 of 2 ranks started within 1 s"
