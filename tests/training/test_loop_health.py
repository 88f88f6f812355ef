"""The judge of training: on curves recorded from real runs, on curves made by hand, and on two real ranks."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from health_runs import CASES, DEGENERATE, HEALTHY, SEED_FORMULAS, SeedFormula, make_runs
from rank_launcher import launch, values

from rlhf_core.diagnosis.health import rules
from rlhf_core.diagnosis.health.advice import ADVICE
from rlhf_core.diagnosis.health.judge import HealthFinding, HealthVerdict, Judge, in_words
from rlhf_core.diagnosis.health.state import (
    FINGERPRINT,
    NUM_DISTINCT,
    SAME_GROUPS,
    SEEDS_ACROSS_PROMPTS,
    SEEDS_IN_GROUPS,
    Batch,
    HealthState,
)
from rlhf_core.schemas.health import HealthRule, HealthSpec
from rlhf_core.training.rollouts.health_signals import seed_repeats
from rlhf_core.training.rollouts.seeds import sample_seed

RECORDED = Path(__file__).parent / "fixtures" / "health"
"""Steps of real runs as the judge saw them: ``python tests/benchmarks/bench_health.py --keep FOLDER``."""

BATCH = Batch(num_prompts=32, samples_per_prompt=16, nodes=("node1",) * 4 + ("node2",) * 4)
"""512 completions a step, on two nodes with four ranks each."""

QUICK = Batch(num_prompts=8, samples_per_prompt=8, nodes=("node0", "node1"))
"""Of the recorded runs."""


def seen(step: int, *, samples: bool = True, ranks: int = 8, **changes: Any) -> dict[str, Any]:
    """One healthy step, with what is different about it; lists are values by rank."""
    metrics = {
        "train/grad_norm": 0.5,
        "train/learning_rate": 1e-6,
        "train/changed_share": 1.0,
        "train/num_tokens": 3584.0,
        "reward/mean": 0.5,
        "reward/max": 1.0,
        "reward/min": 0.0,
        "rollout/zero_std_groups": 0.2,
        "rollout/entropy": 0.3,
        "rollout/truncated_share": 0.0,
        "rollout/length_mean": 7.0,
        "rollout/train_gap": 1e-3,
        "rollout/seed_digest": float(step),
        "reward/length_correlation": 0.2,
        "reward/length_slope": 0.01,
        "policy/kl": 0.05,
        "policy/clip_share": 0.01,
        "policy/dual_clip_share": 0.0,
    }
    by_rank = {
        SEEDS_IN_GROUPS: [0.0] * ranks,
        SEEDS_ACROSS_PROMPTS: [0.0] * ranks,
        FINGERPRINT: [1000.0 * step + rank for rank in range(ranks)],
        SAME_GROUPS: [0.0] * ranks,
        NUM_DISTINCT: [50.0] * ranks,
    }
    names = {name.partition("/")[2]: name for name in (*metrics, *by_rank)}
    for name, value in changes.items():
        (by_rank if isinstance(value, list) else metrics)[names[name]] = value
    return {"step": step, "samples": samples, "metrics": metrics, "by_rank": by_rank}


GONE = {"mean": 0.0, "zero_std_groups": 1.0, "grad_norm": 0.0}
"""A step without any reward."""
SOLVED = {
    "mean": 1.0,
    "zero_std_groups": 1.0,
    "grad_norm": 0.0,
    "entropy": 1e-5,
    "same_groups": [1.0] * 8,
    "num_distinct": [4.0] * 8,
}
"""A step of a task that is solved: nothing differs any more."""


def first_finding(steps: Any, spec: HealthSpec | None = None, batch: Batch = BATCH) -> tuple[int, str, str] | None:
    """Step, rule and message of the first finding."""
    judge = Judge(spec or HealthSpec(), batch)
    for one in steps:
        found = judge.observe(**one)
        if found:
            return one["step"], found[0].rule, in_words(found, one["step"])
    return None


def finding(steps: Any, batch: Batch = BATCH) -> tuple[int, str, str]:
    """Step, rule and message of the first finding, of which there has to be one."""
    found = first_finding(steps, batch=batch)
    assert found is not None
    return found


def curve(*parts: tuple[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """So many steps of each kind."""
    step = 0
    for count, changes in parts:
        for _ in range(count):
            step += 1
            yield seen(step, **changes)


# ---------------------------------------------------------------------------------------------------------------------
# Recorded


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def names(kind: dict[str, Any]) -> list[str]:
    known = {name.replace(" ", "-") for name in kind}
    return sorted(path.stem for path in RECORDED.glob("*.jsonl") if path.stem in known)


def judged(name: str) -> tuple[int, str, str] | None:
    case = next(case for known, case in CASES.items() if known.replace(" ", "-") == name)
    grpo = {"prompts_per_step": 8, "samples_per_prompt": 8} | case.settings.get("grpo", {})
    batch = Batch(grpo["prompts_per_step"], grpo["samples_per_prompt"], QUICK.nodes)
    return first_finding(recorded(name), HealthSpec(min_completions=1024), batch)


@pytest.mark.parametrize("name", names(HEALTHY))
def test_recorded_healthy_runs_are_left_alone(name: str) -> None:
    assert judged(name) is None


@pytest.mark.parametrize("name", names(DEGENERATE))
def test_recorded_degenerate_runs_are_found_by_their_rule(name: str) -> None:
    case = next(case for known, case in DEGENERATE.items() if known.replace(" ", "-") == name)
    found = judged(name)
    assert found is not None
    step, rule, message = found
    assert rule == case.rule
    assert case.words in message
    assert step == recorded(name)[-1]["step"], "the run was ended at the same step"


def test_there_are_recordings_of_both_kinds() -> None:
    assert len(names(HEALTHY)) >= 4
    assert len(names(DEGENERATE)) == len(DEGENERATE)


# ---------------------------------------------------------------------------------------------------------------------
# What looks like a failure and is none


HARMLESS = {
    "a task that is solved": [(30, {}), (500, SOLVED)],
    "a task that was solved from the start": [(200, SOLVED | {"min": 1.0})],
    "a policy that has gained, and is certain of some wrong answers": [
        (10, {"mean": 0.3}),
        (30, {"mean": 0.8}),
        (200, SOLVED | {"mean": 0.95}),
    ],
    # With 0.0001 nats a token 240 samples are all the same nearly always.
    "a certain policy that repeats itself": [(300, {"same_groups": [1.0] * 8, "entropy": 1e-4, "mean": 0.9})],
    "a dip of some steps": [(30, {}), (15, GONE), (30, {}), (15, GONE), (30, {})],
    "easy groups now and then": [(3, {}), (4, {"zero_std_groups": 1.0, "grad_norm": 0.0, "mean": 1.0})] * 30,
    "a schedule that ends at zero": [(30, {}), (30, {"learning_rate": 0.0, "changed_share": 0.0})],
    "the same completions in one step": [(1, {"same_groups": [1.0] + [0.0] * 7}), (1, {})] * 100,
}


@pytest.mark.parametrize("parts", HARMLESS.values(), ids=HARMLESS)
def test_what_only_looks_like_a_failure_is_left_alone(parts: list[tuple[int, dict[str, Any]]]) -> None:
    assert first_finding(curve(*parts)) is None


def test_without_the_exemption_a_solved_task_would_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: it is the exemption that keeps it."""
    monkeypatch.setattr(rules, "_is_solved", lambda state, now: False)
    monkeypatch.setattr(rules, "_has_gained", lambda state, now: False)
    found = finding(curve((30, {}), (500, SOLVED)))
    assert found[1] == "no_spread"


