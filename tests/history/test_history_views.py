"""Views and cached totals: goodput of all runs, recoveries, parts of a step's time, telemetry, outliers."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from history_tools import T0, RunFiles, at, dump, new_sqlite, remove_run, run_sql, synced, whole_run

from rlhf_core.errors import DatabaseUnavailable
from rlhf_core.files.appended import LineWriter
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.writers import metric_rows
from rlhf_core.history.writers import runs as run_rows
from rlhf_core.schemas.attempts import AttemptState, RunState
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.journal import AttemptMoved, AttemptPlanned, AttemptSubmitted, ControllerStarted
from rlhf_core.schemas.reports import AgentEvent
from rlhf_core.schemas.resources import Placement, Submission
from rlhf_core.watchdog.ingest import rebuild, sync


def ask(store: HistoryStore, question: str) -> list[list[object]]:
    """Rows of a query in SQL."""
    return run_sql(store, question).rows


COLUMNS = "run_id, name, state, wall_s, queue_s, productive_s, repeated_s, lost_s, ettr"


def assert_goodput_is_the_view(store: HistoryStore) -> None:
    """Assert that every figure of every run equals the view's, to the last bit."""
    kept, true = (
        ask(store, f"SELECT {COLUMNS} FROM {view} ORDER BY run_id") for view in ("all_goodput", "run_goodput")
    )
    assert kept == true


def test_goodput_of_all_runs_is_the_view_at_every_moment(store: HistoryStore, runs: Path) -> None:
    """The run has ended, is active, has ended and resumed, and was rebuilt."""
    whole_run(runs, "over", "aaaaaa")
    resumed = RunFiles(runs, "resumed", "bbbbbb", 100).created()
    for seconds, state in ((101, RunState.PREFLIGHT), (102, RunState.QUEUED)):
        resumed.moved(state, seconds)
    resumed.planned(1, 103)
    resumed.moved(RunState.TRAINING, 105)
    for step in (1, 2, 3):
        resumed.metrics(1, 0, step, 105 + 2 * step)
    resumed.moved(RunState.FAILED, 120)
    working = RunFiles(runs, "working", "cccccc", 200).created()
    rebuild(runs, store)
    assert_goodput_is_the_view(store)
    assert len(ask(store, "SELECT 1 FROM goodput_cache")) == 2
    resumed.moved(RunState.PREFLIGHT, 500, "resumed")
    sync(resumed.dir, store)
    assert_goodput_is_the_view(store)
    resumed.moved(RunState.QUEUED, 500.5)
    resumed.planned(2, 501, resumed_from=2)
    resumed.moved(RunState.TRAINING, 503)
    resumed.metrics(2, 0, 3, 510)
    sync(resumed.dir, store)
    assert_goodput_is_the_view(store)
    resumed.moved(RunState.CANCELLED, 520)
    working.metrics(1, 0, 1, 210)
    for run in (resumed, working):
        sync(run.dir, store)
    assert_goodput_is_the_view(store)
    assert len(ask(store, "SELECT 1 FROM goodput_cache")) == 2


def test_a_stale_cache_of_goodput_is_not_used(store: HistoryStore, runs: Path) -> None:
    """A late line of an ended run: the row of the cache is ignored."""
    synced(whole_run(runs), store)
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE goodput_cache SET productive_s = 77")
    assert ask(store, "SELECT productive_s FROM all_goodput") == [[77]], "control: the cache is used"
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE runs SET ingest_stamp = ingest_stamp - 1")
    assert_goodput_is_the_view(store)


