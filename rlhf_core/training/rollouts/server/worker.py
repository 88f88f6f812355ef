"""The main thread of an engine's process, which samples, loads weights and sends heartbeats, even when idle.

The server thread (``app.py``) passes it the requests from the network.
"""

import itertools
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from rlhf_core.errors import DiskFull, SamplingFailed, StaleWeights
from rlhf_core.files.whole import comes_from_full_disk
from rlhf_core.schemas.engines import (
    CommitRequest,
    Committed,
    EngineHealth,
    EngineRefusal,
    SampledCompletion,
    SampledPrompt,
    SampleRequest,
    WeightsId,
    WeightsRefused,
)
from rlhf_core.schemas.reports import Phase
from rlhf_core.survival import Survived
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.remote.rollout import MAX_MOVES
from rlhf_core.training.rollouts.samplers import Sampler, SamplerRequest
from rlhf_core.training.rollouts.weight_probe import require_finite
from rlhf_core.training.types import Completion, Reporter
from rlhf_core.weight_sync.receiver import Receiver, StagedVersion

IDLE_BEAT_S = 0.1
"""Heartbeat interval of an idle engine."""
MAX_REFUSED = 2
"""Number of consecutive syncs with outputs that do not match the weights, after which an engine exits. One may be
chance; after two, only a restart can help."""
MAX_FAILED = MAX_MOVES + 2
"""Number of failed requests without a completion in between, after which an engine exits: one more than a single prompt
can cause before its rollout gives up, so an engine is not restarted for a prompt that fails on all of them."""

Answer = TypeVar("Answer")
Deliver = Callable[[SampledPrompt | EngineRefusal], None]
"""Accepts a line of a response, from any thread, without blocking."""


@dataclass(frozen=True)
class _PendingPrompt:
    """A prompt of an active request."""

    index: int
    deliver: Deliver
    begun_with: WeightsId
    """Weights of the engine when it was requested."""
    spans_weights: bool

    def outlives(self, weights: WeightsId) -> bool:
        """True if it may be continued with these weights."""
        return self.spans_weights and _are_later(weights, self.begun_with)


