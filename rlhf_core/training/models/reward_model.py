"""Reward models: a language model with a scalar head, loaded from the language model's folder or from their own."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.errors import BadConfig
from rlhf_core.training.distributed import SequenceGroup
from rlhf_core.training.models.adapters import base_of, is_adapter, merged
from rlhf_core.training.models.causal_lm import dropout_free_config, in_evaluation_mode
from rlhf_core.training.models.lean_layers import use_lean_layers
from rlhf_core.training.models.loaded_weights import load_whole
from rlhf_core.training.models.packing import can_pack, hidden_of_targets, values_of_targets


def load_reward_model(
    folder: Path,
    dtype: str,
    seed: int,
    pad_id: int,
    base: Path | None = None,
    beat: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """Load a model with one output from a folder, in training's number format and with all dropout off.

    For a causal language model, it uses the decoder, with a head that depends only on ``seed``. An adapter is merged
    into its base model.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        pad_id: padding token, after which nothing is scored.
        base: folder of an adapter's base model, if it is not the one recorded in the adapter.
        beat: called after each tensor.

    Raises:
        BadConfig: the folder holds no model or not all weights of its decoder, or its architecture has no such head.
    """
    if is_adapter(folder):
        return merged(load_reward_model(base or base_of(folder), dtype, seed, pad_id, beat=beat), folder)
    try:
        config = dropout_free_config(folder)
        config.num_labels = 1
        config.pad_token_id = pad_id
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heads = ("score.", "classifier.")  # the second is refused below, with the reason
            model = load_whole(AutoModelForSequenceClassification, folder, config, dtype, beat, new=heads)
    except (OSError, ValueError) as error:
        found = " ".join(str(error).split())[:400]
        raise BadConfig(
            f"{folder} holds no model that transformers can give a head with one output: {found}"
        ) from error
    RewardModel(model)
    use_lean_layers(model)
    return model


def is_reward_model(model: PreTrainedModel) -> bool:
    """True for a model with a sequence head instead of a token head."""
    return isinstance(getattr(model, "score", None), nn.Module)


class RewardModel(nn.Module):
    """A model with one output that returns one reward per sequence."""

    def __init__(self, classifier: PreTrainedModel, sequence: SequenceGroup | None = None) -> None:
        """Wrap ``classifier``.

        Args:
            sequence: ranks that share the tokens of each pass; all of them make the same passes, which
                :meth:`try_passes` tries before the first.

        Raises:
            BadConfig: its head is not where such models usually have it.
        """
        super().__init__()
        self.sequence = sequence
        self.packs = False
        """See :class:`PolicyModel`. Only rows that ranks share are packed: transformers pads them."""
        if not is_reward_model(classifier):
            raise BadConfig(f"{type(classifier).__name__} has no layer called score; this trainer cannot train it")
        self.classifier = classifier

    @property
    def pretrained(self) -> PreTrainedModel:
        """The underlying model, which is saved."""
        return self.classifier

    def try_passes(self) -> None:
        """Find out in a few passes whether the ranks can share tokens, once the weights are where they are used.

        Does nothing if they do not; otherwise collective.

        Raises:
            BadConfig: they cannot.
        """
        if self.sequence is not None:
            with in_evaluation_mode(self.classifier):
                self.packs = can_pack(self.classifier, self.sequence)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Compute the reward of each sequence at its last non-padding token, as transformers does.

        A padding token that is also the end token is always skipped, as in training: the reward is taken at the token
        before it. A model without a padding token is scored at the very last token.

        Args:
            input_ids: ``[B, T]`` int64, padded on the right.
            attention_mask: ``[B, T]``, 1 for the tokens of each sequence; derived from the padding token if omitted.

        Returns:
            ``[B]`` in float32 (float64 for a float64 model).
        """
        if self.sequence is not None:
            return self._forward_shared(input_ids, attention_mask)
        masked = {} if attention_mask is None else {"attention_mask": attention_mask}
        hidden: Tensor = self.classifier.base_model(input_ids=input_ids, use_cache=False, **masked).last_hidden_state
        last = _last_places(input_ids, attention_mask, self.classifier.config.pad_token_id)
        # The whole head is called, but only on the last states: no other position is scored.
        return self._score(hidden[torch.arange(len(input_ids), device=input_ids.device), last])

    def _forward_shared(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The same, of packed sequences that a group of ranks shares."""
        last = _last_places(input_ids, attention_mask, self.classifier.config.pad_token_id)
        targets = torch.arange(input_ids.shape[1], device=input_ids.device) == last[:, None]
        after = pad(input_ids, (0, 1))  # the state of a last token "predicts" the one after it
        hidden, own = hidden_of_targets(self.classifier.base_model, after, targets, packed=True, group=self.sequence)
        return values_of_targets(self._score(hidden), own, self.sequence).sum(-1)

    def _score(self, hidden: Tensor) -> Tensor:
        """``[N, H]`` -> ``[N]``."""
        head: Callable[[Tensor], Tensor] = self.classifier.score  # a module, checked in the beginning
        scores = head(hidden).squeeze(-1)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _last_places(input_ids: Tensor, attention_mask: Tensor | None, pad_id: int | None) -> Tensor:
    """``[B]`` index of the token at which each sequence is scored."""
    is_token = torch.ones_like(input_ids, dtype=torch.bool) if pad_id is None else input_ids != pad_id
    if attention_mask is not None:
        is_token &= attention_mask.bool()
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    return (positions * is_token).argmax(-1)
