"""Folder fixture for throw-away clusters."""

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name: pytest's own, named after the test, is too long for Unix sockets."""
    return tmp_path_factory.mktemp("short")
