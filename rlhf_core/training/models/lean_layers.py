"""RMSNorm, gated MLP and rotary embedding in fewer passes over memory, which keep less for the backward pass.

transformers writes each as a chain of element-wise operations. Autograd then keeps the result of each and makes a
pass over memory for each, forward and backward. Here each is one function with its derivative written out, and the
product of the gated MLP, as large as its gate, is recomputed in the backward pass: selective recomputation as in
Korthikanti et al. 2022 (arXiv 2205.05198, section 5), at about a hundredth of the time.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers.activations import SiLUActivation

_PROBE_ROWS = 4
_ROTATION = "apply_rotary_pos_emb"
"""Function in the module of each architecture of transformers, which its attention calls by this name."""


def use_lean_layers(model: nn.Module) -> int:
    """Replace the forward pass of every RMSNorm and gated MLP of ``model`` that has the usual form, and the rotation of
    queries and keys in its attention.

    A module is replaced only if both give the same result for a probe: one with another formula stays as it is, such as
    Gemma's norms, which add 1 to their weights. The same holds for one whose forward pass is already replaced, here or
    by another library. Modules, names and values of the weights are unchanged.

    Returns:
        Number of replaced modules.
    """
    return sum(_replace(module) for module in model.modules())


def keep_products(model: nn.Module) -> None:
    """Stop recomputing within replaced MLPs: gradient checkpointing would keep the products that recomputation
    drops."""
    for module in model.modules():
        if isinstance(module.forward, _LeanMlp):
            module.forward.recomputes = False


def use_gradient_checkpointing(model: Any) -> None:
    """Recompute the activations of a transformers model in the backward pass instead of keeping them."""
    keep_products(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _replace(module: Any) -> bool:
    if "forward" in vars(module):
        return False
    name = type(module).__name__
    if name.endswith("Attention"):
        attention = _lean_attention(type(module).forward)
        if attention is not None:
            module.forward = MethodType(attention, module)
        return attention is not None
    forward: Callable[[Tensor], Tensor]
    if name.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        forward, width = MethodType(_lean_norm, module), module.weight.shape[-1]
    elif name.endswith("MLP") and isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation):
        if not all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
            return False
        forward, width = _LeanMlp(module), module.gate_proj.in_features
    else:
        return False
    weights = next(module.parameters())
    probe = torch.linspace(-2, 3, _PROBE_ROWS * width, device=weights.device, dtype=weights.dtype).view(1, -1, width)
    with torch.no_grad():
        usual, lean = module(probe), forward(probe)
    if not torch.allclose(usual, lean, rtol=1e-2, atol=1e-2 * float(usual.abs().max())):
        return False
    module.forward = forward
    return True


def _lean_attention(attention: Callable[..., Any]) -> Callable[..., Any] | None:
    """Copy the forward pass of an attention, with a rotation in fewer passes; None if its rotation has another form.

    It is copied because the rotation is a function of the module of each architecture, which serves all models of the
    process, also those that stay as they are.
    """
    if not isinstance(attention, FunctionType) or _ROTATION not in attention.__code__.co_names:
        return None
    usual = attention.__globals__[_ROTATION]
    if usual.__module__ != attention.__module__:  # replaced by another library
        return None
    lean = _lean_rotation(usual)
    if not _rotate_alike(usual, lean):
        return None
    copied = FunctionType(
        attention.__code__,
        attention.__globals__ | {_ROTATION: lean},
        attention.__name__,
        attention.__defaults__,
        attention.__closure__,
    )
    copied.__kwdefaults__ = attention.__kwdefaults__
    return copied


def _rotate_alike(usual: Callable[..., Any], lean: Callable[..., Any]) -> bool:
    if list(inspect.signature(usual).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    q = torch.linspace(-2, 3, 2 * _PROBE_ROWS * 8).view(1, 2, _PROBE_ROWS, 8)
    probe = q, q[:, :1], q[:, 0].cos(), q[:, 1].sin()
    try:
        return all(map(torch.allclose, usual(*probe), lean(*probe)))
    except RuntimeError:  # such as that of GPT-OSS, whose angles are half as wide
        return False


def _lean_rotation(usual: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if not q.shape[-1] == k.shape[-1] == cos.shape[-1]:  # only a part of each head is rotated
            return usual(q, k, cos, sin, unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _Rotated.apply(q, cos, sin), _Rotated.apply(k, cos, sin)

    return rotate


def _lean_norm(module: Any, hidden_states: Tensor) -> Tensor:
    result: Tensor = _RmsNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return result


class _LeanMlp:
    def __init__(self, module: Any) -> None:
        self.module = module
        self.recomputes = True

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.module.gate_proj(x), self.module.up_proj(x)
        product: Tensor = _Gated.apply(gate, up)
        result: Tensor
        if not (self.recomputes and product.requires_grad):
            result = self.module.down_proj(product)
            return result
        gate, up = gate.detach(), up.detach()
        versions = (gate._version, up._version)
        storage = product.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() == storage and tensor.dtype == gate.dtype:
                return tensor.shape, tensor.stride(), tensor.storage_offset()
            return tensor if tensor.is_leaf else tensor.detach()  # detached: it may be the result of its own node

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if versions != (gate._version, up._version):
                raise RuntimeError("the gate of an MLP was modified in place before its backward pass")
            return _gated(gate, up).as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            result = self.module.down_proj(product)
        return result


class _RmsNorm(Function):
    """RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467): ``y = w x r`` with ``r = (mean(x^2) + eps)^-1/2``.

    With ``g = dL/dy``: ``dL/dw = sum(g x r)`` and ``dL/dx = r g w - x r^3 mean(g w x)``.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        normalized: Tensor = (wide * scale).to(hidden.dtype)
        return normalized.mul_(weight) if weight.dtype == hidden.dtype else normalized * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, scale = ctx.saved_tensors
        x, g = (tensor.to(scale.dtype).reshape(-1, hidden.shape[-1]) for tensor in (hidden, grad))
        w, r = weight.to(scale.dtype), scale.reshape(-1, 1)
        work = g * x
        grad_weight = (work.t() @ r)[:, 0].to(weight.dtype) if ctx.needs_input_grad[1] else None
        factor = (work @ w)[:, None].mul_(r.pow(3)).div_(len(w))
        torch.mul(g, w, out=work)
        work.mul_(r).addcmul_(x, factor, value=-1)
        return work.view(hidden.shape).to(hidden.dtype), grad_weight, None


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    product: Tensor = functional.silu(gate).mul_(up)
    return product


class _Gated(Function):
    """``silu(gate) * up``, the product of SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, functional.silu(gate).mul_(grad)


class _Rotated(Function):
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864) of points whose two coordinates are the halves of ``x``:
    ``y = (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)``.

    With ``g = dL/dy``: ``dL/dx = (g1 cos1 + g2 sin2, g2 cos2 - g1 sin1)``. All tensors are ``[..., D]``; 1 and 2 denote
    their halves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (x1, x2), (sin1, sin2) = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        rotated = x * cos
        y1, y2 = rotated.chunk(2, dim=-1)
        y1.addcmul_(x2, sin1, value=-1)
        y2.addcmul_(x1, sin2)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (g1, g2), (sin1, sin2) = grad.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        grad_x = grad * cos
        x1, x2 = grad_x.chunk(2, dim=-1)
        x1.addcmul_(g2, sin2)
        x2.addcmul_(g1, sin1, value=-1)
        return grad_x, None, None