def test_without_the_stamp_stale_goodput_would_be_shown(
    store: HistoryStore, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: an ingester that does not renew the cache, and a stamp that does not show it."""
    run = synced(whole_run(runs), store)
    monkeypatch.setattr(run_rows, "cache_goodput", lambda *_arguments: None)
    run.metrics(2, 0, 11, 54.5)
    sync(run.dir, store)
    assert_goodput_is_the_view(store)
    with store.writing() as connection:
        connection.exec_driver_sql(
            "UPDATE goodput_cache SET ingest_stamp = (SELECT r.ingest_stamp FROM runs r "
            "WHERE r.run_id = goodput_cache.run_id)"
        )
    with pytest.raises(AssertionError):
        assert_goodput_is_the_view(store)


def test_an_incident_without_a_step_after_it(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs).created()
    run.metrics(1, 0, 1, 10)
    run.incident(1, 0, FailureKind.HANG, 20)
    sync(run.dir, store)
    assert ask(store, "SELECT first_step_at, recovery_s, new_step_at FROM run_recoveries") == [[None, None, None]]


DAY = 86400.0
UNDRIVEN = "SELECT SUM(seconds) FROM undriven_times"


def driven(run: RunFiles, seconds: float) -> None:
    """Let a controller take the run."""
    run.token += 1
    run.journal(ControllerStarted(controller=f"anna@vm:{run.token}:1", flow_run_id="", flow_run_url=""), seconds)


def resumed(runs: Path, *, was_killed: bool) -> RunFiles:
    """Eight seconds of training, then two days in which nothing drives the run, then eight seconds until the next step.

    Args:
        was_killed: everything was killed after the last step; otherwise the run failed.
    """
    run = RunFiles(runs).created()
    driven(run, 1)
    for seconds, state in ((1, RunState.PREFLIGHT), (2, RunState.QUEUED)):
        run.moved(state, seconds)
    run.planned(1, 3)  # running at 4.5
    run.moved(RunState.TRAINING, 5)
    for step in (1, 2):
        run.metrics(1, 0, step, 6 + 2 * step)
    if not was_killed:
        run.incident(1, 0, FailureKind.WORKER_KILLED, 10)
        run.moved(RunState.FAILED, 10)
    driven(run, 10 + 2 * DAY)
    if was_killed:
        run.incident(1, 0, FailureKind.NODE_LOST, 10 + 2 * DAY)
    else:
        run.moved(RunState.PREFLIGHT, 10 + 2 * DAY)
    run.moved(RunState.QUEUED, 11 + 2 * DAY)
    run.planned(2, 12 + 2 * DAY, resumed_from=2)
    run.moved(RunState.TRAINING, 14 + 2 * DAY)
    run.metrics(2, 0, 3, 18 + 2 * DAY)
    run.moved(RunState.CANCELLED, 20 + 2 * DAY)
    return run


@pytest.mark.parametrize("was_killed", [False, True])
def test_time_without_a_driver_of_the_run_counts_nowhere(store: HistoryStore, runs: Path, was_killed: bool) -> None:
    run = synced(resumed(runs, was_killed=was_killed), store)
    (listed,) = queries.list_runs(store)
    shown = queries.show_run(store, run.run_id)
    about: dict[str, Any] = {"abs": 1e-3}
    for facts in (listed, shown.run):
        assert (facts["seconds"], facts["undriven_s"]) == (pytest.approx(20, **about), pytest.approx(2 * DAY, **about))
    assert shown.goodput["wall_s"] == pytest.approx(20, **about)
    assert ask(store, "SELECT recovery_s, caught_up_s FROM run_recoveries") == [[pytest.approx(8, **about)] * 2]
    downtime_s = 6 if was_killed else 0  # to the end of the run where it failed
    assert ask(store, "SELECT downtime_s FROM run_lost_time") == [[pytest.approx(downtime_s, **about)]]
    assert_goodput_is_the_view(store)


def test_a_job_that_trains_without_a_controller_goes_on_driving_the_run(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs).created()
    driven(run, 1)
    for step in (1, 2, 3):
        run.metrics(1, 0, step, 1000 * step)
    driven(run, 3001)
    sync(run.dir, store)
    assert ask(store, UNDRIVEN) == [[pytest.approx(1, abs=1e-3)]]


def test_a_job_that_waits_in_a_queue_without_a_controller_goes_on_driving_the_run(
    store: HistoryStore, runs: Path
) -> None:
    run = RunFiles(runs).created()
    driven(run, 1)
    placement = Placement(attempt=1, num_nodes=1, phases=())
    run.journal(AttemptPlanned(placement=placement), 2)
    run.journal(
        AttemptSubmitted(submission=Submission(attempt=1, scheduler="slurm", job_id="7", command=("python",))), 3
    )
    driven(run, DAY)
    sync(run.dir, store)
    assert ask(store, UNDRIVEN) == [[None]]


HOUR = 3600.0


def unseen(runs: Path) -> RunFiles:
    """A run whose controller dies after it has submitted a job on four nodes, which starts after a minute and trains
    for seven hours."""
    run = RunFiles(runs).created()
    driven(run, 1)
    for seconds, state in ((1, RunState.PREFLIGHT), (2, RunState.QUEUED)):
        run.moved(state, seconds)
    run.journal(AttemptPlanned(placement=Placement(attempt=1, num_nodes=4, phases=())), 3)
    submission = Submission(attempt=1, scheduler="slurm", job_id="7", command=("python",))
    run.journal(AttemptSubmitted(submission=submission), 4)
    run.event(1, 0, "agent_started", 60)
    for step in range(1, 71):
        run.metrics(1, 0, step, 60 + 356 * step, **{"time/step_s": 356.0})  # until 24,980 s
    return run


GOODPUT = "SELECT wall_s, queue_s, productive_s, ettr FROM run_goodput"


def test_a_job_that_starts_unseen_waits_until_its_own_start(store: HistoryStore, runs: Path) -> None:
    run = unseen(runs)
    driven(run, 20_000)  # in the middle of a step
    run.journal(AttemptMoved(attempt=1, state=AttemptState.RUNNING, cause="its job runs"), 20_001)
    run.moved(RunState.TRAINING, 20_001)
    run.outcome(1, AttemptState.COMPLETED, 24_990, 70)
    run.journal(AttemptMoved(attempt=1, state=AttemptState.COMPLETED, cause="done"), 24_991)
    for state in (RunState.EVALUATING, RunState.COMPLETED):
        run.moved(state, 25_000)
    synced(run, store)
    about: dict[str, Any] = {"abs": 1e-3}
    assert ask(store, GOODPUT) == [
        [pytest.approx(25_000, **about), pytest.approx(56, **about), 24_920, pytest.approx(24_920 / 24_944)]
    ]
    assert ask(store, UNDRIVEN) == [[None]], "the job drove the run"


def test_a_job_that_starts_and_ends_unseen(store: HistoryStore, runs: Path) -> None:
    """The next controller comes after an hour in which nothing drove the run."""
    run = unseen(runs)
    run.outcome(1, AttemptState.COMPLETED, 24_980, 70)
    driven(run, 24_980 + HOUR)
    run.journal(AttemptMoved(attempt=1, state=AttemptState.COMPLETED, cause="done"), 24_981 + HOUR)
    for state in (RunState.EVALUATING, RunState.COMPLETED):
        run.moved(state, 25_000 + HOUR)
    synced(run, store)
    about: dict[str, Any] = {"abs": 1e-3}
    assert ask(store, GOODPUT) == [
        [pytest.approx(25_000, **about), pytest.approx(56, **about), 24_920, pytest.approx(24_920 / 24_944)]
    ]
    assert ask(store, UNDRIVEN) == [[pytest.approx(HOUR, **about)]]
    (times,) = ask(store, "SELECT submitted_at, started_at, ended_at FROM attempt_times")
    found = [datetime.fromisoformat(str(time)).replace(tzinfo=UTC) for time in times]
    assert found == [at(4), at(60), at(24_980)]
    assert ask(store, "SELECT started_at FROM attempts") == [[None]], "control: no controller saw it run"


def test_a_job_does_not_start_before_its_submission(store: HistoryStore, runs: Path) -> None:
    """The clock of a node is slow."""
    run = RunFiles(runs).created()
    run.planned(1, 100)  # submitted at 100.5
    run.event(1, 0, "agent_started", 70)
    run.metrics(1, 0, 1, 110)
    synced(run, store)
    assert ask(store, "SELECT queue_s FROM run_goodput") == [[0]]


def test_a_job_does_not_end_before_its_start(store: HistoryStore, runs: Path) -> None:
    """The clock of a node is slow."""
    run = RunFiles(runs).created()
    run.planned(1, 100)  # submitted at 100.5
    run.event(1, 0, "agent_started", 70)
    run.outcome(1, AttemptState.COMPLETED, 85, 1)
    run.journal(AttemptMoved(attempt=1, state=AttemptState.COMPLETED, cause="done"), 130)
    synced(run, store)
    assert ask(store, "SELECT ended_at = started_at, started_at = submitted_at FROM attempt_times") == [[1, 1]]


def outlived(runs: Path, action: Action) -> RunFiles:
    """A hang of another group at 12 s, decided with ``action``; a rank is killed at 20 s, a step ends at 30 s."""
    run = RunFiles(runs).created()
    run.metrics(1, 0, 1, 10)
    run.incident(1, 0, FailureKind.HANG, 12, number=1)
    run.decision(1, 0, action, 12, number=1)
    run.metrics(1, 0, 2, 15)
    run.incident(1, 0, FailureKind.WORKER_KILLED, 20, number=2)
    run.decision(1, 0, Action.RESTART_IN_PLACE, 20, number=2)
    run.metrics(1, 1, 3, 30)
    return run


INTERRUPTED = "SELECT failure_kind FROM {} ORDER BY failure_kind"


@pytest.mark.parametrize("action", [Action.CONTINUE, Action.RESTART_WORKERS])
def test_an_incident_that_the_run_outlived_costs_no_time(store: HistoryStore, runs: Path, action: Action) -> None:
    sync(outlived(runs, action).dir, store)
    assert ask(store, "SELECT COUNT(*) FROM incidents") == [[2]]
    for view in ("interruptions", "incident_lost_time", "run_lost_time", "run_recoveries"):
        assert ask(store, INTERRUPTED.format(view)) == [["worker_killed"]], view
    (before,) = ask(store, "SELECT downtime_s FROM run_lost_time")
    assert before == [pytest.approx(30 - 2 - 15, abs=1e-3)], "from the last step to the beginning of the next"


def test_an_incident_that_ended_all_workers_costs_time(store: HistoryStore, runs: Path) -> None:
    """Control of the test above: a different decision about the same incident."""
    sync(outlived(runs, Action.RESTART_IN_PLACE).dir, store)
    for view in ("interruptions", "incident_lost_time", "run_lost_time", "run_recoveries"):
        assert ask(store, INTERRUPTED.format(view)) == [["hang"], ["worker_killed"]], view


def test_where_the_time_of_steps_went(store: HistoryStore, runs: Path) -> None:
    """Repeated steps count once."""
    run = RunFiles(runs).created()
    for step in (1, 2, 3):
        run.metrics(1, 0, step, step, **{"time/rollout_s": 1.5})
    for step in (3, 4):
        run.metrics(1, 1, step, 10 + step, **{"time/rollout_s": 0.5})
    sync(run.dir, store)
    found = ask(store, "SELECT key, num_steps, total_s, mean_s, share FROM run_step_time ORDER BY key")
    assert found == [["time/rollout_s", 4, 4.0, 1.0, 0.5], ["time/step_s", 4, 8.0, 2.0, 1.0]]


def test_telemetry_over_time(store: HistoryStore, runs: Path) -> None:
    synced(whole_run(runs), store)
    found = ask(store, "SELECT node, key, value FROM node_figures ORDER BY node, key, value")
    cpu = [[node, "cpu_percent", 42.0] for node in ("n1", "n1", "n2", "n2")]
    assert found == [*cpu, ["n2", "gpu0_power_w", 200.0], ["n2", "gpu0_power_w", 300.0]]


def test_what_stood_out_and_until_when(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs).created()
    writer = LineWriter(run.dir.attempt(1).restart(0).events("n1"))
    for seconds, message, finding in (
        (10, "n2 is hot", "begins"),
        (20, "n3 is slow", "begins"),
        (30, "no longer: n2 is hot", "ends"),
        (40, "n2 is hot", "begins"),
    ):
        writer.write(
            AgentEvent(time=at(seconds), kind="telemetry", node="n1", message=message, data={"finding": finding})
        )
    writer.close()
    sync(run.dir, store)
    with store.reading() as connection:
        rows = connection.exec_driver_sql("SELECT finding, ended_at FROM node_imbalance ORDER BY began_at").all()
    assert [(finding, ended_at is not None) for finding, ended_at in rows] == [
        ("n2 is hot", True),
        ("n3 is slow", False),
        ("n2 is hot", False),
    ]


def test_runs_are_filtered_by_owner_and_tag(store: HistoryStore, runs: Path) -> None:
    first = whole_run(runs, "sort", "aaaaaa")
    second = whole_run(runs, "other", "bbbbbb", created=100)
    for run in (first, second):
        sync(run.dir, store)

    def found(**filters: str) -> list[str]:
        return [run["run_id"] for run in queries.list_runs(store, **filters)]  # type: ignore[arg-type]

    assert found(owner="anna") == found(tag="nightly") == [second.run_id, first.run_id]
    assert found(tag="sort") == found(tag="nightly", name="sort") == [first.run_id]
    assert found(owner="berta") == found(tag="night") == []


def test_a_step_written_twice_keeps_its_first_value(store: HistoryStore, runs: Path) -> None:
    """In one batch and in two: PostgreSQL's COPY alone would reject the batch."""
    run = RunFiles(runs).created()
    run.metrics(1, 0, 1, 1, **{"a/b": 1.0})
    run.metrics(1, 0, 1, 2, **{"a/b": 2.0})
    sync(run.dir, store)
    run.metrics(1, 0, 1, 3, **{"a/b": 3.0, "a/c": 4.0})
    run.metrics(1, 0, 2, 4, **{"a/b": 5.0})
    sync(run.dir, store)
    question = "SELECT step, value FROM run_curve WHERE key IN ('a/b', 'a/c') ORDER BY key, step"
    assert ask(store, question) == [[1, 1.0], [2, 5.0], [1, 4.0]]
    expected = dump(store)["metrics"]
    rebuild(runs, store)
    assert dump(store)["metrics"] == expected


def test_refusals_of_the_database_are_explained_also_past_sqlalchemy(store: HistoryStore) -> None:
    time = "2026-03-01 12:00:00.000000" if "sqlite" in str(store.url) else T0
    rows: list[metric_rows.MetricRow] = [("run", 1, 1, 1, 0, None, None, time)]
    with pytest.raises(DatabaseUnavailable, match=r"(?i)check constraint"), store.writing() as connection:
        metric_rows.insert(connection, rows)


def test_without_the_trigger_the_metrics_of_a_removed_run_would_stay(tmp_path: Path, runs: Path) -> None:
    """Negative control of ``test_removing_a_run_removes_all_its_rows``: the table has no foreign keys."""
    run = whole_run(runs)
    with HistoryStore(new_sqlite(tmp_path)) as store:
        sync(run.dir, store)
        with store.writing() as connection:
            connection.exec_driver_sql("DROP TRIGGER metrics_follow_runs")
        remove_run(store, run.run_id)
        assert dump(store)["metrics"]
