"""Rollouts of several turns: tokens and masks, tools and environments in their processes, and the loop of turns."""

import contextlib
import itertools
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from core_losses import policy_loss_of
from core_models import char_tokenizer
from engine_groups import no_beat
from process_tools import modules_with, until, user_processes
from pydantic import ValidationError
from rank_launcher import PATHS
from transformers.utils import chat_template_utils
from turn_tools import TOOL_TEMPLATE

from rlhf_core.errors import BadConfig, ToolFailed
from rlhf_core.schemas.algorithms import specs
from rlhf_core.schemas.rollouts import RolloutSpec, TurnsSpec
from rlhf_core.training.algorithms.dapo import overlong_rewards
from rlhf_core.training.algorithms.objective import StepSums
from rlhf_core.training.data.batches import collate
from rlhf_core.training.data.chat import with_tools
from rlhf_core.training.data.loading import prompt_tokens
from rlhf_core.training.data.tokenizers import build_tokenizer
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.environments import turn_source
from rlhf_core.training.environments.conversations import Conversations
from rlhf_core.training.environments.functions import Toolbox, find_calls
from rlhf_core.training.environments.open_rollout import OpenRollout
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.environments.rollout_steps import RolloutSteps
from rlhf_core.training.environments.server import TurnRequest
from rlhf_core.training.environments.turn_source import TurnSource
from rlhf_core.training.rewards.functions import reward_arguments
from rlhf_core.training.rewards.process import UserProcess
from rlhf_core.training.rewards.scoring import Scores
from rlhf_core.training.rollouts.base import PromptSource, PromptTask, Sampling, completion_of
from rlhf_core.training.rollouts.seeds import derived_seed, sample_seed
from rlhf_core.training.trainers.sampling import Prompt, Rollout
from rlhf_core.training.types import Completion, Conversation, Episode, ModelTurn, Row

pytestmark = pytest.mark.training

SAMPLING = [name for name, spec in specs().items() if spec.samples]
TAGGED = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


# --- tokens of observations are no part of any loss ---


def holed(values: torch.Tensor, places: Sequence[Sequence[int]], width: int, filler: float) -> torch.Tensor:
    """Values of sampled tokens at their places among those of observations."""
    rows = torch.full((len(values), width), filler, dtype=values.dtype)
    for row, own in enumerate(places):
        rows[row, own] = values[row, : len(own)]
    return rows


