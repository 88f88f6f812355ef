"""The reads of commands and reports, and the SQL of users."""

import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from history_tools import RunFiles, at, dump, events_of, postgres, run_sql, synced, whole_run
from made_reports import decision_of
from pydantic import TypeAdapter
from sqlalchemy import event

from rlhf_core.errors import BadInput, UnknownRun
from rlhf_core.files.appended import append_lines
from rlhf_core.history import queries, saved_queries
from rlhf_core.history.queries.rows import GoodputRow, PromotionRow, RunRow
from rlhf_core.history.run_shape import shape_key
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.compare import compare
from rlhf_core.render.exports.mlflow import facts
from rlhf_core.schemas.attempts import AttemptState, PromotionState, RunState, StageName
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import Action, DecidedBy, FailureKind
from rlhf_core.schemas.journal import (
    AttemptMoved,
    ChecksMade,
    ControllerStarted,
    DecisionMade,
    IncidentFound,
    PromotionMoved,
    StageStarted,
)
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.ingest import sync

DAY = 86_400

# ---------------------------------------------------------------------------------------------------------------------
# Selection of runs


@pytest.fixture
def three(store: HistoryStore, runs: Path) -> dict[str, str]:
    """Two runs of the same name and one of another: name in this test -> run id."""
    old = whole_run(runs, "sort", "aaaaaa", 0)
    new = RunFiles(runs, "sort", "abbbbb", 100).created()
    other = whole_run(runs, "gsm8k", "cccccc", 50)
    for run in (old, new, other):
        sync(run.dir, store)
    return {"old": old.run_id, "new": new.run_id, "other": other.run_id}


def test_runs_are_listed_newest_first_and_filtered(store: HistoryStore, three: dict[str, str]) -> None:
    found = queries.list_runs(store)
    assert [run["run_id"] for run in found] == [three["new"], three["other"], three["old"]]
    oldest = found[-1]
    assert oldest["created_at"] == at(0).isoformat()
    assert (oldest["name"], oldest["state"], oldest["num_attempts"]) == ("sort", "completed", 2)
    assert (oldest["seconds"], oldest["last_step"], oldest["total_steps"]) == (55.0, 10, 10)
    assert (found[0]["num_attempts"], found[0]["last_step"], found[0]["ended_at"]) == (0, None, None)
    json.dumps(found, allow_nan=False)
    assert [run["run_id"] for run in queries.list_runs(store, state="pending")] == [three["new"]]
    assert [run["run_id"] for run in queries.list_runs(store, name="gsm8k")] == [three["other"]]
    assert [run["run_id"] for run in queries.list_runs(store, limit=1)] == [three["new"]]
    assert queries.list_runs(store, state="failed") == []


def test_a_run_is_found_by_what_people_call_it(store: HistoryStore, three: dict[str, str]) -> None:
    for text, expected in [
        (three["old"], "old"),
        ("last", "new"),
        ("sort", "new"),
        ("gsm8k", "other"),
        ("gs", "other"),
        (three["old"][:-5], "old"),
    ]:
        assert queries.resolve_run(store, text) == three[expected], text
    with pytest.raises(UnknownRun, match=f"matches several runs: {three['new']}, {three['old']}"):
        queries.resolve_run(store, "sor")


def test_a_trial_is_listed_when_asked_for_and_meant_by_its_id_only(
    store: HistoryStore, runs: Path, three: dict[str, str]
) -> None:
    trial = RunFiles(runs, "sort", "dddddd", 200, trial_of=three["new"]).created()
    sync(trial.dir, store)
    assert trial.run_id not in [run["run_id"] for run in queries.list_runs(store)]
    listed = {run["run_id"]: run["trial_of"] for run in queries.list_runs(store, trials=True)}
    assert listed == {trial.run_id: three["new"], **dict.fromkeys(three.values(), "")}
    assert queries.resolve_run(store, "last") == queries.resolve_run(store, "sort") == three["new"]
    assert queries.resolve_run(store, trial.run_id) == trial.run_id


