"""Optimizer shares: each rank's part of AdamW's state, by parameter, in a form that any number of ranks can read.

Every stage of ZeRO partitions the parameters differently: stages 1 and 2 split one flat buffer of all of them into
equal parts, stage 3 splits each parameter. In a checkpoint each rank writes, for each parameter that it has a part of,
the offset of the part in the flattened parameter, the float32 weights and the two moments. A later start reads what it
needs from there, whatever its stage and number of ranks; saving gathers and converts nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import CheckpointCorrupt

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """A contiguous range of elements of one parameter that this rank updates."""

    name: str
    start: int
    """Index of the first element in the flattened parameter."""
    weights: Tensor
    """``[n]`` float32: a view of the weights that the optimizer updates."""
    key: Tensor
    """The optimizer's own tensor, of which ``weights`` is a part."""
    offset: int
    """Index of the first element of the part in that tensor."""
    is_whole_here: bool = False
    """True if this rank's optimizer holds the whole parameter and the rank writes only this part of it."""

    @property
    def end(self) -> int:
        """Index after the last element."""
        return self.start + self.weights.numel()

    def of(self, moment: Tensor) -> Tensor:
        """Return the same part of a moment."""
        return moment.view(-1)[self.offset : self.offset + self.weights.numel()]

    def to_be_loaded(self) -> "Piece":
        """Return the part to read: in stage 0 the whole parameter, whichever part this rank writes."""
        if not self.is_whole_here:
            return self
        return replace(self, start=0, weights=self.key.detach().view(-1), offset=0)


def pieces(engine: Any, policy: nn.Module) -> Iterator[Piece]:
    """List the parts of the parameters that this rank updates.

    Args:
        engine: a ``DeepSpeedEngine`` of any stage.
        policy: its model.
    """
    stage = int(engine.zero_optimization_stage())
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        if stage == 3:
            yield from _piece_of_stage_3(engine.optimizer, name, parameter)
        elif stage:
            yield from _piece_of_stage_1_or_2(engine.optimizer, name, parameter)
        else:
            yield _piece_of_stage_0(engine, name, parameter)


def _piece_of_stage_0(engine: Any, name: str, parameter: nn.Parameter) -> Piece:
    """Return the part that this rank writes: all ranks have the whole state, and nothing is written twice."""
    size, rank, num_ranks = parameter.numel(), engine.global_rank, engine.world_size
    start, end = size * rank // num_ranks, size * (rank + 1) // num_ranks
    return Piece(name, start, parameter.detach().view(-1)[start:end], parameter, start, is_whole_here=True)


def _piece_of_stage_1_or_2(optimizer: Any, name: str, parameter: nn.Parameter) -> Iterator[Piece]:
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's own attribute
    if mapping is None:
        return  # all of it belongs to other ranks
    flat = _flat_partitions(optimizer)[mapping.param_group_index]
    yield Piece(
        name,
        mapping.lp_fragment_address.start,
        flat.detach().narrow(0, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel),
        flat,
        mapping.hp_fragment_address.start,
    )


def _piece_of_stage_3(optimizer: Any, name: str, parameter: Any) -> Iterator[Piece]:
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = size * optimizer._get_param_partition_rank(parameter)
    length = min(size, parameter.ds_numel - start)  # the last share is padded, and any after it are all padding
    if length > 0:
        flat = optimizer.fp32_partitioned_groups_flat[group]
        yield Piece(name, start, flat.detach().narrow(0, offset, length), flat, offset)


def _flat_partitions(optimizer: Any) -> list[Tensor]:
    """Float32 weights of this rank by parameter group. DeepSpeed uses a separate optimizer for bfloat16 in stage 1."""
    of_most: list[Tensor] | None = getattr(optimizer, "single_partition_of_fp32_groups", None)
    found: list[Tensor] = optimizer.fp32_groups_flat_partition if of_most is None else of_most
    return found


def adamw(engine: Any) -> torch.optim.AdamW:
    """The AdamW optimizer that DeepSpeed's wraps."""
    optimizer: torch.optim.AdamW = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return optimizer


def saved_share(own: Iterable[Piece], state: Any) -> dict[str, Any]:
    """Collect this rank's share of the optimizer state: tensors, numbers and containers only.

    Args:
        own: parts that this rank updates.
        state: state of AdamW.

    Returns:
        The share, whose tensors are views of the optimizer's own.
    """
    parts: dict[str, dict[str, Any]] = {}
    steps = set()
    for piece in own:
        moments = state.get(piece.key) or {"step": 0.0}  # no moments exist before the first update
        steps.add(float(moments["step"]))
        found = {name: piece.of(moments[name]) for name in _MOMENTS if name in moments}
        parts[piece.name] = {"start": piece.start, "weight": piece.weights, **found}
    return {"step": max(steps, default=0.0), "parts": parts}


@torch.no_grad()
def load_shares(own: Iterable[Piece], state: Any, shares: Iterable[dict[str, Any]]) -> None:
    """Load the results of :func:`saved_share` from the ranks that wrote a checkpoint.

    Args:
        own: parts that this rank updates.
        state: state of AdamW.
        shares: shares of the ranks in any order. Reading stops once this rank has all it needs, so the share most
            likely to hold everything should come first.

    Raises:
        CheckpointCorrupt: the shares together are incomplete.
    """
    wanted = {piece.name: piece.to_be_loaded() for piece in own}
    left = {name: piece.weights.numel() for name, piece in wanted.items()}
    missing = set(wanted)
    for share in shares:
        for name in sorted(missing & share["parts"].keys()):
            left[name] -= _take(wanted[name], state, share["step"], share["parts"][name])
        missing = {name for name in missing if left[name]}
        if not missing:
            return
    raise CheckpointCorrupt(
        f"the optimizer shares of the checkpoint lack parts of {len(missing)} parameters: "
        f"{', '.join(sorted(missing)[:5])}"
    )


def _take(piece: Piece, state: Any, step: float, part: dict[str, Any]) -> int:
    """Copy the overlap of a piece with a saved part; returns its number of elements. Parts of different ranks do not
    overlap each other."""
    start: int = max(piece.start, part["start"])
    end: int = min(piece.end, part["start"] + part["weight"].numel())
    if start >= end:
        return 0
    targets = {"weight": piece.weights}
    if part.keys() >= set(_MOMENTS):
        own = _moments(state, piece.key, step)
        targets |= {name: piece.of(own[name]) for name in _MOMENTS}
    for name, target in targets.items():
        saved = part[name][start - part["start"] : end - part["start"]]
        target[start - piece.start : end - piece.start].copy_(saved)
    return end - start


def _moments(state: Any, key: Tensor, step: float) -> dict[str, Tensor]:
    """AdamW's state of a tensor, initialised as AdamW does if there is none yet."""
    if not state[key]:
        state[key] = {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "exp_avg": torch.zeros_like(key, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(key, memory_format=torch.preserve_format),
        }
    state[key]["step"].fill_(step)
    moments: dict[str, Tensor] = state[key]
    return moments
