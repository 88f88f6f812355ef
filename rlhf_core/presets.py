"""The shipped presets, and the scripts that they start: all that lies in their folders. Light: help texts name them."""

import difflib
from pathlib import Path

from rlhf_core.errors import BadConfig

_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE / "presets", _PACKAGE.parent / "infra" / "presets")
"""Inside the installed package, and in a checkout."""
_DRIVERS = (_PACKAGE / "drivers", _PACKAGE.parent / "infra" / "trainers")


def _names() -> tuple[str, ...]:
    names = {path.stem for folder in _FOLDERS for path in folder.glob("*.toml")}
    return tuple(sorted(names, key=lambda name: (name != "quickstart", name)))


PRESETS = _names()
"""Names that may be given instead of a config file, the first one to try at first."""


def preset_path(name: str) -> Path:
    """The file of a shipped preset.

    Raises:
        BadConfig: there is none of that name.
    """
    if name not in PRESETS:
        raise BadConfig(f'found no preset "{name}"{nearest_preset(name)}')
    for folder in _FOLDERS:
        path = folder / f"{name}.toml"
        if path.is_file():
            return path
    raise BadConfig(f'preset "{name}" is not part of this installation of rlhf-flows; reinstall the package')


def nearest_preset(name: str) -> str:
    """Hint for a name that is no preset: the nearest one, or else all."""
    near = difflib.get_close_matches(name, PRESETS, n=1)
    return f'; did you mean the preset "{near[0]}"?' if near else f"; shipped presets are {', '.join(PRESETS)}"


def drivers_folder() -> Path:
    """Folder of the scripts that start trainers which have none of their own, such as ``trl_train.py``; it stands
    for ``{drivers}`` in a launch line.

    Raises:
        BadConfig: there is none.
    """
    for folder in _DRIVERS:
        if folder.is_dir():
            return folder
    raise BadConfig(f"found no folder {_DRIVERS[0]}, expected it in every installation; reinstall the package")
