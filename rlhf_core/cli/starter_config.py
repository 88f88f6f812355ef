"""Starter config of ``rlhf init``: a preset's values, and all other settings as comments with their defaults."""

import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.config.fields import (
    FieldHelp,
    describe_fields,
    describe_sections,
    optional_sections,
    to_toml,
    to_toml_key,
)
from rlhf_core.presets import preset_path

HEAD = """\
# Config of an RLHF run, written by `rlhf init`. Commented lines show defaults; the others are set.
#
#   rlhf check {name}     runs every check that needs no node
#   rlhf run {name}       runs it: preflight, allocate, train, evaluate
#
# Any setting can also be given on the command line: --set section.field=value
# A relative path starts at the folder in which rlhf is called, not at that of this file.
"""


def starter_config(preset: str, file_name: str) -> str:
    """Render a commented config with the values of a preset. It is equivalent to the preset.

    Args:
        preset: Name of the preset.
        file_name: The config's file, as a shell takes it.

    Raises:
        BadConfig: there is no preset of that name.
    """
    values = tomllib.loads(preset_path(preset).read_text(encoding="utf-8"))
    sections: dict[str, list[FieldHelp]] = {}
    for field in describe_fields():
        section, _, _ = field.name.rpartition(".")
        if field.only_for and _choice(values, section) not in field.only_for:
            continue  # rejected with the chosen algorithm or trainer
        if section.startswith("loops.") and _choice(values, "trainer") == "command":
            continue
        sections.setdefault(section, []).append(field)
    meanings = describe_sections()
    parts = [HEAD.format(name=file_name), "\n".join(_fields(sections.pop(""), values))]
    omitted = {name for name in optional_sections() if not _section(values, name)}
    for section, fields in sections.items():
        prefix = "# " if any(f"{section}.".startswith(f"{name}.") for name in omitted) else ""
        parts.append(f"\n# {meanings[section]}\n{prefix}[{section}]")
        parts.append("\n".join(_fields(fields, _section(values, section))))
    return "\n".join(parts) + "\n"


def _choice(values: Mapping[str, Any], section: str) -> str:
    """Name of the algorithm, or kind of the trainer, that a section configures."""
    found = _section(values, section)
    return str(found.get("kind", "native") if section == "trainer" else found.get("name", ""))


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the table of a dotted name; empty if there is none."""
    for part in name.split("."):
        values = values.get(part, {})
    return values


def _fields(fields: list[FieldHelp], values: Mapping[str, Any]) -> Iterator[str]:
    """Render the lines of one section. Nested tables come last, because the lines after a header belong to it."""
    names = {field.name.rpartition(".")[2]: field for field in fields}
    tables = [name for name in names if isinstance(values.get(name), Mapping)]
    for name, field in names.items():
        if name not in tables:
            yield from _meaning(field)
            yield _setting(name, field, values)
    for name in tables:
        field = names[name]
        yield ""
        yield from _meaning(field)
        yield f"[{field.name}]"
        yield from (f"{to_toml_key(key)} = {to_toml(value)}" for key, value in values[name].items())


def _meaning(field: FieldHelp) -> Iterator[str]:
    return (f"# {line}" for line in textwrap.wrap(f"{field.meaning} ({field.type})", 116))


def _setting(name: str, field: FieldHelp, values: Mapping[str, Any]) -> str:
    if name in values:
        return f"{name} = {to_toml(values[name])}"
    return f"# {name} = {field.default}"
