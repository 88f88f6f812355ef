"""Role ``trainer``: a complete training run, from the initial model to the last checkpoint."""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from rlhf_core.errors import BadConfig, ResumeMismatch
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.algorithms.policy_gradient import PpoSpec
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoints.memory.resume import memory_checkpoint
from rlhf_core.training.checkpoints.resume import resume_point
from rlhf_core.training.checkpoints.soundness import agree, reference_folder, verify_checkpoint
from rlhf_core.training.checkpoints.state import (
    TrainerState,
    kept_random_state,
    load_trainer_state,
    restore_random_state,
)
from rlhf_core.training.data.chat import with_tools
from rlhf_core.training.data.examples import Scorer
from rlhf_core.training.data.loading import DataReport, EncodedPrompts, encode_prompts, load_data
from rlhf_core.training.data.same_rows import require_same_rows
from rlhf_core.training.data.tokenizers import load_tokenizer
from rlhf_core.training.distributed import Ranks, collective_timeout, init_process_group, leave_process_group
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.evaluation.evaluator import are_written, load_evaluator, write_reports
from rlhf_core.training.models.adapters import (
    AdapterReference,
    add_adapter,
    base_fingerprint,
    has_adapter,
    is_adapter,
    load_adapter,
)
from rlhf_core.training.models.causal_lm import PolicyModel, load_causal_lm, prepare_initial_model, tokenizer_folder
from rlhf_core.training.models.embeddings import replace_padding, require_embeddings
from rlhf_core.training.models.lean_layers import use_gradient_checkpointing
from rlhf_core.training.models.loaded_weights import move
from rlhf_core.training.models.reward_model import RewardModel, is_reward_model, load_reward_model
from rlhf_core.training.rewards.scoring import RewardScorer
from rlhf_core.training.rewards.scoring_models import ScoringModels, load_scoring_models
from rlhf_core.training.rollouts.start import start_engine
from rlhf_core.training.rollouts.transformers_engine import also_end_with
from rlhf_core.training.trainers import offline, online
from rlhf_core.training.trainers.context import Loop, TrainingContext, loops
from rlhf_core.training.trainers.engine import Engine, split_frozen
from rlhf_core.training.trainers.ppo import Critic, critic_optimizer, load_value_model
from rlhf_core.training.types import RoleResult, Row, WorkerContext


def run_trainer(context: WorkerContext) -> RoleResult:
    """Train from the beginning, or resume from a checkpoint as if training had not been interrupted.

    The phases are warm start, checkpoint, evaluation before training, main loop and last checkpoint. Completed ones are
    skipped.

    Raises:
        WorkerError: one of its subclasses, see ``rlhf_core.errors``.
    """
    context.reporter.beat(Phase.SETUP, 0)
    ranks = init_process_group(context)
    result = train_run(context, ranks)
    leave_process_group(ranks)
    return result


def train_run(context: WorkerContext, ranks: Ranks) -> RoleResult:
    """Run :func:`run_trainer` within an existing process group."""
    spec = context.spec
    ranks = ranks.sharing_rows(spec.ranks_per_row, collective_timeout(spec.supervise))
    # Started first: their processes import the functions of the user while the model loads.
    with (
        contextlib.closing(RewardScorer(spec, ranks.rank)) as scorer,
        contextlib.closing(EnvironmentPool(spec.rollout.turns)) as pool,
    ):
        return _train_run(context, ranks, scorer, pool)


