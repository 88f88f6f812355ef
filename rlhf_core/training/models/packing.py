"""Packed forward passes over only the tokens that a loss needs, each of them once: no padding, no repeated prefixes.

Under causal attention the state of a token depends only on the tokens up to it. So a prefix that sequences of a
micro-batch share goes through the model once: the prompt of a group of samples, or of a pair of completions (prefix
sharing as in Liu et al. 2025, arXiv 2506.05433). Padding is left out, and so are last tokens, which predict nothing.
All other tokens are concatenated in one row; only attention sees separate sequences, in blocks of similar length.

The row may be cut into pieces of equal length, one for each rank of a group (``sequence_parallel.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_core.errors import BadConfig
from rlhf_core.training.distributed import SequenceGroup
from rlhf_core.training.models.sequence_parallel import to_heads, to_tokens, whole, why_not_shared

ATTENTION = "packed_sdpa"
"""Name of the attention implementation of packed models. Outside packed passes it is ``sdpa``."""
_LEAST_FILL = 3 / 4
"""Minimum length of a sequence relative to the longest in its block; trades padding against calls."""
_IGNORED = (1, 1, 1, 1)
"""Shape of a placeholder mask: given a mask with four axes, transformers builds none of its own."""


@dataclass(frozen=True)
class _AttentionBlock:
    """Sequences of similar length that attention processes together."""

    source: Tensor
    """``[b * w]`` position of each token in the row; 0 for padding."""
    shape: tuple[int, int]
    """``(b, w)``: number of sequences, and tokens of the longest one."""


@dataclass(frozen=True)
class Packing:
    """The ``N`` tokens of a micro-batch of ``B`` sequences that go through the model."""

    tokens: Tensor
    """``[1, N]`` int64."""
    positions: Tensor
    """``[1, N]`` index of each token within its sequence."""
    source: Tensor
    """``[B, T]`` position in the row of each token of each sequence; 0 where it is not needed."""
    blocks: Sequence[_AttentionBlock]
    """Blocks of sequences, as attention sees them."""
    back: Tensor
    """``[N]`` position of each token of the row in the concatenated outputs of all blocks."""
    group: SequenceGroup | None = None
    """The ranks that share the row. ``tokens`` and ``positions`` are then those of this rank's piece, and the row ends
    with padding to a multiple of their number."""

    @property
    def own(self) -> Tensor:
        """``[B, T]`` bool: true for the tokens of this rank's piece, or for all if the row is not shared."""
        if self.group is None:
            return torch.ones_like(self.source, dtype=torch.bool)
        return self.source // self.tokens.shape[1] == self.group.rank


def pack(input_ids: Tensor, target_mask: Tensor) -> Packing:
    """Find the tokens that predictions need.

    Args:
        input_ids: ``[B, T+1]`` int64, padded on the right.
        target_mask: ``[B, T]`` bool: true at ``t`` if the prediction of token ``t+1`` is needed.
    """
    needed = target_mask.flip(1).cumsum(1).flip(1) > 0
    needed[0, 0] = True  # at least one token: every rank runs its passes, whatever it sampled
    lengths: list[int] = needed.sum(1).tolist()
    rows = [row[:length] for row, length in zip(input_ids.tolist(), lengths, strict=True)]
    source = torch.zeros(target_mask.shape, dtype=torch.int64)
    tokens: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    # In lexicographic order, no sequence shares a longer prefix with any earlier one than with the previous one.
    before = -1
    for index in sorted(range(len(rows)), key=rows.__getitem__):
        row = rows[index]
        shared = _shared(rows[before], row) if before >= 0 else 0
        source[index, :shared] = source[before, :shared]
        source[index, shared : len(row)] = torch.arange(len(tokens), len(tokens) + len(row) - shared)
        tokens += row[shared:]
        positions += range(shared, len(row))
        owners += [index] * (len(row) - shared)
        before = index
    blocks, begins = _blocks(source, lengths)
    device = input_ids.device
    places = torch.tensor(positions)
    return Packing(
        torch.tensor(tokens)[None].to(device),
        places[None].to(device),
        source.to(device),
        [_AttentionBlock(block.source.to(device), block.shape) for block in blocks],
        (torch.tensor(begins)[torch.tensor(owners, dtype=torch.int64)] + places).to(device),
    )


