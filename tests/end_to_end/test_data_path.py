"""The gsm8k preset on rows of the same form.

With a tokenizer made here, the real verifier, long prompts, and a broken line.
"""

import json
from pathlib import Path

import pytest
from site_files import options
from sites import Site

from rlhf_core.files.appended import read_models
from rlhf_core.schemas.reports import MetricsLine, SampleLine

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]

SMALL = (
    "loops.main.num_steps=2",
    "loops.warm_start.num_steps=12",
    "loops.warm_start.algorithm.batch_size=16",
    "loops.main.algorithm.prompts_per_step=4",
    "rollout.max_new_tokens=24",
    "evaluate.num_prompts=8",
    "model.config.num_hidden_layers=1",
    "model.tokenizer_vocab_size=320",
    "trainer.log_samples_every=1",
    "resources.ranks_per_node=1",
)
OPTIONS = options(*SMALL, "data.train=train.jsonl", "data.eval=eval.jsonl")


def row(apples: int, pears: int, padding: str = "") -> str:
    """A word problem with a worked solution that ends like those of GSM8K."""
    return json.dumps(
        {
            "question": f"{padding}Ana picks {apples} apples and {pears} pears. How much fruit has she?",
            "answer": f"She has {apples} + {pears} = <<{apples}+{pears}={apples + pears}>>{apples + pears} fruits.\n"
            f"#### {apples + pears}",
        }
    )


@pytest.fixture
def files(site: Site) -> Path:
    rows = [row(apples, pears) for apples in range(2, 12) for pears in range(3, 9)]
    long_prompts = [row(1, 2, padding="She thinks of the weather. " * 60) for _ in range(3)]
    (site.home / "train.jsonl").write_text("\n".join([*rows, *long_prompts]) + "\n")
    (site.home / "eval.jsonl").write_text("\n".join(row(apples, 20) for apples in range(2, 12)) + "\n")
    with (site.home / "train.jsonl").open("a") as file:
        file.write('{"question": "cut off in the mid')
    return site.home


def test_the_real_data_path(site: Site, files: Path) -> None:
    site.rlhf("run", "gsm8k", "--no-prefect", *OPTIONS, "--set", "data.malformed_rows=drop")
    restart = site.only_run().attempt(1).restart(0)
    lines = read_models(restart.metrics, MetricsLine)
    losses = [line.metrics["train/loss"] for line in lines if line.loop == "sft"]
    assert losses[-1] < 0.8 * losses[0], "supervised loss must fall on real text"
    assert lines[0].metrics["data/num_rows"] == 60
    assert lines[0].metrics["data/num_overlong"] == 3
    assert site.rows("SELECT value FROM run_curve WHERE key = 'data/num_malformed'")[0] == (1.0,)
    assert "reward/gsm8k_answer" in lines[-1].metrics
    samples = read_models(restart.samples, SampleLine)
    assert samples
    assert {sample.reward for sample in samples} <= {0.0, 1.0}
    measured = {line["metric"] for line in site.rlhf("show", "last", "--json").json()["evaluations"]}
    assert measured == {"gsm8k_answer"}