def test_a_prefix_means_a_run_rather_than_its_trials(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs, "sort", "aaaaaa", 0).created()
    trial = RunFiles(runs, "sort", "bbbbbb", 0, trial_of=run.run_id).created()
    for one in (run, trial):
        sync(one.dir, store)
    shared = run.run_id.removesuffix("aaaaaa")
    assert queries.resolve_run(store, shared) == run.run_id
    assert queries.resolve_run(store, trial.run_id[:-1]) == trial.run_id


def test_a_run_that_is_not_there(store: HistoryStore, three: dict[str, str]) -> None:
    for text in ("nothing", "", "%", "_ort", "' OR 1=1 --"):
        with pytest.raises(UnknownRun, match="has no run") as error:
            queries.resolve_run(store, text)
        assert error.value.exit_code == 2
        with pytest.raises(UnknownRun):
            queries.show_run(store, text)
        with pytest.raises(UnknownRun):
            queries.run_dir_of(store, text)


def test_last_of_nothing(store: HistoryStore) -> None:
    with pytest.raises(UnknownRun, match="no run yet"):
        queries.resolve_run(store, "last")


# ---------------------------------------------------------------------------------------------------------------------
# One run


@pytest.mark.parametrize(("lease_until", "lasts_until"), [(None, 5), (3, 5), (100, 100), (20 * DAY, 10 * DAY)])
def test_an_active_run_and_its_stage_last_as_long_as_it_has_a_controller(
    database_url: str, runs: Path, lease_until: int | None, lasts_until: int
) -> None:
    """A job in a queue writes nothing for days, nor does a run whose controller died."""
    run = RunFiles(runs, created=0).created()
    run.moved(RunState.PREFLIGHT, 2)
    run.journal(StageStarted(stage_index=0, name=StageName.ALLOCATE, attempt=1), 3)
    run.moved(RunState.QUEUED, 5)
    with HistoryStore(database_url) as store:
        store.time = lambda connection: at(10 * DAY)  # type: ignore[method-assign]
        synced(run, store)
        if lease_until is not None:
            store.acquire_lease(run.run_id, "anna@vm:1:1", lease_until - 10 * DAY)
        shown = queries.show_run(store, run.run_id)
        assert [one["seconds"] for one in (*queries.list_runs(store), shown.run)] == [lasts_until] * 2
        assert [stage["seconds"] for stage in shown.stages] == [lasts_until - 3]


def test_a_queued_run_has_had_no_nodes_since_the_last_attempt_that_had_some(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs).created()
    run.moved(RunState.PREFLIGHT, 1)
    run.moved(RunState.QUEUED, 2)

    def since() -> list[str | None]:
        synced(run, store)
        shown = (queries.show_run(store, run.run_id).run, *queries.list_runs(store))
        return [one["no_nodes_since"] for one in shown]

    run.without_nodes(1, 10)
    assert since() == [at(10).isoformat()] * 2
    run.without_nodes(2, 20, FailureKind.NODE_LOST)
    assert since() == [None, None]
    run.without_nodes(3, 30)
    run.without_nodes(4, 40)
    run.planned(5, 50)
    assert since() == [at(30).isoformat()] * 2
    run.moved(RunState.TRAINING, 51)
    assert since() == [None, None]


def test_the_rows_of_a_run_have_the_declared_columns_and_types(store: HistoryStore, runs: Path) -> None:
    """Programs rely on them in ``rlhf show --json``."""
    run = whole_run(runs)
    run.journal(ControllerStarted(controller="anna@vm:1:1"), 60)
    run.journal(PromotionMoved(state=PromotionState.WAITING, checkpoint_step=10), 61)
    sync(run.dir, store)
    shown = queries.show_run(store, run.run_id)
    json.dumps(shown.document(), allow_nan=False)
    declared = get_type_hints(queries.RunDetails)
    lists = {part for part, its_type in declared.items() if get_origin(its_type) is list} - {"metric_keys"}
    found = [(get_args(declared[part])[0], row) for part in lists for row in getattr(shown, part)]
    assert {row_type for row_type, _ in found} == {get_args(declared[part])[0] for part in lists}, "each has a row"
    found += [(RunRow, shown.run), (GoodputRow, shown.goodput), (PromotionRow, shown.promotion)]
    for row_type, row in found:
        types = get_type_hints(row_type)
        assert row.keys() == types.keys(), row_type
        for name, value in row.items():
            TypeAdapter(types[name]).validate_python(value, strict=True)


