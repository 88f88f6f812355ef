"""docs/database.md: every column is explained, and every statement on the page returns rows on both databases."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from history_tools import RunFiles, at, new_sqlite, run_sql, whole_run
from made_reports import decision_of

from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import VIEWS, metadata
from rlhf_core.schemas.attempts import AttemptState, PromotionState, RunState, StageState
from rlhf_core.schemas.failures import Action, DecidedBy, FailureKind
from rlhf_core.schemas.journal import DecisionMade, IncidentFound
from rlhf_core.watchdog.ingest import sync

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "database.md").read_text()


def statements() -> dict[str, str]:
    """SQL statements of the page, keyed by the question above each."""
    return dict(re.findall(r"^### ([^\n]+\?)\n\n```sql\n(.*?)\n```$", PAGE, flags=re.DOTALL | re.MULTILINE))


@pytest.fixture
def filled(store: HistoryStore, runs: Path) -> HistoryStore:
    """A history with a run that has ended after incidents, and one that is training."""
    sync(whole_run(runs).dir, store)
    active = RunFiles(runs, "active", "bbbbbb", created=100.0).created()
    active.moved(RunState.PREFLIGHT, 101)
    active.moved(RunState.QUEUED, 102)
    active.planned(1, 102)
    active.moved(RunState.TRAINING, 104)
    for step in (1, 2):
        active.metrics(1, 0, step, 108 + 2 * step, **{"eval/greedy": 0.5})
    active.metrics(1, 1, 1, 114)  # a restart from the beginning
    sync(active.dir, store)
    return store


def test_every_statement_of_the_page_has_the_right_answer(filled: HistoryStore) -> None:
    answers = {title: run_sql(filled, sql).rows for title, sql in statements().items()}
    assert len(answers) == 10
    assert [title for title, rows in answers.items() if not rows] == []
    (active,) = answers["Which runs are active, and how far are they?"]
    assert (active[0][:6], active[1], active[3]) == ("active", "training", 1)
    gains = answers["How much better did each run make its model?"]
    assert [(row[1], round(row[5], 2)) for row in gains] == [("sampled", 0.5), ("greedy", 0.18)]
    lost = answers["What did each kind of failure cost?"]
    assert {row[0]: row[1] for row in lost} == {"worker_killed": 1, "node_lost": 1}


def test_no_statement_of_the_page_reads_the_metrics_of_all_runs(tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS))
    from generators.database import QUESTIONS

    def scans(sql: str) -> bool:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}").all()
        return any(re.fullmatch(r"SCAN (m|metrics)\b.*", step[-1]) for step in plan)

    with HistoryStore(new_sqlite(tmp_path)) as store, store.reading() as connection:
        assert scans("SELECT run_id, key, mean_s FROM run_step_time"), "control"
        assert [title for title, sql in QUESTIONS.items() if scans(sql)] == []


def test_the_decision_about_an_incident_of_the_controller_is_shown(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs).created()
    run.planned(1, 0)
    incident = run.incident(1, 0, FailureKind.WORKER_KILLED, 20)
    run.decision(1, 0, Action.NEW_ATTEMPT, 20)
    lost = incident.model_copy(update={"failure_kind": FailureKind.NODE_LOST, "seen_at": at(21)})
    run.journal(IncidentFound(incident=lost), 21)
    run.journal(DecisionMade(decision=decision_of(Action.STOP, decided_by=DecidedBy.CONTROLLER)), 22)
    sync(run.dir, store)
    sql = statements()["What went wrong in the newest runs, and what was done about it?"]
    assert [(row[2], row[7]) for row in run_sql(store, sql).rows] == [
        ("node_lost", "stop"),
        ("worker_killed", "new_attempt"),
    ]


def test_a_statement_that_does_not_fit_the_tables_is_seen(store: HistoryStore) -> None:
    """Negative control."""
    broken = next(iter(statements().values())).replace("progress_at", "last_seen_at")
    with pytest.raises(Exception, match="names a missing table or column"):
        run_sql(store, broken)


def test_every_column_of_every_table_and_view_has_its_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)`.*\| (.*) \|$", PAGE, flags=re.MULTILINE)
    parts = re.split(r"^### `(\w+)`$", PAGE, flags=re.MULTILINE)
    described = {
        name: set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    for name, table in metadata.tables.items():
        assert described[name] == set(table.columns.keys()), name
    assert [name for name, meaning in rows if not meaning.strip()] == []
    headings = set(re.findall(r"^### `(\w+)`$", PAGE, flags=re.MULTILINE))
    assert headings == {*metadata.tables, *VIEWS}


def test_every_state_of_the_tables_is_listed() -> None:
    tables, _views = PAGE.split("\n## Views\n")
    listed = re.findall(r"^\| `state` \| text \|  \| (`.*) \|$", tables, flags=re.MULTILINE)
    known = (RunState, StageState, PromotionState, AttemptState)
    assert [set(re.findall(r"`(\w+)`", states)) for states in listed] == [{*states} for states in known]


def test_the_views_of_the_page_are_those_of_the_database(store: HistoryStore) -> None:
    """Their columns are declared beside the SQL that creates them: the declaration must be correct."""
    from rlhf_core.history.tables import ViewBase

    for name, view in ViewBase.metadata.tables.items():
        assert run_sql(store, f"SELECT * FROM {name}").columns == [column.name for column in view.columns], name


def test_every_table_is_in_the_picture_once() -> None:
    sys.path.insert(0, str(DOCS))
    from generators.database import GROUPS

    assert sorted(["runs", *(name for names in GROUPS.values() for name in names)]) == sorted(metadata.tables)
    drawn = [element.text for element in ElementTree.parse(DOCS / "images" / "database.svg").iter() if element.text]
    assert [name for name in metadata.tables if drawn.count(name) != 1] == []
