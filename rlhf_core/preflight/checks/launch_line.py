"""The launch line of a trainer that is another program."""

import difflib
from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.schemas.command_trainer import PLACEHOLDERS, CommandTrainer, named_placeholders
from rlhf_core.schemas.run import RunSpec


@check("trainer.placeholders")
def placeholders(facts: Facts) -> Iterator[Finding]:
    """An argument that stays empty, or a misspelt placeholder, ends another program after its start on every node."""
    trainer = facts.spec.trainer
    if not isinstance(trainer, CommandTrainer):
        return
    named = {
        name: f"trainer.{setting}" for setting, text in _texts(trainer) for name in reversed(named_placeholders(text))
    }
    empty = _empty_settings(facts.spec)
    lacking = {name: setting for name, setting in empty.items() if name in named}
    for name, setting in lacking.items():
        yield blocked(
            f"{named[name]} names {{{name}}}, and {setting} is not set",
            f"a value of {setting}",
            f"give --set {setting}=..., or take {{{name}}} out",
        )
    misspelt = {name: near for name in named if name not in PLACEHOLDERS and (near := _nearest(name))}
    for name, near in misspelt.items():
        yield warning(
            f"{named[name]} holds {{{name}}}, which is passed on as it is",
            "a placeholder of docs/trainers.md, or braces that the program understands",
            f"write {{{near}}} if that was meant",
        )
    if not lacking and not misspelt:
        yield passed(f"{len(named.keys() & PLACEHOLDERS.keys())} placeholders have values")


def _texts(trainer: CommandTrainer) -> Iterator[tuple[str, str]]:
    yield from (("argv", text) for text in trainer.argv)
    yield from (("resume_argv", text) for text in trainer.resume_argv)
    yield from ((f"variables.{name}", text) for name, text in trainer.variables.items())
    yield from (("working_dir", trainer.working_dir), ("output_dir", trainer.output_dir))


def _empty_settings(spec: RunSpec) -> dict[str, str]:
    """Placeholders whose setting is empty, with its name."""
    found = {
        "model": ("model.path", spec.model.path),
        "train": ("data.train", spec.data.train),
        "eval": ("data.eval", spec.data.eval),
    }
    return {name: setting for name, (setting, value) in found.items() if not value}


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.75)
    return near[0] if near else ""
