"""Safe opening of a database: file systems suitable for SQLite, locks, errors with a remedy.

SQLite runs in WAL mode, so readers and the single writer do not wait for each other. Every writing transaction starts
with ``BEGIN IMMEDIATE``: it waits for other writers at its start, where ``busy_timeout`` applies, and cannot fail later
because of another writer.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from rlhf_core.errors import BadConfig, DatabaseUnavailable, HistoryError, UnsafeDatabase
from rlhf_core.machine.installation import pip_install
from rlhf_core.text.redaction import masked

BUSY_TIMEOUT_S = 30.0
"""Time that a writer waits for other writers on SQLite."""

MOUNT_TABLE = Path("/proc/self/mountinfo")
"""The kernel's table of mounted file systems."""

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p"),
        *("lustre", "gpfs", "beegfs", "ceph", "panfs", "pvfs2", "orangefs", "wekafs"),
        *("glusterfs", "gfs", "gfs2", "ocfs2", "davfs", "vboxsf", "prl_fs"),
    }
)
"""File systems with locks or shared memory that do not work between machines (or not at all)."""

LOCAL_FUSE = frozenset(
    {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.gocryptfs", "fuse.encfs", "fuse.ntfs-3g", "fuse.bindfs"}
)
"""Local file systems in user space. Any other ``fuse.*`` (sshfs, s3fs, rclone ...) counts as network."""

_ADVICE = (
    "Set RLHF_DATABASE_URL to a file on a local disk (sqlite:////var/tmp/<user>/history.db) or to a PostgreSQL server "
    "(postgresql://user@host/database)."
)
_HOME_ADVICE = " By default the history is in RLHF_HOME, which must be on a local disk, too."


# ---------------------------------------------------------------------------------------------------------------------
# File systems


def file_system_of(path: Path, mount_table: str) -> tuple[str, str]:
    """Find the type and mount point of the file system of ``path``.

    Args:
        path: absolute, resolved path; need not exist.
        mount_table: content of ``/proc/self/mountinfo`` (proc(5)).

    Returns:
        For instance ``("ext4", "/")``; ``("unknown", "")`` if it is not in the table.
    """
    best_type, best_point = "unknown", ""
    for line in mount_table.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5 or not after:
            continue
        point = _unescape(fields[4])
        # A later mount on the same point covers the earlier one, hence >=.
        if len(point) >= len(best_point) and path.is_relative_to(point):
            best_type, best_point = after.split()[0], point
    return best_type, best_point


def refuse_network_file_system(file: Path, what: str = "the history", setting: str = "RLHF_DATABASE_URL") -> None:
    """Refuse a SQLite file on a network file system.

    SQLite's locks and shared-memory index do not work there: two hosts silently corrupt the file.

    Args:
        file: the file; need not exist.
        what: the database, for the message.
        setting: the setting that moves the database elsewhere.

    Raises:
        UnsafeDatabase: the file would be on a network file system.
    """
    folder = Path(os.path.realpath(file)).parent
    while not folder.exists() and folder != folder.parent:  # this also triggers an automounter
        folder = folder.parent
    try:
        table = MOUNT_TABLE.read_text()
    except OSError:
        return  # not Linux: the file system is unknown
    kind, point = file_system_of(folder, table)
    if kind in NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind not in LOCAL_FUSE):
        raise UnsafeDatabase(
            f"{what} {file} is on the network file system {point} ({kind}), where SQLite corrupts its file. Set "
            "RLHF_HOME to a folder on a local disk (/var/tmp/<user>/rlhf) and RLHF_RUNS to one that the nodes share, "
            f"or {setting} to a PostgreSQL server"
        )


def _unescape(text: str) -> str:
    for escape, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        text = text.replace(escape, character)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Opening


def parse_url(text: str) -> URL:
    """Parse a database URL and add the driver.

    Raises:
        BadConfig: the URL is invalid, or the database is not supported.
    """
    try:
        url = make_url(text)
    except ArgumentError:
        found = "a text with an @, which may contain a password and is not shown" if "@" in text else repr(masked(text))
        raise BadConfig(f"RLHF_DATABASE_URL: found {found}, expected a database URL. {_ADVICE}") from None
    except ValueError:
        raise BadConfig(
            "RLHF_DATABASE_URL: found a port that is not a number. In a user name and a password, write @ as %40, : as "
            f"%3A, / as %2F and % as %25. {_ADVICE}"
        ) from None
    backend = url.get_backend_name()
    if backend in ("postgres", "postgresql"):
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise BadConfig(
            f"RLHF_DATABASE_URL: found a {backend} database; SQLite and PostgreSQL are supported. {_ADVICE}"
        )
    if not url.database or url.database == ":memory:":
        raise BadConfig(f"RLHF_DATABASE_URL: found SQLite in memory, which does not keep runs. {_ADVICE}")
    return url.set(drivername="sqlite", database=str(Path(url.database).expanduser().absolute()))


