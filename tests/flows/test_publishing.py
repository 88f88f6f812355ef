"""Parts of a run that Prefect shows, from its directory: events, progress, incidents, summary; and the publisher."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_fakes import NODE, Clock, FakeAgent, make_run, make_spec, training_snapshot
from harness import ControllerHarness

from flows.publishing import artifacts, publisher
from flows.publishing.artifacts import CURVES_INTERVAL_S, Publication
from flows.publishing.events import MAX_AGE, FlowRunRef, PrefectEvent, events_of
from flows.publishing.publisher import Publisher
from rlhf_core.control.steps import drive
from rlhf_core.control.views.progress import RunReader, StepTimer, progress_of_poll
from rlhf_core.control.views.summary import summarise
from rlhf_core.control.views.timeline import read_checks, read_timeline
from rlhf_core.errors import PreflightBlocked
from rlhf_core.files.appended import append_lines
from rlhf_core.history.queries import show_run
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.render.evidence import LOG_LINES, STACK_LINES
from rlhf_core.render.markdown import MAX_INCIDENTS, incidents_markdown, progress_markdown
from rlhf_core.render.progress import progress_text
from rlhf_core.render.summary import interval, signed, summary_markdown
from rlhf_core.render.timeline import Timeline
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import AttemptState, PromotionState, Role, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import ControllerStarted, JournalLine, PromotionMoved, RunMoved
from rlhf_core.watchdog.ingest import rebuild
from rlhf_core.watchdog.watcher import AttemptSnapshot

# ---------------------------------------------------------------------------------------------------------------------
# Events for automations: their names, text-only payloads, and ids that do not depend on the publisher

FLOW_RUN = FlowRunRef("0d6f2a5e-0000-0000-0000-000000000000", "a flow run")
ANOTHER = FlowRunRef("1d6f2a5e-0000-0000-0000-000000000000", "another one")


def events(run_dir: RunDir, flow_run: FlowRunRef = FLOW_RUN) -> Sequence[PrefectEvent]:
    return events_of(read_timeline(run_dir), run_dir.read_spec(), flow_run)


def completed(harness: ControllerHarness) -> RunDir:
    run_dir = harness.good_run()
    session = harness.controller(run_dir)
    session.journal.append(ControllerStarted(controller="me", flow_run_id="x", flow_run_url="http://ui/runs/x"))
    drive(session)
    return run_dir


def test_every_state_of_a_run_is_an_event_with_text_only(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    found = events(run_dir)
    assert [one.name for one in found] == [
        f"rlhf.run.{state}" for state in ("preflight", "queued", "evaluating", "completed")
    ]
    assert found[-1].payload == {
        "run_id": run_dir.run_id,
        "name": "small",
        "owner": run_dir.read_spec().owner,
        "state": "completed",
        "message": "attempt 1 completed",
        "url": "http://ui/runs/x",
        "run_dir": str(run_dir.root),
    }
    assert all(isinstance(value, str) for one in found for value in one.payload.values())


def test_the_event_of_a_promotion_has_its_step_and_its_decider(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    journal = Journal(run_dir, token=100)
    journal.append(PromotionMoved(state=PromotionState.WAITING, checkpoint_step=10, reason="gained 0.7"))
    journal.append(PromotionMoved(state=PromotionState.PROMOTED, checkpoint_step=10, by="ada", path="/models/a"))
    waiting, promoted = events(run_dir)[-2:]
    assert (waiting.name, promoted.name) == ("rlhf.promotion.waiting", "rlhf.promotion.promoted")
    assert waiting.payload["message"] == "gained 0.7"
    assert (promoted.payload["by"], promoted.payload["path"]) == ("ada", "/models/a")
    assert promoted.payload["checkpoint_step"] == "10"


def test_ids_do_not_depend_on_the_publisher(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    FakeAgent(run_dir).incident(FailureKind.HANG)
    ids = [one.id for one in events(run_dir)]
    assert len(set(ids)) == len(ids) == 5
    assert [one.id for one in events(run_dir, ANOTHER)] == ids


def test_lines_of_a_controller_that_lost_the_run_cause_no_event(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    sequence = read_record(run_dir).next_sequence
    moved = RunMoved(state=RunState.FAILED, cause="this must not alert")
    append_lines(run_dir.control, JournalLine(sequence=sequence, token=0, time=utc_now(), event=moved))
    assert events(run_dir)[-1].name == "rlhf.run.completed"


def test_old_events_are_not_published(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    later = utc_now() + MAX_AGE + timedelta(minutes=1)
    assert events_of(read_timeline(run_dir), run_dir.read_spec(), FLOW_RUN, later) == []


# ---------------------------------------------------------------------------------------------------------------------
# Progress: its wording, and the explanation of a run that goes back


def snapshot(step: int, **changes: Any) -> AttemptSnapshot:
    return training_snapshot(step, **{"metrics": {"time/step_s": 2.0, "reward/mean": 0.25}, **changes})


def test_a_step_is_a_line_with_the_remaining_time(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    progress = progress_of_poll(snapshot(6), make_spec(), StepTimer())
    text = progress_markdown(progress, read_timeline(run_dir))
    assert progress.percent == 60.0
    assert "**step 6 of 10 (grpo), 60 %** · 8.0 s left" in text
    assert "attempt 1, 0 restarts · on n1 · 2.0 s a step" in text
    assert "reward 0.250" in text


def test_the_warm_start_does_not_predict_the_time_of_the_main_algorithm() -> None:
    spec, timer = make_spec(), StepTimer()
    assert progress_of_poll(snapshot(2, loop="sft", metrics={"time/step_s": 0.1}), spec, timer).left_s is None
    assert progress_of_poll(snapshot(3, metrics={"time/step_s": 4.0}), spec, timer).left_s == 7 * 4.0


def test_polls_of_the_same_step_count_once_in_the_time_of_a_step() -> None:
    timer = StepTimer()
    timer.update((1, 0, 3), "grpo", {"time/step_s": 1.0})
    means = [timer.update((1, 0, 4), "grpo", {"time/step_s": 2.0}) for _ in range(100)]
    assert means[-1] == 1.1


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e308, -1e308])
def test_an_impossible_time_of_a_step_changes_no_prediction(seconds: float) -> None:
    spec, timer = make_spec(), StepTimer()
    assert progress_of_poll(snapshot(2, metrics={"time/step_s": seconds}), spec, timer).left_s is None
    assert progress_of_poll(snapshot(3), spec, timer).left_s == 14.0
    progress = progress_of_poll(snapshot(4, metrics={"time/step_s": seconds}), spec, timer)
    assert progress_text(progress) == "grpo step 4/10, 12 s left"


@pytest.mark.parametrize(("step", "goes_back"), [(7, False), (4, True)])
def test_a_run_that_goes_back_is_explained(harness: ControllerHarness, step: int, goes_back: bool) -> None:
    """The furthest step comes from the files: a later controller knows it too."""
    run_dir = harness.run()
    agent = FakeAgent(run_dir)
    agent.begin()
    for number in range(1, 8):
        agent.step(number)
    agent.incident(FailureKind.HANG)
    furthest = RunReader(run_dir).read().progress.furthest
    assert furthest == 7
    progress = replace(
        progress_of_poll(replace(snapshot(step), attempt=2), make_spec(), StepTimer()), furthest=furthest
    )
    text = progress_markdown(progress, read_timeline(run_dir))
    assert ("Went back after hang: step 7 was reached before" in text) is goes_back


def test_steps_of_a_trial_do_not_count_for_its_run(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    small = make_spec(train={"num_steps": 2})
    trial = replace(
        progress_of_poll(snapshot(3), small, StepTimer()), is_trial=True, title="trial on one node: train attempt 1"
    )
    assert trial.percent == 0.0
    assert "**trial on one node: train attempt 1, step 3 of 4**" in progress_markdown(trial, read_timeline(run_dir))


def test_the_end_is_described(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    snapshot = RunReader(run_dir).read()
    assert snapshot.progress.percent == 100.0
    text = progress_markdown(snapshot.progress, snapshot.timeline)
    assert text.startswith("**completed** · attempt 1 completed")


def test_without_data_there_is_no_figure(harness: ControllerHarness) -> None:
    snapshot = RunReader(make_run(harness.site.runs_dir)).read()
    assert snapshot.progress.percent == 0.0
    assert progress_markdown(snapshot.progress, snapshot.timeline) == "**pending**"


# ---------------------------------------------------------------------------------------------------------------------
# The page of incidents: the essential evidence, bounded in size, including trials


@pytest.fixture
def hung(tmp_path: Path) -> RunDir:
    """A run in which rank 1 hung, with evidence as the agents save it."""
    run_dir = make_run(tmp_path / "runs")
    agent = FakeAgent(run_dir)
    agent.status()
    agent.incident(FailureKind.HANG)
    folder = run_dir.attempt(1).restart(0).evidence_dir
    status = run_dir.attempt(1).restart(0).agent_status(NODE)
    (folder / f"ranks-{NODE}.json").write_text(json.dumps(json.loads(status.read_text())["ranks"]))
    (folder / f"stack-{NODE}-0.txt").write_text("waits in all_reduce\n" * 100)
    (folder / f"stack-{NODE}-1.txt").write_text("the culprit sleeps\n```\n# not a heading\n")
    (folder / f"log-{NODE}-0.txt").write_text("".join(f"line {number}\n" for number in range(10_000)))
    (folder / f"log-{NODE}-1.txt").write_text("")
    return run_dir


def test_the_stack_of_the_suspect_comes_first(hung: RunDir) -> None:
    text = incidents_markdown(read_timeline(hung))
    assert text.index("the culprit sleeps") < text.index("waits in all_reduce")


def test_the_page_is_built_again_only_after_news(hung: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evidence of hundreds of ranks is thousands of files, and a run is published every five seconds."""
    built: list[str] = []

    def build(timeline: Timeline, links: str) -> str:
        built.append(f"page {len(built) + 1}")
        return built[-1]

    monkeypatch.setattr(artifacts, "incidents_markdown", build)
    page = artifacts.IncidentPage()
    assert [page(read_timeline(hung)).data for _ in range(2)] == ["page 1", "page 2"], "evidence may still appear"
    monkeypatch.setattr(artifacts, "LATE_EVIDENCE", timedelta(0))
    assert [page(read_timeline(hung)).data for _ in range(2)] == ["page 2", "page 2"]
    FakeAgent(hung, restart=1).incident(FailureKind.WORKER_KILLED)
    assert page(read_timeline(hung)).data == "page 3"


