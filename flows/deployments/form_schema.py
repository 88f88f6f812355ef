"""Description and form of one deployment, as Prefect shows them: Markdown text, and a parameter schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from flows.form import BOUNDS, settings_text
from flows.run import DESCRIPTION, rlhf_run
from rlhf_core.text.escaping import markdown_code


def description_of(config: str, overrides: Sequence[str]) -> str:
    """Description of one deployment: its flow, its config and all its settings."""
    changed = f", with {', '.join(map(markdown_code, overrides))}" if overrides else ""
    return f"{DESCRIPTION}\n\nFrom {markdown_code(config)}{changed}.\n\n## Settings\n\n{settings_text()}"


def form_of(parameters: Mapping[str, Any], hidden: Sequence[str]) -> dict[str, Any]:
    """The form of one deployment, with its own values and without the fields it fixes."""
    schema = rlhf_run.parameters.model_dump()
    fields = {name: dict(field) for name, field in schema["properties"].items() if name not in hidden}
    for name, field in fields.items():
        if name not in parameters:
            continue
        field["default"] = parameters[name]
        if name in BOUNDS:
            field.pop("minimum", None)
            field |= BOUNDS[name]
    return {**schema, "properties": fields, "required": ["run_id"] if "run_id" in fields else []}
