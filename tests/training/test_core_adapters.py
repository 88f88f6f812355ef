"""Adapters in one process: their layers, reference, files, and the merged model."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
from core_models import OTHER_FAMILIES, QWEN, char_tokenizer, tiny_model
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from rlhf_core.errors import BadConfig, DiskFull, ResumeMismatch, WorkerError
from rlhf_core.files import fingerprints
from rlhf_core.run_dir.checkpoint import ADAPTER_WEIGHTS, BASE_RECORD
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.models import gathering
from rlhf_core.training.models.adapters import (
    AdapterReference,
    add_adapter,
    base_fingerprint,
    linear_names,
    load_adapter,
    require_base,
    save_adapter,
)
from rlhf_core.training.models.causal_lm import PolicyModel, load_causal_lm
from rlhf_core.training.models.merged import write_merged
from rlhf_core.training.models.reward_model import RewardModel, load_reward_model

pytestmark = pytest.mark.training

LORA = LoraSpec(rank=4, alpha=8)
IDS = torch.arange(3, 19)[None]


def stirred(model: Any) -> Any:
    """The model with trained adapter weights that are not 0."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def base(folder: Path, config: Any = QWEN) -> Path:
    tiny_model(config).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def adapted(folder: Path, lora: LoraSpec = LORA) -> Any:
    model = load_causal_lm(folder, "float32")
    add_adapter(model, lora, seed=1)
    return model


def test_an_adapter_with_dropout_that_was_trained_before_is_taken_up(tmp_path: Path) -> None:
    """A resumed run, or its second loop: the checks of the model compare passes, which dropout would make differ."""
    model = stirred(adapted(base(tmp_path), LoraSpec(rank=4, alpha=8, dropout=0.5))).train()
    policy = PolicyModel(model)
    assert policy.packs, "as at the start of the run"
    assert all(module.training for module in model.modules()), "the mode of training remains"


