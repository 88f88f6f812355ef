"""Packed passes: every needed token occurs once, and the states equal those of padded passes."""

import dataclasses
from unittest import mock

import pytest
import torch
from core_models import OTHER_FAMILIES, QWEN, tiny_model, tiny_seeing_model
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from transformers import PreTrainedModel

from rlhf_core.training.data.batches import SequenceBatch, collate
from rlhf_core.training.models import packing
from rlhf_core.training.models.packing import Packing, can_pack, hidden_of_targets, pack

pytestmark = pytest.mark.training

GROUP = collate([[20, 21, 22]] * 3 + [[30, 31]], [[50, 51, 52], [50, 60], [70, 71, 72, 73, 74, 75], [2]], pad_id=0)
"""Three samples of one prompt, the first two with a first token in common, and one sample of another prompt."""
TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=5)


def used(packed: Packing) -> list[tuple[int, ...]]:
    """The tokens before and at each position of the row."""
    prefixes: list[tuple[int, ...]] = []
    for token, position in zip(packed.tokens[0].tolist(), packed.positions[0].tolist(), strict=True):
        prefixes.append((*prefixes[-1][:position], token) if position else (token,))
    return prefixes


def test_a_prefix_goes_through_the_model_once_and_nothing_that_is_not_asked_for() -> None:
    packed = pack(GROUP.input_ids, GROUP.target_mask)
    assert sorted(packed.tokens[0].tolist()) == [20, 21, 22, 30, 31, 50, 51, 70, 71, 72, 73, 74]
    assert GROUP.input_ids.numel() == 36


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6))
def test_each_token_is_found_with_what_is_before_it(sequences: list[tuple[list[int], list[int]]]) -> None:
    batch = collate([prompt for prompt, _ in sequences], [completion for _, completion in sequences], pad_id=0)
    packed = pack(batch.input_ids, batch.target_mask)
    prefixes = used(packed)
    assert len(set(prefixes)) == len(prefixes), "no prefix occurs twice"
    for index, (prompt, completion) in enumerate(sequences):
        whole = [*prompt, *completion]
        for at in range(len(whole) - 1):
            assert prefixes[int(packed.source[index, at])] == tuple(whole[: at + 1])


@pytest.mark.parametrize("config", [QWEN, *OTHER_FAMILIES.values()], ids=["qwen3", *OTHER_FAMILIES])
@settings(max_examples=5)
@given(data=st.data())
def test_states_are_those_of_padded_sequences(config: dict[str, JsonValue], data: st.DataObject) -> None:
    model = tiny_model(config).double()
    assert can_pack(model)
    sequences = data.draw(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6))
    prompts, completions = zip(*sequences, strict=True)
    learned = [data.draw(st.lists(st.booleans(), min_size=len(one), max_size=len(one))) for one in completions]
    batch = collate(prompts, completions, pad_id=0, learned=learned)
    if batch.target_mask.any():
        assert largest_difference(model, batch) < 1e-12


@pytest.mark.parametrize("packed", [True, False])
def test_a_single_token_without_a_completion_has_a_pass(packed: bool) -> None:
    """Nothing is predicted, but every rank runs its passes: backward too, which is a collective in ZeRO 2 and 3."""
    model = tiny_model(QWEN)
    assert can_pack(model)
    batch = collate([[20]], [[]], pad_id=0)
    hidden, _ = hidden_of_targets(model.base_model, batch.input_ids, batch.target_mask, packed=packed)
    assert hidden.shape == (0, QWEN["hidden_size"])
    hidden.sum().backward()
    assert all(not weights.grad.any() for weights in model.parameters() if weights.grad is not None)


@torch.no_grad()
def largest_difference(model: PreTrainedModel, batch: SequenceBatch = GROUP) -> float:
    body = model.base_model
    found, _ = hidden_of_targets(body, batch.input_ids, batch.target_mask, packed=True)
    expected = body(input_ids=batch.input_ids, use_cache=False).last_hidden_state[:, :-1][batch.target_mask]
    return float((found - expected).abs().max())


def test_negative_control_sequences_that_see_each_other_are_caught() -> None:
    """One row under plain causal attention, as if packing had no blocks."""

    def one_row(*arguments: torch.Tensor) -> Packing:
        packed = pack(*arguments)
        number = packed.tokens.shape[1]
        block = packing._AttentionBlock(torch.arange(number), (1, number))
        return dataclasses.replace(packed, blocks=[block], back=torch.arange(number))

    model = tiny_model().double()
    assert can_pack(model)
    with mock.patch.object(packing, "pack", one_row):
        assert largest_difference(model) > 1e-3
        fresh = tiny_model().double()
        assert not can_pack(fresh), "the probe detects it"
        assert fresh.config._attn_implementation == "sdpa"


def test_models_that_attend_otherwise_are_padded() -> None:
    windows: dict[str, JsonValue] = {**QWEN, "model_type": "mistral", "sliding_window": 4}
    assert not can_pack(tiny_model(windows))
    assert not can_pack(tiny_seeing_model())
    eager = tiny_model()
    eager.set_attn_implementation("eager")
    assert not can_pack(eager)


def test_the_attention_is_not_saved_with_the_model() -> None:
    model = tiny_model()
    assert can_pack(model)
    assert packing.ATTENTION not in model.config.to_json_string()
