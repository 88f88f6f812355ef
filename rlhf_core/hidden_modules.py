"""Import of large libraries without what they only import because it is installed."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(module: str) -> Iterator[None]:
    """Make an installed module look missing to imports within the block, unless it is imported already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # marks the module as missing for the import system
    try:
        yield
    finally:
        del sys.modules[module]
