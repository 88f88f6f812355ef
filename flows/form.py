"""The form for requesting a run in Prefect: flat, pre-filled from a config, with the differences applied as overrides.

It has only texts and numbers, because the form and the schedule dialog of Prefect's UI handle nothing else: for tables,
alternatives and empty values they produce objects of their own, and of a list they lose the last entry. A value that
differs from the config becomes an override, so that the history shows the change.
"""

import functools
from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from rlhf_core.config import loading as config
from rlhf_core.config.fields import describe_fields, to_toml
from rlhf_core.config.problems import expected_name, setting_of
from rlhf_core.config.toml_files import shortened
from rlhf_core.errors import BadConfig, BadInput
from rlhf_core.presets import PRESETS
from rlhf_core.run_dir.run import is_run_id
from rlhf_core.schemas.base import Schema, field_docs, label_problem
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.loops import MAX_STEPS
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import MAX_TAGS


def _split_at_commas(given: Any) -> Any:
    return _entries(given.replace("\n", ",").split(",") if isinstance(given, str) else given)


def _split_at_lines(given: Any) -> Any:
    return _entries(given.splitlines() if isinstance(given, str) else given)


def _entries(given: Any) -> Any:
    """Remove empty entries. Programs may pass a list instead of a text."""
    if not isinstance(given, list | tuple):
        return given
    stripped = [one.strip() if isinstance(one, str) else one for one in given]
    return tuple(one for one in stripped if one not in ("", None))


def _is_an_id(given: str) -> str:
    if given and not is_run_id(given):
        raise ValueError("expected the id of a run, as `rlhf runs` shows it")
    return given


def _is_a_label(given: str) -> str:
    problem = label_problem(given)
    if problem:
        raise ValueError(problem)
    return given


UserLabel = Annotated[str, AfterValidator(_is_a_label)]
"""A name entered in the form."""

_MAX_OVERRIDES = 1_000
MAX_SEED = 2**53 - 1
"""Largest seed of the form: browsers lose digits of larger numbers. `seed=` among the overrides has no such limit."""

SETTINGS = {
    "name": "name",
    "nodes": "resources.num_nodes",
    "gpus_per_node": "resources.gpus_per_node",
    "steps": "loops.main.num_steps",
    "learning_rate": "loops.main.optimizer.learning_rate",
    "seed": "seed",
}
"""Fields of the form that correspond to a setting of the config."""
COMMAND_SETTINGS = {
    **{field: setting for field, setting in SETTINGS.items() if field != "learning_rate"},
    "steps": "trainer.num_steps",
}
"""The same for a config whose trainer is another program. Its learning rate is among its own arguments."""