def _train_run(context: WorkerContext, ranks: Ranks, scorer: RewardScorer, pool: EnvironmentPool) -> RoleResult:
    spec = context.spec
    disable_progress_bar()
    _seed_everything(spec.seed, ranks.rank)
    rows, report = load_data(spec, "train", beat=functools.partial(context.reporter.beat, Phase.SETUP, 0))
    report = dataclasses.replace(report, digest=require_same_rows(ranks, report.source, rows))
    initial = _initial_model(context, ranks, rows)
    checkpoint = _resume_point(context, ranks, initial)
    state = load_trainer_state(checkpoint, ranks) if checkpoint else None
    if checkpoint and state and state.progress.rows not in ("", report.digest):
        raise ResumeMismatch(
            f"the training rows of {report.source} are not those that {checkpoint.root.name} was trained with, so its "
            "place in their order would be another one. Restore them, or start a new run"
        )
    reference = _reference_fingerprint(spec, ranks, initial)
    if checkpoint and state and reference and state.progress.reference not in ("", reference):
        raise ResumeMismatch(
            f"{initial} holds other weights than those that {checkpoint.root.name} was trained from, so training would "
            "continue with another reference. Restore them, or start a new run"
        )
    step = state.progress.step if state else 0
    beat = functools.partial(context.reporter.beat, Phase.SETUP, step)
    beat()

    tokenizer = load_tokenizer(tokenizer_folder(spec, initial))
    replace_padding(tokenizer, initial)
    models = _Models(context, ranks, tokenizer, initial, checkpoint, beat)
    model = models.to_train(step)
    beat()
    pool.describe(beat)
    data = encode_prompts(with_tools(rows, pool.tools), tokenizer, spec.data, context.stored.created_at, beat)
    del rows  # those of messages are there twice now
    teaches = any(not loop.algorithm.samples for loop in loops(spec))
    require_embeddings(model, tokenizer, data, completions=teaches)
    also_end_with(model, data.end_ids)
    _log_start(ranks, report, data, checkpoint)
    beat()
    evaluator = load_evaluator(
        spec,
        ranks,
        tokenizer,
        scorer,
        functools.partial(start_engine, context, ranks, tokenizer, initial),
        trains_on_samples=spec.any_loop_samples,
        pool=pool,
        now=context.stored.created_at,
        beat=beat,
    )
    require_embeddings(model, tokenizer, evaluator.data, completions=bool(spec.row_evaluations))
    beat()
    training = TrainingContext(
        context, ranks, tokenizer, report, data, evaluator, state.progress if state else None, reference
    )
    try:
        result = _train_loops(training, models, model, state)
        training.close()
    except BaseException:
        training.leave()
        raise
    return result


def _train_loops(
    training: TrainingContext, models: "_Models", model: PreTrainedModel, state: TrainerState | None
) -> RoleResult:
    """Run all unfinished loops, one after the other."""
    spec = training.spec
    if spec.evaluate.scorer_model:  # evaluations may come before the first loop that samples
        with kept_random_state(training.ranks.device):
            training.scorer.use(_scoring_models(models.context, training, state))
    for loop in loops(spec):
        if not training.steps_left(loop):
            continue
        models.beat = training.beating(Phase.SETUP)
        if loop.algorithm.ranks_completions and not is_reward_model(model):
            source = models.before(loop)
            model.to("meta")  # frees its weights: the callers still refer to it
            model = models.reward_model(source)
        if loop.last_step == spec.total_steps:
            _evaluate_before(models, training, model)
        if _train_loop(training, models, loop, model, state):
            return RoleResult.STOPPED_EARLY if training.steps_done < spec.total_steps else RoleResult.DONE
    return RoleResult.DONE


def _train_loop(
    training: TrainingContext, models: "_Models", loop: Loop, model: PreTrainedModel, state: TrainerState | None
) -> bool:
    """Run one loop with its own optimizer; True if it stopped early because an agent requested it."""
    spec, ranks = training.spec, training.ranks
    # A checkpoint of an earlier loop has optimizers, and maybe a value model, that ended with that loop.
    begun = state if state and state.progress.step >= loop.first_step else None
    training.beat(Phase.SETUP)  # loading and splitting models may take longer than a silence of the phase before
    with kept_random_state(ranks.device):
        policy: PolicyModel | RewardModel
        if loop.algorithm.ranks_completions:
            policy = RewardModel(model, ranks.sequence)
        else:
            policy = PolicyModel(model, tried=False, sequence=ranks.sequence)
        policy.train()
        if spec.native_trainer.gradient_checkpointing:
            use_gradient_checkpointing(model)
        second_adapter = models.adapter_reference(loop, policy)
        # Before other models are loaded: under ZeRO 3, a rank then holds no more than one whole model at a time.
        engine = Engine(policy, loop.spec.optimizer, spec.model.dtype, ranks, spec.native_trainer, models.beat)
        policy.try_passes()
        reference = second_adapter or models.reference(loop)
        critic = models.critic(loop, begun)
        # Loaded once: running statistics of their scores continue from one loop to the next.
        if loop.algorithm.samples and spec.reward.models and not training.scorer.uses_models:
            training.scorer.use(_scoring_models(models.context, training, state))
    if begun:
        engine.load_state(begun.engine)
        if critic and begun.critic:
            critic.engine.load_state(begun.critic)
    if state and state.random is not None and state.progress.step == training.steps_done:
        # Until here, this process drew from generators that it seeded itself; from here on, those of the run continue.
        restore_random_state(state.random, ranks.device)
    if isinstance(policy, PolicyModel) and loop.algorithm.samples:
        in_flight = state.in_flight if state else ()
        stopped = online.train(training, loop, policy, engine, reference, critic, in_flight)
    else:
        stopped = offline.train(training, loop, policy, engine, reference)
    if critic:
        critic.engine.close(keep=False)
    engine.close(keep=loop.last_step < spec.total_steps and not stopped)
    return stopped


