"""Training by GRPO next to TRL 1.16.0's GRPOTrainer: the same model, prompts, completions and threads, in one run.

    make bench-train                            all comparisons, TRL in an environment of its own
    make bench-train TRAIN="--small"            smoke test: small models and few steps, a minute or two
    make bench-train TRAIN="--only ragged --repeats 5"

    python tests/benchmarks/bench_train.py [--small | --gpu] [--only WORD] [--repeats 3] [--threads 2] [--trl PYTHON]

Each run is a separate process, ours and TRL's in turn, and ratios are taken pair by pair: they hold when the speed of
the machine drifts. With other work on the machine, the processor time of a step says more than the clock. Completions
are given to both, and the training phase is the step without rollout and reward; where both sample, whole steps are
compared. Peak memory is the process's own (VmHWM), less that of its imports. The floor is 6 P T floating-point
operations (P weights, T tokens without padding) at the rate at which this machine multiplies matrices of 1,024 by 1,024
in float32 with as many threads.

On a GPU (``--gpu``), both train in bfloat16 with float32 master weights. Peak memory is then what was allocated there,
and the rate is that of matrices of 8,192 by 8,192 in bfloat16.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import train_load
from tokenizers import Tokenizer, models, pre_tokenizers
from train_load import EOS, PAD, SPECIAL, Load
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).parent
QUICKSTART = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FIFTY_MILLION = {
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 11,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""A third of the weights is the embedding of 32,000 words, which is also the output layer."""

HALF_BILLION = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
"""The shape of Qwen2.5-0.5B."""

_QUICK = Load("quickstart model, equal lengths", QUICKSTART, 32, 16, 16, 64, False, 128)
_FIFTY = Load("50 M weights, equal lengths", FIFTY_MILLION, 2, 8, 32, 128, False, 8, steps=2)
_LONG = replace(_FIFTY, name="50 M weights, long", prompts=1, samples=2, longest=2048, micro_batch=2)
LOADS = (
    _QUICK,
    replace(_QUICK, name="quickstart model, ragged lengths", ragged=True, longest=256),
    replace(_QUICK, name="quickstart model, both sample", generate=True, longest=32),
    _FIFTY,
    replace(_FIFTY, name="50 M weights, ragged lengths", ragged=True, longest=512),
    replace(_FIFTY, name="50 M weights, both sample", generate=True, longest=64),
    _LONG,
    replace(_LONG, name="50 M weights, long, activations recomputed", gradient_checkpointing=True),
)

_SMALL = replace(_QUICK, prompts=8, samples=8, micro_batch=16, steps=3)
SMALL_LOADS = (
    replace(_SMALL, name="small, equal lengths"),
    replace(_SMALL, name="small, ragged lengths", ragged=True, longest=256),
    replace(_SMALL, name="small, both sample", generate=True, longest=16),
    replace(_SMALL, name="small, long", prompts=1, samples=4, longest=2048, micro_batch=2),
)

_HALF = Load("0.5 B weights, equal lengths", HALF_BILLION, 8, 8, 128, 512, False, 16, steps=6, on_gpu=True)
GPU_LOADS = (
    _HALF,
    replace(_HALF, name="0.5 B weights, ragged lengths", ragged=True, longest=2048),
    replace(_HALF, name="0.5 B weights, long", prompts=1, samples=4, longest=8192, micro_batch=2),
)

TARGETS = {"equal": ("tokens/s", 1.3), "ragged": ("tokens/s", 2.0), "long": ("peak memory", 0.7)}
"""Word in the name of a comparison, mapped to the figure with a target and the target ratio of ours to TRL's."""

PARTS = ("rollout", "reward", "forward", "backward")
"""Parts of a step that are timed. The rest is the optimizer, batches and metrics."""

Run = dict[str, Any]


