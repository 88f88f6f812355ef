"""Lost time, recoveries and goodput of random histories, as computed without SQL."""

import itertools
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from expected_times import LOSS, STEP_SECONDS, ExpectedTimes, Row, Rows, seconds
from history_tools import at, new_sqlite, table_row
from sqlalchemy import insert
from test_history_views import ask

from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import metadata
from rlhf_core.history.writers.attempts import write_last_valid_steps

LOST = "SELECT run_id, incident_id, failure_kind, downtime_s, repeated_s, lost_s FROM incident_lost_time ORDER BY 1, 2"
RECOVERED = (
    "SELECT run_id, incident_id, first_step_at, recovery_s, new_step_at, caught_up_s FROM run_recoveries ORDER BY 1, 2"
)
GOODPUT = "SELECT run_id, wall_s, queue_s, productive_s, repeated_s, lost_s, ettr FROM run_goodput ORDER BY 1"
UNDRIVEN = "SELECT run_id, began_at, ended_at, seconds FROM undriven_times ORDER BY 1, 2, 3"


def made_run(number: int, chance: random.Random) -> Rows:
    """Rows of a run with up to three attempts, some without steps, and up to six incidents at any time: before the
    first step, at the same time as another one, twice in a restart, at the end, found twice, or survived. Native and
    external, with and without step times; over, resumed after the end or the death of a controller, and active."""
    run_id = f"run-{number:03d}"
    about = {"run_id": run_id}
    external, timed, over = chance.random() < 0.4, chance.random() < 0.7, chance.random() < 0.7
    names = ("runs", "attempts", "restarts", "metrics", "latest_metrics", "incidents", "decisions", "events")
    rows: Rows = {name: [] for name in names}
    clock, step = 10.0, 0
    for attempt in range(1, chance.randint(1, 3) + 1):
        planned_at = at(clock) if chance.random() < 0.9 else None
        planned = {**about, "number": attempt, "planned_at": planned_at, "submitted_at": planned_at}
        rows["attempts"].append(table_row("attempts", **planned))
        for restart in range(chance.randint(1, 3)):
            step = max(0, step - chance.randint(0, 3))
            first, num_steps, began_at = step + 1, chance.choice((0, 1, 4)), at(clock)
            for _ in range(num_steps):
                step += 1
                clock += chance.randint(1, 900) / 100
                finite = chance.random() < 0.9
                line = {**about, "step": step, "attempt": attempt, "restart": restart, "time": at(clock)}
                value = chance.randint(1, 40) / 8 if finite else None
                values = {LOSS: 1.0, **({STEP_SECONDS: value} if timed and chance.random() < 0.9 else {})}
                rows["metrics"] += [
                    {**line, "key_id": key, "value": value, "non_finite": None if value is not None else "NaN"}
                    for key, value in values.items()
                ]
            rows["restarts"].append(
                {**about, "attempt": attempt, "restart": restart, "first_step": first if num_steps else None,
                 "last_step": step if num_steps else None, **_alive(began_at, at(clock), chance)}
            )  # fmt: skip
            clock += chance.randint(0, 4)
            for found in range(chance.randint(0, 2)):
                incident_id = f"{attempt}.{restart}.{found}"
                place = {**about, "attempt": attempt, "restart": restart}
                found_by = chance.choice(("agent", "agent", "controller"))
                seen_at = at(max(0.0, clock - chance.choice((0, 0, 3, 20))))
                rows["incidents"].append(incident_row(incident_id, seen_at, found_by=found_by, **place))
                if chance.random() < 0.5:
                    action = chance.choice(("continue", "restart_workers", "restart_in_place"))
                    decided = {**place, "decision_id": incident_id, "action": action, "excluded_nodes": []}
                    rows["decisions"].append(table_row("decisions", at(clock), **decided))
            clock += chance.randint(1, 30)
        # The controller noticed the start at once, late or never.
        rows["attempts"][-1]["started_at"] = chance.choice((planned_at, planned_at, at(clock), None))
        moves = [("controller_started", None), ("run_moved", "training")]
        if chance.random() < 0.4:
            moves += [("run_moved", "failed"), ("run_moved", "queued")]
        for kind, state in moves:
            place = {**about, "source": "control.jsonl", "position": len(rows["events"])}
            rows["events"].append(table_row("events", at(clock), **place, kind=kind, state=state))
            clock += chance.choice((0, 1, 50))
    rows["latest_metrics"] = list({row["key_id"]: row for row in rows["metrics"]}.values())
    trainer = {"kind": "command" if external else "native"}
    ended_at = at(clock) if over else None
    times = {"created_at": at(0), "ended_at": ended_at, "progress_at": at(clock - 1)}
    state = "failed" if over else "training"
    rows["runs"].append(table_row("runs", **about, state=state, spec={"trainer": trainer}, tags=[], **times))
    return rows


def incident_row(incident_id: str, seen_at: datetime, **facts: Any) -> Row:
    """A hang without suspects."""
    hang = {"failure_kind": "hang", "suspect_ranks": [], "suspect_nodes": []}
    return table_row("incidents", seen_at, incident_id=incident_id, **hang, **facts)


def _alive(began_at: datetime, last_step_at: datetime, chance: random.Random) -> Row:
    """Times of a restart, most with signs of life until its last step; some until later, some unknown."""
    if chance.random() < 0.1:
        return {"started_at": None, "ended_at": None}
    return {"started_at": began_at, "ended_at": last_step_at + timedelta(seconds=chance.choice((0, 0, 40)))}


