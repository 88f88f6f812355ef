"""Checks of the evaluation, and of the promotion that follows it."""

from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.schemas.command_trainer import CommandTrainer


@check("evaluate.completions")
def evaluate_completions(facts: Facts) -> Iterator[Finding]:
    """Without completions, a model that is trained on samples would not be measured at all."""
    spec = facts.spec
    if spec.evaluate.completions or not spec.is_evaluated:
        return
    if spec.row_evaluations:
        yield passed(f"evaluations of this run: {', '.join(spec.row_evaluations)}")
    else:
        yield blocked(
            f"evaluate.completions = false with {spec.algorithm}, which has no evaluation without completions",
            "a main loop that learns from rows, or evaluate.completions = true",
            "set evaluate.completions=true; with evaluate.num_prompts the evaluation is shorter",
        )


@check("evaluate.min_p", trainer="native")
def evaluate_min_p(facts: Facts) -> Iterator[Finding]:
    """SGLang ends when a request has both a seed and min_p, which is after hours if only evaluations set it."""
    min_p = facts.spec.evaluate.min_p
    if min_p and facts.spec.rollout.engine == "sglang":
        yield blocked(
            f"evaluate.min_p = {min_p:g} with SGLang, which refuses it in requests with a seed",
            "top_p or top_k, or another engine",
            "set evaluate.min_p=0",
        )


@check("promote.folder")
def promote_folder(facts: Facts) -> Iterator[Finding]:
    """A model is approved after days of training, and then cannot be written."""
    if not facts.promote_folder:
        return
    if facts.promote_problem:
        yield blocked(
            f"the folder of promoted models, {facts.promote_folder}: {facts.promote_problem}",
            "a folder that is writable from here",
            "set promote.folder to one, or promote.when=never",
        )
    else:
        yield passed(f"{facts.promote_folder} is writable")


@check("checkpoint.keep_best")
def keep_best(facts: Facts) -> Iterator[Finding]:
    """Without evaluations of checkpoints during training, none is known to be the best."""
    spec = facts.spec
    if not spec.checkpoint.keep_best:
        return
    every, saved, made = spec.evaluate.every_num_steps, spec.checkpoint.every_num_steps, spec.evaluations
    metric, available = spec.promote.metric, f"evaluations of this run: {', '.join(made) or 'none'}"
    found = f"checkpoint.keep_best, evaluate.every_num_steps = {every}, checkpoint.every_num_steps = {saved}"
    if isinstance(spec.trainer, CommandTrainer):
        yield blocked(
            'checkpoint.keep_best and trainer.kind = "command"',
            "the native trainer, which evaluates its checkpoints during training",
            "set checkpoint.keep_best=false",
        )
    elif not every or every % saved:
        yield blocked(
            found,
            "evaluations during training, at steps that are saved",
            f"set evaluate.every_num_steps to a multiple of {saved}",
        )
    elif metric in made:
        yield passed(found)
    elif metric in ("greedy", "sampled") and spec.completes_held_out(pairs_have_answers=facts.pairs_have_answers):
        yield warning(
            f'{found}, promote.metric = "{metric}", but pairs are completed only if they have data.answer_column',
            available,
            f"set promote.metric={made[0]}, unless every held-out pair has an answer",
        )
    else:
        yield blocked(
            f'{found}, promote.metric = "{metric}"',
            available,
            f"set promote.metric={made[0]}" if made else "set checkpoint.keep_best=false",
        )


@check("promote.metric")
def promote_metric(facts: Facts) -> Iterator[Finding]:
    """A metric that is never evaluated judges no checkpoint, so nothing is promoted."""
    spec = facts.spec
    metric, made = spec.promote.metric, spec.evaluations
    if spec.promote.when == "never":
        return
    found = f'promote.metric = "{metric}"'
    available = f"evaluations of this run: {', '.join(made) or 'none'}"
    if metric in made:
        yield passed(f"{found}; {available}")
    elif metric in ("greedy", "sampled") and spec.completes_held_out(pairs_have_answers=True):
        yield warning(
            f"{found}, but the held-out data are pairs, which are completed only if they have data.answer_column",
            available,
            f"set promote.metric={made[0]}, unless every held-out pair has an answer",
        )
    else:
        other = f"promote.metric={made[0]}, or " if made else ""
        yield blocked(found, available, f"set {other}promote.when=never")
