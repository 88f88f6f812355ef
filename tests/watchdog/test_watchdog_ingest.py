"""Ingestion of files into rows: the rows of each file, and the treatment of unreadable or invalid content."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from history_tools import RunFiles, at, dump, run_sql, whole_run
from made_reports import decision_of, incident_of

from rlhf_core.errors import IllegalMove, JournalDamaged, RunDirError
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.weight_syncs import weight_sync_text
from rlhf_core.schemas.attempts import AttemptState, Role, RunState
from rlhf_core.schemas.failures import Action, DecidedBy, FailureKind
from rlhf_core.schemas.journal import AttemptMoved, AttemptSubmitted, DecisionMade, IncidentFound
from rlhf_core.schemas.resources import Submission
from rlhf_core.watchdog import ingest_reader
from rlhf_core.watchdog.evidence import final_incident
from rlhf_core.watchdog.ingest import files_digest, rebuild, sync
from rlhf_core.watchdog.ingest_reader import BLOCK_BYTES, IngestReader, SkippedLine, SyncReport


def ask(store: HistoryStore, question: str) -> list[list[object]]:
    """Rows of an SQL query."""
    return run_sql(store, question).rows


def test_every_file_becomes_rows(store: HistoryStore, whole: RunFiles) -> None:
    report = sync(whole.dir, store)
    assert (report.batches, report.skipped) == (1, [])
    counts = {name: len(rows) for name, rows in dump(store).items()}
    assert counts == {
        "runs": 1,
        "run_tags": 2,
        "controllers": 0,
        "promotions": 0,
        "goodput_cache": 1,
        "ingest_offsets": 48,
        "stages": 6,
        "checks": 3,
        "node_speeds": 2,
        "attempts": 2,
        "restarts": 3,
        "attempt_nodes": 3,
        "node_telemetry": 4,
        "metrics": 26,
        "latest_metrics": 2,
        "incidents": 2,
        "decisions": 1,
        "node_strikes": 2,
        "checkpoints": 4,
        "weight_versions": 4,
        "weight_syncs": 4,
        "evaluations": 4,
        "evaluation_samples": 12,
        "events": 31,
    }


def test_an_unacknowledged_sync_is_shown_as_such(store: HistoryStore, known: RunFiles) -> None:
    found = ask(store, "SELECT attempt, restart, version, acknowledged, gb_per_s FROM weight_syncs")
    assert sorted(found) == [
        [1, 0, 2, 2, 4.0],
        [1, 0, 3, 2, 4.0],
        [1, 1, 2, 1, 4.0],
        [1, 1, 3, 0, None],
    ]
    facts = queries.show_run(store, known.run_id).weight_syncs
    assert (facts["num_versions"], facts["engines"], facts["seconds"], facts["gb_per_s"]) == (2, 2, 0.5, 4.0)
    assert [(row["restart"], row["version"], row["acknowledged"]) for row in facts["unacknowledged"]] == [
        (1, 2, 1),
        (1, 3, 0),
    ]
    assert weight_sync_text(facts) == (
        "2 versions to 2 engines, broadcast, median 0.5 s (0.25 on the wire, 0.2 to apply), 4 GB/s, "
        "NOT ACKNOWLEDGED by all engines: version 2 (attempt 1 after restart 1: 1 of 2), 3 (attempt 1 after restart 1: "
        "0 of 2)"
    )


def test_a_sync_in_progress_is_not_reported_as_missing_during_the_run(store: HistoryStore, run: RunFiles) -> None:
    run.planned(1, 4)
    run.weight_sync(1, 0, 0, 10, acknowledged=2)
    run.weight_sync(1, 0, 1, 12)
    sync(run.dir, store)
    assert weight_sync_text(queries.show_run(store, run.run_id).weight_syncs).endswith("all acknowledged")
    run.moved(RunState.PREFLIGHT, 12)
    run.moved(RunState.CANCELLED, 13)
    sync(run.dir, store)
    (missing,) = queries.show_run(store, run.run_id).weight_syncs["unacknowledged"]
    assert (missing["version"], missing["acknowledged"]) == (3, 0)


def test_a_ledger_that_is_read_again_adds_no_duplicate_rows(store: HistoryStore, known: RunFiles) -> None:
    before = dump(store)["weight_syncs"]
    ledger = known.dir.attempt(1).restart(0).weight_syncs
    content = ledger.read_bytes()
    ledger.unlink()
    ledger.write_bytes(content.replace(b'"version":2', b'"version":9', 1))  # another file: read from its beginning
    sync(known.dir, store)
    after = dump(store)["weight_syncs"]
    assert len(after) == len(before) == 4
    assert after == before, "the request is not newer than its answer"
    store.forget(known.run_id)
    sync(known.dir, store)
    assert dump(store)["weight_syncs"] == before


def test_nothing_new_writes_nothing(store: HistoryStore, known: RunFiles) -> None:
    before = store.ingest_state(known.run_id)
    assert sync(known.dir, store) == SyncReport()
    assert store.ingest_state(known.run_id) == before


def test_a_directory_without_a_journal_is_not_a_run_yet(store: HistoryStore, runs: Path) -> None:
    run = RunFiles(runs)
    assert sync(run.dir, store) == SyncReport()
    assert store.run_ids() == []


def test_no_run_directory(store: HistoryStore, run: RunFiles) -> None:
    run.dir.spec.unlink()
    with pytest.raises(RunDirError, match=r"no spec\.json"):
        sync(run.dir, store)


def test_the_run_row_contains_the_request(store: HistoryStore, run: RunFiles) -> None:
    sync(run.dir, store)
    found = queries.show_run(store, run.run_id).run
    assert found["state"] == "pending"
    assert (found["name"], found["owner"], found["seed"], found["total_steps"]) == ("sort", "anna", 7, 10)
    assert found["spec"]["loops"]["main"]["num_steps"] == 8
    assert found["overrides"] == ["train.num_steps=8"]
    assert found["created_at"] == at(0).isoformat()


def test_a_torn_last_line_waits_for_its_writer(store: HistoryStore, run: RunFiles) -> None:
    run.metrics(1, 0, 1, 10)
    run.metrics(1, 0, 2, 12)
    path = run.dir.attempt(1).restart(0).metrics
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    report = sync(run.dir, store)
    assert queries.curve(store, run.run_id, ["time/step_s"]) == {"time/step_s": [(1, 2.0)]}
    assert report.skipped == []
    path.write_bytes(whole)
    sync(run.dir, store)
    assert queries.curve(store, run.run_id, ["time/step_s"]) == {"time/step_s": [(1, 2.0), (2, 2.0)]}


def test_a_torn_line_in_the_middle_is_skipped_and_counted(store: HistoryStore, run: RunFiles) -> None:
    run.metrics(1, 0, 1, 10)
    path = run.dir.attempt(1).restart(0).metrics
    torn_at = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"step": 2, "time": "2026-\r')  # the writer was killed; the next one terminates the line
    run.metrics(1, 0, 3, 14)
    report = sync(run.dir, store)
    assert report.skipped == [SkippedLine("attempts/1/restarts/0/metrics.jsonl", torn_at)]
    assert queries.curve(store, run.run_id, ["time/step_s"]) == {"time/step_s": [(1, 2.0), (3, 2.0)]}
    assert sync(run.dir, store).skipped == [], "a skipped line is counted once"


def test_a_damaged_document_is_skipped_until_it_is_replaced(store: HistoryStore, whole: RunFiles) -> None:
    outcome = whole.dir.attempt(2).outcome
    outcome.write_text("{}")
    assert sync(whole.dir, store).skipped == [SkippedLine("attempts/2/outcome.json", 0)]
    assert sync(whole.dir, store).skipped == []
    whole.outcome(2, AttemptState.COMPLETED, 54, 10)
    sync(whole.dir, store)
    assert ask(store, "SELECT outcome_state FROM attempts ORDER BY number") == [["failed"], ["completed"]]


def test_metrics_without_their_journal_line(store: HistoryStore, run: RunFiles) -> None:
    """The line that planned the attempt is unreadable: its metrics are kept, and the problem is reported each time."""
    with run.dir.control.open("ab") as file:
        file.write(b'{"sequence": 1, "tok\n')
    run.metrics(1, 0, 1, 10)
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=r"control\.jsonl, line 2 cannot be read"):
            sync(run.dir, store)
    assert ask(store, "SELECT number, state FROM attempts") == [[1, "planned"]]
    assert queries.curve(store, run.run_id, ["time/step_s"]) == {"time/step_s": [(1, 2.0)]}


def test_a_journal_is_read_up_to_an_unreadable_line_and_further_once_it_is_repaired(
    store: HistoryStore, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With transactions of any size."""
    run, whole = whole_run(runs), whole_run(runs, tail="bbbbbb")
    texts = run.dir.control.read_bytes().splitlines(keepends=True)
    run.dir.control.write_bytes(b"".join([*texts[:-1], b"x" + texts[-1]]))
    for limit in (64, BLOCK_BYTES):
        monkeypatch.setattr(ingest_reader, "BLOCK_BYTES", limit)
        monkeypatch.setattr(ingest_reader, "BATCH_BYTES", 2 * limit)
        with pytest.raises(JournalDamaged, match=f"line {len(texts)} cannot be read"):
            sync(run.dir, store)
        assert ask(store, "SELECT state FROM runs") == [["evaluating"]]
        assert ask(store, "SELECT count(*) FROM evaluations") == [[4]]
    run.dir.control.write_bytes(b"".join(texts))
    sync(run.dir, store)
    assert ask(store, "SELECT state FROM runs") == [["completed"]]
    mended = dump(store)
    store.clear()
    sync(run.dir, store)
    assert dump(store) == mended
    sync(whole.dir, store)
    assert ask(store, "SELECT state FROM runs") == [["completed"]] * 2


