"""Degenerate training through the real command line: detected, retried once from an earlier checkpoint, and stopped."""

from typing import Any

from site_files import options
from sites import Site

LEARNS_NOTHING = (
    "loops.main.optimizer.learning_rate=5",
    "health.window_steps=8",
    "health.min_completions=256",
    "health.max_train_gap=1e-12",  # exceeded at every step, with a warning
    "preflight.probe=false",
    "resources.ranks_per_node=1",  # two of them: test_two_real_ranks_end_a_degenerate_run_together
)


def test_training_that_learns_nothing_goes_back_once_and_stops_with_the_finding(site: Site) -> None:
    ended = site.rlhf("run", site.config(), "--no-prefect", *options(*LEARNS_NOTHING), code=1, timeout_s=600)
    assert "Training no longer learns" in ended.stdout + ended.stderr
    shown: dict[str, Any] = site.rlhf("show", "last", "--json").json()
    run = shown["run"]
    assert run["state"] == "failed"
    assert [attempt["state"] for attempt in shown["attempts"]] == ["failed", "failed"]
    assert {incident["failure_kind"] for incident in shown["incidents"]} == {"degenerate_rl"}
    ended_by = [one for one in shown["incidents"] if one["message"].startswith("Training no longer learns")]
    warnings = [one for one in shown["incidents"] if one not in ended_by]
    assert (len(ended_by), len(warnings)) == (2, 2)
    assert all("(train_gap): sampling and training disagree" in one["message"] for one in warnings)
    assert all(one["suspect_nodes"] == [] for one in shown["incidents"]), "no node gets a strike for it"
    by_agent = [one["action"] for one in shown["decisions"] if one["decided_by"] == "agent"]
    assert by_agent.count("continue") == 2, "a warning does not stop the run"
    # The warm start ended at step 12, and everything after it was judged.
    found_at = ended_by[0]["step"]
    assert 12 + 8 <= found_at <= 12 + 8 + 4
    assert [attempt["resumed_from_step"] for attempt in shown["attempts"]] == [0, 12]
    first, last = (one for one in shown["decisions"] if one["decided_by"] == "controller")
    assert first["action"] == "new_attempt"
    assert "resuming once from step-000012" in first["reason"]
    assert last["action"] == "stop"
    assert "change the reward or the config" in last["reason"]
    aside = site.only_run().aside(1)
    assert {path.name for path in aside.iterdir()} >= {"step-000015"}

    rows = site.rlhf("sql", "reward-collapses", "--json").json()
    assert all("no longer learns" in row["why"] for row in rows), "a warning ends no training"
    assert [(row["attempt"], row["step"]) for row in rows] == [(2, found_at), (1, found_at)]
