"""Models: reproducible initialization, refusals with a reason, and no more logits in memory than allowed."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from core_models import OTHER_FAMILIES, QWEN, char_tokenizer, run_spec, tiny_model
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.errors import BadConfig
from rlhf_core.run_dir.run import RunDir
from rlhf_core.training.data.batches import collate
from rlhf_core.training.data.loading import EncodedPrompts
from rlhf_core.training.data.tokenizers import load_tokenizer
from rlhf_core.training.models import token_logprobs
from rlhf_core.training.models.causal_lm import (
    PolicyModel,
    build_causal_lm,
    dropout_free_config,
    load_causal_lm,
    prepare_initial_model,
    tokenizer_folder,
    use_training_mode,
)
from rlhf_core.training.models.embeddings import replace_padding, require_embeddings
from rlhf_core.training.models.gathering import weight_shapes, write_model_texts
from rlhf_core.training.models.lean_layers import use_gradient_checkpointing
from rlhf_core.training.models.reward_model import RewardModel, load_reward_model
from rlhf_core.training.types import Row

pytestmark = pytest.mark.training

ROWS = [Row("a-0", "12>", "12", "12", {}), Row("b-0", "21>", "12", "12", {})]
CONFIGS = [QWEN, *OTHER_FAMILIES.values()]
NAMES = ["qwen3", *OTHER_FAMILIES]


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    return model.state_dict()


def equal(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    return all(torch.equal(tensor, state(right)[name]) for name, tensor in state(left).items())


# --- building and loading ---


def test_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    expected_next = torch.rand(1)
    torch.manual_seed(1)
    first = tiny_model(seed=5)
    assert torch.equal(torch.rand(1), expected_next)  # the global generator is left alone
    assert equal(first, tiny_model(seed=5))
    assert not equal(first, tiny_model(seed=6))


def test_vocabulary_and_special_tokens_are_the_tokenizers() -> None:
    model, tokenizer = tiny_model(), char_tokenizer()
    assert model.config.vocab_size == len(tokenizer) == 128
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN, "model_type": "qwen33"}, 'model_type = "qwen33" is unknown .* did you mean "qwen3"'),
        ({**QWEN, "hiden_size": 32}, 'hiden_size is no argument of Qwen3Config; did you mean "hidden_size"'),
        ({**QWEN, "hidden_size": "big"}, "makes no qwen3 model: .*hidden_size"),
        ({**QWEN, "vocab_size": 100}, "vocab_size = 100, but the tokenizer has 128 tokens"),
        ({"model_type": "vit"}, "makes no vit model"),
    ],
)
def test_a_bad_configuration_is_named(config: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        build_causal_lm(config, char_tokenizer(), 0)


def test_the_initial_model_is_built_once_and_loads_alike(tmp_path: Path) -> None:
    spec, run_dir = run_spec(), RunDir(tmp_path)
    path = prepare_initial_model(spec, run_dir, ROWS)
    assert path == run_dir.initial_model
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert prepare_initial_model(spec, run_dir, ROWS) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    assert equal(load_causal_lm(path, "float32"), tiny_model())
    beats: list[int] = []
    loaded = load_causal_lm(path, "bfloat16", beat=lambda: beats.append(1))
    assert loaded.dtype == torch.bfloat16
    assert len(beats) == len(list(loaded.parameters())), "a beat after each tensor, as a disk may be slow"
    assert load_causal_lm(path, "float32").dtype == torch.float32
    assert len(beats) == len(list(loaded.parameters())), "of that call alone"
    assert load_tokenizer(path).get_vocab() == char_tokenizer().get_vocab()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["initial_model"]


def test_a_model_with_a_temperature_and_without_sampling_is_saved(tmp_path: Path) -> None:
    """Llama 2 was first released with such settings; transformers reads them, but refuses to write them."""
    tiny_model().save_pretrained(tmp_path / "released")
    settings = tmp_path / "released" / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "temperature": 0.9, "top_p": 0.6}))
    model = load_causal_lm(tmp_path / "released", "float32")
    (tmp_path / "saved").mkdir()
    write_model_texts(model, tmp_path / "saved", weight_shapes(model))
    model.save_pretrained(tmp_path / "whole")
    for name in ("saved", "whole"):
        saved = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert (saved["temperature"], saved["top_p"], saved["do_sample"]) == (0.9, 0.6, True)


def test_generation_settings_that_cannot_be_saved_are_refused_at_the_start(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    settings = tmp_path / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "early_stopping": True}))
    with pytest.raises(
        BadConfig,
        match=r"generation_config\.json contains settings .*early_stopping",
    ):
        load_causal_lm(tmp_path, "float32")


def test_weights_that_are_missing_are_not_random(tmp_path: Path) -> None:
    tiny_model(OTHER_FAMILIES["llama"]).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    save_file({f"module.{name}": tensor for name, tensor in weights.items()}, file, metadata={"format": "pt"})
    with pytest.raises(BadConfig, match=r"all weights of LlamaForCausalLM.* no lm_head\.weight, .* and \d+ more"):
        load_causal_lm(tmp_path / "model", "float32")
    with pytest.raises(BadConfig, match=r"all weights of LlamaForSequenceClassification.* no model\.embed_tokens"):
        load_reward_model(tmp_path / "model", "float32", seed=0, pad_id=0)
    weights["lm_head.weight"] = weights["lm_head.weight"][:100].clone()
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(BadConfig, match=r"lm_head\.weight of shape \[100, 32\] instead of \[128, 32\]"):
        load_causal_lm(tmp_path / "model", "float32")


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model, tokenizer = tiny_model(), char_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    data = EncodedPrompts(ROWS, [[5, 6], [7]], 0)
    require_embeddings(model, tokenizer, data, completions=True)  # a token that does not occur
    taught = replace(data, rows=[ROWS[0], replace(ROWS[1], target="<tool>2")])
    require_embeddings(model, tokenizer, taught, completions=False)  # an answer that is only compared
    prompted = replace(data, token_ids=[[5, 6], [7, 128]])
    for found, completions in ((taught, True), (prompted, False)):
        with pytest.raises(BadConfig, match=r"token 128 \('<tool>'\) .* prompt '21>'.* embeddings for 128 tokens only"):
            require_embeddings(model, tokenizer, found, completions=completions)
    weight: Any = model.get_input_embeddings().weight
    weight.ds_shape, weight.data = weight.shape, torch.empty(0)  # as ZeRO 3 splits it
    require_embeddings(model, tokenizer, data, completions=True)


def test_padding_without_an_embedding_is_the_end_token(tmp_path: Path) -> None:
    """Padding that is in the model stays; a model and a reward model are trained with either."""
    tokenizer, end = char_tokenizer(), char_tokenizer().eos_token
    tiny_model().save_pretrained(tmp_path)
    replace_padding(tokenizer, tmp_path)
    assert tokenizer.pad_token not in (end, "[PAD]")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 128
    replace_padding(tokenizer, tmp_path)
    assert tokenizer.pad_token == end
    ranker = RewardModel(load_reward_model(tmp_path, "float32", 0, tokenizer.pad_token_id))
    assert torch.isfinite(ranker(torch.tensor([[tokenizer.pad_token_id] * 2]))).all(), "an empty micro-batch"


def test_an_interrupted_build_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_initial_model(run_spec(), RunDir(tmp_path), ROWS)
    assert not RunDir(tmp_path).initial_model.exists()
    assert equal(load_causal_lm(prepare_initial_model(run_spec(), RunDir(tmp_path), ROWS), "float32"), tiny_model())


def test_a_given_model_stays_where_it_is(tmp_path: Path) -> None:
    given = prepare_initial_model(run_spec(), RunDir(tmp_path / "first"), ROWS)
    spec = run_spec(model={"path": str(given)})
    assert prepare_initial_model(spec, RunDir(tmp_path / "second"), ROWS) == given
    assert not (tmp_path / "second").exists()
    assert tokenizer_folder(spec, given) == given
    assert tokenizer_folder(run_spec(model={"path": str(given), "tokenizer": str(tmp_path)}), given) == tmp_path


def test_a_tokenizer_folder_comes_along_with_a_built_model(tmp_path: Path) -> None:
    first = prepare_initial_model(run_spec(), RunDir(tmp_path / "first"), ROWS)
    spec = run_spec(model={"config": QWEN, "tokenizer": str(first)})
    second = prepare_initial_model(spec, RunDir(tmp_path / "second"), ROWS)
    assert load_tokenizer(second).get_vocab() == load_tokenizer(first).get_vocab()


def test_missing_folders_are_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(BadConfig, match=r'model\.path = ".*gone", which is no folder'):
        prepare_initial_model(run_spec(model={"path": gone}), RunDir(tmp_path), ROWS)
    with pytest.raises(BadConfig, match=r"model\.tokenizer"):
        prepare_initial_model(run_spec(model={"config": QWEN, "tokenizer": gone}), RunDir(tmp_path), ROWS)
    with pytest.raises(BadConfig, match="holds no causal language model"):
        load_causal_lm(tmp_path, "float32")


def test_dropout_is_off(tmp_path: Path) -> None:
    model = tiny_model({**OTHER_FAMILIES["gpt2"], "resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5})
    ids = torch.tensor([[5, 6, 7]])
    model.train()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_dropout_is_off_in_the_language_model_of_one_that_reads_images(tmp_path: Path) -> None:
    of_text = {"model_type": "gemma3_text", "attention_dropout": 0.5, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": of_text}))
    config: Any = dropout_free_config(tmp_path)
    assert (config.text_config.vocab_size, config.text_config.attention_dropout) == (64, 0.0)


@pytest.mark.parametrize("kind", ["phimoe", "mixtral"])
def test_routers_of_experts_add_no_noise_in_training(kind: str) -> None:
    """The control is transformers' own training mode."""
    experts: dict[str, JsonValue] = {"num_local_experts": 4, "router_jitter_noise": 0.1}
    model = tiny_model({**OTHER_FAMILIES["llama"], **experts, "model_type": kind}).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    sampled = model(ids).logits
    use_training_mode(model)
    assert model.training
    assert torch.equal(model(ids).logits, sampled)
    model.train()
    assert not torch.equal(model(ids).logits, sampled)


