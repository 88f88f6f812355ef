"""Escaping of untrusted text: one function for each place in which such text is shown. Pure.

Completions of a model, messages of exceptions, names on a form and lines of a log are read on pages, in terminals and
in spreadsheets, all of which act upon some characters. Nothing is dropped: a character that would act is shown by its
number, as Python writes it (``\\x1b``, ``\\u202e``).
"""

import json
import re
from typing import Any

_NUMBERED = re.compile(
    r"[\x00-\x1f\x7f-\x9f"  # C0 with ESC, DEL, C1 with CSI and OSC
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the order of writing (Unicode TR 9)
    r"\u2028\u2029"  # ends of lines that are none in a file
    r"\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags: invisible text
    r"\ud800-\udfff]"  # halves of a character, which no file and no terminal takes
)
_LINE_ENDS = re.compile(r"\r\n?")

_MARKUP = re.compile(r"[\\`*{}\[\]<>#|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|&(?=[#A-Za-z])|(?<=\w)@(?=\w)")
"""An underscore within a word, as in most names, begins nothing."""
_ADDRESS = re.compile(r":(?=//)|(?<=www)\.", re.IGNORECASE)
"""Places in which GitHub's Markdown, and that of Prefect's UI, makes a link of a bare address."""
_BLOCK = re.compile(r"(?:[-+](?=[\s-]|\Z)|=|(?<=\d)[.)](?=\s|\Z))")
"""Beginnings of lists, rules and underlined headings; looked for at the beginning of a text alone."""
_NUMBER_OF_ITEM = re.compile(r"\d{1,9}")

_FORMULA = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf|nan|infinity)", re.IGNORECASE)

_NOT_PRINTABLE_IN_YAML = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")

HARD_SPACES = "\u00a0\u00a0"


def visible(text: str) -> str:
    """Show every character that acts or hides by its number; ends of lines and tabs too."""
    return _NUMBERED.sub(_number, text)


def terminal(text: str) -> str:
    """Escape a text for a terminal: it colours nothing, moves no cursor, sets no title and fills no clipboard.

    Ends of lines and tabs stay; a lone carriage return ends a line, so that nothing is written over.
    """
    return _NUMBERED.sub(lambda found: found[0] if found[0] in "\n\t" else _number(found), _LINE_ENDS.sub("\n", text))


def markdown(text: str) -> str:
    """Escape a text for one line of Markdown, or one cell of its tables, in which it begins and ends nothing: no
    heading, list, link, picture, code or HTML. White space becomes single spaces."""
    line = " ".join(text.split())
    line = _MARKUP.sub(r"\\\g<0>", visible(line))
    line = _ADDRESS.sub(r"\\\g<0>", line)
    number = _NUMBER_OF_ITEM.match(line)
    begins = _BLOCK.match(line, number.end() if number else 0)
    return line if begins is None else f"{line[: begins.start()]}\\{line[begins.start() :]}"


def markdown_quote(text: str) -> str:
    """Quote a text of any number of lines as a block of Markdown."""
    return "\n".join(f"> {markdown(line)}" for line in text.splitlines())


def markdown_code(text: str, *, in_table: bool = False) -> str:
    """Write a text as code in a line of Markdown: nothing in it can end the code. Indentation is kept.

    Args:
        in_table: The line is a row of a table, which a bar in code would cut in some renderers: then it is no code.
    """
    if in_table and "|" in text:
        return markdown(text)
    line = visible(text.expandtabs(4)).replace("  ", HARD_SPACES)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    tick, space = "`" * (longest + 1), " " if longest else ""
    return f"{tick}{space}{line}{space}{tick}" if line.strip() else markdown(line)


def csv_cell(value: Any) -> Any:
    """Escape a cell of a CSV file: spreadsheets calculate what begins with ``=``, ``+``, ``-`` or ``@``.

    Such a text gets an apostrophe before it, and so does one that begins with an apostrophe: taking one off gives the
    text back. Numbers stay.
    """
    if not isinstance(value, str):
        return value
    first = value.lstrip()[:1]
    acts = first in _FORMULA or first == "'" or value[:1] in ("\t", "\r", "\n")
    return f"'{storable(value)}" if value and acts and not _PLAIN_NUMBER.fullmatch(value) else storable(value)


def yaml_scalar(text: str) -> str:
    """Write a text as a double-quoted scalar of YAML 1.2.

    Not as JSON writes it: there a character beyond the 16 bits is two halves, which YAML reads as two characters.
    """
    quoted = storable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_NUMBERED.sub(_number, _NOT_PRINTABLE_IN_YAML.sub(_number, quoted))}"'


def json_text(value: object, indent: int | None = None, *, allow_nan: bool = True) -> str:
    """Write plain data as JSON for files and terminals: the same data, with characters that would act as escapes.

    Raises:
        ValueError: a number is not finite, and that is not allowed.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=allow_nan)
    # Ends of lines and tabs that are left stand between the values: inside of them JSON has escaped its own.
    return _NUMBERED.sub(lambda found: found[0] if found[0] in "\n\t" else _json_number(found[0]), text)


def storable(text: str) -> str:
    """Show halves of a character by their number: everything else can be written to a file as it is."""
    return re.sub(r"[\ud800-\udfff]", _number, text)


def _number(found: "re.Match[str]") -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_number(character: str) -> str:
    return json.dumps(character)[1:-1]
