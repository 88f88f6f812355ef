"""Malicious queries: rejections on real databases, and the guard that rejects them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from history_tools import dump, new_sqlite, postgres, run_sql, whole_run
from psycopg import sql

from rlhf_core.errors import BadInput, UnsafeDatabase
from rlhf_core.history import database, migrate, read_only, saved_queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.watchdog.ingest import sync

PARSER = "refused: .*syntax error"
"""Rejected before anything is executed: a cursor can only be declared for queries."""

LEAVING = "permission denied for function set_config|permission denied to set|must be (a )?(super|member)"
"""Rejected, because statements cannot leave their role."""

HARM = f"{LEAVING}|permission denied"

REFUSED_BY_POSTGRES = {
    "COPY (SELECT 1) TO PROGRAM 'touch {folder}/made'": PARSER,
    "COPY runs FROM PROGRAM 'touch {folder}/made'": PARSER,
    "COPY (SELECT 1) TO '{folder}/made'": PARSER,
    "DO $$ BEGIN RESET ROLE; DELETE FROM runs; END $$": PARSER,
    "RESET ROLE": PARSER,
    "SET ROLE NONE": PARSER,
    "EXPLAIN ANALYZE DELETE FROM runs": PARSER,
    "CALL pg_catalog.pg_terminate_backend(1)": PARSER,
    "WITH gone AS (DELETE FROM runs RETURNING 1) SELECT * FROM gone": "must not contain data-modifying statements",
    "SELECT 1 FROM runs; DELETE FROM runs": "cannot insert multiple commands",
    "SELECT * FROM runs FOR UPDATE": "read-only|permission denied|FOR UPDATE",
    "SELECT pg_terminate_backend({victim})": "must be a (super|member)",
    "SELECT pg_cancel_backend({victim})": "must be a (super|member)",
    "SELECT lo_import('/etc/passwd')": "permission denied for function lo_import|read-only",
    "SELECT lo_export(1, '{folder}/made')": "permission denied for function lo_export|read-only",
    "SELECT pg_read_file('/etc/passwd')": "permission denied for function pg_read_file",
    "SELECT pg_ls_dir('/')": "permission denied for function pg_ls_dir",
    "SELECT pg_reload_conf()": "permission denied for function pg_reload_conf",
    "SELECT pg_rotate_logfile()": "permission denied for function",
    "SELECT set_config('transaction_read_only', 'off', true)": "read-write mode|permission denied",
    "SELECT nextval('metric_keys_key_id_seq')": "read-only|permission denied",
    "SELECT setval('metric_keys_key_id_seq', 1)": "read-only|permission denied",
    "SELECT * INTO TEMP taken FROM runs": "refused: .*not allowed here",
    "SELECT 1; COMMIT; DELETE FROM runs": "cannot insert multiple commands",
    "SELECT 1) TO STDOUT; DELETE FROM runs; --": "syntax error|multiple commands",
    "COMMIT": PARSER,
    "ROLLBACK AND CHAIN": PARSER,
    "SET statement_timeout = 0": PARSER,
    "SET SESSION AUTHORIZATION DEFAULT": PARSER,
    "CREATE FUNCTION evil() RETURNS int LANGUAGE sql AS 'DELETE FROM runs RETURNING 1'": PARSER,
    "CREATE TEMP VIEW runs AS SELECT 1": PARSER,
    "PREPARE p AS DELETE FROM runs": PARSER,
    "DECLARE c CURSOR FOR SELECT 1": PARSER,
    "LISTEN somebody": PARSER,
    "SELECT pg_stat_file('/etc/passwd')": "permission denied for function pg_stat_file",
    "SELECT pg_read_binary_file('/etc/passwd')": "permission denied for function pg_read_binary_file",
    "SELECT pg_promote()": "permission denied for function pg_promote|recovery is not in progress",
    "SELECT pg_switch_wal()": "permission denied for function pg_switch_wal",
    "SELECT pg_create_restore_point('x')": "permission denied for function pg_create_restore_point",
    "SELECT query_to_xml('DELETE FROM runs', true, true, '')": "read-only|permission denied|non-volatile|not allowed",
    # Regaining rights first, in the same statement: a subquery, a rule of pg_settings, a statement within a statement.
    "SELECT set_config('role', 'none', true)": LEAVING,
    "SELECT set_config('session_authorization', 'rlhf', true)": LEAVING,
    "SELECT pg_terminate_backend({victim}) FROM (SELECT set_config('role', 'none', true)) AS left_role": HARM,
    "WITH r AS MATERIALIZED (SELECT set_config('role', 'none', true)) SELECT pg_cancel_backend({victim}) FROM r": HARM,
    "SELECT query_to_xml('SELECT pg_reload_conf()', true, true, '') FROM (SELECT set_config('role', 'none', true)) r": (
        HARM
    ),
    "SELECT pg_read_file('/etc/passwd') FROM (SELECT set_config('role', 'none', true)) AS left_role": HARM,
    "SELECT pg_ls_dir('/') FROM (SELECT set_config('role', 'none', true)) AS left_role": HARM,
    "SELECT rolpassword FROM pg_authid, (SELECT set_config('role', 'none', true)) AS left_role": HARM,
    "SELECT query_to_xml('SELECT set_config(''role'', ''none'', true)', true, true, ''), pg_reload_conf()": HARM,
    "SELECT query_to_xml('UPDATE pg_settings SET setting = ''none'' WHERE name = ''role''', true, true, ''), "
    "query_to_xml('SELECT pg_reload_conf()', true, true, '')": f"{HARM}|read-only|non-volatile",
    "SELECT query_to_xml('SET ROLE NONE', true, true, ''), pg_reload_conf()": f"{HARM}|not allowed|non-volatile",
    "SELECT query_to_xml('COPY (SELECT 1) TO PROGRAM ''touch {folder}/made''', true, true, '')": (
        "permission denied|not allowed|non-volatile|COPY"
    ),
    "SELECT pg_drop_replication_slot('x') FROM (SELECT set_config('role', 'none', true)) AS left_role": HARM,
    "SET TRANSACTION READ WRITE": PARSER,
    "SET default_transaction_read_only = off": PARSER,
    "DELETE FROM runs": PARSER,  # last: no setting outlives its statement
}


@pytest.fixture(scope="module")
def database_of_an_owner() -> Iterator[str]:
    """URL of a migrated database with an ordinary user and the role of the statements."""
    url = postgres().empty_database()
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("CREATE ROLE hostile_owner LOGIN")
        admin.execute("GRANT ALL ON SCHEMA public TO hostile_owner")
    theirs = url.replace("//rlhf@", "//hostile_owner@")
    migrate.upgrade(database.parse_url(theirs))
    postgres().make_reader(url, "hostile_owner")
    yield theirs
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("REASSIGN OWNED BY hostile_owner TO rlhf")
        admin.execute("DROP OWNED BY hostile_owner")
        admin.execute("DROP ROLE hostile_owner")


@pytest.fixture(scope="module")
def postgres_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HistoryStore]:
    """A history with a run, opened by the server's superuser, who queries as the reader."""
    with HistoryStore(postgres().migrated_database()) as store:
        store.clear()
        sync(whole_run(tmp_path_factory.mktemp("runs")).dir, store)
        yield store


