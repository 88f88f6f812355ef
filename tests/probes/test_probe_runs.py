"""Whole runs on a real Slurm with unfit nodes: each is found, gets a strike and is replaced; not without a probe."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from process_tools import run_rlhf
from slurm_cluster import Cluster, needs_namespaces

pytestmark = [pytest.mark.site, needs_namespaces, pytest.mark.end_to_end, pytest.mark.training]

SMALL = (
    "resources.num_nodes=3",
    "loops.warm_start.num_steps=0",
    "loops.main.num_steps=2",
    "loops.main.algorithm.prompts_per_step=12",
    "evaluate.num_prompts=0",
    "supervise.setup_floor_s=200",
)
SLOW_MBIT = 40


@dataclass(frozen=True)
class Unfit:
    """A cluster with two unfit nodes, and the data of its runs."""

    cluster: Cluster
    data: tuple[str, ...]
    """Settings."""


@pytest.fixture(scope="module")
def unfit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unfit]:
    """Five nodes: the first reads another dataset, the second has a slow link."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=5, namespaces=True)
    cluster.up()
    folder = tmp_path_factory.mktemp("data")
    train, held_out, other = (
        rows(folder / f"{name}.jsonl", offset) for offset, name in enumerate(("train", "eval", "other"))
    )
    namespace = ["nsenter", "--target", str(cluster.pid("slurmd-node1")), "--mount"]
    subprocess.run([*namespace, "mount", "--bind", str(other), str(train)], check=True)
    cluster.slow_link("node2", SLOW_MBIT)
    data = (f"data.train={train}", f"data.eval={held_out}", "data.generator=", "data.generator_args={}")
    yield Unfit(cluster, (*data, 'preflight.off={"data.overlap" = "a small task"}'))
    cluster.down()


def rows(path: Path, offset: int) -> Path:
    """A data file of digits to sort."""
    made = [f"{(number * 37 + offset) % 1000:04}" for number in range(64)]
    lines = [json.dumps({"prompt": f"{text}=", "answer": "".join(sorted(text))}) for text in made]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def rlhf(cluster: Cluster, home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return run_rlhf(home, *words, RLHF_SCHEDULER="slurm", RLHF_HOME=str(home), **cluster.environment)


def run(cluster: Cluster, home: Path, *settings: str) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    home.mkdir()
    overrides = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    done = rlhf(cluster, home, "run", "slurm-quickstart", "--no-prefect", *overrides)
    shown = rlhf(cluster, home, "show", "last", "--json")
    assert shown.returncode == 0, done.stdout + done.stderr + shown.stderr
    return done, json.loads(shown.stdout)


def test_unfit_nodes_are_replaced_and_avoided_afterwards(unfit: Unfit, tmp_path: Path) -> None:
    done, shown = run(unfit.cluster, tmp_path / "home", *unfit.data)
    assert done.returncode == 0, done.stdout + done.stderr
    attempts = [(one["number"], one["state"], one["nodes"]) for one in shown["attempts"]]
    assert attempts == [
        (1, "failed", ["node1", "node2", "node3"]),
        (2, "failed", ["node2", "node3", "node4"]),
        (3, "completed", ["node3", "node4", "node5"]),
    ]
    suspects = [(one["failure_kind"], one["suspect_nodes"]) for one in shown["incidents"]]
    assert suspects == [("node_unfit", ["node1"]), ("node_unfit", ["node2"])]
    blocked = [one for one in shown["checks"] if one["status"] == "blocked"]
    found = [(one["id"], one["node"], one["attempt"]) for one in blocked]
    assert found == [("node.content", "node1", 1), ("probe.bandwidth", "node2", 2)]
    assert [one for one in shown["checks"] if one["node"] and one["status"] == "warning"] == []
    assert "data.train" in blocked[0]["found"]
    for peer in ("node3", "node4"):
        assert f"GB/s with {peer}" in blocked[1]["found"]
    known = json.loads(rlhf(unfit.cluster, tmp_path / "home", "nodes", "--json").stdout)
    assert sorted(one["node"] for one in known if one["excluded_until"]) == ["node1", "node2"]
    query = "SELECT attempt, node FROM node_speeds ORDER BY 1, 2"
    speeds = json.loads(rlhf(unfit.cluster, tmp_path / "home", "sql", query, "--json").stdout)
    assert len(speeds) == 6, "of the attempts that got as far as measuring"


UNPROBED = ("preflight.probe=false", "resources.num_nodes=2")


def test_without_a_probe_a_slow_node_is_used_silently(unfit: Unfit, tmp_path: Path) -> None:
    """Negative control: node2 slows all down, and the run completes."""
    done, shown = run(unfit.cluster, tmp_path / "home", *unfit.data, *UNPROBED, 'slurm.exclude=["node1"]')
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one["nodes"] for one in shown["attempts"]] == [["node2", "node3"]]
    assert shown["incidents"] == []
    assert not any(one["node"] or one["status"] == "blocked" for one in shown["checks"])


def test_without_a_probe_other_data_ends_the_run(unfit: Unfit, tmp_path: Path) -> None:
    """Negative control: the ranks find other rows than those of the first, but no other node is tried."""
    done, shown = run(unfit.cluster, tmp_path / "home", *unfit.data, *UNPROBED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [one["failure_kind"] for one in shown["incidents"]] == ["data"]
    assert "rank 1 has loaded other rows than rank 0" in done.stderr
    assert [one["nodes"] for one in shown["attempts"]] == [["node1", "node2"]]


def test_a_run_that_needs_every_node_ends_with_advice(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3, namespaces=True)
    cluster.up()
    try:
        cluster.slow_link("node2", SLOW_MBIT)
        done, shown = run(cluster, tmp_path / "home")
    finally:
        cluster.down()
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no other node can take the place of node2" in done.stderr
    assert "have its network checked" in done.stderr
    assert shown["run"]["state"] == "failed"
    assert len(shown["attempts"]) == 1
