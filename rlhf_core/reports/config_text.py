"""A resolved spec as the TOML that would give it."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.config import to_toml
from rlhf_core.schemas.run import RunSpec


def as_toml(spec: RunSpec, *, only_set: bool = False) -> str:
    """The spec as TOML text, in the order of its fields.

    Args:
        only_set: leave out what has its default.
    """
    return "\n\n".join(_blocks("", spec.model_dump(mode="json", exclude_defaults=only_set))) + "\n"


def _blocks(name: str, content: Mapping[str, Any]) -> Iterator[str]:
    """The table called ``name``, and after it those inside of it."""
    lines = [f"{key} = {to_toml(value)}" for key, value in content.items() if not isinstance(value, dict)]
    if lines:
        yield "\n".join([f"[{name}]"] * bool(name) + lines)
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _blocks(f"{name}.{key}".lstrip("."), value)
