"""Role ``evaluator``: the evaluation of the trained model, after training."""

import contextlib
import functools
import math
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlhf_core.errors import BadConfig, CheckpointCorrupt, WorkerError
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.checkpoints.resume import best_checkpoint, newest_checkpoint
from rlhf_core.training.checkpoints.soundness import agree, initial_folder, reference_folder, verify_checkpoint
from rlhf_core.training.data.tokenizers import load_tokenizer
from rlhf_core.training.distributed import Ranks, collective_timeout, init_process_group, leave_process_group
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.evaluation.evaluator import Evaluator, load_evaluator
from rlhf_core.training.evaluation.report_files import are_written, write_reports
from rlhf_core.training.models.adapters import base_of, is_adapter
from rlhf_core.training.models.causal_lm import load_causal_lm
from rlhf_core.training.models.embeddings import require_embeddings
from rlhf_core.training.models.loaded_weights import move
from rlhf_core.training.models.merged import write_merged
from rlhf_core.training.models.reward_model import load_reward_model
from rlhf_core.training.rewards.scoring import RewardScorer
from rlhf_core.training.rewards.scoring_models import load_scoring_models
from rlhf_core.training.rollouts.start import start_engine
from rlhf_core.training.rollouts.transformers_engine import also_end_with
from rlhf_core.training.types import RoleResult, WorkerContext


def run_evaluator(context: WorkerContext) -> RoleResult:
    """Role ``evaluator``: evaluate the model of the last complete checkpoint, or with ``checkpoint.keep_best`` of the
    best.

    Raises:
        WorkerError: there is no complete checkpoint.
        CheckpointCorrupt: its model is damaged.
    """
    spec, reporter = context.spec, context.reporter
    reporter.beat(Phase.SETUP, 0)
    ranks = init_process_group(context)
    # There may be more evaluators than trainers, so another number of them.
    ranks_per_row = math.gcd(spec.ranks_per_row, ranks.num_ranks)
    ranks = ranks.sharing_rows(ranks_per_row, collective_timeout(spec.supervise))
    initial = initial_folder(spec, context.run_dir)
    checkpoint = checkpoint_to_evaluate(context, ranks, initial)
    reporter.beat(Phase.SETUP, checkpoint.step)
    disable_progress_bar()
    tokenizer = load_tokenizer(checkpoint.model)
    base = None if isinstance(spec.trainer, CommandTrainer) else initial
    beat = functools.partial(reporter.beat, Phase.EVALUATE, checkpoint.step)
    with (
        contextlib.closing(RewardScorer(spec, ranks.rank)) as scorer,
        contextlib.closing(EnvironmentPool(spec.rollout.turns)) as pool,
    ):
        folder = (base or base_of(checkpoint.model)) if is_adapter(checkpoint.model) else checkpoint.model
        start = functools.partial(start_engine, context, ranks, tokenizer, folder)
        now = context.stored.created_at
        beat_setup = functools.partial(reporter.beat, Phase.SETUP, checkpoint.step)
        pool.describe(beat_setup)
        evaluator = load_evaluator(
            spec, ranks, tokenizer, scorer, start, trains_on_samples=False, pool=pool, now=now, beat=beat_setup
        )
        if name := spec.evaluate.scorer_model:
            models = {name: spec.reward.models[name]}
            chats = any(row.chat is not None for row in evaluator.data.rows)
            scorer.use(load_scoring_models(models, ranks, tokenizer, {}, beat_setup, has_conversations=chats, now=now))
        _evaluate_start(context, ranks, evaluator)
        beat_setup()
        if spec.makes_reward_model:
            pad_id = tokenizer.pad_token_id
            model = load_reward_model(checkpoint.model, spec.model.dtype, spec.seed, pad_id, base, beat_setup)
        else:
            model = load_causal_lm(checkpoint.model, spec.model.dtype, base, beat_setup)
            also_end_with(model, evaluator.data.end_ids)  # a merged adapter has the settings of its base model
        move(model, ranks.device, beat_setup)
        reports = evaluator.run(model, "after", checkpoint.step, beat, _reference(context, ranks))
    evaluator.rollouts.close()
    if ranks.is_first and base is not None and is_adapter(checkpoint.model) and spec.promote.when != "never":
        saved = functools.partial(reporter.beat, Phase.CHECKPOINT, checkpoint.step)
        saved()
        write_merged(context.run_dir, checkpoint, model, tokenizer, saved)
    write_reports(context.run_dir, reports, ranks)
    leave_process_group(ranks)
    return RoleResult.DONE


def _reference(context: WorkerContext, ranks: Ranks) -> PreTrainedModel | None:
    """Load the reference model of the main loop, if held-out rows are scored against it."""
    spec = context.spec
    if not spec.ranks_held_out or not spec.main_loop.algorithm.reference:
        return None
    initial = initial_folder(spec, context.run_dir)
    named = spec.main_loop.reference
    folder = Path(named) if named else reference_folder(context, ranks, spec.warm_start_steps, initial)
    beat = functools.partial(context.reporter.beat, Phase.SETUP, spec.total_steps)
    model = load_causal_lm(folder, spec.model.dtype, initial, beat)
    move(model, ranks.device, beat)
    return model


def _evaluate_start(context: WorkerContext, ranks: Ranks, evaluator: Evaluator) -> None:
    """Evaluate the initial model of an external trainer, which does not do so itself; once per run."""
    spec, run_dir = context.spec, context.run_dir
    is_external = isinstance(spec.trainer, CommandTrainer) and bool(spec.model.path)
    if not ranks.on_first(lambda: is_external and not are_written(run_dir, "before")):
        return
    beat = functools.partial(context.reporter.beat, Phase.SETUP, 0)
    model = load_causal_lm(Path(spec.model.path), spec.model.dtype, beat=beat)
    move(model, ranks.device, beat)
    try:
        require_embeddings(model, evaluator.tokenizer, evaluator.data, completions=spec.ranks_held_out)
    except BadConfig as error:  # on every rank: the program may have resized the model for tokens that it added
        if ranks.is_first:
            print(f"the model before training is not evaluated: {error}", flush=True)
    else:
        reports = evaluator.run(model, "before", 0, functools.partial(context.reporter.beat, Phase.EVALUATE, 0))
        write_reports(run_dir, reports, ranks)
    model.to("meta")  # the engine refers to it until it loads the next one, which needs its memory


def checkpoint_to_evaluate(context: WorkerContext, ranks: Ranks, initial: Path) -> CheckpointDir:
    """Find and verify the checkpoint to evaluate: the newest, or with ``checkpoint.keep_best`` the best, if that is
    intact. Collective.

    Raises:
        WorkerError: there is no complete checkpoint.
        CheckpointCorrupt: the newest checkpoint is damaged.
    """
    if best := agree(ranks, lambda: best_checkpoint(context)):
        checkpoint = context.run_dir.checkpoint(best)
        try:
            verify_checkpoint(checkpoint, context.spec, ranks, initial, only_model=True)
        except CheckpointCorrupt as error:
            ranks.log(f"warning: the newest checkpoint is evaluated instead of the best: {error}")
        else:
            return checkpoint
    step = agree(ranks, lambda: newest_checkpoint(context))
    if step is None:
        raise WorkerError(
            f"found no complete checkpoint in {context.run_dir.checkpoints_dir} to evaluate; training must run first"
        )
    checkpoint = context.run_dir.checkpoint(step)
    verify_checkpoint(checkpoint, context.spec, ranks, initial, only_model=True)
    return checkpoint
