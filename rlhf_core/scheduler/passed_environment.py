"""Variables that are passed to a job without being stored: ``slurm.pass_environment`` names them.

Values are read at submission from the environment of the submitting process, or from a file that only its owner may
read. They go into the environment of the process that starts the job, and nowhere else: no request, script, command
line, row or message contains them.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import SubmissionFailed
from rlhf_core.schemas.site import is_private

_LINE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)")


@dataclass(frozen=True)
class PassedEnvironment:
    """Names of the variables passed to a job, and the sources of their values."""

    names: tuple[str, ...] = ()
    file: Path | None = None
    """File with lines ``NAME=value``, mode 600, for names missing from the environment."""

    def values(self) -> dict[str, str]:
        """Look up the values, by name. Call this only when starting the job, and do not keep the result.

        Raises:
            SubmissionFailed: a value is missing, or the file is not usable. The message names the variable.
        """
        found = {name: os.environ[name] for name in self.names if os.environ.get(name)}
        missing = [name for name in self.names if name not in found]
        if missing and self.file is not None:
            stored = read_private(self.file)
            found |= {name: stored[name] for name in missing if stored.get(name)}
        missing = [name for name in self.names if name not in found]
        if missing:
            where = f", or write NAME=value into {self.file} (mode 600)" if self.file is not None else ""
            raise SubmissionFailed(
                f"{', '.join(missing)}: named in slurm.pass_environment but not set where the job is submitted. Set it "
                f"in the environment of this process{where}, then `rlhf resume`"
            )
        return found

    def problem(self) -> str:
        """Reason why the values could not be passed to a job from here; empty if they could."""
        try:
            self.values()
        except SubmissionFailed as error:
            return str(error)
        return ""


def read_private(path: Path) -> dict[str, str]:
    """Read variables from a file that only its owner may read; empty if there is none.

    Raises:
        SubmissionFailed: others may read it, another user owns it, or a line is not ``NAME=value``. The message quotes
            nothing from the file.
    """
    try:
        with path.open("rb") as file:
            _require_private(path, os.fstat(file.fileno()))
            text = file.read().decode("utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SubmissionFailed(f"cannot read {path} (RLHF_JOB_SECRETS): {why}") from None
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None:
            raise SubmissionFailed(f"{path} (RLHF_JOB_SECRETS), line {number}: expected NAME=value")
        found[match["name"]] = _unquoted(match["value"].strip())
    return found


def _require_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SubmissionFailed(f"{path} (RLHF_JOB_SECRETS) is not a file; expected a file with lines NAME=value")
    if found.st_uid != os.geteuid():
        raise SubmissionFailed(
            f"{path} (RLHF_JOB_SECRETS) belongs to user {found.st_uid}, expected {os.geteuid()}, the submitter of the "
            "job: the owner of the file controls the variables of jobs"
        )
    if found.st_mode & 0o077:
        raise SubmissionFailed(
            f"{path} (RLHF_JOB_SECRETS) has mode {stat.S_IMODE(found.st_mode):o}, expected 600: others can access its "
            f"secrets. Run `chmod 600 {path}`, and change the secrets if others could read them"
        )


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'" else value


def without_private(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the control plane's private variables."""
    return {name: value for name, value in environment.items() if not is_private(name)}
