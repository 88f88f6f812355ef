"""The value model of PPO, which predicts the remaining reward before each token.

It has its own engine and optimizer, and is saved with every checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from rlhf_core.schemas.algorithms.policy_gradient import PpoSpec
from rlhf_core.schemas.loops import OptimizerSpec
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MicroBatch, StepSums
from rlhf_core.training.algorithms.ppo import value_loss
from rlhf_core.training.data.batches import SequenceBatch
from rlhf_core.training.distributed import SequenceGroup
from rlhf_core.training.models.adapters import add_adapter
from rlhf_core.training.models.causal_lm import in_evaluation_mode
from rlhf_core.training.models.packing import can_pack, hidden_of_targets, values_of_targets
from rlhf_core.training.trainers.context import Loop
from rlhf_core.training.trainers.engine import Engine, learning_rate


class ValueModel(nn.Module):
    """The layers of a language model with a scalar head, whose output is 0 at first."""

    def __init__(self, causal_lm: PreTrainedModel, sequence: SequenceGroup | None = None) -> None:
        """Take over the layers of ``causal_lm`` and drop its head.

        Args:
            sequence: ranks that share the tokens of each pass; all of them make the same passes.
        """
        super().__init__()
        self._packs = False
        self.sequence = sequence
        self.layers: PreTrainedModel = causal_lm.base_model
        embeddings: Any = causal_lm.get_input_embeddings()
        self.head = nn.Linear(int(embeddings.weight.shape[1]), 1, device=causal_lm.device, dtype=causal_lm.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def try_passes(self) -> None:
        """Find out in a few passes whether sequences can be packed, once the weights are where they are used.

        Collective if the model is split, or ranks share its tokens.

        Raises:
            BadConfig: its tokens cannot be shared.
        """
        with in_evaluation_mode(self.layers):
            self._packs = can_pack(self.layers, self.sequence)

    def forward(self, input_ids: Tensor, target_mask: Tensor) -> Tensor:
        """Compute the value before each token.

        Args:
            input_ids: ``[B, T]`` int64.
            target_mask: ``[B, T-1]`` bool.

        Returns:
            ``[B, T-1]`` float32 (float64 for a float64 model), 0 where ``target_mask`` is false: position ``t`` holds
            the value of the state in which token ``t+1`` is chosen.
        """
        hidden, own = hidden_of_targets(self.layers, input_ids, target_mask, packed=self._packs, group=self.sequence)
        values: Tensor = self.head(hidden).squeeze(-1)
        return values_of_targets(values.to(torch.promote_types(values.dtype, torch.float32)), own, self.sequence)


class Critic:
    """A value model with its optimizer and its update steps."""

    def __init__(self, engine: Engine, loop: Loop, algorithm: PpoSpec) -> None:
        """Take over an engine of a :class:`ValueModel` and :func:`critic_optimizer`."""
        self.engine = engine
        self._loop = loop
        self._algorithm = algorithm
        self._spec = critic_optimizer(loop.spec.optimizer, algorithm)

    def learns_alone(self, step: int) -> bool:
        """True in the first steps of the loop, which leave the policy unchanged."""
        return step - self._loop.first_step < self._algorithm.steps_before_policy

    @torch.no_grad()
    def values(self, batch: SequenceBatch) -> Tensor:
        """``[B, T-1]`` values, without gradient."""
        found: Tensor = self.engine(batch.input_ids, target_mask=batch.target_mask)
        return found

    def backward(self, sequences: SequenceBatch, batch: MicroBatch, sums: StepSums) -> Stats:
        """Add the gradient of one micro-batch; returns its statistics."""
        assert batch.old_values is not None  # Critic.values
        assert batch.returns is not None  # of every objective with a critic
        loss, stats = value_loss(
            self.engine(sequences.input_ids, target_mask=sequences.target_mask),
            batch.old_values,
            batch.returns,
            batch.mask,
            normaliser=max(1.0, sums.num_tokens),
            value_clip=self._algorithm.value_clip,
        )
        self.engine.backward(loss)
        return stats

    def step(self, number: int) -> float:
        """Update the weights in step ``number`` of the run; returns the global norm of the gradient."""
        step = number - self._loop.first_step + 1
        return self.engine.step(learning_rate(step, self._spec, self._loop.spec.num_steps))


def critic_optimizer(optimizer: OptimizerSpec, algorithm: PpoSpec) -> OptimizerSpec:
    """Optimizer settings of the value model: the policy's, with a separate learning rate if one is set."""
    rate = algorithm.critic_learning_rate or optimizer.learning_rate
    return optimizer.model_copy(update={"learning_rate": rate})


def load_value_model(
    causal_lm: PreTrainedModel,
    saved: Path | None,
    lora: LoraSpec | None = None,
    seed: int = 0,
    sequence: SequenceGroup | None = None,
) -> ValueModel:
    """Build a value model on the layers of a language model, or load its saved weights.

    Args:
        causal_lm: language model of the same architecture, which is taken over; with an adapter, the model that the
            loop began with.
        saved: folder of the value model in a checkpoint, if any.
        lora: adapter of the layers, if any; the head is trained in full.
        seed: seed of the adapter's initial weights.
        sequence: ranks that share the tokens of each pass.
    """
    model = ValueModel(causal_lm, sequence)
    if lora is not None:
        add_adapter(model.layers, lora, seed)
    if saved is not None:
        weights = load_file(saved / SAFE_WEIGHTS_NAME, device=str(causal_lm.device))
        expected = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        model.load_state_dict(weights, strict=lora is None or weights.keys() != expected)
    return model


def explained_variance(sums: Sequence[float]) -> float:
    """Share of the returns' variance explained by the values: ``1 - Var(R - V) / Var(R)``; 0 without variance.

    Args:
        sums: ``advantages.moments`` of the returns, then of the residuals ``R - V``, over all ranks.
    """
    count, total, squares, _, total_left, squares_left = sums
    if not count:
        return 0.0
    variance, left = (
        square / count - (sum_ / count) ** 2 for sum_, square in ((total, squares), (total_left, squares_left))
    )
    return 1 - left / variance if variance > 0 else 0.0
