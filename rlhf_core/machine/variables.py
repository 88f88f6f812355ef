"""Environment variables of this process."""

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def with_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables within the block, and restore their earlier values after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