def test_evidence_is_short_and_refers_to_the_rest(hung: RunDir) -> None:
    text = incidents_markdown(read_timeline(hung))
    assert text.count("waits in all_reduce") == STACK_LINES
    assert "more lines" in text
    assert text.count("\n`line ") == LOG_LINES
    assert "line 9999" in text
    assert f"log-{NODE}-1.txt**" not in text, "an empty log is no evidence"
    assert f"`{hung.attempt(1).restart(0).evidence_dir}`" in text
    assert f"rlhf logs {hung.run_id} --attempt 1 --restart 0" in text
    assert "file://" not in text
    assert "<details" not in text, "the new UI shows it as text"


def test_evidence_is_not_interpreted_as_markdown(hung: RunDir) -> None:
    lines = incidents_markdown(read_timeline(hung)).splitlines()
    assert "`the culprit sleeps`  " in lines
    assert "```` ``` ````  " in lines
    assert "`# not a heading`  " in lines
    assert "# not a heading" not in lines


def test_frames_keep_their_indentation_and_their_lines(hung: RunDir) -> None:
    """A code block would do that, but the new UI renders it light on light."""
    (hung.attempt(1).restart(0).evidence_dir / f"stack-{NODE}-1.txt").write_text("Thread 1\n    train (a.py:1)\n\n")
    text = incidents_markdown(read_timeline(hung))
    assert "`Thread 1`  \n`\u00a0\u00a0\u00a0\u00a0train (a.py:1)`  \n" in text
    assert "```text" not in text


