"""A trainer rank's view of the rollout engines, which form their own group (``rollout.engines``).

Rank 0 sends the weights of every version to all live engines, alone or together with other ranks that send a share
each; every rank sends its own prompts to all engines. When an engine fails, its prompts go to the others, its agent
restarts it, and it serves again once rank 0 has sent it the weights.
"""

from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedModel

from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import PromptList, Sampling, WeightTransfer
from rlhf_core.training.rollouts.remote.background import ContinuousRollouts
from rlhf_core.training.rollouts.remote.registry import EngineRegistry
from rlhf_core.training.rollouts.remote.weights import EngineWeights
from rlhf_core.training.types import Completion, WorkerContext


class RemoteEngines:
    """All engines of the group behind the interface of a single one; see ``base.RolloutEngine``."""

    def __init__(self, context: WorkerContext, ranks: Ranks) -> None:
        """Connect the ranks that send weights. Collective."""
        registry = EngineRegistry(context)
        self._weights = EngineWeights(context, ranks, registry)
        self.continuous = ContinuousRollouts(context.spec.rollout, ranks, registry, self._weights)

    @property
    def version(self) -> int | None:
        """Version that the engines have; None before the first, and after one that failed."""
        return self._weights.version

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
        with self.continuous.other_weights(beat):
            return self._weights.load(model, version, beat)

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
        source = PromptList(prompts, seeds, sampling)
        self.continuous.sample(source, version, beat)
        return source.results()

    def take_counts(self) -> Mapping[str, float]:
        """Number of prompts sent again, number of completions refused, and metrics of syncs, since the last call."""
        return {**self.continuous.take_counts(), **self._weights.take_counts()}

    def sleep(self) -> None:
        """Do nothing: the engines have their own memory."""

    def close(self) -> None:
        """Release the resources of the weight sync; the engines end with their group."""
        self.continuous.stop()
        self._weights.close()
