"""TOML and overrides -> :class:`RunSpec`.

Hand-written configs are sparse TOML; the run directory stores the resolved JSON. An error suggests the nearest valid
key, and all errors of a file are reported at once.
"""

import difflib
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rlhf_core.config.fields import field_meanings
from rlhf_core.config.problems import (
    MAX_PROBLEMS,
    explain,
    explain_override,
    flags_for_numbers,
    location_of,
    name_of,
    override_of,
    problems_in_words,
    setting_of,
    with_old_name,
)
from rlhf_core.config.toml_files import (
    MAX_CONFIG_BYTES,
    read_toml,
    readable,
    require_bounded,
    require_short_keys,
    shortened,
)
from rlhf_core.errors import BadConfig
from rlhf_core.machine.accounts import account
from rlhf_core.presets import PRESETS, nearest_preset, preset_path
from rlhf_core.schemas.algorithms import specs
from rlhf_core.schemas.migration import OldSettings, current_document, current_name, old_settings
from rlhf_core.schemas.model import BUILT_TOKENIZERS
from rlhf_core.schemas.run import NEWEST_RUN, RunSpec
from rlhf_core.schemas.trainers import trainer_kinds
from rlhf_core.text.formatting import listed


def load(config: str | Path, overrides: Sequence[str] = (), given_as: str = "--set") -> RunSpec:
    """Read the config file of a new run, apply ``section.field=value`` overrides, and validate.

    Args:
        config: path of a TOML file, or the name of a shipped preset.
        overrides: each ``dotted.name=value``; the value is TOML, and a bare word is taken as a string.
        given_as: source of the overrides, for messages.

    Raises:
        BadConfig: with the first 20 problems, each with the key, the value found, and what to write instead; or the run
            has a name that commands take otherwise.
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
    _require_one_form(overrides, given_as)
    for override in _in_order(overrides):
        _apply(content, override, given_as)
    _warn_of_overrides(overrides, given_as)
    spec = validate(content, str(path), overrides, given_as, found)
    _require_new_name(spec.name)
    return spec


def _require_new_name(name: str) -> None:
    """Refuse a name for a new run that those of older versions may have."""
    if name == NEWEST_RUN:
        raise BadConfig(f'found name = "{name}", which commands take for the newest run; choose another name')


def _warn(where: str, names: Sequence[str], remedy: str) -> None:
    warnings.warn(
        f"{where}: settings of rlhf-flows 0.1, which the next version will reject; {remedy}:\n{_translations(names)}",
        OldSettings,
        stacklevel=4,
    )


def _translations(names: Sequence[str]) -> str:
    shown = [f"  write {readable(current_name(name))} instead of {readable(name)}" for name in names[:MAX_PROBLEMS]]
    more = len(names) - len(shown)
    return "\n".join([*shown, *([f"  and {more} more"] if more else [])])


def _warn_of_overrides(overrides: Sequence[str], given_as: str) -> None:
    names = [name_of(override) for override in overrides]
    old = [name for name in names if current_name(name) != name and current_name(name) in field_meanings()]
    if old:
        _warn(given_as, old, "use the new names")


def find(config: str | Path) -> Path:
    """Find the file of a config argument: a path, or the name of a preset.

    Raises:
        BadConfig: it is neither an accessible file nor a preset.
    """
    path = Path(config)
    try:
        if path.is_file():
            return path
    except PermissionError as error:
        raise BadConfig(
            f"config file {shortened(str(config))} is not accessible to {account()}: {error.strerror}. A config that "
            "another user has submitted or deployed must be deployed by the user of the worker"
        ) from None
    except OSError as error:
        raise BadConfig(f"config file {shortened(str(config))} is not accessible: {error.strerror}") from None
    if str(config) in PRESETS:
        return preset_path(str(config))
    kind = "is a folder" if path.is_dir() else "does not exist"
    raise BadConfig(f"config file {path.absolute()} {kind}{_other_config(str(config))}")


def _other_config(config: str) -> str:
    """Hint for a config that is not there: a preset for a bare word, the configs of its folder for a path."""
    path = Path(config)
    is_word = path.name == config and not path.suffix and not path.is_dir()
    if is_word or difflib.get_close_matches(path.stem, PRESETS, n=1, cutoff=0.9):
        return nearest_preset(path.stem)
    folder = path if path.is_dir() else path.parent
    try:
        names = sorted(one.name for one in folder.glob("*.toml") if one.is_file())
    except OSError:
        names = []
    if not names:
        return "; `rlhf init` writes one, `rlhf init --help` lists the presets"
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {folder / near[0]}?" if near else f"; {folder.absolute()} has {listed(names, 8)}"


def validate(
    content: Mapping[str, Any],
    source: str,
    overrides: Sequence[str] = (),
    given_as: str = "--set",
    old_names: Sequence[str] = (),
) -> RunSpec:
    """Validate a parsed config.

    Args:
        content: The config, with the overrides applied.
        source: Source of the config, for messages.
        overrides: The overrides, to attribute problems to them.
        given_as: Source of the overrides, for messages.
        old_names: The settings that the source gives by their names in 0.1, which problems then name too.

    Raises:
        BadConfig: with the first 20 problems.
    """
    require_bounded(content, f"{source} with {given_as}" if overrides else source)
    found: dict[str, list[str]] = {given_as: [], source: []}
    try:
        spec = RunSpec.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        for place, flag in flags_for_numbers(current_document(content), spec):
            override = override_of(place, overrides)
            problem = f"{place}: found {str(flag).lower()}, expected a number"
            names = [name_of(override)] if override else old_names
            found[given_as if override else source].append(with_old_name(problem, place, names))
        if any(found.values()):
            raise BadConfig(problems_in_words(found))
        return spec
    for detail in details[:MAX_PROBLEMS]:
        override = override_of(location_of(detail), overrides)
        if override:
            found[given_as].append(explain_override(detail, override))
        else:
            found[source].append(with_old_name(explain(detail), location_of(detail), old_names))
    if len(details) > MAX_PROBLEMS:
        found[source].append(f"and {len(details) - MAX_PROBLEMS} more")
    raise BadConfig(problems_in_words(found))


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides that are invalid for any config: unknown settings, and values that they cannot take.

    Raises:
        BadConfig: with the first 20 problems. Problems that depend on the config are not detected.
    """
    content: dict[str, Any] = {}
    _require_one_form(overrides, "--set")
    for override in _in_order(overrides):
        _apply(content, override, "--set")
    require_bounded(content, "--set")
    try:
        RunSpec.model_validate(_with_choices(content))
        return
    except ValidationError as error:
        details = error.errors(include_url=False)
    named = {setting_of(override) for override in overrides}
    problems = [
        explain_override(detail, override_of(location_of(detail), overrides))
        for detail in details[:MAX_PROBLEMS]
        if detail["type"] == "extra_forbidden" or (location_of(detail) in named and detail["type"] != "value_error")
    ]
    if problems:
        raise BadConfig(problems_in_words({"--set": problems}))


