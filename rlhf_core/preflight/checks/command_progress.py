"""Steps, checkpoints and progress of an external trainer."""

import math
from collections.abc import Iterator, Mapping

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.launch_arguments import TRANSFORMERS, TrainerArguments, arguments_of
from rlhf_core.preflight.registry import Finding, blocked, check, passed, skipped, warning
from rlhf_core.schemas.command_trainer import SIGHTS, ProgressSource, named_placeholders
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.shell.launch_line import normalized
from rlhf_core.shell.training_script import RESUME_KEYWORD, RESUMING_CALL

PER_RANK_SOURCES = frozenset({ProgressSource.CALLBACK, ProgressSource.COLLECTIVES})
"""Strong sources that report the progress of each rank; the others report only that of the job."""

SAVE_STEPS = 500
"""Default number of steps between checkpoints of transformers (``TrainingArguments.save_steps``)."""


_GATHER = "stage3_gather_16bit_weights_on_model_save"
"""Setting of DeepSpeed with which it saves a whole model under ZeRO-3."""


@check("command.steps", trainer="command")
def steps(facts: Facts) -> Iterator[Finding]:
    """A program with a different number of steps counts as failed, or trains on after its run is complete."""
    arguments, trainer, planned = arguments_of(facts), facts.spec.command_trainer, facts.spec.total_steps
    passed_steps = arguments.integer("max_steps", "max_train_steps", "num_steps", "train_steps")
    epochs = arguments.text("num_train_epochs", "num_epochs", "epochs", "max_epochs")
    if passed_steps is not None and passed_steps > 0:
        if passed_steps == planned:
            yield passed(f"{passed_steps} steps, as planned")
        else:
            yield blocked(
                f"the program is set to {passed_steps} steps, but trainer.num_steps is {planned}",
                "the same number",
                "write {num_steps} into trainer.argv, for instance --max_steps {num_steps}",
            )
    elif any("num_steps" in named_placeholders(text) for text in (*trainer.argv, *trainer.variables.values())):
        yield passed(f"the program is set to {planned} steps")
    elif arguments.trainer.framework == "openrlhf":
        yield skipped("OpenRLHF counts episodes and samples; the number of steps is not calculated here")
    elif epochs is not None or arguments.trainer.framework in TRANSFORMERS:
        given = f"{epochs} epochs" if epochs is not None else "its default number of epochs"
        yield warning(
            f"the program trains {given}, but trainer.num_steps is {planned}",
            "a known number of steps: with fewer, the run counts as failed",
            "add --max_steps {num_steps}, or calculate the steps of these epochs",
        )
    else:
        yield warning(
            "trainer.num_steps is not passed to the program",
            f"a program that ends after {planned} steps",
            "put {num_steps} into trainer.argv or trainer.variables",
        )


@check("command.saving", trainer="command")
def saving(facts: Facts) -> Iterator[Finding]:
    """If checkpoints are rarer than planned, or missing, every failure loses more work."""
    arguments, every = arguments_of(facts), facts.spec.checkpoint.every_num_steps
    if arguments.trainer.framework not in TRANSFORMERS:
        return
    strategy = arguments.text("save_strategy") or "steps"
    save_steps = arguments.number("save_steps")
    if save_steps is not None and 0 < save_steps < 1:
        save_steps = math.ceil(facts.spec.total_steps * save_steps)  # transformers takes it for a share of all steps
    yield from _evaluations_for_the_best(arguments, strategy)
    advice = "add --save_strategy steps --save_steps {checkpoint_every}"
    if strategy != "steps":
        yield (blocked if strategy == "no" else warning)(
            f"--save_strategy {strategy}", f"a checkpoint every {every} steps (checkpoint.every_num_steps)", advice
        )
    elif save_steps is None and arguments.is_whole:
        if every != SAVE_STEPS:
            yield warning(
                f"no --save_steps: a checkpoint every {SAVE_STEPS} steps, but checkpoint.every_num_steps is {every}",
                "the same number",
                advice,
            )
    elif save_steps is not None and save_steps != every:
        yield warning(
            f"--save_steps {save_steps:g}, but checkpoint.every_num_steps is {every}", "the same number", advice
        )
    else:
        yield passed(f"a checkpoint every {every} steps")


def _evaluations_for_the_best(arguments: TrainerArguments, strategy: str) -> Iterator[Finding]:
    """Report evaluations at other times than checkpoints, which end a program that loads the best one at its start."""
    evaluated = arguments.text("eval_strategy", "evaluation_strategy")
    if not arguments.is_on("load_best_model_at_end") or evaluated is None or strategy == "best":
        return
    every, eval_steps = arguments.integer("save_steps"), arguments.integer("eval_steps")
    differs = evaluated != strategy
    if differs or (strategy == "steps" and every and eval_steps and every % eval_steps):
        given = f"--eval_strategy {evaluated}" if differs else f"--eval_steps {eval_steps}"
        yield blocked(
            f"--load_best_model_at_end with {given} and --save_strategy {strategy}"
            + ("" if differs else f" --save_steps {every}"),
            "an evaluation for every checkpoint: transformers ends at its start with any other",
            "write --eval_strategy steps --eval_steps {checkpoint_every}",
        )


