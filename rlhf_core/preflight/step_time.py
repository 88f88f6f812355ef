"""Seconds of a training step on GPUs, from the run's config and the model's dimensions. Pure functions.

A forward pass takes 2 floating-point operations per token and weight that the token passes through, and attention to a
sequence of ``n`` tokens ``2 n`` per layer and width of its queries; a backward pass takes twice as many (Kaplan et al.
2020, arXiv 2001.08361, sec. 2.1). An adapter does not need half of those per weight, which are for weight gradients;
recomputed activations add a forward pass. Ranks that share sequences exchange queries, keys, values and outputs in
every layer of a pass (Jacobs et al. 2023, arXiv 2309.14509, sec. 3.2). A sampled token reads all weights and the cache
of its batch, or waits for the kernel launches of each layer. Every sequence is assumed to be as long as the config
allows, so a real step is usually shorter. The rates are not our measurements: they are the figures of the vendors,
scaled by assumed shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.preflight.memory.formulas import BYTES, cache_bytes, weight_bytes
from rlhf_core.preflight.memory.gpus import known_type
from rlhf_core.preflight.memory.roles import longest_sequence, micro_batch_tokens
from rlhf_core.preflight.memory.shapes import Shape, part_of, trained_shape
from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.run import RunSpec


@dataclass(frozen=True)
class GpuRates:
    """Figures of a data sheet."""

    matmul: float
    """Operations per second of dense matrix products in bfloat16."""
    float32: float
    """The same in float32: TF32 is off (``training/distributed.py``)."""
    memory: float
    """Bytes per second from its memory."""


RATES: Mapping[str, GpuRates] = {
    "h200": GpuRates(989e12, 67e12, 4.8e12),
    "h100": GpuRates(989e12, 67e12, 3.35e12),
    "h800": GpuRates(989e12, 67e12, 3.35e12),
    "h20": GpuRates(148e12, 44e12, 4.0e12),
    "a100": GpuRates(312e12, 19.5e12, 2.0e12),
    "a800": GpuRates(312e12, 19.5e12, 2.0e12),
    "l40s": GpuRates(362e12, 91.6e12, 0.86e12),
}
"""Rates of GPUs by their data sheets (NVIDIA), without sparsity."""

MATMUL_SHARE = 0.4
"""Share of that rate reached in training, including overheads: usual for dense decoders of this size. Assumed."""
MEMORY_SHARE = 0.6
"""Share of that rate reached in decoding. Assumed."""
LAUNCH_S = 0.8e-3
"""Minimum seconds per layer of a sampled token: eager kernels of transformers, launched one by one. Assumed."""
LINK_BYTES = {"node": 200e9, "network": 25e9}
"""Bytes per second that one GPU sends and receives within a node (NVLink), and over a network of 400 Gbit/s per GPU at
half its rate."""
ALL_REDUCE_S = 20e-6
"""Seconds of a sum of small vectors over the GPUs of a split engine: two in each layer of a token. Assumed."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the main loop, by part."""

    parts: Mapping[str, float]
    """Sampling counts only the time that trainers wait: with sampling one step ahead, the part not hidden by
    training."""

    @property
    def seconds(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())


def gpu_rates(kind: str) -> GpuRates | None:
    """Rates of a GPU by its name in Slurm or the driver; None if it is not in the table."""
    return RATES.get(known_type(kind, RATES))


def step_time(spec: RunSpec, shape: Shape, kind: str) -> StepTime | None:
    """Predict a step of the main loop of the native trainer; None if the GPU is not in the table.

    Args:
        kind: name of the GPU.
    """
    rates = gpu_rates(kind)
    if rates is None or not spec.resources.gpus_per_node:
        return None
    algorithm = spec.main_loop.algorithm
    tokens = algorithm.sequences_per_step / spec.num_ranks * longest_sequence(spec)
    parts = {
        "training": _training_operations(spec, shape, algorithm) * tokens / _matmul_rate(spec, rates),
        "communication": _communicated_bytes(spec, shape, tokens) / _link(spec.num_trainer_nodes)
        + _exchanged_bytes(spec, shape, algorithm, tokens) / _link_of_replica(spec),
    }
    if algorithm.samples:
        sampled = algorithm.sequences_per_step / (spec.rollout.engines or spec.num_ranks)
        sampling = _sampling_s(spec, shape, rates, sampled) * algorithm.sampling_rounds
        if spec.rollout.engines and spec.rollout.max_staleness:
            # The engines started a step earlier; trainers wait for the rest.
            sampling = max(0.0, sampling - sum(parts.values()))
        parts = {"sampling": sampling, **parts}
        if spec.rollout.engines:  # once over each link: engines forward the weights
            given = trained_shape(shape, spec.model.lora)  # only the adapter, if there is one
            # Independent of the number of senders: all links are equal here, and limited by the engine's own link.
            parts["weight sync"] = weight_bytes(given, spec.model.dtype) / _link(spec.resources.num_nodes)
    return StepTime(parts)