def test_a_journal_damaged_before_the_read_position(store: HistoryStore, runs: Path, run: RunFiles) -> None:
    """The first damaged line is named, not the read position; repaired by hand, the history is rebuilt."""
    run.moved(RunState.PREFLIGHT, 1)
    sync(run.dir, store)
    run.moved(RunState.QUEUED, 2)
    texts = run.dir.control.read_bytes().splitlines(keepends=True)
    run.dir.control.write_bytes(b"".join([texts[0], b"xx" + texts[1], texts[2]]))
    with pytest.raises(JournalDamaged, match="line 2 cannot be read"):
        sync(run.dir, store)
    run.dir.control.write_bytes(b"".join([texts[0].replace(b"sort.toml", b"s.toml"), *texts[1:]]))
    with pytest.raises(JournalDamaged, match="rlhf db rebuild"):
        sync(run.dir, store)
    assert not rebuild(runs, store).failed
    assert ask(store, "SELECT state FROM runs") == [["queued"]]


def test_non_finite_values_can_be_distinguished(store: HistoryStore, run: RunFiles) -> None:
    run.metrics(1, 0, 1, 10, a=math.nan, b=math.inf, c=-math.inf, d=0.5)
    sync(run.dir, store)
    question = (
        "SELECT name, value, non_finite FROM metrics JOIN metric_keys USING (key_id) WHERE step = 1 ORDER BY name"
    )
    assert [row for row in ask(store, question) if len(str(row[0])) == 1] == [
        ["a", None, "NaN"],
        ["b", None, "Infinity"],
        ["c", None, "-Infinity"],
        ["d", 0.5, None],
    ]
    curves = queries.curve(store, run.run_id, ["a", "b", "c"])
    assert math.isnan(curves["a"][0][1])
    assert (curves["b"], curves["c"]) == ([(1, math.inf)], [(1, -math.inf)])
    assert queries.show_run(store, run.run_id).metrics["a"]["value"] == "NaN"


