"""Adapters in rollout engines: bytes per version, loss of precision by merging, and vLLM's operation on CPU.

Usage: bench_adapters.py [--rank 16]
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

QWEN = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True, 151936),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False, 152064),
}
"""Width, width of the feed-forward layer, layers, heads, key-value heads, tied, vocabulary (their config.json)."""
LEARNING_RATE, WIDTH, DEVIATION = 1e-4, 1024, 0.02


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    rank = parser.parse_args().rank
    for name, shape in QWEN.items():
        whole, adapter = (version_bytes(shape, one) for one in (0, rank))
        print(f"{name}, bfloat16: whole {whole / 1e6:.1f} MB, adapter {adapter / 1e6:.1f} MB, 1/{whole / adapter:.0f}")
    for steps in (1, 3, 10, 100):
        changed, kept, error = merged(steps, rank)
        print(f"merged after {steps} steps: {changed:.0%} of elements change, {kept:.0%} kept, error {error:.0%}")
    for tokens, width, kind in ((512, 512, "float32"), (512, 1024, "bfloat16")):
        theirs, ours, layer = operations(tokens, width, kind, rank)
        print(f"{tokens} tokens, width {width}, {kind}: vLLM {theirs:.1f} ms, product {ours:.1f}, layer {layer:.1f}")


def version_bytes(shape: Sequence[int], rank: int) -> int:
    """Bytes of one version of a model without content, as offered to engines.

    Args:
        shape: a value of ``QWEN``.
        rank: rank of an adapter beside every linear layer; 0 for whole weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlhf_core.schemas.model import LoraSpec
    from rlhf_core.training.models.adapters import add_adapter
    from rlhf_core.training.rollouts.engine_adapter import given_shapes
    from rlhf_core.weight_sync.layout import entries_of

    hidden, wide, layers, heads, kv_heads, tied, vocabulary = shape
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=bool(tied),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if rank:
            add_adapter(model, LoraSpec(rank=rank), 0)
    return sum(entry.num_bytes for entry in entries_of(given_shapes(model)))


def merged(steps: int, rank: int) -> tuple[float, float, float]:
    """Rounding of an adapter that is merged into a bfloat16 layer.

    The second matrix of the adapter has moved by a number of AdamW steps in one direction, each as long as the learning
    rate.

    Returns:
        Share of elements that change, share of the update that is kept (its projection), and the relative error of the
        layer's contribution for random inputs.
    """
    import torch

    torch.manual_seed(0)
    weight = (torch.randn(WIDTH, WIDTH) * DEVIATION).bfloat16().double()
    a = ((torch.rand(rank, WIDTH) * 2 - 1) / WIDTH**0.5).bfloat16().double()
    b = ((torch.randint(0, 2, (WIDTH, rank)) * 2 - 1) * LEARNING_RATE * steps).bfloat16().double()
    update = 2 * b @ a
    found = (weight + update).bfloat16().double() - weight
    x = torch.randn(64, WIDTH, dtype=torch.double)
    error = (x @ (found - update).T).norm() / (x @ update.T).norm()
    return float((found != 0).double().mean()), float((found * update).sum() / (update * update).sum()), float(error)


def operations(tokens: int, width: int, kind: str, rank: int) -> tuple[float, float, float]:
    """Milliseconds of processor time on one core: for vLLM's own operation, for ours, and for the layer itself."""
    import torch
    from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink

    from rlhf_core.training.rollouts.vllm.adapter import add_product

    torch.set_num_threads(1)
    dtype = getattr(torch, kind)
    x, weight = torch.randn(tokens, width).to(dtype), torch.randn(width, width).to(dtype)
    a, b = torch.randn(1, 1, rank, width).to(dtype), torch.randn(1, 1, width, rank).to(dtype)
    places = torch.zeros(tokens, dtype=torch.long)

    def theirs() -> Any:
        y, narrow = torch.zeros(tokens, width, dtype=dtype), torch.zeros(tokens, rank)
        bgmv_shrink(x, a, narrow, places, 1.0)
        bgmv_expand_slice(narrow, b, y, places, 0, width, add_inputs=True)
        return y

    def ours() -> Any:
        y = torch.zeros(tokens, width, dtype=dtype)
        add_product(x, y, [a], [b], 1.0, [width])
        return y

    torch.testing.assert_close(theirs(), ours(), rtol=1e-2, atol=1e-2)
    return timed(theirs), timed(ours), timed(lambda: x @ weight)


def timed(call: Callable[[], object], repeats: int = 5) -> float:
    """Milliseconds of processor time of a call, the minimum of several."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return 1e3 * min(found)


if __name__ == "__main__":
    main()