def test_the_document_of_a_run_has_all_keys_even_if_they_are_empty(store: HistoryStore, runs: Path) -> None:
    """Programs read them in ``rlhf show --json``."""
    document = queries.show_run(store, synced(RunFiles(runs).created(), store).run_id).document()
    assert document.keys() == {
        "run",
        "stages",
        "checks",
        "attempts",
        "controllers",
        "promotion",
        "restarts",
        "incidents",
        "decisions",
        "checkpoints",
        "evaluations",
        "regressed",
        "metrics",
        "metric_keys",
        "goodput",
        "weight_syncs",
        "lost_time",
    }
    assert document["promotion"] == document["weight_syncs"] == {}


def test_show_tells_what_happened(store: HistoryStore, runs: Path) -> None:
    run = synced(whole_run(runs), store)
    shown = queries.show_run(store, run.run_id)
    assert shown.run["message"] == "exact match went from 0.75 to 0.93"
    assert [(stage["name"], stage["state"], stage["seconds"]) for stage in shown.stages] == [
        ("preflight", "completed", 2.0),
        ("allocate", "completed", 2.5),
        ("train", "failed", 26.0),
        ("allocate", "completed", 3.0),
        ("train", "completed", 16.0),
        ("evaluate", "completed", 3.0),
    ]
    first, second = shown.attempts
    assert (first["number"], first["state"], first["outcome"], first["nodes"]) == (1, "failed", "failed", ["n1", "n2"])
    assert (first["failure_kind"], first["scheduler_job_id"]) == ("node_lost", "j1")
    assert (second["number"], second["outcome"], second["resumed_from_step"]) == (2, "completed", 4)
    steps = [(row["first_step"], row["last_step"], row["last_valid_step"]) for row in shown.restarts]
    assert [(row["attempt"], row["restart"]) for row in shown.restarts] == [(1, 0), (1, 1), (2, 0)]
    assert steps == [(1, 4, 2), (3, 5, 4), (5, 10, 10)]
    assert shown.restarts[0]["started_at"] == at(6).isoformat()
    incident = shown.incidents[0]
    assert (incident["failure_kind"], incident["suspect_ranks"]) == ("worker_killed", [1])
    assert (incident["step"], incident["detected_after_s"]) == (4, 0.3)
    assert shown.decisions[0]["action"] == "restart_in_place"
    assert [(row["when"], row["name"], row["value"]) for row in shown.evaluations] == [
        ("before", "greedy", 0.75),
        ("before", "sampled", 0.30),
        ("after", "greedy", 0.93),
        ("after", "sampled", 0.80),
    ]
    assert [row["step"] for row in shown.checkpoints] == [2, 4, 8, 10]
    assert shown.metrics["train/loss"] == {
        "value": pytest.approx(2.1),
        "step": 10,
        "attempt": 2,
        "restart": 0,
        "time": at(50).isoformat(),
    }
    assert shown.metric_keys == ["time/step_s", "train/loss"]
    found = events_of(store, run.run_id)
    assert found[0]["message"] == "anna requested sort with sort.toml"
    moved = [event["state"] for event in found if event["kind"] == "run_moved"]
    assert moved == ["preflight", "queued", "training", "queued", "training", "evaluating", "completed"]
    assert {"1 passed, 1 warning", "1 node, from the beginning", "local job j1", "node n2 was lost"} <= {
        event["message"] for event in found
    }


def test_findings_of_a_resumed_run_are_those_of_its_last_preflight(store: HistoryStore, runs: Path) -> None:
    """A finding that was fixed is gone: its check may have none when it passes."""
    run = whole_run(runs)
    blocked = CheckResult(id="code.paths", status=CheckStatus.BLOCKED, found="a.py is missing", advice="create it")
    passed = CheckResult(id="batch.divides_ranks", status=CheckStatus.PASSED, found="32 over 2 ranks")
    again = CheckResult(id="disk.free", status=CheckStatus.PASSED, found="99 GiB free")
    run.journal(ChecksMade(results=(passed, blocked)), 89)
    run.journal(ChecksMade(results=(passed, again)), 90)
    sync(run.dir, store)
    checks = queries.show_run(store, run.run_id).checks
    assert [(check["id"], check["status"], check["found"]) for check in checks] == [
        ("batch.divides_ranks", "passed", "32 over 2 ranks"),
        ("disk.free", "passed", "99 GiB free"),
        ("node.content", "passed", "the same on all 2 nodes"),
    ]


