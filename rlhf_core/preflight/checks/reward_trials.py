"""Checks of the reward functions, based on their trial on rows of the data in the compute interpreter
(``rlhf_core/training/probes/reward_functions.py``)."""

from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, skipped, warning
from rlhf_core.schemas.content import RewardTrial, TrialProblem


@check("content.rewards", trainer="native")
def rewards(facts: Facts) -> Iterator[Finding]:
    """A reward function that fails, hangs, or gives every answer the same reward wastes every step."""
    if facts.content is None:
        return
    tokens = facts.content.tokenizer
    only_texts = tokens is not None and not tokens.problem and not tokens.chat_problem and tokens.turn_end is None
    if only_texts and facts.spec.reward.conversations == "messages":
        yield warning(
            'reward.conversations = "messages", but no row is a conversation',
            "prompts that are lists of messages",
            "leave reward.conversations out: reward functions are given texts",
        )
    for trial in facts.content.rewards:
        if trial.problem is TrialProblem.COLUMNS:
            continue  # reported by content.columns
        if trial.problem:
            yield _failed(trial)
            continue
        shown = f"{trial.function}: {trial.num_completions} completions in {trial.seconds * 1000:.0f} ms"
        if trial.num_unjudged and _scores_evaluations(facts, trial):
            yield blocked(
                f"{shown}, and it returned None for {trial.num_unjudged} of them",
                "a number for every completion of an evaluation",
                f"correct {trial.function}, or set evaluate.scorer to another function",
            )
        elif trial.num_unjudged == trial.num_completions:
            yield skipped(f"{shown}, and it returned None for all of them: its rewards were not compared")
        elif not facts.spec.data.answer_column:
            yield passed(
                f"{shown}, rewarded with {trial.wrong:g} on average; there are no reference answers to compare"
            )
        elif trial.num_distinct == 1:
            yield warning(
                f"{shown}, all rewarded with {trial.right:g}: reference answers, those of other rows, and nonsense",
                "different rewards for right and wrong answers",
                f"check {trial.function} and data.answer_column; nothing is learned from equal rewards",
            )
        elif trial.right <= trial.wrong:
            yield warning(
                f"{shown}, reference answers {trial.right:g} on average, wrong ones {trial.wrong:g}",
                "a higher reward for reference answers than for wrong ones",
                f"check {trial.function} and data.answer_column, unless this reward measures something else",
            )
        else:
            yield passed(f"{shown}, reference answers {trial.right:g} on average, wrong ones {trial.wrong:g}")
        yield from _slow(facts, trial)


def _failed(trial: RewardTrial) -> Finding:
    off = 'preflight.off = {"content.rewards" = "why"}'
    if trial.problem is TrialProblem.NOT_TRIED:
        return skipped(f"{trial.function} was not tried: {trial.message}")
    if trial.problem is TrialProblem.MEMORY:
        return warning(
            f"{trial.function} exceeded the memory limit of a trial: {trial.message}",
            "a reward function that needs little memory",
            f"check which objects it keeps; if it loads a model of its own, set {off}",
        )
    message = trial.message if trial.function in trial.message else f"{trial.function}: {trial.message}"
    exception = "is only slow, or needs" if trial.problem is TrialProblem.TIMEOUT else "needs"
    return blocked(
        f"tried on real rows, {message}",
        "one finite number for each completion, including empty and unusual ones",
        f"correct {trial.function}; if it {exception} something that only the nodes have, set {off}",
    )


def _scores_evaluations(facts: Facts, trial: RewardTrial) -> bool:
    """True for the trial of the scorer, which has one of its own if held-out rows have other columns."""
    assert facts.content is not None
    has_own = any(other.is_held_out for other in facts.content.rewards)
    return trial.function == facts.spec.evaluate.scorer and trial.is_held_out == has_own


def _slow(facts: Facts, trial: RewardTrial) -> Iterator[Finding]:
    spec = facts.spec
    sampled = [loop.algorithm.sequences_per_step for loop in spec.loops.named.values() if loop.algorithm.samples]
    if not sampled or trial.function not in spec.reward.functions:
        return
    count = max(sampled) // spec.num_ranks
    seconds = trial.seconds / trial.num_completions * count
    # In the trainer's own process, it has no time limit of its own and reports no progress.
    setting = "reward.timeout_s" if spec.reward.timeout_s else "supervise.reward_floor_s"
    limit_s = spec.reward.timeout_s or spec.supervise.reward_floor_s
    if seconds > limit_s / 2:
        yield warning(
            f"{trial.function} would take about {seconds:.0f} s for the {count} completions of a rank in a step",
            f"well below {setting} = {limit_s:g}, when it is terminated",
            f"make it faster, or raise {setting} to {seconds * 4:.0f}",
        )
