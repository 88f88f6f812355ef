"""The timeline of a run: sentences in order of time, the same from the history and from the run directory."""

from collections.abc import Sequence
from pathlib import Path

import records
from history_tools import RunFiles, at, database_url, runs, store

from rlhf_core.cli import watching
from rlhf_core.control.views.progress import RunReader
from rlhf_core.control.views.summary import summarise
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.summary import summary_markdown
from rlhf_core.render.timeline import (
    FirstStep,
    Timeline,
    TimelineIncident,
    incident_text,
    suspects_text,
    timeline_from_rows,
)
from rlhf_core.render.timeline_chart import timeline_chart
from rlhf_core.schemas.attempts import Role, RunState
from rlhf_core.schemas.failures import Action, FailureKind, Incident
from rlhf_core.watchdog.ingest import sync

__all__ = ["database_url", "runs", "store"]


def hung_run(runs: Path) -> RunFiles:
    """Three steps, a rank that stands still from 12 s on, a restart in place, and step 3 again."""
    run = RunFiles(runs).created()
    run.moved(RunState.PREFLIGHT, 1)
    run.moved(RunState.QUEUED, 2)
    run.planned(1, 3)
    run.moved(RunState.TRAINING, 6)
    for step in (1, 2, 3):
        run.metrics(1, 0, step, 6 + 2 * step)
    run.incident(
        1, 0, FailureKind.COLLECTIVE_HANG, 17, detected_after_s=5.0, collective="gloo:all_reduce", collective_sequence=7
    )
    run.decision(1, 0, Action.RESTART_IN_PLACE, 17.5)
    run.event(1, 1, "role_started", 18)
    run.metrics(1, 1, 3, 23)
    run.metrics(1, 1, 4, 25)
    return run


def made_up(run: RunFiles, incidents: Sequence[Incident], first_steps: Sequence[FirstStep] = ()) -> Timeline:
    found = [TimelineIncident(run.dir, one) for one in incidents]
    return Timeline(run.dir, RunState.TRAINING, "", found, first_steps=first_steps)


ENTRIES = [
    (
        12.0,
        "progress stopped at step 4, phase rollout: last sign of life of rank 1 on node n2; the last collective that a "
        "rank entered is gloo:all_reduce, number 7 (found 5.0 s later)",
    ),
    (
        17.0,
        "collective hang (attempt 1; step 4; rollout; rank 1, n2): collective_hang in 1.0. "
        "Stacks, states and logs: attempts/1/restarts/0/incident.",
    ),
    (17.5, "-> restart in place (by the agent): one restart is left."),
    (23.0, "training continued: step 3 is done in attempt 1 after restart 1, 6.0 s after this was found"),
]


def test_a_sentence_lists_the_first_of_many_suspects(runs: Path) -> None:
    """A stall of the file system may leave every rank of every node outside of any collective."""
    suspects = {"suspect_ranks": tuple(range(512)), "suspect_nodes": tuple(f"n{number}" for number in range(64))}
    incident = RunFiles(runs).created().incident(1, 0, FailureKind.HANG, 17, detected_after_s=5.0, **suspects)
    assert incident_text(incident).startswith("hang (attempt 1; step 4; rollout; rank 0, rank 1,")
    assert "rank 6, rank 7 and 504 more, n0, n1, n2, n3, n4, n5, n6, n7 and 56 more): " in incident_text(incident)
    assert suspects_text(incident) == (
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more on nodes n0, n1, n2, n3, n4, n5, n6, n7 and 56 more"
    )


def test_a_hang_from_the_history(store: HistoryStore, runs: Path) -> None:
    run = hung_run(runs)
    sync(run.dir, store)
    shown = queries.show_run(store, run.run_id)
    timeline = timeline_from_rows(run.dir, shown.run, shown.incidents, shown.decisions, shown.restarts)
    assert [(entry.time, entry.text) for entry in timeline.entries()] == [
        (at(seconds), text) for seconds, text in ENTRIES
    ]


def test_a_hang_from_the_run_directory(runs: Path) -> None:
    entries = read_timeline(hung_run(runs).dir).entries()
    assert [(entry.time, entry.text) for entry in entries] == [(at(seconds), text) for seconds, text in ENTRIES]


def test_a_healthy_run_has_no_entries(runs: Path) -> None:
    run = RunFiles(runs).created()
    run.metrics(1, 0, 1, 10)
    assert read_timeline(run.dir).entries() == []


def test_nothing_went_on_before_a_step_was_done(runs: Path) -> None:
    run = hung_run(runs)
    run.dir.attempt(1).restart(1).metrics.unlink()
    assert [entry for entry in read_timeline(run.dir).entries() if "continued" in entry.text] == []


