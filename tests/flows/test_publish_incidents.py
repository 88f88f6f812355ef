"""The page of incidents: the essential evidence, bounded in size, including trials."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from control_fakes import NODE, FakeAgent, make_run, make_spec
from harness import ControllerHarness

from flows.publishing import artifacts
from rlhf_core.control.steps import drive
from rlhf_core.control.views.timeline import read_checks, read_timeline
from rlhf_core.errors import PreflightBlocked
from rlhf_core.launch.journal import read_record
from rlhf_core.render.evidence import LOG_LINES, STACK_LINES
from rlhf_core.render.markdown import MAX_INCIDENTS, incidents_markdown
from rlhf_core.render.timeline import Timeline
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import FailureKind


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