@pytest.mark.parametrize("config", [QWEN, *OTHER_FAMILIES.values()], ids=["qwen3", *OTHER_FAMILIES])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_merged_model_computes_what_the_adapter_does(tmp_path: Path, config: Any, rslora: bool) -> None:
    """The merged model agrees in float32, also when peft's own reader loads it; tied embeddings stay those of the base
    model."""
    folder = base(tmp_path / "base", config)
    model = stirred(adapted(folder, LORA.model_copy(update={"rslora": rslora})))
    save_adapter(model, tmp_path / "adapter", folder, is_first=True, beat=lambda: None)
    by_peft = peft.PeftModel.from_pretrained(load_causal_lm(folder, "float32"), str(tmp_path / "adapter"))
    merged = load_causal_lm(tmp_path / "adapter", "float32")
    merged.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(by_peft(IDS).logits, expected)
        for whole in (merged, load_causal_lm(tmp_path / "merged", "float32")):
            torch.testing.assert_close(whole(IDS).logits, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(load_causal_lm(folder, "float32")(IDS).logits, expected, atol=1e-2)
    untouched = tiny_model(config).get_input_embeddings().weight
    assert torch.equal(merged.get_input_embeddings().weight, untouched)


def test_an_adapter_whose_weights_match_no_layer_is_not_merged_away(tmp_path: Path) -> None:
    """peft only warns, and the result would be the base model."""
    folder = base(tmp_path / "base")
    save_adapter(stirred(adapted(folder)), tmp_path / "adapter", folder, is_first=True, beat=lambda: None)
    file = tmp_path / "adapter" / ADAPTER_WEIGHTS
    renamed = {name.replace(".layers.", ".text.layers."): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    with pytest.raises(BadConfig, match=r"other names than the layers of Qwen3ForCausalLM .*q_proj\.lora_A"):
        load_causal_lm(tmp_path / "adapter", "float32")


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, DiskFull), (errno.EFBIG, WorkerError)],
)
def test_weights_that_find_no_room_leave_no_merged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[WorkerError]
) -> None:
    folder, run_dir = base(tmp_path / "base"), RunDir(tmp_path / "run")
    save_adapter(adapted(folder), tmp_path / "adapter", folder, is_first=True, beat=lambda: None)
    checkpoint = Mock(step=4, model=tmp_path / "adapter")
    monkeypatch.setattr(gathering, "write_tensors", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(WorkerError) as raised:
        write_merged(run_dir, checkpoint, tiny_model(), char_tokenizer(), lambda: None)
    assert type(raised.value) is expected
    assert list(run_dir.merged(4).root.parent.iterdir()) == []


def test_the_reference_is_a_second_model_to_the_last_bit(tmp_path: Path) -> None:
    """The reference is that of the base model or of an earlier adapter; calling it does not disturb training."""
    folder = base(tmp_path / "base")
    model = stirred(adapted(folder))
    save_adapter(model, tmp_path / "earlier", folder, is_first=True, beat=lambda: None)
    earlier = PolicyModel(adapted(folder))
    load_adapter(earlier.causal_lm, tmp_path / "earlier")
    policy = PolicyModel(stirred(model))
    before, _ = policy(IDS)
    for source, second in ((None, PolicyModel(load_causal_lm(folder, "float32"))), (tmp_path / "earlier", earlier)):
        reference = AdapterReference(policy, policy.causal_lm, source)
        assert torch.equal(policy(IDS)[0], before), "the trained adapter stays active"
        assert torch.equal(reference(IDS)[0], second(IDS)[0])
        assert not torch.equal(second(IDS)[0], before)
        after, _ = policy(IDS)
        assert torch.equal(after, before)
        policy.zero_grad()
        after.sum().backward()
        trained = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
        assert trained
        assert all(".default." in name for name in trained)


def test_a_reward_model_takes_over_an_adapter_and_keeps_its_head(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    policy = stirred(adapted(folder))
    save_adapter(policy, tmp_path / "policy", folder, is_first=True, beat=lambda: None)
    ranker = load_reward_model(folder, "float32", seed=3, pad_id=0)
    head = ranker.score.weight.detach().clone()
    add_adapter(ranker, LORA, seed=1)
    load_adapter(ranker, tmp_path / "policy")
    with torch.no_grad():
        last = policy.base_model(IDS).last_hidden_state[:, -1]
        torch.testing.assert_close(RewardModel(ranker)(IDS), (last @ head.T).squeeze(-1))
    stirred(ranker)
    save_adapter(ranker, tmp_path / "ranker", folder, is_first=True, beat=lambda: None)
    with torch.no_grad():
        merged = RewardModel(load_reward_model(tmp_path / "ranker", "float32", seed=9, pad_id=0))(IDS)
        torch.testing.assert_close(merged, RewardModel(ranker)(IDS), rtol=1e-5, atol=1e-5)


def test_targets_that_match_nothing_are_named_with_the_existing_ones() -> None:
    for name in ("q_porj", "lm_head", "embed_tokens"):
        with pytest.raises(BadConfig, match=f'found "{name}" .* down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj'):
            add_adapter(tiny_model(), LoraSpec(target_modules=("v_proj", name)), seed=0)
    assert "lm_head" not in linear_names(tiny_model(OTHER_FAMILIES["llama"]))
    assert linear_names(tiny_model(OTHER_FAMILIES["gpt2"])) == ("c_attn", "c_fc", "c_proj")


def test_a_router_that_chooses_experts_itself_gets_no_adapter() -> None:
    model = tiny_model({**OTHER_FAMILIES["llama"], "model_type": "phimoe", "num_local_experts": 4})
    assert linear_names(model) == ("k_proj", "o_proj", "q_proj", "v_proj")
    add_adapter(model, LORA, seed=0)
    PolicyModel(model)(IDS)


def test_layers_that_peft_refuses_are_named_with_the_others() -> None:
    """With the kernels of a recurrent layer, an adapter of its last projection would change nothing."""
    config: Any = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1}
    with pytest.raises(BadConfig, match=r"'out_proj' is incompatible .*: dt_proj, in_proj, x_proj$"):
        add_adapter(tiny_model(config), LORA, seed=0)
    add_adapter(tiny_model(config), LORA.model_copy(update={"target_modules": ("in_proj",)}), seed=0)


def test_first_weights_follow_from_the_seed_alone() -> None:
    def weights(seed: int) -> Any:
        model = tiny_model()
        add_adapter(model, LORA, seed)
        return torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])

    torch.manual_seed(11)
    drawn = torch.random.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))


