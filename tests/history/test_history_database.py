"""File systems for the database, errors when it cannot be used, and writers that wait for each other."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from history_tools import RunFiles, dump, new_sqlite, postgres, run_sql, synced, whole_run
from process_tools import until
from sqlalchemy import QueuePool

from rlhf_core.errors import BadConfig, DatabaseUnavailable, HistoryError, UnsafeDatabase
from rlhf_core.history import database, migrate, queries, saved_queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.attempts import RunState
from rlhf_core.watchdog.ingest import sync

pytestmark = pytest.mark.usefixtures("real_migrations")

MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 27 0:40 / /home rw,relatime shared:7 - nfs4 filer:/home rw,vers=4.2
32 31 254:1 / /home/anna/fast rw,relatime - xfs /dev/vdb rw
33 27 0:41 / /mnt/my\040share rw,relatime - cifs //server/share rw
34 27 0:42 / /scratch rw,relatime - lustre mds@tcp:/scratch rw
35 27 0:43 / /mnt/ssh rw,nosuid - fuse.sshfs anna@host:/ rw
36 27 0:44 / /mnt/merged rw - fuse.mergerfs a:b rw
37 27 0:45 / /covered rw - ext4 /dev/vdc rw
38 27 0:46 / /covered rw - nfs filer:/covered rw
39 27 0:47 / /mnt/bucket rw - fuse.something-new bucket rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/var/lib/rlhf", "ext4", "/"),
        ("/home/anna", "nfs4", "/home"),
        ("/homework", "ext4", "/"),
        ("/home/anna/fast/db", "xfs", "/home/anna/fast"),
        ("/mnt/my share/x", "cifs", "/mnt/my share"),
        ("/covered/x", "nfs", "/covered"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str, point: str) -> None:
    assert database.file_system_of(Path(path), MOUNTS) == (kind, point)


def test_a_mount_table_that_says_nothing() -> None:
    assert database.file_system_of(Path("/x"), "") == ("unknown", "")


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretend that the test's folder is a mount of the given type."""

    def mount(kind: str) -> None:
        table = tmp_path / "mountinfo"
        table.write_text(f"27 1 254:0 / / rw - ext4 /dev/vda rw\n31 27 0:40 / {tmp_path} rw - {kind} somewhere rw\n")
        monkeypatch.setattr(database, "MOUNT_TABLE", table)

    return mount


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse.sshfs", "fuse.s3fs"],
)
def test_sqlite_is_refused_on_a_network_file_system(mounted: Callable[[str], None], tmp_path: Path, kind: str) -> None:
    mounted(kind)
    url = f"sqlite:///{tmp_path}/not/there/yet/history.db"
    with pytest.raises(
        UnsafeDatabase, match=f"network file system {tmp_path} \\({kind}\\).*RLHF_DATABASE_URL"
    ) as error:
        HistoryStore(url)
    assert error.value.exit_code == 2
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.mergerfs"])
def test_sqlite_is_taken_on_a_local_file_system(mounted: Callable[[str], None], tmp_path: Path, kind: str) -> None:
    """Negative control of the refusal: it is the file system that is refused, not the test's folder."""
    mounted(kind)
    HistoryStore(new_sqlite(tmp_path)).close()


def test_a_link_to_a_network_file_system_is_seen_through(mounted: Callable[[str], None], tmp_path: Path) -> None:
    mounted("nfs4")
    with pytest.raises(UnsafeDatabase):
        HistoryStore(f"sqlite:////proc/self/cwd/{os.path.relpath(tmp_path)}/history.db")


