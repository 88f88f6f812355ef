"""Variables of a site: relative paths in them, and misspelt names. Imports little, as every command does it."""

import difflib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

VARIABLES = (
    "RLHF_COMPUTE_PYTHON",
    "RLHF_DATABASE_URL",
    "RLHF_HOME",
    "RLHF_JOB_SECRETS",
    "RLHF_MAX_RESTARTS_PER_HOUR",
    "RLHF_NOTIFY_WEBHOOK_URL",
    "RLHF_PREFECT_AUTH",
    "RLHF_PREFECT_DATABASE_URL",
    "RLHF_RUNS",
    "RLHF_SCHEDULER",
)
"""Variables that users set."""
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


def misspelt(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Find names that resemble a variable of a site, each with that variable.

    Other names with this prefix, such as those that jobs get and those of a site's own scripts, are not found.
    """
    prefix = "RLHF_"
    known = [name.removeprefix(prefix) for name in VARIABLES]
    for name in sorted(variables):
        own = name.removeprefix(prefix)
        if name.startswith(prefix) and own not in known:
            near = difflib.get_close_matches(own, known, n=1, cutoff=0.8)
            yield from ((name, prefix + meant) for meant in near if _similar_by_words(own, meant))


def _similar_by_words(name: str, other: str) -> bool:
    """True for ``DATABASE_URI`` and ``DATABASE_URL``, but not for ``DATABASE_USER``, which is another variable."""
    words, others = name.split("_"), other.split("_")
    return len(words) == len(others) and all(
        difflib.get_close_matches(word, [like], cutoff=0.6) for word, like in zip(words, others, strict=True)
    )
