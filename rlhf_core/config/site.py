"""Settings of a site: `rlhf.toml`, and the variables that override it."""

import contextlib
import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.config.fields import SITE_TABLES
from rlhf_core.config.problems import MAX_PROBLEMS, explain, flags_for_numbers
from rlhf_core.config.site_paths import RELATIVE_SQLITE
from rlhf_core.config.toml_files import SHOWN_CHARACTERS, read_toml, readable, shortened
from rlhf_core.errors import BadConfig
from rlhf_core.files import private as private_files
from rlhf_core.machine.accounts import expanded
from rlhf_core.schemas.base import Schema, storable_text
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.site import ExportSite, NotifySite, PrefectSite, RetentionSite


@dataclass(frozen=True)
class Site:
    """Places and settings of this site. Environment variables win over ``rlhf.toml``, which wins over the defaults."""

    home: Path
    """``RLHF_HOME``: this user's folder (default ``~/.rlhf``)."""
    runs_dir: Path
    """``RLHF_RUNS``: the run directories; on a cluster, a shared file system visible to the nodes (default
    ``<home>/runs``)."""
    database_url: str
    """``RLHF_DATABASE_URL``: SQLAlchemy URL of the history (default SQLite in ``<home>/history.db``)."""
    scheduler: str
    """``RLHF_SCHEDULER``: ``local`` or ``slurm`` (default ``local``)."""
    compute_python: str
    """``RLHF_COMPUTE_PYTHON``: interpreter started on the nodes (default: this one)."""
    max_restarts_per_hour: int = 60
    """``RLHF_MAX_RESTARTS_PER_HOUR``: limit on restarts and new attempts per hour, over all runs of the history; above
    it further attempts wait (default 60). If everything fails, the cluster is at fault, and immediate retries make it
    worse."""
    prefect: PrefectSite = dataclasses.field(default_factory=PrefectSite)
    """``[prefect]``: Prefect settings of ``rlhf up``."""
    notify: NotifySite = dataclasses.field(default_factory=NotifySite)
    """``[notify]``: recipients of notifications."""
    retention: RetentionSite = dataclasses.field(default_factory=RetentionSite)
    """``[retention]``: removal by the site daemon."""
    export: ExportSite = dataclasses.field(default_factory=ExportSite)
    """``[export]``: experiment trackers that show all runs in progress."""
    job_secrets: Path | None = None
    """``RLHF_JOB_SECRETS``: file with the values of ``slurm.pass_environment``, as lines ``NAME=value``; it must have
    mode 600 and belong to the submitting user (default ``<home>/job-secrets.env``)."""
    slurm: SlurmSpec = dataclasses.field(default_factory=SlurmSpec)
    """``[slurm]``: a table of ``rlhf.toml`` with the settings of the section ``slurm`` of a run: Slurm options of every
    job, unless the run overrides them. Lists and variables of both are merged."""


SITE_KEYS = {
    "runs": "RLHF_RUNS",
    "database_url": "RLHF_DATABASE_URL",
    "scheduler": "RLHF_SCHEDULER",
    "compute_python": "RLHF_COMPUTE_PYTHON",
    "max_restarts_per_hour": "RLHF_MAX_RESTARTS_PER_HOUR",
    "job_secrets": "RLHF_JOB_SECRETS",
}
"""Settings of ``rlhf.toml`` outside its tables, and the variable that overrides each."""
_PATHS = ("runs", "job_secrets")
_SECRETS = {
    "prefect": {"database_url": "RLHF_PREFECT_DATABASE_URL"},
    "notify": {"webhook_url": "RLHF_NOTIFY_WEBHOOK_URL"},
}
"""Settings that may contain a password, and the variable that keeps each out of files."""
SCHEDULERS = ("local", "slurm")
_DATABASES = tuple(
    f"{name}{suffix}" for name in ("history.db", "prefect/prefect.db") for suffix in ("", "-wal", "-shm")
)
"""Databases that may be in the home folder. Prefect's contains its secrets and their encryption key."""