# ---------------------------------------------------------------------------------------------------------------------
# Invalid URLs and files


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("history.db", "expected a database URL"),
        ("mysql://host/db", "a mysql database"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_urls_that_are_not_supported(url: str, message: str) -> None:
    with pytest.raises(BadConfig, match=f"RLHF_DATABASE_URL: found .*{message}"):
        HistoryStore(url)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg2"])
def test_every_way_to_say_postgresql(scheme: str) -> None:
    assert database.parse_url(f"{scheme}://u:p@h/d").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    "url", ["postgresql://anna:s3@cret:5432x@host/db", "postgresql:/anna:s3cret@host/db", "anna:s3cret@host/db"]
)
def test_an_invalid_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(BadConfig, match=r"^RLHF_DATABASE_URL: found ") as refusal:
        HistoryStore(url)
    assert not any(part in str(refusal.value) for part in ("s3", "cret", "5432x"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://anna:s3cret@host/db", "postgresql+psycopg://anna:***@host/db"),
        ("postgresql://anna:s3@cret@host/db", "postgresql+psycopg://***@host/db"),
        ("postgresql://anna@host/db?password=s3cret&a=1", "postgresql+psycopg://anna@host/db?a=1&password=***"),
    ],
)
def test_a_database_is_shown_without_its_password(url: str, shown: str) -> None:
    assert database.displayed(database.parse_url(url)) == shown


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    file.write_text("my shopping list, which is longer than the header of a database file would be " * 9)
    before = file.read_bytes()
    with pytest.raises(DatabaseUnavailable, match=r"history\.db is not a SQLite database"):
        HistoryStore(f"sqlite:///{file}")
    assert file.read_bytes() == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match=r"file/history\.db cannot be"):
        HistoryStore(f"sqlite:///{tmp_path}/file/history.db")


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "history.db").mkdir()
    with pytest.raises(HistoryError, match=r"history\.db is a folder, expected a file"):
        HistoryStore(f"sqlite:///{tmp_path}/history.db")


def test_an_empty_file_is_filled(tmp_path: Path) -> None:
    (tmp_path / "history.db").touch()
    with HistoryStore(f"sqlite:///{tmp_path}/history.db") as store:
        assert store.run_ids() == []


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[str]:
    """URL of a history whose folder cannot be written."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    url = new_sqlite(folder)
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    yield url
    folder.chmod(0o755)


def test_a_folder_that_cannot_be_written(unwritable: str) -> None:
    with (
        pytest.raises(DatabaseUnavailable, match=r"(cannot be opened|is not writable)"),
        HistoryStore(unwritable) as store,
    ):
        store.acquire_lease("run", "me", 60)


def test_a_full_disk(tmp_path: Path, runs: Path) -> None:
    """SQLite reports a full disk and its own page limit with the same error."""
    run = whole_run(runs)
    with HistoryStore(new_sqlite(tmp_path)) as store:
        before = dump(store)
        with store.writing() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(DatabaseUnavailable, match=r"cannot grow.*its content is unchanged"):
            sync(run.dir, store)
        assert dump(store) == before
        with store.writing() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 100000")
        sync(run.dir, store)
        assert dump(store)["metrics"]


def test_a_new_history_that_cannot_be_written_has_its_own_name_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is created under a temporary name."""

    full = sqlite3.OperationalError("database or disk is full")
    monkeypatch.setattr(migrate, "_run_scripts", Mock(side_effect=full))
    with pytest.raises(DatabaseUnavailable, match=f"^the history {tmp_path}/history.db cannot grow"):
        migrate.upgrade(database.parse_url(f"sqlite:///{tmp_path}/history.db"))
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_answer() -> None:
    with pytest.raises(
        DatabaseUnavailable, match=r"postgresql\+psycopg://anna:\*\*\*@127.0.0.1:1/rlhf refused"
    ) as error:
        HistoryStore("postgresql://anna:secret@127.0.0.1:1/rlhf")
    assert "secret" not in str(error.value)


def test_a_lost_connection_is_made_anew(runs: Path) -> None:
    """The server closed our connections, as after a restart: the next query works."""
    url = postgres().migrated_database()
    run = whole_run(runs)
    with HistoryStore(url) as store:
        sync(run.dir, store)
        with HistoryStore(url) as other, other.writing() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        assert len(queries.list_runs(store)) == 1
        store.acquire_lease(run.run_id, "me", 60)


