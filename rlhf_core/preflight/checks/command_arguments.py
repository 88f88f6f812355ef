"""Arithmetic of an external trainer's arguments, as far as they can be read."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.launch_arguments import (
    TRANSFORMERS,
    TrainerArguments,
    arguments_of,
    copies_in_optimizer,
    trains_all_weights,
)
from rlhf_core.preflight.memory.gpus import GIB, gpu_memory_bytes, with_largest_size
from rlhf_core.preflight.predictions import gpu_kinds
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.preflight.size_estimates import stored_parameters

_HALF = frozenset({"bfloat16", "float16"})
"""Values of ``--dtype`` with 2 bytes per weight."""

GROUPS_OF = frozenset({"grpo", "gspo", "dapo", "rloo", "dr-grpo"})
"""Algorithms that compare several completions of one prompt."""

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "trl": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8},
    "swift": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_generations": 8},
}
"""Defaults of the commands `trl grpo` (1.16) and `swift rlhf --rlhf_type grpo` (4.6)."""

VLLM_SHARE = {"trl": 0.3, "swift": 0.9}
"""Default of ``vllm_gpu_memory_utilization`` in these commands."""


@check("command.batch", trainer="command")
def batch(facts: Facts) -> Iterator[Finding]:
    """A generation batch that is not made of whole groups of completions ends every rank after the model has loaded."""
    arguments = arguments_of(facts)
    if arguments.trainer.framework not in TRANSFORMERS or not _has_groups(facts, arguments):
        return
    group, size, shown = _whole(arguments, "num_generations"), *_generation_batch(facts, arguments)
    if group is None or size is None:
        return
    found = f"{shown} = {size} completions at once, --num_generations {group}"
    if group < 2:
        yield blocked(found, "at least 2 completions per prompt", "set --num_generations to 8, for instance")
    elif size % group:
        fitting = [number for number in range(2, size + 1) if size % number == 0]
        yield blocked(
            found,
            "whole groups: a multiple of num_generations (TRL 1.16, GRPOConfig; ms-swift 4.6, args_mixin.py)",
            f"set --num_generations to {' or '.join(map(str, fitting[:6])) or 'a divisor'}, or the batch to "
            f"{math.lcm(size, group)}",
        )
    else:
        yield passed(f"{found}: {size // group} prompts")


def _has_groups(facts: Facts, arguments: TrainerArguments) -> bool:
    named = arguments.text("rlhf_type") or " ".join(arguments.line.program[1:])
    return facts.spec.algorithm.lower() in GROUPS_OF or named in GROUPS_OF or arguments.is_given("num_generations")


def _whole(arguments: TrainerArguments, name: str) -> int | None:
    """Argument as an integer, or its default if the program's defaults are known."""
    given = arguments.integer(name)
    if given is not None or arguments.is_given(name):
        return given
    known = arguments.is_known_program and arguments.is_whole
    return DEFAULTS[arguments.line.launcher].get(name) if known else None


def _generation_batch(facts: Facts, arguments: TrainerArguments) -> tuple[int | None, str]:
    """Number of completions generated at once, and its calculation as text."""
    given = arguments.integer("generation_batch_size")
    if given is not None:
        return given, "--generation_batch_size"
    per_device = _whole(arguments, "per_device_train_batch_size")
    rounds = arguments.integer("steps_per_generation")
    rounds = rounds if rounds is not None else _whole(arguments, "gradient_accumulation_steps")
    if per_device is None or rounds is None:
        return None, ""
    ranks = facts.spec.num_ranks
    return per_device * ranks * rounds, f"{per_device} per rank x {ranks} ranks x {rounds} rounds"


@check("command.vllm", trainer="command")
def vllm(facts: Facts) -> Iterator[Finding]:
    """vLLM without enough memory, a fitting number of ranks or a server ends the run after the model has loaded."""
    arguments = arguments_of(facts)
    if not arguments.is_on("use_vllm"):
        return
    mode = arguments.text("vllm_mode") or ("colocate" if arguments.trainer.framework == "trl" else "")
    problems = [*_vllm_ranks(facts, arguments, mode), *_vllm_memory(facts, arguments, mode)]
    if mode == "server" and not arguments.is_given("vllm_server_host", "vllm_server_base_url"):
        # TRL's rank 0, the only one that asks it, then looks for a server on its own node.
        verdict, where = (warning, "node 0") if arguments.trainer.framework == "trl" else (blocked, "some node")
        problems.append(
            verdict(
                "--vllm_mode server without --vllm_server_host or --vllm_server_base_url",
                f"a server on {where}, which this run does not start",
                "add its address, or use --vllm_mode colocate",
            )
        )
    elif not mode and arguments.is_whole and arguments.line.launcher == "swift":
        problems.append(
            blocked("--use_vllm true without --vllm_mode", "server or colocate", "add --vllm_mode colocate")
        )
    yield from problems
    if not problems:
        yield passed(f"vLLM: {mode or 'unknown mode'}")


def _vllm_ranks(facts: Facts, arguments: TrainerArguments, mode: str) -> Iterator[Finding]:
    size, ranks = arguments.integer("vllm_tensor_parallel_size") or 1, facts.spec.num_ranks
    per_node = facts.spec.resources.ranks_per_node
    if not facts.spec.resources.gpus_per_node:
        yield warning("--use_vllm true and resources.gpus_per_node = 0", "GPUs for vLLM", "add --use_vllm false")
    if mode != "server" and ranks % size:
        yield blocked(
            f"--vllm_tensor_parallel_size {size} over {ranks} ranks",
            "a divisor of the number of ranks",
            f"set it to a divisor of {ranks}",
        )
    elif mode != "server" and per_node % size:
        yield warning(
            f"--vllm_tensor_parallel_size {size} with {per_node} ranks on a node: each layer is split across nodes",
            "a divisor of resources.ranks_per_node",
            f"set it to a divisor of {per_node}",
        )


