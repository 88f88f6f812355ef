"""Weights in the layout of checkpoint files: what other engines receive is what ``save_pretrained`` writes."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from core_models import QWEN, char_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.training.models.causal_lm import build_causal_lm
from rlhf_core.training.models.gathering import named_weights
from rlhf_core.training.rollouts.checkpoint_layout import CheckpointLayout

pytestmark = pytest.mark.training

SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GROUPED = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN,
    "mixtral": {"model_type": "mixtral", **SIZE, **GROUPED, "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", **SIZE, **GROUPED, "moe_intermediate_size": 8, "num_experts": 4},
    "gpt_neox": {"model_type": "gpt_neox", **SIZE},
    # Its files have one tensor for two of the model.
    "hrm_text": {"model_type": "hrm_text", **SIZE},
}
OTHERWISE = {"mixtral", "qwen3_moe", "gpt_neox", "hrm_text"}
"""Models that transformers 5 holds otherwise than their files."""


def weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return list(named_weights(model, lambda: None))


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, PreTrainedModel, Path]:
    model = build_causal_lm(MODELS[request.param], char_tokenizer(), 0)
    model.save_pretrained(tmp_path)
    return request.param, model, tmp_path


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_weights_of_a_version_are_those_of_its_files(saved: tuple[str, PreTrainedModel, Path]) -> None:
    kind, model, folder = saved
    files = load_file(folder / "model.safetensors")
    assert_same(dict(CheckpointLayout(folder).whole(weights(model))), files)
    assert (dict(weights(model)).keys() != files.keys()) == (kind in OTHERWISE), "the conversion would prove nothing"


def test_a_version_may_be_cut_anywhere_and_the_next_one_starts_afresh(saved: tuple[str, PreTrainedModel, Path]) -> None:
    _, model, folder = saved
    files = load_file(folder / "model.safetensors")
    given = weights(model)
    layout = CheckpointLayout(folder)
    for at in range(1, len(given)):
        parts = given[:at], given[at:]
        assert_same(dict(itertools.chain(*map(layout.convert, parts), layout.rest())), files)
    list(layout.convert(given[: len(given) // 2]))
    layout.reset()
    assert_same(dict(itertools.chain(layout.convert(given), layout.rest())), files)
