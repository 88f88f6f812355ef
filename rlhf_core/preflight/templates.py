"""Columns named in templates."""

from rlhf_core.data_files import template_columns
from rlhf_core.schemas.run import DataSpec

ALIASES = ("prompt", "answer")
"""Names in templates that stand for the columns which ``data.prompt_column`` and ``data.answer_column`` name."""


def named_columns(data: DataSpec) -> dict[str, list[str]]:
    """Map each setting to the columns that it names."""
    return {
        "data.prompt_column": [data.prompt_column],
        "data.answer_column": [data.answer_column],
        "data.prompt_template": _own(data.prompt_template),
        "data.completion_template": _own(data.completion_template),
    }


def _own(template: str) -> list[str]:
    return [name for name in template_columns(template)[0] if name not in ALIASES]
