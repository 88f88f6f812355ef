"""The Grafana dashboards: their queries run on a real PostgreSQL, as Grafana's role, without Grafana.

Grafana's macros are expanded as its documentation describes.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from history_tools import T0, RunFiles, at, postgres, remove_run, whole_run

from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.attempts import AttemptState, RunState
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.journal import AttemptMoved, IncidentFound
from rlhf_core.watchdog.ingest import sync

GRAFANA = Path(__file__).parents[2] / "infra" / "grafana"
BOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in GRAFANA.glob("dashboards/*.json")}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"]]
TYPES = {"barchart", "stat", "table", "timeseries", "trend"}

FROM, TO = T0 - timedelta(days=10), T0 + timedelta(days=10)
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


def expanded(sql: str, values: dict[str, list[str]]) -> str:
    """A query as Grafana sends it: https://grafana.com/docs/grafana/latest/datasources/postgres/"""

    def group(found: re.Match[str]) -> str:
        seconds = int(found[3]) * _SECONDS[found[4]]
        alias = ' AS "time"' if found[1] else ""
        return f"floor(extract(epoch from {found[2]})/{seconds})*{seconds}{alias}"

    sql = re.sub(r"\$__timeFilter\(([^)]+)\)", rf"\1 BETWEEN '{FROM.isoformat()}' AND '{TO.isoformat()}'", sql)
    sql = re.sub(r"\$__timeGroup(Alias)?\(([^,]+), '(\d+)([mhd])'\)", group, sql)
    for name, chosen in values.items():
        quoted = ",".join("'" + value.replace("'", "''") + "'" for value in chosen)
        sql = sql.replace(f"${{{name}:sqlstring}}", quoted)
    assert "$" not in sql, f"a macro or variable is left: {sql}"
    return sql


@pytest.fixture(scope="module")
def url() -> str:
    """A history with a run, and the role that reads it."""
    url = postgres().migrated_database()
    for _ in range(2):  # it may be run again
        postgres().make_reader(url, "rlhf")
    return url


@pytest.fixture(scope="module")
def run_id(url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with everything."""
    run = whole_run(tmp_path_factory.mktemp("runs"))
    with HistoryStore(url) as store:
        sync(run.dir, store)
    return run.run_id


@pytest.fixture(scope="module")
def grafana(url: str, run_id: str) -> Iterator[Any]:
    """A connection as Grafana's role."""
    import psycopg

    with psycopg.connect(url.replace("rlhf@", "rlhf_reader@"), autocommit=True) as connection:
        yield connection


def values_of(board: dict[str, Any], run_id: str) -> dict[str, list[str]]:
    """Selected values of each variable."""
    picked = {"run": [run_id], "metric": ["train/loss"], "node": ["n1", "n2"]}
    return {variable["name"]: picked[variable["name"]] for variable in board["templating"]["list"]}


def answers(grafana: Any, run_id: str, board: str, title: str) -> list[tuple[Any, ...]]:
    """Rows of the panel with a title."""
    (panel,) = [panel for panel in BOARDS[board]["panels"] if panel["title"] == title]
    sql = expanded(panel["targets"][0]["rawSql"], values_of(BOARDS[board], run_id))
    return list(grafana.execute(sql).fetchall())


def misfit(kind: str, names: list[str], rows: list[tuple[Any, ...]]) -> str:
    """Reason why a panel of a type cannot display a table; empty if it can."""

    def numbers(columns: range) -> bool:
        return all(not isinstance(row[index], str | datetime) for row in rows for index in columns)

    rest = range(1, len(names))
    first = [row[0] for row in rows]
    match kind:
        case "timeseries":
            values = range(2, len(names)) if "metric" in names else rest
            if names[0] != "time" or first != sorted(first) or not values or not numbers(values):
                return "needs a rising column `time`, and numbers"
        case "trend":
            if names[0] != "step" or first != sorted(set(first)) or not rest or not numbers(rest):
                return "needs a column `step` that rises, each once, and numbers"
        case "barchart":
            if not all(isinstance(value, str) for value in first) or not rest or not numbers(rest):
                return "needs a text and numbers"
        case "stat":
            if len(names) != 1 or len(rows) != 1 or not numbers(range(1)):
                return "needs one number"
    return "" if rows else "has no rows"


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=lambda value: value if isinstance(value, str) else value["id"])
def test_every_panel_can_show_its_result(board: str, panel: dict[str, Any], grafana: Any, run_id: str) -> None:
    (target,) = panel["targets"]
    cursor = grafana.execute(expanded(target["rawSql"], values_of(BOARDS[board], run_id)))
    names = [column.name for column in cursor.description]
    rows = cursor.fetchall()
    if panel["title"] == "At work now":
        assert rows == []  # the one run is over
    else:
        assert misfit(panel["type"], names, rows) == ""
    assert target["format"] == ("time_series" if panel["type"] == "timeseries" else "table")
    known = set(names)
    for override in panel["fieldConfig"]["overrides"]:
        assert override["matcher"]["options"] in known


