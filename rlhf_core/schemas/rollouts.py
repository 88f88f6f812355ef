"""Settings of rollouts: engines and sampling."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import (
    ImportPath,
    NonNegative,
    OptionalImportPath,
    Positive,
    PositiveFloat,
    PositiveSeconds,
    Schema,
)
from rlhf_core.schemas.weight_sync import Transport

VLLM_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM supports (0.32, ``config/lora.py``); a smaller rank takes the memory of the next."""


EVEN_HEADS = (
    "a divisor of the number of attention heads that is also a divisor or a multiple of the number of key-value heads"
)


def uneven_heads(num_heads: object, num_kv_heads: object, width: int) -> str:
    """Name the heads of a model that cannot be split over the GPUs of an engine; empty if all can, or if their numbers
    are unknown or differ between layers (lists).

    If there are fewer key-value heads than GPUs, they are copied.

    Args:
        width: GPUs of the engine.
    """
    if isinstance(num_heads, int) and num_heads % width:
        return f"{num_heads} attention heads"
    if isinstance(num_kv_heads, int) and num_kv_heads and num_kv_heads % width and width % num_kv_heads:
        return f"{num_kv_heads} key-value heads"
    return ""


MOST_IDLE = 0.1
"""Share of a rollout for which its engines may have nothing to do without a warning."""


def idle_share(num_prompts: int, num_engines: int) -> float:
    """Share of a rollout for which its engines have nothing to do, if all prompts take equally long.

    An engine samples whole prompts, of any rank; the busiest engine finishes last.
    """
    return 1 - num_prompts / (num_engines * math.ceil(num_prompts / num_engines))


class EngineLayout(NamedTuple):
    """Rollout engines on the nodes of an attempt."""

    first_node: int
    """Index of the first node with engines in the allocation."""
    num_nodes: int
    """Number of consecutive nodes with engines."""
    per_node: int
    """Engines on each of them; 0 for none."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Indices of the nodes with engines."""
        return tuple(range(self.first_node, self.first_node + self.num_nodes))


class VllmSettings(Schema):
    """Settings of vLLM for sampling."""

    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of a GPU's memory for vLLM's weights and cache during sampling; it is released between two rollouts."""
    cpu_cache_gb: Positive = 1
    """Main memory for the KV cache of each engine on nodes without GPUs, in GiB."""
    prefix_caching: bool = True
    """Compute the common prefix of the prompts of a group only once."""
    enforce_eager: bool = False
    """Disable CUDA graphs: faster start and less memory, but slower sampling."""
    tensor_parallel: Positive = 1
    """GPUs of each engine (processes, without GPUs), over which every layer is split: for models that do not fit on one
    GPU with their cache. Above 1 only for separate engines (`rollout.engines`)."""


class SglangSettings(Schema):
    """Settings of SGLang for sampling."""

    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of a GPU's memory for SGLang's weights and cache."""
    prefix_caching: bool = True
    """Compute the common prefix of the prompts of a group only once."""


class RemoteSettings(Schema):
    """Settings of separate rollout engines (`rollout.engines`)."""

    answer_timeout_s: PositiveSeconds = 10.0
    """Timeout of an engine's health check, in seconds. If an engine times out, its requests are sent to the others."""
    stall_timeout_s: PositiveSeconds = 120.0
    """Longest time without a new token from an engine with requests, in seconds; after that, its requests are sent to
    the others."""
    sync_timeout_s: PositiveSeconds = 60.0
    """Longest wait for the next part of the weights in a sync, in seconds; after that, the sync is repeated without the
    failed engine."""
    start_timeout_s: PositiveSeconds = 1200.0
    """Longest wait for an engine, at the start and whenever none is left, in seconds; longer than an engine may be
    silent while it starts (`supervise.setup_floor_s`)."""


