"""The adapter of a vLLM engine, applied to its base model through vLLM's own LoRA layers."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.rollouts import VLLM_ADAPTER_RANKS
from rlhf_core.training.models.adapters import write_adapter

_A, _B = ".lora_A.", ".lora_B."


@dataclass(frozen=True)
class AdapterInForce:
    """The adapter that vLLM's layers hold."""

    number: int
    rank: int
    scale: float


class VllmAdapter:
    """One adapter at a time, in the one place for adapters that vLLM is started with.

    Every version has a number of its own, by which requests name it: vLLM ends with an error where it does not have the
    one that is asked for.
    """

    def __init__(self, lora: LoraSpec) -> None:
        self._lora = lora
        self._number = 0
        self.request: Any = None
        """Name of the adapter in force for vLLM's requests; None before the first."""

    @property
    def options(self) -> dict[str, Any]:
        """Settings of an engine that takes such an adapter."""
        rank = next(rank for rank in VLLM_ADAPTER_RANKS if rank >= self._lora.rank)
        return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}

    @property
    def in_force(self) -> AdapterInForce:
        """The one that was loaded last."""
        return AdapterInForce(self._number, self._lora.rank, self._lora.scale)

    def load(self, engine: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put a version in the place of the one before.

        Args:
            engine: vLLM's ``LLMEngine``.
            tensors: of the adapter, as the trainer names them.
        """
        from vllm.lora.request import LoRARequest

        self.request = None
        self._number += 1
        # vLLM takes adapters from files. These are read once, so nothing but this version can ever be read there.
        with tempfile.TemporaryDirectory(prefix="adapter-") as folder:
            write_adapter(Path(folder), self._lora, tensors)
            request = LoRARequest(f"adapter-{self._number}", self._number, folder)
            engine.add_lora(request)
        self.request = request


def count_differing(model_runner: Any, adapter: AdapterInForce, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Number of tensors of which the layers in use do not hold their part bit for bit, of those layers that are found
    by name.

    Args:
        model_runner: of vLLM's worker.
        tensors: of the adapter, as the trainer names them.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    manager = model_runner.lora_manager._adapter_manager
    place = manager.lora_index_to_id.index(adapter.number)
    given = {_layer(name) + kind: one for name, one in tensors for kind in _kind(name)}
    number = 0
    for name, layer in manager.modules.items():
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            continue
        parts = manager.packed_modules.get(name, [name])
        a = _own(layer, layer.slice_lora_a, [given.get(part + _A) for part in parts])
        b = _own(layer, layer.slice_lora_b, [given.get(part + _B) for part in parts])
        held_a = [one[place, 0, : adapter.rank] for one in layer.lora_a_stacked]
        held_b = [one[place, 0, :, : adapter.rank] for one in layer.lora_b_stacked]
        kept_b = [one * adapter.scale if one is not None else None for one in b]  # vLLM keeps B times the scale
        number += sum(map(_differs, [*a, *kept_b], [*held_a, *held_b]))
    return number


def _own(layer: Any, part_of: Callable[[Any], Any], whole: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The parts that a layer takes of tensors, each of one of the layers that vLLM has joined in it; None stays."""
    if layer.tp_size == 1:
        return whole
    if len(whole) > 1:
        return list(part_of(list(whole)))
    return [part_of(one) if one is not None else None for one in whole]


def _differs(given: Tensor | None, held: Tensor) -> bool:
    return given is not None and not torch.equal(given.cpu(), held.cpu())


def use_products() -> None:
    """Have vLLM on CPU multiply with the one adapter that there is. Call before an engine is started.

    Its own operation copies both matrices for every token, to take another adapter for each.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    PunicaWrapperCPU.add_lora_linear = _add_lora_linear


def _add_lora_linear(
    wrapper: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
    **_: Any,
) -> None:
    if not wrapper.no_lora:
        add_product(x, y, lora_a_stacked, lora_b_stacked, scale, output_slices)


def add_product(
    x: Tensor, y: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scale: float, widths: Sequence[int]
) -> None:
    """Add ``scale * B A x`` to ``y``, for each of the layers that vLLM has joined; in the number formats of its own
    operation.

    Args:
        x: ``[T, inputs]``.
        y: ``[T, sum of widths]``.
        a: of each layer ``[1, 1, rank, inputs]``.
        b: of each layer ``[1, 1, width, rank]``.
        widths: outputs of each layer.
    """
    given, parts = x.view(-1, x.shape[-1]).float(), y.view(-1, y.shape[-1]).split(list(widths), dim=-1)
    for one_a, one_b, part in zip(a, b, parts, strict=True):
        part += (scale * given @ one_a[0, 0].float().T).to(part.dtype) @ one_b[0, 0].T


def _layer(name: str) -> str:
    """Name of the layer that a tensor is beside."""
    return name.partition(_A)[0].partition(_B)[0]


def _kind(name: str) -> list[str]:
    return [kind for kind in (_A, _B) if kind in name]
