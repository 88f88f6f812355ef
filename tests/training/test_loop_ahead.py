"""Completions that are sampled one step ahead or several, by real engines beside two ranks: which weights made them,
what a checkpoint keeps of them, and what is left when engines are lost."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from core_models import QWEN, char_tokenizer, tiny_model, tokens_of
from engine_groups import EngineGroup, engine_group, no_beat
from process_tools import until
from rank_launcher import launch, make_context, tiny_spec, values
from test_loop_online import spec_of
from test_loop_runs import Interrupting, final_state, interrupt, metrics_of

from rlhf_core.errors import EnginesLost, ToolFailed, WorkerError
from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import Phase, SampleLine
from rlhf_core.schemas.rollouts import RolloutSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import PromptList, Sampling
from rlhf_core.training.rollouts.seeds import sample_seed
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.trainers import saving
from rlhf_core.training.trainers.in_flight import InFlight, kept_completions, stored_completions
from rlhf_core.training.trainers.sampling import Prompt, PromptBatch, StepSampler
from rlhf_core.training.types import Completion, Episode, ModelTurn, Row

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

CONFIG = {**QWEN, "num_hidden_layers": 1}
PROMPTS = [[20 + index, 30, 40] for index in range(8)]
STEPS = range(3, 7)
"""Of the loop that samples; two of a warm start come before."""


def ahead(
    algorithm: str = "grpo", max_staleness: int = 1, learning_rate: float = 3e-3, **settings: Any
) -> dict[str, Any]:
    """A run that is saved after steps 2, 4 and 6."""
    spec = spec_of(algorithm, 4, **{"correction": "token_truncate", **settings})
    spec["loops"]["main"]["optimizer"]["learning_rate"] = learning_rate
    # A prompt at a time: what is sampled together differs by when it comes, and rounds differently.
    rollout = {"engines": 2, "max_new_tokens": 5, "max_staleness": max_staleness, "batch_size": 4}
    spec |= {"model": {**spec["model"], "config": CONFIG}, "rollout": rollout}
    spec["reward"] = {"functions": ["test_loop_ahead:by_text"], "timeout_s": 0}
    return {**spec, "trainer": {"log_samples_every": 1}}


def by_text(*, completions: list[str], **columns: Any) -> list[float]:
    """A reward that no group has throughout: every step changes the weights."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def several_turns(**rollout: Any) -> dict[str, Any]:
    """A run whose environment answers a number of turns that follows from the seed. Every second digit ends a turn."""
    spec = ahead()
    turns = {"environment": "turn_tools:Uneven", "max_turns": 4, "max_turn_tokens": 4}
    sampled = {"max_new_tokens": 32, "stop_strings": list("02468"), "batch_size": 1, "turns": turns}
    return {**spec, "rollout": {**spec["rollout"], **sampled, **rollout}}


RUNS: dict[str, dict[str, Any]] = {
    "ahead": ahead(),
    "in step": ahead(max_staleness=0),
    "dynamic": ahead("dapo", max_sampling_rounds=3),
    "split": {**ahead(), "trainer": {**ahead()["trainer"], "zero_stage": 3}},
    "turns": several_turns(),
    "turns, in step": several_turns(max_staleness=0),
    "turns, in rounds": several_turns(max_staleness=0, engines=0),
    "evaluated": {**several_turns(), "evaluate": {**ahead()["evaluate"], "every_num_steps": 1}},
    "steps ahead": {**several_turns(max_staleness=2), "evaluate": {**ahead()["evaluate"], "every_num_steps": 1}},
    "split, steps ahead": {**ahead(max_staleness=3), "trainer": {**ahead()["trainer"], "zero_stage": 3}},
    "still": ahead(learning_rate=1e-30),
    "still, in step": ahead(learning_rate=1e-30, max_staleness=0),
    "still, steps ahead": ahead(learning_rate=1e-30, max_staleness=2),
}


