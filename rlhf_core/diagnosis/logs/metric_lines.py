"""Metric lines of a training: evidence that it continued after an error or diverged."""

import math
import re
from collections.abc import Sequence

_STEP = re.compile(
    r"(?i)\b(global_?step|step|iter(ation)?|epoch)s?\b(\(train\))?\W{0,12}\[?\d+.*\b(\w+_)?(loss|rewards?)\b|"
    r"\bsteps?=\d+, skipped=\d+, lr=|\bstep:\d+ - \w+/\w+|"
    r"^\W{0,3}'?loss'?: |^\[ *\d+, +\d+\] loss"
)
_FINISHED = re.compile(
    r"(?i)'train_runtime'|\btraining (is |has )?(been )?(done|finished|complete|completed)\b|\bwas successful\b|"
    r"\bsuccessfully (finished|completed)|(?:^|[\s:|\]])\*{3,} \w+ metrics \*{3,}|"
    r"^Job '\S+' succeeded|^Process finished with exit code 0\b|\bState: COMPLETED \(exit code 0\)|"
    r"\bEnd time of running main"
)
_REQUEUED = re.compile(r"(?i)\brequeu(?:e?ing|ed) (?:the )?(?:slurm )?job:? \d+")
_BAR = re.compile(r"\d+%\|.{0,400}?\b(?P<done>\d+)/(?P<total>\d+) \[")
_ANY_BAR = re.compile(r"\d+%\|")
"""Progress bar. It is printed again when a process dies, so only a bar that advances counts."""

_NORM_OR_LOSS = re.compile(
    r"(?i)\b(?P<name>(?:\w+[_ ])?loss(?: \d+(?=:))?|grad(?:ient)?[_ ]norm)['\"]?\s*[:= ]\s*"
    r"(?:['\"]|np\.float\d+\()?(?P<value>[-+]?(\d[\w.+-]*|nan\b|inf\b))"
)
"""Transformers 5 quotes its values, and NumPy 2 shows their types."""
_SCALE = re.compile(r"(?i)\bloss[_ ]scale['\"]?\s*[:=]\s*(?P<value>[\d.]+)")
NON_FINITE_LINES = 2
"""Number of consecutive non-finite gradient norms: mixed precision occasionally produces a single one."""
EXPLODED_NORM = 1e4
"""Gradient norm from which training does not recover while its loss scale falls."""


def is_progress(line: str) -> bool:
    """Return True if the line shows a completed step."""
    return _ANY_BAR.search(line) is None and (_STEP.search(line) is not None or is_end(line))


def bar(line: str) -> tuple[int, int] | None:
    """Parse a progress bar: steps done and total steps; None if the line is not a progress bar."""
    if "%|" not in line:
        return None
    found = _BAR.search(line)
    return (int(found["done"]), int(found["total"])) if found is not None else None


def is_requeued(line: str) -> bool:
    """Return True if the line reports that a training has saved and requeued its job."""
    return _REQUEUED.search(line) is not None


def is_metric(line: str) -> bool:
    """Return True if the line contains a loss or a gradient norm."""
    return bool(_values(line))


def is_end(line: str) -> bool:
    """Return True if the line reports that training completed."""
    return _FINISHED.search(line) is not None


def divergence(lines: Sequence[str]) -> str | None:
    """Find the line that shows divergence: the last of several consecutive lines with a non-finite loss or norm, or
    with exploded gradient norms while the loss scale fell. None without divergence."""
    metrics = [line for line in lines if _values(line)]
    last = metrics[-NON_FINITE_LINES:]
    if last and (_loss_is_not_finite(last[-1]) or (len(last) == NON_FINITE_LINES and all(map(_not_finite, last)))):
        return last[-1]
    scales = [float(found["value"].rstrip(".")) for line in metrics if (found := _SCALE.search(line)) is not None]
    exploded = [line for line in metrics if _norm(line) >= EXPLODED_NORM]
    if len(exploded) >= NON_FINITE_LINES and exploded[-1] == metrics[-1] and scales and scales[-1] < scales[0]:
        return exploded[-1]
    return None


def _values(line: str) -> list[tuple[str, float]]:
    found = []
    for match in _NORM_OR_LOSS.finditer(line):
        try:
            found.append((match["name"].lower(), float(match["value"].rstrip(".,"))))
        except ValueError:
            continue
    return found


def _not_finite(line: str) -> bool:
    return any(not math.isfinite(value) for _, value in _values(line))


def _loss_is_not_finite(line: str) -> bool:
    return any(not math.isfinite(value) for name, value in _values(line) if "loss" in name)


def _norm(line: str) -> float:
    return max((value for name, value in _values(line) if "norm" in name), default=0.0)