class SyncSettings(Schema):
    """Settings of the weight sync to separate rollout engines."""

    transport: Transport = Transport.BROADCAST
    """Transport of the weights: `broadcast` over the network, from each engine to the next; `shared_memory` on one
    node; `files` in the run directory, for nodes without any other connection."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Library of the broadcast: `nccl` from GPU to GPU (RCCL on AMD; not tested on GPUs yet), `gloo` from main memory
    to main memory. `auto` uses NCCL if every sender and every engine has its own GPU and torch has NCCL, and switches
    to gloo if the first version fails."""
    delta: bool = False
    """Send only changes since the last version if they are smaller: in bfloat16, at the learning rates of RLHF, a small
    part. Needs a copy of the weights in the main memory of trainer rank 0."""
    full_every: Positive = 50
    """Interval, in versions, at which the whole weights are sent instead of a delta."""
    senders: Positive = 1
    """Trainer ranks that send over the network, each an equal share of every version: first the first rank of every
    node, then the second ones. More than 1 helps if an engine's link is faster than a trainer's; the weights are then
    sent whole, not as deltas."""

    @model_validator(mode="after")
    def _senders_have_a_way(self) -> Self:
        if self.senders > 1 and self.transport is not Transport.BROADCAST:
            raise ValueError(
                f'found senders = {self.senders} with transport = "{self.transport}", where only one rank sends; '
                f'expected transport = "broadcast", or senders = 1'
            )
        if self.backend != "auto" and self.transport is not Transport.BROADCAST:
            raise ValueError(
                f'found backend = "{self.backend}" with transport = "{self.transport}", which has no backend; '
                f'expected transport = "broadcast", or backend = "auto"'
            )
        if self.senders > 1 and self.delta:
            raise ValueError(
                f"found senders = {self.senders} with delta = true, which compares whole tensors on one rank; expected "
                f"delta = false, or senders = 1"
            )
        return self


class TurnsSpec(Schema):
    """Rollouts of several turns: tools that the model may call, and an environment that answers it."""

    tools: tuple[ImportPath, ...] = ()
    """Functions that the model may call, as `module:function`; their names, type hints and docstrings (Google style)
    are shown to it by the chat template."""
    environment: OptionalImportPath = ""
    """Class or function without arguments, as `module:name`, that makes an object for each rollout: with `reset`, and
    either methods that are tools, or `respond`, which is given the text of each turn."""
    parser: OptionalImportPath = ""
    """Function `module:function` that finds the calls in the text of a turn. Empty: JSON in `<tool_call>` tags (Qwen,
    Hermes), or a turn that is a JSON object with the name of a tool (Llama 3)."""
    max_turns: Positive = 8
    """Maximum number of turns of the model in a rollout."""
    max_turn_tokens: Positive = 64
    """Maximum length of a turn in tokens. A turn begins only if `rollout.max_new_tokens` leaves room for so many."""
    max_observation_tokens: Positive = 256
    """Maximum length of the result of a call, or of an answer of the environment, in tokens; the rest is cut off."""
    timeout_s: PositiveSeconds = 30.0
    """Time limit of the calls of one turn, in seconds; after that, their process is killed."""
    on_failure: Literal["observe", "stop"] = "observe"
    """Response to a call that takes too long or ends its process: the error is what the model gets to `observe`, and a
    rollout whose environment is lost ends, or `stop` the run. An error that a tool raises is always observed."""

    @property
    def are_used(self) -> bool:
        """True if rollouts have tools or an environment."""
        return bool(self.tools or self.environment)

    @property
    def functions(self) -> tuple[str, ...]:
        """All paths that are imported."""
        return tuple(path for path in (*self.tools, self.environment, self.parser) if path)


