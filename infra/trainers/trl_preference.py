"""CPO and ORPO of TRL 1.16 as a script: TRL ships the two trainers, but no command or script for them.

    torchrun ... trl_preference.py cpo --model_name_or_path MODEL --dataset_name json --dataset_data_files TRAIN ...

Arguments are those of ``CPOConfig`` or ``ORPOConfig``, which include all of ``transformers.TrainingArguments``, and of
TRL's ``ModelConfig``. Copy the file and change it where it does not fit.
"""

import sys
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

ALGORITHMS = {"cpo": (CPOConfig, CPOTrainer), "orpo": (ORPOConfig, ORPOTrainer)}


@dataclass
class DataArguments:
    """Preference data, with the columns ``prompt``, ``chosen`` and ``rejected``."""

    train_file: str = field(metadata={"help": "JSON lines file to train on."})
    eval_file: str | None = field(default=None, metadata={"help": "JSON lines file to evaluate on."})


def main() -> None:
    """Train, from a checkpoint if `--resume_from_checkpoint` names one, and save the model in the output folder."""
    if len(sys.argv) < 2 or sys.argv[1] not in ALGORITHMS:
        raise SystemExit(f"found {sys.argv[1:2]}, expected the algorithm as first argument: {' or '.join(ALGORITHMS)}")
    config, trainer_class = ALGORITHMS[sys.argv.pop(1)]
    data, arguments, model = TrlParser((DataArguments, config, ModelConfig)).parse_args_and_config()
    files = {"train": data.train_file} | ({"eval": data.eval_file} if data.eval_file else {})
    rows = load_dataset("json", data_files=files)
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(
            model.model_name_or_path,
            dtype=model.dtype if model.dtype in ("auto", None) else getattr(torch, model.dtype),
            attn_implementation=model.attn_implementation,
        ),
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows.get("eval"),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model(arguments.output_dir)


if __name__ == "__main__":
    main()
