"""Peak main memory of vLLM on CPU in the process of a trainer rank, against the estimate of preflight.

One engine runs in a separate process that holds the trainer's model and libraries; the measured part is what vLLM adds:
its start, two syncs of weights, and completions of prompts of 512 tokens. Run it once per case.

Usage: bench_vllm_memory.py [--hidden 512] [--layers 16] [--vocabulary 8192] [--cache-gb 1] [--tied]
                            [--dtype float32] [--lora-rank 0]
"""

import argparse
import gc
import importlib
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "training"), str(Path(__file__).parent)]

from bench_memory import MIB, qwen3, resident_bytes  # noqa: E402 - of this folder
from rank_launcher import tiny_spec  # noqa: E402 - of the tests

SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 32, 512, 64


def main() -> None:
    """Print the measured and estimated bytes of one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 16), ("vocabulary", 8192), ("cache-gb", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tied", action="store_true", help="tie the output layer to the embedding")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lora-rank", type=int, default=0, help="syncs are of an adapter of this rank; 0: of weights")
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    for library in ("deepspeed", "peft"):
        importlib.import_module(library)
    from rlhf_core.preflight.memory import engines
    from rlhf_core.preflight.memory.shapes import shape_of
    from rlhf_core.schemas.model import LoraSpec
    from rlhf_core.schemas.rollouts import VllmSettings
    from rlhf_core.schemas.run import RunSpec
    from rlhf_core.training.data.tokenizers import build_tokenizer
    from rlhf_core.training.models.adapters import add_adapter
    from rlhf_core.training.models.causal_lm import build_causal_lm
    from rlhf_core.training.rollouts.base import Sampling
    from rlhf_core.training.rollouts.vllm.engine import VllmEngine

    more = {"vocab_size": options.vocabulary, "tie_word_embeddings": options.tied, "max_position_embeddings": 2048}
    config = qwen3(options.hidden, options.layers, **more)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    tokenizer = build_tokenizer("char", [], 0)
    model = build_causal_lm(config, tokenizer, 0).to(getattr(torch, options.dtype))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    scratch = tempfile.TemporaryDirectory()
    folder = Path(scratch.name)
    model.save_pretrained(folder)
    lora = LoraSpec(rank=options.lora_rank) if options.lora_rank else None
    if lora is not None:
        add_adapter(model, lora, 0)
    gc.collect()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset
    settings = VllmSettings(cpu_cache_gb=options.cache_gb)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    engine = VllmEngine(
        folder, tokenizer, settings, dtype=options.dtype, max_tokens=1024, on_gpu=False, variables=variables, lora=lora
    )
    for version in (1, 2):
        engine.load(model, version, lambda: None)
    prompts = [[5] * PROMPT_TOKENS] * SEQUENCES
    engine.sample(prompts, [[seed] for seed in range(SEQUENCES)], Sampling(NEW_TOKENS, 1.0, SEQUENCES), 2, lambda: None)
    measured = resident_bytes("VmHWM") - before
    spec = RunSpec.model_validate(tiny_spec())
    rollout = spec.rollout.model_copy(update={"engine": "vllm", "vllm": settings})
    changed = spec.model.model_copy(update={"dtype": options.dtype, "lora": lora})
    spec = spec.model_copy(update={"rollout": rollout, "model": changed})
    shape = shape_of(config, parameters, options.vocabulary)
    assert shape is not None
    parts = engines.vllm_resident(spec, shape) | engines.vllm_moment(spec, shape, 1, 1, None)
    estimate = sum(parts.values())
    print(
        f"peak {measured / MIB:6.0f} MiB, estimate {estimate / MIB:6.0f} MiB, {estimate / measured - 1:+.0%}",
        flush=True,
    )
    scratch.cleanup()
    os._exit(0)  # vLLM's own shutdown of the process group raises


if __name__ == "__main__":
    main()
