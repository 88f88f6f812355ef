"""Dealing prompts to engines: balanced, bounded, and answered exactly once whatever is lost on the way."""

import random
from collections.abc import Callable, Sequence

import pytest

from rlhf_core.training.rollouts.base import PromptList, PromptTask, Sampling
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher
from rlhf_core.training.types import Completion

pytestmark = pytest.mark.training


def dispatcher_of(
    *lengths: int, samples: int = 2, max_new_tokens: int = 1, window: int = 100, rank: int = 0
) -> Dispatcher:
    """Dispatcher of prompts with these lengths, all of which it knows."""
    prompts, seeds = [[1] * length for length in lengths], [list(range(samples)) for _ in lengths]
    dispatcher = Dispatcher(PromptList(prompts, seeds, Sampling(max_new_tokens, 1.0, window)), rank)
    dispatcher.refill(lambda: None)
    return dispatcher


def made(index: int, by: int = 0) -> list[Completion]:
    return [Completion([index, by], "", True, [0.0, 0.0])]


def indices(dealt: dict[int, list[PromptTask]]) -> dict[int, list[int]]:
    return {engine: [task.index for task in own] for engine, own in dealt.items()}


def test_the_longest_go_first_to_the_engine_with_the_least_work() -> None:
    dispatcher = dispatcher_of(5, 90, 10, 40, 30, 20)
    assert indices(dispatcher.assign([0, 1])) == {0: [1, 2], 1: [3, 4, 5, 0]}


@pytest.mark.parametrize(("ranks", "engines", "each"), [(2, 2, 1), (2, 4, 2), (8, 24, 6), (5, 3, 4), (7, 8, 8)])
def test_the_prompts_of_all_ranks_are_dealt_evenly(ranks: int, engines: int, each: int) -> None:
    """Also more engines than prompts of a rank, and numbers of which neither divides the other."""
    number = [0] * engines
    for rank in range(ranks):
        dealt = dispatcher_of(*[5] * each, rank=rank).assign(range(engines))
        for engine, own in dealt.items():
            number[engine] += len(own)
    assert sum(number) == ranks * each
    assert max(number) - min(number) <= 1


def test_an_engine_is_asked_for_a_window_at_a_time() -> None:
    """The exception: a prompt larger than the window goes to an idle engine."""
    dispatcher = dispatcher_of(4, 3, 2, 1, window=4)
    assert indices(dispatcher.assign([0])) == {0: [0, 1]}
    assert dispatcher.assign([0]) == {}
    assert dispatcher.answer(0, 0, made(0))
    assert indices(dispatcher.assign([0])) == {0: [2]}
    assert indices(dispatcher_of(4, 3, samples=8, window=4).assign([0])) == {0: [0]}


class Turns(PromptList):
    """One prompt whose first answers lead to further tasks."""

    def __init__(self, num_turns: int) -> None:
        super().__init__([[1]], [[1]], Sampling(1, 1.0, 100))
        self.left, self.ready = num_turns, [PromptTask(0, [1], [1])]

    def take(self, beat: Callable[[], None]) -> list[PromptTask]:
        """Return the next turn, if there is one."""
        ready, self.ready = self.ready, []
        return ready

    def answer(self, index: int, completions: Sequence[Completion]) -> None:
        """Have another turn follow, until there are enough."""
        self.left -= 1
        if self.left:
            self.ready = [PromptTask(index + 1, [1] * (index + 2), [1])]
        else:
            super().answer(0, completions)


def test_an_answer_may_lead_to_another_task() -> None:
    """Tasks that come one at a time go to all engines in turn."""
    dispatcher, dealt = Dispatcher(Turns(5), rank=1), []
    while not dispatcher.is_done:
        dispatcher.refill(lambda: None)
        ((engine, (task,)),) = dispatcher.assign(range(3)).items()
        dealt.append((engine, task.index))
        dispatcher.answer(engine, task.index, made(task.index))
    assert dealt == [(1, 0), (2, 1), (0, 2), (1, 3), (2, 4)]
    assert dispatcher.source.results() == [made(4)]


def test_prompts_without_their_completions_are_begun_anew() -> None:
    """After the end of a rollout; within one, they only wait for another engine."""
    dispatcher = dispatcher_of(4, 3, 2)
    dispatcher.assign([0])
    dispatcher.answer(0, 1, made(1))
    dispatcher.recall()
    assert indices(dispatcher.assign([1])) == {1: [0, 2]}
    dispatcher.end(lambda: None)
    assert dispatcher.assign([1]) == {}
    assert not dispatcher.answer(1, 0, made(0)), "it is of the rollout that has ended"
    dispatcher.refill(lambda: None)
    assert indices(dispatcher.assign([1])) == {1: [0, 2]}
    assert dispatcher.num_missing == 2


def test_what_a_lost_engine_has_not_answered_goes_to_the_others() -> None:
    dispatcher = dispatcher_of(4, 3, 2, 1)
    dispatcher.assign([0, 1])
    (kept, *lost) = sorted(dispatcher.outstanding(0))
    dispatcher.answer(0, kept, made(kept))
    dispatcher.requeue(0, dispatcher.outstanding(0))
    assert sorted(indices(dispatcher.assign([1]))[1]) == lost
    assert dispatcher.num_moved == len(lost)


def test_a_late_answer_is_refused_and_counted() -> None:
    dispatcher = dispatcher_of(4)
    dispatcher.assign([0])
    dispatcher.requeue(0, [0])
    dispatcher.assign([1])
    assert not dispatcher.answer(0, 0, made(0, by=0)), "it came from the engine that lost the prompt"
    assert dispatcher.answer(1, 0, made(0, by=1))
    assert not dispatcher.answer(1, 0, made(0, by=1)), "it is a duplicate"
    assert dispatcher.source.results() == [made(0, by=1)]
    assert dispatcher.counts() == {"rollout/moved_prompts": 1, "rollout/refused_completions": 2}


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_is_answered_once_whatever_is_lost(seed: int) -> None:
    """Negative control: accepting every answer would count some of them twice."""
    chance = random.Random(seed)
    dispatcher = dispatcher_of(*(chance.randint(1, 50) for _ in range(30)), max_new_tokens=4, window=8)
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
    assert [one[0].token_ids[0] for one in dispatcher.source.results()] == list(range(30))
    assert sorted(accepted) != list(range(30)), "accepting every answer would be wrong"
