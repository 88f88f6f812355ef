"""The plan of a run before it starts: memory of each role, duration of a step, possible layouts, and the measurements
of earlier runs of the same shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import rlhf_core.preflight.checks  # noqa: F401 - importing it registers the checks
from rlhf_core.allocation.layouts import Cluster, Layout, layouts, nearest
from rlhf_core.history.queries.measured import MeasuredShape
from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.memory.engines import token_cache_bytes, vllm_cache_budget
from rlhf_core.preflight.memory.gpus import GIB
from rlhf_core.preflight.memory.roles import Estimate, engine_estimate, evaluator_estimate, trainer_estimate
from rlhf_core.preflight.memory.shapes import Shape, part_of
from rlhf_core.preflight.predictions import node_memory_gb, slowest_step, smallest_gpu_bytes
from rlhf_core.preflight.registry import run_checks
from rlhf_core.preflight.size_estimates import shape_of_model
from rlhf_core.preflight.step_time import StepTime, step_time
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.run import RunSpec

NUM_PROPOSED = 5
"""Number of proposed layouts, the fastest first."""
OWN_SHARE = 0.85
"""Share of its GPU's memory for an engine that does not share the GPU."""

_OF_LAYOUT = ("batch.", "rollout.engines", "resources.gpus")
"""Preflight checks of the layout."""

PHASES = {
    "sampling": "time/rollout_s",
    "training": "time/train_s",
    "weight sync": "time/weight_sync_s",
}
"""Predicted phases, and the metric that measures each; communication is part of training where training is measured."""


@dataclass(frozen=True)
class Proposal:
    """One layout with its prediction."""

    layout: Layout
    engine: str
    """``rollout.engine``."""
    trainer_bytes: int
    """Peak memory of a trainer rank."""
    engine_bytes: int
    """Peak memory of a separate engine; 0 without one."""
    memory_share: float
    """``rollout.vllm.gpu_memory_share``; 0 if transformers samples."""
    sequences: int
    """Sequences of full length that fit into vLLM's cache at the same time; 0 if transformers samples."""
    step: StepTime


@dataclass(frozen=True)
class RunPlan:
    """Prediction of a run, and the limits and measurements that it is compared with."""

    spec: RunSpec
    layout: Layout
    problems: list[CheckResult]
    """Findings of preflight on layout and memory that block the run."""
    warnings: list[CheckResult]
    """Those that only warn."""
    nearest: list[Layout]
    """Nearest layouts that divide, if the requested one does not."""
    memory: Mapping[str, Estimate] = field(default_factory=dict)
    """By role; empty if the model's config does not give its dimensions."""
    limit: int | None = None
    """Usable bytes of a rank; None if unknown."""
    gpu_kind: str = ""
    """Slowest type of GPU, for which the step is predicted; empty if none is known."""
    step: StepTime | None = None
    proposals: list[Proposal] = field(default_factory=list)
    """Layouts on the same nodes that fit, the fastest first."""
    scale: Mapping[str, float] = field(default_factory=dict)
    """Ratio of measured to predicted seconds by phase, by which the proposals are scaled; empty without history."""
    measured: MeasuredShape = field(default_factory=MeasuredShape)


def plan_run(facts: Facts, measured: MeasuredShape) -> RunPlan:
    """Predict a run of the native trainer.

    Args:
        facts: from ``gather_for_predictions``.
        measured: measurements of earlier runs of the shape.
    """
    spec = facts.spec
    layout, cluster = layout_of(spec), cluster_of(spec, facts.model_config)
    of_layout = _unwanted(_with_the_gpus(facts), *_OF_LAYOUT)
    unwanted = [*of_layout, *_unwanted(facts, "memory.")]
    refused = [one for one in unwanted if one.status is CheckStatus.BLOCKED]
    warnings = [one for one in unwanted if one.status is CheckStatus.WARNING]
    found = nearest(layout, cluster) if of_layout else []
    shape = shape_of_model(facts)
    if shape is None:
        return RunPlan(spec, layout, refused, warnings, found, measured=measured)
    gpu = smallest_gpu_bytes(facts)
    kind, step = slowest_step(facts, shape)
    scale = _scale(step, measured)
    return RunPlan(
        spec=spec,
        layout=layout,
        problems=refused,
        warnings=warnings,
        nearest=found,
        memory=_memory(facts, shape, gpu),
        limit=gpu if spec.resources.gpus_per_node else _main_memory(facts),
        gpu_kind=kind,
        step=step,
        proposals=_proposals(facts, shape, cluster, kind, gpu, scale) if kind and gpu else [],
        scale=scale,
        measured=measured,
    )


def _unwanted(facts: Facts, *checks: str) -> list[CheckResult]:
    unwanted = (CheckStatus.BLOCKED, CheckStatus.WARNING)
    return [one for one in run_checks(facts, checks) if one.status in unwanted]


def _with_the_gpus(facts: Facts) -> Facts:
    """Facts with the requested GPUs on every node: a plan can be made where there are no such nodes yet."""
    gpus = {"gpus_per_node": facts.spec.resources.gpus_per_node, "node_gpus": {}}
    return replace(facts, inventory=facts.inventory.model_copy(update=gpus))


def layout_of(spec: RunSpec) -> Layout:
    """The layout that a config requests."""
    return Layout(spec.num_ranks, spec.rollout.engines, spec.rollout.gpus_per_engine, spec.rollout.nodes)


