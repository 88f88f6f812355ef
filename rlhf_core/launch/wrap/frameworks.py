"""Families of programs: recognised by launcher, module and options, with their ways to save and to resume."""

import re
from dataclasses import dataclass
from typing import Literal

from rlhf_core.launch.wrap.draft import Draft

FrameworkName = Literal["script", "transformers", "swift", "trl", "openrlhf"]
ALGORITHMS = (
    "grpo", "gspo", "dapo", "rloo", "ppo", "dpo", "ipo", "cpo", "simpo", "orpo", "kto", "gkd", "bco", "xpo", "nash_md",
    "online_dpo", "reinforce", "reward", "rm", "prm", "sft", "pt", "pretrain",
)  # fmt: skip
_TRANSFORMERS = frozenset(
    [
        "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "save_strategy",
        "save_total_limit", "logging_steps", "overwrite_output_dir", "do_train", "report_to",
    ]
)  # fmt: skip
"""Options of TrainingArguments; two of them make a program one of transformers."""
_ADVANTAGES = {"gae": "ppo", "group_norm": "grpo", "dr_grpo": "grpo", "rloo": "rloo", "reinforce_baseline": "reinforce"}


@dataclass(frozen=True)
class Family:
    """Program, as its options are read and written."""

    name: FrameworkName
    algorithm: str
    style: Literal["dashes", "words", "click", "hydra"] = "dashes"
    """Spelling of options that are added: ``--max_steps 9``, ``max_steps=9``, ``--max-steps 9``."""

    def spelled(self, option: str) -> str:
        """An option as this program takes it."""
        if self.style in ("words", "hydra"):
            return f"{option}="
        return f"--{option.replace('_', '-')}" if self.style == "click" else f"--{option}"

    def either(self, draft: Draft, old: str, new: str) -> str:
        """Option of OpenRLHF, which were called ``--save_path`` and the like before they were ``--ckpt.output_dir``."""
        is_new = any(name.startswith(("ckpt.", "train.", "data.")) for name in draft.line.arguments)
        return f"--{new if is_new else old}"

    @property
    def has_trainer(self) -> bool:
        """True if transformers.Trainer runs the loop, so that its options are known."""
        return self.name in ("transformers", "swift", "trl")


def recognise(draft: Draft, framework: FrameworkName | None) -> Family:
    """Family of the program of a line.

    Args:
        framework: said by the user; None to find it out.
    """
    found = _recognised(draft)
    if framework is not None and framework != found.name:
        draft.set("trainer.framework", framework, "framework", f"{framework} (--framework)")
        found = Family(framework, found.algorithm)
    else:
        draft.set("trainer.framework", found.name, "framework")
    if found.algorithm:
        draft.set("trainer.algorithm", found.algorithm, "algorithm")
    else:
        draft.missing("algorithm", 'set trainer.algorithm, for instance "grpo": runs are compared by it')
    return found


def _recognised(draft: Draft) -> Family:
    line = draft.line
    program = " ".join(line.program)
    words = line.program[-1] if line.program else ""
    command = re.split(r"[./]", words.removesuffix(".py"))[-1]
    if line.program[:1] == ("megatron",):
        draft.missing("megatron: its checkpoints have another form", "set trainer.checkpoint_name and trainer.resume")
        return Family("script", line.value("rlhf_type") or command)
    if line.launcher == "swift" or re.search(r"\bswift[./]cli[./]", program):
        return Family("swift", line.value("rlhf_type") or ("dpo" if command == "rlhf" else command))
    if line.launcher == "trl" or re.search(r"\btrl[./](scripts|cli|examples/scripts)[./]", program):
        return Family("trl", command)
    if "openrlhf" in program:
        advantage = line.value("advantage_estimator", "algo.advantage.estimator")
        by_name = command.removeprefix("train_").removesuffix("_ray")
        estimated = _ADVANTAGES.get(advantage or "gae", advantage or "") if by_name == "ppo" else by_name
        return Family("openrlhf", "ipo" if "ipo" in line.arguments and by_name == "dpo" else estimated)
    if line.launcher == "llamafactory" or re.search(r"\bllamafactory[./]", program):
        stage = line.value("stage") or draft.in_files("stage") or ""
        loss = line.value("pref_loss") or draft.in_files("pref_loss") or ""
        has_file = any(word in line.config_files for word in line.positional)
        algorithm = loss if stage == "dpo" and loss in ALGORITHMS else stage
        return Family("transformers", algorithm, "words" if has_file else "dashes")
    if line.launcher == "axolotl" or re.search(r"\baxolotl[./]cli[./]", program):
        return Family("transformers", line.value("rl") or draft.in_files("rl") or "sft", "click")
    if line.launcher == "torchtune" or re.search(r"\btorchtune\b|\bverl[./]", program):
        return Family("script", _algorithm(draft), "hydra")
    hints = _TRANSFORMERS & {*line.arguments}
    if len(hints) >= 2:
        draft.said("transformers.Trainer", ", ".join(sorted(hints)[:3]), "its logs, checkpoints and way to resume")
    return Family("transformers" if len(hints) >= 2 else "script", _algorithm(draft))


def _algorithm(draft: Draft) -> str:
    """The algorithm that an option or the name of the program says; empty if none does."""
    said = draft.line.value("algorithm.adv_estimator", "algorithm", "rlhf_type", "loss_type") or ""
    for text in (said, *reversed(draft.line.program)):
        words = re.split(r"[^a-z0-9]+", text.lower())
        for name in ALGORITHMS:
            if name in words:
                return {"pretrain": "pt", "reward": "rm"}.get(name, name)
    return ""