def assert_harm_is_refused(store: HistoryStore) -> None:
    """Assert that every statement is refused for its reason, and that none of them has any effect."""
    made = postgres().folder / "made"
    before = dump(store)
    with postgres().superuser() as victim:
        for statement, refusal in REFUSED_BY_POSTGRES.items():
            with pytest.raises(BadInput, match=refusal):
                run_sql(store, statement.format(folder=made.parent, victim=victim.info.backend_pid))
            assert victim.execute("SELECT 1").fetchone() == (1,), statement
            assert not made.exists(), statement
    assert dump(store) == before


def test_postgresql_refuses_harm(postgres_store: HistoryStore) -> None:
    assert_harm_is_refused(postgres_store)


@pytest.fixture(scope="module")
def superusers_database() -> str:
    """URL of a migrated database, with the server's superuser in it."""
    url = postgres().empty_database()
    migrate.upgrade(database.parse_url(url))
    return url


@pytest.fixture
def bare_superuser(superusers_database: str) -> str:
    """URL of the same database without ``infra/reader.sql``."""
    postgres().make_reader(superusers_database, "rlhf")  # the role exists in any case, because it belongs to the server
    with psycopg.connect(superusers_database, autocommit=True) as admin:
        admin.execute("DROP OWNED BY rlhf_reader")  # its rights in this database
        admin.execute("GRANT EXECUTE ON FUNCTION pg_catalog.set_config(text, text, boolean) TO PUBLIC")
    return superusers_database


