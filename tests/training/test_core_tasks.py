"""The generated task, and the permitted imports of the training package."""

import subprocess
import sys

import pytest

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.tasks import sort_digits
from rlhf_core.training.types import NullReporter


def test_rows_are_sorted_digits_and_never_repeat() -> None:
    train, held_out = sort_digits("train", 0), sort_digits("eval", 0)
    assert (len(train), len(held_out)) == (20_000, 512)
    for row in train + held_out:
        assert len(row["prompt"]) == 7
        assert row["prompt"][-1] == ">"
        assert row["answer"] == "".join(sorted(row["prompt"][:-1]))
    assert len({row["prompt"] for row in train + held_out}) == 20_512


def test_held_out_rows_are_the_same_for_every_seed_and_training_rows_are_not() -> None:
    assert sort_digits("eval", 0) == sort_digits("eval", 1)
    assert sort_digits("train", 0) == sort_digits("train", 0) != sort_digits("train", 1)
    for seed in range(3):
        small = sort_digits("train", seed, num_digits=2, num_train=90, num_eval=10)
        held_out = sort_digits("eval", seed, num_digits=2, num_train=90, num_eval=10)
        assert len({row["prompt"] for row in small + held_out}) == 100


def test_more_rows_than_there_are_numbers_is_refused() -> None:
    with pytest.raises(BadConfig, match="num_train \\+ num_eval = 101, but 2 digits allow only 100"):
        sort_digits("train", 0, num_digits=2, num_train=90, num_eval=11)


def test_the_light_modules_import_without_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'datasets', 'math_verify'): sys.modules[name] = None\n"
        "import rlhf_core.training.types, rlhf_core.training.rollouts.seeds, rlhf_core.training.data.loading\n"
        "import rlhf_core.training.rewards.functions, rlhf_core.training.tasks\n"
        "assert rlhf_core.training.rollouts.seeds.sample_seed(0, 1, 'a', 0) >= 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_null_reporter_does_nothing() -> None:
    reporter = NullReporter()
    reporter.beat(Phase.TRAIN, 3)
    with reporter.collective():
        assert reporter.request() == ""
