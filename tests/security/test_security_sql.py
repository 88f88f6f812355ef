"""SQL queries that never end, or whose results are too large: refused with a message, on SQLite too."""

import itertools
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from history_tools import new_sqlite, run_sql
from process_tools import Rlhf

from rlhf_core.cli.main import execute
from rlhf_core.errors import BadInput
from rlhf_core.history import queries, read_only, saved_queries, sql_limits
from rlhf_core.history.sql_limits import WorkClock
from rlhf_core.history.store import HistoryStore

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT {} FROM n"
ONE_INSTRUCTION = "SELECT instr(hex(zeroblob(16000000)), hex(zeroblob(8000000)) || '1')"
"""Quadratic within one function, which SQLite cannot interrupt: hours."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    new_sqlite(folder)
    return folder


@pytest.fixture
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HistoryStore]:
    (file,) = home.glob("*.db")
    url = f"sqlite:///{file}"
    monkeypatch.setenv("RLHF_HOME", str(home))
    monkeypatch.setenv("RLHF_DATABASE_URL", url)
    with HistoryStore(url) as found:
        yield found


@pytest.mark.parametrize(
    "text",
    [
        ENDLESS.format("max(x)"),
        ENDLESS.format("x") + " ORDER BY x DESC",
        "SELECT count(*) FROM " + ", ".join(f"json_each('{[0] * 60}') AS j{i}" for i in range(8)),
        ENDLESS.format("x") + " WHERE x < 0",
    ],
    ids=["aggregate", "sort", "join", "no row"],
)
def test_a_question_without_an_end_is_given_up(store: HistoryStore, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_only, "QUERY_TIMEOUT_S", 0.3)
    with pytest.raises(
        BadInput, match=r"took longer than 0.3 s of the database's time and was stopped: select fewer runs"
    ):
        run_sql(store, text, limit=10)
    assert run_sql(store, "SELECT 1").rows == [[1]], "control: the next query is answered"


INTERRUPTED = """
import os, signal, sys, threading
from rlhf_core.cli import query_deadline
from rlhf_core.cli.main import execute
query_deadline.GRACE_S = 600.0  # not what is tested here
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell takes it from what it starts in the background
threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
sys.exit(execute(["sql", sys.argv[1]]))
"""


def test_a_question_can_be_interrupted(store: HistoryStore) -> None:
    command = [sys.executable, "-c", INTERRUPTED, ENDLESS.format("max(x)")]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 130


HARD = """
import os, signal, sys, threading
from rlhf_core.cli import query_deadline
from rlhf_core.cli.main import execute
from rlhf_core.history import read_only
query_deadline.GRACE_S = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "time":
    read_only.QUERY_TIMEOUT_S = 0.5
else:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
sys.exit(execute(["sql", sys.argv[2]]))
"""


@pytest.mark.parametrize(("why", "code", "words"), [("time", 2, b"could not be ended"), ("key", 130, b"")])
def test_one_instruction_without_an_end_ends_the_program(
    store: HistoryStore, why: str, code: int, words: bytes
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HARD, why, ONE_INSTRUCTION], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr


def test_a_blob_of_400_mb_is_an_error_in_words(store: HistoryStore, rlhf: Rlhf) -> None:
    for text in ("SELECT zeroblob(400000000)", "SELECT hex(zeroblob(60000000))", "SELECT x'00', zeroblob(400000000)"):
        assert execute(["sql", text]) == 2
        output = rlhf("sql", text, "--json", code=2).stderr
        assert "larger than 64 MiB, the limit of `rlhf sql`: omit its column" in output
        assert "bug" not in output


def test_a_stored_value_that_is_too_large_leaves_the_other_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_sqlite(tmp_path)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as writing:
        writing.execute("INSERT INTO metric_keys (key_id, name) VALUES (1, ?)", ("x" * 2_000_000,))
    writing.close()
    monkeypatch.setattr(sql_limits, "MAX_VALUE_BYTES", 1_000_000)
    with HistoryStore(url) as store:
        with pytest.raises(BadInput, match="omit its column"):
            run_sql(store, "SELECT * FROM metric_keys")
        assert run_sql(store, "SELECT key_id FROM metric_keys").rows == [[1]]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 'x' LIKE '" + "%a" * 600 + "'",
        "SELECT '" + "x" * (1 << 20) + "'",
        "SELECT " + "(" * 2000 + "1" + ")" * 2000,
        "SELECT json_extract('" + "[" * 3000 + "', '$')",
        "SELECT " + ", ".join(["1"] * 3000),
    ],
    ids=["pattern", "statement", "brackets", "json", "columns"],
)
def test_what_is_too_large_in_another_way_is_refused(store: HistoryStore, text: str) -> None:
    with pytest.raises(BadInput):
        run_sql(store, text)


def test_an_answer_that_memory_would_not_hold_is_refused(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_limits, "MAX_ANSWER_BYTES", 1_000_000)
    with pytest.raises(BadInput, match="after 11 rows: select fewer columns or rows"):
        run_sql(store, ENDLESS.format("hex(zeroblob(50000))"), limit=1000)


def test_rows_are_read_as_they_are_asked_for(store: HistoryStore, rlhf: Rlhf) -> None:
    """The first rows of an endless result arrive at once."""
    with queries.stream_sql(store, ENDLESS.format("x, x * x")) as answer:
        assert answer.columns == ["x", "x * x"]
        assert list(itertools.islice(answer.rows, 3)) == [[1, 1], [2, 4], [3, 9]]
    output = rlhf("sql", ENDLESS.format("x"), "--json", "--limit", "3")
    assert json.loads(output.stdout) == [{"x": 1}, {"x": 2}, {"x": 3}]
    assert "only the first 3 rows" in output.stderr


def test_the_time_of_the_reader_does_not_count(store: HistoryStore) -> None:
    clock = WorkClock(0.5)
    with saved_queries.stream(store, saved_queries.parse(ENDLESS.format("x")), {}, clock) as answer:
        for _ in range(3):
            next(answer.rows)
            time.sleep(0.3)
    assert clock.used_s < 0.5


def test_a_list_in_json_looks_as_ever(store: HistoryStore, rlhf: Rlhf) -> None:
    answer = rlhf("sql", "SELECT 1 AS a, 'x' || char(10) || char(133) AS b UNION ALL SELECT 2, NULL", "--json")
    assert answer.stdout == (
        '[\n  {\n    "a": 1,\n    "b": "x\\n\\u0085"\n  },\n  {\n    "a": 2,\n    "b": null\n  }\n]\n'
    )
    assert rlhf("sql", "SELECT 1 WHERE 0", "--json").stdout == "[]\n"


def test_an_answer_that_breaks_off_is_no_whole_list(
    store: HistoryStore, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_only, "QUERY_TIMEOUT_S", 0.2)
    output = rlhf("sql", ENDLESS.format("x"), "--json", code=2)
    with pytest.raises(json.JSONDecodeError):
        json.loads(output.stdout)
    assert "took longer" in output.stderr


def test_reading_a_part_ends_the_query(store: HistoryStore) -> None:
    command = [sys.executable, "-m", "rlhf_core.cli.main", "sql", ENDLESS.format("x"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"[\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1