def test_without_the_reading_role_a_superuser_is_refused_and_told_what_to_do(
    bare_superuser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the advice is followed literally in a shell, the reading role answers the same statement."""
    monkeypatch.setenv("RLHF_DATABASE_URL", bare_superuser)
    with HistoryStore(bare_superuser) as store:
        for statement in ("SELECT 1", "SELECT current_user", *REFUSED_BY_POSTGRES):
            with pytest.raises(UnsafeDatabase, match="superuser") as refused:
                run_sql(store, statement)
        assert saved_queries.run(store, saved_queries.find("goodput"), {}).rows == [], (
            "functions that come with the program may be called"
        )
        (advice,) = re.findall(r"`(rlhf db reader .*?)`", str(refused.value))
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(["sh", "-ec", advice], check=True, env={**os.environ, "PATH": programs}, capture_output=True)
        assert run_sql(store, "SELECT current_user").rows == [["rlhf_reader"]]


def test_the_advice_to_make_the_role_lets_psql_ask_for_the_password(bare_superuser: str) -> None:
    url = bare_superuser.replace("//rlhf@", "//rlhf:s3cret@") + ("&" if "?" in bare_superuser else "?")
    with HistoryStore(f"{url}sslpassword=s3cret") as store, pytest.raises(UnsafeDatabase) as refused:
        run_sql(store, "SELECT 1")
    assert "s3cret" not in str(refused.value)
    assert "| psql postgresql://rlhf@" in str(refused.value).replace("'", "")


@pytest.mark.parametrize(
    "weakened",
    [
        "GRANT EXECUTE ON FUNCTION pg_catalog.set_config(text, text, boolean) TO PUBLIC",
        "GRANT pg_read_server_files TO rlhf_reader",
        "REVOKE SELECT ON runs FROM rlhf_reader",
    ],
)
def test_a_reading_role_that_a_question_could_leave_is_not_enough_for_a_superuser(
    bare_superuser: str, weakened: str
) -> None:
    postgres().make_reader(bare_superuser, "rlhf")
    try:
        with psycopg.connect(bare_superuser, autocommit=True) as admin:
            admin.execute(weakened)
        with HistoryStore(bare_superuser) as store, pytest.raises(UnsafeDatabase, match="rlhf db reader"):
            run_sql(store, "SELECT 1")
    finally:
        with psycopg.connect(bare_superuser, autocommit=True) as admin:
            admin.execute("REVOKE pg_read_server_files FROM rlhf_reader")
        postgres().make_reader(bare_superuser, "rlhf")
    with HistoryStore(bare_superuser) as store:
        assert run_sql(store, "SELECT 1").rows == [[1]]


def test_an_ordinary_user_who_may_become_a_superuser_counts_as_one(bare_superuser: str) -> None:
    with psycopg.connect(bare_superuser, autocommit=True) as admin:
        admin.execute("CREATE ROLE promoted LOGIN")
        admin.execute("GRANT SELECT ON alembic_version TO promoted")
        try:
            with HistoryStore(bare_superuser.replace("//rlhf@", "//promoted@")) as store:
                assert run_sql(store, "SELECT 1").rows == [[1]], "control: with the owner's own rights"
                admin.execute("GRANT rlhf TO promoted")
                with pytest.raises(UnsafeDatabase, match="superuser"):
                    run_sql(store, "SELECT 1")
        finally:
            admin.execute("DROP OWNED BY promoted")
            admin.execute("DROP ROLE promoted")


def test_leaving_the_role_in_a_subquery_does_harm_where_it_is_not_withheld(bare_superuser: str) -> None:
    """Negative control: the server's role that may read everything, which used to run a superuser's statements."""
    leave = "(SELECT set_config('role', 'none', true)) AS left_role"
    with psycopg.connect(bare_superuser) as connection, postgres().superuser() as victim:
        connection.read_only = True
        connection.execute("SET LOCAL ROLE pg_read_all_data")
        cursor = (
            f"DECLARE statement CURSOR FOR SELECT pg_terminate_backend({victim.info.backend_pid}, 5000) FROM {leave}"
        )
        connection.execute(cursor)
        assert connection.execute("FETCH ALL FROM statement").fetchall() == [(True,)]
        with pytest.raises(psycopg.OperationalError):
            victim.execute("SELECT 1")


def test_without_these_walls_a_read_only_transaction_does_harm() -> None:
    """Negative control: effects that a superuser's read-only transaction does not prevent."""
    made = postgres().folder / "made"
    with postgres().superuser() as connection, postgres().superuser() as victim:
        connection.read_only = True
        connection.execute(f"COPY (SELECT 1) TO PROGRAM 'cat > {made}'")
        connection.execute(f"SELECT pg_terminate_backend({victim.info.backend_pid}, 5000)")
        with pytest.raises(psycopg.OperationalError):
            victim.execute("SELECT 1")
    made.unlink()  # fails where it was not created


def assert_nothing_made_remains(store: HistoryStore) -> None:
    """Assert that a large object, which a read-only transaction may create before PostgreSQL 16, is gone again."""
    run_sql(store, "SELECT lo_creat(-1)")
    assert run_sql(store, "SELECT oid FROM pg_largeobject_metadata").rows == []


def test_what_a_question_makes_is_gone_with_it(postgres_store: HistoryStore) -> None:
    assert_nothing_made_remains(postgres_store)


def test_a_question_cannot_take_the_rights_of_the_owner_back(database_of_an_owner: str, runs: Path) -> None:
    with HistoryStore(database_of_an_owner) as store:
        sync(whole_run(runs).dir, store)
        assert_harm_is_refused(store)
        assert_nothing_made_remains(store)
        assert run_sql(store, "SELECT current_user").rows == [["rlhf_reader"]]
        with pytest.raises(BadInput, match="permission denied for function set_config"):
            run_sql(store, "SELECT set_config('role', 'none', true)")
        with pytest.raises(BadInput, match="permission denied for table pg_authid"):
            run_sql(store, "SELECT rolpassword FROM pg_authid")


@pytest.mark.parametrize("of_the_user", [True, False], ids=["schema of the user", "named schema"])
def test_the_tables_may_be_in_another_schema_than_public(of_the_user: bool) -> None:
    url, owner = postgres().empty_database(), "owner of its own"
    schema = owner if of_the_user else 'the "history"'
    quoted = sql.Identifier(schema)
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(owner)))
        admin.execute(sql.SQL("CREATE SCHEMA {} AUTHORIZATION {}").format(quoted, sql.Identifier(owner)))
        if not of_the_user:
            admin.execute(sql.SQL("ALTER ROLE {} SET search_path = {}").format(sql.Identifier(owner), quoted))
        try:
            theirs = url.replace("//rlhf@", f"//{owner.replace(' ', '%20')}@")
            migrate.upgrade(database.parse_url(theirs))
            postgres().make_reader(url, owner)
            with HistoryStore(theirs) as store:
                assert run_sql(store, "SELECT current_user, count(*) FROM runs").rows == [["rlhf_reader", 0]]
            with psycopg.connect(url.replace("//rlhf@", "//rlhf_reader@")) as grafana:
                assert grafana.execute("SELECT count(*) FROM runs").fetchone() == (0,)
        finally:
            for statement in ("REASSIGN OWNED BY {} TO rlhf", "DROP OWNED BY {}", "DROP ROLE {}"):
                admin.execute(sql.SQL(statement).format(sql.Identifier(owner)))


