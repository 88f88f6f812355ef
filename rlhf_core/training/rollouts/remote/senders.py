"""The trainer ranks that send weights to the engines of the group, and the transport that they use."""

import shutil
from collections.abc import Sequence

from transformers import PreTrainedModel

from rlhf_core.errors import StaleWeights, WeightSyncFailed
from rlhf_core.schemas.engines import EngineAddress, WeightsId
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.weight_sync import LinkBackend, Transport, WeightSyncReport
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.engine_adapter import given_shapes, given_weights
from rlhf_core.training.rollouts.http_clients import engine_http
from rlhf_core.training.rollouts.remote.client import EngineClient, HttpEngineControl
from rlhf_core.training.rollouts.weight_probe import VersionCheck, WeightProbe
from rlhf_core.training.types import WorkerContext
from rlhf_core.weight_sync.base import Beat, Outgoing
from rlhf_core.weight_sync.broadcast import BroadcastOutgoing
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.files import FilesOutgoing
from rlhf_core.weight_sync.gpu import has_nccl
from rlhf_core.weight_sync.layout import entries_of
from rlhf_core.weight_sync.links import listen, numeric, reach
from rlhf_core.weight_sync.sender import FurtherSender, Sender
from rlhf_core.weight_sync.sender_group import SenderGroup, sender_ranks
from rlhf_core.weight_sync.session import synchronize
from rlhf_core.weight_sync.shared_memory import SharedMemoryOutgoing


class WeightPublisher:
    """Sends versions of the weights to engines; for trainer rank 0."""

    def __init__(self, context: WorkerContext, group: SenderGroup | None, base: str = "") -> None:
        """Start listening for the engines.

        Args:
            group: group of several senders, from :func:`join_senders`.
            base: digest of the adapter's base model; empty for full weights.

        Raises:
            WeightSyncFailed: the transport is not available.
        """
        settings = context.spec.rollout.sync
        for earlier in range(1, context.attempt):  # one that was killed left its versions, if they went through files
            shutil.rmtree(context.run_dir.attempt(earlier).weights, ignore_errors=True)
        self._delta = DeltaEncoder(settings.full_every) if settings.delta else None
        self._outgoing = outgoing_of(context)
        self._sender = Sender(self._outgoing, delta=self._delta, group=group)
        self._transport = settings.transport
        self._start, self._base = context.restart, base
        self._addresses: dict[str, EngineAddress] = {}
        self._check = VersionCheck(of_adapters=bool(base))

    @property
    def way(self) -> str:
        """Transport of the last version, for the ledger."""
        over = f" over {self._outgoing.backend}" if isinstance(self._outgoing, BroadcastOutgoing) else ""
        return f"{self._transport}{over}"

    def send(
        self,
        clients: Sequence[EngineClient],
        model: PreTrainedModel,
        version: int,
        probe: WeightProbe,
        beat: Beat,
        *,
        is_alone: bool = False,
    ) -> WeightSyncReport:
        """Load the weights of ``model``, or its adapter if it has one, into engines. Meanwhile the other ranks must
        call :func:`give_along`, unless ``is_alone`` is set.

        Args:
            probe: identifies the weights of this version.

        Returns:
            Report on the sync. It names engines lost at their commit; at least one engine was not.

        Raises:
            WeightSyncFailed: no engine loaded the version.
            StaleWeights: the outputs of all engines that loaded it differ from the trainer's.
        """
        tensors, weights = entries_of(given_shapes(model)), WeightsId(start=self._start, version=version)
        with engine_http() as http:
            engines = [HttpEngineControl(one, http, weights, probe, self._base, self._check) for one in clients]
            addresses = {one.name: one.address for one in clients}
            if any(self._addresses.get(name, address) != address for name, address in addresses.items()):
                # A restarted engine has the same name, but no links and no earlier version.
                self._sender.reset()
                if self._delta is not None:
                    self._delta.forget()
            self._addresses |= addresses
            report = synchronize(
                self._sender, engines, version, tensors, given_weights(model, beat), beat, is_alone=is_alone
            )
        if not report.applied:
            kind = StaleWeights if any(engine.is_stale for engine in engines) else WeightSyncFailed
            raise kind("; ".join(report.lost.values()))
        return report

    def close(self) -> None:
        """Release the resources of the sender."""
        self._sender.close()


def join_senders(context: WorkerContext, ranks: Ranks) -> SenderGroup | None:
    """Connect the sending ranks (``rollout.sync.senders``). Collective if there are several.

    Returns:
        This rank's view of the group; None if it does not send, or if rank 0 sends alone.
    """
    count = min(context.spec.rollout.sync.senders, ranks.num_ranks)
    if count == 1:
        return None
    senders = sender_ranks(ranks.gather(context.node), count)
    address = numeric(context.address)
    store = listen(address) if ranks.is_first else None
    host, port = ranks.from_first((address, store.port) if store is not None else ("", 0))
    if ranks.rank not in senders:
        return None
    if store is None:
        store = reach(host, port, _name(0))
    timeout_s = context.spec.rollout.remote.sync_timeout_s
    return SenderGroup([_name(rank) for rank in senders], senders.index(ranks.rank), store, timeout_s=timeout_s)


def _name(rank: int) -> str:
    return f"trainer-{rank}"


def outgoing_of(context: WorkerContext) -> Outgoing:
    """Transport of this rank's weights (``rollout.sync.transport``); begins to listen for the engines.

    Raises:
        WeightSyncFailed: the transport is not available.
    """
    name, timeout_s = _name(context.rank), context.spec.rollout.remote.sync_timeout_s
    match context.spec.rollout.sync.transport:
        case Transport.FILES:
            folder = context.run_dir.attempt(context.attempt).weights
            return FilesOutgoing(name, folder, stall_timeout_s=timeout_s)
        case Transport.SHARED_MEMORY:
            if context.memory is None:
                raise WeightSyncFailed(
                    f"{context.node} has no shared memory; set rollout.sync.transport=broadcast", name
                )
            context.memory.mkdir(parents=True, exist_ok=True)
            return SharedMemoryOutgoing(name, folder=context.memory, stall_timeout_s=timeout_s)
        case Transport.BROADCAST:
            return BroadcastOutgoing(
                name,
                context.address,
                stall_timeout_s=timeout_s,
                backend=link_backend(context.spec),
                fallback=LinkBackend.GLOO if context.spec.rollout.sync.backend == "auto" else None,
                pinned=context.spec.resources.gpus_per_node > 0,
            )


def link_backend(spec: RunSpec) -> LinkBackend:
    """Library of the links to the engines: the one named by ``rollout.sync.backend``, or NCCL if possible."""
    sync = spec.rollout.sync
    if sync.backend != "auto":
        return LinkBackend(sync.backend)
    is_there = not spec.why_not_nccl and not sync.delta and has_nccl()  # deltas are in main memory at both ends
    return LinkBackend.NCCL if is_there else LinkBackend.GLOO


def give_along(model: PreTrainedModel, sender: FurtherSender | None, beat: Beat) -> None:
    """Take part in the gathering of weights that rank 0 sends, and send this rank's share if it has a sender.

    Raises:
        WeightSyncFailed: there is a sender, and rank 0 is gone.
    """
    weights = given_weights(model, beat)
    if sender is not None:
        sender.send(weights, beat)
    for _ in weights:
        pass