# --- the policy ---

BATCH = collate([[20, 21], [30, 31, 32, 33], [40]], [[50, 51, 52, 2], [60], [70, 71, 72, 73, 74, 75]], pad_id=0)


def policy(config: dict[str, JsonValue], chunk_elements: int = 1 << 26) -> PolicyModel:
    return PolicyModel(tiny_model(config).double(), chunk_elements)


def plain_logprobs(model: PolicyModel, temperature: float) -> tuple[Tensor, Tensor]:
    """The same log-probabilities from the full logits, as in any textbook."""
    logits = model.causal_lm(BATCH.input_ids).logits[:, :-1] / temperature
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    picked = logprobs.gather(-1, BATCH.input_ids[:, 1:, None]).squeeze(-1)
    return torch.where(BATCH.target_mask, picked, 0.0), torch.where(BATCH.target_mask, entropy, 0.0)


def gradients(model: PolicyModel, logprobs: Tensor) -> list[Tensor]:
    return list(
        torch.autograd.grad(
            (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum(), list(model.parameters())
        )
    )


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_chunked_logprobs_equal_the_plain_ones(config: dict[str, JsonValue], chunk_tokens: int) -> None:
    model = policy(config, chunk_elements=128 * chunk_tokens)
    logprobs, entropy = model(BATCH.input_ids, target_mask=BATCH.target_mask, temperature=0.7)
    expected, expected_entropy = plain_logprobs(model, 0.7)
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=0)
    assert not entropy.requires_grad
    for ours, theirs in zip(gradients(model, logprobs), gradients(model, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def most_logits_at_once(chunk_elements: int) -> int:
    """Elements of the largest tensor that leaves the output layer, forward and backward."""
    model = policy(QWEN, chunk_elements)
    sizes: list[int] = []
    model._check_head()
    head = model.causal_lm.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    logprobs, _ = model(BATCH.input_ids, target_mask=BATCH.target_mask)
    logprobs.sum().backward()
    return max(sizes)


def test_logits_never_exist_for_the_whole_batch() -> None:
    allowed = 3 * 128
    assert most_logits_at_once(chunk_elements=allowed) <= allowed


def test_negative_control_unchunked_logits_are_caught() -> None:
    assert most_logits_at_once(chunk_elements=1 << 26) == int(BATCH.target_mask.sum()) * 128 > 3 * 128


def test_the_entropy_is_not_computed_again_in_the_backward_pass() -> None:
    """Each chunk of logits is computed twice, but a metric needs no gradient."""
    model, parts = policy(QWEN, chunk_elements=3 * 128), []
    real = token_logprobs._entropy

    def counted(logprobs: Tensor) -> Tensor:
        parts.append(len(logprobs))
        return real(logprobs)

    with mock.patch.object(token_logprobs, "_entropy", counted):
        logprobs, _ = model(BATCH.input_ids, target_mask=BATCH.target_mask)
        logprobs.sum().backward()
    assert len(parts) > 1
    assert sum(parts) == int(BATCH.target_mask.sum())


@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_the_gradient_of_the_entropy_is_the_numerical_one(elements: int) -> None:
    """In double precision, in rows at a time and all at once; a token that cannot be drawn has none."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([3, 0, 5, 2])

    def both(logits: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs.token_logprobs(logits, labels, entropy_gradient=True)

    with mock.patch.dict(token_logprobs._ENTROPY_ELEMENTS, {"cpu": elements}):
        assert torch.autograd.gradcheck(both, logits)
        certain = torch.tensor([[0.0, -math.inf, 1.0]], requires_grad=True)
        picked, entropy = token_logprobs.token_logprobs(certain, torch.tensor([2]), entropy_gradient=True)
        (gradient,) = torch.autograd.grad(picked.sum() + 1e6 * entropy.sum(), certain)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0
    for one, other in zip(both(logits), token_logprobs.token_logprobs(logits, labels), strict=True):
        assert torch.equal(one, other), "the same values as without the gradient"


@pytest.mark.parametrize("chunk_elements", [3 * 128, 1 << 26])
def test_the_gradient_of_the_entropy_in_chunks_is_that_of_the_plain_formula(chunk_elements: int) -> None:
    plain, model = policy(QWEN), policy(QWEN, chunk_elements=chunk_elements)
    _, entropy = model(BATCH.input_ids, target_mask=BATCH.target_mask, temperature=0.7, entropy_gradient=True)
    found, expected = gradients(model, entropy), gradients(plain, plain_logprobs(plain, 0.7)[1])
    assert any(gradient.abs().max() > 1e-3 for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_what_lies_in_the_padding_changes_nothing() -> None:
    model = policy(QWEN)
    other_filler = torch.where(torch.arange(7) >= torch.tensor([[6], [5], [7]]), 99, BATCH.input_ids)
    assert not torch.equal(other_filler, BATCH.input_ids)
    logprobs, _ = model(BATCH.input_ids, target_mask=BATCH.target_mask)
    others, _ = model(other_filler, target_mask=BATCH.target_mask)
    assert torch.equal(logprobs, others)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    plain, saving = policy(QWEN), policy(QWEN)
    use_gradient_checkpointing(saving.causal_lm)
    saving.train()
    expected = gradients(plain, plain(BATCH.input_ids, target_mask=BATCH.target_mask)[0])
    found = gradients(saving, saving(BATCH.input_ids, target_mask=BATCH.target_mask)[0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_a_micro_batch_without_targets_has_zero_gradients() -> None:
    model = policy(QWEN)
    logprobs, _ = model(BATCH.input_ids, target_mask=torch.zeros_like(BATCH.target_mask))
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_model_that_caps_its_logits_is_refused(cap: float) -> None:
    """Gemma 2 has a cap of 30, which the logits of random weights are far from."""
    capped: dict[str, JsonValue] = {**QWEN, "model_type": "gemma2", "final_logit_softcapping": cap}
    with pytest.raises(BadConfig, match="does more to its logits"):
        PolicyModel(tiny_model(capped))


def test_a_model_without_a_part_before_its_output_layer_is_refused() -> None:
    llama4 = tiny_model(
        {
            "model_type": "llama4_text",
            "hidden_size": 32,
            "intermediate_size": 32,
            "intermediate_size_mlp": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 2,
            "head_dim": 16,
        }
    )
    with pytest.raises(BadConfig, match=r"Llama4ForCausalLM does not say which.*base_model_prefix"):
        PolicyModel(llama4)


def test_collate_marks_what_is_to_be_predicted() -> None:
    batch = collate([[1, 2, 3], [4]], [[5], [6, 7]], pad_id=9)
    assert batch.input_ids.tolist() == [[1, 2, 3, 5], [4, 6, 7, 9]]
    assert batch.target_mask.tolist() == [[False, False, True], [True, True, False]]
    assert batch.place(torch.tensor([0.5, 1.5, 2.5])).tolist() == [[0.0, 0.0, 0.5], [1.5, 2.5, 0.0]]
