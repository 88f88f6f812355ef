"""An unfinished completion of an engine that samples each one separately, also over several versions of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.completion_end import StopSearch, stop_strings
from rlhf_core.training.rollouts.seeds import derived_seed


@dataclass(frozen=True)
class OpenCompletion:
    """A requested completion, and its tokens from weights that have been replaced.

    It is continued by a request whose prompt contains these tokens, so that nothing computed with older weights is used
    for the next ones.
    """

    prompt: Sequence[int]
    seed: int
    sampling: Sampling
    search: StopSearch | None
    """Search for its stop strings, if it has any."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @staticmethod
    def begin(
        tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], seed: int, sampling: Sampling
    ) -> "OpenCompletion":
        """Begin one without tokens."""
        search = StopSearch(stop_strings(tokenizer, sampling.stop)) if sampling.stop else None
        return OpenCompletion(prompt, seed, sampling, search)

    @property
    def context(self) -> list[int]:
        """Tokens that the next one follows."""
        return [*self.prompt, *self.tokens]

    @property
    def next_seed(self) -> int:
        """Seed of its next tokens: its own, or one derived from it, because engines count from the first token of a
        request and would repeat their random numbers."""
        return derived_seed(self.seed, f"token {len(self.tokens)}") if self.tokens else self.seed

    @property
    def num_left(self) -> int:
        """Maximum number of further tokens."""
        return self.sampling.max_new_tokens - len(self.tokens)

    def after(self, tokens: Sequence[int], logprobs: Sequence[float]) -> "OpenCompletion":
        """The same completion with further tokens and their log-probabilities."""
        search = None if self.search is None else StopSearch(self.search.strings)
        return replace(self, search=search, tokens=(*self.tokens, *tokens), logprobs=(*self.logprobs, *logprobs))