def test_a_check_shows_every_finding_of_its_newest_round(store: HistoryStore, runs: Path) -> None:
    run = whole_run(runs)
    for number in range(2):
        found = tuple(
            CheckResult(id="disk.free", status=CheckStatus.WARNING, found=f"round {number}: {folder} is full")
            for folder in ("runs", "data")
        )
        run.journal(ChecksMade(results=found), 90 + number)
    sync(run.dir, store)
    checks = queries.show_run(store, run.run_id).checks
    assert [check["found"] for check in checks if check["id"] == "disk.free"] == [
        "round 1: runs is full",
        "round 1: data is full",
    ]


def test_a_list_takes_as_many_queries_however_many_runs_failed(store: HistoryStore, runs: Path) -> None:
    """One of them has no step times, and one no metrics at all."""
    asked: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        asked.append(statement)

    counts, listed = [], []
    kinds: tuple[dict[str, float], ...] = ({"time/step_s": 1.0}, {"reward/mean": 1.0}, {})
    for number, metrics in enumerate(kinds):
        run = RunFiles(runs, tail=f"{number:06}", created=number).created()
        for step in (1, 3) if metrics else ():
            line = MetricsLine(step=step, time=at(step), loop="grpo", metrics=metrics)
            append_lines(run.dir.attempt(1).restart(0).metrics, line)
        run.moved(RunState.FAILED, 9)
        sync(run.dir, store)
        asked.clear()
        event.listen(store._reading, "before_cursor_execute", note)
        listed = queries.list_runs(store)
        event.remove(store._reading, "before_cursor_execute", note)
        counts.append(len(asked))
    assert [one["missing_steps"] for one in listed] == ["", *["no metrics of 1 of 3 steps: 2"] * 2]
    assert counts == [counts[0]] * 3


def test_what_is_usual_on_a_node_are_medians_of_enough_probes(store: HistoryStore, runs: Path) -> None:
    for number, tflops in enumerate((0.1, 0.4, 0.2)):
        assert queries.usual_speeds(store, at(0)) == {}  # two are not enough for a median
        run = RunFiles(runs, tail=f"{number:06}", created=number).created()
        run.planned(1, 1)
        run.probe(1, ("n1",), 10 + number, matmul_tflops=tflops)
        sync(run.dir, store)
    assert queries.usual_speeds(store, at(0)) == {
        "n1": {"cpu x 1 threads": {"matmul_tflops": 0.2, "bandwidth_gb_s": 2.0}}
    }
    assert queries.usual_speeds(store, at(11)) == {}


def test_an_attempt_that_left_no_outcome(store: HistoryStore, runs: Path) -> None:
    run = whole_run(runs)
    run.dir.attempt(1).outcome.unlink()
    sync(run.dir, store)
    assert queries.show_run(store, run.run_id).attempts[0]["outcome"] == "failed"


# ---------------------------------------------------------------------------------------------------------------------
# Curves


def test_a_curve_takes_the_last_value_of_each_step(store: HistoryStore, runs: Path) -> None:
    run = synced(whole_run(runs), store)
    by_restart = {1: 1.0, 2: 1.0, 3: 1.1, 4: 1.1, 5: 2.0, 6: 2.0, 7: 2.0, 8: 2.0, 9: 2.0, 10: 2.0}
    expected = [(step, pytest.approx(1 / step + origin)) for step, origin in by_restart.items()]
    assert queries.curve(store, run.run_id, ["train/loss"])["train/loss"] == expected
    assert sorted(queries.curve(store, run.run_id)) == ["time/step_s", "train/loss"]
    assert queries.curve(store, run.run_id, ["nothing"]) == {"nothing": []}


