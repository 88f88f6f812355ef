"""TRL's side of ``bench_train.py``. It runs in the interpreter of a separate environment, because TRL's requirements
are not ours.

    python tests/benchmarks/train_trl.py FOLDER THREADS

Prints one JSON object: seconds of each step and of its parts, and memory.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

# These libraries read it when they are imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import train_load
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Records the seconds of each step and of its parts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.parts: dict[str, float] = defaultdict(float)
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._ended, self._processor = time.monotonic(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Close a step."""
        now, processor = time.monotonic(), time.process_time()
        self.steps.append({"step": now - self._ended, "processor": processor - self._processor, **self.parts})
        self.parts.clear()
        self._ended, self._processor = now, processor


def main(folder: Path, threads: int) -> None:
    """Train and print the measurements."""
    torch.set_num_threads(threads)
    load, clock = train_load.read(folder), Clock()
    given = dict(zip(load["texts"], load["completions"], strict=True))

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        # The samples of a prompt are consecutive.
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [given[prompt][place % load["samples"]] for place, prompt in enumerate(prompts)]
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[0.0] * len(made) for made in completions],
        }

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [train_load.reward(completion) for completion in completions]

    sequences = load["prompts"] * load["samples"]
    options: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "use_cpu": not load["on_gpu"],
        "bf16": load["on_gpu"],
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1_000_000,
        "max_steps": load["steps"],
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": load["micro_batch"],
        "gradient_accumulation_steps": sequences // load["micro_batch"],
        "num_generations": load["samples"],
        "max_completion_length": load["longest"],
        "gradient_checkpointing": load["gradient_checkpointing"],
        "beta": 0.0,
        "loss_type": "dapo",
    }
    if load["generate"]:
        options["generation_kwargs"] = {"min_new_tokens": load["longest"]}
    before = train_load.memory_mib()["now"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=GRPOConfig(**options),
        reward_funcs=train_load.timed("reward", clock.parts, rewards),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in load["texts"]]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[clock],
        **({} if load["generate"] else {"rollout_func": train_load.timed("rollout", clock.parts, roll_out)}),
    )
    if load["generate"]:
        trainer._generate_single_turn = train_load.timed("rollout", clock.parts, trainer._generate_single_turn)
    trainer._compute_loss = train_load.timed("forward", clock.parts, trainer._compute_loss)
    trainer.accelerator.backward = train_load.timed("backward", clock.parts, trainer.accelerator.backward)
    clock.begin()
    trainer.train()
    print(json.dumps({"steps": clock.steps, **train_load.peak_memory(before, load["on_gpu"])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
