"""Memory of each role: a trainer rank, an evaluator rank, a separate rollout engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_core.preflight.memory.engines import sglang_share_bytes, token_cache_bytes, vllm_moment, vllm_resident
from rlhf_core.preflight.memory.formulas import (
    BYTES,
    CPU_BASE_BYTES,
    GPU_BASE_BYTES,
    Zero,
    activation_bytes,
    cache_bytes,
    gradient_bytes,
    live_weight_bytes,
    logit_bytes,
    main_memory_bytes,
    optimizer_bytes,
    own_weight_bytes,
    reduction_bytes,
    sampling_bytes,
    update_bytes,
    weight_bytes,
)
from rlhf_core.preflight.memory.shapes import Shape, part_of, trained_shape
from rlhf_core.schemas.loops import LoopSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.weight_sync import Transport


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank in bytes, by purpose."""

    resident: Mapping[str, int]
    """Permanent memory."""
    moments: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Additional memory of each phase (sampling, training and so on); only one phase at a time. When whole weights are
    loaded or evaluated before a loop, what only training keeps is not there yet."""

    @property
    def resident_bytes(self) -> int:
        """Sum of the permanent memory."""
        return sum(self.resident.values())

    @property
    def peak_bytes(self) -> int:
        """Maximum at any time."""
        return self.resident_bytes + sum(self._worst.values())

    @property
    def largest(self) -> list[tuple[str, int]]:
        """Return the largest parts of the peak, largest first."""
        return sorted({**self.resident, **self._worst}.items(), key=lambda part: -part[1])

    @property
    def _worst(self) -> Mapping[str, int]:
        return max(self.moments.values(), key=lambda parts: sum(parts.values()), default={})


def trainer_estimate(
    spec: RunSpec, shape: Shape, gpu: int | None = None, *, pairs_have_answers: bool = True
) -> Estimate:
    """Memory of one trainer rank, which samples and trains in turn while the optimizer stays in place.

    Args:
        gpu: usable memory of the GPU in bytes, of which vLLM takes a share; None if unknown or without a GPU.
        pairs_have_answers: held-out pairs may have answers, and are then completed in evaluations; counts if the run
            trains on nothing but pairs.
    """
    dtype, on_gpu = spec.model.dtype, bool(spec.resources.gpus_per_node)
    zero = zero_of(spec)
    lora = spec.model.lora
    # Separate engines get the weights bucket by bucket.
    samples_itself = not spec.rollout.engines and _samples(spec, pairs_have_answers)
    trained = trained_shape(shape, lora)
    adapter = own_weight_bytes(trained, dtype, zero) if lora is not None else 0
    optimizer = f"optimizer (ZeRO {zero.stage} over {zero.num_ranks} ranks)"
    resident = {
        "weights": own_weight_bytes(shape, dtype, zero) + adapter,
        "gradients": gradient_bytes(trained, dtype, zero),
        optimizer: optimizer_bytes(trained, zero) if zero.offload == "none" else 0,
        "reduction buffer": reduction_bytes(trained, zero),
        "libraries": GPU_BASE_BYTES if on_gpu else CPU_BASE_BYTES,
        # Without GPUs there is only main memory.
        **({} if on_gpu else main_memory_bytes(shape, dtype, zero, lora)),
        **(vllm_resident(spec, shape) if samples_itself else {}),
    }
    algorithms = [loop.algorithm for loop in spec.loops.named.values()]
    sequences = max(algorithm.sequences_per_step for algorithm in algorithms) // spec.num_ranks
    tokens = -(-micro_batch_tokens(spec) // spec.ranks_per_row)
    moments = {
        "train": {
            "activations": activation_bytes(shape, dtype, tokens, spec.native_trainer.gradient_checkpointing, lora),
            "logits": logit_bytes(shape, tokens),
            "gathered weights": live_weight_bytes(shape, dtype, zero, lora),
        },
        "update": {"update": update_bytes(trained, zero)},
    }
    if samples_itself:
        sampled = [(sequences, spec.max_trained_tokens)] if spec.any_loop_samples else []
        if spec.completes_held_out(pairs_have_answers=pairs_have_answers):
            sampled.append(_sequences_of_an_evaluation(spec))
        with_vllm = spec.rollout.engine == "vllm"
        moments["sample"] = _sampling(spec, shape, sampled, gpu, with_vllm=with_vllm)
        whole = weight_bytes(shape, dtype) if zero.stage == 3 else 0
        # Of its weights, vLLM receives a bucket at a time, and they are verified in a forward pass.
        live = live_weight_bytes(shape, dtype, zero, lora)
        moments["sample"]["gathered weights"] = min(live, whole) if with_vllm else whole
    of_references = [
        # With an adapter, the reference is the policy without it, or with a second, frozen one.
        adapter
        if lora is not None and not loop.reference
        else own_weight_bytes(_reference_of(loop, shape), dtype, zero)
        for loop in spec.loops.named.values()
        if loop.algorithm.reference
    ]
    if of_references:
        resident["reference model"] = max(of_references)
    if shape.reference is not None:
        # While the activations of the policy are kept.
        passes = _forward_bytes(shape.reference, dtype, tokens) + live_weight_bytes(shape.reference, dtype, zero)
        moments["train"]["pass of the reference"] = passes
    if any(algorithm.critic for algorithm in algorithms):
        # As large as the policy, and trained like it.
        resident["critic"] = sum(resident[part] for part in ("weights", "gradients", optimizer))
    if spec.rollout.engines and not on_gpu:  # beside GPUs this is a small part of main memory
        resident["weights to send"] = weights_to_send_bytes(spec, shape)
    evaluates = bool(spec.row_evaluations) or spec.completes_held_out(pairs_have_answers=pairs_have_answers)
    if zero.stage == 3 and (evaluates or len(algorithms) > 1 or not on_gpu):
        later = resident["gradients"] + resident[optimizer]
        trained_models = 2 if "critic" in resident else 1
        # On GPUs, models other than the policy are split from main memory, one parameter at a time.
        has_model_beside = "critic" in resident or ((bool(spec.references) or lora is None) and bool(of_references))
        loads_beside_it = not on_gpu and has_model_beside
        begun = 0 if loads_beside_it else trained_models * later + resident["reduction buffer"]
        moments["load"] = {"whole weights": max(0, weight_bytes(shape, dtype) - begun)}
    return Estimate(resident, moments)


def _reference_of(loop: LoopSpec, shape: Shape) -> Shape:
    """Shape of a loop's reference model: that of its own folder, as far as it is known, or of the policy."""
    return shape.reference if loop.reference and shape.reference is not None else shape


