"""One rollout over real engine servers with a scripted sampler: texts, errors, tails and losses."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from core_models import tiny_model
from process_tools import until
from rank_launcher import make_context, tiny_spec

from rlhf_core.errors import DiskFull, EnginesLost, WeightSyncFailed
from rlhf_core.schemas.engines import EngineAddress, EngineHealth, EngineRefusal, WeightsId
from rlhf_core.schemas.rollouts import RemoteSettings, RolloutSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import PromptList, PromptTask, Sampling
from rlhf_core.training.rollouts.remote import client as client_module
from rlhf_core.training.rollouts.remote import registry as registry_module
from rlhf_core.training.rollouts.remote.background import BackgroundRollout, ContinuousRollouts
from rlhf_core.training.rollouts.remote.client import EngineClient, EngineUnusable
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.rollouts.remote.rollout import POLL_S, RemoteRollout, check_interval_s
from rlhf_core.training.rollouts.remote.senders import WeightPublisher
from rlhf_core.training.rollouts.samplers import Sampler, SamplerRequest
from rlhf_core.training.rollouts.server import worker as worker_module
from rlhf_core.training.rollouts.server.app import EngineServer
from rlhf_core.training.rollouts.server.worker import EngineWorker
from rlhf_core.training.types import Completion, NullReporter
from rlhf_core.weight_sync.receiver import Receiver

pytestmark = pytest.mark.training

TOKEN = b"token"
WEIGHTS = WeightsId(start=1, version=1)


@dataclass
class ScriptedSampler(Sampler):
    """A sampler that completes one prompt per step with a text made from the prompt's number."""

    text: Callable[[int], str] = str
    delay_s: float = 0.0
    refused: Collection[int] = ()
    """Prompts that the sampler refuses."""
    num_left_out: int = 0
    """Number of seeds of each prompt that get no completion."""
    failing: Collection[int] = ()
    """Prompts on which the sampler fails."""
    num_waiting: int = 0
    waiting: dict[int, SamplerRequest] = field(default_factory=dict)
    num_made: int = 0
    worker: EngineWorker | None = None
    """Worker of the engine that samples with it."""

    def load(self, tensors: Iterable[Any], beat: Callable[[], None]) -> None:
        """Not called."""

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Not called."""
        return []

    def submit(self, request: SamplerRequest) -> None:
        """Accept a request, or refuse it."""
        if request.prompt[0] in self.failing:
            raise RuntimeError("the cache is corrupt")
        if request.prompt[0] in self.refused:
            raise ValueError("too long for this engine")
        self.waiting[request.key] = request

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Complete the oldest prompt."""
        time.sleep(self.delay_s)
        key = next(iter(self.waiting))
        request = self.waiting.pop(key)
        beat()
        self.num_made += 1
        made = Completion([1], self.text(request.prompt[0]), True, [0.0], weight_version=1)
        return [(key, [made for _ in request.seeds[self.num_left_out :]])]

    def cancel(self, keys: Collection[int]) -> None:
        """Drop requests."""
        for key in keys:
            self.waiting.pop(key, None)

    def pause(self) -> None:
        """Do nothing: no completion has tokens between two steps."""

    def resume(self) -> None:
        """Do nothing."""


@contextmanager
def engine(rank: int, sampler: ScriptedSampler, weights: WeightsId = WEIGHTS) -> Iterator[EngineClient]:
    """A real server and worker of an engine that has weights."""
    receiver = Receiver(f"engine-{rank}")
    worker = EngineWorker(rank, 0, sampler, receiver, NullReporter())
    worker._weights, sampler.worker = weights, worker
    ends = threading.Event()
    with EngineServer(worker, receiver, TOKEN, "127.0.0.1") as server:
        serving = threading.Thread(target=worker.serve, args=(lambda: not ends.is_set(),))
        serving.start()
        address = EngineAddress(rank=rank, generation=0, node="n", host="127.0.0.1", port=server.port)
        try:
            yield EngineClient(address, TOKEN, 5.0)
        finally:
            ends.set()
            serving.join()


