"""Start of the rollout engine of a run."""

import functools
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_core.schemas.attempts import Role
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import RolloutEngine
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.rollouts.weight_ledger import RecordedEngine
from rlhf_core.training.types import WorkerContext
from rlhf_core.training.worker_events import write_event


def start_engine(
    context: WorkerContext, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> RolloutEngine:
    """Start the engine of ``rollout.engine`` without weights, or connect to the engines of the group. Collective.

    Args:
        folder: Hugging Face folder with the configuration of the sampling model; in the trainer the initial model,
            because a base model is read from it.
    """
    spec = context.spec
    is_trainer = context.role is Role.TRAINER
    if spec.rollout.engines if is_trainer else spec.evaluates_with_engines:
        return _recorded(RemoteEngines(context, ranks), context, ranks, spec.rollout.engines)
    if not (spec.rollout.engine == "vllm" if is_trainer else spec.starts_vllm_in_evaluators):
        return TransformersEngine(tokenizer)
    # Only this engine needs vLLM.
    from rlhf_core.training.rollouts.vllm.engine import VllmEngine

    ranks.log("starting a vLLM engine on every rank")
    engine = VllmEngine(
        folder,
        tokenizer,
        spec.rollout.vllm,
        dtype=spec.model.dtype,
        max_tokens=spec.max_tokens,
        on_gpu=ranks.device.type == "cuda",
        variables={
            "RANK": str(context.rank),
            "LOCAL_RANK": str(context.local_rank),
            "WORLD_SIZE": str(context.num_ranks),
        },
        lora=spec.model.lora if is_trainer else None,  # an evaluator samples with the merged model
    )
    return _recorded(engine, context, ranks, ranks.num_ranks)


def _recorded(engine: RolloutEngine, context: WorkerContext, ranks: Ranks, num_engines: int) -> RolloutEngine:
    path, on_loss = context.restart_dir.weight_syncs, functools.partial(write_event, context, "file")
    return RecordedEngine(engine, ranks, path, num_engines, on_loss)
