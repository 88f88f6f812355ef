"""Memory of model, optimizer, activations and cache against the memory of a node."""

import json
from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.memory import (
    GIB,
    Estimate,
    Shape,
    evaluator_estimate,
    gpu_memory_bytes,
    remedies,
    shape_of,
    trainer_estimate,
)
from rlhf_core.preflight.registry import Finding, blocked, check, passed, skipped, warning
from rlhf_core.preflight.size_estimates import num_parameters, vocabulary_size

SURELY_TOO_MUCH = 1.15
"""An estimate beyond this share of the memory stops the run; up to it, it may be the estimate that is wrong."""
TIGHT = 0.9
"""From this share on it is said."""


@check("memory.trainer", trainer="native")
def trainer(facts: Facts) -> Iterator[Finding]:
    """CUDA out of memory, or the kernel's killer on CPU, after minutes of loading, or at the first long batch."""
    shape, room = _shape(facts), _room(facts)
    if isinstance(room, str) or shape is None:
        yield skipped(room if isinstance(room, str) else "the model's config does not give its dimensions")
        return
    estimate = trainer_estimate(facts.spec, shape)
    yield _finding(facts, "a trainer", estimate, room, _advice(facts, shape, estimate, room))


@check("memory.evaluator", trainer="native")
def evaluator(facts: Facts) -> Iterator[Finding]:
    """An evaluation that runs out of memory loses the last step of a run that has trained to its end."""
    shape, room = _shape(facts), _room(facts)
    if shape is None or isinstance(room, str):
        return  # memory.trainer says so
    estimate = evaluator_estimate(facts.spec, shape)
    yield _finding(facts, "an evaluator", estimate, room, "lower rollout.batch_size")


def _shape(facts: Facts) -> Shape | None:
    return shape_of(facts.model_config, num_parameters(facts), vocabulary_size(facts.spec))


def _room(facts: Facts) -> int | str:
    """Memory of one rank, or why it is not known."""
    resources, inventory = facts.spec.resources, facts.inventory
    if not resources.gpus_per_node:
        node = resources.memory_gb or inventory.memory_gb
        return int(node * GIB / resources.ranks_per_node) if node else "the memory of the nodes is not known"
    kinds = {facts.spec.slurm.gpu_type} if facts.spec.slurm.gpu_type else set(inventory.node_gpu_types.values())
    if not kinds:
        return "the type of GPU is not known; name it in slurm.gpu_type to have its memory checked"
    sizes = {kind: gpu_memory_bytes(kind) for kind in kinds}
    known = [size for size in sizes.values() if size is not None]
    # Any of them may be given; the smallest must do.
    return min(known) if known else f"the memory of {', '.join(sorted(sizes))} is not in the table of GPUs"


def _finding(facts: Facts, role: str, estimate: Estimate, room: int, advice: str) -> Finding:
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in estimate.largest[:4] if size > GIB / 20)
    peak, where = estimate.peak_bytes, "GPU" if facts.spec.resources.gpus_per_node else "rank of a node"
    found = f"{role} rank takes about {_gib(peak)} GiB (estimate: {parts}), a {where} has {_gib(room)} GiB"
    if estimate.resident_bytes > room or peak > SURELY_TOO_MUCH * room:
        return blocked(found, f"at most {_gib(room)} GiB on a rank: {_gib(peak - room)} GiB too much", advice)
    if peak > TIGHT * room:
        return warning(found, f"at most {_gib(TIGHT * room)} GiB, to leave some room for what is not counted", advice)
    return passed(found)


def _advice(facts: Facts, shape: Shape, estimate: Estimate, room: int) -> str:
    changes = [f"{_set(change)} ({_gib(peak)} GiB)" for change, peak in remedies(facts.spec, shape, int(TIGHT * room))]
    if changes:
        return "set " + ", or ".join(changes[:3])
    largest = estimate.largest[0][0]
    more = "more ranks would split the optimizer further; " if largest.startswith("optimizer") else ""
    return (
        f"{more}take GPUs with more memory or a smaller model: no batch size makes it fit, most is taken by {largest}"
    )


def _set(change: Mapping[str, JsonValue]) -> str:
    return " and ".join(f"{name}={json.dumps(value)}" for name, value in change.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:.0f}"