class Form(Schema):
    """The fields of the form. A value that no setting can have means "as in the config"."""

    config: str = ""
    """Path of a TOML config on the machine of the worker, or the name of a preset."""
    name: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9_-]{0,62})?$")] = ""
    """Name of the run: lower-case letters, digits, - and _; runs of the same name are compared with each other."""
    nodes: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Number of nodes, those of rollout engines alone (`rollout.nodes`) included."""
    gpus_per_node: Annotated[int, Field(ge=-1, le=1024)] = -1
    """GPUs on every node; 0 trains on CPU."""
    steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Optimizer steps of the main algorithm, without those of a warm start."""
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Peak learning rate of the main algorithm."""
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] = -1
    """Everything random follows from it."""
    owner: UserLabel = ""
    """Owner of the run: a name to find it by. Empty for the user of the worker."""
    tags: Annotated[tuple[UserLabel, ...], BeforeValidator(_split_at_commas), Field(max_length=MAX_TAGS)] = ()
    """Words to find the run by (rlhf runs --tag), with commas between them."""
    overrides: Annotated[tuple[str, ...], BeforeValidator(_split_at_lines), Field(max_length=_MAX_OVERRIDES)] = ()
    """Any other settings to change, one per line, each as section.field=value, for instance
    rollout.temperature=0.8; the description has them all. Relative paths begin in the folder of the deployed config."""
    run_id: Annotated[str, AfterValidator(_is_an_id)] = ""
    """Id of a run to resume, instead of starting a new one: its job is adopted if it is alive, else it starts again
    from its last complete checkpoint. The other fields do not count then."""


BOUNDS: dict[str, dict[str, float]] = {
    "nodes": {"minimum": 1},
    "gpus_per_node": {"minimum": 0},
    "steps": {"minimum": 1},
    "learning_rate": {"exclusiveMinimum": 0},
    "seed": {"minimum": 0},
}
"""Bounds in the form of a deployment, whose config gives every value: no value there means "as in the config"."""


def meanings() -> dict[str, str]:
    """The meaning of each field and its setting, each in one line of plain text, because forms render no Markdown."""
    texts = {}
    for name, text in field_docs(Form).items():
        texts[name] = f"{text} Setting: {SETTINGS[name]}." if name in SETTINGS else text
    texts["config"] += f" Presets: {', '.join(PRESETS)}."
    return texts


@functools.cache
def settings_text() -> str:
    """Every setting with its type, default and meaning, as a Markdown list.

    A table would be wider than Prefect's column for it, and would overlap the next column.
    """
    return "\n".join(
        f"- `{field.name}` ({field.type.replace(' | ', ' or ')}; "
        f"{'required' if field.required else f'default `{field.default}`'}): {field.meaning}"
        for field in describe_fields()
    )


def read_form(given: Mapping[str, Any]) -> Form:
    """Parse a form that was filled in.

    Raises:
        BadInput: lists every field with an invalid value.
    """
    objects = [name for name, value in given.items() if isinstance(value, Mapping)]
    if objects:
        found = ", ".join(f"{name} = {dict(given[name])}" for name in objects)
        raise BadInput(
            f"found {found}: objects like this come from a form of Prefect that was left empty or had JSON entered. "
            f"Expected plain texts and numbers: open the run form or the schedule again and fill in "
            f"{', '.join(objects)}"
        )
    try:
        return Form.model_validate(dict(given))
    except ValidationError as error:
        problems = [_explain(detail) for detail in error.errors(include_url=False)]
    raise BadInput("the form cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))


def _explain(detail: Any) -> str:
    name = ".".join(map(str, detail["loc"]))
    setting = SETTINGS.get(name)
    if detail["type"] == "value_error":
        return f"{name}: found {shortened(detail.get('input'))}, {detail['ctx']['error']}"
    expected = detail["msg"][0].lower() + detail["msg"][1:]
    if name == "name" and detail["type"] == "string_pattern_mismatch":
        expected = expected_name(str(detail.get("input")))
    return f"{name}{f' ({setting})' if setting else ''}: found {shortened(detail.get('input'))}, {expected}"


def prefilled(spec: RunSpec) -> dict[str, Any]:
    """The fields that correspond to settings, with the values of a config; a seed that the form cannot hold is left
    out, and so stays as in the config."""
    return {field: value for field, value in _values_of(spec).items() if field != "seed" or value <= MAX_SEED}


def _values_of(spec: RunSpec) -> dict[str, Any]:
    return {field: attrgetter(setting)(spec) for field, setting in _settings_of(spec).items()}


def without_setting(spec: RunSpec) -> tuple[str, ...]:
    """Fields of the form without a meaning for a config, because its trainer is another program."""
    return tuple(field for field in SETTINGS if field not in _settings_of(spec))


def _settings_of(spec: RunSpec) -> dict[str, str]:
    return COMMAND_SETTINGS if isinstance(spec.trainer, CommandTrainer) else SETTINGS


OVERRIDES = "the field overrides of the form"


def overrides_of(form: Form, given_as: str = OVERRIDES) -> list[str]:
    """The changes that a form makes to its config: its overrides, then each field that differs from the config.

    Args:
        form: The form.
        given_as: Source of its overrides, for error messages.

    Raises:
        BadConfig: config or overrides cannot be used.
        BadInput: there is no config, or the form gives two values for one setting.
    """
    if not form.config:
        raise BadInput("give either config (and what is to be changed) for a new run, or run_id to resume one")
    spec = config.load(form.config, form.overrides, given_as)
    settings = _settings_of(spec)
    if form.learning_rate and "learning_rate" not in settings:
        raise BadInput(
            f"found learning_rate = {form.learning_rate:g}, and a config whose trainer is another program: change it "
            "in trainer.argv, among the overrides"
        )
    after = _values_of(spec)
    try:
        before = _values_of(config.load(form.config))
    except BadConfig:
        before = after  # the config is complete only with the overrides
    named = [setting_of(text) for text in form.overrides]
    changed: list[str] = []
    for field, setting in settings.items():
        value = getattr(form, field)
        if value in (Form.model_fields[field].default, before.get(field), after[field]):
            continue
        if setting in named:
            raise BadInput(
                f"found {field} = {value!r}, and {setting} = {after[field]!r} among the overrides: "
                f"they are the same setting; give it once"
            )
        changed.append(f"{setting}={to_toml(value)}")
    return [*form.overrides, *changed]
