"""The shipped presets: what lies in their folder. Light, so that help texts can name them."""

from pathlib import Path

from rlhf_core.errors import BadConfig

_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE / "presets", _PACKAGE.parent / "infra" / "presets")
"""Inside the installed package, and in a checkout."""


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
    for folder in _FOLDERS:
        path = folder / f"{name}.toml"
        if path.is_file():
            return path
    raise BadConfig(f'preset "{name}" is not part of this installation of rlhf-flows; reinstall the package')