def sqlite_file(url: URL) -> Path | None:
    """Get the file of a SQLite URL; None for other databases."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def writing_engine(url: URL, *, foreign_keys: bool = True) -> Engine:
    """Create an engine for writing transactions.

    Args:
        foreign_keys: False only for migrations, which rebuild tables with references to them.
    """
    if sqlite_file(url) is None:
        return _postgres_engine(url)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # SQLAlchemy starts the transactions, not sqlite3
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def reading_engine(url: URL, writing: Engine) -> Engine:
    """Create an engine for read-only transactions, each of which sees one state of the database throughout.

    SQLite: the file is opened read-only. PostgreSQL: read-only transactions with repeatable reads, on the connections
    of the writing engine.
    """
    file = sqlite_file(url)
    if file is None:
        return writing.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    engine = create_engine(url, creator=lambda: _open_read_only(file))

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def require_unicode(connection: Connection, url: URL) -> None:
    """Verify that a database can store every text.

    Raises:
        HistoryError: a PostgreSQL database has another encoding than UTF-8; a run with a character outside it would be
            missing.
    """
    if connection.dialect.name == "sqlite":
        return
    driver: Any = connection.connection.driver_connection
    encoding = driver.info.parameter_status("server_encoding")
    if encoding not in (None, "UTF8"):  # some connection pools do not report it
        raise HistoryError(
            f"the history {displayed(url)} has the encoding {encoding}, expected UTF8: it cannot store every "
            "completion and message. Create another database (`createdb -E UTF8 --locale=C -T template0 NAME`), set "
            "RLHF_DATABASE_URL to it, then run `rlhf db upgrade` and `rlhf db rebuild`."
        )


def require_whole(file: Path, revision: str) -> None:
    """Verify that a SQLite file, not open in any other process, is complete and synced to disk.

    Raises:
        sqlite3.Error: it is incomplete.
        OSError: it cannot be synced.
    """
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection:
        (is_busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    # Without the log and index files, as other processes will open it.
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?immutable=1", uri=True)) as connection:
        (integrity,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        found = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    if is_busy or integrity != "ok" or found != [(revision,)]:
        raise sqlite3.OperationalError(f"database or disk is full: the written data is incomplete ({integrity})")
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())


def _open_read_only(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{file.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
    )
    connection.execute("PRAGMA query_only = ON")
    return connection


def _postgres_engine(url: URL) -> Engine:
    try:
        # pre-ping: the first statement after a restart of the server must not fail. The encoding is otherwise that of
        # the database, of its settings or of PGCLIENTENCODING; the isolation is that of the server, and under a higher
        # one, a writer fails if it has waited for another.
        settings = {"connect_timeout": 10, "client_encoding": "utf8"}
        engine = create_engine(
            url,
            pool_size=1,  # each process keeps one: a server has 100 by default, and a site 50 controllers
            pool_pre_ping=True,
            isolation_level="READ COMMITTED",
            connect_args=settings,
        )
    except (ModuleNotFoundError, NoSuchModuleError):
        raise HistoryError(
            f"RLHF_DATABASE_URL names a PostgreSQL server, but its driver is missing: {pip_install('postgres')}"
        ) from None

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        # Compiling the plan of a view takes longer than running it. Times and dates are in UTC, as on SQLite, whatever
        # the time zone of the server, and in the only format that the driver reads. Not connection options, because
        # connection pools (pgbouncer) reject those.
        connection.execute("SET jit = off; SET timezone = 'UTC'; SET datestyle = 'ISO'")
        connection.commit()

    return engine


# ---------------------------------------------------------------------------------------------------------------------
# Errors


@contextmanager
def translated_errors(url: URL) -> Iterator[None]:
    """Translate errors of SQLAlchemy and its drivers into ours: modules above the history do not import those
    libraries.

    Raises:
        DatabaseUnavailable: with the database, the error and a remedy.
    """
    try:
        yield
    except DBAPIError as error:
        raise DatabaseUnavailable(_explain(url, error.orig or error)) from error
    except sqlite3.Error as error:
        raise DatabaseUnavailable(_explain(url, error)) from error
    except SQLAlchemyError as error:
        raise HistoryError(f"the history {displayed(url)}: {error}") from error


def unusable(url: URL, why: str) -> DatabaseUnavailable:
    """Create the error for a database that cannot be used for a reason found by this program."""
    return DatabaseUnavailable(f"the history {displayed(url)} cannot be used: {why}. {_ADVICE}{_HOME_ADVICE}")


def displayed(url: URL) -> str:
    """Format a database for messages: the file, or the URL without its password, which may also be in the query, or, if
    it contains an @, in the host."""
    file = sqlite_file(url)
    return str(file) if file is not None else masked(url.render_as_string(hide_password=True))


_SQLITE_WORDS = (
    ("file is not a database", "is not a SQLite database. Move it away, or set RLHF_DATABASE_URL to another file."),
    ("malformed", "is damaged. Move it away, then run `rlhf db rebuild` to recreate it from the run directories."),
    ("disk is full", "cannot grow because its disk is full. Free some space; its content is unchanged."),
    ("readonly database", "is not writable. Check the permissions of the file and its folder."),
    (
        "unable to open",
        "cannot be opened. Its folder must exist and be writable, because SQLite keeps two more files in it.",
    ),
    (
        "locked",
        f"was locked by another process for more than {BUSY_TIMEOUT_S:.0f} s. Try again, or find the process "
        "with `fuser`.",
    ),
    ("disk I/O error", "cannot be read or written: its disk reports an error."),
)


def _explain(url: URL, error: BaseException) -> str:
    message = " ".join(str(error).split())
    if sqlite_file(url) is not None:
        for sign, explanation in _SQLITE_WORDS:
            if sign in message:
                return f"the history {displayed(url)} {explanation} (SQLite: {message})"
    elif "lock timeout" in message:
        return (
            f"the history {displayed(url)} could not be changed, because other sessions use its tables; nothing was "
            "changed. Find them with `SELECT pid, usename, application_name, state, query FROM pg_stat_activity "
            f"WHERE datname = current_database()`, end them, and try again (PostgreSQL: {message})"
        )
    return f"the history {displayed(url)} refused: {message}"