def test_a_rare_reward_is_waited_for_and_its_lack_is_found_in_the_end() -> None:
    small = Batch(8, 4, ("node1",) * 8)
    unrewarded = GONE | {"max": 0.0}
    assert first_finding(curve((127, unrewarded)), batch=small) is None
    found = finding(curve((128, unrewarded)), batch=small)
    assert found[:2] == (128, "no_spread")
    assert "4096 completions" in found[2]


def test_a_lucky_block_of_a_rare_reward_is_no_peak_to_fall_from() -> None:
    small = Batch(2, 4, ("node1",) * 8)
    lucky, without = {"mean": 1 / 8}, {"mean": 0.0, "zero_std_groups": 1.0, "grad_norm": 0.0}
    assert first_finding(curve((5, lucky), (60, without)), batch=small) is None


@pytest.mark.parametrize(("rate", "is_found"), [(5e-8, False), (2e-7, True)])
def test_bfloat16_weights_that_small_updates_do_not_reach_are_not_frozen(rate: float, is_found: bool) -> None:
    """The last 20 of 1,000 steps of a cosine schedule: no bfloat16 weight changes, only its float32 copy does."""
    at_peak, at_end = {"learning_rate": 1e-6}, {"learning_rate": rate, "changed_share": 0.0}
    steps = [{**one, "peak_rate": 1e-6} for one in curve((30, at_peak), (20, at_end))]
    found = first_finding(steps)
    assert (found is not None) == is_found
    assert found is None or found[:2] == (35, "frozen")


