"""Opening a database safely: where SQLite may lie, how its locks are taken, and errors in words.

SQLite runs in WAL mode, so that readers and the one writer do not wait for each other. Every writing transaction
begins with ``BEGIN IMMEDIATE``: it waits for its turn at the beginning, where ``busy_timeout`` helps, and cannot fail
in the middle because another writer was faster.
"""

import contextlib
import os
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from rlhf_core.errors import BadConfig, DatabaseUnavailable, HistoryError, UnsafeDatabase
from rlhf_core.history.sql_limits import WorkClock

BUSY_TIMEOUT_S = 30.0
"""How long a writer waits for its turn on SQLite."""

MOUNT_TABLE = Path("/proc/self/mountinfo")
"""Where the kernel says which file system is mounted where."""

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
# Where it may lie


def file_system_of(path: Path, mount_table: str) -> tuple[str, str]:
    """Type and mount point of the file system that ``path`` lies on.

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
    while not folder.exists() and folder != folder.parent:  # looking also makes an automounter mount it
        folder = folder.parent
    try:
        table = MOUNT_TABLE.read_text()
    except OSError:
        return  # no Linux: nothing is known, and nothing is claimed
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
    """A database URL, with the driver that is used here filled in.

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
    """The file of a SQLite URL; None for other databases."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def writing_engine(url: URL, *, foreign_keys: bool = True) -> Engine:
    """An engine whose transactions write.

    Args:
        foreign_keys: False only for migrations, which rebuild tables that others refer to.
    """
    if sqlite_file(url) is None:
        return _postgres_engine(url)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # sqlite3 must not begin transactions behind SQLAlchemy's back
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def reading_engine(url: URL) -> Engine:
    """An engine whose transactions cannot write, and see one state of the database from beginning to end.

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
    """Make sure that a SQLite file that nobody else has open holds everything that was written, on the disk.

    Raises:
        sqlite3.Error: it does not.
        OSError: it cannot be brought to the disk.
    """
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection:
        (is_busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    # Without the files beside it: as it will be found.
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
        # pre-ping: a server that was started again must not fail the first question after it
        engine = create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 10})
    except (ModuleNotFoundError, NoSuchModuleError):
        raise HistoryError(
            "RLHF_DATABASE_URL names a PostgreSQL server, but its driver is missing: pip install 'rlhf-flows[postgres]'"
        ) from None

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        # Compiling the plan of a view takes longer than running it. Not as an option of the connection: those who
        # share connections (pgbouncer) refuse them.
        connection.execute("SET jit = off")
        connection.commit()

    return engine


# ---------------------------------------------------------------------------------------------------------------------
# Errors in words


@contextmanager
def errors_in_words(url: URL) -> Iterator[None]:
    """Turn the errors of SQLAlchemy and its drivers into ours: nobody above the history knows those libraries.

    Raises:
        DatabaseUnavailable: says which database, what happened and what to do.
    """
    try:
        yield
    except DBAPIError as error:
        raise DatabaseUnavailable(_in_words(url, error.orig or error)) from error
    except sqlite3.Error as error:
        raise DatabaseUnavailable(_in_words(url, error)) from error
    except SQLAlchemyError as error:
        raise HistoryError(f"the history {shown(url)}: {error}") from error


def unusable(url: URL, why: str) -> DatabaseUnavailable:
    """The error for a database that cannot be used for a reason found by ourselves."""
    return DatabaseUnavailable(f"the history {shown(url)} cannot be used: {why}. {_ADVICE}")


def shown(url: URL) -> str:
    """A database for a person: the file, or the URL without its password."""
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


def _in_words(url: URL, error: BaseException) -> str:
    said = " ".join(str(error).split())
    if sqlite_file(url) is not None:
        for sign, words in _SQLITE_WORDS:
            if sign in said:
                return f"the history {shown(url)} {words} (SQLite: {said})"
    return f"the history {shown(url)} refused: {said}"


READER_ROLE = "rlhf_reader"
"""The PostgreSQL role that questions are asked as, where there is one (``infra/reader.sql`` makes it)."""

QUESTION_TIMEOUT_S = 300
"""After this many seconds of the database's time a question is given up, so that none holds it for ever."""

_STANDING = """
WITH mighty AS (
    SELECT oid FROM pg_roles
     WHERE rolsuper OR rolreplication
        OR rolname IN ('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files',
                       'pg_signal_backend')
), reader AS (
    SELECT oid FROM pg_roles
     WHERE rolname = %(reader)s AND pg_has_role(session_user, oid, 'MEMBER')
       AND has_table_privilege(oid, 'runs', 'SELECT')
)
SELECT EXISTS (SELECT FROM mighty WHERE pg_has_role(session_user, oid, 'MEMBER')),
       EXISTS (SELECT FROM reader),
       EXISTS (SELECT FROM reader
                WHERE NOT has_function_privilege(oid, 'pg_catalog.set_config(text, text, boolean)', 'EXECUTE')
                  AND NOT EXISTS (SELECT FROM mighty WHERE pg_has_role(reader.oid, mighty.oid, 'MEMBER')))
"""
"""Rights beyond the tables that the user who logged in has or can take; the role to ask as; that role cannot be left.

The user who logged in counts, never the present role: any role is left again by ``set_config('role', 'none', true)``,
which can stand in a SELECT, unless that function is withheld. Roles are the server's: one that was made for another
database has no rights in this one."""

