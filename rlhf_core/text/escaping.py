"""Escaping of untrusted text: one function for each place where such text is shown. Pure.

Completions of a model, messages of exceptions, names in a form and lines of a log are read on pages, in terminals and
in spreadsheets, all of which interpret some characters. Nothing is dropped: such a character is shown as its escape
sequence in Python's notation (``\\x1b``, ``\\u202e``).
"""

import html
import json
import re
from typing import Any

_NUMBERED = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # C0 with ESC, DEL, C1 with CSI and OSC
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional text (Unicode TR 9)
    r"\u2028\u2029"  # line separators that do not end a line in a file
    r"\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags: invisible text
    r"\ud800-\udfff]"  # lone surrogates, which no file or terminal accepts
)
_LINE_ENDS = re.compile(r"\r\n?")

_MARKUP = re.compile(r"[\\`*{}\[\]<>#|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|&(?=[#A-Za-z])|(?<=\w)@(?=\w)")
"""An underscore within a word, as in most names, is not markup and not matched."""
_ADDRESS = re.compile(r":(?=//)|(?<=www)\.", re.IGNORECASE)
"""Places where GitHub's Markdown, and that of Prefect's UI, turns a bare address into a link."""
_BLOCK = re.compile(r"(?:[-+](?=[\s-]|\Z)|=|(?<=\d)[.)](?=\s|\Z))")
"""Beginnings of lists, rules and underlined headings; matched only at the beginning of a text."""
_NUMBER_OF_ITEM = re.compile(r"\d{1,9}")

_FORMULA = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf|nan|infinity)", re.IGNORECASE)

_NOT_PRINTABLE_IN_YAML = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")

HARD_SPACES = "\u00a0\u00a0"


def visible(text: str) -> str:
    """Escape every control or invisible character, including line breaks and tabs."""
    return _NUMBERED.sub(_number, text)


def terminal(text: str) -> str:
    """Escape a text for a terminal: it sets no colours, moves no cursor, sets no title and fills no clipboard.

    Line breaks and tabs stay; a lone carriage return becomes a line break, so that nothing is overwritten.
    """
    return _NUMBERED.sub(lambda found: found[0] if found[0] in "\n\t" else _number(found), _LINE_ENDS.sub("\n", text))


def page(text: str) -> str:
    """Escape a text for HTML: it contains no markup, and no character that a browser hides or that reorders the text
    around it. Line breaks and tabs stay."""
    return html.escape(terminal(text))


def markdown(text: str) -> str:
    """Escape a text for one line of Markdown, or one cell of a table, so that it contains no markup: no heading, list,
    link, image, code or HTML. White space becomes single spaces."""
    line = " ".join(text.split())
    line = _MARKUP.sub(r"\\\g<0>", visible(line))
    line = _ADDRESS.sub(r"\\\g<0>", line)
    number = _NUMBER_OF_ITEM.match(line)
    begins = _BLOCK.match(line, number.end() if number else 0)
    return line if begins is None else f"{line[: begins.start()]}\\{line[begins.start() :]}"


def markdown_quote(text: str) -> str:
    """Quote a text of any number of lines as a Markdown block quote."""
    return "\n".join(f"> {markdown(line)}" for line in text.splitlines())


def markdown_code(text: str, *, in_table: bool = False) -> str:
    """Write a text as code in a line of Markdown, such that nothing in it can end the code. Indentation is kept.

    Args:
        in_table: The line is a row of a table, where some renderers split code at a bar: such a text is not written as
            code.
    """
    if in_table and "|" in text:
        return markdown(text)
    line = visible(text.expandtabs(4)).replace("  ", HARD_SPACES)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    tick, space = "`" * (longest + 1), " " if longest else ""
    return f"{tick}{space}{line}{space}{tick}" if line.strip() else markdown(line)


def csv_cell(value: Any) -> Any:
    """Escape a cell of a CSV file: spreadsheets evaluate text that begins with ``=``, ``+``, ``-`` or ``@``.

    Such a text is prefixed with an apostrophe, and so is one that begins with an apostrophe: removing one restores the
    text. Numbers stay as they are.
    """
    if not isinstance(value, str):
        return value
    first = value.lstrip()[:1]
    acts = first in _FORMULA or first == "'" or value[:1] in ("\t", "\r", "\n")
    return f"'{storable(value)}" if value and acts and not _PLAIN_NUMBER.fullmatch(value) else storable(value)


def yaml_scalar(text: str) -> str:
    """Write a text as a double-quoted YAML 1.2 scalar.

    This differs from JSON, which writes a character beyond 16 bits as two surrogates, which YAML reads as two
    characters.
    """
    quoted = storable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_NUMBERED.sub(_number, _NOT_PRINTABLE_IN_YAML.sub(_number, quoted))}"'


def json_text(value: object, indent: int | None = None, *, allow_nan: bool = True) -> str:
    """Write plain data as JSON for files and terminals: the same data, with control and invisible characters escaped.

    Raises:
        ValueError: a number is not finite, and that is not allowed.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=allow_nan)
    # The remaining line breaks and tabs are between the values: within values, JSON has escaped them.
    return _NUMBERED.sub(lambda found: found[0] if found[0] in "\n\t" else _json_number(found[0]), text)


def storable(text: str) -> str:
    """Escape lone surrogates: everything else can be written to a file as it is."""
    return re.sub(r"[\ud800-\udfff]", _number, text)


def _number(found: "re.Match[str]") -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_number(character: str) -> str:
    return json.dumps(character)[1:-1]
