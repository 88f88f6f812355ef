"""Columns named in templates."""

import string

from rlhf_core.schemas.run import DataSpec

ALIASES = ("prompt", "answer")
"""Names in templates that stand for the columns which ``data.prompt_column`` and ``data.answer_column`` name."""


def template_columns(template: str) -> tuple[list[str], str]:
    """Parse the names in a template and its problem (empty if it is well-formed).

    The same rules as on the nodes: plain ``{column}`` only; ``{{`` and ``}}`` stand for braces.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        return [], f"{error}; write {{{{ and }}}} for braces that stand for themselves"
    names = []
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if not name or form or conversion or "." in name or "[" in name:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            return [], f"found {{{shown}}}, expected {{column}} with the plain name of a column"
        names.append(name)
    return list(dict.fromkeys(names)), ""


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
