"""Peak memory of a pass over a long row that 1, 2 and 4 ranks share (``trainer.sequence_parallel``): processes on CPU.

Each rank makes a pass over a short row, which allocates gradients, and then forward and backward over the long one: the
peak resident memory of the second, less that between the two, is the memory of activations and logits. The estimate is
that of preflight.

Usage: bench_sequence_parallel.py [--tokens 8192] [--hidden 256] [--layers 4] [--checkpointing]
"""

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "training"), str(Path(__file__).parent)]

import bench_sequence_parallel  # noqa: E402 - the ranks import it by its name
from bench_memory import MIB, qwen3, resident_bytes  # noqa: E402
from rank_launcher import launch, make_context, tiny_spec, values  # noqa: E402

SIZES = (1, 2, 4)


def measured(
    rank: int, num_ranks: int, folder: str, tokens: int, config: dict[str, Any], checkpointing: bool
) -> dict[str, float]:
    """Bytes of one rank and seconds of the pass; log-probabilities and gradients are compared by their sums."""
    from rlhf_core.preflight.memory.formulas import activation_bytes, logit_bytes
    from rlhf_core.preflight.memory.shapes import shape_of
    from rlhf_core.training.data.batches import collate
    from rlhf_core.training.data.tokenizers import build_tokenizer
    from rlhf_core.training.distributed import init_process_group
    from rlhf_core.training.models.causal_lm import PolicyModel, build_causal_lm
    from rlhf_core.training.models.lean_layers import use_gradient_checkpointing, use_lean_layers
    from rlhf_core.training.trainers.free_memory import return_free_memory

    ranks = init_process_group(make_context(folder, tiny_spec(), rank, num_ranks)).sharing_rows(num_ranks)
    causal_lm = build_causal_lm(config, build_tokenizer("char", [], 0), 0)
    use_lean_layers(causal_lm)
    if checkpointing:
        use_gradient_checkpointing(causal_lm)
    policy = PolicyModel(causal_lm, sequence=ranks.sequence).train()

    def one_pass(length: int) -> float:
        batch = collate([[1, 2, 3]], [[4 + at % 90 for at in range(length - 2)]], 0)
        logprobs, _ = policy(batch.input_ids, batch.target_mask)
        mean = logprobs.sum() / length
        mean.backward()
        return float(mean)

    one_pass(8)
    policy.zero_grad(set_to_none=False)
    gc.collect()
    return_free_memory()
    ranks.barrier()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset
    started_s = time.monotonic()
    mean = one_pass(tokens)
    seconds = time.monotonic() - started_s
    peak = resident_bytes("VmHWM") - before
    shape = shape_of(config, sum(parameter.numel() for parameter in policy.parameters()), 128)
    assert shape is not None
    own = -(-tokens // num_ranks)
    estimate = activation_bytes(shape, "float32", own, checkpointing) + logit_bytes(shape, own)
    gradients = [one.grad.double().sum() for one in policy.parameters() if one.grad is not None]
    (gradient,) = ranks.sum([float(sum(gradients))])
    return {"peak": peak, "estimate": estimate, "seconds": seconds, "mean": mean, "gradient": gradient}


def main() -> None:
    """Print one line per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the row")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    options = parser.parse_args()
    config = qwen3(options.hidden, options.layers, tie_word_embeddings=True, max_position_embeddings=options.tokens)
    for size in SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            case: dict[str, Any] = {"tokens": options.tokens, "config": config, "checkpointing": options.checkpointing}
            launched = launch(
                bench_sequence_parallel.measured, size, Path(scratch), 900, ("env",), folder=scratch, **case
            )
            found = values(launched)
        peak, estimate = max(one["peak"] for one in found), found[0]["estimate"]
        print(
            f"{size} ranks per row: peak {peak / MIB:6.0f} MiB per rank, estimate {estimate / MIB:6.0f} MiB, "
            f"{estimate / peak - 1:+.0%}; {found[0]['seconds']:.1f} s; mean log-probability {found[0]['mean']:.7f}, "
            f"sum of the gradient {found[0]['gradient']:.6g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