def rollout(
    clients: Sequence[EngineClient], num_prompts: int, prompts: type[PromptList] = PromptList, **settings: Any
) -> tuple[Dispatcher, RemoteRollout]:
    """A rollout of some prompts, numbered from 0, with 2 samples each."""
    numbers = range(num_prompts)
    dispatcher = Dispatcher(prompts([[one] for one in numbers], [[1, 2] for _ in numbers], Sampling(1, 1.0, 8)))
    return dispatcher, run_of(dispatcher, clients, **settings)


def run_of(
    dispatcher: Dispatcher, clients: Sequence[EngineClient], weights: WeightsId = WEIGHTS, **settings: Any
) -> RemoteRollout:
    ways: dict[str, Any] = {"beat": lambda: None, "restore": lambda client: None, "may_leave": lambda: True}
    ways |= {"interval_s": POLL_S, "spans_weights": False}
    ways |= {name: settings.pop(name) for name in tuple(settings) if name in ways}
    remote = RemoteSettings(**{"stall_timeout_s": 1.0, "start_timeout_s": 3.0, **settings})
    return RemoteRollout(dispatcher, weights, remote, partial(without, clients), **ways)


def without(clients: Iterable[EngineClient], ranks: Collection[int]) -> list[EngineClient]:
    return [one for one in clients if one.address.rank not in ranks]


def texts(dispatcher: Dispatcher) -> list[str]:
    return [group[0].text for group in dispatcher.source.results()]


BREAKING = "a\u2028b\u2029c\u0085d\x0be\x1cf\r\ng"
"""Characters at which ``str.splitlines`` ends a line."""


def test_a_completion_may_contain_any_line_separator() -> None:
    with engine(0, ScriptedSampler(lambda number: BREAKING * 3000)) as client:
        dispatcher, run = rollout([client], 5)
        asyncio.run(run.run())
    assert texts(dispatcher) == [BREAKING * 3000] * 5
    assert dispatcher.num_moved == 0


def test_an_answer_that_is_not_valid_sends_the_prompt_to_others_and_the_engine_serves_on() -> None:
    """The second answer is correct: a single unreadable line is no reason to give up an engine."""
    real, lines = client_module._sampled, []

    def once(line: bytes, name: str) -> Any:
        lines.append(line)
        return real(line[:-1] if len(lines) == 1 else line, name)

    with engine(0, ScriptedSampler()) as client, mock.patch.object(client_module, "_sampled", once):
        dispatcher, run = rollout([client], 3)
        asyncio.run(run.run())
    assert texts(dispatcher) == ["0", "1", "2"]
    assert dispatcher.num_moved > 0


def test_a_line_may_be_a_refusal_and_anything_else_is_not_valid() -> None:
    with pytest.raises(EngineUnusable, match="engine-0: it has other weights now"):
        client_module._sampled(EngineRefusal(error="it has other weights now").model_dump_json().encode(), "engine-0")
    for line in (b"5", b"{}", b'{"index": 0, "comple'):
        with pytest.raises(ValueError, match="validation error"):
            client_module._sampled(line, "engine-0")


@pytest.mark.parametrize(
    ("sampler", "error"),
    [
        (ScriptedSampler(refused=[2]), "ValueError: too long for this"),
        (ScriptedSampler(failing=[2]), "RuntimeError: the cache is corrupt"),
    ],
    ids=["refused", "failing"],
)
def test_a_prompt_that_no_engine_accepts_ends_the_rollout(sampler: ScriptedSampler, error: str) -> None:
    """The engine serves on, and none of the other prompts of the request remain queued in it."""
    with engine(0, sampler) as client:
        dispatcher, run = rollout([client], 4, start_timeout_s=60.0, stall_timeout_s=60.0)
        with pytest.raises(EnginesLost, match=rf"given up after 8 engines failed on it; .* {error}"):
            asyncio.run(run.run())
        until(lambda: not sampler.waiting)
        others, run = rollout([client], 2)
        asyncio.run(run.run())
    assert not dispatcher.is_done
    assert others.is_done


