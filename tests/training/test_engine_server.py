"""The server of an engine, in this process and over real HTTP."""

import errno
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from unittest.mock import Mock

import httpx
import pytest

from rlhf_core.errors import DiskFull, NonFiniteLoss, SamplingFailed, StaleWeights, WorkerError
from rlhf_core.schemas.engines import (
    CommitRequest,
    EngineRefusal,
    PromptRequest,
    SampledPrompt,
    SampleRequest,
    WeightsId,
    WeightsRefused,
)
from rlhf_core.schemas.weight_sync import Chain, Manifest, Offer, Receipt, Transport
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.remote.rollout import MAX_MOVES
from rlhf_core.training.rollouts.samplers import Sampler
from rlhf_core.training.rollouts.server import app
from rlhf_core.training.rollouts.server.app import EngineServer
from rlhf_core.training.rollouts.server.worker import MAX_FAILED, EngineWorker
from rlhf_core.training.types import Completion, NullReporter
from rlhf_core.weight_sync.receiver import Receiver, StagedVersion

pytestmark = [pytest.mark.training]

OFFER = Offer(
    transport=Transport.FILES,
    manifest=Manifest(version=7, tensors=(), bucket_bytes=64),
    receiver="engine-0",
    chains=(Chain(sender="trainer-0", receivers=("engine-0",)),),
    stall_timeout_s=0.2,
)
LIMIT_S = 0.6
WEIGHTS = WeightsId(start=0, version=7)
SAMPLING = Sampling(4, temperature=0.5, batch_size=3, end_ids=(9,), top_p=0.9, top_k=7, min_p=0.1, stop=("\n",))
RECEIPT = Receipt(version=7, digest="", wire_s=0.0)


class SlowReceiver(Receiver):
    """A receiver that accepts a version once it is released; until then it may report progress."""

    def __init__(self, shows_progress: bool) -> None:
        super().__init__("engine-0")
        self.released = threading.Event()
        self._shows_progress = shows_progress

    def receive(self, offer: Offer, beat: Callable[[], None]) -> StagedVersion:
        """Wait instead of receiving."""
        while not self.released.wait(0.01):
            if self._shows_progress:
                beat()
        return StagedVersion(RECEIPT, offer.manifest, None)  # type: ignore[arg-type]  # it has no tensors


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(app, "ALIVE_INTERVAL_S", 0.05)


def served(receiver: Receiver) -> EngineServer:
    sampler: Sampler = None  # type: ignore[assignment]  # nothing is sampled
    return EngineServer(EngineWorker(0, 0, sampler, receiver, NullReporter()), receiver, b"token", "127.0.0.1")


def sampling_worker(sampler: Mock) -> EngineWorker:
    worker = EngineWorker(0, 0, sampler, SlowReceiver(shows_progress=True), NullReporter())
    worker._weights = WEIGHTS
    return worker


def requested(worker: EngineWorker, weights: WeightsId = WEIGHTS) -> None:
    """Request completions of one prompt."""
    prompts = (PromptRequest(index=0, prompt=(1, 2), seeds=(5,)),)
    worker.begin(SampleRequest(weights=weights, prompts=prompts, **asdict(SAMPLING)), lambda answer: None)


def test_an_engine_samples_with_the_settings_of_the_request() -> None:
    sampler = Mock()
    requested(sampling_worker(sampler))
    assert sampler.submit.call_args.args[0].sampling == SAMPLING