@check("command.weights", trainer="command")
def weights(facts: Facts) -> Iterator[Finding]:
    """If checkpoints have no weights in the format of Hugging Face, the evaluation fails after days of training."""
    arguments = arguments_of(facts)
    if not facts.spec.is_evaluated:
        return
    lacking, advice = "", "leave data.eval out, and evaluate the model elsewhere"
    if arguments.trainer.framework == "openrlhf":
        lacking = "checkpoints of OpenRLHF are those of DeepSpeed"
    elif any(name.startswith("actor_rollout_ref.") for name in arguments.line.arguments):
        lacking = "checkpoints of verl have a part of the weights from every rank"
    elif arguments.trainer.framework in TRANSFORMERS and _keeps_weights_apart(arguments):
        lacking = "ZeRO-3 of DeepSpeed, without stage3_gather_16bit_weights_on_model_save"
        advice = "set it to true in the config of DeepSpeed (accelerate: zero3_save_16bit_model), or " + advice
    if lacking:
        yield warning(
            f"data.eval is set, but {lacking}", "checkpoints with the weights in the format of Hugging Face", advice
        )


def _keeps_weights_apart(arguments: TrainerArguments) -> bool:
    """Return True if DeepSpeed saves the part of every rank alone; accelerate has options for what its config lacks."""
    options = arguments.launcher_options
    zero = arguments.side.deepspeed.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {"stage": "auto", _GATHER: "auto"}
    stage, gathers = str(zero.get("stage")), str(zero.get(_GATHER, "false"))
    stage = options.get("zero_stage", "") if stage == "auto" else stage
    gathers = options.get("zero3_save_16bit_model", "false") if gathers == "auto" else gathers
    return stage == "3" and gathers.lower() != "true"


@check("command.resume", trainer="command")
def resume(facts: Facts) -> Iterator[Finding]:
    """If a checkpoint is not found, or cannot be resumed from, training silently starts again at step 0."""
    trainer, arguments = facts.spec.command_trainer, arguments_of(facts)
    problems = list(_resume_problems(arguments))
    yield from problems
    if trainer.resume == "none":
        yield warning(
            'trainer.resume = "none": every failure starts the training at step 0',
            "a way to resume from a checkpoint",
            'set trainer.resume to "argument" or "in_place", unless the run is short',
        )
    elif not problems:
        how = f"with {' '.join(trainer.resume_argv)}" if trainer.resume == "argument" else "from its output folder"
        yield passed(f"it resumes {how}")


def _resume_problems(arguments: TrainerArguments) -> Iterator[Finding]:
    trainer = arguments.trainer
    if trainer.framework in TRANSFORMERS:
        yield from _resume_of_transformers(arguments)
    if trainer.framework == "openrlhf":
        if "checkpoint-{step}" in trainer.checkpoint_name:
            yield blocked(
                f"trainer.checkpoint_name = {trainer.checkpoint_name}, the name that transformers uses",
                "the name that OpenRLHF uses",
                'set trainer.checkpoint_name = "ckpt/_actor/global_step{step}" with --ckpt.path {output_dir}/ckpt',
            )
        if trainer.resume == "argument" and "--resume_from_checkpoint" in trainer.resume_argv:
            yield blocked(
                "trainer.resume_argv has --resume_from_checkpoint, which OpenRLHF does not have",
                "--ckpt.load_enable, which resumes from the newest checkpoint of --ckpt.path",
                'set trainer.resume = "in_place" and add --ckpt.load_enable to trainer.argv',
            )


def _resume_of_transformers(arguments: TrainerArguments) -> Iterator[Finding]:
    trainer = arguments.trainer
    if trainer.resume == "none":
        return
    if arguments.is_on("save_only_model"):
        yield blocked(
            "--save_only_model: checkpoints without optimizer state", "checkpoints to resume from", "remove it"
        )
    name = trainer.checkpoint_name.rpartition("/")[2]
    if name != "checkpoint-{step}":
        yield blocked(
            f"trainer.checkpoint_name = {trainer.checkpoint_name}",
            "the name that transformers uses, checkpoint-{step}",
            'set trainer.checkpoint_name = "checkpoint-{step}"',
        )
    elif (
        trainer.framework == arguments.line.launcher == "swift"
        and arguments.is_on("add_version", default=True)
        and "/" not in trainer.checkpoint_name
        and arguments.is_whole
    ):
        yield blocked(  # it creates a folder between output_dir and the checkpoints (4.6)
            "ms-swift saves to <output_dir>/v0-<time>, but trainer.checkpoint_name is checkpoint-{step}",
            "a name that matches these folders",
            'add --add_version false, or set trainer.checkpoint_name = "*/checkpoint-{step}"',
        )
    if arguments.is_given("resume_from_checkpoint") and trainer.resume == "argument":
        yield blocked(
            "trainer.argv contains --resume_from_checkpoint",
            "the checkpoint of this run, added by trainer.resume_argv",
            "remove it from trainer.argv; use --model for a model to start from",
        )
    told = trainer.resume == "argument" and RESUME_KEYWORD in map(normalized, trainer.resume_argv)
    if told and arguments.side.never_resumes:
        yield warning(
            f"{arguments.side.never_resumes} calls .train() and never names {RESUME_KEYWORD}: the Trainer does not "
            "read the option itself, so a retry starts at step 0 and the run ends as incomplete",
            "a script that gives the checkpoint to its Trainer",
            f'write {RESUMING_CALL}, or set trainer.resume = "none"',
        )