def test_supervised_steps_are_judged_by_gradient_and_weights_alone() -> None:
    line = {"train/grad_norm": 0.5, "train/learning_rate": 1e-3, "train/changed_share": 1.0, "train/loss": 0.7}
    steps = [{"step": step, "samples": False, "metrics": line, "by_rank": {}} for step in range(1, 60)]
    assert first_finding(steps) is None
    frozen = [{**one, "metrics": {**line, "train/grad_norm": 0.0}} for one in steps]
    found = finding(frozen)
    assert found[:2] == (5, "frozen")


def test_a_margin_that_every_pair_has_reached_is_not_frozen() -> None:
    """The hinge loss of DPO and CPO is then exactly 0, and so is its gradient."""
    line = {"train/grad_norm": 0.0, "train/learning_rate": 1e-3, "train/changed_share": 1.0, "train/loss": 0.0}
    steps = [{"step": step, "samples": False, "metrics": line, "by_rank": {}} for step in range(1, 60)]
    assert first_finding(steps) is None


# ---------------------------------------------------------------------------------------------------------------------
# What is found


def test_identical_completions_of_a_node_are_named_with_its_ranks() -> None:
    """As in ms-swift #3745: reward 1, loss and KL 0, and all completions of one node the same."""
    share = [0.0] * 4 + [1.0] * 4
    found = finding(curve((50, {"same_groups": share, "mean": 1.0, "grad_norm": 0.0, "zero_std_groups": 1.0})))
    step, rule, message = found
    assert (step, rule) == (2, "identical")
    assert "all 16 completions of every prompt are identical on ranks 4, 5, 6, 7 (all of node2), 2 steps" in message
    assert "entropy 0.3 nats per token" in message


def test_one_rank_that_repeats_itself_is_named_alone() -> None:
    share = [0.0, 0.0, 1.0, *[0.0] * 5]
    found = finding(curve((50, {"same_groups": share})))
    assert "identical on rank 2 (node1)," in found[2]


def test_completions_that_do_not_depend_on_the_prompt_are_said_to() -> None:
    found = finding(curve((50, {"same_groups": [1.0] * 8, "num_distinct": [1.0] * 8})))
    assert "identical, and the same for every prompt on ranks 0, 1, 2, 3 (all of node1) and ranks 4" in found[2]


def test_ranks_that_make_the_same_completions_are_found() -> None:
    steps = [seen(step, fingerprint=[float(step), 1.5, 2.5, float(step), 4.5, 5.5, 6.5, 7.5]) for step in range(1, 50)]
    for one in steps:
        one["by_rank"][FINGERPRINT] = [mark + 100 * one["step"] for mark in one["by_rank"][FINGERPRINT]]
    found = finding(steps)
    assert found[1] == "identical"
    assert "as other ranks on rank 0 (node1) and rank 3" in found[2].replace(
        "ranks 0, 3 (node1)", "rank 0 (node1) and rank 3"
    )


def test_completions_that_are_the_same_at_every_step_are_found() -> None:
    found = finding(curve((50, {"fingerprint": [7.0, *range(10, 17)]})))
    assert "every step produces the same completions" in found[2]


def test_a_reward_that_is_gone_is_found_a_window_later() -> None:
    found = finding(curve((40, {}), (60, {"mean": 0.01})))
    step, rule, message = found
    assert rule == "reward_collapse"
    assert 40 + 10 < step <= 40 + 20
    assert "it was 0.5. Usual causes: updates so large" in message
    assert "To do: read completions from before and after" in message
    assert "health.off" in message


def test_a_reward_below_zero_collapses_too() -> None:
    limits = {"min": -1.0, "max": 0.0}
    found = finding(curve((40, limits | {"mean": -0.3}), (60, limits | {"mean": -0.99})))
    assert found[1] == "reward_collapse"