def test_a_run_with_many_incidents_stays_readable(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs")
    for restart in range(50):
        FakeAgent(run_dir, restart=restart).incident(FailureKind.HANG)
        folder = run_dir.attempt(1).restart(restart).evidence_dir
        for rank in range(8):
            (folder / f"stack-{NODE}-{rank}.txt").write_text("frame\n" * 1000)
    text = incidents_markdown(read_timeline(run_dir))
    assert text.count("## hang") == MAX_INCIDENTS
    assert "30 earlier incidents are left out" in text
    assert len(text) < 50_000


def test_incidents_of_a_trial_are_shown_with_its_run(harness: ControllerHarness, checks: list[CheckResult]) -> None:
    """A trial has no pages of its own."""
    checks.append(CheckResult(id="trial.needed", status=CheckStatus.WARNING, found="data changed"))
    run_dir = harness.run(make_spec(preflight={"trial": "run"}))

    def breaks(request: object) -> None:
        (trial,) = [RunDir(path) for path in harness.site.runs_dir.iterdir() if path != run_dir.root]
        agent = FakeAgent(trial)
        agent.begin()
        agent.incident(FailureKind.SHAPE)
        agent.probe("node7")
        agent.end(AttemptState.FAILED, FailureKind.SHAPE)

    harness.scheduler.on_submit = breaks
    with pytest.raises(PreflightBlocked):
        drive(harness.controller(run_dir))
    (trial,) = read_record(run_dir).trials.values()
    text = incidents_markdown(read_timeline(run_dir))
    assert "## shape" in text
    assert f"run `{trial}`" in text
    rows = {(when, result.node) for when, result in read_checks(run_dir) if result.id == "probe.matmul"}
    assert rows == {("trial: attempt 1", "node7")}


# ---------------------------------------------------------------------------------------------------------------------
# The summary


def test_a_completed_run_in_a_dozen_facts(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    summary = summarise(run_dir)
    assert summary.state is RunState.COMPLETED
    assert (summary.steps, summary.num_attempts, summary.num_restarts) == (10, 1, 0)
    assert [name for name, _ in summary.stage_seconds] == ["preflight", "allocate", "train", "evaluate"]
    greedy, sampled = summary.accuracy
    assert greedy.gain is not None
    assert abs(greedy.gain - 0.7) < 1e-9
    assert sampled.gain is None
    text = summary_markdown(summary, read_timeline(run_dir), None, "")
    assert "| exact_match, greedy | 0.200 [0.100, 0.300] | 0.900 [0.800, 1.000] | +0.700 |" in text
    assert str(run_dir.root) in text


def test_steps_without_metrics_are_listed(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    assert summarise(run_dir).missing_steps == ""
    metrics = run_dir.attempt(1).restart(0).metrics
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:4]))
    summary = summarise(run_dir)
    assert (summary.steps, summary.missing_steps) == (4, "no metrics of 6 of 10 steps: 5-10")
    assert "> no metrics of 6 of 10 steps: 5-10" in summary_markdown(summary, read_timeline(run_dir), None, "")


