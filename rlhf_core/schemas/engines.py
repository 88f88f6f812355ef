"""Messages between trainer ranks and separate rollout engines: JSON over HTTP."""

from rlhf_core.schemas.base import (
    Finite,
    Int32,
    Int64,
    Label,
    Message,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Schema,
)


class EngineAddress(Schema):
    """Address of a rollout engine; the file is replaced at every start (``attempts/<n>/engines/<rank>.json``)."""

    rank: Int32
    """Rank in the group of engines."""
    generation: Int32
    """Generation of its group."""
    node: Label
    """Name of its node."""
    host: Label
    """Address at which it listens."""
    port: Int32
    """Port at which it listens."""


class WeightsId(Schema):
    """Identity of the weights that an engine samples with."""

    start: Int32
    """Restart of the trainers that they come from: after a restart from a checkpoint, the same version may be created
    again."""
    version: NonNegative
    """Number of optimizer steps of the weights."""


class EngineHealth(Schema):
    """State of an engine, reported by a separate thread even while it samples."""

    rank: Int32
    generation: Int32
    """Generation of its group."""
    weights: WeightsId | None = None
    """Weights that it samples with; None before the first, and while others are being applied."""
    progress: Int64
    """Number of decoding steps so far; constant while it samples nothing, for any reason."""
    num_waiting: NonNegative
    """Requested completions that are not finished."""


class PromptRequest(Schema):
    """One prompt and the requested completions."""

    index: NonNegative
    """Number that identifies the answer."""
    prompt: tuple[NonNegative, ...]
    """Tokens of the prompt."""
    seeds: tuple[Int64, ...]
    """Seed of each completion."""


class SampleRequest(Schema):
    """Request to complete prompts."""

    weights: WeightsId
    """Weights to sample with; an engine with others rejects the request."""
    spans_weights: bool = False
    """True if later weights of the same start of the trainers may be used, also in the middle of a completion."""
    max_new_tokens: Positive
    temperature: NonNegativeFloat
    batch_size: Positive
    """Maximum number of sequences generated at once."""
    end_ids: tuple[NonNegative, ...] = ()
    """Tokens that end a completion besides those that tokenizer and model name."""
    top_p: PositiveFloat = 1.0
    top_k: NonNegative = 0
    min_p: NonNegativeFloat = 0.0
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    prompts: tuple[PromptRequest, ...]


class SampledCompletion(Schema):
    """One completion."""

    token_ids: tuple[NonNegative, ...]
    text: str
    finished: bool
    """True if the end token or a stop string was sampled."""
    logprobs: tuple[Finite, ...]
    """Log-probability of each token at the sampling temperature."""
    weights: WeightsId
    """Weights that it was sampled with, at its end."""
    begun_with: WeightsId
    """Weights of its first tokens, or older ones: those of the engine when it was requested."""


class SampledPrompt(Schema):
    """Completions of one prompt: a line of the answer to a :class:`SampleRequest`, sent once all are finished."""

    index: NonNegative
    completions: tuple[SampledCompletion, ...]
    """Completions, in the order of the seeds."""


class CommitRequest(Schema):
    """Request to apply staged weights."""

    weights: WeightsId
    probe: tuple[NonNegative, ...]
    """Tokens whose log-probabilities verify the applied weights."""


class Committed(Schema):
    """Answer to a :class:`CommitRequest`."""

    apply_s: NonNegativeFloat
    """Seconds to load the staged tensors."""
    probe_logprobs: tuple[Finite, ...]
    """Log-probability of every token of the probe except the first, computed by the engine with these weights."""
    base: str = ""
    """Digest of the base model that the engine has loaded; empty if it received whole weights."""
    num_differing: NonNegative = 0
    """Number of tensors of an adapter that differ in the engine's model."""


class WeightsRefused(Schema):
    """Request not to serve with committed weights."""

    weights: WeightsId
    why: Message
    """Difference found by the trainer."""


class EngineRefusal(Schema):
    """Error in place of the requested answer."""

    error: Message
    peer: Label = ""
    """Process that caused a failed transfer of weights, according to the engine."""
