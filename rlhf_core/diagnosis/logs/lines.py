"""Lines of a log without the prefixes of launchers: text, process and log level.

Ray, torchrun, srun, engines, containers, the kernel and quotations of logs each add their own prefix. Prefixes are
removed from the left, one by one, so the rest of the parser gets the same text from every launcher.
"""

import re
from dataclasses import dataclass

LONGEST_LINE = 4000
"""Maximum number of characters read from a line: the important part is at its start, and long lines would slow the
parser down."""

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]{0,200}\x07")
"""Escape sequences of terminals, for colours for instance."""
_PROCESS = re.compile(
    r"\((?P<ray>[A-Z_a-z][^()=]{0,60}? ?pid=\d+[^()]{0,80})\) ?"  # Ray, and engines that follow its form
    r"|\[(?P<rank>(?:rank|default|[\w.-]{1,40}:)?\d{1,5})\]:? ?(?!loss)"  # torchrun; "[12, 100] loss" is a step
    r"|\[(?P<mpi>\d+,\d+)\]<std(?:out|err)>:? ?"
    r"| {0,3}(?P<srun>\d{1,5}): "  # padded to the width of the largest; quoted code is indented by four
    r"|(?P<compose>[a-z][\w.-]{0,40}?)[ ]{1,20}\| "
    r"|\((?P<raylet>raylet|autoscaler|gcs_server)[^()]{0,60}\) ?"
)
_WHEN = re.compile(
    r"\[?\d{4}[-/]\d\d[-/]\d\d[-T ,]+\d\d:\d\d:\d\d[\d.,:]*(?:Z|[+-]\d\d:?\d\d)?"
    r"(?: [A-Z]{2}\d+)*(?: [A-Z]{3,4}\b)?\]? ?"
    r"|\[ *\d{1,9}\.\d{6}\] "  # the kernel: seconds since its start
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,60} (?=\S)"  # syslog, with its host
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]? "
)
_LOUD = re.compile(
    r"(?:\[(?:ERROR|CRITICAL|FATAL)\]|(?:ERROR|CRITICAL|FATAL)(?= \d\d-\d\d | ?\[|:| -| \|))[:|]?"
    r"(?: \d\d-\d\d [\d:]{8})?(?: \[[\w./-]{1,120}:\d+\])? ?[-|]? ?"
    r"|\[[\w./-]{1,120}\.(?:py|cc|cpp|cu):\d+(?::\w+)?\] "
)
_QUOTED = re.compile(r"(?:[>#*|`│❌-]|//|\*\*|\d{1,2}\.|(?:E|error|what\(\)):(?= )) ?(?=\S)|[`\"'] ?(?=[A-Za-z])")
"""Marks of comments, lists, tables and quotations, of boxes around errors, and of pytest and C++ before a message."""
_MOST_PREFIXES = 8

_QUIET = re.compile(
    r"^\[?[WID]\d{3,4}\b|^\[[WI]\b|^\[?(?:WARN|WARNING|INFO|DEBUG|NOTICE)\b(?!.{0,3}Error)"
    r"|^.{0,80}(?:[\[|] ?(?:WARN(?:ING)?|INFO|DEBUG|NOTICE) ?[\]|:]|[ -] ?(?:WARNING|INFO|DEBUG) +[-|:] |\bWARNING: "
    r"|\blevel=(?:warn|info|debug)|\"level\":\"(?:WARN|INFO|DEBUG))"
    r"|^.{0,200}(?:NCCL INFO\b|[a-z]Warning: |\bUserWarning\b)"
    r"|^.{0,60}\d (?:INFO|DEBUG|WARNING)(?:[: ]|$)"
)
_NCCL_WARNING = re.compile(r"NCCL WARN\b")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    number: int
    """Number of the line, from 0."""
    text: str
    """Text without its prefix; leading blanks mark the lines that a traceback quotes."""
    process: str
    """Labels of the process that printed it, outermost first; empty if there are none."""
    is_quiet: bool
    """True if it was logged as a warning or below, which is not a failure by itself."""
    raw: str
    """Line as printed."""


def read_line(raw: str, number: int = 0) -> LogLine:
    """Split a line into process, level and text."""
    text = raw[:LONGEST_LINE].rstrip()
    if "\x1b" in text:
        text = ANSI.sub("", text)
    process, is_quiet = "", False
    for _ in range(_MOST_PREFIXES):
        is_quiet = is_quiet or (_QUIET.match(text) is not None and _NCCL_WARNING.search(text, 0, 200) is None)
        label = _PROCESS.match(text)
        if label is not None:
            process = f"{process} {next(part for part in label.groups() if part)}".lstrip()
            text = text[label.end() :]
            continue
        found = _WHEN.match(text) or _LOUD.match(text)
        if found is None and not text.startswith(" "):
            found = _QUOTED.match(text)
        if found is None or found.end() == 0:
            break
        text = text[found.end() :]
    return LogLine(number, text, process, is_quiet, raw)