def every_scenario(rank: int, num_ranks: int, folder: str, engines: str) -> dict[str, str]:
    """Runs of seconds that share the engines, one after the other in one process group."""
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.trainers import sampling
    from rlhf_core.training.trainers.run import train_run

    ranks = init_process_group(make_context(folder, tiny_spec(), rank, num_ranks))
    results: dict[str, str] = {}
    starts = iter(range(1, 100))

    def train(name: str, spec: dict[str, Any], reporter: Any = None) -> None:
        """One start of a run, with a number of its own: engines tell starts by it."""
        if ranks.is_first:
            shutil.copytree(engines, RunDir(Path(folder) / name).attempt(1).engines, dirs_exist_ok=True)
        ranks.barrier()
        context = make_context(f"{folder}/{name}", spec, rank, num_ranks, next(starts), reporter)
        try:
            result = str(train_run(context, dataclasses.replace(ranks, reporter=context.reporter)))
        except InterruptedError as error:
            result = str(error)
        results[f"{name} {context.restart}"] = result
        ranks.barrier()

    for name, spec in RUNS.items():
        train(name, spec)
    for name in ("ahead", "dynamic", "turns", "steps ahead"):
        train(f"{name}, killed", RUNS[name], Interrupting(Phase.TRAIN, 5, interrupt))
        if ranks.is_first and name == "ahead":
            shutil.copytree(f"{folder}/ahead, killed", f"{folder}/ahead, forgetful")
            shutil.copytree(f"{folder}/ahead, killed", f"{folder}/ahead, too old")
        ranks.barrier()
        train(f"{name}, killed", RUNS[name])
    with mock.patch.object(sampling, "kept_completions", return_value={}):
        train("ahead, forgetful", RUNS["ahead"])
    with mock.patch.object(sampling, "kept_completions", of_older_weights):
        train("ahead, too old", RUNS["ahead"])
    leave_process_group(ranks)
    return results