class EngineWorker:
    """One engine: a sampler, the current weights and the active requests."""

    def __init__(
        self, rank: int, generation: int, sampler: Sampler, receiver: Receiver, reporter: Reporter, base: str = ""
    ) -> None:
        """Start without weights.

        Args:
            base: digest of the base model of the adapters to load; empty for full weights.
        """
        self._rank = rank
        self._generation = generation
        self._sampler = sampler
        self._receiver = receiver
        self._base = base
        self._reporter = reporter
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wanted: dict[int, _PendingPrompt] = {}
        self._keys = itertools.count()
        self._progress = 0
        self._weights: WeightsId | None = None
        self._unconfirmed: WeightsId | None = None
        self._refusals: list[StaleWeights | DiskFull] = []
        self._failures: list[str] = []

    # -----------------------------------------------------------------------------------------------------------------
    # From any thread

    def health(self) -> EngineHealth:
        """Current state.

        Raises:
            StaleWeights, DiskFull, SamplingFailed: the engine is about to exit, for the reason given at :meth:`serve`.
        """
        self._require_use()
        return EngineHealth(
            rank=self._rank,
            generation=self._generation,
            weights=self._weights,
            progress=self._progress,
            num_waiting=self._sampler.num_waiting,
        )

    def call(self, function: Callable[[], Answer]) -> "Future[Answer]":
        """Have the main thread call a function between two decoding steps."""
        answer: Future[Answer] = Future()

        def run() -> None:
            with Survived() as outcome:  # raised when the answer is waited for
                answer.set_result(function())
            if outcome.error is not None:
                answer.set_exception(outcome.error)

        self._calls.put(run)
        return answer

    # -----------------------------------------------------------------------------------------------------------------
    # In the main thread

    def serve(self, is_served: Callable[[], bool]) -> None:
        """Process requests while the server is running.

        Raises:
            StaleWeights: it did not load the weights of :data:`MAX_REFUSED` syncs in a row, or not correctly.
            DiskFull: likewise, in the last one because a disk is full.
            SamplingFailed: it failed :data:`MAX_FAILED` requests in a row that were not at fault themselves.
        """
        while is_served():
            self._require_use()
            busy = bool(self._wanted) and self._weights is not None
            self._beat(Phase.ROLLOUT)
            try:
                self._calls.get(block=not busy, timeout=IDLE_BEAT_S)()
            except queue.Empty:
                pass
            else:
                continue  # all pending requests are accepted before the next batch begins
            if busy:
                self._sample()

    def begin(self, request: SampleRequest, deliver: Deliver) -> list[int]:
        """Accept a request.

        Returns:
            Keys of its prompts, for :meth:`drop`.

        Raises:
            StaleWeights: it requests weights other than the current ones.
            ValueError: the sampler refuses a prompt.
            Exception: the sampler fails.
        """
        # While the trainer has yet to confirm weights, a prompt that may be sampled with them waits for that.
        current = self._weights or (self._unconfirmed if request.spans_weights else None)
        is_later = request.spans_weights and current is not None and _are_later(current, request.weights)
        if current is None or not (is_later or request.weights == current):
            raise StaleWeights(
                f"engine {self._rank} has {_shown(self._weights)} active, but completions with "
                f"{_shown(request.weights)} were requested; nothing was sampled"
            )
        sampling = Sampling(**request.model_dump(exclude={"weights", "spans_weights", "prompts"}))
        keys: list[int] = []
        try:
            for one in request.prompts:
                keys.append(next(self._keys))
                self._wanted[keys[-1]] = _PendingPrompt(one.index, deliver, current, request.spans_weights)
                self._sampler.submit(SamplerRequest(keys[-1], one.prompt, one.seeds, sampling))
        except BaseException as error:
            if not isinstance(error, ValueError):  # which is the fault of the request
                self._failures.append(f"{type(error).__name__}: {error}")
            self.drop(keys)  # no client waits for its other prompts
            raise
        return keys

    def drop(self, keys: list[int]) -> None:
        """Drop prompts whose client is gone."""
        self._sampler.cancel(keys)
        for key in keys:
            self._wanted.pop(key, None)

    def commit(self, request: CommitRequest) -> Committed:
        """Load the staged weights and return the probe computed with them. They become current once the trainer
        confirms it; until then, prompts that span weights are paused. Others are refused.

        Raises:
            WeightSyncFailed: they are not staged; the old ones stay current.
            StaleWeights: they are not weights of this model; the engine then has no current weights.
            NonFiniteLoss: likewise, because a log-probability of the probe is not finite.
        """
        staged = self._receiver.commit(request.weights.version)
        self._refuse(
            [key for key, wanted in self._wanted.items() if not wanted.outlives(request.weights)],
            f"{_shown(request.weights)} becomes active",
        )
        self._weights = self._unconfirmed = None
        try:
            self._sampler.pause()
            committed = self._take_over(request, staged)
        except Exception as error:
            self._refuse(list(self._wanted), "it has no weights")
            kind = DiskFull if comes_from_full_disk(error) else StaleWeights
            self._refusals.append(kind(f"{type(error).__name__}: {error}"))
            raise
        self._unconfirmed = request.weights
        return committed

    def _take_over(self, request: CommitRequest, staged: StagedVersion) -> Committed:
        started = time.monotonic()
        self._sampler.load(staged.tensors(), lambda: self._beat(Phase.WEIGHT_SYNC))
        seconds = time.monotonic() - started
        logprobs = self._sampler.score(request.probe)
        require_finite(logprobs)
        return Committed(
            apply_s=seconds,
            probe_logprobs=tuple(logprobs),
            base=self._base,
            num_differing=self._sampler.count_differing(staged.tensors()),
        )

    def confirm(self, weights: WeightsId) -> None:
        """Make the loaded weights current.

        Raises:
            StaleWeights: other weights were loaded last.
        """
        self._require_unconfirmed(weights)
        self._weights, self._unconfirmed = weights, None
        self._refusals = []
        self._sampler.resume()

    def refuse(self, refusal: WeightsRefused) -> None:
        """Drop the current weights, because the trainer found that the engine's outputs do not match them.

        Raises:
            StaleWeights: other weights were loaded last.
        """
        self._require_unconfirmed(refusal.weights)
        self._unconfirmed = None
        self._refuse(list(self._wanted), "it has no weights")
        self._refusals.append(StaleWeights(refusal.why))

    def _require_unconfirmed(self, weights: WeightsId) -> None:
        if weights != self._unconfirmed:
            raise StaleWeights(f"engine {self._rank} applied {_shown(self._unconfirmed)}, not {_shown(weights)}")

    def _require_use(self) -> None:
        if len(self._refusals) >= MAX_REFUSED:
            last = self._refusals[-1]
            raise type(last)(
                f"engine {self._rank} did not load its weights, or not correctly, in {len(self._refusals)} syncs in a "
                f"row and exits: {last}"
            )
        if len(self._failures) >= MAX_FAILED:
            raise SamplingFailed(
                f"engine {self._rank} failed {len(self._failures)} requests in a row, without a completion in between, "
                f"and exits for a restart. The last error: {self._failures[-1]}"
            )

    def _sample(self) -> None:
        weights = self._weights
        assert weights is not None  # as serve() has made sure
        for key, completions in self._sampler.step(self._progressed):
            self._failures = []
            wanted = self._wanted.pop(key, None)
            if wanted is not None:
                made = tuple(_sampled(one, weights, wanted.begun_with) for one in completions)
                wanted.deliver(SampledPrompt(index=wanted.index, completions=made))

    def _refuse(self, keys: list[int], why: str) -> None:
        refused = [self._wanted[key] for key in keys]
        self.drop(keys)
        for wanted in refused:
            wanted.deliver(EngineRefusal(error=f"engine {self._rank} no longer samples a prompt: {why}"))

    def _progressed(self) -> None:
        self._progress += 1
        self._beat(Phase.ROLLOUT)

    def _beat(self, phase: Phase) -> None:
        self._reporter.beat(phase, self._weights.version if self._weights is not None else 0)


def _are_later(weights: WeightsId, begun_with: WeightsId) -> bool:
    """True if weights are the given ones, or later ones of the same start of the trainers."""
    return weights.start == begun_with.start and weights.version >= begun_with.version


def _sampled(completion: Completion, weights: WeightsId, begun_with: WeightsId) -> SampledCompletion:
    return SampledCompletion(
        token_ids=tuple(completion.token_ids),
        text=completion.text,
        finished=completion.finished,
        logprobs=tuple(completion.logprobs),
        weights=weights,
        begun_with=begun_with,
    )


def _shown(weights: WeightsId | None) -> str:
    return "no weights" if weights is None else f"weights of step {weights.version} (start {weights.start})"
