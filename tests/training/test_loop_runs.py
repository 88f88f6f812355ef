"""Whole runs on real processes: resume is exact, ranks act together, and the comparison catches what it should."""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from rank_launcher import (
    DATED_TEMPLATE,
    ONE_LAYER,
    TINY_MODEL,
    TrainingGroup,
    flip_last_bit,
    launch,
    make_context,
    of_one_rank,
    tiny_spec,
    training_group,
    values,
    whole_role,
)

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentEvent, MetricsLine, Phase, SampleLine, TrainerWarning
from rlhf_core.schemas.resources import JOB_END_VARIABLE
from rlhf_core.training.types import NullReporter

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]


class Interrupting(NullReporter):
    """Does something to the worker at one beat."""

    def __init__(self, phase: Phase, step: int, action: Callable[[], None]) -> None:
        self.at = (phase, step)
        self.action = action

    def beat(self, phase: Phase, step: int) -> None:
        if (phase, step) == self.at:
            self.action()


def kill_once_saved(run_dir: str, step: int) -> Callable[[], None]:
    """An action that waits for the checkpoint of ``step``, which is written in the background, and kills its process.

    Without the wait the run goes on from an older checkpoint whenever the disk is slower than the step.
    """

    def kill() -> None:
        complete = RunDir(Path(run_dir)).checkpoint(step).complete
        deadline = time.monotonic() + 60
        while not complete.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    return kill