BROKEN, TOO_LONG = RuntimeError("the cache is corrupt"), ValueError("too long for this engine")
"""A failure of the engine, and one that is the fault of the request."""


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        ([BROKEN] * MAX_FAILED, True),
        ([BROKEN] * (MAX_FAILED - 1) + [TOO_LONG, BROKEN], True),
        ([BROKEN] * (MAX_MOVES + 1), False),
        ([TOO_LONG] * 2 * MAX_FAILED, False),
        ([BROKEN, None] * MAX_FAILED, False),
    ],
    ids=["broken", "broken and a wrong request", "one prompt", "wrong requests", "completions in between"],
)
def test_an_engine_that_fails_every_request_ends_with_the_last_error(
    errors: list[Exception | None], ends: bool
) -> None:
    sampler = Mock(num_waiting=0, **{"step.return_value": [(0, [Completion([1], "", True, [0.0])])]})
    sampler.submit.side_effect = errors
    worker = sampling_worker(sampler)
    for error in errors:
        worker.health()
        with pytest.raises(type(error)) if error is not None else nullcontext():
            requested(worker)
        if error is None:
            worker._sample()
    with pytest.raises(SamplingFailed, match=r"RuntimeError: the cache is corrupt$") if ends else nullcontext():
        worker.serve(iter([True, False]).__next__)


def test_requests_for_other_weights_are_no_failures_of_the_engine() -> None:
    worker = sampling_worker(Mock(num_waiting=0))
    for _ in range(MAX_FAILED):
        with pytest.raises(StaleWeights):
            requested(worker, weights=WeightsId(start=0, version=8))
    assert worker.health().weights == WEIGHTS


LATER = WeightsId(start=0, version=8)


def spanning_worker(sampler: Mock) -> tuple[EngineWorker, dict[str, list[SampledPrompt | EngineRefusal]]]:
    """A worker with a prompt that may span weights, and one that may not; and what each is answered."""
    worker = EngineWorker(0, 0, sampler, Mock(), NullReporter())
    worker._weights = WEIGHTS
    answers: dict[str, list[SampledPrompt | EngineRefusal]] = {"spans": [], "fixed": []}
    for name, found in answers.items():
        begun(worker, found, name == "spans")
    return worker, answers


def begun(worker: EngineWorker, answers: list[SampledPrompt | EngineRefusal], spans_weights: bool) -> None:
    prompts = (PromptRequest(index=0, prompt=(1, 2), seeds=(5,)),)
    request = SampleRequest(weights=WEIGHTS, spans_weights=spans_weights, prompts=prompts, **asdict(SAMPLING))
    worker.begin(request, answers.append)


def loading_sampler() -> Mock:
    made = Completion([1], "", True, [0.0])
    return Mock(num_waiting=1, **{"score.return_value": [-1.0], "count_differing.return_value": 0}, made=made)


def test_a_prompt_that_spans_weights_is_continued_once_they_are_confirmed() -> None:
    """It is not sampled while the trainer compares outputs, and one that comes meanwhile waits for that, too. The other
    kind is refused."""
    sampler = loading_sampler()
    worker, answers = spanning_worker(sampler)
    worker.commit(CommitRequest(weights=LATER, probe=(1, 2)))
    assert [type(answer) for answer in answers["fixed"]] == [EngineRefusal]
    late: list[SampledPrompt | EngineRefusal] = []
    begun(worker, late, True)
    with pytest.raises(StaleWeights):
        begun(worker, [], False)
    worker.serve(iter([True, False]).__next__)
    sampler.step.assert_not_called()
    worker.confirm(LATER)
    calls = [name for name, *_ in sampler.method_calls if name in ("pause", "load", "score", "submit", "resume")]
    assert calls == ["submit", "submit", "pause", "load", "score", "submit", "resume"]
    sampler.step.return_value = [(0, [sampler.made]), (2, [sampler.made])]
    worker._sample()
    ((first,), (second,)) = (one.completions for one in (*answers["spans"], *late) if isinstance(one, SampledPrompt))
    assert (first.begun_with, first.weights) == (WEIGHTS, LATER)
    assert (second.begun_with, second.weights) == (LATER, LATER)


