"""A trainer rank's view of the rollout engines, which form their own group (``rollout.engines``).

Rank 0 sends the weights of every version to all live engines, alone or together with other ranks that send a share
each; every rank sends its own prompts to all engines. When an engine fails, its prompts go to the others, its agent
restarts it, and it serves again once rank 0 has sent it the weights.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import httpx
from transformers import PreTrainedModel

from rlhf_core.errors import EnginesLost, StaleWeights, WeightSyncFailed, WorkerError
from rlhf_core.files.whole import read_all, shared_secret
from rlhf_core.schemas.engines import EngineAddress, WeightsId
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.checkpoints.soundness import initial_folder
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.adapters import base_fingerprint
from rlhf_core.training.models.gathering import is_split
from rlhf_core.training.rollouts.base import Sampling, WeightTransfer, require_prompts, require_version
from rlhf_core.training.rollouts.http_clients import async_engine_http
from rlhf_core.training.rollouts.remote.background import RolloutAhead
from rlhf_core.training.rollouts.remote.client import EngineClient, EngineUnusable, HttpEngineControl
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher, PromptTask
from rlhf_core.training.rollouts.remote.rollout import RemoteRollout, check_interval_s
from rlhf_core.training.rollouts.remote.weights import WeightPublisher, give_along, join_senders, outgoing_of
from rlhf_core.training.rollouts.weight_probe import WeightProbe, probe_of
from rlhf_core.training.types import Completion, WorkerContext
from rlhf_core.weight_sync.further_sender import FurtherSender

Answer = TypeVar("Answer")

MAX_SYNCS = 3
"""Number of attempts to send a version: an engine may be lost in each."""
POLL_S = 0.2
COUNTS = (
    "rollout/moved_prompts",
    "rollout/refused_completions",
    "rollout/sync_bytes",
    "time/weight_wire_s",
    "time/weight_apply_s",
)
"""Metrics, the same on every rank; those of syncs come from rank 0."""


class RemoteEngines:
    """All engines of the group behind the interface of a single one; see ``base.RolloutEngine``."""

    def __init__(self, context: WorkerContext, ranks: Ranks) -> None:
        spec = context.spec
        self.version: int | None = None
        self._spec = spec.rollout
        # While engines start. Longer silences would raise the limit of this phase; more beats would soon make it warm,
        # and the first sync, which opens links and compiles, would get only the time of later ones.
        self._beat_every_s = spec.supervise.weight_sync_floor_s / spec.supervise.gap_factor
        self._dtype = spec.model.dtype
        self._max_tokens = spec.max_tokens
        self._start = context.restart
        self._ranks = ranks
        self._attempt = context.run_dir.attempt(context.attempt)
        self._token = shared_secret(self._attempt.engine_key)
        group = join_senders(context, ranks)
        self._sync = WeightPublisher(context, group) if ranks.is_first else None
        self._share = FurtherSender(outgoing_of(context), group) if group and not ranks.is_first else None
        self._base = ""
        if ranks.is_first and spec.model.lora is not None:
            # Computed now, while the files are the ones that the trainers read.
            self._base = base_fingerprint(
                initial_folder(spec, context.run_dir), partial(ranks.reporter.beat, Phase.SETUP, 0)
            )
        self._model: PreTrainedModel | None = None
        self._probe: WeightProbe | None = None
        self._restore_at_s: dict[tuple[int, int], float] = {}
        self._failures: dict[tuple[int, int], tuple[int, float]] = {}
        self._num_rollouts = 0
        self._was_complete = False
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self.ahead = RolloutAhead(self._dispatcher, self._rollout, self._finish)

    # -----------------------------------------------------------------------------------------------------------------
    # Weights

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> WeightTransfer | None:
        """Load a version into all live engines. Collective.

        Returns:
            The transfer by rank 0; None on other ranks, and if the version is already current.

        Raises:
            EnginesLost: there is no engine, and none started in time.
            StaleWeights: with these weights, every engine's outputs differ from the trainer's.
        """
        if self.version == version:
            return None
        beat()  # its phase tells the agent that silence from here on may be a wait for engines
        if self.ahead.is_begun:
            self.ahead.wait(beat)
            self._ranks.barrier()  # engines with the next version would refuse another rank's prompts
        self.version = None
        self._model = model
        self._probe = probe_of(model, self._max_tokens, self._dtype)
        problem: WorkerError | None = None
        for _ in range(MAX_SYNCS):
            live_engines = self._live_engines(beat)
            now_s = time.monotonic()
            others = [one for one in live_engines if self._failures.get(one.start, (0, 0.0))[1] <= now_s]
            problem, transfer = self._send(others or live_engines, model, version, beat)
            if problem is None:
                self.version = version
                return transfer
            self._ranks.log(f"the engines did not receive the weights of step {version}: {problem}")
            if isinstance(problem, WeightSyncFailed):
                blamed = {problem.peer, *problem.others}
                self._blame([engine for engine in live_engines if engine.name in blamed])
        assert problem is not None
        raise problem

    def _blame(self, engines: Iterable[EngineClient]) -> None:
        """Leave engines out of the next syncs after their second failure in a row, each time for longer.

        The first one may be due to a restart at that moment; links are then made anew.
        """
        for engine in engines:
            count, _ = self._failures.get(engine.start, (0, 0.0))
            until_s = time.monotonic() + count * self._spec.remote.sync_timeout_s
            self._failures[engine.start] = count + 1, until_s

    def _send(
        self, engines: Sequence[EngineClient], model: PreTrainedModel, version: int, beat: Callable[[], None]
    ) -> tuple[WorkerError | None, WeightTransfer | None]:
        """Try once to send a version to the engines; return rank 0's problem and its transfer. Collective.

        The transfer is None on other ranks, and if there was a problem.
        """
        sync = self._sync
        if sync is None:
            give_along(model, self._share, beat)

        def send() -> WeightTransfer:
            assert sync is not None  # only rank 0 calls it
            report = sync.send(self._controlled(engines, version), model, version, beat)
            for engine in engines:
                if engine.name in report.applied:
                    self._failures.pop(engine.start, None)
            self._counts["time/weight_wire_s"] += report.wire_s
            self._counts["time/weight_apply_s"] += report.apply_s
            self._counts["rollout/sync_bytes"] += report.sent.bytes_sent
            for name, why in report.lost.items():
                self._ranks.log(f"{name} does not serve at step {version}: {why}")
            return WeightTransfer(
                sync.way,
                report.sent.bytes_sent,
                wire_s=report.wire_s,
                apply_s=report.apply_s,
                acknowledged=len(report.applied),
            )

        return self._from_first(send)

    def _live_engines(self, beat: Callable[[], None]) -> list[EngineClient]:
        """Engines that respond to rank 0, on rank 0. Waits for all engines the first time, later for at least one.
        Collective.

        Raises:
            EnginesLost: no engine responds in time.
        """
        problem, found = self._from_first(lambda: asyncio.run(self._wait_for_engines(beat)))
        if problem is not None:
            raise problem
        return found or []

    async def _wait_for_engines(self, beat: Callable[[], None]) -> list[EngineClient]:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._spec.remote.start_timeout_s
        beat_at_s = loop.time() + self._beat_every_s
        wanted = 1 if self._was_complete else self._spec.engines
        async with async_engine_http() as http:
            while True:
                clients = self._clients()
                answers = await asyncio.gather(*(client.health(http) for client in clients), return_exceptions=True)
                live_engines = [one for one, answer in zip(clients, answers, strict=True) if not _is_unusable(answer)]
                if len(live_engines) >= wanted or (live_engines and loop.time() > deadline_s):
                    self._was_complete = True
                    beat()
                    return live_engines
                if loop.time() > deadline_s:
                    problems = "; ".join(str(one) for one in answers) or "no engine has registered"
                    raise EnginesLost(
                        "no rollout engine responded within rollout.remote.start_timeout_s = "
                        f"{self._spec.remote.start_timeout_s:g} ({problems}). See the logs of the group rollout"
                    )
                if loop.time() >= beat_at_s:  # the wait has a limit of its own, which is longer than a silence may be
                    beat()
                    beat_at_s = loop.time() + self._beat_every_s
                await asyncio.sleep(POLL_S)

    def _restore(self, beat: Callable[[], None], client: EngineClient) -> None:
        """Send the current weights to an engine that has come back.

        After a failure, the next try comes only ``sync_timeout_s`` later: the rollout of this rank waits meanwhile.
        """
        start = client.start
        if time.monotonic() < self._restore_at_s.get(start, 0.0):
            return
        version = self.version
        assert self._sync is not None
        assert self._model is not None
        assert version is not None
        try:
            self._sync.send(self._controlled([client], version), self._model, version, beat, is_alone=True)
        except (WeightSyncFailed, StaleWeights, OSError) as error:
            self._restore_at_s[start] = time.monotonic() + self._spec.remote.sync_timeout_s
            self._ranks.log(f"{client.name} came back and did not receive the weights of step {version}: {error}")
        else:
            self._failures.pop(start, None)
            self._ranks.log(f"{client.name} came back and has the weights of step {version}")

    def _controlled(
        self, engines: Iterable[EngineClient], version: int
    ) -> Callable[[httpx.Client], list[HttpEngineControl]]:
        weights, probe = WeightsId(start=self._start, version=version), self._probe
        assert probe is not None
        return lambda http: [HttpEngineControl(engine, http, weights, probe, self._base) for engine in engines]

    # -----------------------------------------------------------------------------------------------------------------
    # Sampling

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample completions; see :class:`rlhf_core.training.rollouts.base.RolloutEngine`.

        Raises:
            EnginesLost: no engine serves requests, and none recovered in time.
        """
        return self._complete(self._dispatcher(prompts, seeds, sampling, version), sampling, beat)

    def _dispatcher(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling, version: int
    ) -> Dispatcher:
        require_version(self.version, version)
        require_prompts(prompts, seeds)
        tasks = [PromptTask(index, *one) for index, one in enumerate(zip(prompts, seeds, strict=True))]
        return Dispatcher(tasks, sampling.max_new_tokens, sampling.batch_size, rank=self._ranks.rank)

    def _run(self, dispatcher: Dispatcher, sampling: Sampling, beat: Callable[[], None]) -> None:
        """Sample the unanswered prompts with the current weights, which the model still holds."""
        self._num_rollouts += 1
        if self._is_split():  # a single rank cannot gather the weights for an engine that comes back
            rollout = self._rollout(dispatcher, sampling, beat)
        else:
            restore = partial(self._restore, beat) if self._ranks.is_first else None
            rollout = self._rollout(
                dispatcher, sampling, beat, restore, are_restored=True, may_leave=self._exit_barrier()
            )
        asyncio.run(rollout.run())

    def _rollout(
        self,
        dispatcher: Dispatcher,
        sampling: Sampling,
        beat: Callable[[], None],
        restore: Callable[[EngineClient], None] | None = None,
        *,
        are_restored: bool = False,
        may_leave: Callable[[], bool] = lambda: True,
    ) -> RemoteRollout:
        """Create a rollout, by default one during which weights cannot be sent to any engine."""
        assert self.version is not None  # ensured by _dispatcher
        return RemoteRollout(
            dispatcher,
            WeightsId(start=self._start, version=self.version),
            sampling,
            self._spec.remote,
            self._clients,
            beat=beat,
            restore=restore,
            are_restored=are_restored,
            may_leave=may_leave,
            interval_s=check_interval_s(self._spec.engines, self._ranks.num_ranks),
        )

    def _finish(self, dispatcher: Dispatcher, sampling: Sampling, beat: Callable[[], None]) -> list[list[Completion]]:
        """Completions of a finished background rollout, after sampling its leftover prompts. Collective."""
        if self._is_answered(dispatcher):
            return self._results(dispatcher)
        return self._complete(dispatcher, sampling, beat)

    def _complete(self, dispatcher: Dispatcher, sampling: Sampling, beat: Callable[[], None]) -> list[list[Completion]]:
        """Sample the unanswered prompts. Collective.

        Raises:
            EnginesLost: no engine serves requests, or all were restarted too often.
        """
        for _ in range(MAX_SYNCS):
            self._run(dispatcher, sampling, beat)
            # If the model is not split, an engine that comes back gets the weights while the rollout waits.
            if not self._is_split() or self._is_answered(dispatcher):
                return self._results(dispatcher)
            self._resend(beat)
        raise EnginesLost(
            f"{dispatcher.num_missing} prompts of rank {self._ranks.rank} were given up after all engines restarted "
            f"{MAX_SYNCS} times in one rollout. See the logs of the group rollout"
        )

    def _resend(self, beat: Callable[[], None]) -> None:
        """Send the current version to the engines that are alive now. Collective."""
        model, version = self._model, self.version
        assert model is not None
        assert version is not None
        self.version = None
        self.load(model, version, beat)

    def _results(self, dispatcher: Dispatcher) -> list[list[Completion]]:
        for name, count in dispatcher.counts().items():
            self._counts[name] += count
        return dispatcher.results()

    def _is_answered(self, dispatcher: Dispatcher) -> bool:
        """True if no rank has prompts left. Collective."""
        return not any(self._ranks.sum([dispatcher.num_missing]))

    def _is_split(self) -> bool:
        return self._model is not None and is_split(self._model)

    def take_counts(self) -> Mapping[str, float]:
        """Number of prompts sent again, number of completions refused, and metrics of syncs, since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    def _exit_barrier(self) -> Callable[[], bool]:
        """Hold rank 0 until all ranks have their completions: only it can send weights to an engine that comes back."""
        key, store, num_ranks = f"rollout-{self._num_rollouts}", self._ranks.store, self._ranks.num_ranks
        is_counted = False

        def may_leave() -> bool:
            nonlocal is_counted
            if num_ranks == 1:
                return True
            done = store.add(key, 0 if is_counted else 1)
            is_counted = True
            return not self._ranks.is_first or done >= num_ranks

        return may_leave

    # -----------------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Do nothing: the engines have their own memory."""

    def close(self) -> None:
        """Release the resources of the weight sync; the engines end with their group."""
        self.ahead.stop()
        self.version = None
        for sends in (self._sync, self._share):
            if sends is not None:
                sends.close()

    def _clients(self, without: Collection[int] = ()) -> list[EngineClient]:
        """The currently registered engines, without those of the given ranks."""
        ranks = (rank for rank in range(self._spec.engines) if rank not in without)
        found = read_all(map(self._attempt.engine, ranks), EngineAddress)
        return [EngineClient(address, self._token, self._spec.remote.answer_timeout_s) for address in found]

    def _from_first(self, act: Callable[[], Answer]) -> tuple[WorkerError | None, Answer | None]:
        """Run a function on rank 0; return its problem on all ranks, and its result on rank 0. Collective."""
        problem: list[Any] | None = None
        answer: Answer | None = None
        if self._ranks.is_first:
            try:
                answer = act()
            except (EnginesLost, StaleWeights, WeightSyncFailed) as error:
                problem = [type(error).__name__, str(error), getattr(error, "peer", ""), getattr(error, "others", ())]
        problem = self._ranks.from_first(problem)
        if problem is None:
            return None, answer
        name, message, peer, others = problem
        if name == WeightSyncFailed.__name__:
            return WeightSyncFailed(message, peer, tuple(others)), answer
        return {kind.__name__: kind for kind in (EnginesLost, StaleWeights)}[name](message), answer


def _is_unusable(answer: object) -> bool:
    if isinstance(answer, BaseException) and not isinstance(answer, EngineUnusable):
        raise answer
    return isinstance(answer, EngineUnusable)