@pytest.mark.parametrize("correction", ["none", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_loss_is_that_of_the_sampled_tokens_alone(name: str, correction: str) -> None:
    """Value and gradient of sequences with holes are those of the same tokens without them."""
    places = [[0, 3, 4, 7], [2], [0, 1, 5]]
    mask = torch.arange(4) < torch.tensor([len(own) for own in places])[:, None]
    with_holes = torch.zeros(3, 8, dtype=torch.bool)
    for row, own in enumerate(places):
        with_holes[row, own] = True
    generator = torch.Generator().manual_seed(0)
    drawn = [-1 + 0.3 * torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    gain = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    sums = StepSums(8, 3, max_new_tokens=9)
    settings = {"correction": correction, "kl_coefficient": 0.1}

    def of(mask: torch.Tensor, place: Callable[[torch.Tensor, float], torch.Tensor]) -> tuple[float, torch.Tensor]:
        logprobs, old, reference, sampler = (
            place(one, filler) for one, filler in zip(drawn, (7, -3, 2, 9), strict=True)
        )
        logprobs.requires_grad_()
        loss, _ = policy_loss_of(
            name, logprobs, old, gain, mask, sums=sums, ref_logprobs=reference, sampler_logprobs=sampler, **settings
        )
        loss.backward()
        assert logprobs.grad is not None
        return float(loss.detach()), logprobs.grad

    loss, gradient = of(mask, lambda one, filler: torch.where(mask, one, filler))
    other, spread = of(with_holes, lambda one, filler: holed(one, places, 8, filler))
    assert other == pytest.approx(loss, abs=1e-12)
    assert not spread[~with_holes].any(), "an observation has no gradient"
    torch.testing.assert_close(spread[with_holes], gradient[mask], atol=1e-12, rtol=0)
    assert gradient[mask].abs().max() > 1e-3


def episode(sampled: Sequence[bool], prompt: Sequence[int] = (1, 2)) -> Episode:
    return Episode((ModelTurn("a", "o"), ModelTurn("b")), tuple(sampled), prompt)


def test_a_batch_has_sampled_tokens_one_after_the_other() -> None:
    """Returns and advantages go from a token to the next one that the model sampled, past observations."""
    flags = (True, True, False, False, False, True)
    several = Completion([10, 11, 12, 13, 14, 15], "", True, [-1.0, -2.0, -3.0], episode=episode(flags, (1, 2, 3)))
    single = Completion([20, 21], "", False, [-1.0, -1.0], episode=episode((True, True)))
    assert several.sampled_ids == [10, 11, 15]
    rewards = torch.ones(1, 2, dtype=torch.float64)
    rollout = Rollout(
        [Prompt(Row("u", "", "", "", {}), [1, 2], [0, 1])], [[several, single]], rewards, Scores([1, 1], {}, 0, [])
    )
    batch = rollout.batch([0], mask_truncated=True)
    assert rollout.num_tokens == 5
    assert batch.sampled.mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.sampled.trained.tolist() == [[True, True, True], [False] * 3]
    assert batch.sampled.lengths.tolist() == [6, 2], "observations take room, as the penalty for length counts"
    assert batch.prompts == [(1, 2, 3), (1, 2)], "the prompt that the environment completed"
    assert overlong_rewards(batch.sampled.lengths, 7, 2, 1.0).tolist() == [-0.5, 0.0]
    sequences = collate(
        batch.prompts, [made.token_ids for made in rollout.flat], 0, learned=[one.sampled for one in rollout.flat]
    )
    predicted = sequences.input_ids[:, 1:]
    assert predicted[sequences.target_mask].tolist() == [10, 11, 15, 20, 21]
    assert sequences.place(torch.arange(1.0, 6.0))[0].tolist() == [0, 0, 1, 2, 0, 0, 0, 3]


def test_a_rollout_of_one_turn_has_no_mask() -> None:
    assert Completion([1, 2], "", True, [0.0, 0.0]).sampled == ()
    assert Completion([1, 2], "", True, [0.0, 0.0], episode=episode((True, True))).sampled == ()


# --- calls in the text of a turn ---


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("Hm." + TAGGED % ("add", '{"one": 1}'), [("add", {"one": 1})], "Hm."),
        (TAGGED % ("a", '"{\\"x\\": 2}"') + TAGGED % ("b", "{}"), [("a", {"x": 2}), ("b", {})], ""),
        ('<|python_tag|>{"name": "add", "parameters": {"one": 1}}<|eom_id|>', [("add", {"one": 1})], ""),
        ('{"name": "Anna", "parameters": {}}', [], '{"name": "Anna", "parameters": {}}'),
        ("{not JSON", [], "{not JSON"),
        ("42", [], "42"),
    ],
)
def test_calls_are_found(text: str, calls: list[tuple[str, Mapping[str, Any]]], content: str) -> None:
    found, rest = find_calls(text, {"add": None})
    assert [(call.name, call.arguments) for call in found] == calls
    assert rest == content


@pytest.mark.parametrize("text", ["{", "[]", '{"name": 1}', '{"name": "a", "arguments": 3}', "[" * 100_000])
def test_a_call_that_is_not_well_formed_is_observed(text: str) -> None:
    (call,), _ = find_calls(f"<tool_call>{text}</tool_call>", {})
    assert call.problem.startswith("the call is not well formed")


# --- processes ---


@contextlib.contextmanager
def pool_of(**settings: Any) -> Iterator[EnvironmentPool]:
    named = {
        key: [f"turn_tools:{name}" for name in value] if key == "tools" else value for key, value in settings.items()
    }
    with contextlib.closing(EnvironmentPool(TurnsSpec.model_validate({"timeout_s": 1.0, **named}))) as pool:
        yield pool


def call(name: str, **arguments: Any) -> TurnRequest:
    text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.replace("'", '"')
    return TurnRequest("answer", 0, {"text": text, "is_last": False})


def test_a_tool_that_harms_its_process_costs_one_answer() -> None:
    with pool_of(tools=["add", "misbehave"]) as pool:
        beats: list[int] = []
        ways = ["endless", "crash", "fork", "exit", "write"]
        requests = {number: call("misbehave", how=how) for number, how in enumerate(ways)}
        found = pool.ask({**requests, 9: call("add", one=1, other=2)}, lambda: beats.append(1))
        assert found[0]["failure"] == found[2]["failure"] == "did not respond within 1 s"
        assert found[1]["failure"] == "ended its process"
        assert found[3]["failure"] == "raised SystemExit: 4"
        assert found[4]["lost"], "what a tool writes to the connection is no answer"
        assert found[9]["observations"] == [{"role": "tool", "name": "add", "content": "3"}]
        assert beats
        assert len(user_processes()) > 1
        pool.release(no_beat)
        assert len(user_processes()) == 1, "the first process, which serves the next rollouts"
        assert pool.ask({0: call("add", one=2, other=2)}, no_beat)[0]["observations"][0]["content"] == "4"
    assert user_processes() == []


def collected(pool: EnvironmentPool, number: int) -> dict[str, Any]:
    """Reply to the request of one rollout, whatever the others do."""
    found: dict[int, dict[str, Any]] = {}
    while number not in found:
        found |= pool.collect(0.1, no_beat)
    assert list(found) == [number], "the others are still at work"
    return found[number]


def test_a_rollout_is_answered_while_others_wait_for_their_tools() -> None:
    """Also while one reads nothing of a long request. What is given up is ended, and its process not used again."""
    with pool_of(tools=["add", "misbehave"], timeout_s=600.0) as pool:
        pool.ask({0: call("add", one=1, other=1)}, no_beat)
        (process,) = pool._idle
        os.kill(process.pid, signal.SIGSTOP)
        pool.submit(0, call("misbehave", how="x" * (4 << 20)))
        pool.submit(1, call("misbehave", how="fork"))
        assert pool.collect(0.0, no_beat) == {}
        for _ in range(2):
            pool.submit(2, call("add", one=1, other=2))
            assert collected(pool, 2)["observations"][0]["content"] == "3"
        os.kill(process.pid, signal.SIGCONT)
        assert collected(pool, 0)["observations"][0]["content"] == "after " + "x" * (4 << 20)
        pool.submit(0, call("misbehave", how="endless"))
        pool.collect(0.0, no_beat)
        pool.release(no_beat)
        assert len(user_processes()) == 1
        assert pool.ask({0: call("add", one=2, other=2)}, no_beat)[0]["observations"][0]["content"] == "4"


@pytest.mark.parametrize("forks_anew", [True, False])
def test_the_end_of_the_first_process_is_told_to_all_rollouts_that_it_had_processes_for(forks_anew: bool) -> None:
    """Also if another rollout has it started again before they ask. One that waits for an answer would do so for ever,
    and the environment of another would be answered by one that was never reset."""
    with pool_of(environment="turn_tools:Waiting", timeout_s=600.0) as pool:
        columns = {"folder": "/nowhere", "waits": True}
        resets = {number: TurnRequest("reset", 0, {"columns": columns, "seed": 0}) for number in range(5)}
        turn = TurnRequest("answer", 0, {"text": "", "is_last": False})
        pool.ask({number: resets[number] for number in range(3)}, no_beat)
        pool.submit(0, turn)
        assert pool.collect(0.0, no_beat) == {}
        assert pool.pid is not None
        os.kill(pool.pid, signal.SIGKILL)
        until(lambda: not user_processes())
        if forks_anew:
            pool.submit(3, resets[3])
        pool.submit(1, turn)
        found: dict[int, dict[str, Any]] = {}
        until(lambda: found.update(pool.collect(0.1, no_beat)) or len(found) == 2 + forks_anew)
        assert found.pop(3, {"text": ""}) == {"text": ""}
        assert found == {number: {"failure": "ended its process", "lost": True} for number in range(2)}
        pool.release(no_beat)
        assert pool.ask({4: resets[4]}, no_beat) == {4: {"text": ""}}, "not by a process that is gone"


MORTAL = (
    "import socket, sys, time; from rlhf_core.machine.parent_death import die_with_parent; die_with_parent(); "
    "socket.socket(fileno=int(sys.argv[2])).sendall(b'x'); time.sleep(600)"
)


def test_processes_outlive_the_thread_that_needed_them() -> None:
    """A rollout ahead of training has a thread of its own, in which the first process may have to be started again.

    Negative control: a process that the thread starts itself ends with it.
    """
    requests = {0: call("add", one=1, other=1)}
    with pool_of(tools=["add"]) as pool, ThreadPoolExecutor(1) as thread:
        pool.ask(requests, no_beat)
        assert pool.pid is not None
        os.kill(pool.pid, signal.SIGKILL)
        until(lambda: not user_processes())

        def ask_again() -> Any:
            assert pool.ask(requests, no_beat)[0]["failure"] == "ended its process"
            found = pool.ask(requests, no_beat)
            process = UserProcess(MORTAL)
            process.connection.recv(1)
            return found, process.popen

        found, own = thread.submit(ask_again).result()
        thread.shutdown()
        assert own.wait() == -signal.SIGKILL
        restarted = pool.pid
        assert pool.ask(requests, no_beat) == found
        assert pool.pid == restarted


def test_the_first_process_imports_nothing_heavy() -> None:
    """A rank starts one, and another for each step that is sampled ahead."""
    imported = modules_with("rlhf_core.training.environments.server")
    assert "rlhf_core.training.environments.functions" in imported
    assert not {"torch", "numpy", "pydantic", "transformers"} & imported


def test_tools_are_described_and_errors_are_observed() -> None:
    with pool_of(tools=["add", "later"]) as pool:
        pool.describe(no_beat)
        assert [tool["function"]["name"] for tool in pool.tools] == ["add", "later"]
        assert pool.tools[0]["function"]["parameters"]["required"] == ["one", "other"]
        assert not pool.has_reward
        found = pool.ask({0: call("later", text="x"), 1: call("add", one=1), 2: call("gone")}, no_beat)
    assert found[0]["observations"][0]["content"] == "later x"
    assert "missing 1 required positional argument" in found[1]["observations"][0]["content"]
    assert found[2]["observations"][0]["content"] == "{'error': 'Tool gone not found.'}", "in TRL's form"
    assert [found[number]["num_failed"] for number in range(3)] == [0, 1, 1]


DESCRIBES = """
import sys
from rlhf_core.training.environments.functions import Toolbox
(tool,) = Toolbox(["turn_tools:add"], "", "").describe()["tools"]
print(sorted(tool["function"]["parameters"]["properties"]), "torch" in sys.modules)
"""


def test_torch_is_not_imported_to_describe_tools_without_it() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBES], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['one', 'other'] False\n"


