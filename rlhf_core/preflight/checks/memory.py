"""Memory of model, optimizer, activations and cache compared with the memory of a node."""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pydantic import JsonValue

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.memory.engines import (
    token_cache_bytes,
    vllm_cache_budget,
    vllm_fixed_bytes,
    vllm_share_bytes,
    waiting_base_bytes,
)
from rlhf_core.preflight.memory.formulas import CPU_BASE_BYTES, main_memory_bytes, weight_bytes
from rlhf_core.preflight.memory.gpus import GIB, USABLE_SHARE, gpu_memory_bytes, with_largest_size
from rlhf_core.preflight.memory.remedies import remedies
from rlhf_core.preflight.memory.roles import (
    Estimate,
    engine_estimate,
    engine_main_memory_bytes,
    evaluator_estimate,
    reward_model_bytes,
    trainer_estimate,
    weights_to_send_bytes,
    with_reward_models,
    zero_of,
)
from rlhf_core.preflight.memory.shapes import Shape, part_of
from rlhf_core.preflight.predictions import gpu_kinds, node_memory_gb, smallest_gpu_bytes
from rlhf_core.preflight.registry import CheckFunction, Finding, blocked, check, passed, skipped, warning
from rlhf_core.preflight.size_estimates import known_shapes, shape_of_model, trained_models
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import size

SURELY_TOO_MUCH = 1.15
"""Share of the memory above which an estimate blocks the run; up to it, the estimate itself may be wrong."""
TIGHT = 0.9
"""Share of the memory from which a warning is reported."""


def _in_doubt_the_largest(judge: CheckFunction) -> CheckFunction:
    """Make a check block GPUs of unknown size only if the largest is too small; otherwise it warns."""

    @functools.wraps(judge)
    def judge_both(facts: Facts) -> Iterator[Finding]:
        found = list(judge(facts))
        if not _is_blocked(found) or _is_blocked(judge(_with_largest_gpus(facts))):
            yield from found
            return
        for one in found:
            in_doubt = replace(one, status=CheckStatus.WARNING, advice=f"if the GPUs are of this size, {one.advice}")
            yield in_doubt if one.status is CheckStatus.BLOCKED else one

    return judge_both


def _is_blocked(found: Iterable[Finding]) -> bool:
    return any(one.status is CheckStatus.BLOCKED for one in found)


def _with_largest_gpus(facts: Facts) -> Facts:
    """Facts in which every type of GPU has its largest size; of several types, only the largest is left if the job
    selects its nodes in a way that may not be evaluated here, such as by generic resources."""
    kinds = {node: with_largest_size(kind) for node, kind in facts.inventory.node_gpu_types.items()}
    larger = replace(facts, inventory=facts.inventory.model_copy(update={"node_gpu_types": kinds}))
    gpu_type = with_largest_size(facts.slurm.gpu_type)
    if not gpu_type and facts.slurm.selects_nodes:
        possible = gpu_kinds(larger)
        gpu_type = max(sorted(possible), key=lambda kind: gpu_memory_bytes(kind) or 0, default="")
    return replace(larger, spec=with_changes(facts.spec, {"slurm.gpu_type": gpu_type})) if gpu_type else larger


@check("memory.trainer", trainer="native")
@_in_doubt_the_largest
def trainer(facts: Facts) -> Iterator[Finding]:
    """CUDA out of memory, or the kernel's OOM killer on CPU, strikes only after loading or at the first long batch."""
    shape, room = shape_of_model(facts), _room(facts)
    if isinstance(room, str) or shape is None:
        yield skipped(room if isinstance(room, str) else "the model's config lacks its dimensions")
        return
    scorers = known_shapes(facts.reward_models)
    estimate = with_reward_models(_trainer_estimate(facts, facts.spec, shape), facts.spec, scorers)
    left = room - sum(reward_model_bytes(facts.spec, scorers, in_main_memory=False).values())
    yield _finding(facts, "a trainer", estimate, room, _advice(facts, shape, estimate, left))