def test_everything_cut_off_and_nothing_rewarded_is_said_in_the_message() -> None:
    found = finding(curve((60, GONE | {"max": 0.0, "truncated_share": 1.0})))
    assert "100% of the completions are cut off at rollout.max_new_tokens" in found[2]


def test_entropy_that_is_gone_without_a_gain_is_found() -> None:
    certain = {"entropy": 0.001, "mean": 0.3}
    found = finding(curve((20, {"mean": 0.3}), (60, certain)))
    assert found[1] == "entropy_collapse"


def test_weights_that_do_not_change_are_found_after_five_steps() -> None:
    found = finding(curve((10, {}), (20, {"changed_share": 0.0})))
    assert found[:2] == (15, "frozen")
    assert "since step 11 (frozen): no weight changes although there is a gradient, 5 steps in a row" in found[2]


def test_completions_that_are_all_cut_off_and_left_out_are_named_as_the_cause_of_no_gradient() -> None:
    masked = {"grad_norm": 0.0, "num_tokens": 0.0, "truncated_share": 1.0}
    found = finding(curve((10, {}), (20, masked)))
    assert found[:2] == (15, "frozen")
    assert "cut off at rollout.max_new_tokens, and the loss leaves such completions out" in found[2]
    assert "requires_grad" not in found[2]


def test_single_completions_are_compared_over_all_ranks() -> None:
    """Without groups, a rank may have one completion, whose reward is equal to itself."""
    single = Batch(8, 1, ("node1",) * 8)
    healthy = {"zero_std_groups": 1.0, "mean": 0.5}
    assert first_finding(curve((600, healthy)), batch=single) is None
    found = finding(curve((10, healthy), (20, healthy | {"grad_norm": 0.0})), batch=single)
    assert found[:2] == (15, "frozen")
    found = finding(curve((600, GONE | {"max": 0.0})), batch=single)
    assert found[1] == "no_spread"
    assert "no step had completions with different rewards" in found[2]


def test_a_reward_that_never_varies_is_said_to_favour_nothing() -> None:
    """Not to leave no gradient: a KL penalty still has one, as the gradient norm shows."""
    found = finding(curve((60, GONE | {"max": 0.0, "grad_norm": 0.3})))
    assert found[1] == "no_spread"
    assert "no prompt had completions with different rewards: every completion so far was rewarded with 0" in found[2]
    assert "the rewards favour no completion over another" in found[2]
    assert "gradient" not in found[2]


def test_a_policy_that_learns_from_a_teacher_is_not_judged_by_rewards() -> None:
    """It is by what sampling and training say about the same token; one that learns from rewards is by all rules."""
    unrewarded = GONE | {"max": 0.0, "grad_norm": 0.3, "kl": 12.0}
    taught = replace(BATCH, learns_from_rewards=False)
    assert finding(curve((200, unrewarded)))[1] == "no_spread"
    assert first_finding(curve((200, unrewarded)), batch=taught) is None
    assert finding(curve((60, unrewarded | {"train_gap": 0.2})), taught)[1] == "train_gap"
    still = finding(curve((60, unrewarded | {"grad_norm": 0.0})), taught)
    assert still[1] == "frozen", "equal rewards are no reason for a gradient of 0"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_divergence_that_is_no_number_is_called_not_finite(value: float) -> None:
    found = finding(curve((40, {}), (60, {"kl": value})))
    assert found[1] == "kl"
    assert f"the KL divergence from the reference model is not finite ({value})" in found[2]


@pytest.mark.parametrize(
    ("rule", "wrong", "right", "words"),
    [
        ("clipped", {"clip_share": 0.95}, {"clip_share": 0.85}, "removes the gradient of 95% of the tokens"),
        (
            "clipped",
            {"clip_share": 0.5, "dual_clip_share": 0.45},
            {"clip_share": 0.5, "dual_clip_share": 0.35},
            "removes the gradient of 95% of the tokens",
        ),
        ("train_gap", {"train_gap": 0.2}, {"train_gap": 0.09}, "by 0.2 nats on average, and by more than 0.1"),
        ("kl", {"kl": 12.0}, {"kl": 9.0}, "the policy is 12 nats per token from the reference model"),
    ],
)
def test_signals_that_are_wrong_for_a_window_are_found(
    rule: str, wrong: dict[str, Any], right: dict[str, Any], words: str
) -> None:
    found = finding(curve((30, {}), (40, wrong)))
    assert found[:2] == (50, rule)
    assert found[2].startswith("Training goes wrong at step 50, since step 31")
    assert words in found[2]
    assert first_finding(curve((30, {}), (200, right))) is None
    assert first_finding(curve(*[(19, wrong), (1, {})] * 10)) is None, "a spike is none"
    assert first_finding(curve((30, {}), (200, SOLVED | wrong))) is None
    assert first_finding(curve((20, {"mean": 0.2}), (200, wrong | {"mean": 0.8}))) is None, "it has gained"


