"""Resolved specs for people: as equivalent TOML, and setting by setting."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.config.fields import to_toml, to_toml_key
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.run import RunSpec


def as_toml(spec: RunSpec, *, only_set: bool = False) -> str:
    """Format the spec as TOML, in the order of its fields.

    Args:
        only_set: omit settings that have their default.
    """
    return "\n\n".join(_blocks("", settings(spec, only_set=only_set))) + "\n"


def settings(spec: RunSpec, *, only_set: bool = False) -> dict[str, Any]:
    """The settings of a spec as nested tables, from which the same spec is read.

    Args:
        only_set: omit settings that have their default.
    """
    content = spec.model_dump(mode="json", exclude_defaults=only_set)
    if isinstance(spec.trainer, CommandTrainer):  # a trainer without a kind would load as native
        content["trainer"] = {"kind": spec.trainer.kind, **content["trainer"]}
    return content


def flat(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name; lists are kept whole."""
    found: dict[str, Any] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def setting_text(value: Any) -> str:
    """A setting as text: strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _blocks(name: str, content: Mapping[str, Any]) -> Iterator[str]:
    """The table called ``name``, followed by its subtables."""
    values = [(key, value) for key, value in content.items() if value is not None and not isinstance(value, dict)]
    lines = [f"{to_toml_key(key)} = {to_toml(value)}" for key, value in values]
    if lines:
        yield "\n".join([f"[{name}]"] * bool(name) + lines)
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _blocks(f"{name}.{to_toml_key(key)}".lstrip("."), value)