def play(sound: torch.Tensor) -> None:
    """
    Play a sound.

    Args:
        sound: What is heard.
    """


def test_a_tool_that_takes_a_tensor_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: it would be any object to transformers without torch."""
    monkeypatch.setattr(chat_template_utils, "is_torch_available", chat_template_utils.is_torch_available)  # put back
    (tool,) = Toolbox([f"{__name__}:play"], "", "").describe()["tools"]
    assert tool["function"]["parameters"]["properties"]["sound"]["type"] == "audio"
    monkeypatch.delitem(sys.modules, "torch")
    (tool,) = Toolbox([f"{__name__}:play"], "", "").describe()["tools"]
    assert tool["function"]["parameters"]["properties"]["sound"]["type"] == "object"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": ["undescribed"]}, "tool undescribed: its description cannot be made"),
        ({"tools": ["gone"]}, "turn_tools has no function or class gone"),
        ({"environment": "no_such_module:Any"}, "rollout.turns: importing no_such_module failed: ModuleNotFoundError"),
        ({"environment": "turn_tools:Resetless"}, "found Resetless without a method reset"),
    ],
)
def test_what_cannot_be_used_is_refused_before_training(settings: dict[str, Any], message: str) -> None:
    with pool_of(**settings) as pool, pytest.raises(BadConfig, match=message):
        pool.describe(no_beat)


def test_the_last_turn_calls_nothing() -> None:
    with pool_of(environment="turn_tools:Counter") as pool:
        pool.ask({0: TurnRequest("reset", 0, {"columns": {"start": 5}, "seed": 0})}, no_beat)
        last = TurnRequest("answer", 0, {**call("increase", by=3).arguments, "is_last": True})
        found = pool.ask({0: last}, no_beat)[0]
        assert (found["is_open"], found["observations"], len(found["calls"])) == (True, [], 1)
        assert pool.ask({0: TurnRequest("reward")}, no_beat)[0] == {"reward": 5.0}


# --- the loop ---


class Scripted:
    """Rollout engine whose turns are written in advance, by the context that they follow.

    Args:
        encode: tokens of a turn.
    """

    def __init__(self, script: Callable[[str, int], str], tokenizer: Any, encode: Callable[[str], list[int]]) -> None:
        self.script, self.tokenizer, self.encode = script, tokenizer, encode
        self.continuous: AnyOrder | None = None
        self.rounds: list[list[list[int]]] = []
        self.seeds: list[int] = []

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Any,
    ) -> list[list[Completion]]:
        self.rounds.append([list(prompt) for prompt in prompts])
        self.seeds += [seed for own in seeds for seed in own]
        return [
            [self._turn(self.tokenizer.decode(list(prompt)), seed, sampling) for seed in own]
            for prompt, own in zip(prompts, seeds, strict=True)
        ]

    def _turn(self, context: str, seed: int, sampling: Sampling) -> Completion:
        tokens = self.encode(self.script(context, seed))
        end = self.tokenizer.eos_token_id
        cut = len(tokens) > sampling.max_new_tokens
        tokens = tokens[: sampling.max_new_tokens]
        return completion_of(self.tokenizer, tokens, not cut and tokens[-1:] == [end], [-0.5] * len(tokens))


@dataclass
class AnyOrder:
    """Continuous sampling by a scripted engine, which answers turns in an order of its own: by chance, or one rollout
    after the other."""

    engine: Scripted
    order: random.Random | None

    def sample(self, source: PromptSource, version: int, beat: Callable[[], None]) -> None:
        """Answer one turn after the other, some of them while tools are at work."""
        known: list[PromptTask] = []
        while len(source.made) < source.num_prompts:
            known += source.take(beat)
            if known and (not source.is_waiting or (self.order is not None and self.order.random() < 0.5)):
                task = known.pop(self.order.randrange(len(known)) if self.order is not None else -1)
                (made,) = self.engine.sample([task.prompt], [task.seeds], source.sampling, version, beat)
                source.answer(task.index, made)
            elif source.is_waiting and source.descriptor is not None:
                select.select([source.descriptor], [], [])
        source.end(beat)


def tool_tokenizer() -> Any:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


DESCRIBED: dict[tuple[str, ...], tuple[Any, bool]] = {}
"""Descriptions of tools, by the paths of a pool."""


def describe_once(pool: EnvironmentPool, spec: TurnsSpec) -> None:
    """Describe the tools of a pool, which takes a second of imports, unless one with the same paths has done so."""
    if spec.functions not in DESCRIBED:
        pool.describe(no_beat)
        DESCRIBED[spec.functions] = pool.tools, pool.has_reward
    pool.tools, pool.has_reward = DESCRIBED[spec.functions]


def rollout_of(
    ranks: Ranks,
    script: Callable[[str, int], str],
    row: Row,
    tokenizer: Any,
    num_samples: int = 1,
    budget: int = 2000,
    order: int | None = None,
    apart: bool = False,
    **settings: Any,
) -> tuple[list[Completion], Scripted, Conversations]:
    """Completions of one row.

    Args:
        order: seed of the order in which turns are sampled; -1 for one rollout after the other, None for rounds.
        apart: each of them has the prompt for itself.
    """
    spec = TurnsSpec.model_validate({"max_turn_tokens": 100, "timeout_s": 5.0, **settings})
    engine = Scripted(script, tokenizer, lambda text: tokenizer.encode(text, add_special_tokens=False))
    if order is not None:
        engine.continuous = AnyOrder(engine, random.Random(order) if order >= 0 else None)
    with contextlib.closing(EnvironmentPool(spec)) as pool:
        describe_once(pool, spec)
        from rlhf_core.training.data.chat import rendered

        (row,) = with_tools([row], pool.tools)
        row = rendered(row, tokenizer)
        conversations = Conversations(spec, ranks, RolloutSteps(spec, pool, tokenizer, {}, []))
        prompts = [prompt_tokens([row], tokenizer)[0].tolist()]
        seeds = [[sample_seed(0, 1, row.uid, index) for index in range(num_samples)]]
        sampling = Sampling(budget, 1.0, 8)
        if apart:
            prompts, seeds = prompts * num_samples, [[seed] for seed in seeds[0]]
        rows = [row] * len(prompts)
        made = conversations.sample(engine, rows, prompts, seeds, sampling, 0, no_beat)  # type: ignore[arg-type]
    return [one for group in made for one in group], engine, conversations


def asked(**columns: Any) -> Row:
    return Row("u", "", "", "", columns, chat=Conversation([{"role": "user", "content": "Count."}]))


def adds_twice(context: str, seed: int) -> str:
    """Turns of a model that calls a tool twice in one turn, once in the next, and then answers."""
    number = context.count("<tool_response>")
    first = '<tool_call>\n{"name": "increase", "arguments": {"by": 2}}\n</tool_call>'
    turns = [first * 2, first, "done"]
    return turns[2 if number > 2 else 1 if number else 0] + "<|im_end|>"


def test_a_conversation_has_the_tokens_of_its_template_and_the_state_of_its_environment(ranks: Ranks) -> None:
    tokenizer, row = tool_tokenizer(), asked(start=1)
    settings: dict[str, Any] = {"environment": "turn_tools:Counter", "max_turn_tokens": 200}
    (made,), engine, _ = rollout_of(ranks, adds_twice, row, tokenizer, **settings)
    found = made.episode
    assert found is not None
    assert made.finished
    assert (found.end, found.num_calls, found.num_failed, found.reward) == ("answer", 3, 0, 7.0)
    roles = [message["role"] for message in found.messages]
    assert roles == ["assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message["content"] for message in found.messages if message["role"] == "tool"] == [
        "total 3",
        "total 5",
        "total 7",
    ]
    text = tokenizer.decode([*found.prompt_ids, *made.token_ids])
    tools = [{"type": "function", "function": {"name": "increase"}}]
    assert row.chat is not None
    whole = tokenizer.apply_chat_template([*row.chat.prompt, *map(dict, found.messages)], tools=tools, tokenize=False)
    assert f"{text}\n" == whole
    assert tokenizer.decode(made.sampled_ids) == "".join(f"{turn.text}<|im_end|>" for turn in found.turns)
    assert len(made.logprobs) == len(made.sampled_ids)
    assert engine.seeds == [engine.seeds[0], *(derived_seed(engine.seeds[0], f"turn {turn}") for turn in (1, 2))]
    assert made.last_text == "done"
    assert "<observation>total 3total 5</observation>" in made.shown
    arguments = reward_arguments([row], [made], "messages")
    assert arguments.always["completions"] == [list(map(dict, found.messages))]
    assert arguments.named["environment_reward"] == [7.0]
    assert reward_arguments([row], [made], "last_turn").always["completions"] == ["done"]


def test_a_sampled_token_is_never_tokenized_again(ranks: Ranks) -> None:
    """Negative control: the text of what was sampled has other tokens."""
    tokenizer = build_tokenizer("bpe", ["abab ab ab abab"] * 50, 320)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]
    spec = TurnsSpec(environment="turn_tools:Dice", max_turn_tokens=8)
    encode = lambda text: [*letters, *letters, tokenizer.eos_token_id] if text == "ab" else tokenizer.encode(text)  # noqa: E731
    engine = Scripted(lambda context, seed: "ab" if len(context) < 8 else ".<|im_end|>", tokenizer, encode)
    row = Row("u", "x", "", "", {})
    with contextlib.closing(EnvironmentPool(spec)) as pool:
        pool.describe(no_beat)
        conversations = Conversations(spec, ranks, RolloutSteps(spec, pool, tokenizer, {}, []))
        prompts = [tokenizer.encode("x", add_special_tokens=False)]
        ((made,),) = conversations.sample(engine, [row], prompts, [[5]], Sampling(64, 1.0, 8), 0, no_beat)  # type: ignore[arg-type]
    sampled = [*letters, *letters, tokenizer.eos_token_id]
    assert made.token_ids[:5] == sampled
    assert engine.rounds[1][0][1:6] == sampled, "the next turn follows the tokens that were sampled"
    text = tokenizer.decode(made.token_ids[:5])
    naive = tokenizer.encode(text, add_special_tokens=False)
    assert naive != sampled, "negative control"
    assert tokenizer.decode(naive) == text


def test_rollouts_do_not_depend_on_each_other(ranks: Ranks) -> None:
    """Every rollout has its own environment and seed; the same seeds give the same rollouts again."""
    rolls = [rolled(ranks, count) for count in (6, 6, 3)]
    assert rolls[0] == rolls[1]
    assert rolls[0][:3] == rolls[2]
    observations = {made.episode.turns[0].observation for made in rolls[0] if made.episode}
    assert len(observations) > 3, "drawn from the seed of each, also by the global generators"


def rolled(ranks: Ranks, num_samples: int, **settings: Any) -> list[Completion]:
    """Rollouts of different lengths, in which turns and observations follow from seeds."""
    script = lambda context, seed: ".<|im_end|>" if seed % 4 == 0 else f"{seed % 7}<|im_end|>"  # noqa: E731
    settings = {"environment": "turn_tools:Dice", "max_turns": 6, **settings}
    return rollout_of(ranks, script, Row("u", "roll:", "", "", {}), char_tokenizer(), num_samples, **settings)[0]


def test_rollouts_are_the_same_in_whatever_order_they_go_on(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a seed that counts the turns of all rollouts depends on the order."""
    in_rounds = rolled(ranks, 6)
    assert len({len(made.episode.turns) for made in in_rounds if made.episode}) > 1
    assert rolled(ranks, 6, order=0) == rolled(ranks, 6, order=-1, apart=True) == in_rounds
    # With 7, the first two of these seeds end their rollouts, and some orders of replies give what rounds do.
    by_order = lambda one: derived_seed(8, f"{next(numbers)}") if one.turns else one.seed  # noqa: E731
    monkeypatch.setattr(OpenRollout, "turn_seed", property(by_order))
    found = []
    for order in (None, -1):
        numbers = itertools.count()
        found.append(rolled(ranks, 6, order=order, apart=True))
    assert found[0] != found[1]


