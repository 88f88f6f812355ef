"""Parser of tracebacks in a log: the printed error, with its frames.

Blocks of several processes may be interleaved: the label of the process separates them. A block may also be truncated
at its start, at its end, or in the middle.
"""

import re
from dataclasses import dataclass, field

from rlhf_core.diagnosis.logs.lines import LogLine

_FRAMES = (
    re.compile(r'^\s*File "(?P<path>[^"]{1,400})", line \d+(?:, in (?P<function>\S+))?'),
    re.compile(r"^\s*File (?P<path>[^\s\"]{1,400}):\d+, in (?P<function>[^\s(]+)"),  # IPython
    re.compile(r"^\s*(?P<path>[^\s\"]{1,400}\.py):\d+:? in\b[ │]*(?P<function>[^\s(│]+)?"),  # Rich, pytest
)
"""Frames as Python, IPython, Rich and pytest print them."""
_HEADER = re.compile(r"[╭─]{0,80} ?Traceback \(most recent call last\)|^Unhandled error \(suppress with")
_IN_A_BOX = re.compile(r"^\s*(?:\([^)]{1,100}\) ?|\[\w+\]:? ?)?[│╰❱]")
_MARKED = re.compile(r"❱ *\d+ [ │]*(?P<code>\S.*?)[ │]*$")
"""The line of code of a frame in a box of Rich."""
_DURING = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_IGNORED = re.compile(r"^(?:Exception ignored |Error in atexit\._run_exitfuncs:)")
"""Announcement of an error that Python prints without ending the program."""
_CLASS = (
    r"(?P<name>(?:[A-Za-z_]\w{0,60}\.){1,8}[A-Za-z_]\w{0,80}|[A-Z_]\w{0,80}|gaierror|timeout)(?P<inner>\(\w{1,80}\))?"
)
_LAST = re.compile(rf"^{_CLASS}(?:: (?P<message>.*)|:?$)")
"""Last line of a traceback: any class."""
_ANYWHERE = re.compile(
    r"(?:^|(?<=[\s`'\"(\[|:*>=（“]))(?P<name>(?:[A-Za-z_]\w{0,60}\.){0,8}"
    r"(?:_?[A-Z]\w{0,60}?(?:Error|Exception|Exit|Expired|Conflict|Timeout|Invalid|NotFound)|Exception(?=: \S)))"
    r"(?P<inner>\(\w{1,80}\))?(?:[:：] {0,4}(?P<message>\S.*)|[:`'\"]?$)"
)
"""Error in other text, where only names with the suffix of an error class count."""
_CODE = re.compile(r"\b(?:except|raise|assert|isinstance|import|pytest\.raises|class|catch|->)\b[^:]{0,60}$")
MOST_FRAMES = 60
CUT_OFF = 40
"""Number of other lines of its process after which a traceback without an error counts as truncated."""
CONTINUED = 3
"""Number of further lines that may belong to a message wrapped by Ray or an engine."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Frame of a traceback."""

    path: str
    function: str
    code: str
    """Line of code; empty if it was not printed."""


@dataclass(frozen=True, slots=True)
class Raised:
    """Printed error."""

    name: str
    """Class as printed, with its module if there was one."""
    inner: str
    """Class named by a wrapper, as in ``RayTaskError(OutOfMemoryError)``."""
    message: str
    frames: tuple[Frame, ...]
    """Frames, outermost first; empty for an error without a traceback."""
    line: LogLine
    is_later: bool
    """True if it was raised during the handling of another error."""
    is_ignored: bool = False
    """True if Python printed it without ending the program, as it does for errors in ``__del__``."""

    @property
    def error(self) -> str:
        """Class without its module."""
        return self.name.rpartition(".")[2]


@dataclass
class _Block:
    """Incomplete traceback of one process."""

    frames: list[Frame] = field(default_factory=list)
    code_expected: bool = False
    is_open: bool = False
    is_later: bool = False
    is_ignored: bool = False
    was_ignored: bool = False
    """True if the last error was ignored, and with it those raised during its handling."""
    wrapped: str = ""
    """Start of a frame that did not fit into a line of its box."""
    others: int = 0
    """Number of lines of the process since the last one that belonged to the block."""


