"""Operating system accounts behind claimed names.

User names (of the owner of a run, of the approver of a model) are claims. Each is recorded with the account that the
kernel reports for the process that made it; names that come through Prefect, where all users share one password, are
marked as not verified.
"""

import os
import pwd

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


def attributed_here(name: str = "") -> str:
    """Attribute a name to the account of this process; without a name, to the account alone."""
    return attributed(name or user_name(), account())
