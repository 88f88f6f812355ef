"""Check that vLLM in the trainer's process has applied a version, as its outputs show.

Separate engines are checked in the same way when they commit (``remote/client.py``).
"""

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from rlhf_core.training.models.gathering import is_split
from rlhf_core.training.rollouts.weight_probe import ProbeAnswer, probe_of, require_same, require_update


class VersionCheck:
    """Check of each version of one engine, by the log-probabilities of a few tokens."""

    def __init__(self, max_tokens: int, dtype: str, *, of_adapters: bool) -> None:
        """Args:
        max_tokens: longest sequence of the engine.
        dtype: number format of the weights.
        of_adapters: True if versions are adapters, whose tensors are compared bit by bit instead of with the version
            before.
        """
        self._max_tokens = max_tokens
        self._dtype = dtype
        self._of_adapters = of_adapters
        self._answer: ProbeAnswer | None = None

    def require_applied(
        self, model: PreTrainedModel, version: int, score: Callable[[Sequence[int]], Sequence[float]]
    ) -> None:
        """Refuse an engine that did not apply a version. Collective if the model is split.

        The whole weights of a split model are checked only the first time: the trainer's log-probabilities take one
        more gathering, and nothing that a step computes anyway replaces them. The gap between sampling and training is
        on other tokens in every step, and a single update changes it by less than rounding.

        Args:
            model: the trainer's model with this version.
            score: the engine's log-probability of every token but the first.

        Raises:
            StaleWeights: its log-probabilities differ from the trainer's, or stayed as they were.
        """
        if self._answer is not None and not self._of_adapters and is_split(model):
            return
        probe = probe_of(model, self._max_tokens, self._dtype)
        # The number of a version stands for its digest: no version is made twice in a process.
        answer = ProbeAnswer(str(version), tuple(score(probe.tokens)), probe.logprobs)
        require_same("vLLM", answer.engine, probe, ': use rollout.engine = "transformers"')
        if not self._of_adapters:
            require_update("vLLM", answer, self._answer)
        self._answer = answer