@pytest.mark.parametrize("board", BOARDS)
def test_every_variable_offers_existing_values(board: str, grafana: Any, run_id: str) -> None:
    offered = {}
    for variable in BOARDS[board]["templating"]["list"]:
        rows = grafana.execute(expanded(variable["query"], values_of(BOARDS[board], run_id))).fetchall()
        offered[variable["name"]] = {row[0] for row in rows}
    for name, picked in values_of(BOARDS[board], run_id).items():
        assert set(picked) <= offered[name]


@pytest.mark.parametrize(
    ("kind", "names", "rows"),
    [
        ("timeseries", ["created_at", "v"], [(T0, 1.0)]),
        ("timeseries", ["time", "v"], [(TO, 1.0), (T0, 1.0)]),
        ("timeseries", ["time", "metric"], [(T0, "a")]),
        ("trend", ["step", "v"], [(1, 0.5), (1, 0.6)]),
        ("barchart", ["n", "v"], [(1, 2)]),
        ("stat", ["a"], [("text",)]),
        ("table", ["a"], []),
    ],
)
def test_a_result_that_does_not_fit_is_detected(kind: str, names: list[str], rows: list[tuple[Any, ...]]) -> None:
    assert misfit(kind, names, rows)


def test_an_unknown_macro_is_detected() -> None:
    with pytest.raises(AssertionError, match="is left"):
        expanded("SELECT $__timeFiltre(created_at)", {})


def test_the_results_are_correct(grafana: Any, run_id: str) -> None:
    """Results for the whole run of the history tests, computed there."""
    ask = partial(answers, grafana, run_id)
    assert ask("overview", "Runs by state") == [("completed", 1)]
    assert [row[1] for row in ask("overview", "Runs")] == ["completed"]
    assert [row[0] for row in ask("run", "Run")] == ["completed"]
    assert {(kind, count) for _, kind, count in ask("overview", "Failures per day")} == {
        ("worker_killed", 1),
        ("node_lost", 1),
    }
    # 55 s, 2 s of them in queues, 20 s in steps that count
    assert ask("overview", "Goodput (ETTR) of all runs") == [(pytest.approx(20 / 53),)]
    # 4 s and 12 s without a step, 4 s and 2 s of steps made again, on one node; n2 was blamed for both
    ((node, hours),) = ask("nodes", "Node hours lost")
    assert (node, float(hours)) == ("n2", pytest.approx(22 / 3600))


