"""Row type of the table of phrases."""

import re
from dataclasses import dataclass

from rlhf_core.diagnosis.logs.evidence_parts import EvidencePart
from rlhf_core.schemas.failures import FailureKind as Kind


@dataclass(frozen=True)
class Signature:
    """Row of the table."""

    kind: Kind
    part: EvidencePart
    example: str
    """Line that this row matches and no earlier row does."""
    patterns: tuple[re.Pattern[str], ...]
    """Alternative patterns, searched in the line without its prefix. The group ``node`` is the suspected node."""
    after: re.Pattern[str] | None = None
    """Pattern that must match before them."""

    def search(self, text: str) -> re.Match[str] | None:
        """Search a text for the first pattern that matches."""
        start = 0
        if self.after is not None:
            before = self.after.search(text)
            if before is None:
                return None
            start = before.end()
        return next((found for pattern in self.patterns if (found := pattern.search(text, start)) is not None), None)


@dataclass(frozen=True, slots=True)
class Matched:
    """Match of a row in a line."""

    row: Signature
    rule: str
    """Pattern that matched."""
    node: str
    """Node named as the cause in the line; empty if there is none."""


def row(kind: Kind, part: EvidencePart, example: str, *patterns: str, after: str = "") -> Signature:
    """Compile a row from its patterns."""
    first = re.compile(after) if after else None
    return Signature(kind, part, example, tuple(re.compile(pattern) for pattern in patterns), first)
