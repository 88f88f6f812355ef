"""Runs with an environment on real processes: ranks with different numbers of turns, resume, other numbers of ranks."""

import signal
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import TrainingGroup, launch, make_context, training_group, values
from test_loop_online import shortened, spec_of
from test_loop_runs import Counting, Interrupting, final_state, interrupt, killed_for_real, metrics_of

from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import read_model
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.reports import Phase, SampleLine

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

REWARD = "rlhf_core.training.rewards:environment_reward"


def with_turns(
    name: str, num_steps: int = 2, environment: str = "Uneven", zero_stage: int = 0, **settings: Any
) -> dict[str, Any]:
    """Two steps of a warm start on digits, and some of an algorithm. Every second digit ends a turn."""
    spec = spec_of(name, num_steps, **settings)
    turns = {"environment": f"turn_tools:{environment}", "max_turns": 4, "max_turn_tokens": 4}
    rollout = {"max_new_tokens": 32, "stop_strings": list("02468"), "turns": turns}
    trainer = {**spec["trainer"], "zero_stage": zero_stage, "log_samples_every": 1}
    evaluate = {**spec["evaluate"], "scorer": REWARD, "every_num_steps": 4, "keep_samples": 64}
    return {**spec, "rollout": rollout, "reward": {"functions": [REWARD]}, "trainer": trainer, "evaluate": evaluate}


RUNS = {
    "grpo": with_turns("grpo", 4, num_epochs=2, num_minibatches=2, correction="sequence_truncate", kl_coefficient=0.1),
    "gspo": with_turns("gspo"),
    "ppo": with_turns("ppo", kl_coefficient=0.05),
    "dapo": with_turns("dapo", overlong_buffer=8, mask_truncated=False),
    "split": with_turns("grpo", zero_stage=3),
}
KILLED = RUNS["grpo"]


def every_scenario(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Runs of seconds, one after the other in one process group, and role evaluator on the first.

    One rank makes only the first step of the others, which is compared.
    """
    from rlhf_core.training.evaluation.run import run_evaluator

    with training_group(rank, num_ranks, folder, RUNS["grpo"]) as group:
        results: dict[str, Any] = {}
        for name, spec in RUNS.items():
            counting = Counting()
            spec = shortened(spec, 1) if num_ranks == 1 and name != "grpo" else spec
            results[name] = group.train(f"{num_ranks} {name}", spec, reporter=counting)
            results[f"{name} collectives"] = counting.collectives
        if num_ranks == 2:
            results["unseeded"] = interrupted(group)
    if num_ranks == 1:
        results["evaluated"] = str(run_evaluator(make_context(f"{folder}/1 grpo", RUNS["grpo"], rank, num_ranks)))
    return results


def interrupted(group: TrainingGroup) -> list[str]:
    """A run that is interrupted and resumed, whose environment draws from no seed, and the same run in one piece."""
    spec = with_turns("grpo", 4, "Unseeded")
    first = group.train("unseeded", spec, reporter=Interrupting(Phase.TRAIN, 5, interrupt))
    return [first, group.train("unseeded", spec, restart=1), group.train("unseeded, whole", spec)]


def resumed(rank: int, num_ranks: int, folder: str) -> str:
    """The killed run, as the agent starts it again."""
    with training_group(rank, num_ranks, folder, KILLED) as group:
        return group.train("killed", KILLED, restart=1)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return values(launch(every_scenario, 2, folder / "two", folder=str(folder)))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> list[dict[str, Any]]:
    return values(launch(every_scenario, 1, folder / "one", folder=str(folder)))


@pytest.mark.parametrize("name", RUNS)
def test_ranks_with_different_numbers_of_turns_go_through_the_same_collectives(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    assert [result[name] for result in two_ranks] == ["done", "done"]
    assert two_ranks[0][f"{name} collectives"] == two_ranks[1][f"{name} collectives"]


@pytest.mark.parametrize("name", RUNS)
def test_one_rank_samples_and_learns_the_same_as_two(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]], folder: Path, name: str
) -> None:
    """Sequences with holes give the same figures in any division over ranks and micro-batches."""
    one, two = metrics_of(folder, f"1 {name}")[3], metrics_of(folder, f"2 {name}")[3]
    assert one["rollout/completion_digest"] == two["rollout/completion_digest"]
    assert one["turns/observation_tokens"] == two["turns/observation_tokens"] > 1
    compared = [key for key in one if key.startswith(("train/", "policy/", "value/", "reward/", "turns/"))]
    for key in compared:
        if key != "reward/std":
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=2e-5), key


def test_metrics_and_samples_show_the_turns(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    line = metrics_of(folder, "2 grpo")[3]
    assert 1 < line["turns/per_rollout"] <= 4
    assert line["turns/calls"] > 0
    assert (line["turns/failed_share"], line["turns/lost_share"]) == (0, 0)
    ends = ("out_of_turns", "out_of_tokens", "lost")
    assert 0 <= sum(line[f"turns/{end}_share"] for end in ends) == line["rollout/truncated_share"] < 1
    assert line["rollout/train_gap"] < 1e-5, "the trainer sees the tokens that were sampled"
    assert line["reward/environment_reward"] == pytest.approx(line["reward/mean"])
    samples = list(read_models(RunDir(folder / "2 grpo").attempt(1).restart(0).samples, SampleLine))
    assert any("<observation>=" in sample.completion for sample in samples)
    assert "eval/greedy" in metrics_of(folder, "2 grpo")[4]


def test_evaluations_have_turns_too(one_rank: list[dict[str, Any]], folder: Path) -> None:
    """Before training by the trainer, after it by an evaluator; greedy and sampled."""
    assert one_rank[0]["evaluated"] == "done"
    for when in ("before", "after"):
        for name in ("greedy", "sampled"):
            report = read_model(RunDir(folder / "1 grpo").evaluation(when, name), EvaluationReport)
            assert report is not None
            assert report.metric == "environment_reward"
            assert any("<observation>=" in sample.completion for sample in report.samples), (when, name)


def test_a_killed_run_goes_on_bitwise(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    run: dict[str, Any] = {"run_dir": str(folder / "killed"), "spec": KILLED}
    ended = launch(killed_for_real, 2, folder / "launch-killed", **run)
    assert [rank.exit_code for rank in ended] == [1, -signal.SIGKILL]
    assert values(launch(resumed, 2, folder / "launch-again", folder=str(folder))) == ["done", "done"]
    assert metrics_of(folder, "killed") | metrics_of(folder, "killed", 1) == metrics_of(folder, "2 grpo")
    assert final_state(folder, "killed") == final_state(folder, "2 grpo")


def test_negative_control_an_environment_that_no_seed_reaches(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    assert two_ranks[0]["unseeded"] == ["InterruptedError: the test ends this worker here", "done", "done"]
    assert final_state(folder, "unseeded") != final_state(folder, "unseeded, whole")
