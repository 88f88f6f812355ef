"""Formatting of figures for users: the same in the terminal, in reports and in Prefect."""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

_SHOWN = 5
"""Largest number of step ranges that are listed."""

_LARGEST_WHOLE = 1e15
"""Number from which on powers of ten are written."""

THROUGH_PREFECT = "through Prefect, unverified"
"""Account of a name that was entered in a form of Prefect, or sent to its API."""


def duration(seconds: float) -> str:
    """Format a duration: ``8.2 s``, ``12 s``, ``3 min 05 s``, ``2 h 14 min``."""
    whole = round(seconds)
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(num_bytes: float) -> str:
    """Format a size: ``512 B``, ``1.5 MiB``, ``23.8 GiB``, ``149 GiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if num_bytes >= 1024:
            num_bytes, unit = num_bytes / 1024, larger
    digits = 0 if unit == "B" or num_bytes >= 100 else 1
    return f"{num_bytes:.{digits}f} {unit}"


def figure(value: float, digits: int = 4) -> str:
    """Format a number to some significant digits, a large one to the nearest whole number: ``0.01235``, ``123457``,
    ``1e+20``."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < _LARGEST_WHOLE else text


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 step``, ``2 steps``, ``10,000 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Format a list by its first names: ``node1, node2 and 6 more``."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")


_LONGEST_CLAIM = 128


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Format a table in Markdown, a line per row. Cells are Markdown: the caller has escaped untrusted text."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)]


def attributed(name: str, account: str) -> str:
    """Format a claimed name with the account behind it: ``Head of Safety (anna, uid 1000)``, or shorter if the two are
    the same.

    The part in brackets at the end is never part of the claim.

    Args:
        name: The name as it was entered.
        account: From ``rlhf_core.machine.accounts.account``, or :data:`THROUGH_PREFECT`; empty in records of rlhf-flows
            0.1.
    """
    if not account:
        return name
    # Records truncate names at this length; a longer claim would push the account out.
    claim = name if len(name) <= _LONGEST_CLAIM else f"{name[: _LONGEST_CLAIM - 1]}…"
    return f"{claim} ({account.removeprefix(f'{name}, ')})"


def sentence(text: str) -> str:
    """Format words as a sentence, with a capital letter and a full stop; empty for no words."""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def place_text(attempt: int, restart: int) -> str:
    """Format attempt and restart: ``attempt 1``, ``attempt 1 after restart 2``."""
    return f"attempt {attempt}" + (f" after restart {restart}" if restart else "")


PRUNED_METRICS = (
    "Its metrics by step were removed with `rlhf db prune`, except step times and evaluations; `rlhf db rebuild` reads "
    "them again if its directory still exists"
)
"""Sentence about an old run, without a full stop."""


def missing_steps(known: Collection[int], total: int, state: str) -> str:
    """List the steps of an ended run that have no metrics; empty if none are missing.

    Args:
        known: steps that have metrics.
        total: requested steps.
        state: final state of the run; if it was not completed, only the steps up to its last one were taken.
    """
    if state not in ("completed", "failed", "cancelled"):
        return ""
    made = total if state == "completed" else max(known, default=0)
    missing = sorted(set(range(1, made + 1)) - set(known))
    if not missing:
        return ""
    ranges = _ranges(missing)
    more = " gaps" if len(ranges) > _SHOWN else ""
    return f"no metrics of {len(missing)} of {made} steps: {listed(ranges, _SHOWN)}{more}"


def _ranges(steps: Sequence[int]) -> list[str]:
    """Ranges of consecutive numbers as text: ``3``, ``5-8``."""
    groups = groupby(enumerate(steps), lambda pair: pair[1] - pair[0])
    runs = [[step for _, step in group] for _, group in groups]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
