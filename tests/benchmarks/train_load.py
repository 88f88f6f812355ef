"""Work that ``bench_train.py`` gives to both trainers, as a folder of files. Imports no trainer.

``load.json`` has the settings and the given completions, ``rows.jsonl`` the prompts, ``model/`` a model with random
weights and its tokenizer: one token per word, ``w17`` for number 17.
"""

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SPECIAL = ("<pad>", "<eos>")
PAD, EOS = 0, 1


@dataclass(frozen=True)
class Load:
    """Settings of one comparison."""

    name: str
    model: Mapping[str, Any]
    """Arguments of the transformers configuration."""
    prompts: int
    """Prompts of every step."""
    samples: int
    """Completions per prompt."""
    prompt_tokens: int
    longest: int
    """Tokens of the longest completion."""
    ragged: bool
    """Lengths have a heavy tail, like those of reasoning; otherwise all have the maximum."""
    micro_batch: int
    """Sequences of a forward and backward pass."""
    steps: int = 4
    """Number of steps; the first is not counted."""
    generate: bool = False
    """Completions are sampled by the trainer's own generator, all to the maximum length; otherwise they are given."""
    gradient_checkpointing: bool = False
    on_gpu: bool = False
    """On the first GPU, in bfloat16 with float32 master weights; otherwise on CPU in float32."""

    def lengths(self) -> list[int]:
        """Number of tokens of every completion of a step."""
        number = self.prompts * self.samples
        if not self.ragged:
            return [self.longest] * number
        draw = random.Random(0)
        found = [
            min(self.longest, max(1, round(draw.lognormvariate(0, 1.0) * self.longest / 12))) for _ in range(number)
        ]
        found[number // 2] = self.longest
        return found

    @property
    def tokens(self) -> int:
        """Number of completion tokens of a step."""
        return sum(self.lengths())

    @property
    def all_tokens(self) -> int:
        """Number of tokens of a step including prompts, without padding."""
        return self.tokens + self.prompts * self.samples * self.prompt_tokens


def write(load: Load, folder: Path) -> None:
    """Write all files except the model."""
    draw, vocabulary = random.Random(1), load.model["vocab_size"]
    prompts = [_words(draw, load.prompt_tokens, vocabulary) for _ in range(load.prompts)]
    lengths = iter(load.lengths())
    completions = [[[*_words(draw, next(lengths) - 1, vocabulary), EOS] for _ in range(load.samples)] for _ in prompts]
    rows = [{"prompt": text(prompt), "answer": "w2"} for prompt in prompts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {**asdict(load), "texts": [row["prompt"] for row in rows], "completions": completions}
    (folder / "load.json").write_text(json.dumps(content))


def read(folder: Path) -> dict[str, Any]:
    """Read settings and completions: the fields of :class:`Load`, ``texts`` and, for each text, ``completions``."""
    content: dict[str, Any] = json.loads((folder / "load.json").read_text())
    return content


def text(tokens: list[int]) -> str:
    """Words of these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def reward(words: str) -> float:
    """Reward of a completion: cheap, and different within a group."""
    return sum(map(ord, words[:64])) % 17 / 16


def memory_mib() -> dict[str, float]:
    """Resident memory of this process in MiB: current and peak."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(fields[key].split()[0]) / 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def peak_memory(before_mib: float, on_gpu: bool) -> dict[str, float]:
    """Peak memory in MiB, of this process or of what it allocated on the GPU, and what the imports took of it."""
    if on_gpu:
        return {"before_mib": 0.0, "peak_mib": torch.cuda.max_memory_allocated() / 2**20}
    return {"before_mib": before_mib, "peak_mib": memory_mib()["peak"]}


def finished(result: Any) -> Any:
    """Wait until the GPU has done what was asked of it, so that the time of a part is its own."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return result


def timed(name: str, parts: dict[str, float], function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the duration of a function to the part with this name."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        try:
            return finished(function(*args, **kwargs))
        finally:
            parts[name] += time.monotonic() - started

    return wrapped


def _words(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(len(SPECIAL), vocabulary) for _ in range(count)]
