"""Write fixtures/: losses, gradients and advantages computed by TRL 1.16.0, with which ours are compared.

The tests do not run this script. To regenerate the files, use a separate environment (TRL pins other versions than
ours):

    python -m venv trl-environment && trl-environment/bin/pip install torch trl==1.16.0
    trl-environment/bin/python tests/training/conformance/make_conformance_fixtures.py [name ...]

Each trainer is constructed as a user would construct it, and builds its own batch from the rows: tokenizer, templates,
collator, advantages and loss are TRL's. Completions are given, and so are the log-probabilities of a sampler that
differs from the policy; vLLM itself is not started. TRL computes a few things in float32 whatever the model's type; a
copy of TRL is run in which these lines say float64 (:data:`FLOAT32`), and nothing else is changed.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

# These libraries read it when they are imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from conformance_cases import CASES, GROUP, MAX_NEW_TOKENS, TEMPERATURE, Case
from conformance_rows import COMPLETIONS, LABELLED, PAIRS, PROMPTS, REWARDS, sampled_flags
from datasets import Dataset
from safetensors.torch import save_file
from tiny_models import EOS, PAD, VOCABULARY, config, fill, flat_gradient
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import OPTForCausalLM, OPTForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

HERE = Path(__file__).parent
TRL_VERSION = "1.16.0"
FLOAT32 = {
    "kernels/chunked_logprob.py": (("torch.float32", "torch.float64"), (".float()", ".double()")),
    "experimental/orpo/orpo_trainer.py": (("_logps.float()", "_logps.double()"),),
}
"""Files of TRL, mapped to the replacements in them."""

METRICS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean")
"""Metrics that are also recorded, for trainers that sample."""

Recorded = tuple[dict[str, Any], Tensor]
"""Inputs and results of a case, and the gradient."""


def import_float64_trl(folder: Path) -> ModuleType:
    """Import a copy of TRL that computes in float64 throughout."""
    if importlib.metadata.version("trl") != TRL_VERSION:
        raise SystemExit(f"found trl {importlib.metadata.version('trl')}, expected {TRL_VERSION}")
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, folder / "trl")
    for name, replacements in FLOAT32.items():
        file = folder / "trl" / name
        text = file.read_text()
        for old, new in replacements:
            if old not in text:
                raise SystemExit(f"{name} of TRL has no {old} any more")
            text = text.replace(old, new)
        file.write_text(text)
    sys.path.insert(0, str(folder))
    import trl

    assert Path(trl.__file__).is_relative_to(folder)
    return trl


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    core = Tokenizer(models.WordLevel({token: number for number, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


class Recorder:
    """Runs the cases."""

    def __init__(self, trl: ModuleType, scratch: Path) -> None:
        self.trl = trl
        self.scratch = scratch
        causal_lm(config(), "reference").save_pretrained(scratch / "reference")

    def record(self, case: Case) -> Recorded:
        """Record the inputs, loss and gradient of one case."""
        ways: Mapping[str, Callable[[Case], Recorded]] = {
            "SFTTrainer": self.sft,
            "DPOTrainer": self.pairs,
            "CPOTrainer": self.separate_pairs,
            "ORPOTrainer": self.separate_pairs,
            "RewardTrainer": self.reward_model,
            "KTOTrainer": self.kto,
            "GRPOTrainer": self.grpo,
            "RLOOTrainer": self.rloo,
        }
        return ways[case.trainer](case)

    def trainer(self, case: Case, rows: list[dict[str, Any]], model: PreTrainedModel, **given: Any) -> Any:
        """TRL's trainer for a case, at the beginning of a step.

        Args:
            rows: the data, all in one batch.
            given: further arguments of the trainer.
        """
        home = self.trl
        if case.trainer in ("CPOTrainer", "ORPOTrainer"):
            home = importlib.import_module(f"trl.experimental.{case.trainer.removesuffix('Trainer').lower()}")
        samples = case.trainer in ("GRPOTrainer", "RLOOTrainer")
        options = {
            "output_dir": str(self.scratch / "output"),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "gradient_checkpointing": False,
            "per_device_train_batch_size": len(rows) * (GROUP if samples else 1),
            **case.options,
        }
        if samples:
            options |= {"num_generations": GROUP, "max_completion_length": MAX_NEW_TOKENS, "temperature": TEMPERATURE}
            options |= {"shuffle_dataset": False}
            given["reward_funcs"] = lambda completions, **_: [reward for group in REWARDS for reward in group]
        # TRL loads the reference model from the folder in the policy's ``_name_or_path``.
        model.config._name_or_path = str(self.scratch / "reference")
        made = getattr(home, case.trainer)(
            model=model,
            args=getattr(home, case.trainer.replace("Trainer", "Config"))(**options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            **given,
        )
        made.model.train()
        made.current_gradient_accumulation_steps = 1  # train() sets it
        return made

    def sft(self, case: Case) -> Recorded:
        """Prompts with one completion each."""
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
        trainer = self.trainer(case, rows, causal_lm(config(), "policy"))
        batch = first_batch(trainer)
        sequences = split(batch["input_ids"], batch["attention_mask"], batch["labels"] != -100)
        return result(trainer, batch, sequences)

    def pairs(self, case: Case) -> Recorded:
        """Pairs that are collated together, stacked in one batch."""
        trainer = self.trainer(case, PAIRS, causal_lm(config(), "policy"))
        batch = first_batch(trainer)
        return result(trainer, batch, split(batch["input_ids"], batch["attention_mask"], batch["completion_mask"]))

    def separate_pairs(self, case: Case) -> Recorded:
        """Pairs whose chosen and rejected completions are collated separately."""
        trainer = self.trainer(case, PAIRS, causal_lm(config(), "policy"))
        batch = first_batch(trainer)
        parts = [
            split(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"], batch[f"{side}_labels"] != -100)
            for side in ("chosen", "rejected")
        ]
        return result(trainer, batch, {name: parts[0][name] + parts[1][name] for name in parts[0]})

    def reward_model(self, case: Case) -> Recorded:
        """Pairs that are ranked by a model with one output; some have a margin."""
        rows = [row if case.margins else {k: v for k, v in row.items() if k != "margin"} for row in PAIRS]
        model = OPTForSequenceClassification(config(num_labels=1))
        fill(model, "policy")
        trainer = self.trainer(case, rows, model)
        batch = first_batch(trainer)
        margins = {"margins": batch["margin"].tolist()} if "margin" in batch else {}
        tokens = [
            ids[kept.bool()].tolist() for ids, kept in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        return result(trainer, batch, {"tokens": tokens, **margins})

    def kto(self, case: Case) -> Recorded:
        """Labelled completions, and the mismatched completions from which TRL estimates the divergence."""
        trainer = self.trainer(case, LABELLED, causal_lm(config(), "policy"))
        batch = first_batch(trainer)
        own = split(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        other = split(batch["KL_input_ids"], batch["KL_attention_mask"], batch["KL_completion_mask"])
        desirable = [bool(label) for label in batch["label"]]
        return result(
            trainer,
            batch,
            {**own, "desirable": desirable, **{f"mismatched_{name}": found for name, found in other.items()}},
        )

    def grpo(self, case: Case) -> Recorded:
        """Groups of given completions, with the log-probabilities of the sampler."""
        sampler = causal_lm(config(), "sampler")

        def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
            prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
            completion_ids = encoded_completions()
            masks = [[int(flag) for flag in sampled_flags(tokens)] for tokens in completion_ids]
            return {
                **({"env_mask": masks} if case.observed else {}),
                "prompt_ids": prompt_ids,
                "completion_ids": completion_ids,
                "logprobs": [sampled_logprobs(sampler, *both) for both in zip(prompt_ids, completion_ids, strict=True)],
            }

        begin = causal_lm(config(), "old" if case.several_updates else "policy")
        trainer = self.trainer(case, [{"prompt": prompt} for prompt in PROMPTS], begin, rollout_func=roll_out)
        trainer.use_vllm = case.sampler
        trainer._last_loaded_step = trainer.state.global_step  # there is no engine to send weights to
        batch = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        sampled = {"sampler_logprobs": real(batch["sampling_per_token_logps"], encoded_completions())}
        flags = {"sampled": list(map(sampled_flags, encoded_completions()))} if case.observed else {}
        return self._sampled_result(trainer, batch, flags | (sampled if trainer.use_vllm else {}))

    def rloo(self, case: Case) -> Recorded:
        """Groups of given completions."""
        begin = causal_lm(config(), "old" if case.several_updates else "policy")
        trainer = self.trainer(case, [{"prompt": prompt} for prompt in PROMPTS], begin)
        trainer._generate_single_turn = lambda *_: encoded_completions()
        batch = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        return self._sampled_result(trainer, batch, {})

    def _sampled_result(self, trainer: Any, batch: dict[str, Any], sampled: dict[str, Any]) -> Recorded:
        fill(trainer.model, "policy")  # the policy has moved, if the case samples from an earlier one
        prompts = [
            ids[kept.bool()].tolist() for ids, kept in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        given = {"prompts": prompts, "completions": encoded_completions(), "rewards": REWARDS, **sampled}
        given["loss_tokens"] = batch["completion_mask"].sum(-1).tolist()
        given["advantages"] = batch["advantages"].tolist()
        found, gradient = result(trainer, batch, given)
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if name in METRICS}
        return {**found, "metrics": metrics}, gradient


def causal_lm(of: Any, name: str) -> PreTrainedModel:
    """A language model with the weights of this name."""
    model = OPTForCausalLM(of)
    fill(model, name)
    return model


def encoded_completions() -> list[list[int]]:
    """The given completions; ``$`` is the end token."""
    numbers = {**{token: number for number, token in enumerate(VOCABULARY)}, "$": EOS}
    return [[numbers[character] for character in text] for group in COMPLETIONS for text in group]


@torch.no_grad()
def sampled_logprobs(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> list[float]:
    """Log-probabilities of a completion at the sampling temperature."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])
    return picked.squeeze(-1).tolist()


