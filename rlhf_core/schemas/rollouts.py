"""Settings of rollouts: what samples completions, and how."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import NonNegative, Positive, PositiveFloat, Schema
from rlhf_core.schemas.weight_sync import Transport

VLLM_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM has room for (0.32, ``config/lora.py``); a smaller one takes the room of the next."""


EVEN_HEADS = "a number that divides the attention heads, and that divides the key-value heads or they it"


def uneven_heads(num_heads: int | None, num_kv_heads: int | None, width: int) -> str:
    """Name the heads of a model that cannot be split over the GPUs of an engine; empty where all can, or are not known.

    Key-value heads that are fewer than the GPUs are copied.

    Args:
        width: GPUs of the engine.
    """
    if num_heads and num_heads % width:
        return f"{num_heads} attention heads"
    if num_kv_heads and num_kv_heads % width and width % num_kv_heads:
        return f"{num_kv_heads} key-value heads"
    return ""


class EngineLayout(NamedTuple):
    """Rollout engines on the nodes of an attempt."""

    first_node: int
    """Index of the first node with engines in the allocation."""
    num_nodes: int
    """Nodes with engines, one after the other."""
    per_node: int
    """Engines on each of them; 0 where there are none."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Indices of the nodes with engines."""
        return tuple(range(self.first_node, self.first_node + self.num_nodes))


class VllmSettings(Schema):
    """Settings of vLLM where it samples."""

    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of a GPU's memory that vLLM may take for weights and cache while it samples; between two rollouts it gives
    them back."""
    cpu_cache_gb: Positive = 1
    """Main memory for the KV cache of each engine where there are no GPUs, in GiB."""
    prefix_caching: bool = True
    """Compute what the prompts of a group have in common once."""
    enforce_eager: bool = False
    """Do without CUDA graphs: a quicker start and less memory, slower sampling."""
    tensor_parallel: Positive = 1
    """GPUs of each engine (processes, where there are none), among which every layer is split: for models that one GPU
    cannot hold beside their cache. Above 1 for engines of their own alone (`rollout.engines`)."""


class SglangSettings(Schema):
    """Settings of SGLang where it samples."""

    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of a GPU's memory that SGLang may take for weights and cache."""
    prefix_caching: bool = True
    """Compute what the prompts of a group have in common once."""


class RemoteSettings(Schema):
    """Settings of rollout engines in processes of their own (`rollout.engines`)."""

    answer_timeout_s: PositiveFloat = 10.0
    """Time in which an engine has to answer a question for its health. What one that does not was asked to sample goes
    to the others."""
    stall_timeout_s: PositiveFloat = 120.0
    """Longest time without a new token of an engine that was asked to sample; its requests go to the others then."""
    sync_timeout_s: PositiveFloat = 60.0
    """Longest wait for the next part of the weights in a sync; it is made anew then, without the engine that failed."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait for an engine: at the start, and whenever none is left."""


class SyncSettings(Schema):
    """Settings of the way of the weights to rollout engines in processes of their own."""

    transport: Transport = Transport.BROADCAST
    """Way of the weights: `broadcast` over the network, where each engine passes them on to the next; `shared_memory`
    on one node; `files` in the run directory, where nodes reach each other over nothing else."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Library of the broadcast: `nccl` from GPU to GPU (RCCL on AMD; not run on GPUs yet), `gloo` from main memory to
    main memory. `auto` takes NCCL where every sender and every engine has a GPU of its own and torch has NCCL, and gloo
    from then on where the first version does not go through."""
    delta: bool = False
    """Send what has changed since the last version, where that is less: in bfloat16 a small part at the learning rates
    of RLHF. Takes a copy of the weights in the main memory of trainer rank 0."""
    full_every: Positive = 50
    """Versions after which deltas are interrupted by the whole weights."""
    senders: Positive = 1
    """Trainer ranks that send over the network, each an equal share of every version: the first rank of every node
    before the second ones. More than 1 pays where the link of an engine passes more than that of one trainer; the
    weights go as a whole then, not as deltas."""

    @model_validator(mode="after")
    def _senders_have_a_way(self) -> Self:
        if self.senders > 1 and self.transport is not Transport.BROADCAST:
            raise ValueError(
                f'found senders = {self.senders} with transport = "{self.transport}", through which one rank sends; '
                f'expected transport = "broadcast", or senders = 1'
            )
        if self.backend != "auto" and self.transport is not Transport.BROADCAST:
            raise ValueError(
                f'found backend = "{self.backend}" with transport = "{self.transport}", which takes neither; expected '
                f'transport = "broadcast", or backend = "auto"'
            )
        if self.senders > 1 and self.delta:
            raise ValueError(
                f"found senders = {self.senders} with delta = true, which compares whole tensors on one rank; expected "
                f"delta = false, or senders = 1"
            )
        return self


class RolloutSpec(Schema):
    """Settings of the completions that are sampled in training."""

    engine: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Program that samples: `transformers`, with its KV cache; `vllm` (needs the extra `vllm`); or `sglang`, in engines
    of their own alone, which was not run with SGLang itself yet."""
    engines: NonNegative = 0
    """Engines over all their nodes, as processes of their own, each restarted alone when it fails. 0: in the process of
    every trainer rank, where `transformers` samples with the weights that are trained, and `vllm` is given those of
    every step. With `model.lora` engines read the base model themselves, and are given the adapter."""
    nodes: NonNegative = 0
    """Nodes with engines alone: the last of `resources.num_nodes`, which counts them; the first ones have the trainer
    ranks alone. 0: the engines lie beside the trainers."""
    max_staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """Steps that the weights may be behind which completions were sampled with. 0: the engines sample for a step once
    they have its weights, and the trainers wait. 1: they sample for the next step while the trainers train (needs
    `rollout.engines` and a correction, `loops.main.algorithm.correction`)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities in training are taken at the same temperature."""
    max_new_tokens: Positive = 64
    """Longest completion in tokens."""
    batch_size: Positive = 256
    """Sequences generated at once on one rank, or by one engine for one rank."""
    vllm: VllmSettings = VllmSettings()
    """Settings of vLLM."""
    sglang: SglangSettings = SglangSettings()
    """Settings of SGLang."""
    remote: RemoteSettings = RemoteSettings()
    """Settings of engines in processes of their own."""
    sync: SyncSettings = SyncSettings()
    """Settings of the way of the weights to them."""

    @model_validator(mode="after")
    def _splits_engines_of_their_own(self) -> Self:
        if self.gpus_per_engine > 1 and not self.engines:
            raise ValueError(
                f"found vllm.tensor_parallel = {self.vllm.tensor_parallel} and engines = 0, with an engine in the "
                f"process of every rank, on its one GPU; expected tensor_parallel = 1, or engines of their own"
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
    def gpus_per_engine(self) -> int:
        """GPUs of each engine; where there are none, its processes."""
        return self.vllm.tensor_parallel if self.engine == "vllm" else 1

    def layout(self, num_nodes: int) -> EngineLayout | None:
        """Spread the engines evenly: the same number on each node, or, beside trainers, one on each of the first nodes.

        Args:
            num_nodes: nodes of the allocation.

        Returns:
            None where they cannot be spread evenly: some nodes would sample more than others.
        """
        if not self.nodes and self.engines <= num_nodes:
            return EngineLayout(0, self.engines, 1 if self.engines else 0)
        num_with_engines = self.nodes or num_nodes
        per_node, left = divmod(self.engines, num_with_engines)
        return None if left else EngineLayout(num_nodes - num_with_engines, num_with_engines, per_node)