def test_an_engine_that_fails_at_once_leaves_the_prompts_to_the_others() -> None:
    """It always has the least load: the same prompts would go to it again and again until the rollout gives up."""
    good = ScriptedSampler(delay_s=0.3)
    with engine(0, ScriptedSampler(failing=range(24))) as broken, engine(1, good) as client:
        dispatcher, run = rollout([broken, client], 24, stall_timeout_s=60.0)
        asyncio.run(run.run())
    assert dispatcher.is_done
    assert good.num_made == 24
    assert 0 < dispatcher.num_moved <= 8, "two windows of prompts"
    assert "RuntimeError: the cache is corrupt" in run._last_loss


@pytest.mark.parametrize("fault", ["too few", "other weights"])
def test_completions_other_than_requested_are_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no other engine has the prompts, the rollout ends instead of requesting them for ever."""
    sampler = ScriptedSampler(num_left_out=int(fault == "too few"))
    if fault == "other weights":
        real, other = worker_module._sampled, WeightsId(start=0, version=1)
        monkeypatch.setattr(worker_module, "_sampled", lambda made, *_: real(made, other, other))
    with engine(0, sampler) as client:
        dispatcher, run = rollout([client], 3)
        with pytest.raises(EnginesLost, match=r"given up after 8 .* expected 2 with weights of step 1"):
            asyncio.run(run.run())
    assert not dispatcher.source.made
    assert dispatcher.num_refused > 0


def test_an_engine_that_begins_to_serve_is_a_beat() -> None:
    """Otherwise the ranks that waited while another one sent it the weights would be taken for hung soon after."""
    beats: list[int] = []
    client = EngineClient(EngineAddress(rank=0, generation=1, node="n", host="127.0.0.1", port=1), TOKEN, 5.0)
    _, run = rollout([client], 1, beat=lambda: beats.append(1))
    health = EngineHealth(rank=0, generation=1, weights=None, progress=7, num_waiting=0)
    run._judge(client, health, 0.0)
    assert not beats
    for _ in range(3):
        run._judge(client, health.model_copy(update={"weights": WEIGHTS}), 0.0)
    assert len(beats) == 1


@pytest.mark.parametrize("spans_weights", [True, False])
def test_a_rollout_goes_on_while_engines_get_later_weights(spans_weights: bool) -> None:
    """An engine without weights for a while is not lost, nor are its prompts moved. Control: a rollout that does not
    expect other weights."""
    later, sampler = WeightsId(start=1, version=2), ScriptedSampler(delay_s=0.05)
    with engine(0, sampler) as client:
        dispatcher, run = rollout([client], 24, spans_weights=spans_weights, restore=None)
        background = BackgroundRollout(dispatcher, lambda *_: run)
        until(lambda: dispatcher.source.made)
        if spans_weights:
            run.begin_change()
        for state in ({"_weights": None, "_unconfirmed": later}, {"_weights": later, "_unconfirmed": None}):
            assert sampler.worker is not None
            sampler.worker.call(partial(vars(sampler.worker).update, state)).result()
            time.sleep(3 * POLL_S)
        if spans_weights:
            run.end_change(later)
        background.wait(lambda: None)
    assert dispatcher.is_done == spans_weights
    assert (dispatcher.num_moved == 0) == spans_weights
    assert {made.weight_version for group in dispatcher.source.made.values() for made in group} <= {1, 2}


def test_rollouts_that_lost_all_engines_go_on_with_the_next_weights(ranks: Ranks) -> None:
    """Control: one that is over stays so."""
    later, weights = WeightsId(start=1, version=2), mock.Mock(id=WEIGHTS, version=1)
    with engine(0, ScriptedSampler(), later) as client:
        registry = mock.Mock(clients=partial(without, [client]))
        rollouts = ContinuousRollouts(RolloutSpec(engines=1, max_staleness=2), ranks, registry, weights)
        lost, over = (rollout([client], num_prompts)[0].source for num_prompts in (4, 0))
        for source in (lost, over):
            rollouts.begin(source, 1)
        rollouts.wait(lambda: None)
        before = list(rollouts._begun)
        assert not lost.made
        with rollouts.other_weights(lambda: None):
            weights.id = later
        rollouts.wait(lambda: None)
        assert [begun in before for begun in rollouts._begun] == [False, True]
    assert {made.weight_version for group in lost.results() for made in group} == {2}


@pytest.mark.parametrize(("max_staleness", "prepared"), [(2, "rollout.begin_change"), (1, "wait")])
def test_no_weights_are_sent_before_the_rollouts_of_all_ranks_are_prepared(
    max_staleness: int, prepared: str, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be done with a broadcast long before another rank takes part in it. Of that one, engines would have
    lost all unfinished completions."""
    context = make_context(str(tmp_path), tiny_spec(rollout={"engines": 1, "max_staleness": max_staleness}), 0, 1)
    trainer, steps = RemoteEngines(context, ranks), mock.Mock(**{"begun.is_stranded": False})
    monkeypatch.setattr(Ranks, "barrier", steps.barrier)
    for user in (trainer, trainer.continuous):
        monkeypatch.setattr(user, "_weights", steps.weights)
    trainer.continuous._begun.append(steps.begun)
    trainer.load(tiny_model(), 1, lambda: None)
    names = [name for name, *_ in steps.method_calls]
    assert names[:3] == [f"begun.{prepared}", "barrier", "weights.load"]


