"""Weights in the layout of checkpoint files: what other engines receive is what ``save_pretrained`` writes."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from core_models import QWEN, char_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_core.training.models import gathering
from rlhf_core.training.models.causal_lm import build_causal_lm
from rlhf_core.training.models.gathering import named_weights, save_model
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


def test_a_checkpoint_has_the_weights_of_its_files_in_several(
    saved: tuple[str, PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, folder = saved
    monkeypatch.setattr(gathering, "SHARD_BYTES", 4096)
    beats: list[int] = []
    save_model(model, tmp_path / "split", True, lambda: beats.append(1))
    files = {path.name: load_file(path) for path in (tmp_path / "split").glob("*.safetensors")}
    assert 1 < len(files) < len(beats)
    found = {name: tensor for content in files.values() for name, tensor in content.items()}
    assert_same(found, load_file(folder / "model.safetensors"))
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, content in files.items() for name in content}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "split", local_files_only=True)
    assert_same(dict(weights(loaded)), dict(weights(model)))
