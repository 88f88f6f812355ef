"""Dealing prompts to engines: balanced, bounded, and answered exactly once whatever is lost on the way."""

import random

import pytest

from rlhf_core.training.rollouts.remote.dispatch import Dispatcher, PromptTask
from rlhf_core.training.types import Completion

pytestmark = pytest.mark.training


def tasks(*lengths: int, samples: int = 2) -> list[PromptTask]:
    """Prompts with these lengths."""
    return [PromptTask(index, [1] * length, list(range(samples))) for index, length in enumerate(lengths)]


def made(index: int, by: int = 0) -> list[Completion]:
    return [Completion([index, by], "", True, [0.0, 0.0])]


def indices(dealt: dict[int, list[PromptTask]]) -> dict[int, list[int]]:
    return {engine: [task.index for task in own] for engine, own in dealt.items()}


def test_the_longest_go_first_to_the_engine_with_the_least_work() -> None:
    dispatcher = Dispatcher(tasks(5, 90, 10, 40, 30, 20), max_new_tokens=1, window=100)
    assert indices(dispatcher.assign([0, 1])) == {0: [1, 2], 1: [3, 4, 5, 0]}


@pytest.mark.parametrize(("ranks", "engines", "each"), [(2, 2, 1), (2, 4, 2), (8, 24, 6), (5, 3, 4), (7, 8, 8)])
def test_the_prompts_of_all_ranks_are_dealt_evenly(ranks: int, engines: int, each: int) -> None:
    """Also more engines than prompts of a rank, and numbers of which neither divides the other."""
    number = [0] * engines
    for rank in range(ranks):
        dealt = Dispatcher(tasks(*[5] * each), 1, 100, rank=rank).assign(range(engines))
        for engine, own in dealt.items():
            number[engine] += len(own)
    assert sum(number) == ranks * each
    assert max(number) - min(number) <= 1


def test_an_engine_is_asked_for_a_window_at_a_time() -> None:
    """The exception: a prompt larger than the window goes to an idle engine."""
    dispatcher = Dispatcher(tasks(4, 3, 2, 1), max_new_tokens=1, window=4)
    assert indices(dispatcher.assign([0])) == {0: [0, 1]}
    assert dispatcher.assign([0]) == {}
    assert dispatcher.answer(0, 0, made(0))
    assert indices(dispatcher.assign([0])) == {0: [2]}
    assert indices(Dispatcher(tasks(4, 3, samples=8), 1, window=4).assign([0])) == {0: [0]}


def test_what_a_lost_engine_has_not_answered_goes_to_the_others() -> None:
    dispatcher = Dispatcher(tasks(4, 3, 2, 1), max_new_tokens=1, window=100)
    dispatcher.assign([0, 1])
    (kept, *lost) = sorted(dispatcher.outstanding(0))
    dispatcher.answer(0, kept, made(kept))
    dispatcher.requeue(0, dispatcher.outstanding(0))
    assert sorted(indices(dispatcher.assign([1]))[1]) == lost
    assert dispatcher.num_moved == len(lost)


def test_a_late_answer_is_refused_and_counted() -> None:
    dispatcher = Dispatcher(tasks(4), max_new_tokens=1, window=100)
    dispatcher.assign([0])
    dispatcher.requeue(0, [0])
    dispatcher.assign([1])
    assert not dispatcher.answer(0, 0, made(0, by=0)), "it came from the engine that lost the prompt"
    assert dispatcher.answer(1, 0, made(0, by=1))
    assert not dispatcher.answer(1, 0, made(0, by=1)), "it is a duplicate"
    assert dispatcher.results() == [made(0, by=1)]
    assert dispatcher.counts() == {"rollout/moved_prompts": 1, "rollout/refused_completions": 2}


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_is_answered_once_whatever_is_lost(seed: int) -> None:
    """Negative control: accepting every answer would count some of them twice."""
    chance = random.Random(seed)
    dispatcher = Dispatcher(tasks(*(chance.randint(1, 50) for _ in range(30))), max_new_tokens=4, window=8)
    sent: list[tuple[int, int]] = []
    taken, accepted = [], []
    while not dispatcher.is_done:
        for engine, own in dispatcher.assign(chance.sample(range(3), 2)).items():
            sent += [(engine, task.index) for task in own]
        engine, index = chance.choice(sent)  # answers may arrive late, and twice
        if chance.random() < 0.3:
            dispatcher.requeue(engine, dispatcher.outstanding(engine))
            continue
        accepted.append(index)
        if dispatcher.answer(engine, index, made(index)):
            taken.append(index)
    assert sorted(taken) == list(range(30))
    assert [one[0].token_ids[0] for one in dispatcher.results()] == list(range(30))
    assert sorted(accepted) != list(range(30)), "accepting every answer would be wrong"
