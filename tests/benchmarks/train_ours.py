"""Our side of ``bench_train.py``: a whole run of GRPO on one rank.

    python tests/benchmarks/train_ours.py FOLDER THREADS

Prints one JSON object, as ``train_trl.py`` does.
"""

import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

import train_load
from rank_launcher import make_context

from rlhf_core.files.appended import read_models
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.training.distributed import init_process_group
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.rollouts import transformers_engine
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.trainers.engine import Engine, load_deepspeed
from rlhf_core.training.trainers.run import train_run
from rlhf_core.training.types import Completion


def settings(load: dict[str, Any], folder: Path, threads: int) -> dict[str, Any]:
    """Settings of a run with the work of the load and nothing else."""
    rows = str(folder / "rows.jsonl")
    return {
        "name": "bench",
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if load["on_gpu"] else "float32"},
        "data": {"train": rows, "eval": rows, "max_prompt_tokens": load["prompt_tokens"]},
        "loops": {
            "main": {
                "num_steps": load["steps"] + load["on_gpu"],
                "algorithm": {
                    "name": "grpo",
                    "prompts_per_step": load["prompts"],
                    "samples_per_prompt": load["samples"],
                    "loss_aggregation": "token_mean",
                },
                "optimizer": {"learning_rate": 1e-6},
            }
        },
        "trainer": {
            "micro_batch_size": load["micro_batch"],
            "gradient_checkpointing": load["gradient_checkpointing"],
            # There is one rank, so nothing to split; TRL splits nothing either. Stage 0 has no float32 master weights.
            "zero_stage": 1 if load["on_gpu"] else 0,
            "log_samples_every": 0,
        },
        "rollout": {"max_new_tokens": load["longest"], "batch_size": load["prompts"] * load["samples"]},
        "reward": {"functions": ["train_ours:rewards"]},
        "evaluate": {"num_prompts": 0},
        "health": {"off": {"identical": "the completions of a benchmark are given, and the same at every step"}},
        "checkpoint": {"every_num_steps": load["steps"]},
        "resources": {"ranks_per_node": 1, "cpus_per_rank": threads, "gpus_per_node": int(load["on_gpu"])},
    }


class Measured(Exception):
    """Ends a run on a GPU in the step after the last one that counts: to save gigabytes takes longer than to train."""


def rewards(*, completions: list[str], **_: Any) -> list[float]:
    """Rewards of the load."""
    return [train_load.reward(completion) for completion in completions]


def roll_out(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    beat: Callable[[], None],
    *,
    given: dict[str, list[list[int]]],
) -> list[list[Completion]]:
    """Return the given completions instead of sampling; called as ``transformers_engine.generate`` is."""
    found = [given[train_load.text(list(prompt))] for prompt in prompts]
    return [[_completion(tokenizer, tokens) for tokens in group] for group in found]


def _completion(tokenizer: Any, tokens: list[int]) -> Completion:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Completion(token_ids=tokens, text=text, finished=True, logprobs=[0.0] * len(tokens))


def main(folder: Path, threads: int) -> None:
    """Train and print the measurements."""
    load = train_load.read(folder)
    given = dict(zip(load["texts"], load["completions"], strict=True))
    if load["generate"]:
        transformers_engine.end_token_ids = lambda *_: frozenset()
    else:
        transformers_engine.generate = partial(roll_out, given=given)
    parts: dict[str, float] = defaultdict(float)
    Engine.__call__ = train_load.timed("forward", parts, Engine.__call__)
    Engine.backward = train_load.timed("backward", parts, Engine.backward)
    stamps: list[tuple[float, float, dict[str, float]]] = []
    most = load["steps"] if load["on_gpu"] else None
    StepMetrics.reduced = stamped(stamps, parts, StepMetrics.reduced, most)
    context = make_context(str(folder / "run"), settings(load, folder, threads), 0, 1)
    ranks = init_process_group(context)
    load_deepspeed(on_cpu=not load["on_gpu"])
    before = train_load.memory_mib()["now"]
    with contextlib.suppress(Measured):
        train_run(context, ranks)
    lines = read_models(context.restart_dir.metrics, MetricsLine)
    if not load["generate"]:
        num_given = sum(len(tokens) for group in load["completions"] for tokens in group)
        assert {line.metrics["train/num_tokens"] for line in lines} == {num_given}, "other completions than those given"
    steps = [
        {
            "step": later[0] - earlier[0],
            "processor": later[1] - earlier[1],
            "rollout": line.metrics["time/rollout_s"],
            "reward": line.metrics["time/reward_s"],
            **later[2],
        }
        for (earlier, later), line in zip(pairwise(stamps), lines[1:], strict=True)
    ]
    first = {"step": lines[0].metrics["time/step_s"]}
    print(json.dumps({"steps": [first, *steps], **train_load.peak_memory(before, load["on_gpu"])}))


def stamped(
    stamps: list[tuple[float, float, dict[str, float]]],
    parts: dict[str, float],
    function: Callable[..., Any],
    most: int | None,
) -> Callable[..., Any]:
    """Record the wall time, the processor time and the parts so far after each of the first calls of a function."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if len(stamps) == most:
            raise Measured
        answer = function(*args, **kwargs)
        stamps.append((time.monotonic(), time.process_time(), dict(parts)))
        parts.clear()
        return answer

    return wrapped


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