class SlowTool(PromptList):
    """Prompts after which a tool is at work for a number of polls."""

    polls_left = 5

    @property
    def num_prompts(self) -> int:
        """Number of prompts, with one that is only known once the tool has answered."""
        return super().num_prompts + (self.polls_left > 0)

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]  # of a list, nothing is ever at work
        """True while the tool is at work."""
        return self.polls_left > 0 and len(self.made) == super().num_prompts

    def take(self, beat: Callable[[], None]) -> Sequence[PromptTask]:
        """Poll the tool."""
        self.polls_left -= self.is_waiting
        return super().take(beat)


@pytest.mark.parametrize("waits_for", ["a tool", "others", "nothing"])
def test_a_rank_that_waits_for_a_tool_or_for_others_goes_on_beating(waits_for: str) -> None:
    """No engine makes progress meanwhile, and a tool may take longer than a rank may be silent. Negative control: a
    rank whose own prompts no engine takes is silent."""
    beats: list[int] = []
    leaves = [False] * 5 if waits_for == "others" else []
    settings = {"beat": lambda: beats.append(1), "may_leave": lambda: not leaves or leaves.pop(), "interval_s": 60.0}
    with engine(0, ScriptedSampler()) as client:
        clients = [] if waits_for == "nothing" else [client]
        prompts = SlowTool if waits_for == "a tool" else PromptList
        dispatcher, run = rollout(clients, 1, prompts=prompts, start_timeout_s=1.0, **settings)
        with contextlib.nullcontext() if clients else pytest.raises(EnginesLost):
            asyncio.run(run.run())
    assert dispatcher.is_done == bool(clients)
    assert len(beats) >= 5 if clients else not beats


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_engines_are_reached_whatever_proxy_there_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with engine(0, ScriptedSampler()) as client:
        dispatcher, run = rollout([client], 2)
        asyncio.run(run.run())
    assert dispatcher.is_done


def test_an_engine_that_was_slow_once_serves_again_in_the_same_rollout() -> None:
    """Its requests are withdrawn, after which it has nothing to make progress on."""
    slow = [3.0]

    def text(number: int) -> str:
        time.sleep(slow.pop() if slow else 0.0)
        return str(number)

    with engine(0, ScriptedSampler(text)) as client:
        dispatcher, run = rollout([client], 3, stall_timeout_s=0.5, start_timeout_s=10.0)
        asyncio.run(run.run())
    assert texts(dispatcher) == ["0", "1", "2"]
    assert dispatcher.num_moved > 0