def _matmul_rate(spec: RunSpec, rates: GpuRates) -> float:
    return MATMUL_SHARE * (rates.matmul if spec.model.dtype == "bfloat16" else rates.float32)


def _training_operations(spec: RunSpec, shape: Shape, algorithm: AlgorithmSpec) -> float:
    """Operations per token of one step: forward, backward, and recomputation if configured."""
    forward = _forward_operations(shape, longest_sequence(spec))
    backward = 2 * forward
    if spec.model.lora is not None:
        backward -= 2 * shape.active
    again = forward if spec.native_trainer.gradient_checkpointing else 0
    num_passes, _ = algorithm.passes
    trained = (forward + backward + again) * num_passes * (2 if algorithm.critic else 1)
    compared = _forward_operations(shape.reference or shape, longest_sequence(spec)) if algorithm.reference else 0
    return float(trained + compared)


def _forward_operations(shape: Shape, length: int) -> int:
    """Operations per token of a sequence: with each weight of the layers and experts that it passes through, and with
    the keys and values of half of the sequence, on average."""
    return 2 * (shape.active + shape.layers * shape.query * length)


def _communicated_bytes(spec: RunSpec, shape: Shape, tokens: float) -> float:
    """Bytes that a rank sends and receives in one step."""
    if spec.num_ranks == 1:
        return 0.0
    passes = max(1.0, tokens * spec.ranks_per_row / micro_batch_tokens(spec))
    whole = weight_bytes(shape, spec.model.dtype)
    trained = shape.parameters if spec.model.lora is None else 0
    stage = spec.native_trainer.zero_stage
    gradients = 4.0 * trained * (passes if stage >= 2 else 2)
    # ZeRO 3 gathers weights for both directions of every pass, and once more to sample.
    weights = whole * (2 * passes + 1) if stage == 3 else (whole if trained else 0)
    return gradients + weights


def _exchanged_bytes(spec: RunSpec, shape: Shape, algorithm: AlgorithmSpec, tokens: float) -> float:
    """Bytes that a rank sends to the ranks that share its sequences, in one step.

    Args:
        tokens: tokens of one rank.
    """
    size = spec.ranks_per_row
    elements = 2 * shape.query + 2 * shape.keys  # keys and values of few heads are sent several times
    num_passes, _ = algorithm.passes
    directions = (2 + spec.native_trainer.gradient_checkpointing) * num_passes * (2 if algorithm.critic else 1)
    directions += algorithm.reference
    return tokens * shape.layers * elements * BYTES[spec.model.dtype] * directions * (size - 1) / size


def _link_of_replica(spec: RunSpec) -> float:
    """Rate between the consecutive ranks of one replica."""
    return _link(1 if spec.resources.ranks_per_node % spec.ranks_per_row == 0 else spec.num_trainer_nodes)


def _link(num_nodes: int) -> float:
    return LINK_BYTES["network" if num_nodes > 1 else "node"]


def _sampling_s(spec: RunSpec, shape: Shape, rates: GpuRates, sequences: float) -> float:
    """Seconds to sample the completions of one rank, or of one separate engine, each to its full length."""
    batch = max(1.0, min(spec.rollout.batch_size, sequences))
    memory = MEMORY_SHARE * rates.memory
    width = spec.rollout.gpus_per_engine
    part = part_of(shape, width)
    cache = cache_bytes(part, spec.model.dtype, int(batch), longest_sequence(spec)) / 2  # it grows to its full length
    # vLLM replays the launches of a token as one graph.
    graphs = spec.rollout.engine == "vllm" and not spec.rollout.vllm.enforce_eager
    launch = 0.0 if graphs else shape.layers * LAUNCH_S
    sums = 2 * shape.layers * ALL_REDUCE_S if width > 1 else 0.0
    token = max((weight_bytes(part, spec.model.dtype) + cache) / memory, launch) + sums
    prompts = sequences / spec.main_loop.algorithm.group * spec.data.max_prompt_tokens
    reading = _forward_operations(part, spec.data.max_prompt_tokens) * prompts / _matmul_rate(spec, rates)
    return reading + sequences / batch * spec.rollout.max_new_tokens * token
