"""Summary of a run, made from its directory alone."""

from control_fakes import FakeAgent
from harness import ControllerHarness

from rlhf_core.control.views.summary import summarise
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.history.queries import show_run
from rlhf_core.render.summary import interval, signed, summary_markdown
from rlhf_core.schemas.attempts import Role, RunState
from rlhf_core.watchdog.ingest import rebuild


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
