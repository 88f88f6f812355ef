"""Conversion between token lists and padded tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceBatch:
    """Prompts with their completions, padded on the right.

    Right padding needs no attention mask in training: under causal attention no real token sees what comes after it.
    Position ``t`` of the ``[B, T-1]`` tensors belongs to the prediction of token ``t+1``.
    """

    input_ids: Tensor
    """``[B, T]`` int64."""
    target_mask: Tensor
    """``[B, T-1]`` bool: true if the predicted token belongs to the completion and is learned."""
    prompt_mask: Tensor
    """``[B, T-1]`` bool: true if it belongs to the prompt, whose first token is never predicted."""

    def place(self, values: Tensor) -> Tensor:
        """Scatter per-token values of the completions to the positions where ``target_mask`` is true.

        Args:
            values: ``[N]``, those of the first sequence before those of the second, and so on.

        Returns:
            ``[B, T-1]`` of the same number format, zero elsewhere.
        """
        placed = torch.zeros(self.target_mask.shape, dtype=values.dtype, device=self.target_mask.device)
        placed[self.target_mask] = values.to(placed.device)
        return placed


def collate(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device | str = "cpu",
    learned: Sequence[Sequence[bool]] = (),
) -> SequenceBatch:
    """Join each prompt with its completion and pad to the longest, at least to two tokens.

    Args:
        prompts: token lists, one per sequence, none of them empty (nothing would predict the first token).
        completions: token lists, one per sequence; an empty one has no targets.
        pad_id: padding token; its value does not affect results.
        learned: whether each token of a completion is learned, one list per sequence, empty if all are; none of them if
            all tokens of all completions are.
    """
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    width = max(2, *lengths)  # a pass has the place of a prediction, even if none is needed
    filled = [
        [*prompt, *completion, *([pad_id] * (width - length))]
        for prompt, completion, length in zip(prompts, completions, lengths, strict=True)
    ]
    position = torch.arange(1, width)
    first = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    end = torch.tensor(lengths)[:, None]
    mask = (position >= first) & (position < end)
    for row, (prompt, flags) in enumerate(zip(prompts, learned, strict=bool(learned))):
        if flags:
            mask[row, len(prompt) - 1 : len(prompt) - 1 + len(flags)] &= torch.tensor(flags)
    in_prompt = (position < first).to(device)
    return SequenceBatch(torch.tensor(filled, dtype=torch.int64).to(device), mask.to(device), in_prompt)
