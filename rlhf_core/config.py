"""TOML and overrides -> :class:`RunSpec`; environment and ``rlhf.toml`` -> :class:`Site`.

Hand-written configs are sparse TOML; what ran is the resolved JSON in the run directory. A wrong key is answered with
the nearest right one, and all mistakes of a file are reported at once.
"""

import contextlib
import dataclasses
import difflib
import os
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from rlhf_core import private_files
from rlhf_core.errors import BadConfig
from rlhf_core.files import UnfitFile, read_document
from rlhf_core.formatting import count
from rlhf_core.presets import PRESETS, preset_path
from rlhf_core.schemas.algorithms import LoopsSpec, specs
from rlhf_core.schemas.base import Schema, storable_text
from rlhf_core.schemas.migration import OldSettings, current_document, current_name, old_settings
from rlhf_core.schemas.run import RunSpec, SlurmSpec
from rlhf_core.schemas.site import NotifySite, PrefectSite, RetentionSite
from rlhf_core.schemas.trainers import trainer_kinds

_NAME = r"[a-z0-9][a-z0-9_-]{0,62}"

MAX_CONFIG_BYTES = 128 << 10
"""Largest TOML file that is read: a config with every setting has about 30 KiB, and parsing a megabyte takes a second.
"""
_MAX_DEPTH = 20
_MAX_VALUES = 20_000
_MAX_INTEGER = 10**100
_MAX_PROBLEMS = 20
"""Problems that are told at once, each with the nearest right name; of more only the number is."""
_SHOWN_CHARACTERS = 200

_TOML_TEXT = re.compile(r'''"""(?:\\.|[^\\])*?"""|\'{3}.*?\'{3}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|\#[^\n]*''', re.DOTALL)
"""Strings and comments."""
_TOML_MARKS = re.compile(r"[=,{}\[\]]")


# ---------------------------------------------------------------------------------------------------------------------
# The config of a run


def load(config: str | Path, overrides: Sequence[str] = (), given_as: str = "--set") -> RunSpec:
    """Read a config file, apply ``section.field=value`` overrides, and validate.

    Args:
        config: path of a TOML file, or the name of a shipped preset.
        overrides: each ``dotted.name=value``; the value is TOML, and a bare word is taken as a string.
        given_as: where the overrides come from; a message says so.

    Raises:
        BadConfig: with the problems found, the first 20 of very many, each with the key, what was found, and what to
            write instead.
    """
    path = find(config)
    try:
        content = read_toml(path)
    except OSError as error:
        raise BadConfig(f"cannot read {path}: {error.strerror}") from None
    found = old_settings(content)
    if found:
        if "loops" in content:
            raise BadConfig(f"{path} holds settings of rlhf-flows 0.1 beside [loops]:\n{_translations(found)}")
        _warn(f"{path}", found, f"`rlhf config migrate {path}` rewrites the file")
        content = current_document(content)
    for override in overrides:
        _apply(content, override, given_as)
    _warn_of_overrides(overrides, given_as)
    return validate(content, str(path), overrides, given_as)


def _warn(where: str, names: Sequence[str], remedy: str) -> None:
    warnings.warn(
        f"{where}: settings of rlhf-flows 0.1, which the next version will refuse; {remedy}:\n{_translations(names)}",
        OldSettings,
        stacklevel=4,
    )


def _translations(names: Sequence[str]) -> str:
    shown = [f"  write {current_name(name)} instead of {name}" for name in names[:_MAX_PROBLEMS]]
    more = len(names) - len(shown)
    return "\n".join([*shown, *([f"  and {more} more"] if more else [])])


