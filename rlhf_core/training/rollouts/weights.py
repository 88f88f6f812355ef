"""The way of the weights from trainer rank 0 to the engines of the group."""

from collections.abc import Callable, Sequence

import httpx
from transformers import PreTrainedModel

from rlhf_core.errors import StaleWeights, WeightSyncFailed
from rlhf_core.schemas.weight_sync import Transport, WeightSyncReport
from rlhf_core.training.gathering import named_weights, weight_shapes
from rlhf_core.training.rollouts.engine_client import HttpEngineControl
from rlhf_core.training.types import WorkerContext
from rlhf_core.weight_sync.base import Beat, Outgoing
from rlhf_core.weight_sync.broadcast import BroadcastOutgoing
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.files import FilesOutgoing
from rlhf_core.weight_sync.layout import entries_of, tied_names
from rlhf_core.weight_sync.sender import Sender
from rlhf_core.weight_sync.session import synchronize
from rlhf_core.weight_sync.shared_memory import SharedMemoryOutgoing


class WeightPublisher:
    """Sends versions of the weights to engines; for trainer rank 0."""

    def __init__(self, context: WorkerContext) -> None:
        """Listen for the engines.

        Raises:
            WeightSyncFailed: the way is not there.
        """
        settings = context.spec.rollout.sync
        self.transport = settings.transport
        delta = DeltaEncoder(settings.full_every) if settings.delta else None
        self._sender = Sender(_outgoing(context), delta=delta)

    def send(
        self,
        controls: Callable[[httpx.Client], Sequence[HttpEngineControl]],
        model: PreTrainedModel,
        version: int,
        beat: Beat,
    ) -> WeightSyncReport:
        """Bring the weights of ``model`` into force on engines. Beside it, the other ranks call :func:`gather_along`.

        Returns:
            Account of the sync. Engines that were lost at their commit are named in it; one at least was not.

        Raises:
            WeightSyncFailed: the version came into force on no engine.
            StaleWeights: and this is because all that took it over compute something else with it.
        """
        tensors = entries_of(weight_shapes(model), tied_names(model))
        with httpx.Client(limits=httpx.Limits(max_connections=None)) as http:
            engines = controls(http)
            report = synchronize(self._sender, engines, version, tensors, named_weights(model, beat), beat)
        if not report.applied:
            kind = StaleWeights if any(engine.is_stale for engine in engines) else WeightSyncFailed
            raise kind("; ".join(report.lost.values()))
        return report

    def close(self) -> None:
        """Give back what the sender holds."""
        self._sender.close()


def _outgoing(context: WorkerContext) -> Outgoing:
    name, timeout_s = f"trainer-{context.rank}", context.spec.rollout.remote.sync_timeout_s
    match context.spec.rollout.sync.transport:
        case Transport.FILES:
            folder = context.run_dir.attempt(context.attempt).weights
            return FilesOutgoing(name, folder, stall_timeout_s=timeout_s)
        case Transport.SHARED_MEMORY:
            if context.memory is None:
                raise WeightSyncFailed(
                    f"{context.node} has no memory that its processes share; set rollout.sync.transport=broadcast", name
                )
            context.memory.mkdir(parents=True, exist_ok=True)
            return SharedMemoryOutgoing(name, folder=context.memory, stall_timeout_s=timeout_s)
        case Transport.BROADCAST:
            return BroadcastOutgoing(name, context.address, stall_timeout_s=timeout_s)


def gather_along(model: PreTrainedModel, beat: Beat) -> None:
    """Take part in the gathering of weights that rank 0 sends."""
    for _ in named_weights(model, beat):
        pass