def test_text_that_postgresql_cannot_hold_is_kept_readable(store: HistoryStore, known: RunFiles) -> None:
    """An untrained model generates anything, even NUL characters."""
    samples = queries.evaluation_samples(store, known.run_id, "before", "greedy")
    assert [sample["completion"] for sample in samples] == ["0␀", "1␀", "2␀"]
    assert [sample["score"] for sample in samples] == [0.0, 1.0, 0.0]


def test_latest_metrics_follow_a_rewind(store: HistoryStore, run: RunFiles) -> None:
    for step in (1, 2, 3):
        run.metrics(1, 0, step, step)
    sync(run.dir, store)
    run.metrics(1, 1, 2, 10)
    sync(run.dir, store)
    newest = queries.show_run(store, run.run_id).metrics["time/step_s"]
    assert (newest["attempt"], newest["restart"], newest["step"]) == (1, 1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# The journal


def test_lines_of_a_fenced_off_writer_do_not_count(store: HistoryStore, run: RunFiles) -> None:
    run.moved(RunState.PREFLIGHT, 1, token=3)
    run.moved(RunState.QUEUED, 2, token=5)
    run.moved(RunState.CANCELLED, 3, "the old controller did not know", token=3)
    sync(run.dir, store)
    assert ask(store, "SELECT state, journal_token FROM runs") == [["queued", 5]]
    assert ask(store, "SELECT count(*) FROM events WHERE state = 'cancelled'") == [[0]]
    run.moved(RunState.CANCELLED, 4, "late again", token=4)
    sync(run.dir, store)
    assert ask(store, "SELECT state FROM runs") == [["queued"]], "the highest token is remembered between two calls"


def test_without_fencing_the_old_controller_would_win(
    store: HistoryStore, run: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: an ingester that accepts every line."""

    def read_every_line(self: IngestReader) -> None:
        for found in ingest_reader.scan_journal(self._run_dir.control):
            self._batch.journal.append(ingest_reader.JournalEntry(found.begin, found.line))

    monkeypatch.setattr(IngestReader, "_read_journal", read_every_line)
    run.moved(RunState.PREFLIGHT, 1, token=3)
    run.moved(RunState.QUEUED, 2, token=5)
    run.moved(RunState.CANCELLED, 3, "the old controller did not know", token=3)
    sync(run.dir, store)
    assert ask(store, "SELECT state FROM runs") == [["cancelled"]]


def test_an_illegal_transition_of_the_run(store: HistoryStore, run: RunFiles) -> None:
    sync(run.dir, store)
    before = dump(store)
    run.moved(RunState.COMPLETED, 1)
    with pytest.raises(IllegalMove, match=r"is pending and cannot become completed; .* only from evaluating"):
        sync(run.dir, store)
    assert dump(store) == before


def test_an_illegal_transition_of_an_attempt(store: HistoryStore, whole: RunFiles) -> None:
    whole.journal(AttemptMoved(attempt=2, state=AttemptState.RUNNING, cause="again"), 60)
    with pytest.raises(IllegalMove, match=r"attempt 2 of .* is completed and cannot become running"):
        sync(whole.dir, store)


def test_a_transition_of_an_unplanned_attempt(store: HistoryStore, run: RunFiles) -> None:
    run.journal(AttemptMoved(attempt=9, state=AttemptState.RUNNING, cause="?"), 1)
    with pytest.raises(IllegalMove, match=r"attempt 9 of .* is unknown"):
        sync(run.dir, store)


def test_a_repeated_transition_changes_nothing(store: HistoryStore, run: RunFiles) -> None:
    run.moved(RunState.PREFLIGHT, 1, "first")
    run.moved(RunState.PREFLIGHT, 2, "said again after a restart of the controller")
    sync(run.dir, store)
    assert ask(store, "SELECT state, message FROM runs") == [["preflight", "first"]]


def test_a_resumed_run_has_no_end_until_it_ends_again(store: HistoryStore, run: RunFiles) -> None:
    run.moved(RunState.PREFLIGHT, 1)
    run.moved(RunState.FAILED, 5, "no disk")
    sync(run.dir, store)
    assert queries.show_run(store, run.run_id).run["ended_at"] == at(5).isoformat()
    run.moved(RunState.PREFLIGHT, 9)
    sync(run.dir, store)
    found = queries.show_run(store, run.run_id).run
    assert (found["started_at"], found["ended_at"]) == (at(1).isoformat(), None)


def test_an_adopted_job_is_recorded_as_submitted_again(store: HistoryStore, run: RunFiles) -> None:
    """A controller killed between submission and record finds the job and records it again, perhaps late."""
    run.planned(1, 4)
    adopted = Submission(attempt=1, scheduler="local", job_id="j1", command=("python",), host="login2")
    run.journal(AttemptSubmitted(submission=adopted), 9)
    sync(run.dir, store)
    question = "SELECT state, scheduler_job_id, submitted_at FROM attempts"
    (row,) = ask(store, question)
    assert row[:2] == ["running", "j1"]
    assert "12:00:04.5" in str(row[2])


def test_incidents_and_decisions_of_the_controller(store: HistoryStore, whole: RunFiles) -> None:
    incident = incident_of(FailureKind.NODE_LOST, 2, seen_at=at(41), suspect_nodes=("n7",))
    whole.journal(IncidentFound(incident=incident), 60)
    decision = decision_of(
        Action.NEW_ATTEMPT,
        2,
        decided_by=DecidedBy.CONTROLLER,
        decided_at=at(61),
        excluded_nodes=("n7",),
        config_diff={"train.micro_batch_size": 4},
    )
    whole.journal(DecisionMade(decision=decision), 61)
    sync(whole.dir, store)
    shown = queries.show_run(store, whole.run_id)
    assert [row["found_by"] for row in shown.incidents] == ["agent", "agent", "controller"]
    assert shown.decisions[-1]["config_diff"] == {"train.micro_batch_size": 4}
    assert shown.decisions[-1]["excluded_nodes"] == ["n7"]
    assert ask(store, "SELECT node, failure_kind FROM node_strikes ORDER BY struck_at") == [
        ["n2", "worker_killed"],
        ["n2", "node_lost"],
        ["n7", "node_lost"],
    ]


def test_several_incidents_of_a_restart_become_separate_rows(store: HistoryStore, run: RunFiles) -> None:
    """With the control: the only incident of a restart at the place where version 0.1 wrote it."""
    run.planned(1, 4)
    for number, seconds in ((1, 10.0), (2, 20.0), (10, 30.0)):
        run.incident(1, 0, FailureKind.WORKER_KILLED, seconds, number=number, role=Role.ROLLOUT)
        run.decision(1, 0, Action.RESTART_WORKERS, seconds + 0.1, number=number)
    old = run.incident(1, 1, FailureKind.HANG, 40.0)
    restart = run.dir.attempt(1).restart(1)
    restart.evidence_dir.mkdir(parents=True)
    restart.incident(0).rename(restart.evidence_dir / "incident.json")
    sync(run.dir, store)
    shown = queries.show_run(store, run.run_id)
    assert [(row["incident_id"], row["number"], row["role"]) for row in shown.incidents] == [
        ("1.0.1", 1, "rollout"),
        ("1.0.2", 2, "rollout"),
        ("1.0.10", 10, "rollout"),
        ("1.1", 0, None),
    ]
    assert [row["number"] for row in shown.decisions] == [1, 2, 10]
    assert final_incident(run.dir.attempt(1)) == old, "the run outlived the others"
    run.decision(1, 1, Action.RESTART_IN_PLACE, 50.0, number=0)
    assert final_incident(run.dir.attempt(1)) is None, "what ended the attempt came after the restart"


def test_a_rewritten_incident_replaces_the_old_one(store: HistoryStore, run: RunFiles) -> None:
    run.incident(1, 0, FailureKind.HANG, 10, suspect_nodes=("n1", "n2"))
    sync(run.dir, store)
    run.incident(1, 0, FailureKind.HANG, 10, suspect_nodes=("n2",))
    sync(run.dir, store)
    assert ask(store, "SELECT node FROM node_strikes") == [["n2"]]
    assert ask(store, "SELECT count(*) FROM incidents") == [[1]]


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, evaluations, nodes


def test_a_removed_checkpoint_keeps_its_row(store: HistoryStore, known: RunFiles) -> None:
    shutil.rmtree(known.dir.checkpoint(2).root)
    sync(known.dir, store)
    question = "SELECT step FROM checkpoints WHERE removed_at IS {} ORDER BY step"
    assert ask(store, question.format("NOT NULL")) == [[2]]
    assert ask(store, question.format("NULL")) == [[4], [8], [10]]
    known.checkpoint(2, 70, weights="cc")  # made again after a rewind
    sync(known.dir, store)
    assert ask(store, question.format("NOT NULL")) == []
    assert ask(store, "SELECT sha256 FROM weight_versions WHERE version = 2") == [["cc"]]


def test_checkpoints_that_cannot_be_listed_are_not_removed(store: HistoryStore, known: RunFiles) -> None:
    known.dir.checkpoints_dir.rename(known.dir.root / "elsewhere")
    sync(known.dir, store)
    assert ask(store, "SELECT count(*) FROM checkpoints WHERE removed_at IS NOT NULL") == [[0]]


def test_an_evaluation_made_again_replaces_the_old_one(store: HistoryStore, known: RunFiles) -> None:
    known.evaluation("after", "greedy", 0.5, 99)
    sync(known.dir, store)
    assert ask(store, "SELECT value FROM evaluations WHERE when_made = 'after' AND name = 'greedy'") == [[0.5]]
    assert ask(store, "SELECT count(*) FROM evaluation_samples") == [[12]]


def test_nodes_show_their_newest_restart(store: HistoryStore, known: RunFiles) -> None:
    known.status(1, 0, 99)  # an old file written late
    sync(known.dir, store)
    assert ask(store, "SELECT node, restart, sequence FROM attempt_nodes WHERE attempt = 1 ORDER BY node") == [
        ["n1", 1, 12],
        ["n2", 1, 12],
    ]


@pytest.mark.parametrize(("kind", "skipped"), [("prebuild", 0), ("control: no such kind", 1)])
def test_events_of_version_0_1_are_still_read(store: HistoryStore, whole: RunFiles, kind: str, skipped: int) -> None:
    """It compiled a DeepSpeed operation before it started workers."""
    message = "compiled operations are there after 0.1 s"
    line = {
        "time": at(100).isoformat(),
        "kind": kind,
        "node": "n1",
        "message": message,
        "role": None,
        "data": {"ok": True},
    }
    with whole.dir.attempt(1).restart(0).events("n1").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert len(sync(whole.dir, store).skipped) == skipped
    assert len(ask(store, "SELECT 1 FROM events WHERE kind = 'prebuild'")) == 1 - skipped


@pytest.mark.parametrize("is_one_batch", [True, False])
def test_the_role_of_a_restart_is_that_of_its_counted_workers(
    store: HistoryStore, run: RunFiles, is_one_batch: bool
) -> None:
    """For any batch boundaries: an engine beside the trainers starts, hangs and is killed in between."""
    events: list[tuple[float, str, Role, dict[str, Any]]] = [
        (1, "role_started", Role.TRAINER, {}),
        (2, "workers_started", Role.ROLLOUT, {"generation": 0}),
        (3, "verdict", Role.ROLLOUT, {}),
        (4, "killed", Role.ROLLOUT, {}),
    ]
    for seconds, kind, role, data in events:
        run.event(1, 0, kind, seconds, role=role, **data)
        if not is_one_batch:
            sync(run.dir, store)
    run.event(1, 1, "workers_started", 5, role=Role.TRAINER)
    sync(run.dir, store)
    assert ask(store, "SELECT restart, role FROM restarts ORDER BY restart") == [[0, "trainer"], [1, "trainer"]]


def test_a_moved_run_directory_is_found_again(store: HistoryStore, known: RunFiles, tmp_path: Path) -> None:
    moved = shutil.copytree(known.dir.root, tmp_path / "archive" / known.run_id)
    sync(type(known.dir)(moved), store)
    assert queries.run_dir_of(store, known.run_id).root == moved
    assert queries.show_run(store, known.run_id).run["state"] == "completed"


def test_a_replaced_file_is_read_from_its_beginning(store: HistoryStore, known: RunFiles) -> None:
    """Its lines are added to those of the previous file, even if they start at the same offsets."""
    restart = known.dir.attempt(1).restart(0)
    count = "SELECT COUNT(*) FROM events WHERE source LIKE '%restarts/0/events-n1.jsonl' AND attempt = 1"
    ((before,),) = ask(store, count)
    events, metrics = restart.events("n1"), restart.metrics
    whole = metrics.read_bytes()
    events.unlink()
    metrics.write_bytes(whole[:-5])  # torn, or not yet visible to another machine: awaited
    assert sync(known.dir, store).batches == 0
    known.event(1, 0, "agent_started", 100)
    known.event(1, 0, "killed", 101)
    metrics.unlink()
    known.metrics(1, 0, 9, 110)
    report = sync(known.dir, store)
    assert report.skipped == []
    ((after,),) = ask(store, count)
    assert after == before + 2
    steps = ask(store, "SELECT DISTINCT step FROM metrics WHERE attempt = 1 AND restart = 0 ORDER BY step")
    assert steps == [[1], [2], [3], [4], [9]]
    assert sync(known.dir, store) == SyncReport()
    events.unlink()
    known.event(1, 0, "agent_started", 200)
    sync(known.dir, store)
    assert ask(store, count) == [[after + 1]]


def test_links_to_nothing_hide_no_news(whole: RunFiles) -> None:
    """They are listed before the journal in some order of the folder, whichever it is."""
    for number in range(50):
        (whole.dir.root / f"link-{number}").symlink_to("removed")
    before = files_digest(whole.dir)
    whole.moved(RunState.QUEUED, 100)
    assert files_digest(whole.dir) != before


def test_a_restored_file_adds_no_duplicate_rows(store: HistoryStore, known: RunFiles) -> None:
    before = dump(store)
    path = known.dir.attempt(1).restart(0).events("n1")
    content = path.read_bytes()
    path.unlink()
    assert sync(known.dir, store).batches == 0
    path.write_bytes(content)
    assert sync(known.dir, store).batches == 0
    assert dump(store)["events"] == before["events"]