def weights_to_send_bytes(spec: RunSpec, shape: Shape) -> int:
    """Copies of the weights that rank 0 sends to the engines: the base of deltas, and the copy in shared memory."""
    sync = spec.rollout.sync
    given = weight_bytes(trained_shape(shape, spec.model.lora), spec.model.dtype)
    return given * (sync.delta + (sync.transport is Transport.SHARED_MEMORY))


def with_reward_models(estimate: Estimate, spec: RunSpec, shapes: Mapping[str, Shape]) -> Estimate:
    """Add a copy of each reward model to the estimate of a trainer rank.

    Args:
        shapes: shapes of the reward models, by name; models without one are not counted.
    """
    beside = reward_model_bytes(spec, shapes, in_main_memory=False)
    if not beside:
        return estimate
    scoring = max(_scoring_bytes(spec, name, shapes[name]) for name in shapes if f"reward model {name}" in beside)
    return Estimate({**estimate.resident, **beside}, {**estimate.moments, "reward": {"scoring": scoring}})


def reward_model_bytes(spec: RunSpec, shapes: Mapping[str, Shape], *, in_main_memory: bool) -> dict[str, int]:
    """Weights of a rank's reward models: those in the memory used for training, or those in main memory beside a GPU.
    Without GPUs there is only main memory."""
    on_gpu = bool(spec.resources.gpus_per_node)
    return {
        f"reward model {name}": weight_bytes(shape, spec.reward.models[name].dtype)
        for name, shape in shapes.items()
        if (on_gpu and spec.reward.models[name].device == "cpu") is in_main_memory
    }


def _scoring_bytes(spec: RunSpec, name: str, shape: Shape) -> int:
    settings = spec.reward.models[name]
    longest = spec.max_tokens if name == spec.evaluate.scorer_model else spec.max_trained_tokens
    length = settings.max_tokens or longest
    return _forward_bytes(shape, settings.dtype, settings.batch_size * length)


