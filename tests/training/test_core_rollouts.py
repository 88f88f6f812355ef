"""Sampling: a sequence does not depend on the others in its batch, and training sees what was actually sampled."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from core_models import (
    OTHER_FAMILIES,
    PROMPTS,
    QWEN,
    SEEDS,
    char_tokenizer,
    run_spec,
    sample,
    tiny_model,
    tiny_seeing_model,
    tokens_of,
)
from engine_groups import assert_ends_with_stop_strings, no_beat
from pydantic import JsonValue
from torch import Tensor
from transformers import MinPLogitsWarper, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

from rlhf_core.errors import BadConfig, NonFiniteLoss, StaleWeights
from rlhf_core.training.data.batches import collate
from rlhf_core.training.data.tokenizers import build_tokenizer
from rlhf_core.training.models.causal_lm import PolicyModel, load_causal_lm
from rlhf_core.training.models.lean_layers import use_gradient_checkpointing
from rlhf_core.training.models.reward_model import load_reward_model
from rlhf_core.training.rollouts import transformers_engine
from rlhf_core.training.rollouts.base import Sampling, draw_tokens
from rlhf_core.training.rollouts.completion_end import StopSearch, StopStrings, end_ids_of, stop_strings
from rlhf_core.training.rollouts.engine_adapter import count_differing, given_shapes, given_weights, taken_weights
from rlhf_core.training.rollouts.samplers import TransformersSampler
from rlhf_core.training.rollouts.seeds import uniforms
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.rollouts.weight_probe import (
    TOLERANCE,
    ProbeAnswer,
    WeightProbe,
    probe_logprobs,
    probe_of,
    require_same,
    require_update,
)
from rlhf_core.training.trainers.context import TrainingContext
from rlhf_core.training.trainers.sampling import StepSampler
from rlhf_core.training.trainers.step import TrainingStep

pytestmark = pytest.mark.training

HYBRID: dict[str, JsonValue] = {
    **QWEN,
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 0,
    **{f"linear_num_{kind}_heads": 2 for kind in ("key", "value")},
    **{f"linear_{kind}_head_dim": 8 for kind in ("key", "value")},
}

ROUTED: dict[str, JsonValue] = {
    **{name: value for name, value in QWEN.items() if name != "head_dim"},
    "model_type": "deepseek_v3",
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    **{f"{kind}_lora_rank": 8 for kind in ("q", "kv")},
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def depends_on_neighbours(model: PreTrainedModel) -> bool:
    """True if a completion changes with the batch size, the order of the prompts, or the other prompts in the batch."""
    together = tokens_of(sample(model, PROMPTS, SEEDS))
    in_small_batches = tokens_of(sample(model, PROMPTS, SEEDS, batch_size=3))
    backwards = tokens_of(sample(model, PROMPTS[::-1], SEEDS[::-1]))[::-1]
    alone = [[tokens_of(sample(model, [p], [[seed]]))[0][0] for seed in s] for p, s in zip(PROMPTS, SEEDS, strict=True)]
    return not together == in_small_batches == backwards == alone


def test_a_completion_depends_on_weights_prompt_and_seed_alone(model: PreTrainedModel) -> None:
    assert not depends_on_neighbours(model)


def test_recurrent_states_follow_their_completions() -> None:
    """As those of Qwen3-Next and Qwen3.5, which have layers of linear attention among others."""
    assert not depends_on_neighbours(tiny_model(HYBRID))


def test_a_model_without_a_cache_of_keys_and_values_is_refused() -> None:
    """Mamba has its state under another name, and takes no mask of padded prompts after the first pass. Hybrid models
    have keys and values too, as that above."""
    recurrent = tiny_model({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1})
    with pytest.raises(BadConfig, match=r"MambaForCausalLM keeps no cache .* rollout.engine = \"vllm\""):
        sample(recurrent, PROMPTS, SEEDS)


def test_negative_control_one_random_stream_for_the_batch_is_caught(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = torch.Generator()

    def draw_from_stream(logits: Tensor, seeds: Tensor, position: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
        if position == 0:
            stream.manual_seed(0)
        logprobs = torch.log_softmax(logits / sampling.temperature, -1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=stream)
        return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)

    monkeypatch.setattr(transformers_engine, "draw_tokens", draw_from_stream)
    assert depends_on_neighbours(model)


def test_reproducible_and_diverse_at_once(model: PreTrainedModel) -> None:
    first, second = tokens_of(sample(model, PROMPTS, SEEDS)), tokens_of(sample(model, PROMPTS, SEEDS))
    assert first == second
    assert all(len({tuple(tokens) for tokens in group}) == len(group) for group in first)
    assert first[0] != first[4]  # the same prompt, occurring twice in the data, has different seeds


@pytest.mark.parametrize("config", [QWEN, *OTHER_FAMILIES.values()], ids=["qwen3", *OTHER_FAMILIES])
def test_greedy_agrees_with_transformers_own_generate(config: dict[str, object]) -> None:
    model = tiny_model(config)  # type: ignore[arg-type]
    tokenizer = char_tokenizer()
    ours = sample(model, PROMPTS, [[0]] * len(PROMPTS), temperature=0.0)
    for prompt, (completion,) in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )[0, len(prompt) :].tolist()
        assert completion.token_ids == theirs


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("config", [QWEN, HYBRID, *OTHER_FAMILIES.values()], ids=["qwen3", "hybrid", *OTHER_FAMILIES])
def test_logprobs_are_those_of_the_training_pass(config: dict[str, object], temperature: float) -> None:
    model = tiny_model(config)  # type: ignore[arg-type]
    made = sample(model, PROMPTS, SEEDS, temperature=temperature)
    prompts = [prompt for prompt, group in zip(PROMPTS, made, strict=True) for _ in group]
    flat = [completion for group in made for completion in group]
    batch = collate(prompts, [completion.token_ids for completion in flat], pad_id=0)
    trained, _ = PolicyModel(model)(batch.input_ids, target_mask=batch.target_mask, temperature=temperature)
    sampled = batch.place(torch.tensor([value for completion in flat for value in completion.logprobs]))
    torch.testing.assert_close(trained.detach(), sampled, atol=2e-5, rtol=0)


def test_a_completion_ends_with_its_first_end_token(model: PreTrainedModel) -> None:
    tokenizer = char_tokenizer()
    made = [completion for group in sample(model, PROMPTS, SEEDS, max_new_tokens=100) for completion in group]
    finished = [completion for completion in made if completion.finished]
    assert 0 < len(finished) < len(made)
    for completion in made:
        assert len(completion.logprobs) == len(completion.token_ids) <= 100
        assert completion.finished == (completion.token_ids[-1] == tokenizer.eos_token_id)
        assert tokenizer.eos_token_id not in completion.token_ids[:-1]
        assert completion.finished or len(completion.token_ids) == 100
        visible = completion.token_ids[:-1] if completion.finished else completion.token_ids
        assert tokenizer.encode(completion.text) == visible


@pytest.mark.parametrize("has_settings", [True, False])
def test_all_engines_end_completions_at_the_same_tokens(tmp_path: Path, has_settings: bool) -> None:
    """Engines that read the folder of a model, and those that are given the model."""
    model, tokenizer = tiny_model(), char_tokenizer()
    model.generation_config.eos_token_id = [5, 6]
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**model.config.to_dict(), "eos_token_id": [7, 8]}))
    if not has_settings:
        (tmp_path / "generation_config.json").unlink()
    ends = end_ids_of(tmp_path, tokenizer)
    assert ends == sorted({tokenizer.eos_token_id, *([5, 6] if has_settings else [7, 8])})
    assert set(ends) == transformers_engine.end_token_ids(load_causal_lm(tmp_path, "float32"), tokenizer)


def test_a_completion_ends_at_a_token_that_the_caller_names(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn may end with another token than the end token, and the text is without it."""
    script = [*char_tokenizer().encode("2"), 9, 30, 30]

    def scripted(logits: Tensor, seeds: Tensor, position: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
        return torch.full((len(seeds),), script[position]), torch.zeros(len(seeds))

    monkeypatch.setattr(transformers_engine, "draw_tokens", scripted)
    ((unended,),) = sample(model, [[20, 30]], [[1]], max_new_tokens=4)
    assert (unended.finished, len(unended.token_ids)) == (False, 4)
    ((ended,),) = sample(model, [[20, 30]], [[1]], max_new_tokens=4, end_ids=(9,))
    assert (ended.finished, ended.text, ended.token_ids) == (True, "2", script[:2])


def test_a_saved_model_ends_completions_where_training_did(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), char_tokenizer()
    before = model.generation_config.eos_token_id
    transformers_engine.also_end_with(model, ())
    assert model.generation_config.eos_token_id == before
    transformers_engine.also_end_with(model, (9,))
    transformers_engine.also_end_with(model, (9,))
    model.save_pretrained(tmp_path)
    assert load_causal_lm(tmp_path, "float32").generation_config.eos_token_id == [before, 9]
    assert end_ids_of(tmp_path, tokenizer) == sorted({before, 9})
    transformers_engine.also_end_with(load_reward_model(tmp_path, "float32", 0, 0), (9,))  # it completes nothing


@pytest.fixture
def ends_at_once(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Make every token an end token."""
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    yield model
    model.generation_config.eos_token_id = before


def test_empty_completions(ends_at_once: PreTrainedModel) -> None:
    made = [completion for group in sample(ends_at_once, PROMPTS, SEEDS) for completion in group]
    assert all(
        (completion.text, completion.finished, len(completion.token_ids)) == ("", True, 1) for completion in made
    )
    batch = collate([[5, 6]] * len(made), [completion.token_ids for completion in made], pad_id=0)
    logprobs, _ = PolicyModel(ends_at_once)(batch.input_ids, target_mask=batch.target_mask)
    assert torch.isfinite(logprobs).all()
    assert int(batch.target_mask.sum()) == len(made)


def test_prompts_are_read_once_and_ended_sequences_leave(model: PreTrainedModel) -> None:
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    sample(model, PROMPTS, SEEDS, max_new_tokens=100)
    hook.remove()
    assert shapes[0] == (len(PROMPTS), max(map(len, PROMPTS)))
    rows = [shape[0] for shape in shapes[1:]]
    assert rows[0] == sum(map(len, SEEDS))
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0]


def test_the_model_is_left_as_it_was_also_under_gradient_checkpointing(model: PreTrainedModel) -> None:
    expected = tokens_of(sample(model, PROMPTS, SEEDS))
    policy = PolicyModel(tiny_model())
    use_gradient_checkpointing(policy.causal_lm)
    policy.train()
    beats: list[int] = []
    made = sample(policy.causal_lm, PROMPTS, SEEDS, beat=lambda: beats.append(1))
    assert tokens_of(made) == expected
    assert policy.causal_lm.training
    assert len(beats) == 12
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert torch.is_grad_enabled()


def test_what_cannot_be_sampled_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        sample(model, [[]], [[1]])
    with pytest.raises(ValueError, match="found 1 lists of seeds for 2 prompts"):
        sample(model, [[1], [2]], [[1]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_named_as_such(temperature: float) -> None:
    """Not by an index out of bounds, by completions of the first token, or by engines that compute something else."""
    broken = tiny_model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[20] = math.nan
    with pytest.raises(NonFiniteLoss, match="log-probability nan to a token"):
        sample(broken, PROMPTS, SEEDS, temperature=temperature)
    with pytest.raises(NonFiniteLoss, match="log-probability nan to a token"):
        probe_of(broken, 32, "float32")


def test_a_model_that_also_reads_images_has_a_probe() -> None:
    probe = probe_of(tiny_seeing_model(), 8, "float32")
    assert probe.tokens == (1, 2, 3, 4, 5, 6, 7)
    assert len(probe.logprobs) == 6


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.03] * 14 + [0.4], ""),
        ([1.0] * 15, "by 1 on average and up to 1;"),
        ([0.03] * 14 + [math.nan], "by nan on average"),
    ],
)
def test_rounding_of_single_tokens_is_no_reason_to_refuse_an_engine(differences: list[float], expected: str) -> None:
    """In bfloat16 healthy engines differ by up to half a nat for some tokens, and all engines for the same ones."""
    probe = WeightProbe(tokens=tuple(range(16)), logprobs=(-5.0,) * 15, tolerance=TOLERANCE["bfloat16"])
    with pytest.raises(StaleWeights, match=expected) if expected else contextlib.nullcontext():
        require_same("engine-0", [-5.0 + one for one in differences], probe)


@pytest.mark.parametrize(
    ("digest", "engine", "trainer", "is_refused"),
    [
        ("new", (-1.0, -2.0, -3.0), (-1.1, -2.0, -3.1), True),
        ("new", (-1.0, -2.0, -3.0), (-1.0, -2.0, -3.1), False),
        ("new", (-1.0, -2.0, -3.0 + 1e-7), (-1.1, -2.1, -3.1), False),
        ("old", (-1.0, -2.0, -3.0), (-1.1, -2.1, -3.1), False),
    ],
    ids=["skipped", "change of one token", "applied", "same weights, other kernels"],
)
def test_an_engine_whose_outputs_stay_exactly_the_same_has_skipped_an_update(
    digest: str, engine: tuple[float, ...], trainer: tuple[float, ...], is_refused: bool
) -> None:
    earlier = ProbeAnswer("old", (-1.0, -2.0, -3.0), (-1.0, -2.0, -3.0))
    with pytest.raises(StaleWeights, match="2 of 3 have changed") if is_refused else contextlib.nullcontext():
        require_update("engine-0", ProbeAnswer(digest, engine, trainer), earlier)
    require_update("engine-0", ProbeAnswer(digest, engine, trainer), None)


@pytest.mark.parametrize("norms", [[0.5], [0.5, math.nan], [math.inf]])
def test_a_policy_after_a_gradient_that_is_not_finite_is_not_evaluated(norms: list[float]) -> None:
    """Engines would refuse its weights, and end the run before the metrics of the step are written."""
    evaluated = Mock(names=("greedy",), greedy_scores=Mock(return_value={"greedy": (1.0, 1)}))
    training = Mock(spec=TrainingContext, evaluator=evaluated, is_evaluated=lambda number: True)
    step = TrainingStep(4, Mock(), grad_norms=norms)
    TrainingContext._evaluate(training, step, Mock())
    assert evaluated.greedy_scores.called == (norms == [0.5])


def test_an_engine_has_weights_in_the_number_format_of_the_trainer(tmp_path: Path) -> None:
    """Rounded to bfloat16, the biases of a router would send some tokens to other experts than in training."""
    tiny_model(ROUTED).save_pretrained(tmp_path)
    trainer = load_causal_lm(tmp_path, "bfloat16")
    biases = {name: bias.normal_() for name, bias in trainer.named_buffers() if name.endswith("correction_bias")}
    assert {bias.dtype for bias in biases.values()} == {torch.float32}
    engine = TransformersSampler(tmp_path, char_tokenizer(), "bfloat16", torch.device("cpu"))
    for _ in range(2):
        engine.load(given_weights(trainer, lambda: None), lambda: None)
    held = taken_weights(engine._model)
    assert given_shapes(engine._model) == given_shapes(trainer)
    assert count_differing(given_weights(trainer, lambda: None), held) == 0
    tokens = list(range(1, 17))
    with torch.no_grad():
        assert engine.score(tokens) == probe_logprobs(trainer(torch.tensor([tokens])).logits[0], tokens)


def _at(temperature: float, **cut: Any) -> Sampling:
    return Sampling(max_new_tokens=9, temperature=temperature, batch_size=9, **cut)


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 5},
        {"top_k": 500},
        {"min_p": 0.2},
        {"top_p": 0.7},
        {"top_p": 1e-9},
        {"top_p": 0.9, "top_k": 9, "min_p": 0.05},
    ],
    ids=str,
)
def test_a_cut_distribution_has_the_tokens_that_transformers_would_keep(cut: dict[str, Any]) -> None:
    logits, temperature = torch.randn(60, 40, generator=torch.Generator().manual_seed(4)) * 3, 0.7
    expected = logits / temperature
    for name, warper in (("min_p", MinPLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
        expected = warper(cut[name])(None, expected) if name in cut else expected
    draws = [draw_tokens(logits, torch.arange(60) + 100 * draw, 2, _at(temperature, **cut)) for draw in range(200)]
    tokens, logprobs = (torch.stack(values, 1) for values in zip(*draws, strict=True))
    assert logprobs.isfinite().all()
    torch.testing.assert_close(logprobs, expected.log_softmax(-1).gather(1, tokens))
    kept = expected.isfinite()
    assert kept.gather(1, tokens).all()
    likely = expected.softmax(-1) > 0.1
    assert torch.zeros_like(kept).scatter_(1, tokens, True)[likely].all(), "likely ones are drawn"


def test_completions_end_with_stop_strings() -> None:
    engine, sampling = TransformersEngine(char_tokenizer()), replace(_at(0.7), max_new_tokens=12, batch_size=5)
    engine.load(tiny_model(), 1, no_beat)
    assert_ends_with_stop_strings(lambda settings: engine.sample(PROMPTS, SEEDS, settings, 1, no_beat), sampling)


def test_training_samples_with_the_stop_strings_of_the_run() -> None:
    training = Mock(end_ids=(3,))
    training.spec = run_spec(rollout={"stop_strings": ["9"], "temperature": 0.8})
    found = StepSampler._sampling(Mock(_training=training))
    assert (found.stop, found.temperature, found.end_ids, found.is_cut) == (("9",), 0.8, (3,), False)


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("Q: 2\n\nQ: 3", ["\n\n"], "Q: 2\n\n"),
        ("a</answer", ["</answer>"], None),
        ("a</answer> b", ["</answer>"], "a</answer>"),
        ("a</answer> b", ["</answer>", "answer"], "a</answer"),
        ("caf\u00e9\u2014x", ["\u2014"], "caf\u00e9\u2014"),
        ("\u2014" * 9 + "\u00e9", ["\u00e9"], "\u2014" * 9 + "\u00e9"),
    ],
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(text: str, stop: list[str], kept: str | None) -> None:
    """For any number of tokens at once, also if characters have several tokens."""
    tokenizer = build_tokenizer("byte", [], 0)
    strings, tokens = StopStrings(tokenizer, stop), tokenizer.encode(text, add_special_tokens=False)
    lengths = {StopSearch(strings).length(tokens)}
    search = StopSearch(strings)
    lengths.add(next((found for end in range(len(tokens) + 1) if (found := search.length(tokens[:end]))), None))
    (length,) = lengths
    if kept is None:
        assert length is None
        return
    assert length is not None
    made = strings.completion(tokens[:length], [0.0] * length)
    assert (made.text, made.finished, len(made.token_ids)) == (kept, True, length)
    assert length == len(tokenizer.encode(kept, add_special_tokens=False))


def test_the_text_ends_with_the_stop_string_even_within_a_token() -> None:
    tokenizer = Mock(decode=lambda tokens, **options: "".join(["a</", "answer", ">\n"][token] for token in tokens))
    strings = stop_strings(tokenizer, ("</answer>",))
    assert StopSearch(strings).length([0, 1, 2]) == 3
    assert strings.completion([0, 1, 2], [0.0] * 3).text == "a</answer>"


def test_only_tokens_in_which_a_stop_string_can_end_are_decoded_with_those_before() -> None:
    tokenizer = Mock(decode=Mock(side_effect=lambda tokens, **options: "".join(map(chr, tokens))))
    strings = StopStrings(tokenizer, ["</answer>"])
    for _ in range(3):
        assert StopSearch(strings).length([*map(ord, "ab>" * 50)]) is None
    assert tokenizer.decode.call_count == 3 + 3 * 50, "each token once, and every window that ends with >"


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, float("-inf"), 1.0])
    num_draws, temperature = 100_000, 0.8
    tokens, logprobs = draw_tokens(logits.expand(num_draws, -1), torch.arange(num_draws), 3, _at(temperature))
    expected = torch.softmax(logits / temperature, -1)
    observed = torch.bincount(tokens, minlength=5)
    assert observed[3] == 0
    possible = expected > 0
    chi_squared = ((observed - num_draws * expected)[possible].square() / (num_draws * expected)[possible]).sum()
    assert float(chi_squared) < 16.3  # 3 degrees of freedom, 0.1 %
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_tokens_are_drawn_without_sums_that_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``trainer.deterministic``, torch refuses cumulative sums of floating-point numbers there."""
    cumsum = Tensor.cumsum

    def deterministic(numbers: Tensor, dim: int) -> Tensor:
        if numbers.is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return cumsum(numbers, dim)

    monkeypatch.setattr(Tensor, "cumsum", deterministic)
    tokens, _ = draw_tokens(torch.zeros(1000, 7), torch.arange(1000), 0, _at(1.0, top_p=0.999))
    assert set(tokens.tolist()) == set(range(7))


def test_draws_at_the_edges_of_the_distribution() -> None:
    certain = torch.full((1000, 7), float("-inf"))
    certain[:, 4] = 0.0
    tokens, logprobs = draw_tokens(certain, torch.arange(1000), 0, _at(1.0))
    assert set(tokens.tolist()) == {4}
    assert set(logprobs.tolist()) == {0.0}
    greedy, at_one = draw_tokens(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0]), 0, _at(0.0, top_k=1))
    assert greedy.item() == 1
    torch.testing.assert_close(at_one, torch.log_softmax(torch.tensor([0.0, 3.0, 1.0]), -1)[1:2])
    assert float(uniforms(torch.arange(1000), 0).max()) < 1.0
