"""The way of the weights from trainer rank 0 to the engines of the group."""

from collections.abc import Callable, Sequence

import httpx
from transformers import PreTrainedModel

from rlhf_core.errors import StaleWeights, WeightSyncFailed
from rlhf_core.schemas.weight_sync import WeightSyncReport
from rlhf_core.training.adapters import has_adapter
from rlhf_core.training.rollouts.engine_adapter import given_shapes, given_weights
from rlhf_core.training.rollouts.engine_client import HttpEngineControl
from rlhf_core.training.types import WorkerContext
from rlhf_core.weight_sync.base import Beat
from rlhf_core.weight_sync.broadcast import BroadcastOutgoing
from rlhf_core.weight_sync.layout import entries_of, tied_names
from rlhf_core.weight_sync.sender import Sender
from rlhf_core.weight_sync.session import synchronize


class WeightPublisher:
    """Sends versions of the weights to engines; for trainer rank 0."""

    def __init__(self, context: WorkerContext) -> None:
        """Listen for the engines."""
        outgoing = BroadcastOutgoing(
            f"trainer-{context.rank}",
            context.address,
            stall_timeout_s=context.spec.rollout.remote.sync_timeout_s,
        )
        self._sender = Sender(outgoing)

    def send(
        self,
        controls: Callable[[httpx.Client], Sequence[HttpEngineControl]],
        model: PreTrainedModel,
        version: int,
        beat: Beat,
    ) -> WeightSyncReport:
        """Bring the weights of ``model`` into force on engines, or its adapter where it has one. Beside it, the other
        ranks call :func:`gather_along`.

        Returns:
            Account of the sync. Engines that were lost at their commit are named in it; one at least was not.

        Raises:
            WeightSyncFailed: the version came into force on no engine.
            StaleWeights: and this is because all that took it over compute something else with it.
        """
        tensors = entries_of(given_shapes(model), None if has_adapter(model) else tied_names(model))
        with httpx.Client(limits=httpx.Limits(max_connections=None)) as http:
            engines = controls(http)
            report = synchronize(self._sender, engines, version, tensors, given_weights(model, beat), beat)
        if not report.applied:
            kind = StaleWeights if any(engine.is_stale for engine in engines) else WeightSyncFailed
            raise kind("; ".join(report.lost.values()))
        return report

    def close(self) -> None:
        """Give back what the sender holds."""
        self._sender.close()


def gather_along(model: PreTrainedModel, beat: Beat) -> None:
    """Take part in the gathering of weights that rank 0 sends."""
    for _ in given_weights(model, beat):
        pass