def _with_choices(content: dict[str, Any]) -> dict[str, Any]:
    """The overrides as a config of their own, with the trainer and each algorithm derived from their settings, so that
    these are checked."""
    now = current_document(content)
    trainer = now.get("trainer")
    if isinstance(trainer, dict) and "kind" not in trainer:
        trainer["kind"] = _choice_of(trainer, trainer_kinds())
    loops = now.get("loops")
    for loop in loops.values() if isinstance(loops, dict) else ():
        given = loop.get("algorithm") if isinstance(loop, dict) else None
        if isinstance(given, dict) and "name" not in given:
            given["name"] = _choice_of(given, specs())
    return now


def _choice_of(given: Mapping[str, Any], choices: Mapping[str, type[BaseModel]]) -> str:
    """The choice that has most of the given settings."""
    return max(choices, key=lambda name: len(given.keys() & choices[name].model_fields.keys()))


def _in_order(overrides: Sequence[str]) -> list[str]:
    """Order the overrides: first those that discard settings of the file, an algorithm's name and a model's path."""
    discarding = (".algorithm.name", ".model.path")
    return sorted(overrides, key=lambda override: not f".{name_of(override)}".endswith(discarding))


def _require_one_form(overrides: Sequence[str], given_as: str) -> None:
    """Refuse an algorithm by its name of 0.1 beside settings of the algorithm by their names of today. The name of 0.1
    is translated last, and would discard them."""
    names = [name_of(override) for override in overrides]
    discarded = [name for name in names if f"{name}.".startswith("loops.main.algorithm.")]
    if "train.algorithm" in names and discarded:
        raise BadConfig(
            f"{given_as}: found train.algorithm, a name of rlhf-flows 0.1, which would discard "
            f"{', '.join(map(readable, discarded))}; write loops.main.algorithm.name instead"
        )


def _split(override: str, given_as: str) -> tuple[str, Any]:
    name, separator, text = override.partition("=")
    name = name.strip()
    if not separator or not name or not all(name.split(".")):
        raise BadConfig(
            f"{given_as}: override {shortened(override)} does not have the form section.field=value, for instance "
            "loops.main.num_steps=10"
        )
    text = text.strip()
    if len(override) > MAX_CONFIG_BYTES:
        raise BadConfig(f"{given_as}: found an override of {len(override)} characters, expected one setting")
    require_short_keys(text, f"{given_as}: override {shortened(override)}")
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
            what = f"{readable(inner)} is a value, not a section"
            raise BadConfig(f"{given_as}: override {shortened(override)}: {what}")
    if sections[-1:] == ["algorithm"] and field == "name" and table.get(field) != value:
        table.clear()  # settings of one algorithm are not valid for another
    if name == "model.path" and value:  # a preset can predict memory from dimensions, which a model has itself
        table.pop("config", None)
        if table.get("tokenizer") in BUILT_TOKENIZERS:
            del table["tokenizer"]
    table[field] = value