@check("memory.min_nodes", trainer="native")
@_in_doubt_the_largest
def min_nodes(facts: Facts) -> Iterator[Finding]:
    """Fewer nodes share optimizer, gradients and batch, so an attempt with fewer nodes may run out of memory."""
    shape, room = shape_of_model(facts), _room(facts)
    fewer = facts.spec.possible_nodes[1:]
    if shape is None or isinstance(room, str) or not fewer:
        return
    scorers = known_shapes(facts.reward_models)
    fits: list[int] = []
    for number in fewer:
        smaller = with_changes(facts.spec, {"resources.num_nodes": number, "resources.min_nodes": 0})
        estimate = with_reward_models(_trainer_estimate(facts, smaller, shape), smaller, scorers)
        if estimate.resident_bytes > room or estimate.peak_bytes > SURELY_TOO_MUCH * room:
            least = min(fits, default=facts.spec.resources.num_nodes)
            yield blocked(
                f"on {number} of {facts.spec.resources.num_nodes} nodes a trainer rank takes about "
                f"{size(estimate.peak_bytes)} (estimate), but has {size(room)}",
                "a run that fits on any number of nodes from resources.min_nodes up",
                f"set resources.min_nodes={least if fits else 0}",
            )
            return
        fits.append(number)
    yield passed(f"a trainer rank fits on {', '.join(map(str, sorted(fits)))} nodes too")


@check("memory.evaluator")
@_in_doubt_the_largest
def evaluator(facts: Facts) -> Iterator[Finding]:
    """An evaluation that runs out of memory spoils the last stage of a run that has trained to the end."""
    shape, room = shape_of_model(facts), _room(facts)
    if not facts.spec.is_evaluated or shape is None or isinstance(room, str):
        return  # what is unknown is reported by memory.trainer
    estimate = evaluator_estimate(facts.spec, shape, _gpu(facts), pairs_have_answers=facts.pairs_have_answers)
    scorer = facts.spec.evaluate.scorer_model
    scorers = {name: of for name, of in known_shapes(facts.reward_models).items() if name == scorer}
    estimate = with_reward_models(estimate, facts.spec, scorers)
    vllm, on_gpu = facts.spec.starts_vllm_in_evaluators, bool(facts.spec.resources.gpus_per_node)
    if on_gpu and estimate.resident_bytes > TIGHT * room:
        advice = "use GPUs with more memory or a smaller model: an evaluator holds whole models on its GPU"
    elif vllm:
        advice = f"lower {'rollout.vllm.gpu_memory_share' if on_gpu else 'rollout.vllm.cpu_cache_gb'}"
    else:
        advice = "lower rollout.batch_size"
    yield _finding(facts, "an evaluator", estimate, room, advice)


@check("memory.rollout", trainer="native")
@_in_doubt_the_largest
def rollout(facts: Facts) -> Iterator[Finding]:
    """vLLM without room for its weights and one full sequence fails at its start, on every node at once."""
    spec, shape, room = facts.spec, shape_of_model(facts), _room(facts)
    if shape is None or isinstance(room, str):
        return  # reported by memory.trainer
    if spec.rollout.engines and spec.resources.gpus_per_node:
        engine = spec.rollout.engine
        setting = "rollout.batch_size" if engine == "transformers" else f"rollout.{engine}.gpu_memory_share"
        # vLLM measures what it needs and stays within its share: nothing is left uncounted.
        tight = 1.0 if engine == "vllm" else TIGHT
        estimate = engine_estimate(spec, shape, room)
        yield _finding(facts, "a rollout engine", estimate, room, f"lower {setting}", tight)
    elif spec.rollout.nodes:
        yield _finding(
            facts, "a rollout engine", engine_estimate(spec, shape), _engine_room(facts), "lower rollout.engines"
        )
    # Where nothing is sampled, vLLM is not started.
    samples = spec.any_loop_samples or spec.completes_held_out(pairs_have_answers=facts.pairs_have_answers)
    if spec.rollout.engine == "vllm" and samples:
        yield _cache_finding(spec, part_of(shape, spec.rollout.gpus_per_engine), room)


