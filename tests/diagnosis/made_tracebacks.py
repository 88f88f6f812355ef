"""Tracebacks for tests of the log classifier."""


def trace(*frames: tuple[str, str] | tuple[str, str, str], error: str, prefix: str = "") -> str:
    """A traceback as Python prints it; frames are path, function and, if it matters, code."""
    lines = ["Traceback (most recent call last):"]
    for path, function, *code in frames:
        lines += [f'  File "{path}", line 7, in {function}', f"    {code[0] if code else 'x()'}"]
    return "".join(f"{prefix}{line}\n" for line in [*lines, error])