def cluster_of(spec: RunSpec, config: Mapping[str, Any]) -> Cluster:
    """Nodes of the run, and the numbers that a layout must divide."""
    algorithms = [loop.algorithm for loop in spec.loops.named.values()]
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return Cluster(
        spec.resources.num_nodes,
        spec.resources.gpus_per_node,
        rows=frozenset(one.rows_per_step * (1 if one.samples else spec.ranks_per_row) for one in algorithms),
        ranks_per_row=spec.ranks_per_row,
        prompts=frozenset(one.rows_per_step for one in algorithms if one.samples),
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
    )


def in_layout(spec: RunSpec, layout: Layout) -> RunSpec:
    """The spec of the run in another layout on the same nodes."""
    ranks = layout.trainers // (spec.resources.num_nodes - layout.engine_nodes)
    resources = spec.resources.model_copy(update={"ranks_per_node": ranks})
    vllm = spec.rollout.vllm.model_copy(update={"tensor_parallel": layout.tensor_parallel})
    of_engines = {"engines": layout.engines, "nodes": layout.engine_nodes, "vllm": vllm}
    rollout = spec.rollout.model_copy(update=of_engines)
    return spec.model_copy(update={"resources": resources, "rollout": rollout})


def _memory(facts: Facts, shape: Shape, gpu: int | None) -> dict[str, Estimate]:
    spec = facts.spec
    found = {"trainer": trainer_estimate(spec, shape, gpu, pairs_have_answers=facts.pairs_have_answers)}
    if spec.rollout.engines:
        found["rollout engine"] = engine_estimate(spec, shape, gpu)
    if spec.is_evaluated:
        found["evaluator"] = evaluator_estimate(spec, shape, gpu, pairs_have_answers=facts.pairs_have_answers)
    return found


def _main_memory(facts: Facts) -> int | None:
    spec = facts.spec
    node = node_memory_gb(facts)
    processes = max(spec.resources.ranks_per_node + spec.engines_beside_trainers, spec.engines_per_node)
    return int(node * GIB / processes) if node else None


def _scale(step: StepTime | None, measured: MeasuredShape) -> dict[str, float]:
    """Ratio of measured to predicted seconds, for each phase that has both."""
    if step is None:
        return {}
    found = {}
    for phase, key in PHASES.items():
        predicted = step.parts.get(phase, 0.0) + (step.parts.get("communication", 0.0) if phase == "training" else 0.0)
        seconds = measured.get("seconds", {}).get(key, 0.0)
        if predicted and seconds:
            found[phase] = seconds / predicted
    return found | ({"communication": found["training"]} if "training" in found else {})


def _proposals(
    facts: Facts, shape: Shape, cluster: Cluster, kind: str, gpu: int, scale: Mapping[str, float]
) -> list[Proposal]:
    """Layouts that use every GPU and fit, the fastest first. Engines of several GPUs are proposed only if no layout
    with engines of one GPU fits."""
    found = []
    for layout in layouts(cluster):
        processes = layout.trainers + layout.engines * layout.tensor_parallel
        usable = processes == cluster.num_gpus and _suits(facts.spec, layout)
        for engine in _engines(layout) if usable else ():
            proposal = _proposal(facts, shape, layout, engine, kind, gpu, scale)
            found += [proposal] if proposal is not None else []
    narrow = [one for one in found if one.layout.tensor_parallel == 1]
    return sorted(narrow or found, key=lambda one: one.step.seconds)[:NUM_PROPOSED]


def _suits(spec: RunSpec, layout: Layout) -> bool:
    """False for engines that nothing would sample with, and for sampling a step ahead without engines: preflight
    blocks both."""
    return spec.any_loop_samples if layout.engines else not spec.rollout.max_staleness


def _engines(layout: Layout) -> tuple[str, ...]:
    """Engines that may sample in a layout."""
    return ("vllm",) if layout.engines else ("transformers", "vllm")


def _proposal(
    facts: Facts, shape: Shape, layout: Layout, engine: str, kind: str, gpu: int, scale: Mapping[str, float]
) -> Proposal | None:
    """The layout with its prediction; None if it does not fit."""
    spec = facts.spec
    changed = in_layout(spec, layout)
    share = OWN_SHARE if layout.engines else spec.rollout.vllm.gpu_memory_share
    vllm = changed.rollout.vllm.model_copy(update={"gpu_memory_share": share})
    rollout = changed.rollout.model_copy(update={"engine": engine, "vllm": vllm})
    changed = changed.model_copy(update={"rollout": rollout})
    samples_with_vllm = engine == "vllm"
    trainer = trainer_estimate(changed, shape, gpu, pairs_have_answers=facts.pairs_have_answers).peak_bytes
    sequences = 0
    if samples_with_vllm:
        part = part_of(shape, layout.tensor_parallel)
        tokens = (vllm_cache_budget(changed, part, gpu) or 0) // token_cache_bytes(part, spec.model.dtype)
        # An evaluation may need a longer one, but only training is predicted.
        sequences = tokens // spec.max_trained_tokens if tokens >= spec.max_tokens else 0
    step = step_time(changed, shape, kind)
    if step is None or trainer > gpu or (samples_with_vllm and sequences < 1):
        return None
    parts = {name: seconds * scale.get(name, 1.0) for name, seconds in step.parts.items()}
    return Proposal(
        layout,
        engine,
        trainer,
        engine_estimate(changed, shape, gpu).peak_bytes if layout.engines else 0,
        changed.rollout.vllm.gpu_memory_share if samples_with_vllm else 0.0,
        sequences,
        StepTime(parts),
    )