def test_after_a_rewind_the_steps_that_were_undone_are_gone(store: HistoryStore, runs: Path) -> None:
    """The new attempt is only at step 3; steps 4 and 5 of the old one belong to discarded weights."""
    run = RunFiles(runs).created()
    for step in range(1, 6):
        run.metrics(1, 0, step, step)
    sync(run.dir, store)
    run.metrics(2, 0, 3, 20)
    sync(run.dir, store)
    restarts = queries.show_run(store, run.run_id).restarts
    assert [(row["last_step"], row["last_valid_step"]) for row in restarts] == [(5, 2), (3, 3)]
    steps = [step for step, _ in queries.curve(store, run.run_id, ["train/loss"])["train/loss"]]
    assert steps == [1, 2, 3]


def test_the_last_step_after_a_rewind_is_one_that_counts(store: HistoryStore, runs: Path) -> None:
    """The held-out score of step 6, which is not measured at every step, is the newest of its name."""
    run = RunFiles(runs).created()
    for step in range(1, 7):
        run.metrics(1, 0, step, step, **({"eval/greedy": 0.9} if step == 6 else {}))
    run.metrics(2, 0, 3, 20)
    run.metrics(2, 1, 4, 30)
    other = RunFiles(runs, tail="bbbbbb").created()
    sync(run.dir, store)
    sync(other.dir, store)
    assert {found["run_id"]: found["last_step"] for found in queries.list_runs(store)} == {
        run.run_id: 4,
        other.run_id: None,
    }
    ids = (run.run_id, other.run_id)
    assert [queries.show_run(store, run_id).last_step for run_id in ids] == [4, 0]
    assert [found["last_step"] for found in compare(store, ids)["runs"]] == [4, 0]


def test_a_restart_that_made_no_step_undoes_nothing(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs).created()
    run.metrics(1, 0, 1, 1)
    run.event(1, 1, "role_started", 5)
    sync(run.dir, store)
    assert queries.curve(store, run.run_id, ["time/step_s"]) == {"time/step_s": [(1, 2.0)]}


# ---------------------------------------------------------------------------------------------------------------------
# Use of time


def test_goodput_lost_time_recoveries_and_node_health(store: HistoryStore, runs: Path) -> None:
    run = synced(whole_run(runs), store)
    shown = queries.show_run(store, run.run_id)
    goodput = shown.goodput
    assert goodput["wall_s"] == pytest.approx(55, abs=0.01)
    assert goodput["queue_s"] == pytest.approx(2, abs=0.01)
    assert goodput["productive_s"] == 20.0  # ten steps of two seconds count
    assert goodput["repeated_s"] == 6.0  # steps 3, 4 and 5 were repeated
    assert goodput["ettr"] == pytest.approx(20 / 53, abs=0.001)
    killed, lost = sorted(shown.lost_time, key=lambda row: -len(row["failure_kind"]))
    # Step 4 ended at 16; step 3 began again at 22 - 2.
    assert killed["failure_kind"] == "worker_killed"
    assert killed["downtime_s"] == pytest.approx(4, abs=0.01)
    assert killed["repeated_s"] == 4.0
    # Step 5 ended at 26; step 5 began again, in the second attempt, at 40 - 2.
    assert (lost["failure_kind"], lost["num_incidents"]) == ("node_lost", 1)
    assert lost["lost_s"] == pytest.approx(12 + 2, abs=0.01)
    assert goodput["lost_s"] == pytest.approx(8 + 14, abs=0.01)
    # Killed at 17, first step again at 22, first new step (5) at 26; lost at 30, step 5 again at 40, step 6 at 42.
    question = "SELECT incident_id, failure_kind, recovery_s, caught_up_s FROM run_recoveries ORDER BY incident_id"
    assert run_sql(store, question).rows == [
        ["1.0", "worker_killed", pytest.approx(5, abs=1e-4), pytest.approx(9, abs=1e-4)],
        ["1.1", "node_lost", pytest.approx(10, abs=1e-4), pytest.approx(12, abs=1e-4)],
    ]
    question = "SELECT node, num_attempts, num_runs, num_strikes, last_failure_kind FROM node_health ORDER BY node"
    assert run_sql(store, question).rows == [["n1", 2, 1, 0, None], ["n2", 1, 1, 2, "node_lost"]]


