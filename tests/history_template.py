"""A migrated, empty SQLite history that tests copy for each new one: migrating takes longer than most tests."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from sqlalchemy import URL

from rlhf_core.history import database, migrate
from rlhf_core.history.migrate import Upgraded
from rlhf_core.history.tables import SCHEMA_REVISION

MIGRATE = migrate._migrate
"""The real migration."""


@functools.cache
def sqlite_template() -> Path:
    """Path of a migrated, empty SQLite file, made once per process."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-sqlite-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "history.db"
    MIGRATE(database.parse_url(f"sqlite:///{file}"))
    return file


def give_history(home: Path) -> None:
    """Put a copy where the first command of a site would create its history; an existing one is kept."""
    file = home / "history.db"
    if not file.exists():
        shutil.copyfile(sqlite_template(), file)
        file.chmod(0o600)


def copy_or_migrate(url: URL) -> Upgraded:
    """Replacement for the migration: a new SQLite file is copied from the template, other databases are migrated."""
    file = database.sqlite_file(url)
    if file is None or not migrate.is_new(file):
        return MIGRATE(url)
    shutil.copyfile(sqlite_template(), file)
    return Upgraded("", SCHEMA_REVISION)
