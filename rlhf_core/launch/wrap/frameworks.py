"""Program families, recognised by launcher, module and options, and their ways of saving and resuming."""

import re
from dataclasses import dataclass
from typing import Literal

from rlhf_core.launch.wrap.draft import Draft

FrameworkName = Literal["script", "transformers", "swift", "trl", "openrlhf"]
ALGORITHMS = (
    "grpo", "gspo", "dapo", "rloo", "ppo", "dpo", "ipo", "cpo", "simpo", "orpo", "kto", "gkd", "bco", "xpo", "nash_md",
    "online_dpo", "reinforce", "reward", "rm", "prm", "sft", "pt", "pretrain",
)  # fmt: skip
_TRANSFORMERS = frozenset((
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "save_strategy", "save_total_limit", "logging_steps", "overwrite_output_dir", "do_train", "report_to",
    "resume_from_checkpoint", "lr_scheduler_type", "warmup_ratio", "eval_strategy", "evaluation_strategy",
))  # fmt: skip
"""Options of TrainingArguments that few others have: two of them identify a transformers program."""
_COMMON = frozenset(("max_steps", "output_dir", "save_steps", "learning_rate", "model_name_or_path", "bf16", "fp16"))
"""Options of TrainingArguments that other programs share: two of them count next to one of the above."""
_OWN_LOOPS = frozenset(("max_train_steps", "checkpointing_steps"))
"""Options of programs with a training loop of their own (accelerate's examples, diffusers): they refuse those of
TrainingArguments that they lack."""
_ADVANTAGES = {"gae": "ppo", "group_norm": "grpo", "dr_grpo": "grpo", "rloo": "rloo", "reinforce_baseline": "reinforce"}


@dataclass(frozen=True)
class OptionNames:
    """Names of a program's options for the values that the run decides."""

    steps: str
    output: str
    save_every: str


OF_TRAINER = OptionNames("max_steps", "output_dir", "save_steps")
OF_VERL = OptionNames("trainer.total_training_steps", "trainer.default_local_dir", "trainer.save_freq")


@dataclass(frozen=True)
class Family:
    """A program family, and the syntax of its options."""

    name: FrameworkName
    algorithm: str
    style: Literal["dashes", "words", "click", "hydra"] = "dashes"
    """Spelling of added options: ``--max_steps 9``, ``max_steps=9``, ``--max-steps 9``."""
    options: OptionNames | None = None
    """Options that the program is known to have, and that are added where the line lacks them."""

    def spelled(self, option: str) -> str:
        """An option in this family's spelling."""
        if self.style in ("words", "hydra"):
            return f"{option}="
        return f"--{option.replace('_', '-')}" if self.style == "click" else f"--{option}"

    def either(self, draft: Draft, old: str, new: str) -> str:
        """The OpenRLHF option in the version of the line: older ones have ``--save_path``, newer ones
        ``--ckpt.output_dir``."""
        is_new = any(name.startswith(("ckpt.", "train.", "data.")) for name in draft.line.arguments)
        return f"--{new if is_new else old}"

    @property
    def has_trainer(self) -> bool:
        """True if transformers.Trainer runs the loop."""
        return self.name in ("transformers", "swift", "trl")

    @property
    def known(self) -> OptionNames | None:
        """Options that are added where the line lacks them; None if the program's are unknown, or are OpenRLHF's."""
        return OF_TRAINER if self.has_trainer else self.options


def recognise(draft: Draft, framework: FrameworkName | None) -> Family:
    """Recognise the family of a line's program.

    Args:
        framework: given by the user; None to detect it.
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
        draft.missing("algorithm", 'set trainer.algorithm, for instance "grpo": it is used to compare runs')
    return found


def _recognised(draft: Draft) -> Family:
    line = draft.line
    program = " ".join(line.program)
    words = line.program[-1] if line.program else ""
    command = re.split(r"[./]", words.removesuffix(".py"))[-1]
    if line.program[:1] == ("megatron",):
        draft.missing("megatron: different checkpoint format", "set trainer.checkpoint_name and trainer.resume")
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
    file = next((word for word in line.positional if word in line.config_files), None)
    in_factory = file is not None and {"stage", "finetuning_type"} <= draft.names_in(file)
    if line.launcher == "llamafactory" or re.search(r"\bllamafactory[./]", program) or in_factory:
        stage = line.value("stage") or draft.in_files("stage") or ""
        loss = line.value("pref_loss") or draft.in_files("pref_loss") or ""
        algorithm = loss if stage == "dpo" and loss in ALGORITHMS else stage
        return Family("transformers", algorithm, "words" if file is not None else "dashes")
    if line.launcher == "axolotl" or re.search(r"\baxolotl[./]cli[./]", program):
        return Family("transformers", line.value("rl") or draft.in_files("rl") or "sft", "click")
    # Programs built on verl (its recipes, forks) have a module of another name and its options.
    if re.search(r"\bverl[./](trainer|experimental)[./]", program) or "actor_rollout_ref.model.path" in line.arguments:
        draft.report("program of verl", program, "its options, its output, and its way to resume")
        return Family("script", _algorithm(draft), "hydra", OF_VERL)
    if line.launcher == "torchtune" or re.search(r"\btorchtune\b|\bverl[./]", program):
        return Family("script", _algorithm(draft), "hydra")
    # TRL's programs read their options from `--config FILE` as well.
    config = line.value("config")
    names = {*line.arguments} | (draft.names_in(config) if config in line.config_files else set())
    hints, common = _TRANSFORMERS & names, _COMMON & names
    is_one = not _OWN_LOOPS & names and (len(hints) >= 2 or (len(hints) == 1 and len(common) >= 2))
    if is_one:
        draft.report("transformers.Trainer", ", ".join(sorted(hints)[:3]), "its logs and checkpoints")
    return Family("transformers" if is_one else "script", _algorithm(draft))


def _algorithm(draft: Draft) -> str:
    """The algorithm named by an option or by the program; empty if neither names one."""
    option = draft.line.value("algorithm.adv_estimator", "algorithm", "rlhf_type", "loss_type") or ""
    for text in (option, *reversed(draft.line.program)):
        words = re.split(r"[^a-z0-9]+", text.lower())
        for name in ALGORITHMS:
            if name in words:
                return {"pretrain": "pt", "reward": "rm"}.get(name, name)
    return ""