def test_lost_time_is_counted_once(store: HistoryStore, runs: Path) -> None:
    """Two incidents between the same two steps share the time between them."""
    run = RunFiles(runs).created()
    run.moved(RunState.PREFLIGHT, 0)
    run.moved(RunState.QUEUED, 0)
    run.planned(1, 0)
    run.metrics(1, 0, 1, 10)
    run.incident(1, 0, FailureKind.HANG, 13)
    run.incident(1, 1, FailureKind.CUDA_OOM, 20)  # the restart made no step
    run.metrics(1, 2, 2, 32)
    sync(run.dir, store)
    lost = {row["failure_kind"]: row["lost_s"] for row in queries.show_run(store, run.run_id).lost_time}
    assert lost == {"hang": pytest.approx(10, abs=0.01), "cuda_oom": pytest.approx(10, abs=0.01)}


def test_strikes_are_kept_once_and_from_a_time_on(store: HistoryStore, runs: Path) -> None:
    run = whole_run(runs)
    for _ in range(2):  # read again, as after a crash
        sync(run.dir, store)
    strikes = queries.node_strikes(store, at(0))
    assert [(node, kind) for _, node, kind, _ in strikes] == [("n2", "worker_killed"), ("n2", "node_lost")]
    last = strikes[-1][3]
    assert queries.node_strikes(store, last) == strikes[1:]
    assert queries.node_strikes(store, last + timedelta(seconds=1)) == []


@pytest.mark.parametrize(
    ("decided", "strikes", "interruptions"), [(Action.NEW_ATTEMPT, 1, 1), (Action.RESTART_WORKERS, 2, 1)]
)
def test_an_incident_that_agents_and_controller_have_found_counts_once(
    store: HistoryStore, runs: Path, decided: Action, strikes: int, interruptions: int
) -> None:
    """Control: an incident of the agents that the run survived is counted separately."""
    run = RunFiles(runs).created()
    run.metrics(1, 0, 1, 10)
    incident = run.incident(1, 0, FailureKind.NODE_LOST, 20)
    run.decision(1, 0, decided, 20)
    run.journal(IncidentFound(incident=incident), 21)
    sync(run.dir, store)
    assert len(queries.node_strikes(store, at(0))) == strikes
    for question, expected in (
        ("SELECT COUNT(*) FROM incidents", 2),
        ("SELECT COUNT(*) FROM interruptions", interruptions),
        ("SELECT SUM(num_incidents) FROM run_lost_time", interruptions),
        ("SELECT num_strikes FROM node_health WHERE node = 'n2'", strikes),
    ):
        assert run_sql(store, question).rows == [[expected]], question
    found = saved_queries.run(store, saved_queries.find("failures-by-kind"), {"days": "36500"})
    assert [row[1] for row in found.rows] == [strikes]
    other = synced(RunFiles(runs, tail="bbbbbb").created(), store)
    assert [found["num_incidents"] for found in compare(store, (run.run_id, other.run_id))["runs"]] == [strikes, 0]
    assert facts(queries.show_run(store, run.run_id))["num_incidents"] == strikes


