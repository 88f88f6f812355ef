"""Logs for tests of the log classifier, and the kind of failure that it finds in them."""

from rlhf_core.diagnosis.classify import read_log
from rlhf_core.schemas.failures import FailureKind


def kind_of(log: str) -> FailureKind | None:
    """Kind of the failure that a log shows; None if it shows none."""
    failure = read_log(log)
    return failure.kind if failure is not None else None


def trace(*frames: tuple[str, str] | tuple[str, str, str], error: str, prefix: str = "") -> str:
    """A traceback as Python prints it; frames are path, function and, if it matters, code."""
    lines = ["Traceback (most recent call last):"]
    for path, function, *code in frames:
        lines += [f'  File "{path}", line 7, in {function}', f"    {code[0] if code else 'x()'}"]
    return "".join(f"{prefix}{line}\n" for line in [*lines, error])
