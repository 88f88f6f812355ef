"""Text of the config generated from a launch line: TOML with comments."""

import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import tomli_w

from rlhf_core.launch.wrap.draft import Draft
from rlhf_core.text.redaction import masked

_SECTIONS = ("model", "checkpoint", "trainer", "resources", "slurm")
_TRAINER_ORDER = (
    "framework", "algorithm", "num_steps", "launch", "environment", "working_dir", "setup", "checkpoint_name",
    "checkpoint_complete", "resume", "resume_argv",
)  # fmt: skip
_WIDTH = 116


def config_text(draft: Draft, source: str) -> str:
    """Format the settings of a draft.

    Args:
        source: The line or the script, for the comment at the top.
    """
    lines = ["# Made by `rlhf wrap` from:", f"#   {_one_line(source)}"]
    if draft.unread:
        lines += ["#", "# COULD NOT BE READ:"]
        for part in draft.unread:
            lines += [f"#   {_one_line(part.what)}", f"#     -> {_one_line(part.advice)}"]
    lines += ["", *(_setting(name, draft.settings[name]) for name in ("name", "seed") if name in draft.settings)]
    for section in _SECTIONS:
        found = {
            name.partition(".")[2]: value for name, value in draft.settings.items() if name.startswith(f"{section}.")
        }
        if section == "trainer":
            lines += ["", "[trainer]", 'kind = "command"', *_trainer(draft, found)]
        elif found:
            lines += ["", f"[{section}]", *(_setting(name, value) for name, value in sorted(found.items()))]
    return "\n".join(lines) + "\n"


def _trainer(draft: Draft, found: dict[str, Any]) -> Iterator[str]:
    for name in sorted(found, key=lambda name: _TRAINER_ORDER.index(name)):
        yield _setting(name, found[name])
    if "num_steps" not in found:
        yield "# Optimizer steps could not be read: give their number here.\n# num_steps = "
    yield "# Words in braces are filled in for every attempt."
    yield "argv = ["
    yield from (f"  {', '.join(map(_value, words))}," for words in draft.groups())
    yield "]"
    if draft.variables:
        yield "\n[trainer.variables]"
        yield from (_setting(name, value) for name, value in draft.variables.items())


def _setting(name: str, value: Any) -> str:
    return f"{name} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").removesuffix("\n")


def _one_line(text: str) -> str:
    shown = " ".join("".join(one if one.isprintable() else "?" for one in text).split())
    return shown if len(shown) <= _WIDTH * 4 else f"{shown[: _WIDTH * 4]} ..."


def shown_line(words: Iterable[str]) -> str:
    """A launch line for a comment."""
    return masked(shlex.join(words))
