"""Messages between trainer ranks and rollout engines that are processes of their own: JSON over HTTP."""

from rlhf_core.schemas.base import Finite, Int32, Int64, Label, Message, NonNegative, NonNegativeFloat, Positive, Schema


class EngineAddress(Schema):
    """Place of a rollout engine; it replaces the file at every start (``attempts/<n>/engines/<rank>.json``)."""

    rank: Int32
    """Rank in the group of engines."""
    generation: Int32
    """Start of its group that it belongs to."""
    node: Label
    """Name of its node."""
    host: Label
    """Address at which it listens."""
    port: Int32
    """Port at which it listens."""


class WeightsInForce(Schema):
    """Identity of the weights that an engine samples with."""

    start: Int32
    """Start of the trainers (number of the restart) that they come from: after a restart from a checkpoint the same
    version may be made anew."""
    version: NonNegative
    """Optimizer steps that they have behind them."""


class EngineHealth(Schema):
    """State of an engine, answered by a thread of its own, also while it samples."""

    rank: Int32
    generation: Int32
    """Start of its group that it belongs to."""
    weights: WeightsInForce | None = None
    """Weights that it samples with; None before the first, and while others come into force."""
    progress: Int64
    """Number of decoding steps so far: stands still where it samples nothing, for whatever reason."""
    num_waiting: NonNegative
    """Completions that it was asked for and has not made."""


class PromptRequest(Schema):
    """One prompt and the completions that are asked for."""

    index: NonNegative
    """Number by which the answer is known."""
    prompt: tuple[NonNegative, ...]
    """Tokens."""
    seeds: tuple[Int64, ...]
    """One for each completion."""


class SampleRequest(Schema):
    """Prompts that an engine is asked to complete."""

    weights: WeightsInForce
    """Weights to sample with; with others it refuses."""
    max_new_tokens: Positive
    temperature: NonNegativeFloat
    batch_size: Positive
    """Most sequences generated at once."""
    prompts: tuple[PromptRequest, ...]


class SampledCompletion(Schema):
    """One completion."""

    token_ids: tuple[NonNegative, ...]
    text: str
    finished: bool
    """True if the end token was sampled."""
    logprobs: tuple[Finite, ...]
    """Log-probability of each token at the sampling temperature."""
    weights: WeightsInForce
    """Weights that it was sampled with."""


class SampledPrompt(Schema):
    """Completions of one prompt: a line of the answer to a :class:`SampleRequest`, sent as soon as all are made."""

    index: NonNegative
    completions: tuple[SampledCompletion, ...]
    """In the order of the seeds."""


class CommitRequest(Schema):
    """Order to bring staged weights into force."""

    weights: WeightsInForce
    probe: tuple[NonNegative, ...]
    """Tokens of which the log-probabilities show that the weights are in force."""


class Committed(Schema):
    """Answer to a :class:`CommitRequest`."""

    weights: WeightsInForce
    apply_s: NonNegativeFloat
    """Seconds in which the staged tensors were taken over."""
    probe_logprobs: tuple[Finite, ...]
    """Log-probability of every token of the probe but the first, as the engine computes it with these weights."""
    base: str = ""
    """Digest of the base model that the engine has read; empty where it was given whole weights."""
    num_differing: NonNegative = 0
    """Tensors of an adapter that the engine's model does not hold as they were given."""


class WeightsRefused(Schema):
    """Order not to serve with weights that were committed."""

    weights: WeightsInForce
    why: Message
    """Difference that the trainer has seen."""


class EngineRefusal(Schema):
    """Answer in place of the one that was asked for."""

    error: Message
    peer: Label = ""
    """Name of the process that a failed transfer of weights goes back to, as the engine sees it."""
