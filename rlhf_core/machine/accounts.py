"""Operating system accounts behind claimed names.

User names (of the owner of a run, of the approver of a model) are claims. Each is recorded with the account that the
kernel reports for the process that made it; names that come through Prefect, where all users share one password, are
marked as not verified.
"""

import os
import pwd
from pathlib import Path

from rlhf_core.errors import BadConfig
from rlhf_core.text.formatting import attributed


def user_name(uid: int | None = None) -> str:
    """Name of a user, by default the user of this process, regardless of its environment; the uid if it has no name
    (containers)."""
    number = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def account() -> str:
    """User of this process as the kernel reports it, for example ``anna, uid 1000``."""
    return f"{user_name()}, uid {os.getuid()}"


def expanded(text: str) -> Path:
    """The path, with ``~`` and ``~user`` at its beginning replaced by the home folder.

    Raises:
        BadConfig: there is no such user, or this one has no home folder (containers).
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        name = text.partition("/")[0][1:]
        why = f"there is no user {name}; " if name else f"{account()}, has no home folder; set HOME, or "
        raise BadConfig(f"found the path {text}, but {why}give an absolute path") from None


def attributed_here(name: str = "") -> str:
    """Attribute a name to the account of this process; without a name, to the account alone."""
    return attributed(name or user_name(), account())