def cut(packing: Packing, group: SequenceGroup) -> Packing:
    """This rank's piece of a row. The others of the group must cut the same row."""
    number = packing.tokens.shape[1]
    length = -(-number // group.size)
    padding = (0, length * group.size - number)
    piece = slice(length * group.rank, length * (group.rank + 1))
    return replace(
        packing,
        tokens=pad(packing.tokens, padding)[:, piece],
        positions=pad(packing.positions, padding)[:, piece],
        back=pad(packing.back, padding),  # padding gets the output of any token, and none sees it
        group=group,
    )


def hidden_of_targets(
    body: nn.Module,
    input_ids: Tensor,
    target_mask: Tensor,
    *,
    packed: bool,
    group: SequenceGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Last hidden states that predict the tokens selected by ``target_mask``, row by row.

    Args: as for :func:`pack`.
        packed: ``body`` belongs to a model for which :func:`can_pack` is true.
        group: ranks that share the row; all of them make the same call, a collective. Only for packed sequences.

    Returns:
        ``[N, H]`` states, and the ``[B, T]`` mask of their targets: ``target_mask``, or the part of it whose states
        this rank has computed. Which token a state predicts does not depend on the piece that the token is in.
    """
    hidden: Tensor
    if not packed:
        hidden = body(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden[:, :-1][target_mask], target_mask
    packing = pack(input_ids, target_mask)
    if group is not None:
        packing = cut(packing, group)
    hidden = body(
        input_ids=packing.tokens,
        position_ids=packing.positions,
        attention_mask=torch.zeros(_IGNORED, device=input_ids.device),
        use_cache=False,
        packing=packing,
    ).last_hidden_state
    own = target_mask & packing.own
    return hidden.squeeze(0).index_select(0, packing.source[own] % packing.tokens.shape[1]), own


def values_of_targets(values: Tensor, own_mask: Tensor, group: SequenceGroup | None) -> Tensor:
    """``[..., N]`` values of the targets of a mask -> ``[..., B, T]`` values of all targets, 0 elsewhere.

    Args:
        own_mask: mask that :func:`hidden_of_targets` returned.
        group: the ranks that share the row; every one gets the values of all. Collective.
    """
    rows, places = own_mask.nonzero(as_tuple=True)
    placed = values.new_zeros(*values.shape[:-1], *own_mask.shape)
    placed[..., rows, places] = values
    return placed if group is None else whole(placed, group)


def can_pack(model: PreTrainedModel, group: SequenceGroup | None = None) -> bool:
    """True if ``model`` yields the same states packed as padded; afterwards it can be called both ways.

    Models with sliding windows, with recurrent states, or whose attention implementation transformers cannot replace
    are not packed.

    Args:
        group: ranks that share the tokens of its passes, and make one that shares them here. Collective.

    Raises:
        BadConfig: its tokens cannot be shared; raised by every rank of the group.
    """
    packs = _packs_alone(model)
    if group is not None:
        _require_shared_rows(model, group, packs=packs)
    return packs


def _packs_alone(model: PreTrainedModel) -> bool:
    config: Any = model.config
    layers: Any = config.get_text_config()  # models that also read images keep it apart
    kinds = set(getattr(layers, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(layers, "sliding_window", None):
        return False
    if config._attn_implementation == ATTENTION:
        return True
    if config._attn_implementation != "sdpa":
        return False
    try:
        model.set_attn_implementation(ATTENTION)
        if agrees(model.base_model, model.device):
            return True
    except (TypeError, ValueError, AttributeError):  # the model does not pass arguments on to its attention
        pass
    model.set_attn_implementation("sdpa")
    return False


@torch.no_grad()
def agrees(body: nn.Module, device: torch.device, group: SequenceGroup | None = None) -> bool:
    """Compare packed and padded states of sequences with the hard cases of packing: a shared prefix and padding.

    Args:
        group: ranks that share the packed row. Collective; all of them get the same answer.
    """
    ids = torch.tensor([[1, 2, 3, 4, 5, 0], [1, 2, 3, 5, 0, 0], [3, 2, 1, 0, 0, 0]], device=device)
    mask = torch.arange(5, device=device) < torch.tensor([[4], [3], [2]], device=device)
    padded, _ = hidden_of_targets(body, ids, mask, packed=False)
    states, own = hidden_of_targets(body, ids, mask, packed=True, group=group)
    found = values_of_targets(states.T, own, group)[:, mask].T
    return torch.allclose(found, padded, rtol=1e-2, atol=1e-2 * float(padded.abs().max()))


def _require_shared_rows(model: PreTrainedModel, group: SequenceGroup, *, packs: bool) -> None:
    config: Any = model.config
    problem = "mixes tokens in other ways than full attention, or its attention cannot be replaced"
    if packs:
        problem = why_not_shared(config.get_text_config(), group.size)
    if not problem and not agrees(model.base_model, model.device, group):
        problem = "gives other results if ranks share its tokens"
    if problem:
        raise BadConfig(
            f"found trainer.sequence_parallel = {group.size}, but {type(model).__name__} {problem}; set "
            "trainer.sequence_parallel = 1, or another divisor of the number of its heads"
        )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _blocks(source: Tensor, lengths: Sequence[int]) -> tuple[list[_AttentionBlock], list[int]]:
    """Group sequences into blocks of similar length; also return the offset of each in the outputs of all blocks."""
    left = sorted((index for index, length in enumerate(lengths) if length), key=lengths.__getitem__, reverse=True)
    blocks: list[_AttentionBlock] = []
    begins, end = [0] * len(lengths), 0
    while left:
        width = lengths[left[0]]
        block = [index for index in left if lengths[index] >= _LEAST_FILL * width]
        for index in block:
            begins[index], end = end, end + width
        blocks.append(_AttentionBlock(source[block, :width].flatten(), (len(block), width)))
        left = left[len(block) :]
    return blocks, begins


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: ``[1, heads, N, D]`` -> ``[1, N, heads, D]``, with the tokens of this rank's piece."""
    if packing is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return plain
    if packing.group is not None:
        query, key, value = to_heads(query, key, value, packing.group)
        # The heads of a rank, of which those for keys and values may be repeated.
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    row = [tensor.transpose(1, 2).squeeze(0) for tensor in (query, key, value)]
    outputs = []
    for block in packing.blocks:
        parts = [tensor.index_select(0, block.source).unflatten(0, block.shape).transpose(1, 2) for tensor in row]
        output, _ = sdpa_attention_forward(module, parts[0], parts[1], parts[2], None, **settings)
        outputs.append(output.flatten(0, 1))
    joined = torch.cat(outputs) if len(outputs) > 1 else outputs[0]  # it copies even a single one
    output = joined.index_select(0, packing.back)[None]
    return output if packing.group is None else to_tokens(output, packing.group), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