def _cache_finding(spec: RunSpec, shape: Shape, room: int) -> Finding:
    """Compare the room for vLLM's KV cache with one sequence of full length."""
    budget = vllm_cache_budget(spec, shape, room) or 0
    length = spec.max_tokens
    needed = length * token_cache_bytes(shape, spec.model.dtype)
    on_gpu = bool(spec.resources.gpus_per_node)
    name = "rollout.vllm.gpu_memory_share" if on_gpu else "rollout.vllm.cpu_cache_gb"
    fixed = vllm_fixed_bytes(spec, shape, room)
    value = spec.rollout.vllm.gpu_memory_share if on_gpu else spec.rollout.vllm.cpu_cache_gb
    of = f", {size(fixed)} of it for weights and a step" if on_gpu else " for its cache"
    taken = size(vllm_share_bytes(spec, room)) if on_gpu else f"{value} GiB"
    found = f"vLLM has {taken} per rank{of} ({name} = {value}); a sequence of {length} tokens takes {size(needed)}"
    if budget < needed:
        least = math.ceil(100 * (fixed + needed) * USABLE_SHARE / room) / 100 if on_gpu else math.ceil(needed / GIB)
        fits = not on_gpu or least <= 1
        more = f"set {name}={least} or more" if fits else "use GPUs with more memory, or a smaller model"
        return blocked(found, "room for at least one sequence", more)
    return passed(f"{found}: {budget // needed} of them at once")


@check("memory.offload", trainer="native")
def offload(facts: Facts) -> Iterator[Finding]:
    """One main memory holds rows, what ranks offload and engines receive; when full, the kernel kills a process."""
    spec, node = facts.spec, node_memory_gb(facts) * GIB
    if not spec.resources.gpus_per_node or not node:
        return
    of_rows, of_engines = _held_by_rows(facts), _held_by_engines(facts)
    of_ranks = _held_by_ranks(facts) | of_rows
    libraries = spec.resources.ranks_per_node * CPU_BASE_BYTES
    on_nodes = [(of_ranks, libraries), (of_engines, 0)] if spec.rollout.nodes else [(of_ranks | of_engines, libraries)]
    for parts, further in on_nodes:
        needed = sum(parts.values()) + further
        text = f"the processes of a node take about {size(needed)} of its main memory ({', '.join(parts)})"
        if parts and needed > TIGHT * node:
            largest = max(parts, key=parts.__getitem__)
            advice = _FEWER_ENGINES if largest in of_engines else _FEWER_ROWS if largest in of_rows else _LESS_OFFLOAD
            yield blocked(f"{text}, which has {size(node)}", f"at most {size(TIGHT * node)}", advice)
        elif parts:
            yield passed(text)


_LESS_OFFLOAD = (
    "use more nodes, which share the optimizer, or GPUs with more memory and nothing in main memory: "
    'trainer.offload="none", reward.models.<name>.device="rank", separate engines (rollout.engines)'
)
_FEWER_ENGINES = (
    "have fewer engines on a node (rollout.engines, rollout.vllm.tensor_parallel), or use nodes with more memory"
)
_FEWER_ROWS = (
    "use fewer rows, leave out columns that no template and no reward function reads, or use nodes with more memory"
)
MANY_ROWS_BYTES = GIB
"""Main memory of the rows in all ranks of a node below which it is not listed."""


def _held_by_rows(facts: Facts) -> dict[str, int]:
    """Main memory of a node that the data takes: every rank holds all rows."""
    count, splits = facts.spec.resources.ranks_per_node, facts.content.splits if facts.content is not None else ()
    each = sum(split.bytes_per_row * facts.num_rows(split) for split in splits)
    return {f"{count} times the rows {size(each)}": count * each} if count * each > MANY_ROWS_BYTES else {}