@dataclass
class Replies:
    """Pool whose replies the test gives."""

    given: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    submitted: list[int] = field(default_factory=list)

    def submit(self, number: int, request: TurnRequest) -> None:
        """Note that a rollout was asked."""
        self.submitted.append(number)

    def collect(self, wait_s: float, beat: Any) -> dict[int, dict[str, Any]]:
        """Return what is there."""
        return self.given.pop() if self.given else {}


def test_seconds_of_tools_are_those_in_which_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> Any:
        yield None
        yield TurnRequest("answer")
        return Completion([], "", True, [])

    def begin(_: Any, index: int) -> list[OpenRollout]:
        one = OpenRollout(index, Row("", "", "", "", {}), index, index, [1], 9)
        one.begin(steps())
        return [one]

    clock, pool, found = mock.Mock(), Replies(), []
    monkeypatch.setattr(turn_source, "time", clock)
    note = lambda rollouts, seconds: found.append((len(rollouts), seconds))  # noqa: E731
    free: Any = mock.Mock(**{"take.return_value.pool": pool})
    source = TurnSource(2, begin, free, Sampling(1, 1.0, 8), note)

    def at(now_s: float, action: Callable[..., Any], *arguments: Any) -> Any:
        clock.monotonic.return_value = now_s
        return action(*arguments)

    turn = [Completion([5], "", True, [-1.0])]
    assert [task.index for task in at(0.0, source.take, no_beat)] == [0, 1]
    at(2.0, source.answer, 0, turn)
    at(5.0, source.answer, 1, turn)  # from here on, all wait for tools
    pool.given = [{0: {}}]
    at(9.0, source.take, no_beat)
    assert list(source.made) == [0]
    pool.given = [{1: {}}]
    at(12.0, source.take, no_beat)
    assert len(source.results()) == 2
    assert found == [(2, 7.0)]
    assert pool.submitted == [0, 1]