class RolloutSpec(Schema):
    """Settings of sampling in training."""

    engine: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Sampling engine: `transformers`, with its KV cache; `vllm` (needs the extra `vllm`); or `sglang`, only in
    separate engines, which has not been tested with SGLang itself yet."""
    engines: NonNegative = 0
    """Number of separate engines over all their nodes, each restarted alone when it fails. 0: in the process of every
    trainer rank, where `transformers` samples with the trained weights and `vllm` gets those of every step. With
    `model.lora`, engines load the base model themselves and get the adapter."""
    nodes: NonNegative = 0
    """Number of nodes with only engines: the last of `resources.num_nodes`, which includes them; the first ones have
    only trainer ranks. 0: the engines run beside the trainers."""
    max_staleness: Annotated[int, Field(ge=0, le=16)] = 0
    """Maximum number of steps by which the weights used for sampling may be behind. 0: the engines sample for a step
    once they have its weights, and the trainers wait. 1: they sample for the next step while the trainers train (needs
    `rollout.engines` and a correction, `loops.main.algorithm.correction`). Above 1: the prompts of so many further
    steps are in flight, and unfinished completions continue with the weights of every step, so a few long ones delay
    nothing; a run then never has the same bits twice."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; training computes log-probabilities at the same temperature."""
    max_new_tokens: Positive = 64
    """Maximum length of a completion in tokens; of several turns, of all of them with the observations in between."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, in training and in evaluations, as the end token does: with the token that completes
    one. The loss includes its tokens, and the text that rewards and reports see ends with it."""
    batch_size: Positive = 256
    """Sequences generated at once on one rank, or by one engine for one rank and step."""
    turns: TurnsSpec = TurnsSpec()
    """Settings of rollouts of several turns."""
    vllm: VllmSettings = VllmSettings()
    """Settings of vLLM."""
    sglang: SglangSettings = SglangSettings()
    """Settings of SGLang."""
    remote: RemoteSettings = RemoteSettings()
    """Settings of separate engines."""
    sync: SyncSettings = SyncSettings()
    """Settings of the weight sync to separate engines."""

    @model_validator(mode="before")
    @classmethod
    def _samples_from_the_whole_policy(cls, content: object) -> object:
        for name in ("top_p", "top_k", "min_p"):
            if isinstance(content, Mapping) and name in content:
                raise ValueError(
                    f"found rollout.{name}, but training samples from the whole distribution of the policy: drawn from "
                    "a part of it, completions would not have the log-probabilities that the loss computes; expected "
                    f"evaluate.{name}, for the sampled evaluation, or rollout.temperature"
                )
        return content

    @model_validator(mode="after")
    def _splits_engines_of_their_own(self) -> Self:
        if self.gpus_per_engine > 1 and not self.engines:
            raise ValueError(
                f"found vllm.tensor_parallel = {self.vllm.tensor_parallel} and engines = 0, with an engine in the "
                "process of every rank, on its single GPU; expected tensor_parallel = 1, or separate engines"
            )
        return self

    @model_validator(mode="after")
    def _has_room_for_a_turn(self) -> Self:
        if not self.turns.are_used:
            return self
        if self.turns.max_turn_tokens > self.max_new_tokens:
            raise ValueError(
                f"found turns.max_turn_tokens = {self.turns.max_turn_tokens} and max_new_tokens = "
                f"{self.max_new_tokens}, which bounds all turns and observations together; expected room for a turn"
            )
        return self

    @model_validator(mode="after")
    def _fills_its_nodes(self) -> Self:
        if self.nodes and not self.engines:
            raise ValueError(
                f"found rollout.nodes = {self.nodes} and rollout.engines = 0: nothing would run there; expected a "
                f"multiple of {self.nodes} in rollout.engines, or rollout.nodes = 0"
            )
        return self

    @property
    def spans_weights(self) -> bool:
        """True if completions in flight continue with the weights of later steps."""
        return self.max_staleness > 1

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of each engine; without GPUs, its processes."""
        return self.vllm.tensor_parallel if self.engine == "vllm" else 1

    def layout(self, num_nodes: int) -> EngineLayout | None:
        """Distribute the engines evenly: the same number on each node, or, beside trainers, one on each of the first
        nodes.

        Args:
            num_nodes: nodes of the allocation.

        Returns:
            None if they cannot be distributed evenly, because some nodes would sample more than others.
        """
        if not self.nodes and self.engines <= num_nodes:
            return EngineLayout(0, self.engines, 1 if self.engines else 0)
        num_with_engines = self.nodes or num_nodes
        per_node, left = divmod(self.engines, num_with_engines)
        return None if left else EngineLayout(num_nodes - num_with_engines, num_with_engines, per_node)
