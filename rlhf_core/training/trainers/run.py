"""Role ``trainer``: a complete training run, from the initial model to the last checkpoint."""

import contextlib
import dataclasses
import functools
import random
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlhf_core.errors import BadConfig, ResumeMismatch
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoints.memory.resume import memory_checkpoint
from rlhf_core.training.checkpoints.resume import resume_point
from rlhf_core.training.checkpoints.soundness import agree, verify_checkpoint
from rlhf_core.training.checkpoints.state import (
    TrainerState,
    kept_random_state,
    load_trainer_state,
    restore_random_state,
)
from rlhf_core.training.data.chat import with_tools
from rlhf_core.training.data.loading import DataReport, EncodedPrompts, encode_prompts, load_data
from rlhf_core.training.data.same_rows import require_same_rows
from rlhf_core.training.data.tokenizers import load_tokenizer
from rlhf_core.training.distributed import Ranks, collective_timeout, init_process_group, leave_process_group
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.evaluation.evaluator import load_evaluator
from rlhf_core.training.evaluation.report_files import are_written, write_reports
from rlhf_core.training.models.adapters import base_fingerprint, is_adapter
from rlhf_core.training.models.causal_lm import (
    PolicyModel,
    prepare_initial_model,
    tokenizer_folder,
    use_training_mode,
)
from rlhf_core.training.models.embeddings import replace_padding, require_embeddings
from rlhf_core.training.models.lean_layers import use_gradient_checkpointing
from rlhf_core.training.models.loaded_weights import move
from rlhf_core.training.models.reward_model import RewardModel, is_reward_model
from rlhf_core.training.rewards.scoring import RewardScorer
from rlhf_core.training.rewards.scoring_models import ScoringModels, load_scoring_models
from rlhf_core.training.rollouts.start import start_engine
from rlhf_core.training.rollouts.transformers_engine import also_end_with
from rlhf_core.training.trainers import offline, online
from rlhf_core.training.trainers.context import Loop, TrainingContext, loops
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.trainers.models import RunModels
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
            f"{' and '.join(map(str, _reference_folders(spec, initial)))}: found other weights than those that "
            f"{checkpoint.root.name} was trained with, so training would continue with another reference. Restore "
            "them, or start a new run"
        )
    step = state.progress.step if state else 0
    beat = functools.partial(context.reporter.beat, Phase.SETUP, step)
    beat()

    tokenizer = load_tokenizer(tokenizer_folder(spec, initial))
    replace_padding(tokenizer, initial)
    models = RunModels(context, ranks, tokenizer, initial, checkpoint, beat)
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
    training: TrainingContext, models: RunModels, model: PreTrainedModel, state: TrainerState | None
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
    training: TrainingContext, models: RunModels, loop: Loop, model: PreTrainedModel, state: TrainerState | None
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
        use_training_mode(policy)
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


def _evaluate_before(models: RunModels, training: TrainingContext, model: PreTrainedModel) -> None:
    """Evaluate the weights that the main algorithm starts from, once per run."""
    context, ranks, step = models.context, training.ranks, training.steps_done
    names = training.evaluator.names
    is_before = step <= training.spec.warm_start_steps
    if not ranks.on_first(lambda: is_before and not are_written(context.run_dir, "before", names)):
        return
    move(model, ranks.device, training.beating(Phase.SETUP))
    with kept_random_state(ranks.device):
        reports = training.evaluator.run(
            model, "before", step, training.beating(Phase.EVALUATE), models.held_out_reference()
        )
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
    """Fingerprint of the weights outside of the checkpoints that loops read as references; else empty. Collective."""
    return ranks.on_first(lambda: " ".join(map(base_fingerprint, _reference_folders(spec, initial))))


def _reference_folders(spec: RunSpec, initial: Path) -> list[Path]:
    """Folders of references that are no checkpoints of the run: those that the config names, and the initial model.

    The base model of an adapter is compared with the adapter's record instead.
    """
    unnamed = [loop for loop in loops(spec) if loop.algorithm.reference and not loop.spec.reference]
    is_read = spec.model.lora is None and any(loop.first_step == 1 for loop in unnamed)
    return [*([initial] if is_read else []), *map(Path, spec.references.values())]


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