def _frame(text: str) -> re.Match[str] | None:
    return next((found for pattern in _FRAMES if (found := pattern.match(text)) is not None), None)


class TracebackReader:
    """Line-by-line parser of tracebacks."""

    def __init__(self) -> None:
        """Start without an open block."""
        self._blocks: dict[str, _Block] = {}
        self._open: set[str] = set()

    @property
    def is_open(self) -> bool:
        """True if a traceback has started and its error has not been read."""
        return bool(self._open)

    @property
    def is_cut_off(self) -> bool:
        """True if, at the end of a log, a traceback is truncated whose error is not ignored."""
        return any(not self._blocks[process].is_ignored for process in self._open)

    @property
    def last_frames(self) -> tuple[Frame, ...]:
        """Frames of the last block without a label."""
        return tuple(self._blocks[""].frames) if "" in self._blocks else ()

    def read(self, line: LogLine) -> "Raised | bool":
        """Return the error that ends a block in this line or is named in it; otherwise True if the line is part of a
        block."""
        block = self._blocks.setdefault(line.process, _Block())
        read = self._read(block, line)
        # Kept apart, because a log may name thousands of processes.
        (self._open.add if block.is_open else self._open.discard)(line.process)
        return read

    def _read(self, block: _Block, line: LogLine) -> "Raised | bool":
        frame = _frame(block.wrapped + line.text.strip() if block.wrapped else line.text)
        block.wrapped = ""
        if frame is not None:
            if not block.is_open:
                block.frames.clear()
            block.is_open, block.code_expected, block.others = True, True, 0
            if len(block.frames) < MOST_FRAMES:
                block.frames.append(Frame(frame["path"], frame["function"] or "", ""))
            return True
        header = _HEADER.search(line.text)
        if header is not None and (header.start() == 0 or line.text.endswith("last):")):
            block.is_ignored = block.is_ignored and not block.frames
            block.frames.clear()
            block.is_open, block.code_expected, block.others = True, False, 0
            # Text before it, such as "Scheduler hit an exception:", counts as a separate line.
            return header.start() == 0
        if block.is_open and line.text.startswith(("    ", "\t")):
            self._quote(block, line.text)
            return True
        if block.is_open and _IN_A_BOX.match(line.raw) is not None:
            block.wrapped = line.text.strip(" │") if line.text.startswith("/") else ""
            marked = _MARKED.search(line.raw)
            if marked is not None:
                self._quote(block, marked["code"])
            return True
        if _DURING.match(line.text):
            block.is_later = True
            block.is_ignored = block.was_ignored
            return True
        if _IGNORED.match(line.text) is not None:
            block.frames.clear()
            block.is_open, block.is_ignored, block.others = True, True, 0
            return True
        raised = self._error(block, line)
        if raised is None and block.is_ignored and not block.frames:
            block.is_open = block.is_ignored = False  # neither a traceback nor an error follows
        block.others += 1
        if block.others > CUT_OFF:
            block.is_open = block.is_ignored = False
        return raised or False

    @staticmethod
    def _quote(block: _Block, text: str) -> None:
        if block.code_expected and block.frames and set(text.strip()) - set("^~ "):
            last = block.frames[-1]
            block.frames[-1] = Frame(last.path, last.function, text.strip()[:300])
            block.code_expected = False

    @staticmethod
    def _error(block: _Block, line: LogLine) -> Raised | None:
        ended = _LAST.match(line.text) if block.is_open and block.frames else None
        found = ended or _ANYWHERE.search(line.text)
        if found is None or (ended is None and _CODE.search(line.text[: found.start("name")])):
            return None
        message = (found["message"] or "").strip()
        inner = (found["inner"] or "").strip("()")
        raised = Raised(found["name"], inner, message, tuple(block.frames), line, block.is_later, block.is_ignored)
        block.was_ignored = block.is_ignored
        block.is_open = block.is_later = block.is_ignored = False
        block.frames = []
        return raised
