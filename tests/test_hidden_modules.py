"""Modules that are hidden while others are imported."""

import importlib
import sys

import pytest

from rlhf_core.hidden_modules import hidden

MODULE = "module_that_is_hidden"


def test_a_module_is_missing_within_the_block_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("modules")
    (folder / f"{MODULE}.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with pytest.raises(ModuleNotFoundError), hidden(MODULE):
            importlib.import_module(MODULE)
        assert importlib.import_module(MODULE).__file__ == str(folder / f"{MODULE}.py")
        with hidden(MODULE):
            assert importlib.import_module(MODULE), "it was imported before"
        del sys.modules[MODULE]
