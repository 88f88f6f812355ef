"""GRPO, CPO and ORPO of TRL 1.16 from data files. Copy it, and change it if it does not fit.

    torchrun ... trl_train.py cpo --model_name_or_path MODEL --train_file TRAIN --output_dir FOLDER ...

TRL's own script for GRPO takes a data set from the hub or a folder; for CPO and ORPO, which are in `trl.experimental`,
TRL has none. The arguments are those of the algorithm's config, including all of `transformers.TrainingArguments`, and
of TRL's `ModelConfig`.
"""

import importlib
import os
import sys
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

ALGORITHMS = {"grpo": (GRPOConfig, GRPOTrainer), "cpo": (CPOConfig, CPOTrainer), "orpo": (ORPOConfig, ORPOTrainer)}


@dataclass
class Data:
    """Files of rows: `prompt`, and `chosen` and `rejected` or what the reward functions need."""

    train_file: str = field(metadata={"help": "JSON lines to train on."})
    eval_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on."})
    reward_functions: list[str] = field(
        default_factory=lambda: ["accuracy_reward"],
        metadata={"help": "For grpo: names in trl.rewards, or module.function of code of your own."},
    )


def reward_function(name: str):
    """The function with a name in `trl.rewards`, or at a dotted path."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module or "trl.rewards"), function)


def main() -> None:
    """Train, from the checkpoint of `--resume_from_checkpoint` if there is one, and save the model at the end."""
    if len(sys.argv) < 2 or sys.argv[1] not in ALGORITHMS:
        raise SystemExit(f"found {sys.argv[1:2]}, expected the algorithm as first argument: {', '.join(ALGORITHMS)}")
    name = sys.argv.pop(1)
    config_class, trainer_class = ALGORITHMS[name]
    parser = TrlParser((Data, config_class, ModelConfig))
    # Without GPUs, TRL's bf16 fails, and without use_cpu accelerate silently trains every rank on its own.
    parser.set_defaults(bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available())
    data, arguments, model = parser.parse_args_and_config()
    files = {"train": data.train_file} | ({"eval": data.eval_file} if data.eval_file else {})
    rows = load_dataset("json", data_files=files)
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(
            model.model_name_or_path,
            dtype=model.dtype if model.dtype in ("auto", None) else getattr(torch, model.dtype),
            attn_implementation=model.attn_implementation,
        ),
        **({"reward_funcs": [reward_function(one) for one in data.reward_functions]} if name == "grpo" else {}),
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows.get("eval"),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model(arguments.output_dir)
    trainer.accelerator.end_training()
    # Everything is saved. Shutting the trainer down can block forever with gloo: torch joins its threads while it holds
    # the interpreter's lock, which they need (pytorch #56297, seen in 3 of 17 runs with torch 2.13).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