def load_site(environ: Mapping[str, str] | None = None) -> Site:
    """Site settings from the environment and ``$RLHF_HOME/rlhf.toml``; an existing home folder is made private.

    Raises:
        BadConfig: an unknown key or an invalid value in ``rlhf.toml``, or no home folder for a path with ``~``.
    """
    environment = os.environ if environ is None else environ
    home = expanded(environment.get("RLHF_HOME") or "~/.rlhf").absolute()
    _close_home(home)
    settings = _site_file(home / "rlhf.toml")
    sources = {key: f"{home / 'rlhf.toml'}: {key}" for key in settings}
    for key, variable in SITE_KEYS.items():
        if environment.get(variable):
            settings[key], sources[key] = environment[variable], variable
    scheduler = settings.get("scheduler", "local")
    if scheduler not in SCHEDULERS:
        raise BadConfig(f"{sources['scheduler']}: found {scheduler!r}, expected one of {', '.join(SCHEDULERS)}")
    runs_dir = expanded(settings.get("runs") or str(home / "runs")).absolute()
    for variable, folder in (("RLHF_HOME", home), ("RLHF_RUNS", runs_dir)):
        if storable_text(str(folder)) != str(folder):
            raise BadConfig(f"{variable}: found {str(folder)!r}, expected a UTF-8 path, as records contain it")
    return Site(
        home=home,
        runs_dir=runs_dir,
        database_url=settings.get("database_url") or f"sqlite:///{home / 'history.db'}",
        scheduler=scheduler,
        compute_python=_interpreter(settings.get("compute_python") or sys.executable),
        max_restarts_per_hour=_whole_number(sources, settings.get("max_restarts_per_hour", "60")),
        job_secrets=expanded(settings.get("job_secrets") or str(home / "job-secrets.env")).absolute(),
        **{name: _site_table(schema, name, home, settings, environment) for name, schema in SITE_TABLES.items()},
    )


def _close_home(home: Path) -> None:
    """Make the home folder private, including files left open by older versions. New ones are created private."""
    with contextlib.suppress(OSError):
        for name in (".", "prefect", "logs", "services", "deployments", *_DATABASES):
            private_files.close(home / name)


def _interpreter(text: str) -> str:
    """Resolve a path against the current folder, because jobs run elsewhere. A bare name is looked up on the nodes."""
    return str(expanded(text).absolute()) if "/" in text else text


def _whole_number(sources: Mapping[str, str], text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise BadConfig(f"{sources['max_restarts_per_hour']}: found {text!r}, expected a positive integer")
    return int(text)


def _site_table(
    schema: type[Schema], name: str, home: Path, settings: Mapping[str, Any], environment: Mapping[str, str]
) -> Any:
    """A table of ``rlhf.toml``; its environment variables take precedence."""
    table = settings.get(name, {})
    secrets = {
        field: environment[variable] for field, variable in _SECRETS.get(name, {}).items() if variable in environment
    }
    given = {**table, **secrets} if isinstance(table, dict) else table
    try:
        found = schema.model_validate(given)
    except ValidationError as error:
        problems = [_explain_in_table(schema, name, detail) for detail in error.errors()]
    else:
        flags = flags_for_numbers(given, found, name)
        problems = [f"{place}: found {str(flag).lower()}, expected a number" for place, flag in flags]
        if not problems:
            return found
    raise BadConfig(f"{home / 'rlhf.toml'}:\n" + "\n".join(f"  {problem}" for problem in problems))


def _explain_in_table(schema: type[Schema], name: str, detail: Any) -> str:
    location = detail["loc"]
    if detail["type"] == "extra_forbidden" and len(location) == 1:  # explain() knows the settings of a run only
        key = str(location[0])
        return f'unknown key "{readable(f"{name}.{key}")}"; {_hint(key, list(schema.model_fields), f"{name}.")}'
    return explain({**detail, "loc": (name, *location)})


def _hint(key: str, keys: list[str], section: str = "") -> str:
    near = difflib.get_close_matches(key[:SHOWN_CHARACTERS], keys, n=1)
    return f'did you mean "{section}{near[0]}"?' if near else f"the keys are {', '.join(keys)}"


def _site_file(path: Path) -> dict[str, Any]:
    try:
        content = read_toml(path)
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise BadConfig(
            f"cannot read the site settings {path}: {error.strerror}. Set RLHF_HOME to a folder of your own; that of "
            "the services is theirs alone"
        ) from None
    except OSError as error:
        raise BadConfig(f"cannot read the site settings {path}: {error.strerror}") from None
    problems: list[str] = []
    for key, value in list(content.items()):
        if key in SITE_TABLES:
            continue
        if len(problems) == MAX_PROBLEMS:
            problems.append("the rest of the file was not checked")
            break
        if key not in SITE_KEYS:
            problems.append(f'unknown key "{readable(key)}"; {_hint(key, [*SITE_KEYS, *SITE_TABLES])}')
        elif key == "max_restarts_per_hour" and isinstance(value, int):
            content[key] = str(value)
        elif not isinstance(value, str):
            problems.append(f"{key}: found {shortened(value)}, expected text")
        elif value and (key in _PATHS or (key == "compute_python" and "/" in value)):
            # Commands and services that start in other folders must find the same path.
            content[key] = str(path.parent / expanded(value))
        elif key == "database_url":
            content[key] = RELATIVE_SQLITE.sub(lambda found: f"{found[0]}{path.parent}/", value)
    if problems:
        raise BadConfig(f"{path}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return content