def test_an_engine_that_works_while_another_is_sent_weights_is_not_given_up() -> None:
    """Sending blocks the rollout, and a response that waits meanwhile has the progress of the time before."""
    other = WeightsId(start=2, version=0)
    counts = [0]
    with engine(0, ScriptedSampler(delay_s=0.6)) as busy, engine(1, ScriptedSampler(), other) as restarted:
        health, waiting, sent = busy.health, asyncio.Event(), asyncio.Event()

        async def before(http: httpx.AsyncClient) -> EngineHealth:
            found = await health(http)
            if found.progress == counts[-1] > 0:
                waiting.set()
                await sent.wait()  # its answer is read only after the weights have been sent
            counts.append(found.progress)
            return found

        def send(client: EngineClient) -> None:
            if waiting.is_set() and not sent.is_set():
                time.sleep(1.5)
                sent.set()

        dispatcher, run = rollout([busy, restarted], 8, restore=send, start_timeout_s=20.0)
        with mock.patch.object(busy, "health", before):
            asyncio.run(run.run())
    assert sent.is_set()
    assert dispatcher.is_done
    assert dispatcher.num_moved == 0


def test_an_engine_that_is_gone_does_not_keep_the_others_from_being_given_weights() -> None:
    """One engine has returned with other weights, which only a sync can fix; the address of a dead engine remains."""
    other = WeightsId(start=2, version=0)
    with engine(0, ScriptedSampler()) as gone:
        pass
    with engine(1, ScriptedSampler(), other) as restarted:
        dispatcher, run = rollout([gone, restarted], 2, restore=None, start_timeout_s=30.0)
        began = time.monotonic()
        asyncio.run(run.run())
        assert time.monotonic() - began > 1.0, "its time to return is over"
    assert dispatcher.num_missing == 2


def test_engines_share_the_prompts_whichever_responds_first() -> None:
    """A window that has room for all of them is no reason to send them to one engine."""
    samplers = [ScriptedSampler(), ScriptedSampler()]
    with engine(0, samplers[0]) as quick, engine(1, samplers[1]) as slow:
        health = slow.health

        async def later(http: httpx.AsyncClient) -> EngineHealth:
            await asyncio.sleep(0.1)
            return await health(http)

        dispatcher, run = rollout([quick, slow], 4)
        with mock.patch.object(slow, "health", later):
            asyncio.run(run.run())
    assert dispatcher.is_done
    assert [sampler.num_made for sampler in samplers] == [2, 2]


def test_an_engine_that_does_not_respond_delays_no_prompt_for_long() -> None:
    async def never(http: httpx.AsyncClient) -> EngineHealth:
        await asyncio.sleep(60)
        raise AssertionError("the rollout waited for it")

    with engine(0, ScriptedSampler()) as client, engine(1, ScriptedSampler()) as hung:
        dispatcher, run = rollout([client, hung], 4)
        with mock.patch.object(hung, "health", never):
            asyncio.run(run.run())
    assert dispatcher.is_done


def test_the_address_of_an_engine_is_read_again_once_it_is_lost() -> None:
    """Every rank reads those of all engines, from a file system that all share."""
    known: list[list[int]] = []
    with engine(0, ScriptedSampler(delay_s=0.01)) as client:
        lost = EngineClient(client.address.model_copy(update={"rank": 1}), TOKEN, 5.0)  # another one responds there
        dispatcher, run = rollout([], 40, interval_s=0.02, may_leave=lambda: len(known) >= 6)

        def read(ranks: Collection[int]) -> list[EngineClient]:
            known.append(sorted(ranks))
            return without([client, lost] if len(known) < 4 else [client], ranks)

        run._clients = read
        asyncio.run(run.run())
    assert known[0] == []
    assert all(0 in ranks for ranks in known[1:])
    assert [0] in known
    assert dispatcher.is_done