def test_a_divergence_that_has_cost_what_was_gained_is_found() -> None:
    steps = curve((20, {"mean": 0.2}), (30, {"mean": 0.9}), (60, {"mean": 0.5, "kl": 12.0}))
    found = finding(steps)
    assert found[1] == "kl"


LONGER = {"mean": 0.7, "length_mean": 14.0, "length_correlation": 0.9, "length_slope": 0.05}
"""A step of a policy that has gained 0.4 by 7 tokens more, each of which is worth 0.05."""


def test_a_reward_that_rises_by_length_alone_is_found() -> None:
    found = finding(curve((20, {"mean": 0.3}), (60, LONGER)))
    assert found[1] == "length"
    assert "tokens over the last 20 steps and had 7 over the first ones" in found[2]
    assert "reward and length have a correlation of 0.8" in found[2]


@pytest.mark.parametrize(
    "changes",
    [{"length_correlation": 0.5}, {"length_slope": 0.01}, {"length_mean": 8.0}, {"mean": 0.31}, {"mean": 0.2}],
    ids=["longer and right more often", "length is worth little", "hardly longer", "no gain", "a loss"],
)
def test_longer_answers_alone_are_no_finding(changes: dict[str, Any]) -> None:
    assert first_finding(curve((20, {"mean": 0.3}), (200, LONGER | changes))) is None


def seed_steps(formula: SeedFormula, num_steps: int) -> Iterator[dict[str, Any]]:
    """Steps of 2 nodes with 4 ranks each whose sampling seeds follow a formula: 4 prompts on a rank, 16 samples."""
    for step in range(1, num_steps + 1):
        of_rank = [
            [[formula(rank, 0, step, f"{step}-{rank}-{row}", index) for index in range(16)] for row in range(4)]
            for rank in range(8)
        ]
        repeats = [seed_repeats(seeds) for seeds in of_rank]
        digest = hash(tuple(seed for seeds in of_rank for group in seeds for seed in group))
        yield seen(
            step,
            seeds_in_groups=[float(in_groups) for in_groups, _ in repeats],
            seeds_across_prompts=[float(across) for _, across in repeats],
            seed_digest=float(digest),
        )


@pytest.mark.parametrize(("name", "kinds"), [(name, case.kinds) for name, case in SEED_FORMULAS.items()])
def test_seed_formulas_that_repeat_themselves_are_named_with_the_kind(name: str, kinds: set[str]) -> None:
    judge, warnings = Judge(HealthSpec(), BATCH), dict[str, str]()
    for one in seed_steps(SEED_FORMULAS[name].formula, 3):
        warnings |= {finding.kind: finding.message for finding in judge.observe(**one)}
    assert set(warnings) == kinds
    if "seeds within groups" in kinds:
        assert "(all of node1)" in warnings["seeds within groups"]


def test_seeds_that_follow_from_content_are_left_alone() -> None:
    judge = Judge(HealthSpec(), BATCH)
    for one in seed_steps(lambda rank, seed, step, uid, index: sample_seed(seed, step, uid, index), 5):
        assert judge.observe(**one) == []


def test_a_rule_that_is_turned_off_finds_nothing() -> None:
    steps = list(curve((40, {}), (60, {"mean": 0.01})))
    assert first_finding(steps, HealthSpec(off={"reward_collapse": "the task is switched on the way"})) is None


def test_every_rule_has_advice() -> None:
    """A kind without advice would end the training with a KeyError."""
    assert {key.partition("/")[0] for key in ADVICE} == {*get_args(HealthRule)}


# ---------------------------------------------------------------------------------------------------------------------
# What is done about it


