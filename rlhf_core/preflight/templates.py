"""Columns named in settings and templates."""

from collections.abc import Set as AbstractSet

from rlhf_core.files.data_rows import template_columns
from rlhf_core.schemas.data import DataKind, RowSource

ALIASES = ("prompt", "answer", "chosen", "rejected")
"""Names in templates that stand for the columns named by ``data.prompt_column`` and so on."""


def templates_of(data: RowSource, kinds: AbstractSet[DataKind], table: str = "data") -> dict[str, str]:
    """Map each setting with a template in use to the template.

    Args:
        table: table of the settings, of a source in a mixture its own.
    """
    found = {f"{table}.prompt_template": data.prompt_template}
    if "answer" in kinds:
        found[f"{table}.completion_template"] = data.completion_template
    if "pair" in kinds:
        found |= {
            f"{table}.chosen_template": data.chosen_template,
            f"{table}.rejected_template": data.rejected_template,
        }
    return found


def named_columns(data: RowSource, kinds: AbstractSet[DataKind], table: str = "data") -> dict[str, list[str]]:
    """Map each setting to the columns that it names.

    The prompt of pairs is not included: without a column, it is the common start of both completions.
    """
    names = {} if "pair" in kinds else {f"{table}.prompt_column": [data.prompt_column]}
    if data.messages_column:
        names = {f"{table}.messages_column": [data.messages_column]}
    elif "answer" in kinds:
        names[f"{table}.answer_column"] = [data.answer_column]
    if "label" in kinds:
        names[f"{table}.label_column"] = [data.label_column]
    if "pair" in kinds:
        names |= {f"{table}.chosen_column": [data.chosen_column], f"{table}.rejected_column": [data.rejected_column]}
        if data.margin_column:
            names[f"{table}.margin_column"] = [data.margin_column]
    return names | {setting: _own(template) for setting, template in templates_of(data, kinds, table).items()}


def absent_columns(
    data: RowSource, kinds: AbstractSet[DataKind], columns: AbstractSet[str], table: str = "data"
) -> dict[str, list[str]]:
    """Map each setting to the columns that it names and the data lacks.

    Args:
        columns: columns of the data.
    """
    return {
        setting: [column for column in wanted if column not in columns]
        for setting, wanted in named_columns(data, kinds, table).items()
    }


def _own(template: str) -> list[str]:
    return [name for name in template_columns(template)[0] if name not in ALIASES]