def _warn_of_overrides(overrides: Sequence[str], given_as: str) -> None:
    names = [override.partition("=")[0].strip() for override in overrides]
    old = [name for name in names if current_name(name) != name and current_name(name) in _meanings()]
    if old:
        _warn(given_as, old, "give the new names")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file, in bounded time and memory whatever stands in it.

    Raises:
        BadConfig: it is too large, not UTF-8, no TOML, or holds what no setting does; says where.
        OSError: it is not there or cannot be read.
    """
    try:
        text = read_document(path, MAX_CONFIG_BYTES, follow_link=True).decode("utf-8")
        _require_short_keys(text, str(path))
        content = tomllib.loads(text)
    except UnfitFile as error:
        raise BadConfig(f"{path} is no config: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise BadConfig(f"{path}: found arrays or tables nested too deeply, expected at most {_MAX_DEPTH}") from None
    except ValueError:  # of int(), for more digits than Python converts
        raise BadConfig(f"{path}: found an integer of thousands of digits") from None
    _require_bounded(content, str(path))
    return content


def _require_short_keys(text: str, source: str) -> None:
    """Refuse keys of very many parts: the time that Python's parser takes for one grows with their square.

    Raises:
        BadConfig: there is one.
    """
    for number, line in enumerate(_TOML_TEXT.sub("_", text).splitlines(), 1):
        if max(part.count(".") for part in _TOML_MARKS.split(line)) > _MAX_DEPTH:
            raise BadConfig(f"{source}: found a key of more than {_MAX_DEPTH} parts, near line {number}")


def _require_bounded(content: Mapping[str, Any], source: str) -> None:
    """Refuse what no setting holds, before anything is done with it that takes time or memory for each part of it.

    Raises:
        BadConfig: too deep, too many values, an integer too large, or text that cannot be stored.
    """
    left: list[tuple[str, Any, int]] = [("", content, 0)]
    num_values = 0
    while left:
        name, value, depth = left.pop()
        num_values += 1
        problem = _unbounded(value, depth, num_values)
        if problem:
            raise BadConfig(f"{source}: {shortened(name)}: {problem}" if name else f"{source}: {problem}")
        if isinstance(value, Mapping):
            for key, item in value.items():
                if storable_text(key) != key:
                    raise BadConfig(f"{source}: found the key {shortened(key)}, with characters that cannot be stored")
                left.append((f"{name}.{key}"[-_SHOWN_CHARACTERS:].lstrip("."), item, depth + 1))
        elif isinstance(value, list):
            left += [(name, item, depth + 1) for item in value]


def _unbounded(value: Any, depth: int, num_values: int) -> str:
    if depth > _MAX_DEPTH:
        return f"found arrays or tables nested more deeply than {_MAX_DEPTH}"
    if num_values > _MAX_VALUES:
        return f"found more than {_MAX_VALUES} values, expected the settings of one run"
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return "found an integer of more than 100 digits"
    if isinstance(value, str) and storable_text(value) != value:
        return f"found {shortened(value)}, with a NUL character or one that is no Unicode, which cannot be stored"
    return ""


def shortened(found: Any) -> str:
    """A value that was found, for a message: as Python writes it, and not more of it than a person reads."""
    text = repr(found)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def find(config: str | Path) -> Path:
    """The file behind a config argument: a path, or the name of a preset.

    Raises:
        BadConfig: there is neither.
    """
    path = Path(config)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise BadConfig(f"config file {shortened(str(config))} cannot be reached: {error.strerror}") from None
    if str(config) in PRESETS:
        return preset_path(str(config))
    near = difflib.get_close_matches(str(config), PRESETS, n=1)
    hint = f'; did you mean the preset "{near[0]}"?' if near else f"; shipped presets are {', '.join(PRESETS)}"
    kind = "is a folder" if path.is_dir() else "does not exist"
    raise BadConfig(f"config file {path.absolute()} {kind}{hint}")


def is_name(text: str) -> bool:
    """Whether a run, and what makes runs, may be called so."""
    return re.fullmatch(_NAME, text) is not None


def validate(
    content: Mapping[str, Any], source: str, overrides: Sequence[str] = (), given_as: str = "--set"
) -> RunSpec:
    """Validate a parsed config.

    Args:
        content: The config, with the overrides applied.
        source: Where it comes from; a message says so.
        overrides: What was changed in it, and is to blame where that is wrong.
        given_as: Where they come from.

    Raises:
        BadConfig: with the problems found, the first 20 of very many.
    """
    _require_bounded(content, f"{source} with {given_as}" if overrides else source)
    try:
        return RunSpec.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False)
    found: dict[str, list[str]] = {given_as: [], source: []}
    for detail in details[:_MAX_PROBLEMS]:
        override = _override_of(_location(detail), overrides)
        if override:
            found[given_as].append(_explain_override(detail, override))
        else:
            found[source].append(_explain(detail))
    if len(details) > _MAX_PROBLEMS:
        found[source].append(f"and {len(details) - _MAX_PROBLEMS} more")
    raise BadConfig(_problems(found))


def check_overrides(overrides: Sequence[str], given_as: str = "--set") -> None:
    """Refuse overrides that no config can have: unknown settings, and values that they cannot take.

    Raises:
        BadConfig: with the problems found, the first 20 of very many. What depends on the config is not looked for.
    """
    content: dict[str, Any] = {}
    for override in overrides:
        _apply(content, override, given_as)
    _require_bounded(content, given_as)
    try:
        RunSpec.model_validate(_with_choices(content))
        return
    except ValidationError as error:
        details = error.errors(include_url=False)
    named = {setting_of(override) for override in overrides}
    problems = [
        _explain_override(detail, _override_of(_location(detail), overrides))
        for detail in details[:_MAX_PROBLEMS]
        if detail["type"] == "extra_forbidden" or (_location(detail) in named and detail["type"] != "value_error")
    ]
    if problems:
        raise BadConfig(_problems({given_as: problems}))


def _with_choices(content: dict[str, Any]) -> dict[str, Any]:
    """Overrides alone; the trainer and each algorithm that the config is to name are named by their settings, so that
    these are checked."""
    now = current_document(content)
    trainer = now.get("trainer")
    if isinstance(trainer, dict) and "kind" not in trainer:
        known = {kind: trainer.keys() & spec.model_fields.keys() for kind, spec in trainer_kinds().items()}
        trainer["kind"] = max(known, key=lambda kind: len(known[kind]))
    loops = now.get("loops")
    for loop in loops.values() if isinstance(loops, dict) else ():
        given = loop.get("algorithm") if isinstance(loop, dict) else None
        if isinstance(given, dict) and "name" not in given:
            known = {name: given.keys() & spec.model_fields.keys() for name, spec in specs().items()}
            given["name"] = max(known, key=lambda name: len(known[name]))
    return now


def setting_of(override: str) -> str:
    """Name of the setting of an override ``name=value``, as this version calls it."""
    return current_name(override.partition("=")[0].strip())


def _problems(found: Mapping[str, Sequence[str]]) -> str:
    """Problems with their places, one a line."""
    return "\n".join(
        f"{count(len(problems), 'problem')} in {where}:\n" + "\n".join(f"  {problem}" for problem in problems)
        for where, problems in found.items()
        if problems
    )


def _override_of(location: str, overrides: Sequence[str]) -> str:
    """The override that a problem is about: the last one that set the place, or something in or around it."""
    for override in reversed(overrides):
        name = setting_of(override)
        if f"{name}.".startswith(f"{location}.") or location.startswith(f"{name}."):
            return override
    return ""


def _explain_override(detail: Any, override: str) -> str:
    name = override.partition("=")[0].strip()
    if detail["type"] == "extra_forbidden":
        return f'unknown setting "{_cut(name)}" ({_cut(override.strip())}){_nearest_setting(current_name(name))}'
    return _explain(detail)


def _nearest_setting(name: str) -> str:
    """The closest name that there is, for one that may be wrong in any of its parts."""
    name = name[:_SHOWN_CHARACTERS]  # nothing is like a longer one, and comparing takes its time
    near = difflib.get_close_matches(name, list(_meanings()), n=1, cutoff=0.7)
    if near and near[0] != name and name.rpartition(".")[2] not in _OTHER_NAMES:
        return f'; did you mean "{near[0]}"?'
    return _nearest(name)


def _split(override: str, given_as: str) -> tuple[str, Any]:
    name, separator, text = override.partition("=")
    name = name.strip()
    if not separator or not name or not all(name.split(".")):
        raise BadConfig(
            f"{given_as}: override {shortened(override)} is not of the form section.field=value, for instance "
            f"loops.main.num_steps=10"
        )
    text = text.strip()
    if len(override) > MAX_CONFIG_BYTES:
        raise BadConfig(f"{given_as}: found an override of {len(override)} characters, expected one setting")
    _require_short_keys(text, f"{given_as}: override {shortened(override)}")
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except (RecursionError, ValueError):
        return name, text


def _apply(content: dict[str, Any], override: str, given_as: str) -> None:
    name, value = _split(override, given_as)
    *sections, field = name.split(".")
    table = content
    for depth, section in enumerate(sections):
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            inner = ".".join(sections[: depth + 1])
            what = f"{_cut(inner)} is a value, not a section"
            raise BadConfig(f"{given_as}: override {shortened(override)}: {what}")
    if sections[-1:] == ["algorithm"] and field == "name" and table.get(field) != value:
        table.clear()  # the settings of one algorithm mean nothing to another
    table[field] = value


def _location(detail: Any) -> str:
    """Dotted name of the place of a problem, without what pydantic adds for members of unions and parts of types."""
    inner = ("function-", "literal[", "str-", "[key]")
    parts = [str(part) for part in detail["loc"] if not str(part).startswith(inner)]
    choices = {"algorithm": ("name", specs().keys()), "trainer": ("kind", trainer_kinds().keys())}
    kept = [
        part
        for part, before in zip(parts, ["", *parts], strict=False)
        if before not in choices or part not in choices[before][1]
    ]
    ends_at_name = detail["type"].startswith("union_tag_")
    return ".".join([*kept, choices.get(kept[-1], ("name",))[0]] if ends_at_name else kept)


def _explain(detail: Any) -> str:
    """One pydantic problem in our words."""
    location = _location(detail)
    kind = detail["type"]
    found = detail.get("input")
    if kind == "extra_forbidden":
        return f'unknown key "{_cut(location)}"{_nearest(location)}'
    if kind in ("missing", "union_tag_not_found"):
        return _explain_missing(location)
    if kind == "union_tag_invalid":
        return (
            f"{location}: found {shortened(detail['ctx']['tag'])}, expected {_listed(detail['ctx']['expected_tags'])}"
        )
    if kind == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{location}: {message}" if location else message
    expected = detail["msg"][0].lower() + detail["msg"][1:]
    if kind == "string_pattern_mismatch" and "[\\w.]*:" in detail["ctx"]["pattern"]:
        expected = 'expected "module:function", for instance "my_rewards:score"'
    if kind == "string_pattern_mismatch" and location == "name":
        expected = expected_name(str(found))
    return f"{location}: found {shortened(found)}, {expected}"


def _explain_missing(location: str) -> str:
    meaning = _meanings().get(location, "")
    if meaning:
        return f'missing key "{location}": {meaning}'
    inner = [field.name for field in describe_fields() if field.required and field.name.startswith(f"{location}.")]
    return f'missing section "{location}"' + (f"; it needs {', '.join(inner)}" if inner else "")


def _listed(tags: str) -> str:
    """Tags of a union as pydantic writes them (``'a', 'b', 'c'``), as an alternative in words."""
    *first, last = tags.split(", ")
    return f"{', '.join(first)} or {last}" if first else last


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def expected_name(found: str) -> str:
    """Rule for names of runs, and a valid name like the one that was found."""
    like = re.sub(r"[^a-z0-9_-]+", "-", found[:_SHOWN_CHARACTERS].lower()).strip("-_")[:63]
    example = f', for instance "{like}"' if is_name(like) else ""
    return "expected at most 63 lower-case letters, digits, - and _, beginning with a letter or a digit" + example


_OTHER_NAMES = {
    # What people write who come from TRL, verl, OpenRLHF or torchrun.
    "beta": "loops.main.algorithm.kl_coefficient",
    "epsilon": "loops.main.algorithm.clip_low",
    "epsilon_high": "loops.main.algorithm.clip_high",
    "gpus": "resources.gpus_per_node",
    "kl_coef": "loops.main.algorithm.kl_coefficient",
    "lr": "loops.main.optimizer.learning_rate",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "loops.main.num_steps",
    "model_name_or_path": "model.path",
    "nnodes": "resources.num_nodes",
    "nodes": "resources.num_nodes",
    "nproc_per_node": "resources.ranks_per_node",
    "num_generations": "loops.main.algorithm.samples_per_prompt",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "reward_funcs": "reward.functions",
    "save_steps": "checkpoint.every_num_steps",
    "steps": "loops.main.num_steps",
}


def _nearest(location: str) -> str:
    names = list(_meanings())
    *parents, leaf = location[:_SHOWN_CHARACTERS].split(".")
    if leaf in _OTHER_NAMES:
        return f'; the name here is "{_OTHER_NAMES[leaf]}"'
    if location in names:
        return "; it is a setting of another algorithm"
    # The right word in the wrong section: loops.main.learning_rate for loops.main.optimizer.learning_rate.
    elsewhere = [name for name in names if name.split(".")[-1] == leaf]
    elsewhere = [name for name in elsewhere if name.split(".")[: len(parents)] == parents] or elsewhere
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    sections = sorted({name.split(".")[0] for name in names if "." in name})
    if not parents:
        near = difflib.get_close_matches(leaf, sections, n=1, cutoff=0.6)
        if near:
            return f"; did you mean the section [{near[0]}]?"
    siblings = [name for name in names if name.split(".")[:-1] == parents]
    near = difflib.get_close_matches(leaf, [name.split(".")[-1] for name in siblings], n=1, cutoff=0.6)
    if near:
        return f'; did you mean "{".".join([*parents, near[0]])}"?'
    inside = [name for name in names if name.startswith(f"{'.'.join(parents)}.")]
    for among in (inside, names):
        leaves = difflib.get_close_matches(leaf, [name.split(".")[-1] for name in among], n=1, cutoff=0.7)
        if leaves:
            return f'; did you mean "{next(name for name in among if name.split(".")[-1] == leaves[0])}"?'
    if parents and siblings:
        return f"; [{'.'.join(parents)}] has {', '.join(name.split('.')[-1] for name in siblings)}"
    return f"; the sections are {', '.join(sections)}"


# ---------------------------------------------------------------------------------------------------------------------
# What every setting means


@dataclass(frozen=True)
class FieldHelp:
    """One setting, for help texts, docs and forms."""

    name: str
    """Dotted name, as ``--set`` takes it."""
    type: str
    """What may be written."""
    default: str
    """Its default as TOML; empty when the setting is required."""
    meaning: str
    """One sentence."""
    required: bool
    """Whether there is no default."""
    only_for: tuple[str, ...] = ()
    """Names (of algorithms, for instance) that have the setting; empty where all in its section have it."""


def describe_fields() -> list[FieldHelp]:
    """Every setting of a run, in the order of the schema."""
    return list(_describe(RunSpec, ""))


def describe_site_tables() -> dict[str, tuple[str, list[FieldHelp]]]:
    """Every table of ``rlhf.toml``: what it is about, and its settings. Not ``[slurm]``, which has the settings of the
    section ``slurm`` of a run."""
    tables: dict[str, type[Schema]] = {"prefect": PrefectSite, "notify": NotifySite, "retention": RetentionSite}
    return {
        name: ((schema.__doc__ or "").partition(": ")[2].strip(), list(_describe(schema, "")))
        for name, schema in tables.items()
    }


def describe_sections() -> dict[str, str]:
    """Every section that has settings and what it is about, in the order of the schema."""
    return dict(_describe_sections(RunSpec, ""))


MAIN_LOOP = "loops.main"
"""Section that a run of the native trainer must have."""


def optional_sections() -> set[str]:
    """Sections that a config may leave out although settings in them are required."""
    return {
        f"{above}{name}"
        for above, schema in (("", RunSpec), ("loops.", LoopsSpec))
        for name, field in schema.model_fields.items()
        if _schemas(field.annotation) and field.default is None and f"{above}{name}" != MAIN_LOOP
    }


def to_toml(value: Any) -> str:
    """A setting's value as TOML. Tables are written inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_toml_key(key)} = {to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    return repr(value)