def test_incidents_that_the_run_survived_and_those_found_twice(url: str, grafana: Any, tmp_path: Path) -> None:
    """An engine restarted alone costs no time, and the loss of a node is one failure for all who find it."""
    run = RunFiles(tmp_path, "sort", "cccccc", 200).created()
    for state in (RunState.PREFLIGHT, RunState.QUEUED):
        run.moved(state, 201)
    run.planned(1, 202)
    run.moved(RunState.TRAINING, 204)
    for step in (1, 2, 3):
        run.metrics(1, 0, step, 206 + 2 * step, **{"eval/greedy": 0.5})  # ends at 208, 210, 212
    run.incident(1, 0, FailureKind.WORKER_KILLED, 209, number=1)
    run.decision(1, 0, Action.RESTART_WORKERS, 209, number=1)
    lost = run.incident(1, 0, FailureKind.NODE_LOST, 213, number=2)
    run.journal(IncidentFound(incident=lost.model_copy(update={"number": 0, "seen_at": at(214)})), 214)
    run.journal(AttemptMoved(attempt=1, state=AttemptState.FAILED, cause="n2 was lost"), 214)
    run.planned(2, 215, resumed_from=1)
    run.metrics(2, 0, 2, 222)  # began at 220: 8 s without a step, and 4 s of steps made again

    ask = partial(answers, grafana, run.run_id)

    def counted() -> tuple[dict[str, int], float, int]:
        failures: dict[str, int] = {}
        for _, kind, count in ask("overview", "Failures per day"):
            failures[kind] = failures.get(kind, 0) + count
        ((_, hours),) = ask("nodes", "Node hours lost")
        return failures, 3600 * float(hours), sum(count for _, _, count in ask("nodes", "Strikes per day"))

    before, cost_before_s, strikes_before = counted()
    with HistoryStore(url) as store:
        sync(run.dir, store)
        try:
            after, cost_s, strikes = counted()
            (active,) = ask("overview", "At work now")
            incidents = [row[6] for row in ask("overview", "Runs") if row[0] == run.run_id]
            struck = [row[2] for row in ask("nodes", "Strikes") if row[3] == run.run_id]
        finally:
            remove_run(store, run.run_id)  # the other tests expect a single run
    assert {kind: count - before[kind] for kind, count in after.items()} == {"worker_killed": 1, "node_lost": 1}
    assert cost_s - cost_before_s == pytest.approx(12)
    assert (strikes - strikes_before, sorted(struck), incidents) == (2, ["node_lost", "worker_killed"], [2])
    assert (active[0], active[3]) == (run.run_id, 2)


@pytest.mark.parametrize(("after", "state"), [(0.2, "completed, regressed"), (0.74, "completed")])
def test_a_fallen_held_out_score_is_shown(url: str, grafana: Any, tmp_path: Path, after: float, state: str) -> None:
    run = whole_run(tmp_path, "sort", "bbbbbb", 100)
    run.evaluation("after", "greedy", after, 52)
    for when, loss in (("before", 0.69), ("after", 0.9)):  # of preferences, which may rise while the ranking improves
        run.evaluation(when, "loss", loss, 53)
    with HistoryStore(url) as store:
        sync(run.dir, store)
        for board, title, column in (("overview", "Runs", 1), ("run", "Run", 0)):
            rows = answers(grafana, run.run_id, board, title)
            assert [row[column] for row in rows if board == "run" or row[0] == run.run_id] == [state]
        remove_run(store, run.run_id)  # the other tests expect a single run


# ---------------------------------------------------------------------------------------------------------------------
# The role, the provisioning, the form


def test_the_role_reads_and_does_nothing_else(grafana: Any, url: str) -> None:
    import psycopg

    assert grafana.execute("SHOW default_transaction_read_only").fetchone() == ("on",)
    grafana.execute("SET default_transaction_read_only = off")
    try:
        for statement in ("DELETE FROM runs", "UPDATE leases SET token = 0", "CREATE TABLE mine (a int)"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                grafana.execute(statement)
    finally:
        grafana.execute("SET default_transaction_read_only = on")
    with psycopg.connect(url, autocommit=True) as owner:  # an object created by a later migration
        owner.execute("CREATE TABLE made_later (a int)")
        try:
            assert grafana.execute("SELECT COUNT(*) FROM made_later").fetchone() == (0,)
        finally:
            owner.execute("DROP TABLE made_later")


def test_the_provisioning_fits_the_dashboards() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/rlhf.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/rlhf.yaml").read_text())["providers"]
    assert source["user"] == "rlhf_reader"
    assert (provider["type"], provider["options"]["path"]) == ("file", "${RLHF_GRAFANA_DASHBOARDS}")
    expected = {"type": source["type"], "uid": source["uid"]}
    for _, panel in PANELS:
        assert panel["datasource"] == expected == panel["targets"][0]["datasource"]
    for board in BOARDS.values():
        assert all(variable["datasource"] == expected for variable in board["templating"]["list"])


@pytest.mark.parametrize("name", BOARDS)
def test_the_form_of_a_dashboard(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == f"rlhf-{name}"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in TYPES
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{(\w+):sqlstring\}", json.dumps(board)))
    assert used == variables
    assert {panel["repeat"] for panel in panels if "repeat" in panel} <= variables


def test_links_lead_to_a_dashboard_that_is_there() -> None:
    links = set(re.findall(r'"url": "/d/([^/]+)/', json.dumps(BOARDS)))
    assert links <= {board["uid"] for board in BOARDS.values()}
    assert links
