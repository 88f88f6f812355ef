"""CPO with TRL 0.16, whose trainer gathers logits of different lengths over the ranks (huggingface/trl#3068).

cpo_of_trl_016.py MODEL TRAIN OUTPUT STEPS [--resume_from_checkpoint FOLDER]
"""

import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import CPOConfig, CPOTrainer

model, train, output, steps = sys.argv[1:5]
trainer = CPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model),
    args=CPOConfig(
        output_dir=output,
        max_steps=int(steps),
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=4,
        use_cpu=True,
        report_to="none",
        max_length=64,
        max_prompt_length=32,
    ),
    train_dataset=load_dataset("json", data_files=train, split="train"),
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train(resume_from_checkpoint=sys.argv[6] if len(sys.argv) > 6 else None)
