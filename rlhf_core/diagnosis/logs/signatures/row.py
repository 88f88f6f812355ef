"""Row type of the table of phrases."""

import functools
import re
from dataclasses import dataclass

from rlhf_core.diagnosis.logs.events import EvidencePart
from rlhf_core.schemas.failures import FailureKind as Kind


@dataclass(frozen=True)
class Signature:
    """Row of the table."""

    kind: Kind
    part: EvidencePart
    example: str
    """Line that this row matches and no earlier row does."""
    expressions: tuple[str, ...]
    """Alternative patterns, searched in the line without its prefix. The group ``node`` is the suspected node."""
    after: str | None = None
    """Pattern that must match before them."""
    is_local: bool = False
    """True if the line is about a device of the node that prints it."""

    # Compiled with the first line: the agent and the controller of a run that goes well have the table and search none.
    @functools.cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """The compiled alternatives."""
        return tuple(map(re.compile, self.expressions))

    @functools.cached_property
    def _first(self) -> re.Pattern[str] | None:
        return None if self.after is None else re.compile(self.after)

    def search(self, text: str) -> re.Match[str] | None:
        """Search a text for the first pattern that matches."""
        start = 0
        if self._first is not None:
            before = self._first.search(text)
            if before is None:
                return None
            start = before.end()
        return next((found for pattern in self.patterns if (found := pattern.search(text, start)) is not None), None)


def row(
    kind: Kind, part: EvidencePart, example: str, *expressions: str, after: str | None = None, is_local: bool = False
) -> Signature:
    """Make a row from its patterns."""
    return Signature(kind, part, example, expressions, after, is_local)