def _vllm_memory(facts: Facts, arguments: TrainerArguments, mode: str) -> Iterator[Finding]:
    share = arguments.number("vllm_gpu_memory_utilization")
    if share is None and arguments.is_known_program and arguments.is_whole:
        share = VLLM_SHARE[arguments.line.launcher]
    if share is None:
        return
    if not 0 < share <= 1:
        yield blocked(f"--vllm_gpu_memory_utilization {share:g}", "a share between 0 and 1", "correct it")
    sleeps = arguments.is_on("vllm_enable_sleep_mode") or (arguments.integer("sleep_level") or 0) > 0
    if mode != "colocate" or sleeps:
        return
    room, needed = _gpu_bytes(facts), _least_training_bytes(facts, arguments)
    if room is not None and needed is not None and share * room + needed > room:
        yield blocked(
            f"vLLM takes {share:.0%} of a GPU of {room / GIB:.0f} GiB ({share * room / GIB:.1f} GiB), and weights, "
            f"gradients and optimizer need at least {needed / GIB:.1f} GiB",
            f"at most {room / GIB:.0f} GiB together",
            f"lower --vllm_gpu_memory_utilization below {max(1 - needed / room, 0):.2f}, or enable vLLM's sleep mode: "
            "--vllm_enable_sleep_mode true (TRL), --sleep_level 1 (ms-swift)",
        )
    elif share > 0.7:
        yield warning(
            f"--vllm_gpu_memory_utilization {share:g} during training, too",
            "room for weights, gradients, optimizer and activations",
            "lower it, or enable vLLM's sleep mode: --vllm_enable_sleep_mode true (TRL), --sleep_level 1 (ms-swift)",
        )


def _gpu_bytes(facts: Facts) -> int | None:
    kinds = gpu_kinds(facts)
    known = [size for kind in kinds if (size := gpu_memory_bytes(with_largest_size(kind))) is not None]
    if not known:
        return None
    return max(known) if facts.slurm.selects_nodes else min(known)


def _least_training_bytes(facts: Facts, arguments: TrainerArguments) -> int | None:
    """Lower bound of the training state on a GPU: weights, gradients and the optimizer's copies, in the format of the
    stored weights or a shorter one that is requested. None if adapters are trained or ranks share the state.
    """
    folder = facts.model_folder
    split = arguments.is_given("deepspeed", "fsdp") or arguments.line.launcher in ("deepspeed", "accelerate")
    if folder is None or not folder.weight_bytes or split or not trains_all_weights(arguments):
        return None
    weights = folder.weight_bytes
    if arguments.text("dtype", "torch_dtype") in _HALF:
        weights = min(weights, 2 * (stored_parameters(facts.model_config, weights) or 0))
    return (2 + copies_in_optimizer(arguments)) * weights


# ---------------------------------------------------------------------------------------------------------------------


@check("command.deepspeed", trainer="command")
def deepspeed(facts: Facts) -> Iterator[Finding]:
    """A DeepSpeed config that contradicts the arguments ends every rank, or trains with a different batch size."""
    arguments = arguments_of(facts)
    config = arguments.side.deepspeed
    if not config:
        return
    problems = [*_batches(facts, arguments, config), *_formats(arguments, config)]
    yield from problems
    if not problems:
        yield passed("DeepSpeed's config agrees with the arguments")


def _batches(facts: Facts, arguments: TrainerArguments, config: Mapping[str, Any]) -> Iterator[Finding]:
    names = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
    }
    used = {}
    for key, argument in names.items():
        ours, theirs = _whole(arguments, argument), config.get(key)
        if isinstance(theirs, int) and ours is not None and theirs != ours:
            yield blocked(
                f"DeepSpeed's {key} is {theirs}, --{argument} {ours}", "the same number", f'write "auto" for {key}'
            )
        used[key] = theirs if isinstance(theirs, int) else ours
    total, sizes = config.get("train_batch_size"), list(used.values())
    if isinstance(total, int) and None not in sizes:
        made = math.prod(size for size in sizes if size is not None) * facts.spec.num_ranks
        if made != total:
            yield blocked(
                f"DeepSpeed's train_batch_size is {total}, and {sizes[0]} per rank x {sizes[1]} rounds x "
                f"{facts.spec.num_ranks} ranks are {made}",
                "the same number",
                'write "auto" for train_batch_size',
            )


def _formats(arguments: TrainerArguments, config: Mapping[str, Any]) -> Iterator[Finding]:
    on = {name: _enabled(config, name) for name in ("bf16", "fp16")}
    if on["bf16"] is True and on["fp16"] is True:
        yield blocked("DeepSpeed's config turns on bf16 and fp16", "one of them", "turn fp16 off")
    for name, enabled in on.items():
        argument = arguments.is_on(name)
        if isinstance(enabled, bool) and argument is not None and enabled != argument:
            yield blocked(
                f"DeepSpeed's {name}.enabled is {str(enabled).lower()}, --{name} {str(argument).lower()}",
                "the same",
                f'write "auto" for {name}.enabled',
            )


def _enabled(config: Mapping[str, Any], name: str) -> Any:
    section = config.get(name)
    return section.get("enabled") if isinstance(section, Mapping) else None