def test_text_of_reset_is_the_end_of_the_prompt(ranks: Ranks) -> None:
    done = lambda context, seed: "done<|im_end|>"  # noqa: E731
    (made,), _, _ = rollout_of(ranks, done, asked(hint=" To 9."), tool_tokenizer(), environment="turn_tools:Counter")
    assert made.episode is not None
    assert "<|im_start|>user\nCount. To 9.<|im_end|>" in char_tokenizer().decode(list(made.episode.prompt_ids))
    row = Row("u", "Count.", "", "", {"hint": " To 9."})
    (made,), engine, _ = rollout_of(ranks, done, row, char_tokenizer(), environment="turn_tools:Counter")
    assert char_tokenizer().decode(engine.rounds[0][0]) == "Count. To 9."


def always_calls(context: str, seed: int) -> str:
    """A model that never answers."""
    return '<tool_call>\n{"name": "increase", "arguments": {"by": 2}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("settings", "end", "turns"),
    [
        ({"max_turns": 3}, "turns", 3),
        ({"budget": 300}, "tokens", 2),
        ({"max_turn_tokens": 10}, "tokens", 1),
    ],
)
def test_a_rollout_ends_at_its_bounds_with_a_sampled_token(
    ranks: Ranks, settings: dict[str, Any], end: str, turns: int
) -> None:
    (made,), _, _ = rollout_of(
        ranks, always_calls, asked(), tool_tokenizer(), environment="turn_tools:Counter", **settings
    )
    assert made.episode is not None
    assert (made.episode.end, len(made.episode.turns), made.finished) == (end, turns, False)
    assert made.episode.sampled[-1]
    assert len(made.token_ids) <= settings.get("budget", 2000)
    assert made.episode.messages[-1]["role"] == "assistant"


