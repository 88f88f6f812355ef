"""The weights of all engines of the group: rank 0 sends every version, and sends it again to engines that come back."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from transformers import PreTrainedModel

from rlhf_core.errors import DiskFull, EnginesLost, StaleWeights, WeightSyncFailed, WorkerError
from rlhf_core.schemas.engines import WeightsId
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.checkpoints.soundness import initial_folder
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.adapters import base_fingerprint
from rlhf_core.training.models.gathering import is_split
from rlhf_core.training.rollouts.base import WeightTransfer
from rlhf_core.training.rollouts.remote.client import EngineClient
from rlhf_core.training.rollouts.remote.registry import EngineFailures, EngineRegistry
from rlhf_core.training.rollouts.remote.senders import WeightPublisher, give_along, join_senders, outgoing_of
from rlhf_core.training.rollouts.weight_probe import WeightProbe, probe_of
from rlhf_core.training.types import WorkerContext
from rlhf_core.weight_sync.sender import FurtherSender

Answer = TypeVar("Answer")

MAX_SYNCS = 3
"""Number of attempts to send a version: an engine may be lost in each."""
PROBLEMS = (DiskFull, EnginesLost, StaleWeights, WeightSyncFailed)
"""Failures of rank 0 that every rank learns of."""
COUNTS = ("rollout/sync_bytes", "time/weight_wire_s", "time/weight_apply_s")
"""Metrics of the syncs, from rank 0."""


class _Version(NamedTuple):
    """A version of the weights, and what it is sent from and checked with."""

    number: int
    model: PreTrainedModel
    probe: WeightProbe


class EngineWeights:
    """The version of the weights that the engines have, and the model that it was sent from."""

    def __init__(self, context: WorkerContext, ranks: Ranks, registry: EngineRegistry) -> None:
        """Connect the ranks that send. Collective."""
        spec = context.spec
        self._loaded: _Version | None = None
        self._ranks = ranks
        self._registry = registry
        self._sync_timeout_s = spec.rollout.remote.sync_timeout_s
        self._dtype = spec.model.dtype
        self._max_tokens = spec.max_tokens
        self._start = context.restart
        group = join_senders(context, ranks)
        base = ""
        if ranks.is_first and spec.model.lora is not None:
            # Computed now, while the files are the ones that the trainers read.
            base = base_fingerprint(initial_folder(spec, context.run_dir), partial(ranks.reporter.beat, Phase.SETUP, 0))
        self._publisher = WeightPublisher(context, group, base) if ranks.is_first else None
        self._further_sender = FurtherSender(outgoing_of(context), group) if group and not ranks.is_first else None
        self._failures = EngineFailures(self._sync_timeout_s)
        self._restore_at_s: dict[tuple[int, int], float] = {}
        self._counts = dict.fromkeys(COUNTS, 0.0)

    @property
    def version(self) -> int | None:
        """Number of the current version; None before the first, and after one that failed."""
        return None if self._loaded is None else self._loaded.number

    @property
    def id(self) -> WeightsId:
        """Identity of the current version."""
        assert self.version is not None
        return WeightsId(start=self._start, version=self.version)

    @property
    def is_split(self) -> bool:
        """True if a single rank cannot gather the weights, for an engine that comes back."""
        return self._loaded is not None and is_split(self._loaded.model)

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> WeightTransfer | None:
        """Load a version into all live engines. Collective.

        Returns:
            The transfer by rank 0; None on other ranks.

        Raises:
            DiskFull: there is no room for the weights, which are sent through files.
            EnginesLost: there is no engine, and none started in time.
            StaleWeights: with these weights, every engine's outputs differ from the trainer's.
        """
        self._loaded = None
        sent = _Version(version, model, probe_of(model, self._max_tokens, self._dtype))
        problem: WorkerError | None = None
        for _ in range(MAX_SYNCS):
            live_engines = self._live_engines(beat)
            engines = self._failures.usable(live_engines)
            if not self._ranks.is_first:
                give_along(model, self._further_sender, beat)
            try:
                transfer = self._from_first(partial(self._send, engines, sent, beat))
            except PROBLEMS as error:
                problem = error
                self._ranks.log(f"the engines did not receive the weights of step {version}: {error}")
                if isinstance(error, WeightSyncFailed):
                    blamed = {error.peer, *error.others}
                    self._failures.add(engine for engine in live_engines if engine.name in blamed)
            else:
                self._loaded = sent
                return transfer
        assert problem is not None
        raise problem

    def load_again(self, beat: Callable[[], None]) -> None:
        """Load the current version into the engines that are alive now. Collective."""
        assert self._loaded is not None
        self.load(self._loaded.model, self._loaded.number, beat)

    def restore(self, beat: Callable[[], None], client: EngineClient) -> None:
        """Send the current version to an engine that has come back; on rank 0.

        After a failure, the next try comes only ``sync_timeout_s`` later: the rollout of this rank waits meanwhile.
        """
        start = client.start
        if time.monotonic() < self._restore_at_s.get(start, 0.0):
            return
        assert self._publisher is not None
        assert self._loaded is not None
        version = self._loaded.number
        try:
            self._publisher.send([client], self._loaded.model, version, self._loaded.probe, beat, is_alone=True)
        except (DiskFull, WeightSyncFailed, StaleWeights, OSError) as error:
            self._restore_at_s[start] = time.monotonic() + self._sync_timeout_s
            self._ranks.log(f"{client.name} came back and did not receive the weights of step {version}: {error}")
        else:
            self._failures.forget(client)
            self._ranks.log(f"{client.name} came back and has the weights of step {version}")

    def take_counts(self) -> Mapping[str, float]:
        """Metrics of the syncs since the last call; 0 on ranks other than the first."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    def close(self) -> None:
        """Release the resources of the senders."""
        self._loaded = None
        for sender in (self._publisher, self._further_sender):
            if sender is not None:
                sender.close()

    def _live_engines(self, beat: Callable[[], None]) -> list[EngineClient]:
        """Engines that respond to rank 0, on rank 0. Collective.

        Raises:
            EnginesLost: no engine responds in time.
        """
        return self._from_first(lambda: asyncio.run(self._registry.live(beat))) or []

    def _send(self, engines: Sequence[EngineClient], sent: _Version, beat: Callable[[], None]) -> WeightTransfer:
        """Try once to send a version to the engines; on rank 0."""
        assert self._publisher is not None
        report = self._publisher.send(engines, sent.model, sent.number, sent.probe, beat)
        for engine in engines:
            if engine.name in report.applied:
                self._failures.forget(engine)
        self._counts["time/weight_wire_s"] += report.wire_s
        self._counts["time/weight_apply_s"] += report.apply_s
        self._counts["rollout/sync_bytes"] += report.sent.bytes_sent
        for name, why in report.lost.items():
            self._ranks.log(f"{name} does not serve at step {sent.number}: {why}")
        return WeightTransfer(
            self._publisher.way,
            report.sent.bytes_sent,
            wire_s=report.wire_s,
            apply_s=report.apply_s,
            acknowledged=len(report.applied),
        )

    def _from_first(self, act: Callable[[], Answer]) -> Answer | None:
        """Call a function on rank 0 alone; return its result there, and None on other ranks. Collective.

        Raises:
            DiskFull, EnginesLost, StaleWeights, WeightSyncFailed: raised by the function; on every rank.
        """
        answers: list[Answer] = []
        self._ranks.on_first(lambda: answers.append(act()), PROBLEMS)
        return answers[0] if answers else None