class StopRequested(NullReporter):
    """Asks to stop from the reduction of one step on."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seen = 0

    def beat(self, phase: Phase, step: int) -> None:
        self.seen = step

    def request(self) -> Literal["", "stop"]:
        return "stop" if self.seen >= self.step else ""


class Counting(NullReporter):
    """Counts beats and collectives."""

    def __init__(self) -> None:
        self.beats: Counter[str] = Counter()
        self.collectives = 0

    def beat(self, phase: Phase, step: int) -> None:
        self.beats[f"{phase} {step}"] += 1

    def collective(self) -> AbstractContextManager[None]:
        self.collectives += 1
        return nullcontext()


STAGES = (0, 1, 2, 3)
"""Of ZeRO."""
WITHOUT_NOISE: dict[str, Any] = {
    "model": {"config": TINY_MODEL},
    "reward": {"functions": ["rank_launcher:share_right", "rlhf_core.training.rewards:exact_match"], "weights": [1, 2]},
    "grpo": {"advantage_scale": "batch", "loss_aggregation": "sequence_mean"},
}
"""Nothing of what is learned depends on which rank does what."""


def spec_of(**sections: Any) -> dict[str, Any]:
    """A run of a model of one layer, unless the sections say otherwise."""
    return tiny_spec(**{"model": {"config": ONE_LAYER}, **sections})


def interrupt() -> None:
    raise InterruptedError("the test ends this worker here")


def runs_of(group: TrainingGroup) -> dict[str, Any]:
    from rlhf_core.diagnosis.health.state import HealthState
    from rlhf_core.training.checkpoints import background_save
    from rlhf_core.training.trainers import run as run_module
    from rlhf_core.training.trainers.engine import Engine
    from rlhf_core.training.trainers.time_limit import ENDING_S

    rank, folder, copy = group.ranks.rank, group.folder, group.copy
    results: dict[str, Any] = {}

    def train(
        name: str, restart: int = 0, reporter: Any = None, damaged: frozenset[str] = frozenset(), **sections: Any
    ) -> str:
        return group.train(name, spec_of(**sections), restart, reporter, damaged=damaged)

    counting = Counting()
    results["straight"] = train("straight", reporter=counting)
    results["beats"] = counting.beats
    results["collectives"] = counting.collectives
    results["again"] = train("again")
    results["other seed"] = train("other-seed", seed=4)

    for name, phase, step in (("update", Phase.TRAIN, 5), ("rollout", Phase.ROLLOUT, 3), ("warm", Phase.TRAIN, 2)):
        results[f"killed in {name}"] = train(name, reporter=Interrupting(phase, step, interrupt))
        for control in ("optimizer", "random", "position", "health") if name == "update" else ():
            copy(name, f"without-{control}")
        results[f"resumed {name}"] = train(name, restart=1)

    with mock.patch.object(Engine, "load_state"):
        results["without optimizer"] = train("without-optimizer", restart=1)
    with mock.patch.object(run_module, "restore_random_state"):
        results["without random"] = train("without-random", restart=1)
    load = run_module.load_trainer_state
    forget: dict[str, Any] = {"position": 0}

    def load_without_position(*arguments: Any) -> Any:
        state = load(*arguments)
        return type(state)(state.progress.model_copy(update=forget), state.engine, state.random)

    with mock.patch.object(run_module, "load_trainer_state", load_without_position):
        results["without position"] = train("without-position", restart=1)
        forget = {"health": HealthState()}
        results["without health"] = train("without-health", restart=1)

    results["stop"] = train("stop", reporter=StopRequested(3) if rank == 0 else None)
    with mock.patch.dict(os.environ, {JOB_END_VARIABLE: f"{time.time() + ENDING_S:.0f}"}):
        results["out of time"] = train("stop", restart=1)
    results["after stop"] = train("stop", restart=2)
    results["stop at the end"] = train("stop-late", reporter=StopRequested(6))
    results["finished already"] = train("straight", restart=1)
    copy("again", "longer")
    results["longer"] = train("longer", restart=1, train={"num_steps": 6})
    results["straight longer"] = train("straight-longer", train={"num_steps": 6})

    copy("again", "damaged")
    group.damage(RunDir(Path(folder) / "damaged").checkpoint(6).model / "model.safetensors")
    results["damaged"] = train("damaged", restart=1)
    # As another node may see it for a while: to rank 1 nothing is there but the damaged one.
    late = mock.patch.object(RunDir, "saved_checkpoints", lambda run_dir: [run_dir.checkpoint(6)])
    with late if rank == 1 else nullcontext():
        results["after damage"] = train("damaged", restart=2, damaged=frozenset({"step-000006"}))

    def delete() -> None:
        (RunDir(Path(folder) / "deleted").attempt(1).restart(0).metrics).unlink(missing_ok=True)

    results["deleted"] = train("deleted", reporter=Interrupting(Phase.ROLLOUT, 5, delete) if rank == 0 else None)

    results["not finite"] = train("not-finite", train={"learning_rate": 1e30})

    copy("update", "full")
    write = background_save.write_files

    def full_on_rank_1(*arguments: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        write(*arguments)

    with mock.patch.object(background_save, "write_files", full_on_rank_1):
        results["full"] = train("full", restart=2, train={"num_steps": 8})
    results["odd batch"] = train("odd", grpo={"prompts_per_step": 3})
    results["evaluating"] = train("evaluating", evaluate={"every_num_steps": 4}, checkpoint={"keep_best": True})
    recompute = run_module.use_gradient_checkpointing
    with mock.patch.object(run_module, "use_gradient_checkpointing", wraps=recompute) as used:
        results["recomputing"] = train("recomputing", train={"gradient_checkpointing": True})
    results["recomputed loops"] = used.call_count
    results["penalised"] = train("penalised", grpo={"kl_coefficient": 0.5})
    results["without noise"] = train("without-noise", **WITHOUT_NOISE)
    beside = {**WITHOUT_NOISE, "reward": {**WITHOUT_NOISE["reward"], "timeout_s": 60}}
    results["rewards beside"] = train("rewards-beside", **beside)
    failing = {"functions": ["hostile_rewards:failing_on_rank_1"], "timeout_s": 60, "on_failure": "zero"}
    results["failing rewards"] = train("failing-rewards", reward=failing)
    differing = {"generator": "rank_launcher:rows_of_this_rank", "generator_args": {}}
    results["differing rows"] = train("differing-rows", data=differing)
    load_tokenizer = run_module.load_tokenizer

    def dated(path: Path) -> Any:
        tokenizer = load_tokenizer(path)
        tokenizer.chat_template = DATED_TEMPLATE
        return tokenizer

    with mock.patch.object(run_module, "load_tokenizer", dated):
        results["dated"] = train(
            "dated",
            data={"generator": "rank_launcher:conversations", "generator_args": {}},
            sft={"num_steps": 0},
            train={"num_steps": 1, "log_samples_every": 1},
        )
    runs_of_every_stage(group, results)
    return results


SUPERVISED: dict[str, Any] = {
    "model": {"config": TINY_MODEL},
    "data": {"generator": "rank_launcher:whole_conversations", "generator_args": {}, "messages_column": "messages"},
    "sft": {"num_steps": 0},
    "train": {"algorithm": "sft", "num_steps": 4},
}


def runs_of_every_stage(group: TrainingGroup, results: dict[str, Any]) -> None:
    """The run above under the other stages of ZeRO, supervised training under all; each whole, and its end once more
    from the last checkpoint but one.

    And one that a single rank is to go on with, under stage 1.
    """
    for stage in STAGES:
        for name, last, sections in ((f"stage-{stage}", 6, {}), (f"sft-{stage}", 4, SUPERVISED)):
            if name != "stage-1":
                spec = spec_of(**sections, trainer={"zero_stage": stage})
                results[name] = group.train(name, spec)
                group.rewind(name, f"{name}-again", last)
                results[f"{name}-again"] = group.train(f"{name}-again", spec, restart=1)
    for_one = spec_of(**WITHOUT_NOISE, trainer={"zero_stage": 3})
    results["for one rank"] = group.train("for-one", for_one, reporter=Interrupting(Phase.TRAIN, 5, interrupt))


def killed_for_real(rank: int, num_ranks: int, run_dir: str, spec: dict[str, Any]) -> str:
    """Rank 1 is killed with SIGKILL in the update of step 5."""
    from rlhf_core.training.trainers.run import run_trainer

    kill = Interrupting(Phase.TRAIN, 5, kill_once_saved(run_dir, 4)) if rank == 1 else None
    return str(run_trainer(make_context(run_dir, spec, rank, num_ranks, reporter=kill)))


def on_one_rank(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """One of the runs above, the rest of another, role evaluator on the first; and runs of two steps, made longer."""
    from rlhf_core.training.evaluation.run import run_evaluator

    spec = tiny_spec(**WITHOUT_NOISE)
    with training_group(rank, num_ranks, folder, spec) as group:
        results: dict[str, Any] = {
            "whole": group.train("one", spec),
            "rest": group.train("for-one", spec, restart=1),
            "other rows": resumed_with_other_rows(group),
            "another reference": resumed_with_another_reference(group),
        }
    return {**results, "evaluated": str(run_evaluator(make_context(f"{folder}/one", spec, rank, num_ranks)))}


def resumed_with_other_rows(group: TrainingGroup) -> list[str]:
    """A run of two steps, made longer: once after its rows have changed, once with its own."""
    data = {"generator": "rank_launcher:rows_of_this_rank", "generator_args": {}}
    results: list[str] = []
    for first, num_steps in ((0, 2), (1, 3), (0, 3)):
        os.environ["FIRST_ROW"] = str(first)
        spec = tiny_spec(data=data, sft={"num_steps": 0}, train={"algorithm": "sft", "num_steps": num_steps})
        results.append(group.train("other-rows", spec, restart=len(results)))
    return results


def resumed_with_another_reference(group: TrainingGroup) -> list[str]:
    """A run of two steps, made longer: once after a bit of its initial model has changed, once with its own."""
    results: list[str] = []
    for num_steps in (2, 3, 3):
        spec = tiny_spec(sft={"num_steps": 0}, train={"num_steps": num_steps})
        results.append(group.train("another-reference", spec, restart=len(results)))
        flip_last_bit(RunDir(Path(group.folder) / "another-reference").initial_model / "model.safetensors")
    return results


# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(results: list[dict[str, Any]], folder: Path) -> Any:
    return of_one_rank(on_one_rank, folder)


def metrics_of(folder: Path, name: str, restart: int = 0) -> dict[int, dict[str, float]]:
    """Metrics that depend on the spec alone, by step."""
    lines = read_models(RunDir(folder / name).attempt(1).restart(restart).metrics, MetricsLine)
    steps = [line.step for line in lines]
    assert len(steps) == len(set(steps)), f"a step is twice in the metrics of {name}"
    return {
        line.step: {key: value for key, value in line.metrics.items() if not key.startswith(("time/", "speed/"))}
        for line in lines
    }


def final_state(folder: Path, name: str, step: int = 6) -> dict[str, Any]:
    """Content of a checkpoint: files by checksum, states of the ranks by content (equal ones pickle differently)."""
    from rlhf_core.training.models.tensor_files import read_content

    checkpoint = RunDir(folder / name).checkpoint(step)
    manifest = checkpoint.manifest()
    assert manifest is not None, name
    content: dict[str, Any] = {}
    for path, found in manifest.files.items():
        is_state = path.startswith("trainer_state/rank-")
        content[path] = comparable(read_content(checkpoint.root / path)) if is_state else found.sha256
    assert sum(path.startswith("trainer_state/rank-") for path in content) == manifest.num_ranks
    return content


def assert_resumed_bitwise(folder: Path, name: str, last: int = 6) -> None:
    """Assert that two last steps made once more, and the checkpoint after them, are those of the straight run."""
    straight = metrics_of(folder, name)
    assert metrics_of(folder, f"{name}-again", restart=1) == {step: straight[step] for step in (last - 1, last)}
    assert final_state(folder, f"{name}-again", last) == final_state(folder, name, last)


def comparable(content: Any) -> Any:
    """The same with every tensor as its bytes."""
    if isinstance(content, dict):
        return {key: comparable(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [comparable(value) for value in content]
    return content.numpy().tobytes() if hasattr(content, "numpy") else content


@pytest.mark.parametrize(("name", "step"), [("update", 4), ("rollout", 2), ("warm", 0)])
def test_killed_and_resumed_is_the_same_as_straight(
    results: list[dict[str, Any]], folder: Path, name: str, step: int
) -> None:
    """Bitwise: every metric of every step, the weights, and all that the last checkpoint holds."""
    for result in results:
        assert result[f"killed in {name}"].startswith("InterruptedError")
        assert result[f"resumed {name}"] == "done"
    straight, before, after = (
        metrics_of(folder, "straight"),
        metrics_of(folder, name),
        metrics_of(folder, name, restart=1),
    )
    assert set(straight) == {1, 2, 3, 4, 5, 6}
    assert set(after) == set(range(step + 1, 7)), "it goes on from the last complete checkpoint"
    assert before | after == straight
    assert all(before[number] == after[number] for number in before.keys() & after.keys())
    assert final_state(folder, name) == final_state(folder, "straight")


@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_exact_in_every_stage_of_zero(results: list[dict[str, Any]], folder: Path, stage: int) -> None:
    """Bitwise, supervised and by GRPO; and every stage learns the same but for rounding."""
    runs = [(f"sft-{stage}", 4)] + ([(f"stage-{stage}", 6)] if stage != 1 else [])
    for name, last in runs:
        assert [result[f"{name}-again"] for result in results] == ["done", "done"]
        assert_resumed_bitwise(folder, name, last)
    for number, line in metrics_of(folder, f"sft-{stage}").items():
        assert line["train/loss"] == pytest.approx(metrics_of(folder, "sft-1")[number]["train/loss"], rel=1e-4)
    if stage != 1:
        for number in (1, 2, 3):
            line, other = metrics_of(folder, f"stage-{stage}")[number], metrics_of(folder, "straight")[number]
            assert line["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4), number
        first, straight = metrics_of(folder, f"stage-{stage}")[3], metrics_of(folder, "straight")[3]
        assert first["rollout/completion_digest"] == straight["rollout/completion_digest"]


@pytest.mark.parametrize("part", ["optimizer", "random", "position"])
def test_a_resume_that_forgets_something_is_caught(results: list[dict[str, Any]], folder: Path, part: str) -> None:
    """Negative control of the test above: it sees each part of the state."""
    assert [result[f"without {part}"] for result in results] == ["done", "done"]
    straight, resumed = metrics_of(folder, "straight"), metrics_of(folder, f"without-{part}", restart=1)
    assert set(resumed) == {5, 6}
    assert any(resumed[number] != straight[number] for number in resumed)
    assert final_state(folder, f"without-{part}") != final_state(folder, "straight")


def test_a_resume_that_forgets_what_the_judge_knew_is_caught(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["without health"] for result in results] == ["done", "done"]
    assert metrics_of(folder, "without-health", restart=1) == {
        step: metrics_of(folder, "straight")[step] for step in (5, 6)
    }
    assert final_state(folder, "without-health") != final_state(folder, "straight")


def test_the_same_seed_gives_the_same_run(results: list[dict[str, Any]], folder: Path) -> None:
    assert results[0]["again"] == "done"
    assert metrics_of(folder, "again") == metrics_of(folder, "straight")
    assert final_state(folder, "again") == final_state(folder, "straight")
    other = metrics_of(folder, "other-seed")
    assert other.keys() == metrics_of(folder, "straight").keys()
    assert all(other[step] != metrics_of(folder, "straight")[step] for step in other)


def test_every_row_is_used_once_before_any_is_used_again(results: list[dict[str, Any]], folder: Path) -> None:
    """32 of 40 rows in one pass; warm start and main algorithm share the order."""
    from rlhf_core.schemas.run import RunSpec
    from rlhf_core.training.data.loading import load_rows
    from rlhf_core.training.data.order import row_indices

    spec = RunSpec.model_validate(tiny_spec())
    rows = load_rows(spec, "train")
    used = [rows[index].uid for index in row_indices(len(rows), spec.seed, 0, 2 * 8 + 4 * 4)]
    assert len(set(used)) == 32
    lines = read_models(RunDir(folder / "straight").attempt(1).restart(0).samples, SampleLine)
    assert [line.step for line in lines] == [3] * 4 + [5] * 4
    assert [line.sample_index for line in lines] == [0, 1, 2, 3] * 2
    assert lines[0].prompt_uid == used[16]
    assert lines[4].prompt_uid == used[24]
    assert lines[4].weight_version == 4
    assert len({line.seed for line in lines}) == 8


def test_metrics_have_their_names(results: list[dict[str, Any]], folder: Path) -> None:
    lines = read_models(RunDir(folder / "straight").attempt(1).restart(0).metrics, MetricsLine)
    shared = {f"train/{name}" for name in ("loss", "grad_norm", "changed_share", "learning_rate", "num_tokens")}
    shared |= {"speed/tokens_per_s", "data/epochs"}
    times = {f"time/{name}_s" for name in ("train", "evaluate", "step")}
    times |= {f"time/{name}_s" for name in ("checkpoint", "checkpoint_wait", "checkpoint_write")}
    rollout = {
        "length_mean", "truncated_share", "distinct_share", "zero_std_groups",
        "entropy", "seed_digest", "completion_digest", "train_gap", "shared_share",
    }  # fmt: skip
    grpo = {"reward/noisy_reward", "policy/clip_share", "policy/kl"}
    grpo |= {f"reward/{name}" for name in ("mean", "std", "max", "min", "length_correlation", "length_slope")}
    assert [line.loop for line in lines] == ["sft"] * 2 + ["grpo"] * 4
    counts = {"data/num_rows", "data/num_overlong", "data/num_malformed"}
    assert set(lines[0].metrics) == shared | times | counts
    assert set(lines[1].metrics) == shared | times
    assert set(lines[2].metrics) == (
        shared
        | times
        | grpo
        | {f"rollout/{name}" for name in rollout}
        | {"time/rollout_s", "time/reward_s", "time/weight_sync_s"}
    )
    first = lines[2].metrics
    assert first["policy/kl"] == 0, "the reference is the policy at the start of the main algorithm"
    assert lines[5].metrics["policy/kl"] > 0
    assert first["rollout/train_gap"] < 1e-5
    assert 0 < first["rollout/entropy"] < math.log(128)
    assert lines[3].metrics["time/checkpoint_s"] == 0
    assert lines[4].metrics["time/checkpoint_s"] > 0, "written after the step before"
    assert sum(line.metrics["time/checkpoint_write_s"] for line in lines) > 0, "in the background"


def test_rewards_of_a_process_beside_the_rank_are_the_same(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["rewards beside"] for result in results] == ["done", "done"]
    assert metrics_of(folder, "rewards-beside") == metrics_of(folder, "without-noise")
    assert final_state(folder, "rewards-beside") == final_state(folder, "without-noise")


def test_a_reward_that_fails_on_one_rank_is_told_by_that_rank(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["failing rewards"] for result in results] == ["done", "done"]
    restart = RunDir(folder / "failing-rewards").attempt(1).restart(0)
    (warning,) = [one for path in restart.all_warnings() for one in read_models(path, TrainerWarning)]
    assert restart.all_warnings() == [restart.warnings_of(1)]
    assert (warning.failure_kind, warning.step) == (FailureKind.REWARD_FUNCTION, 3)
    assert warning.message.startswith("On rank 1, reward function failing_on_rank_1 returned nan for completion 0 (")
    lines = read_models(restart.metrics, MetricsLine)
    assert [line.metrics.get("reward/failed_share") for line in lines] == [None, None, *[1 / 16] * 4]


def test_checkpoints_are_where_they_should_be(results: list[dict[str, Any]], folder: Path) -> None:
    found = {checkpoint.step: checkpoint.manifest() for checkpoint in RunDir(folder / "straight").checkpoints()}
    assert [(step, m.loop, m.loop_finished) for step, m in found.items() if m is not None] == [
        (2, "sft", True),
        (4, "grpo", False),
        (6, "grpo", True),
    ]


def test_a_template_with_a_date_writes_that_of_the_request(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["dated"] for result in results] == ["done", "done"]
    run_dir = RunDir(folder / "dated")
    report = EvaluationReport.model_validate_json(run_dir.evaluation("before", "greedy").read_bytes())
    sampled = read_models(run_dir.attempt(1).restart(0).samples, SampleLine)
    prompts = [*(sample.prompt for sample in report.samples), *(sample.prompt for sample in sampled)]
    assert {prompt[:12] for prompt in prompts} == {"01 Jan 2026|"}, "which is when make_context says it was requested"


def test_the_evaluation_before_is_made_once(results: list[dict[str, Any]], folder: Path) -> None:
    reports = {}
    for name in ("straight", "rollout"):
        for how in ("greedy", "sampled"):
            path = RunDir(folder / name).evaluation("before", how)
            reports[name, how] = EvaluationReport.model_validate_json(path.read_bytes())
    greedy, sampled = reports["straight", "greedy"], reports["straight", "sampled"]
    assert greedy.checkpoint_step == sampled.checkpoint_step == 2
    assert (greedy.num_prompts, greedy.num_samples, len(greedy.samples)) == (10, 10, 3)
    assert (sampled.num_prompts, sampled.num_samples, len(sampled.samples)) == (10, 20, 3)
    assert [sample.sample_index for sample in sampled.samples] == [0, 1, 0]
    assert greedy.metric == "exact_match"
    for how in ("greedy", "sampled"):
        assert reports["rollout", how].samples == reports["straight", how].samples
    killed_later = RunDir(folder / "update").evaluation("before", "greedy")
    report = EvaluationReport.model_validate_json(killed_later.read_bytes())
    assert report.checkpoint_step == 2


def test_save_and_end_leaves_the_rest_to_later(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["stop"] for result in results] == ["stopped_early"] * 2
    assert set(metrics_of(folder, "stop")) == {1, 2, 3}
    assert [result["out of time"] for result in results] == ["stopped_early"] * 2
    assert set(metrics_of(folder, "stop", restart=1)) == {4}, "another step would not have fitted into the time limit"
    assert [result["after stop"] for result in results] == ["done", "done"]
    made = [metrics_of(folder, "stop", restart=restart) for restart in range(3)]
    assert made[0] | made[1] | made[2] == metrics_of(folder, "straight")
    assert final_state(folder, "stop") == final_state(folder, "straight")
    assert [result["stop at the end"] for result in results] == ["done", "done"], "nothing was left to stop"


def test_a_finished_run_has_nothing_left_to_do(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["finished already"] for result in results] == ["done", "done"]
    assert metrics_of(folder, "straight", restart=1) == {}


def test_a_run_can_be_made_longer(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["longer"] for result in results] == ["done", "done"]
    assert metrics_of(folder, "longer") | metrics_of(folder, "longer", restart=1) == metrics_of(
        folder, "straight-longer"
    )
    assert final_state(folder, "longer", 8) == final_state(folder, "straight-longer", 8)


def test_a_loss_that_is_not_finite_ends_all_ranks_after_it_was_written(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for result in results:
        assert result["not finite"].startswith("NonFiniteLoss: train/")
        assert " at step 4;" in result["not finite"]
    lines = metrics_of(folder, "not-finite")
    assert not all(math.isfinite(lines[4][name]) for name in ("train/loss", "train/grad_norm"))
    assert [checkpoint.step for checkpoint in RunDir(folder / "not-finite").checkpoints()] == [2]


def test_a_disk_that_is_full_for_one_rank_is_full_for_all(results: list[dict[str, Any]], folder: Path) -> None:
    for result in results:
        assert result["full"].startswith("DiskFull: the disk became full while checkpoint 8 was written")
        assert "rank 1: OSError: [Errno 28] No space left on device" in result["full"]
    run_dir = RunDir(folder / "full")
    assert max(metrics_of(folder, "full", restart=2)) in (9, 10), "at the next step, or with the next checkpoint"
    assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == [2, 4, 6]
    for checkpoint in run_dir.checkpoints():
        checkpoint.verify()
    assert {path.name[0] for path in run_dir.checkpoints_dir.iterdir()} == {"s"}, "no partial folder is left"


def test_all_ranks_go_on_from_the_checkpoint_before_a_damaged_one(results: list[dict[str, Any]], folder: Path) -> None:
    """One flipped byte: no rank begins. Then all take the same older one, and come to the same numbers bit for bit."""
    for result in results:
        assert result["damaged"].startswith("CheckpointCorrupt: checkpoint ")
        assert "step-000006 is damaged: model/model.safetensors: found" in result["damaged"]
        assert result["after damage"] == "done"
    after = metrics_of(folder, "damaged", restart=2)
    assert set(after) == {5, 6}
    assert after == {step: metrics_of(folder, "straight")[step] for step in after}
    assert final_state(folder, "damaged") == final_state(folder, "straight")


def test_metrics_that_are_deleted_meanwhile_are_there_at_the_end(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["deleted"] for result in results] == ["done", "done"]
    assert metrics_of(folder, "deleted") == metrics_of(folder, "straight")
    restart = RunDir(folder / "deleted").attempt(1).restart(0)
    events = read_models(restart.worker_events("trainer", "here", 0), AgentEvent)
    assert [event.kind for event in events] == ["file"] * len(events)
    assert events[0].message.startswith("metrics.jsonl was deleted during writing: its ")


def test_a_batch_that_does_not_divide_is_refused(results: list[dict[str, Any]]) -> None:
    assert all("BadConfig: found 3 rows per step for 2 ranks" in result["odd batch"] for result in results)


def test_ranks_with_different_rows_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["differing rows"].startswith(
            "BadData: rank_launcher:rows_of_this_rank: rank 1 has loaded other rows than rank 0"
        )


def test_a_run_whose_rows_have_changed_is_not_resumed(one_rank: dict[str, Any]) -> None:
    begun, changed, again = one_rank["other rows"]
    assert (begun, again) == ("done", "done")
    assert changed.startswith("ResumeMismatch: the training rows of rank_launcher:rows_of_this_rank are not those that")
    assert "step-000002 was trained with" in changed


def test_a_run_whose_reference_has_changed_is_not_resumed(one_rank: dict[str, Any]) -> None:
    """Its divergence would be from other weights than before, without a sign of it in any metric."""
    begun, changed, again = one_rank["another reference"]
    assert (begun, again) == ("done", "done")
    assert changed.startswith("ResumeMismatch: ")
    assert "initial_model: found other weights than those that step-000002 was trained with" in changed


def test_supervised_training_can_be_the_main_algorithm(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["sft-1"] for result in results] == ["done", "done"]
    lines = metrics_of(folder, "sft-1").values()
    losses = [line["train/loss"] for line in lines]
    assert len(losses) == 4
    answers = 2 * len(("3", "<|im_end|>", "\n"))
    assert {line["train/num_tokens"] for line in lines} == {8 * answers}, "questions are not learned"
    assert losses[-1] < losses[0] - 0.1
    report = RunDir(folder / "sft-1").evaluation("before", "greedy").read_text()
    assert EvaluationReport.model_validate_json(report).checkpoint_step == 0
    loss = EvaluationReport.model_validate_json(RunDir(folder / "sft-1").evaluation("before", "loss").read_text())
    assert loss.value == pytest.approx(losses[0], rel=0.05), "held-out rows are as hard as others before training"


def test_evaluation_during_training_is_a_metric_and_changes_nothing(
    results: list[dict[str, Any]], folder: Path
) -> None:
    lines = metrics_of(folder, "evaluating")
    measured = {step: line.pop("eval/greedy") for step, line in lines.items() if "eval/greedy" in line}
    assert set(measured) == {4, 6}, "the last step too, because the best one is wanted"
    manifest = RunDir(folder / "evaluating").checkpoint(6).manifest()
    assert manifest is not None
    assert manifest.best is not None
    best = 4 if measured[4] > measured[6] else 6
    assert (manifest.best.step, manifest.best.value) == (best, measured[best])
    assert all(0 <= value <= 1 for value in measured.values())
    assert lines == metrics_of(folder, "straight")


def test_all_ranks_beat_in_every_phase_and_count_the_same_collectives(results: list[dict[str, Any]]) -> None:
    assert results[0]["collectives"] == results[1]["collectives"] > 0
    for result in results:
        beats = result["beats"]
        assert beats["rollout 3"] >= 1 + 4, "one for every token position"
        assert beats["reward 3"] >= 2
        assert beats["train 3"] >= 2, "one for every micro-batch"
        assert beats["checkpoint 4"] >= 2, "one for every file"
        assert beats["evaluate 2"] >= 2
        assert beats["setup 0"] >= 2


# ---------------------------------------------------------------------------------------------------------------------
# With processes of their own


def test_a_rank_killed_for_real_and_the_run_resumed(results: list[dict[str, Any]], folder: Path) -> None:
    """With split weights; with whole ones, ``test_loop_online.py`` does the same."""
    run: dict[str, Any] = {"run_dir": str(folder / "killed"), "spec": spec_of(trainer={"zero_stage": 3})}
    ended = launch(killed_for_real, 2, folder / "killed-launch", **run)
    assert ended[1].exit_code == -signal.SIGKILL
    assert ended[0].exit_code == 1, "the other rank finds its peer gone"
    assert set(metrics_of(folder, "killed")) == {1, 2, 3, 4}
    assert values(launch(whole_role, 2, folder / "killed-resumed", restart=1, **run)) == ["done", "done"]
    assert metrics_of(folder, "killed") | metrics_of(folder, "killed", restart=1) == metrics_of(folder, "stage-3")
    assert final_state(folder, "killed") == final_state(folder, "stage-3")


def test_one_rank_against_two(one_rank: dict[str, Any], folder: Path) -> None:
    """The same seeds at every step, completions at the first step of GRPO, gradients but for rounding."""
    assert one_rank["whole"] == "done"
    one, two = metrics_of(folder, "one"), metrics_of(folder, "without-noise")
    assert set(one) == set(two)
    for step in (3, 4, 5, 6):
        assert one[step]["rollout/seed_digest"] == two[step]["rollout/seed_digest"]
    assert len({line["rollout/seed_digest"] for step, line in one.items() if step > 2}) == 4
    assert one[3]["rollout/completion_digest"] == two[3]["rollout/completion_digest"]
    for name in ("train/loss", "train/grad_norm", "train/num_tokens"):
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-6)


def test_group_and_batch_statistics_span_the_ranks(one_rank: dict[str, Any], folder: Path) -> None:
    """Advantages scaled by the standard deviation of the whole batch, loss averaged over all sequences of the step."""
    one, two = metrics_of(folder, "one"), metrics_of(folder, "without-noise")
    assert one[3]["reward/std"] > 0
    for name, value in one[3].items():
        assert two[3][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    for line in one.values():
        if "reward/mean" in line:
            assert line["reward/mean"] == pytest.approx(line["reward/share_right"] + 2 * line["reward/exact_match"])


def test_the_evaluator_measures_the_last_checkpoint(one_rank: dict[str, Any], folder: Path) -> None:
    assert one_rank["evaluated"] == "done"
    for how in ("greedy", "sampled"):
        path = RunDir(folder / "one").evaluation("after", how)
        report = EvaluationReport.model_validate_json(path.read_bytes())
        assert (report.when, report.name, report.checkpoint_step) == ("after", how, 6)
        assert report.ci_low <= report.value <= report.ci_high


def test_one_rank_goes_on_with_what_two_began(
    one_rank: dict[str, Any], results: list[dict[str, Any]], folder: Path
) -> None:
    """Checkpoint of two ranks under stage 3, the rest on one under stage 1: the same losses but for rounding."""
    assert one_rank["rest"] == "done"
    assert all(result["for one rank"].startswith("InterruptedError") for result in results)
    began, rest, straight = (
        metrics_of(folder, "for-one"),
        metrics_of(folder, "for-one", restart=1),
        metrics_of(folder, "without-noise"),
    )
    assert (set(began), set(rest)) == ({1, 2, 3, 4}, {5, 6})
    for number, line in (began | rest).items():
        for name in ("train/loss", "train/grad_norm", "train/num_tokens"):
            assert line[name] == pytest.approx(straight[number][name], rel=2e-3, abs=2e-5), (number, name)
    manifest = RunDir(folder / "for-one").checkpoint(6).manifest()
    assert manifest is not None
    assert manifest.num_ranks == 1


def test_recomputing_activations_changes_nothing(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["recomputed loops"] for result in results] == [2, 2]
    assert metrics_of(folder, "recomputing") == metrics_of(folder, "straight")


def test_a_penalty_on_divergence_acts(results: list[dict[str, Any]], folder: Path) -> None:
    free, penalised = metrics_of(folder, "straight"), metrics_of(folder, "penalised")
    assert penalised[3]["train/loss"] == pytest.approx(free[3]["train/loss"], abs=1e-6), "no divergence yet"
    assert penalised[4] != free[4]
    assert penalised[6]["policy/kl"] < free[6]["policy/kl"]
