"""The models of a run: the one that is trained, its reference, and its critic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import BadConfig
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.algorithms.policy_gradient import PpoSpec
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.training.checkpoints.soundness import reference_folder
from rlhf_core.training.checkpoints.state import TrainerState
from rlhf_core.training.data.examples import Scorer
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.adapters import AdapterReference, add_adapter, has_adapter, is_adapter, load_adapter
from rlhf_core.training.models.causal_lm import (
    PolicyModel,
    dropout_free_config,
    load_causal_lm,
    use_training_mode,
)
from rlhf_core.training.models.lean_layers import use_gradient_checkpointing
from rlhf_core.training.models.loaded_weights import move
from rlhf_core.training.models.reward_model import RewardModel, load_reward_model
from rlhf_core.training.trainers.context import Loop, loops
from rlhf_core.training.trainers.engine import Engine, split_frozen
from rlhf_core.training.trainers.ppo import Critic, critic_optimizer, load_value_model
from rlhf_core.training.types import WorkerContext


class RunModels:
    """The models of a run, loaded onto the device of a rank.

    Under ZeRO 3 they stay in main memory: their engines move and split them one parameter after the other.
    """

    def __init__(
        self,
        context: WorkerContext,
        ranks: Ranks,
        tokenizer: PreTrainedTokenizerBase,
        initial: Path,
        checkpoint: CheckpointDir | None,
        beat: Callable[[], None],
    ) -> None:
        """Args:
        initial: folder of the model that the run began with.
        checkpoint: verified checkpoint to resume from, on disk or in memory.
        beat: called while weights are loaded.
        """
        self.context, self._spec = context, context.spec
        self._ranks, self._tokenizer, self._initial = ranks, tokenizer, initial
        self._checkpoint = checkpoint
        self._before: dict[int, Path] = {}
        self.beat = beat

    def to_train(self, step: int) -> PreTrainedModel:
        """Load the initial model or that of the checkpoint; a loop that trains a reward model loads a reward model."""
        current = next((loop for loop in loops(self._spec) if loop.first_step <= max(1, step) <= loop.last_step), None)
        folder = self._checkpoint.model if self._checkpoint else self._initial
        if current is not None and current.algorithm.ranks_completions:
            return self.reward_model(folder)
        if self._spec.model.lora is None:
            return self._causal_lm(folder)
        return self._with_adapter(self._causal_lm(self._initial), self._spec.model.lora, folder)

    def reward_model(self, folder: Path) -> PreTrainedModel:
        """Load a reward model, or a language model with a new head for rewards."""
        spec = self._spec.model
        whole = folder if spec.lora is None else self._initial
        model = load_reward_model(whole, spec.dtype, self._spec.seed, self._tokenizer.pad_token_id, beat=self.beat)
        if spec.lora is not None:
            return self._with_adapter(model, spec.lora, folder)
        self._place(model)
        return model

    def before(self, loop: Loop) -> Path:
        """Folder of the model that a loop began with, verified once. Collective."""
        steps = loop.first_step - 1
        if steps not in self._before:
            self._before[steps] = reference_folder(self.context, self._ranks, steps, self._initial)
        return self._before[steps]

    def adapter_reference(self, loop: Loop, policy: PolicyModel | RewardModel) -> Scorer | None:
        """The reference within a policy that has an adapter, if the algorithm needs one; before the policy's engine."""
        if not loop.algorithm.reference or loop.spec.reference or not has_adapter(policy.pretrained):
            return None
        source = self.before(loop)
        return AdapterReference(policy, policy.pretrained, source if is_adapter(source) else None)

    def reference(self, loop: Loop) -> Scorer | None:
        """The reference as a model of its own, if the algorithm needs one: ``LoopSpec.reference``, or the policy as it
        was at the start of the loop.

        Raises:
            BadConfig: the named model has fewer tokens than the policy.
        """
        if not loop.algorithm.reference:
            return None
        named = loop.spec.reference
        model = self._causal_lm(Path(named) if named else self.before(loop))
        if named:
            self._require_vocabulary(model, named)
        reference = PolicyModel(model, tried=False, sequence=self._ranks.sequence).requires_grad_(False).eval()
        split_frozen(reference, self._spec.model.dtype, self._ranks, self._spec.native_trainer, self.beat)
        reference.try_passes()
        return reference

    def held_out_reference(self) -> PreTrainedModel | None:
        """The reference that held-out rows are compared with before the main loop; None if it is the policy itself."""
        folder = self._spec.main_loop.reference
        if not folder or not self._spec.ranks_held_out:
            return None
        model = load_causal_lm(Path(folder), self._spec.model.dtype, beat=self.beat)
        move(model, self._ranks.device, self.beat)
        return model

    def critic(self, loop: Loop, state: TrainerState | None) -> Critic | None:
        """Load the value model from the checkpoint, or build it from the policy's weights at the beginning of the loop.

        Args:
            state: state of a checkpoint of this loop; None if the loop begins.
        """
        spec, algorithm, lora = self._spec, loop.algorithm, self._spec.model.lora
        if not isinstance(algorithm, PpoSpec):
            return None
        saved = self._checkpoint if state and state.critic else None
        # An adapter is saved without its base weights, which are those that the loop began with.
        source = saved.model if saved is not None and lora is None else self.before(loop)
        base = self._causal_lm(source, self._initial)
        model = load_value_model(base, saved.critic if saved else None, lora, spec.seed, self._ranks.sequence)
        self._place(model)
        use_training_mode(model)
        if spec.native_trainer.gradient_checkpointing:
            use_gradient_checkpointing(model.layers)
        optimizer = critic_optimizer(loop.spec.optimizer, algorithm)
        engine = Engine(model, optimizer, spec.model.dtype, self._ranks, spec.native_trainer, self.beat)
        model.try_passes()
        return Critic(engine, loop, algorithm)

    def _causal_lm(self, folder: Path, base: Path | None = None) -> PreTrainedModel:
        model = load_causal_lm(folder, self._spec.model.dtype, base, self.beat)
        self._place(model)
        return model

    def _require_vocabulary(self, model: PreTrainedModel, folder: str) -> None:
        """Refuse another reference without an embedding for every token that the policy may sample."""
        policy: Any = dropout_free_config(self._initial).get_text_config()
        embeddings: Any = model.get_input_embeddings()
        size, needed = embeddings.weight.shape[0], policy.vocab_size
        if size < needed:
            raise BadConfig(
                f"the reference {folder} has embeddings for {size} tokens, but the policy may sample {needed}; "
                "expected a model with the tokenizer of the policy and at least as many embeddings"
            )

    def _place(self, model: nn.Module) -> None:
        if self._spec.native_trainer.zero_stage < 3:
            move(model, self._ranks.device, self.beat)

    def _with_adapter(self, model: PreTrainedModel, lora: LoraSpec, folder: Path) -> PreTrainedModel:
        """Put an adapter into a base model: a new one, or the one in ``folder``."""
        add_adapter(model, lora, self._spec.seed)
        if is_adapter(folder):
            load_adapter(model, folder)
        self._place(model)
        return model