def _forward_bytes(shape: Shape, dtype: str, tokens: int) -> int:
    """Activations of one half of a layer, attention or feed-forward: a forward pass alone keeps no others."""
    elements = 4 * shape.hidden + max(3 * shape.feed_forward, 3 * shape.query + 4 * shape.keys)
    return tokens * elements * BYTES[dtype]


def micro_batch_tokens(spec: RunSpec, *, evaluates: bool = False) -> int:
    """Maximum tokens in one pass, including padding; one sequence of full length is always allowed. Ranks that share it
    (``trainer.sequence_parallel``) have equal parts of them.

    Args:
        evaluates: the pass is over held-out rows, whose number does not depend on the rows of a training step.
    """
    trainer, length, size = spec.native_trainer, longest_sequence(spec), spec.native_trainer.micro_batch_size
    if evaluates:
        in_row = 2 if spec.main_loop.algorithm.pairs else 1
        rows = -(-spec.evaluate.num_prompts // spec.num_replicas)
        sequences = rows * in_row or size  # all held-out rows: their number is unknown
    else:
        sequences = max(loop.algorithm.sequences_per_step for loop in spec.loops.named.values()) // spec.num_replicas
    tokens = max(1, min(size, sequences)) * length
    return min(tokens, max(trainer.micro_batch_tokens, length)) if trainer.micro_batch_tokens else tokens


def longest_sequence(spec: RunSpec) -> int:
    """Tokens of the longest training sequence: with a sampled completion, or with one of the data if its length is
    limited."""
    of_data = any(not loop.algorithm.samples for loop in spec.loops.named.values())
    completion = max(
        spec.rollout.max_new_tokens if spec.any_loop_samples or not spec.data.max_completion_tokens else 0,
        spec.data.max_completion_tokens if of_data else 0,
    )
    return spec.data.max_prompt_tokens + completion


def zero_of(spec: RunSpec) -> Zero:
    """ZeRO settings of a run's native trainer."""
    trainer = spec.native_trainer
    return Zero(trainer.zero_stage, trainer.offload, spec.num_ranks)


def evaluator_estimate(
    spec: RunSpec, shape: Shape, gpu: int | None = None, *, pairs_have_answers: bool = True
) -> Estimate:
    """Memory of one evaluator rank: the weights, those of the reference if pairs are ranked against it, sampling, and
    passes over held-out rows, while the engine sleeps.

    Args:
        gpu: as in :func:`trainer_estimate`.
        pairs_have_answers: likewise.
    """
    samples = _samples(spec, pairs_have_answers)
    main, moments = spec.loops.main, dict[str, dict[str, int]]()
    weights = weight_bytes(shape, spec.model.dtype)
    resident = {
        "weights": weights,
        "libraries": GPU_BASE_BYTES if spec.resources.gpus_per_node else CPU_BASE_BYTES,
        **(vllm_resident(spec, shape) if spec.starts_vllm_in_evaluators and samples else {}),
    }
    if main is not None and main.algorithm.reference and (main.algorithm.pairs or main.algorithm.labelled):
        resident["reference model"] = weight_bytes(_reference_of(main, shape), spec.model.dtype)
    if spec.evaluates_with_engines:
        if not spec.resources.gpus_per_node:
            resident["weights to send"] = weights_to_send_bytes(spec, shape)
    elif samples:
        sampled, vllm = [_sequences_of_an_evaluation(spec)], spec.starts_vllm_in_evaluators
        moments["sample"] = _sampling(spec, shape, sampled, gpu, with_vllm=vllm)
    if spec.row_evaluations:
        tokens = -(-micro_batch_tokens(spec, evaluates=True) // spec.ranks_per_row)
        logits = 0 if spec.makes_reward_model else logit_bytes(shape, tokens)
        moments["score"] = {"activations": _forward_bytes(shape, spec.model.dtype, tokens), "logits": logits}
    return Estimate(resident, moments)


def engine_estimate(spec: RunSpec, shape: Shape, gpu: int | None = None) -> Estimate:
    """Memory of one separate rollout engine, weights and sampling: of each of its GPUs, or main memory of all its
    processes.

    The weights of the next version, or only its adapter, are staged in main memory: they count if there are no GPUs,
    otherwise in :func:`engine_main_memory_bytes`.

    Args:
        gpu: as in :func:`trainer_estimate`.
    """
    on_gpu = bool(spec.resources.gpus_per_node)
    weights, loops = weight_bytes(shape, spec.model.dtype), spec.loops.named.values()
    if spec.rollout.engine == "sglang" and gpu is not None:
        # The rest of its share, and at least one sequence.
        cache = max(
            sglang_share_bytes(spec, gpu) - weights, spec.max_tokens * token_cache_bytes(shape, spec.model.dtype)
        )
        return Estimate({"libraries": GPU_BASE_BYTES, "weights": weights}, {"sample": {"SGLang's cache": cache}})
    given = weight_bytes(trained_shape(shape, spec.model.lora), spec.model.dtype)
    own = weights if spec.model.lora is None else weights + given
    width = spec.rollout.gpus_per_engine
    part, counted = part_of(shape, width), 1 if on_gpu else width
    resident = {"libraries": GPU_BASE_BYTES if on_gpu else CPU_BASE_BYTES * _engine_processes(spec)}
    with_vllm = spec.rollout.engine == "vllm"
    if with_vllm:
        resident |= {name: counted * size for name, size in vllm_resident(spec, part).items()}
    else:
        resident["weights"] = own
    sequences = max((loop.algorithm.sequences_per_step for loop in loops if loop.algorithm.samples), default=0)
    engines = max(1, spec.rollout.engines)
    sampled = [(sequences // engines, spec.max_trained_tokens)]
    if spec.completes_held_out(pairs_have_answers=True):
        of_a_rank, length = _sequences_of_an_evaluation(spec)
        sampled.append((of_a_rank * spec.num_ranks // engines, length))
    one = _sampling(spec, part, sampled, gpu, with_vllm=with_vllm)
    sampling = {name: counted * size for name, size in one.items()}
    return Estimate(resident, {"sample": sampling, **({} if on_gpu else {"sync": {"next weights": given}})})


def engine_main_memory_bytes(spec: RunSpec, shape: Shape) -> int:
    """Main memory of one separate rollout engine: all of its memory, or beside its GPUs its processes and the version
    of the weights that it has received, which SGLang reads from a copy."""
    if not spec.resources.gpus_per_node:
        return engine_estimate(spec, shape).peak_bytes
    given = weight_bytes(trained_shape(shape, spec.model.lora), spec.model.dtype)
    return CPU_BASE_BYTES * _engine_processes(spec) + given * (2 if spec.rollout.engine == "sglang" else 1)


def _engine_processes(spec: RunSpec) -> int:
    """Processes of one separate engine: of several GPUs, one for each and their leader."""
    width = spec.rollout.gpus_per_engine
    return width + 1 if width > 1 else 1


def _sampling(
    spec: RunSpec, shape: Shape, sampled: Sequence[tuple[int, int]], gpu: int | None, *, with_vllm: bool
) -> dict[str, int]:
    """Additional bytes while sampling.

    Args:
        sampled: number of sequences and tokens of the longest one, in training and in an evaluation; the one that takes
            more counts.
    """

    def taken(sequences: int, length: int) -> dict[str, int]:
        batch = max(1, min(spec.rollout.batch_size, sequences))
        if with_vllm:
            return vllm_moment(spec, shape, batch, length, gpu)
        return {
            "KV cache": cache_bytes(shape, spec.model.dtype, batch, length),
            "sampling": sampling_bytes(shape, spec.model.dtype, batch),
        }

    return max((taken(*one) for one in sampled), key=lambda parts: sum(parts.values()))


def _samples(spec: RunSpec, pairs_have_answers: bool) -> bool:
    """False if neither training nor evaluation samples."""
    return spec.any_loop_samples or spec.completes_held_out(pairs_have_answers=pairs_have_answers)


def _sequences_of_an_evaluation(spec: RunSpec) -> tuple[int, int]:
    """Number of the completions of one rank, and tokens of the longest one with its prompt."""
    prompts = spec.evaluate.num_prompts or spec.rollout.batch_size * spec.num_ranks
    return -(-prompts * spec.evaluate.samples_per_prompt // spec.num_ranks), spec.max_evaluated_tokens