def to_toml_key(name: str) -> str:
    """A key as TOML: bare where that is allowed, else in quotes."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml(name)


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
                meaning=" ".join((setting.description or "").split()),
                required=required,
            )


def _describe_union(
    members: Sequence[type[BaseModel]], tag: str, prefix: str, default: str = ""
) -> Iterator[FieldHelp]:
    """A section whose settings depend on one of them: that one first, then the settings of each member.

    Args:
        default: The tag of a section that is left out; empty where it must not be.
    """
    tags = [get_args(member.model_fields[tag].annotation)[0] for member in members]
    texts = [" ".join((member.model_fields[tag].description or "").split()) for member in members]
    yield FieldHelp(
        name=f"{prefix}{tag}",
        type=" | ".join(map(to_toml, tags)),
        default=to_toml(default) if default else "",
        meaning=" ".join(_with_tag(name, text) for name, text in zip(tags, texts, strict=True)),
        required=not default,
    )
    found: dict[str, FieldHelp] = {}
    owners: dict[str, list[str]] = {}
    for member, of_member in zip(members, tags, strict=True):
        for setting in _describe(member, prefix):
            found.setdefault(setting.name, setting)
            owners.setdefault(setting.name, []).append(of_member)
    del found[f"{prefix}{tag}"]
    for name, setting in found.items():
        if len(owners[name]) == len(members):
            yield setting
        else:
            of = ", ".join(f"`{owner}`" for owner in owners[name])
            meaning = f"{setting.meaning} Only for {of}."
            yield dataclasses.replace(setting, meaning=meaning, only_for=tuple(owners[name]))


def _with_tag(tag: str, meaning: str) -> str:
    return meaning if meaning.startswith(f"`{tag}`") else f"`{tag}`: {meaning}"


def _describe_sections(schema: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, setting in schema.model_fields.items():
        sections = _schemas(setting.annotation)
        about = " ".join((sections[0].__doc__ or "").partition("\n\n")[0].split()) if sections else ""
        if len(sections) > 1:
            yield f"{prefix}{name}", f"Settings that depend on `{setting.discriminator}`."
        elif sections and any(not _schemas(field.annotation) for field in sections[0].model_fields.values()):
            yield f"{prefix}{name}", about
        for section in sections[:1]:
            yield from _describe_sections(section, f"{prefix}{name}.")


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


def _meanings() -> dict[str, str]:
    return {field.name: field.meaning for field in describe_fields()}


# ---------------------------------------------------------------------------------------------------------------------
# The site


@dataclass(frozen=True)
class Site:
    """Where things are on this site. Environment variables win over ``rlhf.toml``, which wins over the defaults."""

    home: Path
    """``RLHF_HOME``: this user's folder (default ``~/.rlhf``)."""
    runs_dir: Path
    """``RLHF_RUNS``: the run directories; on a cluster, a shared file system that the nodes see (default
    ``<home>/runs``)."""
    database_url: str
    """``RLHF_DATABASE_URL``: SQLAlchemy URL of the history (default SQLite in ``<home>/history.db``)."""
    scheduler: str
    """``RLHF_SCHEDULER``: ``local`` or ``slurm`` (default ``local``)."""
    compute_python: str
    """``RLHF_COMPUTE_PYTHON``: interpreter that the nodes start (default: this one)."""
    max_restarts_per_hour: int = 60
    """``RLHF_MAX_RESTARTS_PER_HOUR``: restarts and new attempts of all runs of the history in an hour, above which
    further attempts wait (default 60). When everything fails the cluster is at fault, and jobs that come back at once
    make it worse."""
    prefect: PrefectSite = dataclasses.field(default_factory=PrefectSite)
    """``[prefect]``: how ``rlhf up`` sets Prefect up."""
    notify: NotifySite = dataclasses.field(default_factory=NotifySite)
    """``[notify]``: who is told what."""
    retention: RetentionSite = dataclasses.field(default_factory=RetentionSite)
    """``[retention]``: what the daemon of the site removes."""
    job_secrets: Path | None = None
    """``RLHF_JOB_SECRETS``: file with the values of ``slurm.pass_environment``, as lines ``NAME=value``; refused unless
    it is of mode 600 and of the user who submits (default ``<home>/job-secrets.env``)."""
    slurm: SlurmSpec = dataclasses.field(default_factory=SlurmSpec)
    """``[slurm]``: a table of ``rlhf.toml`` with the settings of the section ``slurm`` of a run: what every job asks
    of Slurm, unless its run says otherwise. Lists and variables of both are used."""