def test_an_engine_that_keeps_failing_costs_the_next_versions_no_sync(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again later, and forgiven once it acknowledges a version."""
    clock = mock.Mock(**{"monotonic.return_value": 1e6})
    monkeypatch.setattr(registry_module, "time", clock)
    context = make_context(str(tmp_path), tiny_spec(rollout={"engines": 2, "sync": {"transport": "files"}}), 0, 1)
    trainer = RemoteEngines(context, ranks)
    addresses = [EngineAddress(rank=rank, generation=0, node="n", host="127.0.0.1", port=1) for rank in range(2)]
    clients = [EngineClient(one, TOKEN, 5.0) for one in addresses]
    monkeypatch.setattr(trainer._weights, "_live_engines", lambda beat: clients)
    tried: list[list[str]] = []
    fails = True

    def send(engines: Sequence[EngineClient], model: Any, version: int, *_: Any) -> Any:
        names = [one.name for one in engines]
        tried.append(names)
        if fails and "engine-1" in names:
            raise WeightSyncFailed("engine-1: no link", "engine-1")
        return mock.MagicMock(lost={}, applied=dict.fromkeys(names, 0.0), wire_s=0.0, apply_s=0.0)

    trainer._weights._publisher = mock.Mock(send=send)
    versions = iter(range(1, 10))

    def load() -> list[int]:
        tried.clear()
        trainer.load(tiny_model(), next(versions), lambda: None)
        return list(map(len, tried))

    assert load() == [2, 2, 1]
    assert load() == [1]
    clock.monotonic.return_value += context.spec.rollout.remote.sync_timeout_s
    assert load() == [2, 1]
    clock.monotonic.return_value += context.spec.rollout.remote.sync_timeout_s
    assert load() == [1], "longer every time"
    clock.monotonic.return_value += context.spec.rollout.remote.sync_timeout_s
    fails = False
    assert load() == [2]
    fails = True
    assert load() == [2, 2, 1]


def test_a_disk_that_is_full_in_a_sync_ends_the_run_as_such(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would otherwise be taken for a failure of the engines, which are started again and again."""
    context = make_context(str(tmp_path), tiny_spec(rollout={"engines": 1, "sync": {"transport": "files"}}), 0, 1)
    trainer = RemoteEngines(context, ranks)
    monkeypatch.setattr(trainer._weights, "_live_engines", lambda beat: [])
    trainer._weights._publisher = mock.Mock(send=mock.Mock(side_effect=DiskFull("no room for version 1")))
    with pytest.raises(DiskFull, match="no room for version 1"):
        trainer.load(tiny_model(), 1, lambda: None)


def test_versions_that_a_killed_attempt_left_are_removed(tmp_path: Path) -> None:
    spec = tiny_spec(rollout={"engines": 2, "sync": {"transport": "files"}})
    context = dataclasses.replace(make_context(str(tmp_path), spec, 0, 1), attempt=3)
    folders = [context.run_dir.attempt(number).weights for number in (1, 2, 3)]
    for folder in folders:
        (folder / "00000007").mkdir(parents=True)
    WeightPublisher(context, None)
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert context.run_dir.attempt(2).engines.exists()


def test_checks_of_engines_take_a_small_part_of_a_core() -> None:
    """An engine could answer 2,000 a second and do nothing else, but five from each of 512 ranks are more."""
    assert check_interval_s(8, 16) == POLL_S
    for num_engines, num_ranks in ((64, 512), (512, 64), (1, 4096)):
        interval_s = check_interval_s(num_engines, num_ranks)
        assert num_engines / interval_s * 2e-3 <= 0.2
        assert num_ranks / interval_s * 0.5e-3 <= 0.2


def test_engines_are_checked_at_the_interval() -> None:
    checks = []
    with engine(0, ScriptedSampler(delay_s=0.05)) as client:
        dispatcher, run = rollout([client], 20, interval_s=30.0)
        health = client.health
        with mock.patch.object(client, "health", lambda http: checks.append(1) or health(http)):
            asyncio.run(run.run())
    assert dispatcher.is_done
    assert len(checks) == 1
