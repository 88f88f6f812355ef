"""Lean layers: the same numbers as transformers' own layers, with fewer tensors kept for the backward pass."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_models import OTHER_FAMILIES, QWEN, tiny_model
from peft import LoraConfig, get_peft_model
from pydantic import JsonValue
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.phi3 import modeling_phi3

from rlhf_core.training.models import lean_layers
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.models.lean_layers import keep_products, use_gradient_checkpointing, use_lean_layers
from rlhf_core.training.trainers.ppo import ValueModel

pytestmark = pytest.mark.training

IDS = torch.arange(2, 34).view(2, 16)


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    run().backward()
    return {name: weights.grad for name, weights in model.named_parameters() if weights.grad is not None}


def mean_logit(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits.float().square().mean()


def pair(config: dict[str, JsonValue] = QWEN) -> tuple[PreTrainedModel, PreTrainedModel, int]:
    """A model as it is, a copy with lean layers, and the number of replaced layers."""
    usual = tiny_model(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in usual.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
    lean = copy.deepcopy(usual)
    return usual, lean, use_lean_layers(lean)


def mlp_of(model: PreTrainedModel) -> Any:
    return model.base_model.layers[0].mlp


def product_lives(mlp: Any, hidden: Tensor) -> tuple[bool, Tensor]:
    """True if the input of ``down_proj`` is kept after the forward pass; and the output of the MLP."""
    seen: list[StorageWeakRef] = []
    handle = mlp.down_proj.register_forward_pre_hook(
        lambda _, inputs: seen.append(StorageWeakRef(inputs[0].untyped_storage()))
    )
    output: Tensor = mlp(hidden)
    handle.remove()
    return not seen[0].expired(), output


@pytest.mark.parametrize(
    ("config", "number"),
    [(QWEN, 2 * (4 + 2) + 1), (OTHER_FAMILIES["llama"], 2 * (2 + 2) + 1), (OTHER_FAMILIES["gpt2"], 0)],
    ids=["qwen3", "llama", "gpt2"],
)
def test_loss_and_gradients_are_those_of_the_usual_layers(config: dict[str, JsonValue], number: int) -> None:
    usual, lean, replaced = pair(config)
    assert replaced == number
    wanted = gradients(usual, lambda: mean_logit(usual))
    found = gradients(lean, lambda: mean_logit(lean))
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(mean_logit(lean), mean_logit(usual), rtol=1e-5, atol=0)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


def test_derivatives_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    hidden, weight, other = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 5), 5, (3, 5)))
    assert torch.autograd.gradcheck(lambda x, w: lean_layers._RmsNorm.apply(x, w, 1e-6), (hidden, weight))
    assert torch.autograd.gradcheck(lean_layers._Gated.apply, (hidden, other))
    cos, sin = torch.randn(2, 3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: lean_layers._Rotated.apply(x, cos, sin), (hidden[:, :4],))


def test_a_wrong_derivative_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: the derivative lacks the term through the root mean square."""

    def without(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, weight, scale = ctx.saved_tensors
        return grad * weight * scale, None, None

    monkeypatch.setattr(lean_layers._RmsNorm, "backward", staticmethod(without))
    hidden = torch.randn((3, 5), dtype=torch.float64, requires_grad=True)
    weight = torch.ones(5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda x: lean_layers._RmsNorm.apply(x, weight, 1e-6), (hidden,))


def test_a_rotation_derived_in_the_wrong_direction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a gradient turns back what the forward pass has turned."""
    usual = lean_layers._Rotated.backward

    def onward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return usual(SimpleNamespace(saved_tensors=(cos, -sin)), grad)

    monkeypatch.setattr(lean_layers._Rotated, "backward", staticmethod(onward))
    angles = torch.linspace(0, 3, 8, dtype=torch.float64).view(2, 4)
    hidden = torch.randn((2, 4), dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda x: lean_layers._Rotated.apply(x, angles.cos(), angles.sin()), (hidden,))


def test_bfloat16_rounds_as_usual() -> None:
    usual, lean, _ = pair()
    usual, lean = usual.bfloat16(), lean.bfloat16()
    torch.testing.assert_close(mean_logit(lean), mean_logit(usual), rtol=1e-2, atol=0)
    wanted = gradients(usual, lambda: mean_logit(usual))
    found = gradients(lean, lambda: mean_logit(lean))
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 0.05 * gradient.abs().max(), name


def test_the_product_of_an_mlp_is_computed_again_rather_than_kept() -> None:
    usual, lean, _ = pair()
    hidden = torch.randn((1, 7, 32), requires_grad=True)
    is_kept, output = product_lives(mlp_of(lean), hidden)
    assert not is_kept
    assert product_lives(mlp_of(usual), hidden)[0], "control"
    (found,) = torch.autograd.grad(output.sum(), hidden)
    (wanted,) = torch.autograd.grad(mlp_of(usual)(hidden).sum(), hidden)
    torch.testing.assert_close(found, wanted)
    keep_products(lean)
    assert product_lives(mlp_of(lean), hidden)[0]


def test_a_gate_that_is_modified_before_the_backward_pass_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lean, _ = pair()
    mlp, seen = mlp_of(lean), []
    mlp.gate_proj.register_forward_hook(lambda *found: seen.append(found[2]))
    output = mlp(torch.randn((1, 7, 32), requires_grad=True))
    with torch.no_grad():
        seen[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        output.sum().backward()


def test_gradients_with_checkpointing_are_the_same() -> None:
    usual, lean, _ = pair()
    wanted = gradients(usual, lambda: mean_logit(usual))
    use_gradient_checkpointing(lean)
    lean.train()
    found = gradients(lean, lambda: mean_logit(lean))
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("wrapper", [PolicyModel, ValueModel])
def test_checkpointing_keeps_no_gate(wrapper: type[PolicyModel | ValueModel]) -> None:
    """The gates are the largest activations: kept for a product, they would undo most of the checkpointing."""
    _, lean, _ = pair()
    mlp, seen = mlp_of(lean), list[StorageWeakRef]()
    mlp.gate_proj.register_forward_hook(lambda *found: seen.append(StorageWeakRef(found[2].untyped_storage())))
    model = wrapper(lean).train()
    use_gradient_checkpointing(lean)
    seen.clear()
    output = model(IDS, target_mask=torch.ones_like(IDS[:, 1:], dtype=torch.bool))
    assert [gate.expired() for gate in seen] == [True]
    del output


def test_an_adapter_learns_the_same() -> None:
    usual, lean, _ = pair()
    found = []
    for model in (usual, lean):
        torch.manual_seed(2)
        adapted: Any = get_peft_model(
            model, LoraConfig(r=2, target_modules=["down_proj", "q_proj"], init_lora_weights=False)
        )
        found.append(gradients(adapted, lambda adapted=adapted: mean_logit(adapted)))  # type: ignore[misc]
    assert found[0]
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), name


class ShiftedRMSNorm(nn.Module):
    """RMSNorm of Gemma, whose weights are offsets from 1."""

    variance_epsilon = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.ones(8))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def test_layers_of_another_form_stay_as_they_are() -> None:
    gelu = tiny_model({**OTHER_FAMILIES["llama"], "hidden_act": "gelu"})
    assert use_lean_layers(gelu) == 5 + 2, "only the norms and the rotations"
    assert use_lean_layers(nn.Sequential(ShiftedRMSNorm())) == 0


@pytest.mark.parametrize("attention", [GlmAttention, GptOssAttention])
def test_rotations_of_another_form_stay_as_they_are(attention: type[nn.Module]) -> None:
    """GLM pairs neighbours instead of halves, and GPT-OSS has one angle for both coordinates."""
    assert "apply_rotary_pos_emb" in attention.forward.__code__.co_names, "control"
    assert lean_layers._lean_attention(attention.forward) is None


def test_the_rotation_of_a_part_of_each_head_is_the_usual_one() -> None:
    attention: Any = lean_layers._lean_attention(modeling_phi3.Phi3Attention.forward)
    lean, usual = attention.__globals__["apply_rotary_pos_emb"], modeling_phi3.apply_rotary_pos_emb
    assert lean is not usual
    q, k, cos, sin = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8), *torch.randn(2, 1, 5, 4)
    for found, wanted in zip(lean(q, k, cos, sin), usual(q, k, cos, sin), strict=True):
        assert torch.equal(found, wanted)


def test_the_rotation_of_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger, for instance, replaces the function of an architecture by a kernel."""
    attention = modeling_phi3.Phi3Attention.forward
    monkeypatch.setattr(modeling_phi3, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))
    assert lean_layers._lean_attention(attention) is None


def test_layers_are_replaced_once() -> None:
    _, lean, _ = pair()
    keep_products(lean)
    before = mlp_of(lean).forward
    assert use_lean_layers(lean) == 0
    assert mlp_of(lean).forward is before, "a second call must not turn recomputation on again"
    assert PolicyModel(lean).packs
