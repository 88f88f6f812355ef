"""Fixtures with the lifetime of a test folder; session fixtures would keep running until the session ends."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import pytest

Made = TypeVar("Made")

_KEPT: pytest.StashKey[dict[str, tuple[AbstractContextManager[Any], Any]]] = pytest.StashKey()


def for_folder(request: pytest.FixtureRequest, make: Callable[[], AbstractContextManager[Made]]) -> Made:
    """Make a fixture value for all files of a folder that this process runs in a row; ended after the last.

    Args:
        request: the request of a fixture of scope ``module``; the value is kept under the name of that fixture.
        make: creates the value on first use.
    """
    name, folder = str(request.fixturename), cast("pytest.Dir", request.node.getparent(pytest.Dir))
    kept = folder.stash.setdefault(_KEPT, {})
    if name not in kept:
        context = make()
        kept[name] = context, context.__enter__()

    def end() -> None:
        if name in kept:
            kept.pop(name)[0].__exit__(None, None, None)

    folder.addfinalizer(end)  # added by each file: a rerun of a test drops the folder's finalizers
    return cast("Made", kept[name][1])
