"""Relative paths in the settings of a site. Imports little, as every command does it."""

import re
from collections.abc import MutableMapping
from pathlib import Path

_PATHS = ("RLHF_HOME", "RLHF_RUNS", "RLHF_COMPUTE_PYTHON", "RLHF_JOB_SECRETS")
RELATIVE_SQLITE = re.compile(r"\Asqlite(?:\+\w+)?:///(?![/~]|:memory:|\Z)")
"""Beginning of the URL of a SQLite file whose path is relative."""


def make_absolute(variables: MutableMapping[str, str]) -> None:
    """Make the paths in the variables of a site absolute, from the current folder.

    Services, flow runs and jobs inherit the variables but start in other folders.
    """
    for name in _PATHS:
        path = variables.get(name, "")
        if path and not path.startswith("~") and (name != "RLHF_COMPUTE_PYTHON" or "/" in path):
            variables[name] = str(Path(path).absolute())
    if url := variables.get("RLHF_DATABASE_URL"):
        variables["RLHF_DATABASE_URL"] = RELATIVE_SQLITE.sub(lambda found: f"{found[0]}{Path.cwd()}/", url)
