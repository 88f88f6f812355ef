"""Meaning, type and default of every setting, for help, documentation and forms."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlhf_core.schemas.base import Schema, field_docs
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.site import ExportSite, NotifySite, PrefectSite, RetentionSite

SITE_TABLES: Mapping[str, type[Schema]] = {
    "prefect": PrefectSite,
    "notify": NotifySite,
    "retention": RetentionSite,
    "export": ExportSite,
    "slurm": SlurmSpec,
}
"""Tables of ``rlhf.toml``, each a field of ``site.Site``."""


@dataclass(frozen=True)
class FieldHelp:
    """One setting, for help texts, docs and forms."""

    name: str
    """Dotted name, as used by ``--set``."""
    type: str
    """Description of the allowed values."""
    default: str
    """Default as TOML; empty if the setting is required."""
    meaning: str
    """One sentence."""
    required: bool
    """True if there is no default."""
    only_for: tuple[str, ...] = ()
    """Names (of algorithms, for instance) that have the setting; empty if all in its section have it."""


def describe_fields() -> list[FieldHelp]:
    """Every setting of a run, in the order of the schema."""
    return list(_describe(RunSpec, ""))


def describe_site_tables() -> dict[str, tuple[str, list[FieldHelp]]]:
    """Every table of ``rlhf.toml``: its topic and its settings. Without ``[slurm]``, which has the settings of the
    section ``slurm`` of a run."""
    return {
        name: ((schema.__doc__ or "").partition(": ")[2].strip(), list(_describe(schema, "")))
        for name, schema in SITE_TABLES.items()
        if schema is not SlurmSpec
    }


def describe_sections() -> dict[str, str]:
    """Every section with settings, and its topic, in the order of the schema."""
    found = {}
    for name, setting, schemas in _sections(RunSpec):
        if len(schemas) > 1:
            found[name] = f"Settings that depend on `{setting.discriminator}`."
        elif any(not _schemas(field.annotation) for field in schemas[0].model_fields.values()):
            found[name] = _topic(schemas[0])
    return found


def describe_named_tables() -> dict[str, tuple[str, list[FieldHelp]]]:
    """Every table with entries named by the user, such as ``reward.models.<name>``: its topic and settings."""
    found = {}
    sections: list[tuple[str, type[BaseModel]]] = [("", RunSpec)]
    sections += [(f"{name}.", schemas[0]) for name, _, schemas in _sections(RunSpec)]
    for section, schema in sections:
        for name, setting in schema.model_fields.items():
            parts = get_args(setting.annotation) if get_origin(setting.annotation) is dict else ()
            for entry in _schemas(parts[1]) if parts else ():
                found[f"{section}{name}.<name>"] = _topic(entry), list(_describe(entry, ""))
    return found


MAIN_LOOP = "loops.main"
"""Section that a run of the native trainer must have."""


def optional_sections() -> set[str]:
    """Sections that a config may omit, where omission differs from giving the defaults."""
    return {name for name, setting, _ in _sections(RunSpec) if setting.default is None and name != MAIN_LOOP}


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that TOML strings only contain escaped."""


def to_toml(value: Any) -> str:
    """A setting's value as TOML. Tables are written inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        escaped = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", escaped)
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_toml_key(key)} = {to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    return repr(value)


def to_toml_key(name: str) -> str:
    """A key as TOML: bare if allowed, otherwise in quotes."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml(name)


def _sections(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, list[type[BaseModel]]]]:
    """Every field that holds a section, at any depth: its dotted name, the field, and the schemas that it may hold."""
    for name, setting in schema.model_fields.items():
        if schemas := _schemas(setting.annotation):
            yield f"{prefix}{name}", setting, schemas
            yield from _sections(schemas[0], f"{prefix}{name}.")


def _topic(schema: type[BaseModel]) -> str:
    return " ".join((schema.__doc__ or "").partition("\n\n")[0].split())


def _describe(schema: type[BaseModel], prefix: str) -> Iterator[FieldHelp]:
    for name, setting in schema.model_fields.items():
        sections = _schemas(setting.annotation)
        if isinstance(setting.discriminator, str):
            default = getattr(setting.default, setting.discriminator, "")
            yield from _describe_union(sections, setting.discriminator, f"{prefix}{name}.", default)
        elif sections:
            yield from _describe(sections[0], f"{prefix}{name}.")
        else:
            required = setting.default is PydanticUndefined
            yield FieldHelp(
                name=f"{prefix}{name}",
                type=_type_name(setting.annotation),
                default="" if required else to_toml(setting.default),
                meaning=field_docs(schema).get(name, ""),
                required=required,
            )


def _describe_union(members: Sequence[type[BaseModel]], tag: str, prefix: str, default: str) -> Iterator[FieldHelp]:
    """A section with settings that depend on one of them: that one first, then the settings of each member.

    Args:
        default: The tag of an omitted section; empty if it is required.
    """
    tags = [get_args(member.model_fields[tag].annotation)[0] for member in members]
    texts = [field_docs(member).get(tag, "") for member in members]
    yield FieldHelp(
        name=f"{prefix}{tag}",
        type=" | ".join(map(to_toml, tags)),
        default=to_toml(default) if default else "",
        meaning=" ".join(_with_tag(name, text) for name, text in zip(tags, texts, strict=True)),
        required=not default,
    )
    found: dict[str, dict[str, FieldHelp]] = {}
    for member, of_member in zip(members, tags, strict=True):
        for setting in _describe(member, prefix):
            found.setdefault(setting.name, {})[of_member] = setting
    del found[f"{prefix}{tag}"]
    for by_owner in found.values():
        setting = next(iter(by_owner.values()))
        others = [f"`{owner}`: {one.default}" for owner, one in by_owner.items() if one.default != setting.default]
        meaning = f"{setting.meaning} Other defaults: {', '.join(others)}." if others else setting.meaning
        without = [f"`{name}`" for name in tags if name not in by_owner]
        if not without:
            yield dataclasses.replace(setting, meaning=meaning)
            continue
        owners = ", ".join(f"`{owner}`" for owner in by_owner)
        of = f"Not for {', '.join(without)}." if len(without) < len(by_owner) else f"Only for {owners}."
        yield dataclasses.replace(setting, meaning=f"{meaning} {of}", only_for=tuple(by_owner))


def _with_tag(tag: str, meaning: str) -> str:
    return meaning if meaning.startswith(f"`{tag}`") else f"`{tag}`: {meaning}"


def _schemas(annotation: Any) -> list[type[BaseModel]]:
    """The schemas that a field may hold: one for a section, several for a union of sections, none for a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " | ".join(to_toml(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " | ".join(_type_name(part) for part in get_args(annotation) if get_args(part) != ("",))
    if origin is tuple:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        return "table"
    if hasattr(annotation, "__metadata__"):
        return _type_name(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return " | ".join(to_toml(member.value) for member in annotation)
    return {int: "integer", float: "number", str: "text", bool: "true | false"}.get(annotation, str(annotation))


def field_meanings() -> dict[str, str]:
    return {field.name: field.meaning for field in describe_fields()}