def test_a_worker_that_ended_did_not_stand_still_before(runs: Path) -> None:
    run = RunFiles(runs).created()
    incident = run.incident(1, 0, FailureKind.WORKER_KILLED, 17, detected_after_s=0.3)
    assert [entry.text for entry in made_up(run, [incident]).entries()] == [incident_text(incident)]


def test_of_two_incidents_without_a_step_between_the_last_is_what_training_went_on_from(runs: Path) -> None:
    run = hung_run(runs)
    again = run.incident(1, 1, FailureKind.HANG, 30, suspect_ranks=(), suspect_nodes=())
    third = run.incident(1, 2, FailureKind.HANG, 40, detected_after_s=5.0, suspect_ranks=(), suspect_nodes=())
    texts = [entry.text for entry in made_up(run, [again, third], [FirstStep(1, 3, 4, at(50))]).entries()]
    assert [text for text in texts if "continued" in text] == [
        "training continued: step 4 is done in attempt 1 after restart 3, 10 s after this was found"
    ]
    assert any("no single one is to blame" in text for text in texts)


def test_each_incident_of_a_restart_has_its_own_decision_and_only_the_last_a_recovery(runs: Path) -> None:
    """A rollout worker is restarted alone; a rank is killed later. A decision without a number applies to both."""
    run = hung_run(runs)
    outlived = run.incident(1, 1, FailureKind.HANG, 26, number=1)
    killed = run.incident(1, 1, FailureKind.WORKER_KILLED, 30, number=2)
    run.decision(1, 1, Action.RESTART_WORKERS, 26, number=1)
    run.decision(1, 1, Action.NEW_ATTEMPT, 30, number=2)
    run.metrics(2, 0, 5, 50)
    timeline = read_timeline(run.dir)
    answers = [[one.action for one in timeline.decisions_on(found)] for found in timeline.incidents]
    assert answers == [[Action.RESTART_IN_PLACE], [Action.RESTART_WORKERS], [Action.NEW_ATTEMPT]]
    continued = [entry.text for entry in timeline.entries() if "continued" in entry.text and "attempt 2" in entry.text]
    assert continued == ["training continued: step 5 is done in attempt 2, 20 s after this was found"]
    run.decision(1, 1, Action.NEW_ATTEMPT, 26, number=1)
    assert [one.action for one in read_timeline(run.dir).decisions_on(TimelineIncident(run.dir, outlived))] == [
        Action.NEW_ATTEMPT
    ], "control: another decision about the same incident"
    run.decision(1, 1, Action.STOP, 31)
    for one in (outlived, killed):
        answers_now = read_timeline(run.dir).decisions_on(TimelineIncident(run.dir, one))
        assert Action.STOP in [made.action for made in answers_now]


def test_the_end_of_an_attempt_does_not_repeat_its_incident(runs: Path) -> None:
    run = RunFiles(runs).created()
    incident = run.incident(1, 0, FailureKind.WORKER_KILLED, 17)
    timeline = made_up(run, [incident])
    ended = f"{incident.message} (no restarts are left)"
    assert timeline.ending(1, ended) == "worker killed: see its incident"
    assert timeline.ending(2, ended) == ended, "an incident of another attempt"
    assert timeline.ending(1, "all roles ended well") == "all roles ended well"


def test_a_rank_of_the_engines_is_not_taken_for_one_of_the_trainers(runs: Path) -> None:
    run = hung_run(runs)
    engine = run.incident(1, 1, FailureKind.HANG, 26, number=1, role=Role.ROLLOUT, detected_after_s=5.0)
    assert suspects_text(engine) == "rank 1 of the group rollout on node n2"
    texts = [entry.text for entry in made_up(run, [engine], []).entries()]
    assert any("last sign of life of rank 1 of the group rollout on node n2" in text for text in texts)
    assert suspects_text(run.incident(1, 1, FailureKind.HANG, 27, number=2, role=Role.TRAINER)) == "rank 1 on node n2"


def test_times_have_dates_because_runs_take_days(runs: Path) -> None:
    run = hung_run(runs)
    page = summary_markdown(summarise(run.dir), read_timeline(run.dir), None, "")
    assert f"| {at(17):%Y-%m-%d} 12:00:17 | 1 | collective_hang |" in page
    shown = watching.timeline_lines(RunReader(run.dir).read())
    assert shown[0].startswith(f"{at(12):%Y-%m-%d} 12:00:12 progress stopped")
    chart = str(timeline_chart(records.learned()))
    assert "From 2026-11-20 14:03:07 UTC to 2026-11-20 14:06:19 UTC" in chart