def verdicts(steps: Any, spec: HealthSpec) -> list[tuple[int, HealthVerdict]]:
    """Verdicts that warn or end, up to the first that ends."""
    judge, warnings = Judge(spec, BATCH), []
    for one in steps:
        verdict = judge.verdict(judge.observe(**one), one["step"])
        if verdict.warnings or verdict.ends_by:
            warnings.append((one["step"], verdict))
        if verdict.ends_by:
            break
    return warnings


def test_without_a_setting_a_finding_ends_the_training() -> None:
    ((step, verdict),) = verdicts(curve((10, {}), (20, {"changed_share": 0.0})), HealthSpec())
    assert (step, verdict.ends_by, verdict.warnings) == (15, "frozen", ())
    assert verdict.message.startswith("Training no longer learns at step 15")


def test_a_warning_is_told_once_and_again_after_a_window_without_it() -> None:
    spec = HealthSpec(actions={"frozen": "warn"})
    frozen = {"changed_share": 0.0}
    warnings = verdicts(curve((10, {}), (20, frozen), (5, {}), (20, frozen), (30, {}), (20, frozen)), spec)
    assert [step for step, _ in warnings] == [15, 90]
    ((rule, message),) = warnings[0][1].warnings
    assert rule == "frozen"
    assert message.endswith("Training continues.")


def test_the_rule_that_stops_comes_before_one_that_rolls_back_and_a_warning_stays_one() -> None:
    found = [
        HealthFinding("truncated", 1, "a"),
        HealthFinding("frozen", 2, "b", "no change"),
        HealthFinding("kl", 3, "c"),
    ]
    verdict = Judge(HealthSpec(actions={"frozen": "stop"}), BATCH).verdict(found, 9)
    assert verdict.ends_by == "frozen"
    assert "since step 1 (frozen): b. Usual causes: a learning rate so low" in verdict.message
    assert ". Also (truncated): a. Usual causes: a limit below the length" in verdict.message
    ((rule, message),) = verdict.warnings
    assert (rule, message.partition(".")[0]) == ("kl", "Training goes wrong at step 9, since step 3 (kl): c")


# ---------------------------------------------------------------------------------------------------------------------
# Going on


@pytest.mark.parametrize("name", ["seeds-from-ranks", "learning-rate-5", "learning-rate-0.05"])
def test_a_run_that_goes_on_is_judged_as_if_it_had_never_stopped(name: str) -> None:
    """The state of a checkpoint, through JSON and back, at every step."""
    steps = recorded(name)
    spec = HealthSpec(min_completions=1024)
    straight = Judge(spec, QUICK)
    states = []
    for one in steps:
        straight.observe(**one)
        states.append(straight.state)
    for position in range(0, len(steps) - 1, 7):
        judge = Judge(spec, QUICK, HealthState.model_validate(states[position].model_dump()))
        found = [judge.observe(**one) for one in steps[position + 1 :]]
        assert judge.state == straight.state
        assert found[-1]
        assert not any(found[:-1])


def test_without_its_state_a_run_that_goes_on_is_judged_late() -> None:
    """Negative control: a window of steps is forgotten."""
    steps = recorded("learning-rate-5")
    found = [Judge(HealthSpec(min_completions=1024), QUICK).observe(**one) for one in steps[-10:]]
    assert not any(found)


# ---------------------------------------------------------------------------------------------------------------------
# On real ranks


@pytest.mark.training
@pytest.mark.end_to_end
def test_two_real_ranks_end_a_degenerate_run_together_and_leave_a_healthy_one(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "folder": str(tmp_path / "runs"),
        "names": ["seed 1", "seeds from ranks on one node", "weights that do not change"],
        "num_steps": 25,  # of which each after the 20th is judged by every rule
    }
    found = values(launch(make_runs, 2, tmp_path / "launch", **arguments))
    assert found[0] == found[1], "all ranks say the same"
    assert found[0]["seed 1"] == "done"
    same, frozen = found[0]["seeds from ranks on one node"], found[0]["weights that do not change"]
    assert same.startswith("DegenerateRl: Training no longer learns")
    assert "the seed of another one of their group on rank 1 (node1). " in same
    assert "since step 1 (frozen)" in frozen
    assert json.loads((tmp_path / "runs" / "seed-1.jsonl").read_text().splitlines()[-1])["step"] == 40 + 25
