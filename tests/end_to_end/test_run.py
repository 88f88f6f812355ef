"""The main job and its results; kills during the run; identical numbers every time."""

import subprocess
from pathlib import Path

import pytest
from process_tools import kill_tree, until
from sites import Site, last_step

from rlhf_core.run_dir.checkpoint import checksum
from rlhf_core.run_dir.run import RunDir

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]

TOTAL_STEPS = 42


def final_weights(run: RunDir) -> str:
    """Hash of the weights after the last step."""
    return checksum(run.checkpoint(TOTAL_STEPS).model / "model.safetensors").sha256


def wait_for_step(site: Site, step: int, process: "subprocess.Popen[str]") -> RunDir:
    """Wait until the only run of a site has reached a step; returns its directory."""

    def reached() -> bool:
        if process.poll() is not None:
            pytest.fail(f"rlhf ended with {process.returncode} before step {step}\n{process.communicate()}")
        return any(last_step(run) >= step for run in site.runs())

    until(reached, f"step {step}", interval_s=0.05)
    return site.only_run()


def curve(site: Site) -> dict[tuple[str, int], float]:
    """The effective metrics that must not depend on the machine, as value by name and step."""
    rows = site.rows("SELECT key, step, value FROM run_curve")
    keys = [(key, step) for key, step, _ in rows]
    assert len(keys) == len(set(keys)), "a metric appears twice in the effective curve"
    return {(key, step): value for key, step, value in rows if not key.startswith(("time/", "speed/"))}


def test_a_run_ends_completed_with_four_stages_and_its_history(undisturbed: Site) -> None:
    (run,) = undisturbed.rlhf("runs", "--json").json()
    assert run["state"] == "completed"
    assert run["num_attempts"] == 1
    shown = undisturbed.rlhf("show", run["run_id"], "--json").json()
    assert [stage["name"] for stage in shown["stages"]] == ["preflight", "allocate", "train", "evaluate"]
    assert {stage["state"] for stage in shown["stages"]} == {"completed"}
    (attempt,) = shown["attempts"]
    assert (attempt["number"], attempt["state"], attempt["resumed_from_step"]) == (1, "completed", 0)
    assert [row["role"] for row in shown["restarts"]] == ["trainer", "evaluator"]
    assert not shown["incidents"]
    measured = {(row["when"], row["name"]) for row in shown["evaluations"]}
    assert measured == {(when, name) for when in ("before", "after") for name in ("greedy", "sampled")}
    for row in shown["evaluations"]:
        assert row["ci_low"] <= row["value"] <= row["ci_high"]
        assert row["checkpoint_step"] == (12 if row["when"] == "before" else TOTAL_STEPS)
    assert max(row["step"] for row in shown["checkpoints"]) == TOTAL_STEPS
    assert all(check["status"] != "blocked" for check in shown["checks"])


def test_every_step_is_in_the_history_once(undisturbed: Site) -> None:
    steps = sorted(step for key, step in curve(undisturbed) if key == "train/loss")
    assert steps == list(range(1, TOTAL_STEPS + 1))


def test_every_metric_is_explained(undisturbed: Site) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    recorded = {key for (key,) in undisturbed.rows("SELECT DISTINCT key FROM run_curve")}
    by_function = {key for key in recorded if key.startswith("reward/")} - {
        "reward/mean",
        "reward/std",
        "reward/min",
        "reward/max",
        "reward/length_correlation",
        "reward/length_slope",
    }
    assert by_function == {"reward/exact_match"}
    assert {key for key in recorded - by_function if f"`{key}`" not in page} == set()


def test_the_database_can_be_rebuilt_from_the_run_directories(undisturbed: Site) -> None:
    questions = (
        "SELECT run_id, name, state, seed FROM runs",
        "SELECT name, state, attempt FROM stages ORDER BY stage_index",
        "SELECT key, step, value FROM run_curve ORDER BY key, step",
        "SELECT name, value, ci_low, checkpoint_step FROM evaluations ORDER BY name, checkpoint_step",
        "SELECT count(*) FROM evaluation_samples",
        "SELECT number, state FROM attempts",
    )
    before = [undisturbed.rows(question) for question in questions]
    for path in undisturbed.home.glob("history.db*"):
        path.unlink()
    undisturbed.rlhf("db", "rebuild")
    assert [undisturbed.rows(question) for question in questions] == before
    assert all(before)


def test_kill_everything_then_resume_gives_the_same_numbers(site: Site, undisturbed: Site) -> None:
    process = site.start("run", site.config(), "--no-prefect")
    run = wait_for_step(site, 23, process)
    assert kill_tree(process.pid) >= 4
    process.wait()
    reached = last_step(run)
    assert reached < TOTAL_STEPS

    site.rlhf("resume", run.run_id, "--no-prefect")
    shown = site.rlhf("show", run.run_id, "--json").json()
    assert shown["run"]["state"] == "completed"
    first, second = shown["attempts"]
    assert first["state"] == "lost"
    assert second["resumed_from_step"] >= 20
    assert second["resumed_from_step"] <= reached
    assert curve(site) == curve(undisturbed)
    assert final_weights(run) == final_weights(undisturbed.only_run())


def test_another_seed_gives_other_numbers(site: Site, undisturbed: Site) -> None:
    """Negative control of every comparison above: the curves are not equal by construction."""
    site.rlhf("run", site.config(), "--no-prefect", "--set", "seed=4", "--set", "loops.main.num_steps=1")
    other, base = curve(site), curve(undisturbed)
    assert other["train/loss", 1] != base["train/loss", 1]
    assert other["rollout/seed_digest", 13] != base["rollout/seed_digest", 13]


def test_a_report_is_one_file_without_requests(undisturbed: Site, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    undisturbed.rlhf("report", "last", "--output", str(target))
    page = target.read_text()
    assert "<svg" in page
    assert "tiny" in page
    assert 'src="http' not in page
    assert 'href="http' not in page