def test_reading_and_writing_share_the_connections_to_a_server() -> None:
    url = database.parse_url("postgresql://anna@server/rlhf")
    writing = database.writing_engine(url)
    reading = database.reading_engine(url, writing)
    assert reading.pool is writing.pool
    assert isinstance(writing.pool, QueuePool)
    assert writing.pool.size() == 1


def test_a_process_keeps_one_connection_to_a_server() -> None:
    """Before, up to ten: a server refused connections long before the site had `max_runs` controllers."""
    url = postgres().migrated_database()
    with HistoryStore(url) as store, HistoryStore(url) as other:
        with store.reading(), store.writing() as connection:
            connection.exec_driver_sql("UPDATE runs SET message = ''")

        def is_one_of_each() -> bool:
            of_clients = "datname = current_database() AND backend_type = 'client backend'"  # the server vacuums, too
            with other.reading() as connection:
                counted = connection.exec_driver_sql(f"SELECT count(*) FROM pg_stat_activity WHERE {of_clients}")
                return counted.scalar() == 2

        # The server may still be ending the connections that were closed before.
        until(is_one_of_each, "one connection of each store", timeout_s=20.0)
        assert (store.max_connections() or 0) > 2


def test_a_database_that_cannot_store_every_text_is_refused() -> None:
    """SQL_ASCII is the encoding of a server that was set up without a locale."""
    url = postgres().empty_database("SQL_ASCII")
    for use in (lambda: migrate.upgrade(database.parse_url(url)), lambda: HistoryStore(url)):
        with pytest.raises(HistoryError, match=r"has the encoding SQL_ASCII, expected UTF8.*createdb -E UTF8"):
            use()


def test_a_server_with_other_settings_gives_the_same_times_and_texts(runs: Path) -> None:
    settings = ("timezone = 'America/New_York'", "datestyle = 'German, DMY'", "client_encoding = 'LATIN1'")
    url = postgres().empty_database(settings=settings)
    migrate.upgrade(database.parse_url(url))
    with HistoryStore(url) as store:
        run = RunFiles(runs, created=12 * 3600).created()  # midnight in UTC, still the day before in New York
        run.moved(RunState.PREFLIGHT, 1, "再开始 ␀")
        sync(run.dir, store)
        asked = saved_queries.parse("SELECT created_at, CAST(created_at AS date), message FROM runs")
        # As part of the program, it may be run by the superuser of this server.
        ((time, day, message),) = saved_queries.run(store, replace(asked, name="times"), {}).rows
    assert (time, day, message) == ("2026-03-02T00:00:00+00:00", "2026-03-02", "再开始 ␀")


# ---------------------------------------------------------------------------------------------------------------------
# Readers and writers


def test_a_reader_does_not_wait_for_a_writer(store: HistoryStore, database_url: str, runs: Path) -> None:
    synced(whole_run(runs), store)
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE runs SET state = 'failed'")
        with HistoryStore(database_url) as other:
            assert queries.list_runs(other)[0]["state"] == "completed"
    assert queries.list_runs(store)[0]["state"] == "failed"


def test_a_reader_sees_one_state_of_the_database(store: HistoryStore, database_url: str, runs: Path) -> None:
    run = whole_run(runs)
    with store.reading() as connection:
        question = "SELECT count(*) FROM metrics"
        before = connection.exec_driver_sql(question).scalar()
        with HistoryStore(database_url) as other:
            sync(run.dir, other)
        assert connection.exec_driver_sql(question).scalar() == before == 0


def test_a_reader_cannot_write(store: HistoryStore) -> None:
    with pytest.raises(DatabaseUnavailable, match=r"(?i)read-?only"), store.reading() as connection:
        connection.exec_driver_sql("DELETE FROM runs")