def prepare(load: Load, folder: Path) -> int:
    """Write the work of a comparison; return the number of weights."""
    train_load.write(load, folder)
    vocabulary = load.model["vocab_size"]
    words = {word: number for number, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(2, vocabulary))])}
    core = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[PAD]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=SPECIAL[PAD], eos_token=SPECIAL[EOS])
    torch.manual_seed(0)
    config = AutoConfig.for_model(**load.model, pad_token_id=PAD, bos_token_id=EOS, eos_token_id=EOS)
    with torch.device("cuda" if load.on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return sum(weights.numel() for weights in model.parameters())


def run(python: str, program: str, folder: Path, threads: int) -> Run:
    """Run one process from start to end."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])] if program == "train_ours.py" else [str(HERE)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    if program == "train_trl.py":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del environment[name]  # without them, transformers starts no process group
    command = [python, str(HERE / program), str(folder), str(threads)]
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{program} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
    found: Run = json.loads(ended.stdout.splitlines()[-1])
    return found


def flops_per_s(threads: int, on_gpu: bool) -> float:
    """Floating-point operations per second of matrix products: the best of several, since nothing can be faster."""
    torch.set_num_threads(threads)
    size = 8192 if on_gpu else 1024
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    one, other = torch.randn(size, size, **kind), torch.randn(size, size, **kind)
    seconds = []
    for _ in range(20):
        train_load.finished(None)
        started = time.monotonic()
        train_load.finished(one @ other)
        seconds.append(time.monotonic() - started)
    return 2 * size**3 / min(seconds)


def counted(found: Run) -> list[dict[str, float]]:
    """Steps after the first."""
    steps: list[dict[str, float]] = found["steps"][1:]
    return steps


def step_s(found: Run) -> float:
    """Median seconds of a step."""
    return median(step["step"] for step in counted(found))


def training_s(found: Run) -> float:
    """Median seconds of a step without rollout and reward."""
    return median(step["step"] - step["rollout"] - step["reward"] for step in counted(found))


def memory_mib(found: Run) -> float:
    """Peak memory above that of the imports, in MiB."""
    return float(found["peak_mib"] - found["before_mib"])


def report(load: Load, weights: int, rate: float, pairs: Sequence[tuple[Run, Run | None]]) -> Iterator[str]:
    """Lines of a comparison: ours, TRL's and the ratio, pair by pair."""
    floor_s = 6 * weights * load.all_tokens / rate
    lengths = load.lengths()
    yield (
        f"\n== {load.name}: {weights / 1e6:.1f} M weights, {len(lengths)} completions of {min(lengths)} to "
        f"{max(lengths)} tokens (mean {load.tokens / len(lengths):.0f}), {load.micro_batch} at once"
    )
    figures: list[tuple[str, str, Callable[[Run], float]]] = [
        ("tokens/s", ".0f", lambda found: load.tokens / training_s(found)),
        ("training phase, s", ".3f", training_s),
        ("whole step, s", ".3f", step_s),
        ("processor time of it, s", ".3f", _part("processor")),
        ("peak memory", ".0f", memory_mib),
        ("peak memory with imports", ".0f", lambda found: float(found["peak_mib"])),
        ("training phase / floor", ".2f", lambda found: training_s(found) / floor_s),
    ]
    figures += [(f"{name}, s", ".3f", _part(name)) for name in PARTS]
    figures.append(("rest, s", ".3f", lambda found: step_s(found) - sum(_part(name)(found) for name in PARTS)))
    for name, form, figure in figures:
        own = median(figure(ours) for ours, _ in pairs)
        line = f"{name:<28} ours {own:>10{form}}"
        ratios = sorted(figure(ours) / figure(other) for ours, other in pairs if other and figure(other))
        if ratios:
            other_value = median(figure(other) for _, other in pairs if other)
            line += f"   TRL {other_value:>10{form}}   ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            line += _verdict(load, name, median(ratios))
        yield line


def _part(name: str) -> Callable[[Run], float]:
    return lambda found: median(step.get(name, 0.0) for step in counted(found))


def _verdict(load: Load, figure: str, ratio: float) -> str:
    for word, (name, target) in TARGETS.items():
        if word in load.name and name == figure:
            met = ratio <= target if target < 1 else ratio >= target
            return f"   target {target:g}: {'met' if met else 'missed'}"
    return ""


def main() -> int:
    """Run all comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="the comparisons on a GPU instead of those on CPU")
    parser.add_argument("--only", default="", help="comparisons whose name has this word")
    parser.add_argument("--repeats", type=int, default=0, help="pairs of runs; 3, or 1 where nothing is compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl", default="", help="interpreter of an environment with TRL; nothing is compared without")
    asked = parser.parse_args()
    repeats = asked.repeats or (3 if asked.trl else 1)
    disable_progress_bar()
    rate = flops_per_s(asked.threads, asked.gpu)
    device = torch.cuda.get_device_name() if asked.gpu else f"{asked.threads} threads"
    print(f"{device}, matrix products at {rate / 1e9:.0f} Gflop/s, {repeats} pairs")
    for load in GPU_LOADS if asked.gpu else SMALL_LOADS if asked.small else LOADS:
        if asked.only not in load.name:
            continue
        pairs = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as name:
                weights = prepare(load, Path(name))
                ours = run(sys.executable, "train_ours.py", Path(name), asked.threads)
                other = run(asked.trl, "train_trl.py", Path(name), asked.threads) if asked.trl else None
                pairs.append((ours, other))
        for line in report(load, weights, rate, pairs):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
