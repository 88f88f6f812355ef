"""Folders for throw-away clusters."""

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name: pytest's own, named after the test, is too long for the unix sockets in it."""
    return tmp_path_factory.mktemp("short")