@pytest.mark.parametrize("fault", ["not loaded", "refused", "of another start"])
def test_a_prompt_is_refused_if_the_engine_does_not_get_later_weights(fault: str) -> None:
    """Nothing is sampled with weights that are not those of the trainer, and no prompt is waited for in vain."""
    sampler = loading_sampler()
    worker, answers = spanning_worker(sampler)
    weights = WeightsId(start=1, version=8) if fault == "of another start" else LATER
    if fault == "not loaded":
        sampler.load.side_effect = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) if fault == "not loaded" else nullcontext():
        worker.commit(CommitRequest(weights=weights, probe=(1, 2)))
    if fault == "refused":
        assert not answers["spans"]
        worker.refuse(WeightsRefused(weights=weights, why="its outputs differ"))
    assert [type(answer) for answer in answers["spans"]] == [EngineRefusal]
    assert {key for call in sampler.cancel.call_args_list for key in call.args[0]} == {0, 1}


def offered(server: EngineServer, receiver: SlowReceiver, limits: int) -> bytes:
    """Answer of an engine to an offer; the receiver is released after this multiple of the limit."""
    release = threading.Timer(limits * LIMIT_S, receiver.released.set)
    release.start()
    url = f"http://127.0.0.1:{server.port}/weights/receive"
    answer = httpx.post(url, content=OFFER.model_dump_json(), headers={"authorization": "Bearer token"}, timeout=60.0)
    release.cancel()
    return answer.content


def test_an_engine_whose_transfer_hangs_refuses_the_version_and_ends() -> None:
    """A file system or a GPU that does not return is not covered by any limit of the transfer itself."""
    receiver = SlowReceiver(shows_progress=False)
    with served(receiver) as server:
        assert server.is_alive
        refusal = EngineRefusal.model_validate_json(offered(server, receiver, limits=20))
        assert refusal.peer == "engine-0"
        assert "has made no progress with version 7" in refusal.error
        assert not server.is_alive, "the agent restarts the engine once it has exited"
        receiver.released.set()


def test_an_engine_that_takes_long_and_makes_progress_is_waited_for() -> None:
    """Reading a large model from a file system takes longer than any wait for a part of it."""
    receiver = SlowReceiver(shows_progress=True)
    with served(receiver) as server:
        assert Receipt.model_validate_json(offered(server, receiver, limits=4)) == RECEIPT
        assert server.is_alive


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/adapter-1"), DiskFull),
        (RuntimeError("I/O error: No space left on device (os error 28)"), DiskFull),
        (RuntimeError("out of memory"), StaleWeights),
    ],
    ids=["system", "safetensors", "control"],
)
def test_an_engine_that_cannot_load_its_weights_ends_for_the_reason(error: Exception, kind: type[WorkerError]) -> None:
    """vLLM reads adapters from the folder for temporary files. If that is full, restarts only repeat the failure."""
    receiver = Receiver("engine-0")
    worker = EngineWorker(0, 0, Mock(**{"load.side_effect": error}), receiver, NullReporter())
    for _ in range(2):
        receiver._staged = StagedVersion(RECEIPT, OFFER.manifest, None)  # type: ignore[arg-type]  # it has no tensors
        with pytest.raises(type(error)):
            worker.commit(CommitRequest(weights=WeightsId(start=0, version=7), probe=()))
    with pytest.raises(kind) as raised:
        worker.serve(lambda: True)
    assert str(error) in str(raised.value)


def test_a_probe_that_is_not_finite_is_named_as_such() -> None:
    """The trainer's is finite, so the kernels of the engine overflow; JSON has no such numbers."""
    receiver = Receiver("engine-0")
    sampler = Mock(num_waiting=0, **{"score.return_value": [-1.0, math.nan]})
    worker = EngineWorker(0, 0, sampler, receiver, NullReporter())
    receiver._staged = StagedVersion(RECEIPT, OFFER.manifest, None)  # type: ignore[arg-type]  # it has no tensors
    with pytest.raises(NonFiniteLoss, match="the log-probability nan"):
        worker.commit(CommitRequest(weights=WeightsId(start=0, version=7), probe=(1, 2, 3)))
    assert worker.health().weights is None