def test_a_question_has_a_time_limit(postgres_store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_only, "QUERY_TIMEOUT_S", 1)
    with pytest.raises(BadInput, match="took longer than 1 s of the"):
        run_sql(postgres_store, "SELECT pg_sleep(60)")


def test_postgresql_answers_questions(postgres_store: HistoryStore) -> None:
    for statement in (
        "SELECT name FROM runs",
        "SELECT name FROM runs;",
        "  -- a comment\nSELECT name FROM runs -- another",
        "WITH r AS (SELECT name FROM runs) SELECT * FROM r",
        "SELECT name FROM runs WHERE name LIKE '%o%'",
        "TABLE run_goodput",
        "VALUES (1)",
    ):
        assert len(run_sql(postgres_store, statement).rows) == 1, statement


REFUSED_BY_SQLITE = {
    "ATTACH DATABASE '{folder}/made' AS other": "not authorized",
    "DETACH DATABASE main": "not authorized",
    "PRAGMA journal_mode = DELETE": "not authorized",
    "PRAGMA writable_schema = ON": "not authorized",
    "VACUUM INTO '{folder}/made'": "not authorized|VACUUM",
    "SELECT load_extension('{folder}/evil.so')": "not authorized|no such function",
    "SELECT writefile('{folder}/made', 'x')": "no such function",
    "SELECT readfile('/etc/passwd')": "no such function",
    "SELECT edit('x')": "no such function",
    "CREATE TEMP TABLE mine (x)": "not authorized",
    "CREATE TRIGGER t AFTER INSERT ON runs BEGIN SELECT 1; END": "not authorized",
    "WITH r AS (SELECT 1) DELETE FROM runs": "not authorized",
    "REPLACE INTO metric_keys (name) VALUES ('x')": "not authorized",
    "REINDEX": "not authorized",
    "ANALYZE": "not authorized",
    "SAVEPOINT s": "not authorized",
    "SELECT 1; DELETE FROM runs": "one statement",
    "BEGIN; DELETE FROM runs": "not authorized|one statement",
    "COMMIT": "not authorized",
    "RELEASE s": "not authorized",
    "PRAGMA query_only = OFF": "not authorized",
    "PRAGMA foreign_keys = OFF": "not authorized",
    "SELECT * FROM pragma_wal_checkpoint('TRUNCATE')": "not authorized|no such table|prohibited",
    "CREATE VIRTUAL TABLE temp.t USING fts5(x)": "not authorized",
    "CREATE TEMP VIEW runs AS SELECT 1": "not authorized",
    "DROP VIEW run_curve": "not authorized",
    "ALTER TABLE runs RENAME TO gone": "not authorized",
    "UPDATE runs SET state = 'failed' RETURNING run_id": "not authorized",
    "EXPLAIN DELETE FROM runs": "not authorized",
    "SELECT fts3_tokenizer('evil', x'0000000000000000')": "not authorized|no such function",
    "SELECT fts3_tokenizer('simple')": "not authorized|no such function",
    "UPDATE sqlite_master SET sql = ''": "not authorized|may not be modified",
}


def test_sqlite_refuses_harm(tmp_path: Path, runs: Path) -> None:
    with HistoryStore(new_sqlite(tmp_path)) as store:
        sync(whole_run(runs).dir, store)
        before = dump(store)
        for statement, refusal in REFUSED_BY_SQLITE.items():
            with pytest.raises(BadInput, match=refusal):
                run_sql(store, statement.format(folder=tmp_path))
            assert not (tmp_path / "made").exists(), statement
        assert dump(store) == before
