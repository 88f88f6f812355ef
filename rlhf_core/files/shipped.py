"""Files and folders that come with this program beside its modules."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped(installed: str, in_checkout: str) -> Path:
    """Locate a file or folder that comes with this program.

    Args:
        installed: its place in the package of an installation.
        in_checkout: its place in ``infra`` of a checkout.
    """
    path = _PACKAGE / installed
    return path if path.exists() else _PACKAGE.parent / "infra" / in_checkout
