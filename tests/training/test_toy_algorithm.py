"""A new algorithm takes one file with its loss and one entry with its settings; everything else follows from them."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.training]

TESTS = Path(__file__).parent
PACKAGE = TESTS.parents[1] / "rlhf_core"

LOSS = '''
"""REINFORCE without a baseline: L = - reward * log policy, summed over tokens, / tokens of the step."""

from rlhf_core.training.algorithms.aggregation import masked_stat, summed
from rlhf_core.training.algorithms.objective import MetricDef, Objective


class Toy(Objective):
    metrics = (
        MetricDef("train/loss", ("loss/toy",)),
        MetricDef("toy/gain", ("gain",)),
    )

    def loss(self, output, batch, sums, spec):
        gain = spec.scale * batch.advantages.to(output.logprobs.dtype)
        losses = -gain * output.logprobs
        stats = {"loss/toy": masked_stat(losses, batch.mask), "gain": masked_stat(gain, batch.mask)}
        return summed(losses, batch.mask, "token_mean") / sums.num_tokens, stats


OBJECTIVE = Toy()
'''

SETTINGS = '''
from typing import Literal

from rlhf_core.schemas.base import Positive


class ToySpec(AlgorithmSpec):
    """An algorithm of a test."""

    samples = True
    rows_setting = "prompts"

    name: Literal["toy"]
    """REINFORCE without a baseline."""
    prompts: Positive = 4
    """Prompts per optimizer step."""
    scale: float = 2.0
    """Weight of the rewards."""


'''

UNION = "Algorithm = Annotated["


def use(folder: str) -> None:
    """Request the toy algorithm in all ways that a user can, in the changed copy of the package."""
    import torch.distributed as dist
    from rank_launcher import make_context, tiny_spec

    import rlhf_core
    from rlhf_core.config import fields as config_fields
    from rlhf_core.config import loading as config
    from rlhf_core.files.appended import read_models
    from rlhf_core.preflight.memory.roles import trainer_estimate
    from rlhf_core.preflight.memory.shapes import Shape
    from rlhf_core.run_dir.run import RunDir
    from rlhf_core.schemas.reports import MetricsLine
    from rlhf_core.training.distributed import init_process_group
    from rlhf_core.training.trainers.run import train_run

    assert Path(rlhf_core.__file__).is_relative_to(folder), "the copy"
    help_of = {field.name: field.meaning for field in config_fields.describe_fields()}
    spec = config.load("quickstart", ["loops.main.algorithm.name=toy", "loops.main.algorithm.scale=3.0"])
    shape = Shape(parameters=1000, hidden=8, layers=1, query=8, keys=8, feed_forward=8, vocabulary=10)
    sections = {name: value for name, value in tiny_spec().items() if name not in ("sft", "train", "grpo", "loops")}
    warm_start = {"num_steps": 2, "algorithm": {"name": "sft", "batch_size": 8}, "optimizer": {"learning_rate": 1e-2}}
    main = {"num_steps": 3, "algorithm": {"name": "toy", "scale": 30.0}, "optimizer": {"learning_rate": 1e-3}}
    context = make_context(f"{folder}/run", {**sections, "loops": {"warm_start": warm_start, "main": main}}, 0, 1)
    result = train_run(context, init_process_group(context))
    dist.destroy_process_group()
    lines = list(read_models(RunDir(Path(folder) / "run").attempt(1).restart(0).metrics, MetricsLine))
    report = {
        "help": help_of["loops.main.algorithm.scale"],
        "spec": spec.model_dump(mode="json")["loops"]["main"]["algorithm"],
        "reference": "reference model" in trainer_estimate(spec, shape).resident,
        "result": str(result),
        "loops": [line.loop for line in lines],
        "gain": [line.metrics["toy/gain"] for line in lines if line.loop == "toy"],
        "reward": [line.metrics["reward/mean"] for line in lines if line.loop == "toy"],
        "clip": any("policy/clip_share" in line.metrics for line in lines),
    }
    print(json.dumps(report))


def with_toy(folder: Path) -> None:
    """Copy the package and its presets, and add the algorithm: one file, and one entry."""
    copy = folder / "rlhf_core"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.pyc.*"))  # another process compiles it
    shutil.copytree(PACKAGE.parent / "infra" / "presets", copy / "presets")
    (copy / "training" / "algorithms" / "toy.py").write_text(LOSS)
    entries = copy / "schemas" / "algorithms" / "__init__.py"
    text = entries.read_text()
    assert text.count(UNION) == 1
    entries.write_text(text.replace(UNION, f"{SETTINGS}{UNION}ToySpec | "))


def test_a_new_algorithm_takes_one_file_and_one_entry(tmp_path: Path) -> None:
    with_toy(tmp_path)
    shared = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "LOCAL_RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, **shared, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, TESTS)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["help"] == "Weight of the rewards. Only for `toy`."
    assert report["spec"] == {"name": "toy", "prompts": 4, "scale": 3.0}
    assert not report["reference"], "no trait asks for one"
    assert report["result"] == "done"
    assert report["loops"] == ["sft"] * 2 + ["toy"] * 3
    assert report["gain"] == pytest.approx([30 * reward for reward in report["reward"]], rel=0.5)
    assert not report["clip"], "metrics of another algorithm"


def test_an_algorithm_without_its_file_is_no_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core.schemas import algorithms as settings
    from rlhf_core.training import algorithms

    monkeypatch.setattr(settings, "specs", lambda: {"toy": None})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'rlhf_core\.training\.algorithms\.toy'"):
        importlib.reload(algorithms)


if __name__ == "__main__":
    use(sys.argv[1])
