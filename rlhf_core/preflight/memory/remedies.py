"""Changes of settings that make a trainer rank fit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from rlhf_core.preflight.memory.engines import token_cache_bytes, vllm_cache_budget
from rlhf_core.preflight.memory.roles import trainer_estimate
from rlhf_core.preflight.memory.shapes import Shape
from rlhf_core.run_dir.initial_model import larger_shares
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.run import RunSpec


def remedies(
    spec: RunSpec, config: Mapping[str, Any], shape: Shape, room: int, gpu: int | None, *, pairs_have_answers: bool
) -> list[tuple[dict[str, JsonValue], int]]:
    """Changes of settings that make a trainer rank fit into ``room`` bytes, each with the new peak.

    Single changes if one suffices, otherwise combinations. Only the number format affects the training result.

    Args:
        config: configuration of the model.
        gpu: usable memory of the GPU in bytes; vLLM takes a share of it.
        pairs_have_answers: as in :func:`trainer_estimate`.
    """

    def first_that_fits(changes: Sequence[dict[str, JsonValue]]) -> tuple[dict[str, JsonValue], int] | None:
        for change in changes:
            changed = with_changes(spec, change)
            peak = trainer_estimate(changed, shape, gpu, pairs_have_answers=pairs_have_answers).peak_bytes
            if peak <= room:
                return change, peak
        return None

    trainer = spec.native_trainer
    setting = "micro_batch_tokens" if trainer.micro_batch_tokens else "micro_batch_size"
    micro: list[dict[str, JsonValue]] = [{f"trainer.{setting}": n} for n in _halves(getattr(trainer, setting))]
    batch: list[dict[str, JsonValue]] = [{"rollout.batch_size": n} for n in _halves(spec.rollout.batch_size)]
    again: dict[str, JsonValue] = {"trainer.gradient_checkpointing": True}
    short: dict[str, JsonValue] = {"model.dtype": "bfloat16"} if trainer.zero_stage else {}
    split = _stages(spec)
    offloaded = _offloads(spec)
    smallest = {**again, **(micro or [{}])[-1], **(batch or [{}])[-1], **(split or [{}])[-1]}
    both = [{**one, **other} for one, other in zip(micro, batch, strict=False)]
    singles = [micro, batch, _shares(spec, shape, gpu), [again], split, offloaded[:1], [short]]
    for ladders in (
        singles,
        [both, [{**again, **change} for change in both]],
        [[smallest]],
        [[{**smallest, **change} for change in offloaded]],
        [[{**smallest, "trainer.sequence_parallel": size} for size in larger_shares(spec, config)]],
    ):
        found = [fitting for ladder in ladders if (fitting := first_that_fits(ladder))]
        if found:
            return found
    return []


def _shares(spec: RunSpec, shape: Shape, gpu: int | None) -> list[dict[str, JsonValue]]:
    """Smaller shares of the GPU for vLLM that still hold its weights and one sequence of full length."""
    if spec.rollout.engine != "vllm" or spec.rollout.engines or gpu is None:
        return []
    length = spec.max_tokens
    needed = length * token_cache_bytes(shape, spec.model.dtype)
    tenths = range(int(spec.rollout.vllm.gpu_memory_share * 10), 0, -1)
    smaller = [tenth / 10 for tenth in tenths if tenth / 10 < spec.rollout.vllm.gpu_memory_share]
    changes: list[dict[str, JsonValue]] = [{"rollout.vllm.gpu_memory_share": share} for share in smaller]
    budgets = (vllm_cache_budget(with_changes(spec, change), shape, gpu) for change in changes)
    return [change for change, budget in zip(changes, budgets, strict=True) if (budget or 0) >= needed]


def _stages(spec: RunSpec) -> list[dict[str, JsonValue]]:
    """Higher stages of ZeRO, if there is another rank to split with."""
    later = range(spec.native_trainer.zero_stage + 1, 4) if spec.num_ranks > 1 else range(0)
    return [{"trainer.zero_stage": stage} for stage in later]


def _offloads(spec: RunSpec) -> list[dict[str, JsonValue]]:
    """Changes that move the optimizer, then the weights, to main memory; none without GPUs."""
    if not spec.resources.gpus_per_node or spec.native_trainer.zero_stage == 0:
        return []
    found: list[dict[str, JsonValue]] = []
    if spec.native_trainer.offload == "none":
        found.append({"trainer.offload": "optimizer"})
    if spec.native_trainer.offload != "parameters":
        found.append({"trainer.offload": "parameters", "trainer.zero_stage": 3})
    return found


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size
