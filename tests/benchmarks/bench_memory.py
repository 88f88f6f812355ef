"""Peak memory of a trainer rank in each stage of ZeRO against the estimate of preflight: two ranks on CPU.

Each case runs in separate processes: a model of 50 million parameters, one update to settle, then the peak resident
memory of a second one with two micro-batches, less that of the libraries. The tokens are few, because the comparison is
about weights, gradients and optimizer, not activations.

Usage: bench_memory.py [--dtype float32|bfloat16] [--hidden 512] [--layers 16] [--lora-rank 0]
"""

import argparse
import gc
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "training"), str(Path(__file__).parent)]

import bench_memory  # noqa: E402 - the ranks import it by its name
from rank_launcher import launch, make_context, tiny_spec, values  # noqa: E402

CASES = ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "parameters"))
"""Stages of ZeRO, and the offloaded parts."""
MIB = 1 << 20


def qwen3(hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    """Config of a Qwen3 with this width and number of layers."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        **more,
    }


def resident_bytes(name: str) -> int:
    """Resident memory of this process: current (``VmRSS``) or peak (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measured(
    rank: int, num_ranks: int, folder: str, stage: int, offload: str, dtype: str, config: dict[str, Any], lora_rank: int
) -> dict[str, int]:
    """Bytes of one rank: the peak during an update, and the estimate."""
    import torch

    from rlhf_core.preflight.memory.formulas import (
        Zero,
        gradient_bytes,
        live_weight_bytes,
        main_memory_bytes,
        optimizer_bytes,
        own_weight_bytes,
        reduction_bytes,
        update_bytes,
    )
    from rlhf_core.preflight.memory.shapes import shape_of, trained_shape
    from rlhf_core.schemas.loops import OptimizerSpec
    from rlhf_core.schemas.model import LoraSpec
    from rlhf_core.schemas.trainers import NativeTrainer
    from rlhf_core.training.data.batches import collate
    from rlhf_core.training.data.tokenizers import build_tokenizer
    from rlhf_core.training.distributed import init_process_group
    from rlhf_core.training.models.adapters import add_adapter
    from rlhf_core.training.models.causal_lm import PolicyModel, build_causal_lm
    from rlhf_core.training.trainers import engine as engine_module

    importlib.import_module("peft")  # a library, counted as such
    ranks = init_process_group(make_context(folder, tiny_spec(), rank, num_ranks))
    engine_module._join_deepspeed(ranks)
    libraries = resident_bytes("VmRSS")
    causal_lm = build_causal_lm(config, build_tokenizer("char", [], 0), 0)
    policy = PolicyModel(causal_lm.to(getattr(torch, dtype)))  # type: ignore[arg-type]  # transformers hides the types
    shape = shape_of(config, sum(parameter.numel() for parameter in policy.parameters()), 128)
    assert shape is not None
    lora = LoraSpec(rank=lora_rank) if lora_rank else None
    if lora is not None:
        add_adapter(policy.causal_lm, lora, seed=0)
    trained = trained_shape(shape, lora)
    trainer = NativeTrainer.model_validate({"zero_stage": stage, "offload": offload})
    engine = engine_module.Engine(policy, OptimizerSpec(learning_rate=1e-4), dtype, ranks, trainer)  # type: ignore[arg-type]  # one of two

    def update() -> None:
        for _ in range(2):
            batch = collate([[1, 2, 3]], [[4, 5, 6, 7]], 0)
            logprobs, _ = engine(batch.input_ids, target_mask=batch.target_mask)
            engine.backward(-logprobs.sum())
        engine.step(1e-4)

    update()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset
    update()
    peak = resident_bytes("VmHWM") - libraries
    zero = Zero(stage, offload, num_ranks)
    estimate = own_weight_bytes(shape, dtype, zero) + gradient_bytes(trained, dtype, zero)
    estimate += own_weight_bytes(trained, dtype, zero) if lora is not None else 0
    estimate += optimizer_bytes(trained, zero) if offload == "none" else 0
    estimate += sum(main_memory_bytes(shape, dtype, zero, lora).values())
    estimate += reduction_bytes(trained, zero)
    estimate += max(live_weight_bytes(shape, dtype, zero, lora), update_bytes(trained, zero))
    return {"measured": peak, "estimate": estimate}


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--lora-rank", type=int, default=0, help="train an adapter of this rank; 0 trains all weights")
    options = parser.parse_args()
    config = qwen3(options.hidden, options.layers, tie_word_embeddings=True, max_position_embeddings=256)
    for stage, offload in CASES:
        if stage == 0 and options.dtype != "float32":
            continue
        with tempfile.TemporaryDirectory() as scratch:
            case: dict[str, Any] = {"stage": stage, "offload": offload, "dtype": options.dtype, "config": config}
            case["lora_rank"] = options.lora_rank
            launched = launch(bench_memory.measured, 2, Path(scratch), 600, ("env",), folder=scratch, **case)
            found = values(launched)[0]
        peak, estimate = found["measured"], found["estimate"]
        print(
            f"ZeRO {stage}, offload {offload:10}: peak {peak / MIB:6.0f} MiB, estimate {estimate / MIB:6.0f} MiB, "
            f"{estimate / peak - 1:+.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