_FETCHED_ROWS = 500
"""Rows taken from PostgreSQL at a time."""

_NOTHING = re.compile(r"(?:\s|;|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
"""Text without a statement."""


def reader_script() -> str:
    """The psql script that makes the role to ask as: inside the installed package, or in ``infra`` of a checkout.

    Raises:
        HistoryError: the installation lacks it.
    """
    folder = Path(__file__).parent
    for path in (folder / "reader.sql", folder.parents[1] / "infra" / "reader.sql"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise HistoryError("reader.sql is not part of this installation of rlhf-flows; reinstall the package")


def ask_postgres(
    connection: Any, text: str, values: Mapping[str, Any] | None, url: URL, clock: WorkClock, *, shipped: bool = False
) -> Iterator[Sequence[Sequence[Any]]]:
    """Ask PostgreSQL one question, in the read-only transaction of ``connection``. The names of the columns come first,
    then rows, some at a time.

    Three things stand between a question and the server, beside the transaction. It is declared as a cursor, so that
    the parser refuses whatever is no query: COPY, DO, SET, a WITH that writes. It is asked as ``rlhf_reader``, a role
    that can only read and that cannot be left; an ordinary user who is no member of it asks with his own rights. And it
    has a time limit. None of them holds a superuser, who may signal other sessions and read files inside a SELECT: such
    a login asks as ``rlhf_reader`` or not at all.

    Args:
        connection: the driver's own connection.
        text: the question.
        values: what its parameters (``%(name)s``) stand for; None where it has none, and a percent sign is one.
        url: the database, for the advice.
        clock: how long it may take.
        shipped: the text comes with this program and only its values are given, so that any login may ask it.

    Raises:
        UnsafeDatabase: the login has rights that the question could use to do harm.
    """
    if _NOTHING.fullmatch(text):
        yield []
        return
    mighty, has_reader, is_kept_in = connection.execute(_STANDING, {"reader": READER_ROLE}).fetchone()
    if mighty and not is_kept_in and not shipped:
        raise UnsafeDatabase(_refusal(url, has_reader=has_reader))
    if has_reader:
        connection.execute(f"SET LOCAL ROLE {READER_ROLE}")
    _limit_time(connection, clock)
    # Prepared, because the simple protocol would take several statements: "SELECT 1; DROP TABLE runs".
    connection.execute(f"DECLARE question NO SCROLL CURSOR FOR {text}", values, prepare=True)
    columns = None
    while True:
        _limit_time(connection, clock)
        with clock.working():
            cursor = connection.execute(f"FETCH {_FETCHED_ROWS} FROM question")
            rows = cursor.fetchall()
        if columns is None:
            columns = [described[0] for described in cursor.description or ()]
            yield columns
        if not rows:
            return
        yield rows


def _limit_time(connection: Any, clock: WorkClock) -> None:
    connection.execute(f"SET LOCAL statement_timeout = {max(1, int(1000 * clock.left_s))}")  # ms; 0 is no limit


def _refusal(url: URL, *, has_reader: bool) -> str:
    lacking = (
        f"the role {READER_ROLE} does not keep a question from taking those rights back, as it may call set_config or "
        f"has such rights itself"
        if has_reader
        else f"the role {READER_ROLE}, which can only read, is missing in this database"
    )
    address = url.set(drivername="postgresql", password=None).render_as_string()
    return (
        f"not asked: {url.username or 'the user'} of {shown(url)} is a superuser or has rights like one, and a "
        f"question with those rights can end sessions, read files and change its settings; {lacking}. Make the "
        f"role as it should be, once, as a superuser: `rlhf db reader | psql {shlex.quote(address)}` (the script is "
        f"infra/reader.sql). Better still, have RLHF_DATABASE_URL name an ordinary user that owns the tables"
    )


def forbid_writing(connection: Any) -> None:
    """Let a SQLite connection do nothing but read, whatever it is told: not even attach another file or change a
    setting.

    Args:
        connection: the driver's own connection.
    """
    allowed = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
    describing = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}

    # fts3_tokenizer hands out addresses of memory, and takes them.
    forbidden = {"load_extension", "fts3_tokenizer"}

    def judge(action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None) -> int:
        if action == sqlite3.SQLITE_FUNCTION and second in forbidden:
            return sqlite3.SQLITE_DENY
        if action in allowed or (action == sqlite3.SQLITE_PRAGMA and first in describing):
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    for function in ("json_each", "json_tree"):  # tables that come into being when first asked: before it is forbidden
        connection.execute(f"SELECT 1 FROM {function}('{{}}')").close()
    connection.set_authorizer(judge)