# ---------------------------------------------------------------------------------------------------------------------


@check("command.progress", trainer="command")
def progress(facts: Facts) -> Iterator[Finding]:
    """A hang that no source of progress detects costs the rest of the time limit."""
    arguments, sources = arguments_of(facts), facts.spec.command_trainer.sources
    silent = {source: reason for source in sources if (reason := _silent(source, facts, arguments))}
    for source in sources:
        sight = SIGHTS[source]
        if source in silent:
            yield skipped(f"{source}: detects nothing here: {silent[source]}")
        else:
            weak = "" if sight.is_strong else " (counts only before the first step)"
            yield passed(f"{source}{weak}: detects {sight.sees}; misses {sight.blind}")
    strong = [source for source in sources if SIGHTS[source].is_strong and source not in silent]
    floor_s = facts.spec.supervise.floor_s
    if strong and arguments.line.is_of_ray and floor_s <= SuperviseSpec().floor_s:
        yield warning(
            f"only the steps of a program on Ray are seen, and a step longer than supervise.floor_s = {floor_s:g} "
            "counts as a hang",
            "more than the longest step takes, with its rollout",
            "set supervise.floor_s, for instance to 1800",
        )
    if not strong:
        yield warning(
            "no source reports steps: an endless loop counts as progress",
            "trainer_log, tensorboard, stdout, checkpoints or the callback",
            "add one to trainer.progress, for instance stdout with trainer.stdout_patterns",
        )
    elif facts.spec.num_ranks > 1 and not PER_RANK_SOURCES & set(strong) and not arguments.line.is_of_ray:
        yield warning(
            f"{', '.join(strong)} see only the job as a whole: the rank that causes a hang stays unknown",
            "a source that sees each rank: collectives, or the callback",
            "leave trainer.record_collectives on and add collectives to trainer.progress",
        )


def _silent(source: ProgressSource, facts: Facts, arguments: TrainerArguments) -> str:
    """Reason why a source cannot report anything in this run; empty if it can."""
    side, trainer = arguments.side, arguments.trainer
    if source is ProgressSource.CALLBACK:
        if trainer.framework not in TRANSFORMERS:
            return "it is for trainers of transformers"
        return "" if side.has_callback else "rlhf_core.callback is not found in the script"
    if source is ProgressSource.COLLECTIVES:
        if not trainer.record_collectives:
            return "trainer.record_collectives is off"
        if arguments.line.is_of_ray:
            return "the ranks are actors of Ray, which are not found"
        return "a single rank has none" if facts.spec.num_ranks == 1 else ""
    if not SIGHTS[source].is_strong and arguments.line.is_of_ray:
        return "Ray's own processes are never idle; it only keeps the set-up from counting as a hang"
    if source is ProgressSource.TENSORBOARD and trainer.framework in TRANSFORMERS:
        return _no_tensorboard(arguments)
    return ""


@check("command.save_lead", trainer="command")
def save_lead(facts: Facts) -> Iterator[Finding]:
    """A program that is asked to save less than a step before the time limit is killed in the middle of one."""
    step_s, lead_s = facts.baseline.seconds_per_step, facts.spec.slurm.save_lead_s
    if facts.scheduler != "slurm" or step_s is None:
        return
    found = f"slurm.save_lead_s = {lead_s}, {step_s:.3g} s per step in earlier runs of this shape"
    if step_s <= lead_s:
        yield passed(found)
        return
    yield warning(
        found,
        "time for a step and a checkpoint between the request to save and the time limit",
        f"set slurm.save_lead_s to at least {math.ceil(step_s) + 60}; more if a checkpoint takes more than a minute",
    )


def _no_tensorboard(arguments: TrainerArguments) -> str:
    side, report_to = arguments.side, arguments.line.arguments.get("report_to")
    trackers = " ".join(report_to) if report_to is not None else side.settings.get("report_to")
    if trackers is None and arguments.is_whole and arguments.line.launcher == "swift":
        trackers = "tensorboard"
    if trackers is not None and not {"tensorboard", "all"} & set(trackers.replace(",", " ").split()):
        return f"--report_to {trackers}"
    if side.packages and not {"tensorboard", "tensorboardx"} & side.packages.keys():
        return "tensorboard is not installed there"
    return ""