def first_batch(trainer: Any) -> dict[str, Any]:
    """First batch from the trainer's own loader."""
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def split(input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor) -> dict[str, list[list[int]]]:
    """Tokens of prompts and completions, without padding."""
    real_tokens, of_completion = attention_mask.bool(), completion_mask.bool()
    return {
        "prompts": [ids[a & ~c].tolist() for ids, a, c in zip(input_ids, real_tokens, of_completion, strict=True)],
        "completions": [ids[a & c].tolist() for ids, a, c in zip(input_ids, real_tokens, of_completion, strict=True)],
    }


def real(padded: Tensor, completions: list[list[int]]) -> list[list[float]]:
    """Values at the positions of real tokens."""
    return [values[: len(tokens)].tolist() for values, tokens in zip(padded, completions, strict=True)]


def result(trainer: Any, batch: dict[str, Any], given: dict[str, Any]) -> Recorded:
    """Loss and gradient that TRL computes for a batch."""
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    if loss.dtype != torch.float64:
        raise SystemExit(f"{type(trainer).__name__} gave a loss in {loss.dtype}")
    return {"given": given, "loss": loss.item()}, flat_gradient(trainer.model)


def main(names: list[str]) -> None:
    """Write the files of all cases, or of the named ones."""
    torch.set_default_dtype(torch.float64)
    assert PAD == 0
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(import_float64_trl(Path(folder)), Path(folder))
        recorded, gradients = {}, {}
        for case in CASES:
            if not names or case.name in names:
                recorded[case.name], gradients[case.name] = recorder.record(case)
                print(f"{case.name}: loss {recorded[case.name]['loss']:.6f}", flush=True)
    if names:
        return
    target = HERE / "fixtures"
    content = {"trl": TRL_VERSION, "cases": recorded}
    (target / "trl_1_16_0.json").write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    save_file(gradients, target / "trl_1_16_0_gradients.safetensors")
    (target / "trl_1_16_0_gradients.safetensors").chmod(0o644)
    print(f"wrote {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
