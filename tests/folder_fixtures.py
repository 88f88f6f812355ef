"""Fixtures that last as long as the tests of a folder: those of a session would be at work to its end."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import pytest

Made = TypeVar("Made")

_KEPT: pytest.StashKey[dict[str, tuple[AbstractContextManager[Any], Any]]] = pytest.StashKey()


def for_folder(request: pytest.FixtureRequest, make: Callable[[], AbstractContextManager[Made]]) -> Made:
    """Make something for all files of a folder that this process runs one after the other; it ends after the last.

    Args:
        request: that of a fixture of scope ``module``, under whose name it is kept.
        make: called when the first of these files asks.
    """
    name, folder = str(request.fixturename), cast("pytest.Dir", request.node.getparent(pytest.Dir))
    kept = folder.stash.setdefault(_KEPT, {})
    if name not in kept:
        context = make()
        kept[name] = context, context.__enter__()

    def end() -> None:
        if name in kept:
            kept.pop(name)[0].__exit__(None, None, None)

    folder.addfinalizer(end)  # by each file: to run a test again forgets those of the folder
    return cast("Made", kept[name][1])