def _held_by_ranks(facts: Facts) -> dict[str, int]:
    """Main memory of a node that its trainer ranks take, beside libraries and data, by purpose."""
    spec, shape, count = facts.spec, shape_of_model(facts), facts.spec.resources.ranks_per_node
    each = reward_model_bytes(spec, known_shapes(facts.reward_models), in_main_memory=True)
    if shape is not None:
        each |= main_memory_bytes(shape, spec.model.dtype, zero_of(spec), spec.model.lora)
        each |= waiting_base_bytes(spec, shape)
    to_send = weights_to_send_bytes(spec, shape) if shape is not None and spec.rollout.engines else 0
    held = {f"{count} times {name} {size(number)}": count * number for name, number in each.items()}
    return held | ({f"weights to send {size(to_send)}": to_send} if to_send else {})


def _held_by_engines(facts: Facts) -> dict[str, int]:
    """Main memory of a node that its separate engines take beside their GPUs, likewise."""
    spec, shape, count = facts.spec, shape_of_model(facts), facts.spec.engines_per_node
    if shape is None or not count:
        return {}
    each = engine_main_memory_bytes(spec, shape)
    return {f"{count} times an engine with the weights that it receives {size(each)}": count * each}


@check("memory.snapshot", trainer="native")
def snapshot(facts: Facts) -> Iterator[Finding]:
    """Without room for a snapshot in main memory, training stops while a checkpoint is written."""
    known = _snapshot_and_room(facts)
    if known is None:
        return
    needed, free = known
    text = f"a snapshot of the state of a node's ranks takes {size(needed)} of main memory"
    if needed > TIGHT * free:
        found = f"{text}, but only {size(free)} is free beside the ranks: training waits for the disk instead"
        yield warning(found, "room for a snapshot", 'use nodes with more memory, or set "checkpoint.background=false"')
    else:
        yield passed(text)


@check("memory.peer_copy", trainer="native")
def peer_copy(facts: Facts) -> Iterator[Finding]:
    """A copy on the next node doubles the memory and needs a second node; otherwise losing the node loses the copy."""
    known = _snapshot_and_room(facts)
    if known is None or facts.spec.checkpoint.memory != "peer":
        return
    own = 'set checkpoint.memory="own"'
    if facts.spec.num_trainer_nodes == 1:
        trains = "one node" if facts.spec.resources.num_nodes == 1 else "one node that trains"
        text = f'checkpoint.memory is "peer", but there is only {trains}: the copy of the newest checkpoint stays on it'
        yield warning(text, "two or more of them", own)
        return
    needed, free = known
    text = f"a snapshot and the copy of another node's snapshot take {size(2 * needed)} of a node's main memory"
    if 2 * needed > TIGHT * free:
        found = f"{text}, but only {size(free)} is free beside the ranks: there may be no copy on another node"
        yield warning(found, "room for both", f"use nodes with more memory, or {own}")
    else:
        yield passed(text)


def _snapshot_and_room(facts: Facts) -> tuple[int, float] | None:
    """Bytes of a node's snapshots, and of its main memory beside its ranks; None if they are unknown, or if checkpoints
    are written without snapshots, as those of an adapter are."""
    spec, shape, resources = facts.spec, shape_of_model(facts), facts.spec.resources
    node = node_memory_gb(facts) * GIB
    if shape is None or not node or not spec.checkpoint.background or spec.model.lora is not None:
        return None
    held = CPU_BASE_BYTES + sum(main_memory_bytes(shape, spec.model.dtype, zero_of(spec)).values())
    if not resources.gpus_per_node:
        held = _trainer_estimate(facts, spec, shape).peak_bytes
    return _snapshot_bytes(spec, shape), max(0, node - resources.ranks_per_node * held - _engine_bytes(facts))


def _snapshot_bytes(spec: RunSpec, shape: Shape) -> int:
    """AdamW's float32 weights and moments of a node's ranks, 12 bytes per parameter over all ranks, and the model
    weights that rank 0 saves; twice as much with a critic, which is as large as the policy."""
    states = 12 * shape.parameters * spec.resources.ranks_per_node // spec.num_ranks
    return (states + weight_bytes(shape, spec.model.dtype)) * trained_models(spec)


