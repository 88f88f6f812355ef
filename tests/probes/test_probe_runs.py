"""Whole runs on a real Slurm with an unfit node: it is found, gets a strike and is replaced; not without a probe."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import WHY_NO_NAMESPACES, Cluster

pytestmark = [
    pytest.mark.skipif(bool(WHY_NO_NAMESPACES), reason=WHY_NO_NAMESPACES),
    pytest.mark.end_to_end,
    pytest.mark.training,
]

SMALL = (
    "resources.num_nodes=3",
    "loops.warm_start.num_steps=2",
    "loops.warm_start.algorithm.batch_size=12",
    "loops.main.num_steps=2",
    "loops.main.algorithm.prompts_per_step=12",
    "evaluate.num_prompts=8",
    "supervise.setup_floor_s=200",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes, the second of them with a slow link."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=4, namespaces=True)
    cluster.up()
    cluster.slow_link("node2", 40)
    yield cluster
    cluster.down()


def rlhf(cluster: Cluster, home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **cluster.environment, "RLHF_SCHEDULER": "slurm", "RLHF_HOME": str(home)}
    command = [sys.executable, "-m", "rlhf_core.cli.main", *words]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False)


def run(cluster: Cluster, home: Path, *settings: str) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    home.mkdir()
    overrides = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    done = rlhf(cluster, home, "run", "slurm-quickstart", "--no-prefect", *overrides)
    shown = rlhf(cluster, home, "show", "last", "--json")
    assert shown.returncode == 0, done.stdout + done.stderr + shown.stderr
    return done, json.loads(shown.stdout)


def test_a_node_with_a_slow_link_is_replaced_and_left_alone_afterwards(cluster: Cluster, tmp_path: Path) -> None:
    done, shown = run(cluster, tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(one["number"], one["state"]) for one in shown["attempts"]] == [(1, "failed"), (2, "completed")]
    assert shown["attempts"][1]["nodes"] == ["node1", "node3", "node4"]
    (incident,) = shown["incidents"]
    assert (incident["failure_kind"], incident["suspect_nodes"]) == ("node_unfit", ["node2"])
    (blocked,) = [one for one in shown["checks"] if one["status"] == "blocked"]
    assert (blocked["id"], blocked["node"], blocked["attempt"]) == ("probe.bandwidth", "node2", 1)
    known = json.loads(rlhf(cluster, tmp_path / "home", "nodes", "--json").stdout)
    assert [one["node"] for one in known if one["excluded_until"]] == ["node2"]
    speeds = rlhf(cluster, tmp_path / "home", "sql", "SELECT attempt, node FROM node_speeds ORDER BY 1, 2", "--json")
    assert len(json.loads(speeds.stdout)) == 6


def test_a_run_that_needs_every_node_ends_with_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    done, shown = run(cluster, tmp_path / "home", "resources.num_nodes=4")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no other node can take the place of node2" in done.stderr
    assert "have its network checked" in done.stderr
    assert shown["run"]["state"] == "failed"
    assert len(shown["attempts"]) == 1


def rows(path: Path, offset: int) -> Path:
    """A data file of digits to sort."""
    made = [f"{(number * 37 + offset) % 1000:04}" for number in range(64)]
    lines = [json.dumps({"prompt": f"{text}=", "answer": "".join(sorted(text))}) for text in made]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("probed", [True, False])
def test_another_dataset_on_one_node_ends_the_attempt_or_is_trained_on_unsaid(
    cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest, probed: bool
) -> None:
    """With its negative control: without a probe node1 trains on other prompts, and the run calls itself completed."""
    train, held_out, other = (
        rows(tmp_path / f"{name}.jsonl", offset) for offset, name in enumerate(("train", "eval", "other"))
    )
    namespace = ["nsenter", "--target", str(cluster.pid("slurmd-node1")), "--mount"]
    subprocess.run([*namespace, "mount", "--bind", str(other), str(train)], check=True)
    cluster.mend_link("node2")
    request.addfinalizer(lambda: cluster.slow_link("node2", 40))
    data = (f"data.train={train}", f"data.eval={held_out}", "data.generator=", "data.generator_args={}")
    off = 'preflight.off={"data.overlap" = "a small task"}'
    done, shown = run(cluster, tmp_path / "home", *data, off, f"preflight.probe={str(probed).lower()}")
    assert done.returncode == 0, done.stdout + done.stderr
    blocked = [(one["id"], one["node"]) for one in shown["checks"] if one["status"] == "blocked"]
    assert blocked == ([("node.content", "node1")] if probed else [])
    assert ("node1" in shown["attempts"][-1]["nodes"]) is not probed


def test_without_a_probe_the_slow_node_is_trained_on_silently(cluster: Cluster, tmp_path: Path) -> None:
    """Negative control of this file."""
    done, shown = run(cluster, tmp_path / "home", "preflight.probe=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node2" in shown["attempts"][0]["nodes"]
    assert shown["incidents"] == []
    assert not any(one["node"] for one in shown["checks"])