def test_writers_take_turns(store: HistoryStore, database_url: str) -> None:
    """A transaction that reads first and then writes does not fail because of another writer in between."""
    with store.writing() as connection:
        connection.exec_driver_sql("CREATE TABLE counter (value INTEGER)")
        connection.exec_driver_sql("INSERT INTO counter VALUES (0)")
    lock = " FOR UPDATE" if store.url.get_backend_name() == "postgresql" else ""

    def count() -> None:
        with HistoryStore(database_url) as mine:
            for _ in range(20):
                with mine.writing() as connection:
                    value = connection.exec_driver_sql(f"SELECT value FROM counter{lock}").scalar_one()
                    connection.exec_driver_sql(f"UPDATE counter SET value = {value + 1}")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.writing() as connection:
        assert connection.exec_driver_sql("SELECT value FROM counter").scalar() == 80
        connection.exec_driver_sql("DROP TABLE counter")


def test_a_writer_does_not_fail_by_the_isolation_that_the_server_prefers(runs: Path) -> None:
    url = postgres().empty_database(settings=("default_transaction_isolation = 'serializable'",))
    migrate.upgrade(database.parse_url(url))
    with HistoryStore(url) as store, HistoryStore(url) as other:
        synced(RunFiles(runs).created(), store)
        with store.writing() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM runs")
            with other.writing() as faster:
                faster.exec_driver_sql("UPDATE runs SET ingest_stamp = 1")
            connection.exec_driver_sql("UPDATE runs SET ingest_stamp = 2")
        with store.reading() as connection:
            assert connection.exec_driver_sql("SHOW transaction_isolation").scalar() == "repeatable read"


def test_a_rebuild_and_an_ingester_do_not_wait_for_each_other(runs: Path) -> None:
    """Both start with the row of the run; in another order, PostgreSQL would abort one of them."""
    url = postgres().migrated_database()
    with HistoryStore(url) as ingester, HistoryStore(url) as rebuilder:
        run = synced(whole_run(runs), ingester)
        forgetting = threading.Thread(target=rebuilder.forget, args=[run.run_id])
        with ingester.writing() as connection:
            connection.exec_driver_sql("UPDATE runs SET ingest_stamp = 1")
            forgetting.start()
            while not connection.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar():
                pass
            connection.exec_driver_sql("UPDATE latest_metrics SET step = 1")
        forgetting.join()
        assert run_sql(ingester, "SELECT count(*) FROM latest_metrics").rows == [[0]]


def test_without_begin_immediate_a_writer_fails(tmp_path: Path) -> None:
    """Negative control: a deferred transaction that has read cannot write once another writer was faster."""
    file = database.sqlite_file(database.parse_url(new_sqlite(tmp_path)))
    assert file is not None
    slow, fast = (sqlite3.connect(file, isolation_level=None, timeout=5) for _ in range(2))
    slow.execute("BEGIN")
    slow.execute("SELECT count(*) FROM runs").fetchone()
    fast.execute("INSERT INTO metric_keys (name) VALUES ('x')")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        slow.execute("INSERT INTO metric_keys (name) VALUES ('y')")
    slow.close()
    fast.close()


def test_several_controllers_may_make_the_same_new_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/history.db"
    barrier = threading.Barrier(4)

    def open_it() -> None:
        barrier.wait()
        HistoryStore(url).close()

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(open_it) for _ in range(4)]:
            one.result()
    with HistoryStore(url) as store:
        assert store.run_ids() == []
    assert not list((tmp_path / "new").glob(".*")), "what the slower processes made is removed"


def test_a_new_file_takes_nothing_from_a_removed_one(tmp_path: Path, runs: Path) -> None:
    """A process that was killed leaves the log of the file behind, and SQLite would copy it into the new file."""
    file = tmp_path / "history.db"
    url = f"sqlite:///{file}"
    beside = [file.with_name(f"{file.name}{suffix}") for suffix in ("-wal", "-shm")]
    with HistoryStore(url) as store:
        synced(whole_run(runs), store)
        left = {path: path.read_bytes() for path in beside}
    file.unlink()
    for path, content in left.items():
        path.write_bytes(content)
    with HistoryStore(url) as store, store.reading() as connection:
        assert store.run_ids() == []
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
