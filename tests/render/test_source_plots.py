"""Plots of the sources of a mixture."""

from rlhf_core.render.line_plots import source_plots
from rlhf_core.schemas.run import RunSpec


def spec_of(*names: str) -> RunSpec:
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "char"}
    sources = {name: {"train": f"{name}.jsonl"} for name in names}
    return RunSpec.model_validate(
        {"name": "t", "model": model, "data": {"sources": sources}, "train": {"num_steps": 1}}
    )


def test_each_measured_metric_has_a_line_for_each_source() -> None:
    measured = {"reward/mean", "reward/mean/math", "reward/mean/code", "eval/greedy/math", "train/loss", "reward/other"}
    found = {plot.title: plot.keys for plot in source_plots(spec_of("math", "code"), measured)}
    assert found == {
        "Reward by source": (("reward/mean/code", "code"), ("reward/mean/math", "math")),
        "Held-out scores by source": (("eval/greedy/math", "math"),),
    }


def test_a_run_on_one_file_has_no_such_plots() -> None:
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "char"}
    spec = RunSpec.model_validate({"name": "t", "model": model, "data": {"train": "t"}, "train": {"num_steps": 1}})
    assert not source_plots(spec, {"reward/mean", "train/loss"})
    assert not source_plots(None, {"reward/mean/math"})
