"""Bringing a schema up to date. Alembic is imported only when there is something to do."""

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
from rlhf_core.history import database
from rlhf_core.history.tables import SCHEMA_REVISION

SCRIPTS = Path(rlhf_core.__file__).parent.parent / "migrations"
"""The migration scripts: beside this package in the checkout and in the wheel. Found by place, not by importing
``migrations``, because other projects have a package of that name too."""

_LOCK = 0x726C6866
"""PostgreSQL advisory lock: one migration at a time."""

_ALEMBIC = threading.Lock()
"""Alembic keeps the present migration in globals: one at a time in this process."""


class Upgraded(NamedTuple):
    """Result of a migration."""

    before: str
    """Revision before; empty for an empty database."""
    after: str
    """Revision now."""


def is_new(file: Path) -> bool:
    """Return True if a SQLite file is still to be created.

    Raises:
        HistoryError: it cannot be read, or is a folder.
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
    """Bring a database to the newest schema; one that has it is left alone. All migrations are one transaction. A
    SQLite file that does not exist yet is created.

    Raises:
        SchemaOutOfDate: a newer program created it.
        HistoryError: it is no history.
        DatabaseUnavailable: it cannot be reached or written.
    """
    file = database.sqlite_file(url)
    if file is not None:
        database.refuse_network_file_system(file)
        if not is_new(file):
            return _migrate(url)
        _create(url, file)
        if not is_new(file):
            return Upgraded("", SCHEMA_REVISION)
    return _migrate(url)


def _create(url: URL, file: Path) -> None:
    """Create a SQLite file. It appears when it is complete, so that no other process opens a part of it; when several
    processes create it at once, the first file counts. An empty file stays.

    SQLite copies its log into the file when the last connection is closed, and does not report a failure: on a disk
    that is nearly full the file would be there without its tables.
    """
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    try:
        if not file.parent.exists():
            private_files.make_folder(file.parent)
        private_files.write_new(unfinished, "")  # SQLite gives its log and its index the rights of the file
        made = url.set(database=str(unfinished))
        _migrate(made)
        with database.translated_errors(url):
            database.require_whole(unfinished, SCHEMA_REVISION)
        _put_in_place(unfinished, file)
    except OSError as error:
        raise database.unusable(url, f"it cannot be made: {error.strerror}") from None
    finally:
        for path in file.parent.glob(f"{unfinished.name}*"):
            path.unlink(missing_ok=True)


def _put_in_place(unfinished: Path, file: Path) -> None:
    try:
        os.link(unfinished, file)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        unfinished.rename(file)
    bring_to_disk(file.parent)


def _migrate(url: URL) -> Upgraded:
    # Foreign keys are off here: SQLite changes a table by making it again, and dropping the old one would cascade.
    engine = database.writing_engine(url, foreign_keys=False)
    try:
        with database.translated_errors(url), engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            before = revision(connection, url)
            if before != SCHEMA_REVISION:
                _run_scripts(connection, url, before)
            return Upgraded(before, SCHEMA_REVISION)
    finally:
        engine.dispose()


def require_current(engine: Engine, url: URL) -> None:
    """Raise unless the database has the schema of this program.

    Raises:
        SchemaOutOfDate: it is older (names ``rlhf db upgrade``) or newer.
        HistoryError: it holds something else.
    """
    with database.translated_errors(url), engine.connect() as connection:
        present = revision(connection, url)
    if present == SCHEMA_REVISION:
        return
    if not present:
        raise SchemaOutOfDate(
            f"the history {database.displayed(url)} is empty. Run `rlhf db upgrade` once to make its tables."
        )
    _refuse_newer(present, url)
    raise SchemaOutOfDate(
        f"the history {database.displayed(url)} has schema {present}, this program needs {SCHEMA_REVISION}. "
        f"Run `rlhf db upgrade`; a copy of the database beforehand does no harm."
    )


def revision(connection: Connection, url: URL) -> str:
    """Revision of a database; empty for one without any table.

    Raises:
        HistoryError: it has tables, but not those of a history.
    """
    names = inspect(connection).get_table_names()
    if "alembic_version" in names:
        versions = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
        if len(versions) == 1 and "runs" in names:
            return str(versions[0])
    if not names:
        return ""
    raise HistoryError(
        f"{database.displayed(url)} is no history of rlhf-flows: it holds the tables {', '.join(sorted(names)[:5])} of "
        f"something else. Point RLHF_DATABASE_URL to a database of its own."
    )


def _run_scripts(connection: Connection, url: URL, before: str) -> None:
    from alembic import command
    from alembic.config import Config

    if before:
        _refuse_newer(before, url)
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    with _ALEMBIC:
        command.upgrade(config, SCHEMA_REVISION)


def _refuse_newer(present: str, url: URL) -> None:
    """Raise if ``present`` is a revision that this program's scripts do not have."""
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}
    if present not in known:
        raise SchemaOutOfDate(
            f"the history {database.displayed(url)} has schema {present}, which this program does not know; it was "
            f"made by a newer version of rlhf-flows. Install that version; nothing was changed."
        )