def test_an_adapter_of_other_layers_or_another_base_is_refused(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    save_adapter(adapted(folder), tmp_path / "adapter", folder, is_first=True, beat=lambda: None)
    with pytest.raises(ResumeMismatch, match="other layers"):
        load_adapter(adapted(folder, LORA.model_copy(update={"target_modules": ("q_proj",)})), tmp_path / "adapter")
    require_base(tmp_path / "adapter", folder)
    other = tmp_path / "other"
    tiny_model(seed=1).save_pretrained(other)
    with pytest.raises(ResumeMismatch, match=r"another base model .* model.safetensors differ"):
        require_base(tmp_path / "adapter", other)
    shutil.copy(tmp_path / "adapter" / BASE_RECORD, tmp_path / "kept")
    (tmp_path / "adapter" / BASE_RECORD).unlink()
    require_base(tmp_path / "adapter", other)  # written by another program: nothing is known


@pytest.mark.parametrize("sampled", [False, True], ids=["whole", "in pieces"])
def test_a_base_that_was_trained_further_is_refused(
    sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, with the same shapes and sizes, and where only one part in a thousand of the file is read."""
    if sampled:
        monkeypatch.setattr(fingerprints, "WHOLE_FILE_BYTES", 100)
        monkeypatch.setattr(fingerprints, "PIECES", 4)
        monkeypatch.setattr(fingerprints, "PIECE_BYTES", 64)
    folder, adapter = base(tmp_path / "base"), tmp_path / "adapter"
    save_adapter(adapted(folder), adapter, folder, is_first=True, beat=lambda: None)
    require_base(adapter, folder)
    size = (folder / "model.safetensors").stat().st_size
    further = load_causal_lm(folder, "float32")
    further(IDS, labels=IDS).loss.backward()
    torch.optim.AdamW(further.parameters(), lr=1e-5).step()
    further.save_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size == size
    with pytest.raises(ResumeMismatch, match=r"another base model .* model.safetensors differ"):
        require_base(adapter, folder)


def test_a_base_that_cannot_be_read_is_not_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A passing error of the file system must not end the run as a mismatch, which is not retried."""
    folder, adapter = base(tmp_path / "base"), tmp_path / "adapter"
    save_adapter(adapted(folder), adapter, folder, is_first=True, beat=lambda: None)
    (tmp_path / "base").rename(tmp_path / "again")  # under a name that this process has not read yet

    def fail(digest: Any, path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(fingerprints, "_add_file", fail)
        for read in (lambda: require_base(adapter, tmp_path / "again"), lambda: base_fingerprint(tmp_path / "again")):
            with pytest.raises(OSError, match="Input/output error"):
                read()
    require_base(adapter, tmp_path / "again")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": []}, "expected names of layers"),
        ({"target_modules": ["all-linear", "q_proj"]}, '"all-linear" alone'),
        ({"dropout": 0.1}, "log-probabilities of a different distribution"),
        ({"dropout": 1.0}, "less than 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(lora: dict[str, Any], message: str) -> None:
    content = {
        "name": "test",
        "model": {"config": QWEN, "tokenizer": "char", "lora": lora},
        "data": {"generator": "rlhf_core.training.tasks:sort_digits"},
        "train": {"num_steps": 1},
    }
    with pytest.raises(ValidationError, match=message):
        RunSpec.model_validate(content)