_SITE_KEYS = {
    "runs": "RLHF_RUNS",
    "database_url": "RLHF_DATABASE_URL",
    "scheduler": "RLHF_SCHEDULER",
    "compute_python": "RLHF_COMPUTE_PYTHON",
    "max_restarts_per_hour": "RLHF_MAX_RESTARTS_PER_HOUR",
    "job_secrets": "RLHF_JOB_SECRETS",
}
_SITE_TABLES = ("prefect", "notify", "retention", "slurm")
_SECRETS = {
    "prefect": {"database_url": "RLHF_PREFECT_DATABASE_URL"},
    "notify": {"webhook_url": "RLHF_NOTIFY_WEBHOOK_URL"},
}
"""What may hold a password, and the variable that keeps it out of files."""
SCHEDULERS = ("local", "slurm")
_DATABASES = tuple(
    f"{name}{suffix}" for name in ("history.db", "prefect/prefect.db") for suffix in ("", "-wal", "-shm")
)
"""Databases that may lie in the home folder. That of Prefect holds its secrets and the key that they are encrypted
with."""

Table = TypeVar("Table", bound=Schema)


def load_site(environ: Mapping[str, str] | None = None) -> Site:
    """Site settings from the environment and ``$RLHF_HOME/rlhf.toml``; a home folder that is there is closed to others.

    Raises:
        BadConfig: an unknown key in ``rlhf.toml``, or a value that cannot be.
    """
    environment = os.environ if environ is None else environ
    home = Path(environment.get("RLHF_HOME") or "~/.rlhf").expanduser().absolute()
    _close_home(home)
    settings = _site_file(home / "rlhf.toml")
    for key, variable in _SITE_KEYS.items():
        if environment.get(variable):
            settings[key] = environment[variable]
    scheduler = settings.get("scheduler", "local")
    if scheduler not in SCHEDULERS:
        raise BadConfig(f"RLHF_SCHEDULER: found {scheduler!r}, expected one of {', '.join(SCHEDULERS)}")
    runs_dir = Path(settings.get("runs") or home / "runs").expanduser().absolute()
    for variable, folder in (("RLHF_HOME", home), ("RLHF_RUNS", runs_dir)):
        if storable_text(str(folder)) != str(folder):
            raise BadConfig(f"{variable}: found {str(folder)!r}, expected a path in UTF-8: it stands in every record")
    return Site(
        home=home,
        runs_dir=runs_dir,
        database_url=settings.get("database_url") or f"sqlite:///{home / 'history.db'}",
        scheduler=scheduler,
        compute_python=_interpreter(settings.get("compute_python") or sys.executable),
        max_restarts_per_hour=_whole_number("max_restarts_per_hour", settings.get("max_restarts_per_hour", "60")),
        job_secrets=Path(settings.get("job_secrets") or home / "job-secrets.env").expanduser().absolute(),
        prefect=_site_table(PrefectSite, "prefect", home, settings, environment),
        notify=_site_table(NotifySite, "notify", home, settings, environment),
        retention=_site_table(RetentionSite, "retention", home, settings, environment),
        slurm=_site_table(SlurmSpec, "slurm", home, settings, environment),
    )


