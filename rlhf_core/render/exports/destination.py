"""Destination of an export: the library that writes its format, and the folder that it goes to."""

import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.errors import BadInput
from rlhf_core.machine.installation import pip_install


def require(module: str, target: str) -> None:
    """Check that the library of a format is installed.

    Raises:
        BadInput: it is not; the message says how to install it.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"exporting to {target} needs the package {module}, which is missing here ({error}): "
            f"{pip_install('export')}"
        ) from None


def make_folder(out: Path) -> None:
    """Create the folder to export to.

    Raises:
        BadInput: it cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {out}: {error.strerror}; choose another with --out") from None


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turn an error of writing to a folder into one that names it.

    Raises:
        BadInput: it cannot be written, or an export failed in another way while its disk is full: some libraries wrap
            that error in errors of their own.
    """
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise BadInput(f"cannot write to {out}: {why}. {_ROOM}") from error
    except Exception as error:
        if out.is_dir() and shutil.disk_usage(out).free < _FULL_BYTES:
            raise BadInput(f"cannot write to {out}: its disk is full. {_ROOM}") from error
        raise


_ROOM = "Make room there, or choose another folder with --out; then export again"

_FULL_BYTES = 1 << 20
"""Free space below which a disk counts as full."""