def of_older_weights(stored: Any) -> Any:
    """Completions in flight, as if another step lay between."""
    return {
        step: InFlight(
            found.position,
            {
                uid: [dataclasses.replace(one, weight_version=one.weight_version - 1) for one in group]
                for uid, group in found.made.items()
            },
        )
        for step, found in kept_completions(stored).items()
    }


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineGroup]:
    with engine_group(tmp_path_factory.mktemp("engines"), 2, CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def results(folder: Path, engines: EngineGroup) -> list[dict[str, str]]:
    until(lambda: all(engines.address(rank) for rank in range(engines.num)))
    addresses = str(RunDir(engines.root).attempt(1).engines)
    return values(launch(every_scenario, 2, folder / "launch", folder=str(folder), engines=addresses))


def metrics(folder: Path, name: str) -> dict[int, dict[str, float]]:
    """Metrics of all starts of a run, by step."""
    restarts = sorted((RunDir(folder / name).attempt(1).root / "restarts").iterdir())
    return {step: found for start in restarts for step, found in metrics_of(folder, name, int(start.name)).items()}


def versions(folder: Path, name: str) -> dict[int, set[int]]:
    """Weights that logged completions were sampled with, by step."""
    found: dict[int, set[int]] = {}
    for path in sorted(RunDir(folder / name).attempt(1).root.rglob("samples.jsonl")):
        for line in read_models(path, SampleLine):
            found.setdefault(line.step, set()).add(line.weight_version)
    return found


def test_every_run_ends(results: list[dict[str, str]]) -> None:
    for name, result in results[0].items():
        expected = "the test ends this worker here" if name in FIRST_STARTS else "done"
        assert result == expected, name


FIRST_STARTS = ("ahead, killed 14", "dynamic, killed 16", "turns, killed 18", "steps ahead, killed 20")


@pytest.mark.parametrize("name", ["ahead", "dynamic", "split", "turns", "evaluated"])
def test_completions_are_of_the_step_before(results: list[dict[str, str]], folder: Path, name: str) -> None:
    """But those of the first step, which nothing trained before; and of later rounds of a step, which are sampled when
    it is known that they are needed. With the control, in step."""
    found, control = versions(folder, name), versions(folder, "in step")
    for step in STEPS:
        assert min(found[step]) == max(step - 2, 2)
        assert control[step] == {step - 1}
        staleness = metrics(folder, name)[step]["rollout/staleness"]
        assert staleness == float(step > 3) if name != "dynamic" else staleness <= 1
    assert "rollout/staleness" not in metrics(folder, "in step")[6]


@pytest.mark.parametrize(("name", "bound"), [("steps ahead", 2), ("split, steps ahead", 3), ("steps ahead, killed", 2)])
def test_completions_are_begun_some_steps_before(
    results: list[dict[str, str]], folder: Path, name: str, bound: int
) -> None:
    """With the same prompts and seeds as in step. Each step sends out those of another one, the first step those of
    several; of several turns, a rollout is as old as its first turn, which may be sampled later."""
    control = metrics(folder, "turns, in step" if name.startswith("steps") else "in step")
    for step in STEPS:
        found = metrics(folder, name)[step]
        assert found["rollout/seed_digest"] == control[step]["rollout/seed_digest"]
        oldest = min(step - STEPS[0], bound)
        if name.startswith("steps"):
            assert found["rollout/staleness"] <= oldest
        else:
            assert found["rollout/staleness"] == oldest
        assert min(versions(folder, name)[step]) >= step - 1 - oldest


def test_what_the_policy_has_changed_since_is_weighed(results: list[dict[str, str]], folder: Path) -> None:
    """The weight of the correction is 1 where completions are of the policy that is trained, and is not where they are
    a step behind: what the loss would leave out without it. The rule that compares engine and trainer is not given
    what the update has changed."""
    found, control = metrics(folder, "ahead"), metrics(folder, "in step")
    assert all(control[step]["policy/mismatch_weight"] == pytest.approx(1, abs=1e-5) for step in STEPS)
    assert found[3]["policy/mismatch_weight"] == pytest.approx(1, abs=1e-5)
    assert all(abs(found[step]["policy/mismatch_weight"] - 1) > 1e-4 for step in STEPS[1:])
    assert all(found[step]["rollout/policy_gap"] > 1e-3 for step in STEPS[1:])
    assert "rollout/train_gap" not in found[6]
    assert control[6]["rollout/train_gap"] < 1e-5


def test_with_weights_that_stand_still_it_is_the_same(results: list[dict[str, str]], folder: Path) -> None:
    """The same prompts, seeds and completions as in step; with the control, weights that move."""
    digests = {name: [metrics(folder, name)[step]["rollout/completion_digest"] for step in STEPS] for name in RUNS}
    assert digests["still"] == digests["still, in step"] == digests["still, steps ahead"]
    assert digests["ahead"][0] == digests["in step"][0]
    assert digests["ahead"][1:] != digests["in step"][1:]


def test_turns_that_go_on_by_themselves_are_those_of_rounds(results: list[dict[str, str]], folder: Path) -> None:
    """In a whole run with engines of the group, whose control is one that samples ahead."""
    names = ("turns, in step", "turns, in rounds", "turns")
    found = [[metrics(folder, name)[step]["rollout/completion_digest"] for step in STEPS] for name in names]
    assert found[0] == found[1] != found[2]
    line = metrics(folder, "turns")[6]
    assert line["turns/per_rollout"] > 1.5
    assert (line["turns/lost_share"], line["turns/failed_share"]) == (0, 0)


@pytest.mark.parametrize("name", ["ahead", "dynamic", "turns"])
def test_a_killed_run_trains_on_the_same_completions(results: list[dict[str, str]], folder: Path, name: str) -> None:
    """Completions in flight at the checkpoint are trained on once, with the weights that they were sampled with: steps
    and last checkpoint are bitwise those of the run that was not killed."""
    killed = metrics(folder, f"{name}, killed")
    assert killed == metrics(folder, name)
    assert final_state(folder, f"{name}, killed") == final_state(folder, name)


def test_a_resume_that_forgets_what_was_in_flight_is_caught(results: list[dict[str, str]], folder: Path) -> None:
    """It samples the same prompts with newer weights."""
    forgetful, straight = metrics(folder, "ahead, forgetful"), metrics(folder, "ahead")
    assert forgetful[5]["rollout/seed_digest"] == straight[5]["rollout/seed_digest"]
    assert forgetful[5]["rollout/staleness"] == 0
    assert forgetful[5]["rollout/completion_digest"] != straight[5]["rollout/completion_digest"]


def test_completions_that_are_too_old_are_sampled_again(results: list[dict[str, str]], folder: Path) -> None:
    """The same prompts, with the weights of the step; with the control, those that are not too old."""
    assert metrics(folder, "ahead, too old")[5] == metrics(folder, "ahead, forgetful")[5]
    assert metrics(folder, "ahead, killed")[5]["rollout/staleness"] == 1


@pytest.mark.parametrize("lost", [EnginesLost("no rollout engine has served"), ToolFailed("call ended its process")])
def test_completions_are_saved_though_the_rest_is_lost(lost: WorkerError) -> None:
    """Otherwise a run would lose the steps since the checkpoint before."""
    made = Completion([1, 2], "text", True, [-1.0, -2.0], weight_version=3)
    training = mock.Mock(**{"spec.rollout": RolloutSpec(max_staleness=1)})
    loop = mock.Mock(**{"algorithm.sampling_rounds": 1})
    training.rollouts.continuous.wait.side_effect = lost
    sampler = StepSampler(training, loop, mock.Mock())
    prompts = [Prompt(Row(uid, "", "", "", {}), [1], [1]) for uid in "ab"]
    sampler._begun.append((PromptBatch(5, prompts, 8), mock.Mock(made={1: [made]})))
    assert kept_completions(sampler.in_flight(False)) == {5: InFlight(8, {"b": [made]})}
    with pytest.raises(type(lost)):
        sampler.sample(mock.MagicMock(number=5))


class Filling(list[Prompt]):
    """Prompts, of which another one is completed whenever one is looked at, until all are."""

    def __init__(self, source: PromptList) -> None:
        super().__init__(Prompt(Row(str(index), "", "", "", {}), [1], [1]) for index in range(source.num_prompts))
        self.source = source

    def __iter__(self) -> Iterator[Prompt]:
        for prompt in super().__iter__():
            if len(self.source.made) < len(self):
                self.source.answer(len(self.source.made), [])
            yield prompt


def test_completions_may_arrive_while_those_so_far_are_saved() -> None:
    """A checkpoint does not wait for the thread that receives them, if they span weights."""
    source = PromptList([[1]] * 4, [[1]] * 4, Sampling(1, 1.0, 1))
    prompts = Filling(source)
    for index in range(2):
        source.answer(index, [])
    assert PromptBatch(5, prompts, 8).made(source.made) == {"0": [], "1": []}
    assert len(source.made) == 4


class Order:
    """Rows of a run, as positions, over its starts."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.steps_done = 0
        self.taken: list[int] = []

    def take_rows(self, count: int) -> tuple[list[Row], list[list[int]]]:
        """Take the next rows."""
        numbers = list(range(self.position, self.position + count))
        self.position += count
        self.taken += numbers
        return [Row(str(number), "", "", "", {}) for number in numbers], [[number] for number in numbers]


def sampled_steps(order: Order, steps: range, saved: list[dict[str, Any]], *, rounds: int) -> StepSampler:
    """Sample some steps of ten, two rows and some rounds each, with prompts of two further steps in flight."""
    made = Completion([1], "", True, [0.0])
    rollout = RolloutSpec(max_staleness=2)
    training = mock.MagicMock(**{"spec.rollout": rollout, "spec.seed": 1, "take_rows": order.take_rows})
    type(training).position = mock.PropertyMock(
        side_effect=lambda *value: setattr(order, "position", *value) if value else order.position
    )
    training.evaluator.sample.side_effect = lambda rows, *_: [[made] for _ in rows]
    training.evaluator.source.side_effect = lambda rows, *_: mock.Mock(results=lambda: [[made] for _ in rows], made={})
    training.scorer.score.side_effect = lambda rows, *_: mock.Mock(total=[0.0] * len(rows), warnings=[])
    training.ranks.rank, training.ranks.gather_numbers = 0, lambda numbers: [numbers]
    loop = mock.Mock(last_step=10, **{"algorithm.sampling_rounds": rounds, "algorithm.rows_per_step": 2})
    loop.algorithm.group = 1
    sampler = StepSampler(training, loop, mock.Mock(), saved)
    with mock.patch("rlhf_core.training.trainers.sampling._joined"):
        for number in steps:
            sampler.sample(mock.MagicMock(number=number))
    return sampler


@pytest.mark.parametrize("rounds", [1, 3])
def test_every_row_is_taken_once_however_often_a_run_is_resumed(rounds: int) -> None:
    """Also with further rounds of a step, whose rows are taken between those of later steps. Control: without the
    positions in the checkpoint, rows of a step that is over are taken again."""
    whole = Order()
    sampled_steps(whole, range(1, 11), [], rounds=rounds)
    assert whole.taken == list(range(20 * rounds))

    first = Order()
    stopped = sampled_steps(first, range(1, 5), [], rounds=rounds)
    in_flight = stopped.in_flight(False)
    assert [part["step"] for part in in_flight] == [5, 6]
    done = set(first.taken) - {row for part in in_flight for row in (part["position"], part["position"] + 1)}
    for saved in (in_flight, []):
        second = Order(stopped.position)
        sampled_steps(second, range(5, 11), saved, rounds=rounds)
        is_whole = sorted([*done, *second.taken]) == whole.taken
        assert is_whole == (bool(saved) or rounds == 1)


def test_completions_are_restored_as_they_were() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"one": [1]}}}
    messages: Any = ({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "\u00fc"})
    turns = (ModelTurn("a", "o"), ModelTurn("b"))
    episode = Episode(turns, (True, False, True), (8, 9), messages, "turns", 1, 1, 0.5)
    made = {
        "a": [Completion([1, 2], "\u00fc\ud83d\ude00", True, [-1.0, -0.1], 3), Completion([], "", False, [], 2)],
        "b": [],
        "c": [Completion([3], "half a pair \udc80", False, [-2.5], 3)],
        "d": [Completion([4, 5, 6], "of turns", True, [-1.0, -3.0], 3, episode), Completion([7], "", True, [-1.0], 3)],
    }
    assert kept_completions([stored_completions(5, InFlight(8, made))]) == {5: InFlight(8, made)}


def test_the_wait_for_completions_is_part_of_the_time_of_a_checkpoint(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = mock.Mock(**{"monotonic.return_value": 10.0})
    monkeypatch.setattr(saving, "time", clock)
    monkeypatch.setattr(saving, "CheckpointWriter", mock.Mock())
    context = make_context(str(tmp_path), tiny_spec(), 0, 1)
    saver = saving.Saving(context, ranks, mock.Mock(), mock.Mock(), mock.Mock())
    saver.writer.take_write_s.return_value = 0.0  # type: ignore[attr-defined]

    def wait(is_last: bool) -> list[dict[str, Any]]:
        clock.monotonic.return_value += 7.0
        return [{"step": 5, "is_last": is_last}]

    saver.save(mock.Mock(), mock.Mock(), mock.Mock(), None, wait, is_last=False)
    assert saver.writer.begin.call_args.args[2]["in_flight"] == [{"step": 5, "is_last": False}]  # type: ignore[attr-defined]
    assert saver.times() == {"checkpoint": 7.0, "checkpoint_wait": 0.0, "checkpoint_write": 0.0}


@pytest.mark.usefixtures("ranks")
def test_what_is_left_when_all_engines_are_lost_is_sampled_with_the_next_weights(tmp_path: Path) -> None:
    """Both engines are killed with some prompts answered; restarted, they have no weights, and those of the
    rollout are gone. Every prompt is completed once, and each completion says by which weights."""
    with engine_group(tmp_path, 2) as group:
        trainer, sampling = group.trainer(), Sampling(max_new_tokens=12, temperature=1.0, batch_size=4)
        trainer.load(tiny_model(seed=1), 1, no_beat)
        seeds = [[sample_seed(0, 2, str(prompt), index) for index in range(4)] for prompt in PROMPTS]
        gate = group.gate("decode", 1).close()
        source = PromptList(PROMPTS, seeds, sampling)
        trainer.continuous.begin(source, 1)
        until(gate.reached.exists)
        until(lambda: source.made)
        for rank in range(2):
            group.kill(rank)
        gate.open()
        group.start_missing()
        trainer.load(tiny_model(seed=2), 2, no_beat)
        trainer.continuous.collect(no_beat)
    made = source.results()
    assert {one.weight_version for group in made for one in group} == {1, 2}
    for version in (1, 2):
        alone = TransformersEngine(char_tokenizer())
        alone.load(tiny_model(seed=version), version, no_beat)
        expected = tokens_of(alone.sample(PROMPTS, seeds, sampling, version, no_beat))
        own = [index for index, group in enumerate(made) if group[0].weight_version == version]
        assert [tokens_of(made)[index] for index in own] == [expected[index] for index in own]