def _trainer_estimate(facts: Facts, spec: RunSpec, shape: Shape) -> Estimate:
    return trainer_estimate(spec, shape, _gpu(facts), pairs_have_answers=facts.pairs_have_answers)


def _gpu(facts: Facts) -> int | None:
    """Usable memory of a rank's GPU; None without a GPU or if it is unknown."""
    room = _room(facts)
    return room if facts.spec.resources.gpus_per_node and isinstance(room, int) else None


def _room(facts: Facts) -> int | str:
    """Memory of one rank, or the reason why it is unknown. Without GPUs, the rollout engines of its node are
    subtracted."""
    resources = facts.spec.resources
    if not resources.gpus_per_node:
        node = node_memory_gb(facts)
        if not node:
            return "the memory of the nodes is unknown"
        return int(max(0, node * GIB - _engine_bytes(facts)) / resources.ranks_per_node)
    smallest, kinds = smallest_gpu_bytes(facts), sorted(gpu_kinds(facts))
    if not kinds:
        return "the type of GPU is unknown; set slurm.gpu_type to have its memory checked"
    return smallest or f"the memory of {', '.join(kinds)} is not in the table of GPUs"


def _engine_bytes(facts: Facts) -> int:
    """Main memory of the rollout engines beside the ranks of a node; 0 if the config does not define it."""
    shape, number = shape_of_model(facts), facts.spec.engines_beside_trainers
    return number * engine_main_memory_bytes(facts.spec, shape) if shape is not None and number else 0


def _engine_room(facts: Facts) -> int:
    """Main memory per engine on a node that runs only engines; 0 if the memory of the nodes is unknown."""
    node = node_memory_gb(facts)
    return int(node * GIB / max(1, facts.spec.engines_per_node))


def _finding(facts: Facts, role: str, estimate: Estimate, room: int, advice: str, tight: float = TIGHT) -> Finding:
    parts = ", ".join(f"{name} {size(part)}" for name, part in estimate.largest[:4] if part > GIB / 20)
    peak, where = estimate.peak_bytes, "GPU" if facts.spec.resources.gpus_per_node else "rank of a node"
    advice += _larger_gpus(facts, room)
    found = f"{role} rank takes about {size(peak)} (estimate: {parts}), a {where} has {size(room)}"
    if estimate.resident_bytes > room or peak > SURELY_TOO_MUCH * room:
        return blocked(found, f"at most {size(room)} per rank: this is {size(peak - room)} too much", advice)
    if peak > tight * room:
        return warning(found, f"at most {size(tight * room)}, to leave room for memory that is not counted", advice)
    return passed(found)


def _larger_gpus(facts: Facts, room: int) -> str:
    """Advice to request one of the larger types of GPU that the job may get; empty if there is none."""
    kinds = gpu_kinds(facts) if facts.spec.resources.gpus_per_node else ()
    larger = sorted(kind for kind in kinds if (gpu_memory_bytes(kind) or 0) > room)
    return f"; or set slurm.gpu_type to a larger type that the nodes have: {', '.join(larger)}" if larger else ""


def _advice(facts: Facts, shape: Shape, estimate: Estimate, room: int) -> str:
    changes = [
        f"{_set(change)} ({size(peak)})"
        for change, peak in remedies(
            facts.spec,
            facts.model_config,
            shape,
            int(TIGHT * room),
            _gpu(facts),
            pairs_have_answers=facts.pairs_have_answers,
        )
    ]
    if changes:
        return "set " + ", or ".join(changes[:3])
    largest = estimate.largest[0][0]
    more = "more ranks would split the optimizer further; " if largest.startswith("optimizer") else ""
    return f"{more}use GPUs with more memory or a smaller model: no setting makes it fit; {largest} takes most"


def _set(change: Mapping[str, JsonValue]) -> str:
    return " and ".join(f"{name}={json.dumps(value)}" for name, value in change.items())
