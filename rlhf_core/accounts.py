"""The operating system's user behind a name that anybody can type.

Names of people (who asks for a run, who approves a model) are claims. Beside each of them stands what the kernel says
of the process that made it; what comes through Prefect, where all have one password, is marked as not verified.
"""

import os
import pwd

from rlhf_core.formatting import attributed


def user_name() -> str:
    """Name of the user of this process, whatever its environment says; the number where there is none (containers)."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def account() -> str:
    """User of this process as the kernel knows it, for example ``anna, uid 1000``."""
    return f"{user_name()}, uid {os.getuid()}"


def attributed_here(name: str = "") -> str:
    """The same for whoever uses this process; without a name, as its user."""
    return attributed(name or user_name(), account())