def _close_home(home: Path) -> None:
    """Close the home folder to others, and what older versions left open in it. Whoever makes it makes it private."""
    with contextlib.suppress(OSError):
        for name in (".", "prefect", "logs", "services", "deployments", *_DATABASES):
            private_files.close(home / name)


def _interpreter(text: str) -> str:
    """A path is taken from the current folder, now: jobs run elsewhere. A bare name is looked up on the nodes."""
    return str(Path(text).expanduser().absolute()) if "/" in text else text


def _whole_number(key: str, text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise BadConfig(f"{_SITE_KEYS[key]}: found {text!r}, expected a whole number from 1")
    return int(text)


def _site_table(
    schema: type[Table], name: str, home: Path, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> Table:
    """A table of ``rlhf.toml``; environment variables of its own win."""
    table = settings.get(name, {})
    secrets = {
        field: environment[variable] for field, variable in _SECRETS.get(name, {}).items() if variable in environment
    }
    try:
        return schema.model_validate({**table, **secrets} if isinstance(table, dict) else table)
    except ValidationError as error:
        problems = [_explain({**detail, "loc": (name, *detail["loc"])}) for detail in error.errors()]
    raise BadConfig(f"{home / 'rlhf.toml'}:\n" + "\n".join(f"  {problem}" for problem in problems))


def _site_file(path: Path) -> dict[str, Any]:
    try:
        content = read_toml(path)
    except FileNotFoundError:
        return {}
    except (OSError, BadConfig) as error:
        raise BadConfig(f"cannot read the site settings {path}: {error}") from None
    for key, value in list(content.items()):
        if key in _SITE_TABLES:
            continue
        if key not in _SITE_KEYS:
            keys = [*_SITE_KEYS, *_SITE_TABLES]
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"the keys are {', '.join(keys)}"
            raise BadConfig(f'{path}: unknown key "{key}"; {hint}')
        if key == "max_restarts_per_hour" and isinstance(value, int):
            content[key] = str(value)
        elif not isinstance(value, str):
            raise BadConfig(f"{path}: {key}: found {value!r}, expected text")
    return content
