"""Columns named in settings and templates."""

from collections.abc import Set as AbstractSet

from rlhf_core.files.data_rows import template_columns
from rlhf_core.schemas.data import DataKind, DataSpec

ALIASES = ("prompt", "answer", "chosen", "rejected")
"""Names in templates that stand for the columns named by ``data.prompt_column`` and so on."""


def templates_of(data: DataSpec, kinds: AbstractSet[DataKind]) -> dict[str, str]:
    """Map each setting with a template in use to the template."""
    found = {"data.prompt_template": data.prompt_template}
    if "answer" in kinds:
        found["data.completion_template"] = data.completion_template
    if "pair" in kinds:
        found |= {"data.chosen_template": data.chosen_template, "data.rejected_template": data.rejected_template}
    return found


def named_columns(data: DataSpec, kinds: AbstractSet[DataKind]) -> dict[str, list[str]]:
    """Map each setting to the columns that it names.

    The prompt of pairs is not included: without a column, it is the common start of both completions.
    """
    names = {} if "pair" in kinds else {"data.prompt_column": [data.prompt_column]}
    if data.messages_column:
        names = {"data.messages_column": [data.messages_column]}
    elif "answer" in kinds:
        names["data.answer_column"] = [data.answer_column]
    if "label" in kinds:
        names["data.label_column"] = [data.label_column]
    if "pair" in kinds:
        names |= {"data.chosen_column": [data.chosen_column], "data.rejected_column": [data.rejected_column]}
        if data.margin_column:
            names["data.margin_column"] = [data.margin_column]
    return names | {setting: _own(template) for setting, template in templates_of(data, kinds).items()}


def absent_columns(data: DataSpec, kinds: AbstractSet[DataKind], columns: AbstractSet[str]) -> dict[str, list[str]]:
    """Map each setting to the columns that it names and the data lacks.

    Args:
        columns: columns of the data.
    """
    return {
        setting: [column for column in wanted if column not in columns]
        for setting, wanted in named_columns(data, kinds).items()
    }


def _own(template: str) -> list[str]:
    return [name for name in template_columns(template)[0] if name not in ALIASES]