def test_a_long_observation_is_cut(ranks: Ranks) -> None:
    speaks = lambda context, seed: "hi<|im_end|>" if context.endswith(":") else ".<|im_end|>"  # noqa: E731
    settings: dict[str, Any] = {"environment": "turn_tools:Dice", "max_observation_tokens": 1}
    (made,), _, _ = rollout_of(ranks, speaks, Row("u", "roll:", "", "", {}), char_tokenizer(), **settings)
    assert made.episode is not None
    assert len(made.episode.turns[0].observation) == 1
    assert made.episode.sampled.count(False) == 1


def test_a_lost_environment_ends_its_rollout_or_the_run(ranks: Ranks) -> None:
    settings: dict[str, Any] = {"environment": "turn_tools:Fragile"}
    calls_odd = lambda context, seed: always_calls(context, seed) if seed % 2 else "fine<|im_end|>"  # noqa: E731
    made, _, conversations = rollout_of(ranks, calls_odd, asked(), tool_tokenizer(), 8, **settings)
    ends = [one.episode.end for one in made if one.episode]
    assert set(ends) == {"answer", "failure"}
    assert [one.episode.reward is None for one in made if one.episode] == [end == "failure" for end in ends]
    (warning,) = conversations.take_warnings()
    assert "rollout.turns: call ended its process, in a rollout of prompt u after" in warning
    with pytest.raises(ToolFailed, match="call ended its process"):
        rollout_of(ranks, calls_odd, asked(), tool_tokenizer(), 8, on_failure="stop", **settings)


