"""Role ``trainer``: a whole training run, from the initial model to the last checkpoint."""

import random
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlhf_core.errors import CheckpointCorrupt
from rlhf_core.run_dir import CheckpointDir
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoint_soundness import agree, verify_checkpoint
from rlhf_core.training.checkpoints import (
    TrainerState,
    kept_random_state,
    load_trainer_state,
    restore_random_state,
    resume_point,
)
from rlhf_core.training.data import DataReport, encode_prompts, load_data
from rlhf_core.training.distributed import Ranks, init_process_group, leave_process_group
from rlhf_core.training.evaluation import are_written, load_evaluator, write_reports
from rlhf_core.training.models import PolicyModel, load_causal_lm, prepare_initial_model, tokenizer_folder
from rlhf_core.training.tokenizers import load_tokenizer
from rlhf_core.training.trainers import offline, online
from rlhf_core.training.trainers.context import Loop, TrainingContext, loops
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.types import RoleResult, Row, WorkerContext


def run_trainer(context: WorkerContext) -> RoleResult:
    """Train from the beginning, or go on from a checkpoint as if nothing had happened.

    Warm start, checkpoint, evaluation before, main loop, last checkpoint. What is done already is not done again.

    Raises:
        WorkerError: one of its kinds, see ``rlhf_core.errors``.
    """
    context.reporter.beat(Phase.SETUP, 0)
    ranks = init_process_group(context)
    result = train_run(context, ranks)
    leave_process_group(ranks)
    return result


def train_run(context: WorkerContext, ranks: Ranks) -> RoleResult:
    """The same within a process group that is there already."""
    spec = context.spec
    disable_progress_bar()
    _seed_everything(spec.seed, ranks.rank)
    rows, report = load_data(spec, "train")
    initial = _initial_model(context, ranks, rows)
    checkpoint = _resume_point(context, ranks)
    state = load_trainer_state(checkpoint, ranks) if checkpoint else None
    step = state.progress.step if state else 0
    context.reporter.beat(Phase.SETUP, step)

    tokenizer = load_tokenizer(tokenizer_folder(spec, initial))
    model = _load(checkpoint.model if checkpoint else initial, spec, ranks)
    data = encode_prompts(rows, tokenizer, spec.data)
    _log_start(ranks, report, data.num_overlong, checkpoint)
    context.reporter.beat(Phase.SETUP, step)
    evaluator = load_evaluator(spec, ranks, tokenizer)
    training = TrainingContext(context, ranks, tokenizer, report, data, evaluator, state.progress if state else None)
    result = RoleResult.DONE
    for loop in loops(spec):
        if not training.steps_left(loop):
            continue
        if loop.last_step == spec.total_steps:
            _evaluate_before(context, training, model)
        if _train_loop(context, training, loop, model, initial, state):
            result = RoleResult.STOPPED_EARLY if training.steps_done < spec.total_steps else RoleResult.DONE
            break
    training.close()
    return result


def _train_loop(
    context: WorkerContext,
    training: TrainingContext,
    loop: Loop,
    model: PreTrainedModel,
    initial: Path,
    state: TrainerState | None,
) -> bool:
    """One loop with an optimizer of its own; whether it ended early because an agent asked for it."""
    spec, ranks = training.spec, training.ranks
    with kept_random_state(ranks.device):
        policy = PolicyModel(model)
        policy.train()
        if spec.native_trainer.gradient_checkpointing:
            policy.enable_gradient_checkpointing()
        reference = _reference(context, ranks, loop, initial)
        engine = Engine(policy, loop.spec.optimizer, spec.model.dtype, ranks)
    if state and state.progress.step >= loop.first_step:
        engine.load_state(state.engine)
    if state and state.progress.step == training.steps_done:
        # Until here this process drew from generators that it seeded itself; now those of the run go on.
        restore_random_state(state.random, ranks.device)
    train = online.train if loop.algorithm.samples else offline.train
    stopped = train(training, loop, policy, engine, reference)
    engine.close()
    return stopped


def _evaluate_before(context: WorkerContext, training: TrainingContext, model: PreTrainedModel) -> None:
    """Measure the weights that the main algorithm starts from, once in the life of a run."""
    ranks, step = training.ranks, training.steps_done
    missing = step <= training.spec.warm_start_steps and not are_written(context.run_dir, "before")
    if ranks.from_first("missing" if missing else "") != "missing":
        return
    with kept_random_state(ranks.device):
        reports = training.evaluator.run(model, "before", step, training.beating(Phase.EVALUATE))
    write_reports(context.run_dir, reports, ranks)


def _reference(context: WorkerContext, ranks: Ranks, loop: Loop, initial: Path) -> PolicyModel | None:
    """The policy as it was when the loop began, if its algorithm needs it."""
    spec, steps_before = context.spec, loop.first_step - 1
    if not loop.algorithm.reference:
        return None
    source = initial
    if steps_before:
        checkpoint = context.run_dir.checkpoint(steps_before)
        try:
            verify_checkpoint(checkpoint, spec, ranks)
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(
                f"{error}. It is the reference that the divergence of this run is measured against, so none before it "
                f"can take its place: bring its files back from a copy and resume, or start a new run"
            ) from None
        source = checkpoint.model
    return PolicyModel(_load(source, spec, ranks)).requires_grad_(False).eval()


def _load(folder: Path, spec: RunSpec, ranks: Ranks) -> PreTrainedModel:
    model = load_causal_lm(folder, spec.model.dtype)
    model.to(ranks.device)  # type: ignore[arg-type]  # transformers hides the types of Module.to
    return model


def _initial_model(context: WorkerContext, ranks: Ranks, rows: list[Row]) -> Path:
    """Rank 0 builds or finds the model that training starts from; the others wait for its path."""
    path = str(prepare_initial_model(context.spec, context.run_dir, rows)) if ranks.is_first else ""
    return Path(ranks.from_first(path))


def _resume_point(context: WorkerContext, ranks: Ranks) -> CheckpointDir | None:
    """The checkpoint to go on from, checked."""
    step = agree(ranks, lambda: resume_point(context))
    if step is None:
        return None
    checkpoint = context.run_dir.checkpoint(step)
    verify_checkpoint(checkpoint, context.spec, ranks)
    return checkpoint


def _log_start(ranks: Ranks, report: DataReport, num_overlong: int, checkpoint: CheckpointDir | None) -> None:
    ranks.log(
        f"training data: {report.num_rows - num_overlong} rows of {report.source}; left out: {num_overlong} whose "
        f"prompt is too long, {report.num_malformed} malformed"
    )
    if report.first_problem:
        ranks.log(f"the first malformed row: {report.first_problem}")
    ranks.log(f"going on from {checkpoint.root.name}" if checkpoint else "starting from the beginning")


def _seed_everything(seed: int, rank: int) -> None:
    """Global random number generators: only code that is not ours draws from them (reward functions, for instance)."""
    random.seed(f"{seed} {rank}")
    np.random.seed((seed * 1_000_003 + rank) % (1 << 32))
    torch.manual_seed(seed * 1_000_003 + rank)
