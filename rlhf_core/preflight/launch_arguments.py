"""Arguments of an external trainer, as far as its launch line and config files can be read."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.preflight.facts import Facts, TrainerSide
from rlhf_core.schemas.command_trainer import CommandTrainer, fill
from rlhf_core.schemas.launch_values import filled_argv, values_of_spec
from rlhf_core.shell.launch_line import LaunchLine, read_launch_line

_TRUE = frozenset({"", "true", "1", "yes", "y", "on", "t"})
_FALSE = frozenset({"false", "0", "no", "n", "off", "f", "none"})
TRANSFORMERS = frozenset({"transformers", "swift", "trl"})
"""Frameworks whose arguments are those of ``transformers.TrainingArguments``."""
_WHOLE_MOMENTS = frozenset({"adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf"})
"""Values of ``--optim`` with two moments in the format of the weights; others quantize, factorize or omit them."""


@dataclass(frozen=True)
class TrainerArguments:
    """Launch line of a run and the arguments of its program, by name with ``_`` for ``-``."""

    trainer: CommandTrainer
    line: LaunchLine
    side: TrainerSide
    variables: Mapping[str, str]
    """Environment variables that the config or the line sets, filled."""

    @property
    def is_whole(self) -> bool:
        """True if every config file was read, so that an argument that is not found is not set."""
        return not self.side.unread

    @property
    def is_known_program(self) -> bool:
        """True for a command of ms-swift or TRL, whose defaults are known."""
        return self.line.launcher in ("swift", "trl")

    @property
    def launcher_options(self) -> dict[str, str]:
        """Settings of the launcher; those of the launch line win over its config file."""
        return {**self.side.launcher_settings, **self.line.launcher_options}

    def text(self, *names: str) -> str | None:
        """Value of the first of these arguments that is set; None if none is, or it has no value."""
        given = self.line.value(*names)
        return given if given is not None else next((found for name in names if (found := self._setting(name))), None)

    def integer(self, *names: str) -> int | None:
        """Value of an argument as an integer; None if it is not set or not an integer."""
        try:
            return int(self.text(*names) or "")
        except ValueError:
            return None

    def number(self, *names: str) -> float | None:
        """Value of an argument as a number; None if it is not set or not a number."""
        try:
            return float(self.text(*names) or "")
        except ValueError:
            return None

    def is_given(self, *names: str) -> bool:
        """Return True if one of these arguments is set, with or without a value."""
        return any(name in self.line.arguments or self._setting(name) is not None for name in names)

    def is_on(self, name: str, default: bool | None = None) -> bool | None:
        """Value of a switch; the default if it is not set or not a Boolean."""
        if not self.is_given(name):
            return default
        value = (self.text(name) or "").lower()
        return True if value in _TRUE else False if value in _FALSE else default

    def _setting(self, name: str) -> str | None:
        return self.side.settings.get(name)


def arguments_of(facts: Facts) -> TrainerArguments:
    """Arguments of a run's program, with those placeholders filled that are the same on all nodes.

    Raises:
        ValueError: the trainer is native.
    """
    trainer, values = facts.spec.command_trainer, values_of_spec(facts.spec)
    line = read_launch_line(filled_argv(facts.spec, {}))
    variables = {name: fill(value, values) for name, value in {**trainer.variables, **line.variables}.items()}
    return TrainerArguments(trainer, line, facts.trainer or TrainerSide(), variables)


def trains_all_weights(arguments: TrainerArguments) -> bool:
    """Return True if the arguments select no adapter. The default of ms-swift is LoRA."""
    default = "lora" if arguments.line.launcher == "swift" else "full"
    tuner = arguments.text("tuner_type", "train_type", "sft_type", "finetuning_type") or default
    return tuner == "full" and not arguments.is_on("use_peft") and not arguments.is_given("lora_rank", "load_in_4bit")


def copies_in_optimizer(arguments: TrainerArguments) -> int:
    """Copies of the weights that the optimizer holds, at least."""
    return 2 if (arguments.text("optim") or "adamw_torch") in _WHOLE_MOMENTS else 0