def fill(store: HistoryStore, runs: list[Rows]) -> None:
    """Insert the rows of all runs."""
    with store.writing() as connection:
        names = [{"key_id": STEP_SECONDS, "name": "time/step_s"}, {"key_id": LOSS, "name": "train/loss"}]
        connection.execute(insert(metadata.tables["metric_keys"]), names)
        for name in runs[0]:
            made = [row for rows in runs for row in rows[name]]
            if made:
                connection.execute(insert(metadata.tables[name]), made)
        for rows in runs:
            write_last_valid_steps(connection, rows["runs"][0]["run_id"], 1)


def same(found: list[list[object]], expected: list[list[object]]) -> bool:
    """Compare rows; numbers to a millisecond, because times on SQLite are no more exact."""
    return len(found) == len(expected) and all(
        one == pytest.approx(other, abs=1e-3) if isinstance(other, float) else one == other
        for row, other_row in zip(found, expected, strict=True)
        for one, other in zip(row, other_row, strict=True)
    )


def with_times(rows: list[list[object]], *columns: int) -> list[list[object]]:
    """Rows of an answer with the times in some columns, which have no time zone on SQLite."""

    def as_time(value: object) -> datetime | None:
        return None if value is None else datetime.fromisoformat(str(value)).replace(tzinfo=at(0).tzinfo)

    return [[as_time(value) if index in columns else value for index, value in enumerate(row)] for row in rows]


@pytest.mark.parametrize("seed", [1, 2])
def test_views_answer_as_computed_without_sql(store: HistoryStore, seed: int) -> None:
    chance = random.Random(seed)
    runs = [made_run(number, chance) for number in range(60)]
    fill(store, runs)
    lost, recovered, goodput, undriven = (ask(store, question) for question in (LOST, RECOVERED, GOODPUT, UNDRIVEN))
    assert all(len(answer) > 20 for answer in (lost, recovered, goodput, undriven)), "the history has what is compared"
    times = {expected.run["run_id"]: expected for expected in map(ExpectedTimes, runs)}
    incidents = [(run_id, one) for run_id, of in times.items() for one in of.interruptions]
    incidents.sort(key=lambda found: (found[0], found[1]["incident_id"]))
    expected_lost: list[list[object]] = []
    for run_id, one in incidents:
        downtime_s, repeated_s = times[run_id].lost_s[one["incident_id"]]
        lost_s = downtime_s + repeated_s
        expected_lost.append([run_id, one["incident_id"], one["failure_kind"], downtime_s, repeated_s, lost_s])
    assert same(lost, expected_lost)
    expected_recovered = [[run_id, one["incident_id"], *times[run_id].recovery(one)] for run_id, one in incidents]
    assert same(with_times(recovered, 2, 4), expected_recovered)
    assert same(goodput, [[run_id, *of.goodput] for run_id, of in times.items()])
    spans = [[run_id, *span, seconds(*span)] for run_id, of in times.items() for span in sorted(of.undriven)]
    assert same(with_times(undriven, 1, 2), spans)


def long_run(*, external: bool, timed: bool) -> Rows:
    """Rows of a run with 40 restarts of 50 steps, each after an incident and from 10 steps earlier."""
    rows = made_run(0, random.Random(3))
    rows |= {name: [] for name in ("restarts", "metrics", "incidents", "decisions", "events")}
    about = {"run_id": "run-000", "attempt": 1}
    clock = 20
    for restart in range(40):
        steps = range(40 * restart + 1, 40 * restart + 51)
        for step in steps:
            clock += 1
            line = {**about, "restart": restart, "step": step, "time": at(clock), "value": 1.0, "non_finite": None}
            rows["metrics"] += [{**line, "key_id": key} for key in (STEP_SECONDS, LOSS) if timed or key == LOSS]
        start = {"started_at": at(clock - 49), "first_step": steps[0], "last_step": steps[-1]}
        rows["restarts"].append({**about, "restart": restart, **start})
        rows["incidents"].append(incident_row(f"1.{restart}", at(clock), found_by="agent", **about, restart=restart))
    rows["latest_metrics"] = list({row["key_id"]: row for row in rows["metrics"]}.values())
    rows["runs"][0]["spec"] = {"trainer": {"kind": "command" if external else "native"}}
    return rows


@pytest.mark.parametrize(
    ("external", "timed", "limit"), [(False, True, 3_000), (True, True, 12_000), (True, False, 4_000)]
)
def test_many_incidents_of_a_long_run_read_few_rows(tmp_path: Path, limit: int, *, external: bool, timed: bool) -> None:
    """Limits in thousands of instructions of SQLite's machine. Before the steps were found by the primary key: 6,281,
    45,266, and over 400,000."""
    with HistoryStore(new_sqlite(tmp_path)) as store:
        fill(store, [long_run(external=external, timed=timed)])
        for question in (LOST, RECOVERED, GOODPUT):
            with store.reading() as connection:
                driver: Any = connection.connection.driver_connection
                ticks = itertools.count(1)
                driver.set_progress_handler(lambda ticks=ticks: next(ticks) > limit, 1_000)
                assert connection.exec_driver_sql(question).all()
                driver.set_progress_handler(None, 0)


def test_a_run_counts_its_incidents_as_the_view_does(store: HistoryStore) -> None:
    chance = random.Random(7)
    fill(store, [made_run(number, chance) for number in range(20)])
    duplicates, incidents = (
        {str(row[0]) for row in ask(store, f"SELECT run_id || incident_id FROM {table}")}
        for table in ("duplicate_incidents", "incidents")
    )
    counted = {
        f"{run_id}{one['incident_id']}"
        for run_id in store.run_ids()
        for one in queries.show_run(store, run_id).counted_incidents
    }
    assert duplicates
    assert counted == incidents - duplicates
