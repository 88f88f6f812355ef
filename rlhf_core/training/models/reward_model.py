"""Reward models: a head with one output on top of a language model, loaded from its folder or from their own."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.errors import BadConfig
from rlhf_core.training.models.adapters import base_of, is_adapter, merged
from rlhf_core.training.models.causal_lm import dropout_free_config


def load_reward_model(folder: Path, dtype: str, seed: int, pad_id: int, base: Path | None = None) -> PreTrainedModel:
    """Load a model with one output from a folder, in training's number format and with all dropout off.

    Of a causal language model the decoder is taken, and the head follows from ``seed`` alone. An adapter is merged into
    its base model.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        pad_id: padding token, behind which nothing is scored.
        base: folder of the base model of an adapter, where it is not the one that the adapter names.

    Raises:
        BadConfig: there is no model in the folder, or none of its kind that has such a head.
    """
    if is_adapter(folder):
        return merged(load_reward_model(base or base_of(folder), dtype, seed, pad_id), folder)
    try:
        config = dropout_free_config(folder)
        config.num_labels = 1
        config.pad_token_id = pad_id
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
                str(folder), config=config, dtype=getattr(torch, dtype), local_files_only=True
            )
    except (OSError, ValueError) as error:
        found = " ".join(str(error).split())[:400]
        raise BadConfig(
            f"{folder} holds no model that transformers can give a head with one output: {found}"
        ) from error
    RewardModel(model)
    return model


def is_reward_model(model: PreTrainedModel) -> bool:
    """True for a model with a head for sequences instead of one for tokens."""
    return isinstance(getattr(model, "score", None), nn.Module)


class RewardModel(nn.Module):
    """A model with one output that answers with one reward per sequence."""

    packs = False
    """See :class:`PolicyModel`: of a padded sequence transformers finds the end."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        """Wrap ``classifier``.

        Raises:
            BadConfig: its head is not where models of this kind have it.
        """
        super().__init__()
        if not is_reward_model(classifier):
            raise BadConfig(f"{type(classifier).__name__} has no layer called score; this trainer cannot train it")
        self.classifier = classifier

    @property
    def pretrained(self) -> PreTrainedModel:
        """The model that is saved."""
        return self.classifier

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass instead of keeping them."""
        self.classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Reward of each sequence, at its last token that is no padding, as transformers takes it.

        A padding token that ends sequences too is passed over wherever it stands, as in training: the reward is taken
        at the token before. A model without a padding token is scored at the very last token.

        Args:
            input_ids: ``[B, T]`` int64, padded on the right.
            attention_mask: ``[B, T]``, 1 for the tokens of each sequence; where it is left out, the padding token says.

        Returns:
            ``[B]`` in float32 (float64 for a float64 model).
        """
        masked = {} if attention_mask is None else {"attention_mask": attention_mask}
        hidden: Tensor = self.classifier.base_model(input_ids=input_ids, use_cache=False, **masked).last_hidden_state
        last = _last_places(input_ids, attention_mask, self.classifier.config.pad_token_id)
        # The head is called as a whole, over the last states alone: elsewhere nothing is scored.
        chosen = hidden[torch.arange(len(input_ids), device=input_ids.device), last]
        head: Callable[[Tensor], Tensor] = self.classifier.score  # a module, checked above
        scores = head(chosen).squeeze(-1)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _last_places(input_ids: Tensor, attention_mask: Tensor | None, pad_id: int | None) -> Tensor:
    """``[B]`` index of the token that each sequence is scored at."""
    is_token = torch.ones_like(input_ids, dtype=torch.bool) if pad_id is None else input_ids != pad_id
    if attention_mask is not None:
        is_token &= attention_mask.bool()
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    return (positions * is_token).argmax(-1)