def test_what_agents_ask_for_counts_if_the_controller_decides_it(store: HistoryStore, runs: Path) -> None:
    """They ask for a new attempt twice: the controller grants one with another setting, then stops the run, because it
    has found a lost node."""
    run = RunFiles(runs).created()
    for attempt, seconds, kind in ((1, 0, FailureKind.CUDA_OOM), (2, 50, FailureKind.NODE_LOST)):
        run.planned(attempt, seconds)
        run.metrics(attempt, 0, attempt, seconds + 10)
        incident = run.incident(attempt, 0, FailureKind.CUDA_OOM, seconds + 20)
        run.decision(attempt, 0, Action.NEW_ATTEMPT, seconds + 20)
        about: dict[str, Any] = {"decided_by": DecidedBy.CONTROLLER, "decided_at": at(seconds + 21)}
        if kind is FailureKind.NODE_LOST:
            incident = incident.model_copy(update={"failure_kind": kind, "seen_at": at(seconds + 21)})
            run.journal(IncidentFound(incident=incident), seconds + 21)
            decision = decision_of(Action.STOP, attempt, **about)
        else:
            decision = decision_of(Action.NEW_ATTEMPT, attempt, config_diff={"seed": 8}, **about)
        run.journal(DecisionMade(decision=decision), seconds + 21)
        failed = AttemptMoved(attempt=attempt, state=AttemptState.FAILED, cause="it failed", failure_kind=kind)
        run.journal(failed, seconds + 22)
    sync(run.dir, store)
    assert queries.restarts_since(store, at(0)) == 1, "the agents have only asked for the new attempt"
    found = saved_queries.run(store, saved_queries.find("remedies"), {"days": "36500"})
    assert [row[2:6] for row in found.rows] == [[1, "cuda_oom", "seed", "8"]], "with the failure of its attempt"
    found = saved_queries.run(store, saved_queries.find("failures-by-kind"), {"days": "36500"})
    assert [row[:4] for row in found.rows] == [["cuda_oom", 1, 1, 0], ["node_lost", 1, 1, 1]]


def test_restarts_of_all_runs_are_counted_from_a_time_on(store: HistoryStore, runs: Path) -> None:
    for name in ("aaaaaa", "bbbbbb"):
        sync(whole_run(runs, "sort", name, 0).dir, store)
    one_run = queries.restarts_since(store, at(0)) // 2
    assert one_run >= 1
    assert queries.restarts_since(store, at(0)) == 2 * one_run
    assert queries.restarts_since(store, at(10**6)) == 0


# ---------------------------------------------------------------------------------------------------------------------
# SQL


def test_answers_are_plain_data_and_say_if_there_is_more(store: HistoryStore, three: dict[str, str]) -> None:
    answer = run_sql(store, "SELECT name, count(*) AS runs FROM runs WHERE name LIKE 's%' GROUP BY name;")
    assert (answer.columns, answer.rows, answer.truncated) == (["name", "runs"], [["sort", 2]], False)
    question = (
        "SELECT created_at, seed, spec, SUM(total_steps) OVER () AS total, AVG(seed) OVER () AS mean FROM runs LIMIT 1"
    )
    answer = run_sql(store, question)
    json.dumps(answer.rows, allow_nan=False)
    assert answer.rows[0][3] == 30
    assert math.isclose(answer.rows[0][4], 7)
    answer = run_sql(store, "SELECT run_id FROM runs", limit=2)
    assert (len(answer.rows), answer.truncated) == (2, True)
    assert not run_sql(store, "SELECT run_id FROM runs", limit=3).truncated


def test_answers_with_types_of_postgresql_alone_are_plain_data(runs: Path) -> None:
    values = "array_agg(created_at), array_agg(seed / 2.0), CAST('Infinity' AS numeric), CAST('-Infinity' AS numeric)"
    with HistoryStore(postgres().migrated_database()) as store:
        synced(whole_run(runs), store)
        (row,) = run_sql(store, f"SELECT {values} FROM runs").rows
    assert row == [["2026-03-01T12:00:00+00:00"], [3.5], math.inf, -math.inf]


WRITES = [
    "INSERT INTO metric_keys (name) VALUES ('x')",
    "UPDATE runs SET state = 'failed'",
    "DELETE FROM runs",
    "DROP VIEW node_health",
    "CREATE TABLE mine (x INTEGER)",
    "WITH gone AS (SELECT 1) DELETE FROM runs",
    "SELECT 1; DELETE FROM runs",
    "COMMIT; DELETE FROM runs",
]


def test_the_database_refuses_to_write_and_answers_afterwards(store: HistoryStore, three: dict[str, str]) -> None:
    before = dump(store)
    for statement in WRITES:
        with pytest.raises(BadInput, match=r"refused: .* runs one read-only statement") as error:
            run_sql(store, statement)
        assert error.value.exit_code == 2
        assert dump(store) == before, statement
    assert len(queries.list_runs(store)) == 3
    assert store.acquire_lease(three["old"], "me", 60) == 2


