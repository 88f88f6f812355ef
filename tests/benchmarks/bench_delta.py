"""Bytes of a sparse delta after steps of GRPO with AdamW, for a bf16 model whose optimizer keeps fp32 weights.

    python tests/benchmarks/bench_delta.py [--rates 1e-6 1e-5] [--steps 4] [--hidden 128]

A Qwen2 with random weights samples groups of completions, which are rewarded for even tokens; the loss is strictly
on-policy GRPO with this project's advantages. After each step the bf16 weights go through the encoder of
``rlhf_core/weight_sync/delta.py`` and into an engine's row of bytes, whose digest must equal the trainer's.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_core.schemas.weight_sync import Manifest, SentVersion
from rlhf_core.training.algorithms.grpo import group_advantages
from rlhf_core.weight_sync.delta import DeltaEncoder, apply_delta, row_digest
from rlhf_core.weight_sync.layout import WHOLE, bucket_bytes_for, entries_of, packed

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 8, 8


def new_model(hidden: int) -> Qwen2ForCausalLM:
    """A model with random weights, tied like those of the small Qwen2 models."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8_000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def grpo_step(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step on fresh completions."""
    prompts = torch.randint(0, 8_000, (PROMPTS, PROMPT_TOKENS)).repeat_interleave(GROUP, 0)
    with torch.no_grad():
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
    completions = tokens[:, PROMPT_TOKENS:]
    rewards = (completions % 2 == 0).float().mean(1)
    advantages = group_advantages(rewards.view(PROMPTS, GROUP)).flatten()
    logits = model(tokens).logits[:, PROMPT_TOKENS - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, completions[:, :, None]).squeeze(-1)
    loss = -(advantages[:, None] * (logprobs - logprobs.detach()).exp()).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def weights_of(model: Qwen2ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """Weights in the form in which engines load them."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().to(torch.bfloat16)


def measure(rate: float, steps: int, hidden: int) -> None:
    """Print one line per step."""
    model = new_model(hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    entries = entries_of({name: (tensor.dtype, tensor.shape) for name, tensor in weights_of(model)})
    whole = Manifest(version=0, tensors=entries, bucket_bytes=bucket_bytes_for(entries))
    encoder = DeltaEncoder(full_every=50)
    _, weights = encoder.encode(whole, weights_of(model), ["engine"], lambda: None)
    buckets = packed(whole, weights, WHOLE, lambda _: torch.empty(whole.bucket_bytes, dtype=torch.uint8))
    row = torch.cat([bucket for _, bucket in buckets])
    digest = row_digest(whole, row, lambda: None)
    for version in range(1, steps + 1):
        encoder.settle(
            SentVersion(version=version - 1, digest=digest, bytes_sent=0, is_delta=False, wire_s=0), ["engine"]
        )
        grpo_step(model, optimizer)
        begin = time.perf_counter()
        manifest = whole.model_copy(update={"version": version})
        delta, parts = encoder.encode(manifest, weights_of(model), ["engine"], lambda: None)
        encoded = time.perf_counter()
        apply_delta(delta, dict(parts), whole, row)
        applied = time.perf_counter()
        digest = row_digest(whole, row, lambda: None)
        assert delta.is_delta, "the whole weights were sent"
        assert digest == delta.result_digest, "the engine has other weights than the trainer"
        share = delta.total_bytes / whole.total_bytes
        times = f"{1e3 * (encoded - begin):.0f} | {1e3 * (applied - encoded):.0f}"
        print(f"| {rate:g} | {version} | {whole.total_bytes / 1e6:.1f} | {share:.2%} | {times} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| learning rate | step | whole, MB | delta / whole | encode, ms | apply, ms |\n|---|---|---|---|---|---|")
    for rate in chosen.rates:
        measure(rate, chosen.steps, chosen.hidden)


if __name__ == "__main__":
    main()
