"""The adapter of a vLLM engine, applied to its base model through vLLM's own LoRA layers."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlhf_core.errors import DiskFull
from rlhf_core.files.whole import comes_from_full_disk
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.rollouts import VLLM_ADAPTER_RANKS
from rlhf_core.training.models.adapters import write_adapter

_A, _B = ".lora_A.", ".lora_B."


@dataclass(frozen=True)
class LoadedAdapter:
    """The adapter in vLLM's layers."""

    number: int
    rank: int
    scale: float


class VllmAdapter:
    """One adapter at a time, in the single adapter slot that vLLM is started with.

    Every version has its own number, by which requests refer to it: vLLM fails if it does not have the requested
    version.
    """

    def __init__(self, lora: LoraSpec) -> None:
        self._lora = lora
        self._number = 0
        self.request: Any = None
        """Name of the current adapter for vLLM's requests; None before the first."""

    @property
    def options(self) -> dict[str, Any]:
        """Settings of an engine that accepts such an adapter."""
        rank = next(rank for rank in VLLM_ADAPTER_RANKS if rank >= self._lora.rank)
        return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}

    @property
    def loaded(self) -> LoadedAdapter:
        """The adapter loaded last."""
        return LoadedAdapter(self._number, self._lora.rank, self._lora.scale)

    def load(self, engine: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the previous version.

        Args:
            engine: vLLM's ``LLMEngine``.
            tensors: tensors of the adapter, with the trainer's names.

        Raises:
            DiskFull: there is no room for its files.
        """
        from vllm.lora.request import LoRARequest

        self.request = None
        self._number += 1
        # vLLM loads adapters from files. These are read once, so no other version can ever be read from them.
        with tempfile.TemporaryDirectory(prefix="adapter-") as folder:
            try:
                write_adapter(Path(folder), self._lora, tensors)
            except (OSError, SafetensorError) as error:
                if comes_from_full_disk(error):
                    raise DiskFull(f"there is no room for an adapter in {folder} (TMPDIR): {error}") from error
                raise
            request = LoRARequest(f"adapter-{self._number}", self._number, folder)
            engine.add_lora(request)
        self.request = request


def count_differing(model_runner: Any, adapter: LoadedAdapter, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Number of tensors whose parts in the active layers differ in any bit, or that have no layer: vLLM only logs which
    layers it cannot adapt.

    Args:
        model_runner: model runner of vLLM's worker.
        tensors: tensors of the adapter, with the trainer's names.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    manager = model_runner.lora_manager._adapter_manager
    place = manager.lora_index_to_id.index(adapter.number)
    given = {_layer(name) + kind: one for name, one in tensors for kind in _kind(name)}
    number, unused = 0, set(given)
    for name, layer in manager.modules.items():
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            continue
        parts = manager.packed_modules.get(name, [name])
        unused -= {part + kind for part in parts for kind in (_A, _B)}
        a = _own(layer, layer.slice_lora_a, [given.get(part + _A) for part in parts])
        b = _own(layer, layer.slice_lora_b, [given.get(part + _B) for part in parts])
        held_a = [one[place, 0, : adapter.rank] for one in layer.lora_a_stacked]
        held_b = [one[place, 0, :, : adapter.rank] for one in layer.lora_b_stacked]
        kept_b = [one * adapter.scale if one is not None else None for one in b]  # vLLM stores B times the scale
        number += sum(map(_differs, [*a, *kept_b], [*held_a, *held_b]))
    return number + len(unused)


def _own(layer: Any, part_of: Callable[[Any], Any], whole: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The parts of tensors that a layer uses, one for each of the layers that vLLM fused into it; None stays None."""
    if layer.tp_size == 1:
        return whole
    if len(whole) > 1:
        return list(part_of(list(whole)))
    return [part_of(one) if one is not None else None for one in whole]


def _differs(given: Tensor | None, held: Tensor) -> bool:
    return given is not None and not torch.equal(given.cpu(), held.cpu())


def use_products() -> None:
    """Make vLLM on CPU multiply with the only adapter. Call it before an engine is started.

    vLLM's own operation copies both matrices for every token, to support a different adapter for each.
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
    """Add ``scale * B A x`` to ``y`` for each of the layers that vLLM fused, in the number formats of vLLM's operation.

    Args:
        x: ``[T, inputs]``.
        y: ``[T, sum of widths]``.
        a: matrix of each layer, ``[1, 1, rank, inputs]``.
        b: matrix of each layer, ``[1, 1, width, rank]``.
        widths: outputs of each layer.
    """
    given, parts = x.view(-1, x.shape[-1]).float(), y.view(-1, y.shape[-1]).split(list(widths), dim=-1)
    for one_a, one_b, part in zip(a, b, parts, strict=True):
        part += (scale * given @ one_a[0, 0].float().T).to(part.dtype) @ one_b[0, 0].T


def _layer(name: str) -> str:
    """Name of the layer that a tensor belongs to."""
    return name.partition(_A)[0].partition(_B)[0]


def _kind(name: str) -> list[str]:
    return [kind for kind in (_A, _B) if kind in name]