@pytest.mark.parametrize("order", [None, 0])
def test_a_lost_tool_is_observed(ranks: Ranks, order: int | None) -> None:
    def script(context: str, seed: int) -> str:
        call = '<tool_call>{"name": "misbehave", "arguments": {"how": "crash"}}</tool_call>'
        return f"{call if 'error' not in context else 'sorry'}<|im_end|>"

    settings: dict[str, Any] = {"tools": ["turn_tools:misbehave"], "order": order}
    (made,), _, conversations = rollout_of(ranks, script, asked(), tool_tokenizer(), **settings)
    assert made.episode is not None
    assert made.finished
    assert len(conversations.take_warnings()) == 1
    assert made.episode.turns[0].observation == "{'error': 'the call ended its process'}"
    assert (made.episode.num_calls, made.episode.num_failed, made.last_text) == (1, 1, "sorry")


def test_a_parser_of_the_user_finds_calls(ranks: Ranks) -> None:
    speaks = lambda context, seed: "add 1 2<|im_end|>" if context.endswith("?") else "three<|im_end|>"  # noqa: E731
    settings: dict[str, Any] = {"tools": ["turn_tools:add"], "parser": "turn_tools:by_first_word"}
    (made,), _, _ = rollout_of(ranks, speaks, Row("u", "1+2?", "", "", {}), char_tokenizer(), **settings)
    assert made.shown == "add 1 2<observation>3</observation>three"


def test_a_template_that_changes_earlier_turns_is_refused(ranks: Ranks) -> None:
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE.replace(
        "{{ m.content }}{% for", "{{ m.content if loop.last else '' }}!{% for"
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("!{% for", "{{ loop.length }}{% for")
    with pytest.raises(BadConfig, match="differently once an observation follows"):
        rollout_of(ranks, always_calls, asked(), tokenizer, environment="turn_tools:Counter")


# --- settings ---


def test_a_rollout_without_room_for_a_turn_is_refused() -> None:
    turns = {"tools": ["my_tools:search"]}
    assert RolloutSpec.model_validate({"turns": turns}).turns.are_used
    with pytest.raises(ValidationError, match="expected room for a turn"):
        RolloutSpec.model_validate({"turns": turns, "max_new_tokens": 32})
