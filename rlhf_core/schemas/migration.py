"""Translation of the settings of rlhf-flows 0.1 to this version.

In 0.1 the warm start was ``[sft]``, the main algorithm ``[train]`` and ``[grpo]``, and a few settings of other sections
had another name. Configs, overrides, ``spec.json``, rows of the history and changed settings stored with attempts may
have that form; all of them are read through this module. Version 0.2 accepts configs and overrides of 0.1 with a
warning, version 0.3 does not.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any


class OldSettings(FutureWarning):
    """Settings of rlhf-flows 0.1 were translated; the next version will reject them."""


OLD_SECTIONS = ("sft", "train", "grpo")
"""Sections that only 0.1 had."""

_OPTIMIZER = (
    "learning_rate", "warmup_steps", "schedule", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm",
)  # fmt: skip
RENAMED = {"preflight.meet_s": "supervise.join_s"}
"""Settings of sections that still exist, by their name in 0.1."""

_NAMES = {
    **RENAMED,
    **{f"sft.{name}": f"loops.warm_start.optimizer.{name}" for name in _OPTIMIZER},
    "sft.num_steps": "loops.warm_start.num_steps",
    "sft.batch_size": "loops.warm_start.algorithm.batch_size",
    **{f"train.{name}": f"loops.main.optimizer.{name}" for name in _OPTIMIZER},
    "train.algorithm": "loops.main.algorithm.name",
    "train.num_steps": "loops.main.num_steps",
    **{f"train.{name}": f"trainer.{name}" for name in ("micro_batch_size", "gradient_checkpointing")},
    "train.log_samples_every": "trainer.log_samples_every",
}
_SECTIONS = {"sft": "loops.warm_start", "train": "loops.main", "grpo": "loops.main.algorithm"}

_WARM_START: Mapping[str, Any] = {
    "num_steps": 0,
    "algorithm": {"name": "sft", "batch_size": 64},
    "optimizer": {"learning_rate": 1e-4},
}
_MAIN: Mapping[str, Any] = {"algorithm": {"name": "grpo"}, "optimizer": {"learning_rate": 1e-6}}
"""Defaults of 0.1 that must be explicit in a loop of this version."""


def current_name(name: str) -> str:
    """Translate the dotted name of a setting of 0.1; return other names unchanged."""
    if name in _NAMES:
        return _NAMES[name]
    section, _, rest = name.partition(".")
    if section not in _SECTIONS:
        return name
    return f"{_SECTIONS[section]}.{rest}" if rest else _SECTIONS[section]


def old_settings(document: Mapping[str, Any]) -> list[str]:
    """The settings of 0.1 in a document, by their old dotted names."""
    return [name for name, _ in _flat(document)] + [name for name in RENAMED if _has(document, name)]


def current_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings of 0.1 in a document; everything else is unchanged.

    A document with both forms (a config with overrides) is treated as one of this version, changed by its old settings.
    A document with only old sections gets the defaults of 0.1 where this version has none.

    Returns:
        A new document, or an equal copy if there is nothing to translate.
    """
    document = _with_new_names(document)
    found = {section: document[section] for section in OLD_SECTIONS if section in document}
    now = {name: value for name, value in document.items() if name not in found}
    if not found:
        return now
    given = now.get("loops", {"main": _MAIN})
    if not isinstance(given, Mapping):
        return dict(document)  # not a valid form: rejected by the validation
    loops = copy.deepcopy(dict(given))
    if "sft" in found and not isinstance(loops.get("warm_start"), dict):
        loops["warm_start"] = copy.deepcopy(dict(_WARM_START))
    now["loops"] = loops
    if isinstance(now.get("trainer"), Mapping):
        now["trainer"] = dict(now["trainer"])
    _choose_algorithm(loops, found)
    for name, value in _flat(found):
        if name != "train.algorithm" and not _had_no_effect(name, loops):
            _put(now, current_name(name), value)
    return now


def current_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings of a checkpoint; a warm start without steps counts as none."""
    now = current_document(document)
    loops = now.get("loops")
    if isinstance(loops, dict):
        warm_start = loops.get("warm_start")
        loops["warm_start"] = warm_start if isinstance(warm_start, Mapping) and warm_start.get("num_steps") else None
    return now


def _flat(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section in OLD_SECTIONS:
        content = document.get(section)
        if isinstance(content, Mapping):
            yield from ((f"{section}.{name}", value) for name, value in content.items())
        elif section in document:
            yield section, content


def _has(document: Mapping[str, Any], name: str) -> bool:
    section, _, field = name.partition(".")
    content = document.get(section)
    return isinstance(content, Mapping) and field in content


def _with_new_names(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document with the renamed settings under their new names."""
    for old, new in RENAMED.items():
        if _has(document, old):
            (section, field), (now, new_field) = old.split("."), new.split(".")
            rest = {name: value for name, value in document[section].items() if name != field}
            target = document.get(now, {})
            if isinstance(target, Mapping):
                document = {**document, section: rest, now: {**target, new_field: document[section][field]}}
    return document


def _choose_algorithm(loops: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Set the main algorithm. Supervised training took its batch size from ``[sft]`` in both loops."""
    main = loops.setdefault("main", {})
    train = found.get("train")
    if not isinstance(main, dict):
        return
    before = main.get("algorithm")
    name = train.get("algorithm") if isinstance(train, Mapping) else None
    if name is not None and (not isinstance(before, dict) or before.get("name") != name):
        main["algorithm"] = {"name": name}
    if name == "sft":
        supervised = found.get("sft")
        size = supervised.get("batch_size") if isinstance(supervised, Mapping) else None
        if size is None and isinstance(loops.get("warm_start"), dict):
            algorithm = loops["warm_start"].get("algorithm")
            size = algorithm.get("batch_size") if isinstance(algorithm, Mapping) else None
        if size is not None:
            main["algorithm"]["batch_size"] = size


def _had_no_effect(name: str, loops: Mapping[str, Any]) -> bool:
    """Return True for settings of GRPO beside supervised training, the only other algorithm of 0.1, which allowed them
    without effect."""
    main = loops["main"]
    algorithm = main.get("algorithm") if isinstance(main, Mapping) else None
    return name.startswith("grpo.") and isinstance(algorithm, Mapping) and algorithm.get("name") == "sft"


def _put(document: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting by its dotted name. A value in place of a section is left to the validation."""
    *sections, field = name.split(".")
    table = document
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            return
        table = inner
    table[field] = value