def test_steps_lost_in_a_rewind_do_not_count(harness: ControllerHarness) -> None:
    """As in the history."""
    run_dir = harness.run()
    for restart, steps in enumerate((range(1, 7), range(4, 6), ())):
        agent = FakeAgent(run_dir, restart=restart)
        agent.role(Role.TRAINER)
        for step in steps:
            agent.step(step)
    assert summarise(run_dir).steps == 5
    rebuild(harness.site.runs_dir, harness.store)
    assert show_run(harness.store, run_dir.run_id).last_step == 5


def test_missing_values_are_dashes() -> None:
    assert (interval(None), signed(None)) == ("-", "-")
    assert signed(-0.25) == "-0.250"


# ---------------------------------------------------------------------------------------------------------------------
# The publisher of a controller: times at which the picture is drawn, and no repetition of unchanged artifacts


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the artifacts of each publication; nothing is really sent without a server."""
    found: list[list[str]] = []

    def publish(publication: Publication) -> list[str]:
        found.append([one.name for one in publication.artifacts])
        return []

    monkeypatch.setattr(publisher, "publish", publish)
    monkeypatch.setattr(publisher, "server_answers", lambda: True)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(publisher, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    return made


def at_work(harness: ControllerHarness, run_dir: RunDir) -> Publisher:
    return Publisher(harness.controller(run_dir), FLOW_RUN, logging.getLogger("test"), pytest.fail)


def test_the_picture_is_drawn_at_once_then_rarely_and_at_the_end(
    harness: ControllerHarness, sent: list[list[str]], clock: Clock
) -> None:
    run_dir = harness.run()
    agent, made = FakeAgent(run_dir), at_work(harness, run_dir)
    agent.begin()
    made._publish(last=False)
    assert sent.pop() == ["progress"], "no step yet"
    agent.step(1)
    made._publish(last=False)
    assert sent.pop() == ["progress", "curves"]
    clock.now += CURVES_INTERVAL_S - 1
    agent.step(2)
    made._publish(last=False)
    assert sent.pop() == ["progress"]
    clock.now += 1
    made._publish(last=False)
    assert sent.pop() == ["curves"]
    agent.step(3)
    made._publish(last=True)
    assert "curves" in sent.pop()


def test_a_run_of_days_is_drawn_less_often(
    harness: ControllerHarness, sent: list[list[str]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty controllers share a machine, and in half a minute of three days nothing changes visibly."""
    run_dir = harness.run()
    agent, made = FakeAgent(run_dir), at_work(harness, run_dir)
    monkeypatch.setattr(publisher, "utc_now", lambda: utc_now() + timedelta(days=3))
    agent.begin()
    agent.step(1)
    made._publish(last=False)
    for hours, names in ((1.0, ["progress"]), (0.5, ["curves"])):
        clock.now += hours * 3600
        agent.step(round(clock.now))
        made._publish(last=False)
        assert set(names) <= set(sent[-1])
        assert ("curves" in sent[-1]) is (names == ["curves"])


def test_unchanged_artifacts_are_not_sent_again(
    harness: ControllerHarness, sent: list[list[str]], clock: Clock
) -> None:
    run_dir = harness.run()
    made = at_work(harness, run_dir)
    made._publish(last=False)
    made._publish(last=False)
    assert sent == [["progress"]]
    made.title = "preflight"
    made._publish(last=False)
    assert sent == [["progress"], ["progress"]], "the control"


def test_artifacts_refused_by_the_server_are_sent_again(
    harness: ControllerHarness, sent: list[list[str]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = harness.run()
    FakeAgent(run_dir).begin()
    made = at_work(harness, run_dir)
    with monkeypatch.context() as away:
        away.setattr(publisher, "server_answers", lambda: False)
        with pytest.raises(ConnectionError):
            made._publish(last=False)
    assert sent == []
    made._publish(last=False)
    assert sent == [["progress"]]