def _evaluate_before(models: "_Models", training: TrainingContext, model: PreTrainedModel) -> None:
    """Evaluate the weights that the main algorithm starts from, once per run."""
    context, ranks, step = models.context, training.ranks, training.steps_done
    names = training.evaluator.names
    is_before = step <= training.spec.warm_start_steps
    if not ranks.on_first(lambda: is_before and not are_written(context.run_dir, "before", names)):
        return
    move(model, ranks.device, training.beating(Phase.SETUP))
    with kept_random_state(ranks.device):
        reports = training.evaluator.run(model, "before", step, training.beating(Phase.EVALUATE))
    write_reports(context.run_dir, reports, ranks)


def _scoring_models(context: WorkerContext, training: TrainingContext, state: TrainerState | None) -> ScoringModels:
    """Load the reward models that score completions, next to the policy on every rank."""
    return load_scoring_models(
        training.spec.scoring_models,
        training.ranks,
        training.tokenizer,
        state.progress.reward_models if state else {},
        training.beating(Phase.SETUP),
        has_conversations=training.has_conversations,
        now=context.stored.created_at,
    )


class _Models:
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
        if not loop.algorithm.reference or not has_adapter(policy.pretrained):
            return None
        source = self.before(loop)
        return AdapterReference(policy, policy.pretrained, source if is_adapter(source) else None)

    def reference(self, loop: Loop) -> Scorer | None:
        """The policy as it was at the start of the loop, as a model of its own, if the algorithm needs it."""
        if not loop.algorithm.reference:
            return None
        model = self._causal_lm(self.before(loop))
        reference = PolicyModel(model, tried=False, sequence=self._ranks.sequence).requires_grad_(False).eval()
        split_frozen(reference, self._spec.model.dtype, self._ranks, self._spec.native_trainer, self.beat)
        reference.try_passes()
        return reference

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
        model.train()
        if spec.native_trainer.gradient_checkpointing:
            use_gradient_checkpointing(model.layers)
        optimizer = critic_optimizer(loop.spec.optimizer, algorithm)
        engine = Engine(model, optimizer, spec.model.dtype, self._ranks, spec.native_trainer, self.beat)
        model.try_passes()
        return Critic(model, engine, loop, algorithm)

    def _causal_lm(self, folder: Path, base: Path | None = None) -> PreTrainedModel:
        model = load_causal_lm(folder, self._spec.model.dtype, base, self.beat)
        self._place(model)
        return model

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


def _initial_model(context: WorkerContext, ranks: Ranks, rows: list[Row]) -> Path:
    """Have rank 0 build or find the initial model; the others wait for its path."""
    initial = Path(ranks.on_first(lambda: str(prepare_initial_model(context.spec, context.run_dir, rows))))
    if context.spec.model.lora is not None and is_adapter(initial):
        raise BadConfig(
            f"found model.path = {initial}, an adapter, and model.lora, expected a whole model for the new adapter: "
            "merge the existing adapter (peft: merge_and_unload), and use the folder of the result"
        )
    return initial


def _reference_fingerprint(spec: RunSpec, ranks: Ranks, initial: Path) -> str:
    """Fingerprint of the initial weights, if a loop reads them as its reference; else empty. Collective.

    The base model of an adapter is compared with the adapter's record instead.
    """
    is_read = spec.model.lora is None and any(loop.algorithm.reference and loop.first_step == 1 for loop in loops(spec))
    return ranks.on_first(lambda: base_fingerprint(initial) if is_read else "")


def _resume_point(context: WorkerContext, ranks: Ranks, initial: Path) -> CheckpointDir | None:
    """Find and verify the checkpoint to resume from."""
    step = agree(ranks, lambda: resume_point(context))
    in_memory = memory_checkpoint(context, ranks, step)
    if in_memory is not None or step is None:
        return in_memory
    checkpoint = context.run_dir.checkpoint(step)
    verify_checkpoint(checkpoint, context.spec, ranks, initial)
    return checkpoint


def _log_start(ranks: Ranks, report: DataReport, data: EncodedPrompts, checkpoint: CheckpointDir | None) -> None:
    ranks.log(
        f"training data: {len(data.rows)} rows of {report.source}; skipped: {data.num_overlong} that are too long, "
        f"{report.num_malformed + data.num_malformed} malformed"
    )
    if problem := report.first_problem or data.first_problem:
        ranks.log(f"the first malformed row: {problem}")
    ranks.log(f"resuming from {checkpoint.root.name}" if checkpoint else "starting from the beginning")


def _seed_everything(seed: int, rank: int) -> None:
    """Seed the global random number generators, which only external code uses (reward functions, for instance)."""
    random.seed(f"{seed} {rank}")
    np.random.seed((seed * 1_000_003 + rank) % (1 << 32))
    torch.manual_seed((seed * 1_000_003 + rank) % (1 << 64))  # it takes no larger ones
