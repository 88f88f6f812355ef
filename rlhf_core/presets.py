"""The shipped presets, and the scripts that they start: all that lies in their folders. Light: help texts name them."""

import difflib
from pathlib import Path

from rlhf_core.errors import BadConfig
from rlhf_core.files.shipped import shipped

_FOLDER = shipped("presets", "presets")
PRESETS = tuple(sorted((path.stem for path in _FOLDER.glob("*.toml")), key=lambda name: (name != "quickstart", name)))
"""Names that may be given instead of a config file, the first one to try at first."""


def preset_path(name: str) -> Path:
    """The file of a shipped preset.

    Raises:
        BadConfig: there is none of that name.
    """
    if name not in PRESETS:
        raise BadConfig(f'found no preset "{name}"{nearest_preset(name)}')
    return _FOLDER / f"{name}.toml"


def nearest_preset(name: str) -> str:
    """Hint for a name that is no preset: the nearest one, or else all."""
    near = difflib.get_close_matches(name, PRESETS, n=1)
    return f'; did you mean the preset "{near[0]}"?' if near else f"; shipped presets are {', '.join(PRESETS)}"


def drivers_folder() -> Path:
    """Folder of the scripts that start trainers which have none of their own, such as ``trl_train.py``; it stands
    for ``{drivers}`` in a launch line."""
    return shipped("drivers", "trainers")
