"""Migration of the schema. Alembic is imported only if there is something to do."""

import fcntl
import os
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import URL, Connection, Engine, inspect, text

import rlhf_core
from rlhf_core.errors import HistoryError, SchemaOutOfDate
from rlhf_core.files import private as private_files
from rlhf_core.files.reading import bring_to_disk
from rlhf_core.files.whole import place_once
from rlhf_core.history import database
from rlhf_core.history.tables import SCHEMA_REVISION

SCRIPTS = Path(rlhf_core.__file__).parent.parent / "migrations"
"""The migration scripts, beside this package in the checkout and in the wheel. Located by path instead of importing
``migrations``, because other projects also have a package of that name."""

_LOCK = 0x726C6866
"""PostgreSQL advisory lock: one migration at a time."""

_LOCK_TIMEOUT_S = 60
"""Time on PostgreSQL after which a migration gives up waiting for the sessions that use the tables."""

_ALEMBIC = threading.Lock()
"""Alembic keeps the current migration in globals: one at a time in this process."""


class Upgraded(NamedTuple):
    """Result of a migration."""

    before: str
    """Revision before; empty for an empty database."""
    after: str
    """Revision now."""


def is_new(file: Path) -> bool:
    """Return True if a SQLite file does not exist yet or is empty.

    Raises:
        HistoryError: it cannot be read or is a folder.
    """
    try:
        if file.is_dir():
            raise HistoryError(f"the history {file} is a folder, expected a file. Check RLHF_DATABASE_URL.")
        return not file.exists() or file.stat().st_size == 0
    except OSError as error:
        raise HistoryError(
            f"the history {file} cannot be reached: {error.strerror}. Check RLHF_DATABASE_URL."
        ) from None


def upgrade(url: URL) -> Upgraded:
    """Migrate a database to the newest schema, if it does not have it already, in one transaction. A SQLite file that
    does not exist yet is created.

    Raises:
        SchemaOutOfDate: a newer program created it, or a checkout between two versions.
        HistoryError: it is not a history, or cannot store every text.
        DatabaseUnavailable: it cannot be reached or written.
    """
    file = database.sqlite_file(url)
    if file is not None:
        database.refuse_network_file_system(file)
        if is_new(file):
            _create(url, file)
            if not is_new(file):
                return Upgraded("", SCHEMA_REVISION)
    with database.translated_errors(url):
        return _migrate(url)


def _create(url: URL, file: Path) -> None:
    """Create a SQLite file. It appears only once it is complete, so that no other process opens a part of it; if
    several processes create it at once, the first file counts. An empty file remains.

    SQLite copies its log into the file when the last connection is closed and does not report a failure: on a nearly
    full disk, the file would lack its tables.
    """
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    try:
        if not file.parent.exists():
            private_files.make_folder(file.parent)
        private_files.write_new(unfinished, "")  # SQLite gives its log and index the file's permissions
        with database.translated_errors(url):
            _migrate(url.set(database=str(unfinished)))
            database.require_whole(unfinished, SCHEMA_REVISION)
        _put_in_place(unfinished, file)
    except OSError as error:
        raise database.unusable(url, f"it cannot be created: {error.strerror}") from None
    finally:
        for path in file.parent.glob(f"{unfinished.name}*"):
            path.unlink(missing_ok=True)


def _put_in_place(unfinished: Path, file: Path) -> None:
    """Give a file its name, without log and index of an earlier file that was removed or moved away without them, as
    after a kill: SQLite would take them for those of the new file and copy the pages of the old one into it."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # the log of a file that another process has just put there must stay
        if not file.exists():
            for suffix in ("-wal", "-shm"):
                file.with_name(f"{file.name}{suffix}").unlink(missing_ok=True)
        place_once(unfinished, file)
    except FileExistsError:
        return
    finally:
        os.close(folder)
    bring_to_disk(file.parent)


def _migrate(url: URL) -> Upgraded:
    # Foreign keys are off: SQLite changes a table by recreating it, and dropping the old one would cascade.
    engine = database.writing_engine(url, foreign_keys=False)
    try:
        with engine.begin() as connection:
            database.require_unicode(connection, url)
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
                connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s'"))
            before = revision(connection, url)
            if before != SCHEMA_REVISION:
                _run_scripts(connection, url, before)
            return Upgraded(before, SCHEMA_REVISION)
    finally:
        engine.dispose()


def require_current(engine: Engine, url: URL) -> None:
    """Raise unless the database has the schema of this program.

    Raises:
        SchemaOutOfDate: it is older (advises ``rlhf db upgrade``), newer, or of no version.
        HistoryError: it is not a history, or cannot store every text.
    """
    with database.translated_errors(url), engine.connect() as connection:
        database.require_unicode(connection, url)
        present = revision(connection, url)
    if present == SCHEMA_REVISION:
        return
    if not present:
        raise SchemaOutOfDate(
            f"the history {database.displayed(url)} is empty. Run `rlhf db upgrade` once to create its tables."
        )
    _refuse_unknown(present, url)
    raise SchemaOutOfDate(
        f"the history {database.displayed(url)} has schema {present}, but this program needs {SCHEMA_REVISION}. "
        "Run `rlhf db upgrade`, preferably after a backup of the database."
    )


def revision(connection: Connection, url: URL) -> str:
    """Revision of a database; empty if it has no tables.

    Raises:
        HistoryError: it has tables other than those of a history.
    """
    names = inspect(connection).get_table_names()
    if "alembic_version" in names:
        versions = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
        if len(versions) == 1 and "runs" in names:
            return str(versions[0])
    if not names:
        return ""
    raise HistoryError(
        f"{database.displayed(url)} is not a history of rlhf-flows: it contains other tables "
        f"({', '.join(sorted(names)[:5])}). Set RLHF_DATABASE_URL to a separate database."
    )


def _run_scripts(connection: Connection, url: URL, before: str) -> None:
    from alembic import command
    from alembic.config import Config

    if before:
        _refuse_unknown(before, url)
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    with _ALEMBIC:
        command.upgrade(config, SCHEMA_REVISION)


def _refuse_unknown(present: str, url: URL) -> None:
    """Raise if ``present`` is a revision that this program's scripts lack."""
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}
    if present not in known:
        is_between = present.isdecimal() and present < SCHEMA_REVISION
        source = "a checkout between two versions" if is_between else "a newer version of rlhf-flows"
        advice = 'See "Between two versions" in docs/operations.md' if is_between else "Install that version"
        raise SchemaOutOfDate(
            f"the history {database.displayed(url)} has schema {present}, which was created by {source}. "
            f"{advice}; nothing was changed."
        )
