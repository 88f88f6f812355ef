"""Opening a database safely: file systems that SQLite may use, locks, errors that name the remedy.

SQLite runs in WAL mode, so that readers and the one writer do not wait for each other. Every writing transaction
begins with ``BEGIN IMMEDIATE``: it waits for other writers at the beginning, where ``busy_timeout`` applies, and cannot
fail in the middle because another writer was faster.
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

BUSY_TIMEOUT_S = 30.0
"""Time that a writer waits for other writers on SQLite."""

MOUNT_TABLE = Path("/proc/self/mountinfo")
"""The mounted file systems, by the kernel."""

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p"),
        *(
            "lustre",
            "gpfs",
            "beegfs",
            "ceph",
            "panfs",
            "pvfs2",
            "orangefs",
            "wekafs",
            "glusterfs",
            "gfs",
            "gfs2",
            "ocfs2",
        ),
        *("davfs", "vboxsf", "prl_fs"),
    }
)
"""File systems whose locks or shared memory do not hold between machines (or not at all)."""

LOCAL_FUSE = frozenset(
    {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.gocryptfs", "fuse.encfs", "fuse.ntfs-3g", "fuse.bindfs"}
)
"""File systems in user space that lie on this machine. Any other ``fuse.*`` (sshfs, s3fs, rclone ...) counts as
network."""

_ADVICE = (
    "Set RLHF_DATABASE_URL to a file on a local disk (sqlite:////var/tmp/<user>/history.db) or to a PostgreSQL server "
    "(postgresql://user@host/database)."
)


# ---------------------------------------------------------------------------------------------------------------------
# File systems


def file_system_of(path: Path, mount_table: str) -> tuple[str, str]:
    """Find the type and mount point of the file system of ``path``.

    Args:
        path: absolute and resolved; need not exist.
        mount_table: content of ``/proc/self/mountinfo`` (proc(5)).

    Returns:
        For instance ``("ext4", "/")``; ``("unknown", "")`` where the table says nothing.
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


def refuse_network_file_system(file: Path) -> None:
    """Raise :class:`UnsafeDatabase` if a SQLite file would lie on a network file system.

    SQLite's locks and its shared-memory index do not hold there: two hosts corrupt the file silently.
    """
    folder = Path(os.path.realpath(file)).parent
    while not folder.exists() and folder != folder.parent:  # this also makes an automounter mount it
        folder = folder.parent
    try:
        table = MOUNT_TABLE.read_text()
    except OSError:
        return  # no Linux: the file system is not known
    kind, point = file_system_of(folder, table)
    if kind in NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind not in LOCAL_FUSE):
        raise UnsafeDatabase(
            f"the history {file} would lie on the network file system {point} ({kind}), where SQLite corrupts its "
            f"file. {_ADVICE}"
        )


def _unescape(text: str) -> str:
    for escape, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        text = text.replace(escape, character)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Opening


def parse_url(text: str) -> URL:
    """Parse a database URL, and fill in the driver.

    Raises:
        BadConfig: it is no URL, or of a database that is not supported.
    """
    try:
        url = make_url(text)
    except ArgumentError:
        raise BadConfig(f"RLHF_DATABASE_URL: found {text!r}, which is no database URL. {_ADVICE}") from None
    backend = url.get_backend_name()
    if backend in ("postgres", "postgresql"):
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise BadConfig(
            f"RLHF_DATABASE_URL: found a {backend} database; SQLite and PostgreSQL are supported. {_ADVICE}"
        )
    if not url.database or url.database == ":memory:":
        raise BadConfig(f"RLHF_DATABASE_URL: found SQLite in memory, which would forget every run. {_ADVICE}")
    return url.set(drivername="sqlite", database=str(Path(url.database).expanduser().absolute()))


def sqlite_file(url: URL) -> Path | None:
    """Get the file of a SQLite URL; None for other databases."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def writing_engine(url: URL, *, foreign_keys: bool = True) -> Engine:
    """Make an engine whose transactions write.

    Args:
        foreign_keys: False only for migrations, which rebuild tables that others refer to.
    """
    if sqlite_file(url) is None:
        return _postgres_engine(url)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # SQLAlchemy begins the transactions, not sqlite3
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def reading_engine(url: URL) -> Engine:
    """Make an engine whose transactions cannot write, and see one state of the database from beginning to end.

    SQLite: the file is opened read-only. PostgreSQL: read-only transactions that repeat their reads.
    """
    file = sqlite_file(url)
    if file is None:
        engine = _postgres_engine(url)
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    engine = create_engine(url, creator=lambda: _open_read_only(file))

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def require_whole(file: Path, revision: str) -> None:
    """Make sure that a SQLite file that no other process has open holds everything that was written, on the disk.

    Raises:
        sqlite3.Error: it does not.
        OSError: it cannot be brought to the disk.
    """
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection:
        (is_busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    # Without the files beside it, as other processes will open it.
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?immutable=1", uri=True)) as connection:
        (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        found = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    if is_busy or said != "ok" or found != [(revision,)]:
        raise sqlite3.OperationalError(f"database or disk is full: what was written is not whole ({said})")
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
        # pre-ping: the first statement after a restart of the server must not fail
        engine = create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 10})
    except (ModuleNotFoundError, NoSuchModuleError):
        raise HistoryError(
            "RLHF_DATABASE_URL names a PostgreSQL server, but its driver is missing: pip install 'rlhf-flows[postgres]'"
        ) from None

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        # Compiling the plan of a view takes longer than running it. Not as an option of the connection: pools of
        # connections (pgbouncer) refuse those.
        connection.execute("SET jit = off")
        connection.commit()

    return engine


# ---------------------------------------------------------------------------------------------------------------------
# Errors


@contextmanager
def translated_errors(url: URL) -> Iterator[None]:
    """Translate errors of SQLAlchemy and its drivers into ours: modules above the history do not know those libraries.

    Raises:
        DatabaseUnavailable: names the database, the error and the remedy.
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
    """Make the error for a database that cannot be used, for a reason that this program found."""
    return DatabaseUnavailable(f"the history {displayed(url)} cannot be used: {why}. {_ADVICE}")


def displayed(url: URL) -> str:
    """Format a database for messages: the file, or the URL without its password."""
    file = sqlite_file(url)
    return str(file) if file is not None else url.render_as_string(hide_password=True)


_SQLITE_WORDS = (
    ("file is not a database", "is no SQLite database. Move it away, or point RLHF_DATABASE_URL elsewhere."),
    ("malformed", "is damaged. Move it away, then `rlhf db rebuild` makes it again from the run directories."),
    ("disk is full", "has no room to grow: its disk is full. Make room; what was in it is untouched."),
    ("readonly database", "cannot be written. Check the permissions of the file and of its folder."),
    ("unable to open", "cannot be opened. Its folder must exist and be writable: SQLite keeps two files beside it."),
    (
        "locked",
        f"was kept busy by another process for more than {BUSY_TIMEOUT_S:.0f} s. Try again; find it with `fuser`.",
    ),
    ("disk I/O error", "cannot be read or written: its disk reports an error."),
)


def _explain(url: URL, error: BaseException) -> str:
    said = " ".join(str(error).split())
    if sqlite_file(url) is not None:
        for sign, words in _SQLITE_WORDS:
            if sign in said:
                return f"the history {displayed(url)} {words} (SQLite: {said})"
    return f"the history {displayed(url)} refused: {said}"
