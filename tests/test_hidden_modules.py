"""Modules that are hidden while others are imported."""

import importlib
import sys
from pathlib import Path

import pytest

from rlhf_core.hidden_modules import hidden

MODULE = "module_that_is_hidden"


def test_a_module_is_missing_within_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError), hidden(MODULE):
        importlib.import_module(MODULE)
    assert importlib.import_module(MODULE).__file__ == str(tmp_path / f"{MODULE}.py")
    with hidden(MODULE):
        assert importlib.import_module(MODULE), "it was imported before"
    del sys.modules[MODULE]