def test_the_same_statements_write_elsewhere(store: HistoryStore) -> None:
    """Negative control: `run_sql` rejects them, but they are valid."""
    with store.writing() as connection:
        for statement in WRITES[:5]:
            savepoint = connection.begin_nested()
            connection.exec_driver_sql(statement)
            savepoint.rollback()


def test_what_is_no_sql_is_refused_and_nothing_has_no_answer(store: HistoryStore) -> None:
    for statement in ("SELEC 1", "SELECT ("):
        with pytest.raises(BadInput, match="rejected the query"):
            run_sql(store, statement)
    for statement in ("", "-- nothing"):
        assert run_sql(store, statement) == saved_queries.SqlResult([], [], False)


# ---------------------------------------------------------------------------------------------------------------------
# Values learned from runs of a shape


def test_silences_of_completed_runs_of_the_same_shape(store: HistoryStore, runs: Path) -> None:
    """Controls: nothing is learned from another shape or a failed run."""
    done = whole_run(runs, "sort", "aaaaaa", 0)
    undone = RunFiles(runs, "sort", "bbbbbb", 100).created()
    for run in (done, undone):
        sync(run.dir, store)
    shape = shape_key(done.dir.read_spec().spec)
    assert queries.longest_gaps(store, shape) == {"trainer/rollout": 3.5, "trainer/train": 0.5}
    assert queries.longest_gaps(store, "another") == {}
    store.forget(done.run_id)
    assert queries.longest_gaps(store, shape) == {}


def test_seconds_per_step_are_the_median_of_completed_runs(store: HistoryStore, runs: Path) -> None:
    """Of the newest five, each with the mean of its steps; an incomplete run does not count."""
    made = []
    for index, seconds in enumerate((40.0, 40.0, 1.0, 4.0, 9.0, 5.0, 7.0, 100.0)):
        run = RunFiles(runs, "sort", f"{index:06d}", 100.0 * index).created()
        for state in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING, RunState.EVALUATING):
            run.moved(state, 100.0 * index + 1)
        for step, factor in ((1, 1.5), (2, 0.5)):
            run.metrics(1, 0, step, 100.0 * index + step, **{"time/step_s": seconds * factor})
        run.moved(RunState.COMPLETED if seconds < 50 else RunState.FAILED, 100.0 * index + 9)
        sync(run.dir, store)
        made.append(run)
    shape = shape_key(made[0].dir.read_spec().spec)
    assert queries.seconds_per_step(store, shape) == 5.0
    assert queries.seconds_per_step(store, "another") is None


def test_the_last_good_run_of_a_name(store: HistoryStore, runs: Path) -> None:
    """The newest completed run, with the basis from its newest round of checks."""
    assert queries.last_good(store, "sort") is None
    for index, state in enumerate((RunState.COMPLETED, RunState.COMPLETED, RunState.FAILED)):
        run = RunFiles(runs, "sort", f"{index:06d}", 100.0 * index).created()
        for basis in ("torch = 7", f"torch = {index}"):
            result = CheckResult(id="trial.basis", status=CheckStatus.PASSED, found=basis)
            run.journal(ChecksMade(results=(result,)), 100.0 * index + 1)
        for passed in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING, RunState.EVALUATING, state):
            run.moved(passed, 100.0 * index + 2)
        sync(run.dir, store)
    found = queries.last_good(store, "sort")
    assert found is not None
    assert found["run_id"].endswith("000001")
    assert found["basis"] == "torch = 1"
    assert RunSpec.model_validate(found["spec"]).name == "sort"
    assert queries.last_good(store, "another") is None


def test_a_trial_is_a_good_run_for_others_and_its_pace_is_none(store: HistoryStore, runs: Path) -> None:
    trial = RunFiles(runs, "sort", "aaaaaa", 0, trial_of="the-run").created()
    for state in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING, RunState.EVALUATING, RunState.COMPLETED):
        trial.moved(state, 1)
    trial.metrics(1, 0, 1, 2)
    sync(trial.dir, store)
    found = queries.last_good(store, "sort", "another-run")
    assert found is not None
    assert found["run_id"] == trial.run_id
    assert queries.last_good(store, "sort", "the-run") is None
    assert queries.seconds_per_step(store, shape_key(trial.dir.read_spec().spec)) is None
