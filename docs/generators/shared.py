"""Parts of all generated pages."""

import inspect
import textwrap

GENERATED = "<!-- Made by docs/generate.py (make docs). Change the code, not this page. -->\n"


def prose(text: str) -> str:
    """Paragraphs of a docstring, wrapped."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(paragraph.split()), 118) for paragraph in paragraphs)


def code(text: str) -> str:
    """Format a text as code in a cell of a table."""
    return f"`{cell(text)}`"


def cell(text: str) -> str:
    """Escape a text for a cell of a table."""
    return text.replace("``", "`").replace("|", "\\|")
