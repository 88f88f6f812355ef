"""Attention on a GPU with the same bits every time, next to the fastest: forward and backward pass in bfloat16.

    python tests/benchmarks/bench_deterministic.py

16 heads that share 2 key-value heads, 4 sequences of 4,096 tokens; five repetitions, compared bit by bit.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_core.training.distributed import make_deterministic

REPEATS = 5
SEQUENCES, TOKENS, HEADS, KEY_VALUE_HEADS = 4, 4096, 16, 2


def gradients(inputs: list[Tensor], given: Tensor) -> list[Tensor]:
    """Gradients of query, key and value."""
    output = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    return list(torch.autograd.grad(output, inputs, given))


def measured(size: int, deterministic: bool) -> tuple[float, int]:
    """Seconds of a pass, and the number of repetitions with the same bits as the first."""
    make_deterministic(torch.device("cuda"), on_gpus=deterministic)
    torch.manual_seed(0)
    inputs = [
        torch.randn(SEQUENCES, heads, TOKENS, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    ]
    given = torch.randn_like(inputs[0])
    first = gradients(inputs, given)
    pairs = [zip(first, gradients(inputs, given), strict=True) for _ in range(REPEATS)]
    num_equal = sum(all(torch.equal(one, other) for one, other in pair) for pair in pairs)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        gradients(inputs, given)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / REPEATS, num_equal


def main() -> None:
    """Print a line for each size of a head."""
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing to measure")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for size in (64, 128):
        (fast_s, fast_equal), (exact_s, exact_equal) = (measured(size, exact) for exact in (False, True))
        print(
            f"heads of {size}: {1e3 * fast_s:.2f} ms, same bits {fast_equal} of {REPEATS}; deterministic "
            f"{1e3 * exact_s:.2f} ms, same bits {exact_equal} of {REPEATS}; ratio {exact_s / fast_s:.2f}"
        )


if __name__ == "__main__":
    main()
