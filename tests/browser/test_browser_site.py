"""A user in the UI of a site: requests runs, watches, schedules, cancels, retries and approves.

Every effect is verified where it counts: in the queue of Slurm, and in the database. Most runs are requested at the
start through the form, so that they run concurrently while they are examined one after the other.
"""

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import psutil
import pytest
from process_tools import until
from signing_in import PAGE_TIMEOUT_MS, sign_in
from sites import TIMEOUT_S, Site

Shoot = Callable[[str], None]
"""Takes a picture of the page, under a name."""

pytestmark = [pytest.mark.site, pytest.mark.end_to_end, pytest.mark.training]

ASKED = {
    "failed": 'reward.functions=["grader:by_service"]\nloops.main.num_steps=14',
    "promoted": 'promote.when="approved"\npromote.min_gain=-1.0',
    # With health rules it would end by itself if earlier tests take long: such a short warm start teaches little.
    "cancelled": 'reward.functions=["grader:slow"]\nloops.main.num_steps=5000\n'
    'health.off={no_spread="it waits to be cancelled", reward_collapse="as above"}',
}
"""Overrides that are typed into the form, by what becomes of the run."""

SHOWN = {
    "curves": None,
    "checks": "batch.prompts_divide_ranks",
    "result": "exact_match, greedy",
    "progress": "Progress: 100%",
}
"""Artifacts of a run that has completed, and a text on the page of each; the curves are a picture."""


@pytest.fixture(scope="module")
def scheduled(site: Site) -> str:
    """A deployment for schedules."""
    return site.deploy("sorting.toml", "--name", "every-minute", "--set", "loops.main.num_steps=2")


@pytest.fixture(scope="module")
def asked(site: Site, chromium: Any) -> dict[str, str]:
    """The flow runs of :data:`ASKED`."""
    deployment = site.deploy("sorting.toml")
    page = chromium.new_page()
    page.set_default_timeout(PAGE_TIMEOUT_MS)
    sign_in(page, site.password)
    flow_runs = {}
    for name, overrides in ASKED.items():
        pages.open_run_form(page, site.url, deployment)
        pages.fill(page, {"name": name, "overrides": overrides})
        flow_runs[name] = pages.submit(page)
    page.close()
    return flow_runs


def ranks(run_id: str) -> list[psutil.Process]:
    """The trainer ranks of a run in rank order, which is the order in which their agent forks them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "trainer" in words and any(run_id in word for word in words):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def test_a_run_is_requested_with_changed_parameters_and_watched(
    site: Site, asked: dict[str, str], page: Any, shoot: Shoot
) -> None:
    deployment = site.deployment("slurm-quickstart")
    pages.open_deployment(page, site.url, deployment)
    shoot("deployment")
    pages.choose_custom_run(page)
    shoot("form")
    changed = {"name": "by-hand", "nodes": "2", "steps": "24", "learning_rate": "0.0002", "seed": "11"}
    pages.fill(page, {**changed, "overrides": "rollout.temperature=0.9"})
    flow_run = pages.submit(page)

    run_id = site.run_of(flow_run)
    assert run_id.startswith("by-hand-")
    ((name, seed, total_steps, overrides, spec),) = site.rows(
        "SELECT name, seed, total_steps, overrides, spec FROM runs WHERE run_id = ?", run_id
    )
    assert (name, seed, total_steps) == ("by-hand", 11, 30 + 24)
    assert set(json.loads(overrides)) == {
        'name="by-hand"',
        "resources.num_nodes=2",
        "loops.main.num_steps=24",
        "loops.main.optimizer.learning_rate=0.0002",
        "seed=11",
        "rollout.temperature=0.9",
    }
    made = json.loads(spec)
    assert (made["loops"]["main"]["num_steps"], made["loops"]["main"]["optimizer"]["learning_rate"]) == (24, 0.0002)
    assert (made["resources"]["num_nodes"], made["rollout"]["temperature"]) == (2, 0.9)

    site.becomes(run_id, "training")
    ((job, comment),) = until(lambda: site.jobs(run_id), timeout_s=TIMEOUT_S)
    assert comment == f"{run_id}/1"
    until(lambda: site.step(run_id) >= 30, timeout_s=TIMEOUT_S)
    pages.open_flow_run(page, site.url, flow_run)
    page.get_by_role("tab", name="Task Runs").click()
    page.get_by_text("train attempt 1").first.wait_for()
    shoot("training")

    site.becomes(run_id, "completed")
    assert site.flow_becomes(flow_run, "Completed").startswith(f"run {run_id} completed")
    assert site.rows("SELECT scheduler_job_id, state FROM attempts WHERE run_id = ?", run_id) == [(job, "completed")]
    assert until(lambda: site.jobs(run_id) == [])
    pages.open_flow_run(page, site.url, flow_run)
    page.get_by_text("Completed", exact=True).first.wait_for()
    shoot("completed")
    visits_its_pages(site, page, shoot, flow_run, run_id)


def visits_its_pages(site: Site, page: Any, shoot: Shoot, flow_run: str, run_id: str) -> None:
    """Check the pages of an ended run: 100 %, a visible picture, the checks, and the result."""
    key = run_id.replace("_", "-")
    _, progress = site.ask(f"/artifacts/rlhf-progress-{key}/latest")
    assert progress["data"] == 100
    for kind, seen in SHOWN.items():
        pages.open_flow_run(page, site.url, flow_run)
        pages.open_artifacts(page)
        if kind == "curves":
            shoot("artifacts")
        pages.open_artifact(page, kind)
        if seen is None:
            picture = page.locator("img[src^='data:']").first
            picture.wait_for()
            assert picture.evaluate("image => image.naturalWidth") > 0
        else:
            page.get_by_text(seen).first.wait_for()
        shoot(kind)


def test_the_form_refuses_invalid_values(site: Site, asked: dict[str, str], page: Any) -> None:
    deployment = site.deployment("slurm-quickstart")
    known = number_of_flow_runs(site, deployment)
    for name, wrong in {"steps": "0", "nodes": "-1", "learning_rate": "0", "name": "Has Spaces"}.items():
        pages.open_run_form(page, site.url, deployment)
        pages.fill(page, {name: wrong})
        pages.refuse(page)
        assert pages.browser_says(page, name) or pages.says(page), f"nothing is said of {name}"
        assert page.url.endswith("/run"), "the form stays open"
    assert number_of_flow_runs(site, deployment) == known


def number_of_flow_runs(site: Site, deployment: str) -> int:
    _, found = site.ask("/flow_runs/count", {"deployments": {"id": {"any_": [deployment]}}})
    return int(found)


def test_an_invalid_override_is_refused_at_once(site: Site, page: Any, shoot: Shoot) -> None:
    pages.open_run_form(page, site.url, site.deployment("slurm-quickstart"))
    pages.fill(page, {"name": "mistyped", "overrides": "loops.main.num_stepps=5"})
    flow_run = pages.submit(page)
    message = site.flow_becomes(flow_run, "Failed")
    assert "loops.main.num_stepps" in message
    pages.open_flow_run(page, site.url, flow_run)
    page.get_by_role("tab", name="Details").click()
    page.get_by_text("loops.main.num_stepps").first.wait_for()
    shoot("refused")
    assert site.rows("SELECT * FROM runs WHERE name = 'mistyped'") == []
    assert site.rows("SELECT * FROM controllers WHERE flow_run_id = ?", flow_run) == []
    assert site.jobs("mistyped") == []


# ---------------------------------------------------------------------------------------------------------------------
# While it runs


def test_a_schedule_is_made_in_the_ui(site: Site, scheduled: str, page: Any, shoot: Shoot) -> None:
    """It fires during the next tests; the last test checks it."""
    pages.open_deployment(page, site.url, scheduled)
    pages.make_cron_schedule(page, "* * * * *")
    page.get_by_text("Every minute").wait_for()
    shoot("schedule")
    _, deployment = site.ask(f"/deployments/{scheduled}")
    (schedule,) = deployment["schedules"]
    assert schedule["schedule"]["cron"] == "* * * * *"


@pytest.mark.usefixtures("asked")
def test_a_stopped_rank_is_shown_and_the_run_continues(site: Site, page: Any, shoot: Shoot) -> None:
    """The run is requested here, because it must be active when its rank is stopped."""
    pages.open_run_form(page, site.url, site.deployment("sorting"))
    pages.fill(page, {"name": "stopped", "overrides": 'reward.functions=["grader:slow"]\nloops.main.num_steps=200'})
    flow_run = pages.submit(page)
    run_id = site.run_of(flow_run)
    until(lambda: site.step(run_id) >= 30, timeout_s=TIMEOUT_S)
    ranks(run_id)[1].send_signal(signal.SIGSTOP)
    question = "SELECT failure_kind, suspect_ranks FROM incidents WHERE run_id = ?"
    ((kind, suspects),) = until(lambda: site.rows(question, run_id), timeout_s=TIMEOUT_S)
    assert kind in ("hang", "collective_hang")
    assert json.loads(suspects) == [1]
    pages.open_flow_run(page, site.url, flow_run)
    until(lambda: site.ask(f"/artifacts/rlhf-incidents-{run_id}/latest")[0] == 200)
    pages.open_flow_run(page, site.url, flow_run)
    pages.open_artifacts(page)
    pages.open_artifact(page, "incidents")
    page.get_by_text("rank 1").first.wait_for()
    shoot("incident")
    site.becomes(run_id, "completed")
    assert site.rows("SELECT action FROM decisions WHERE run_id = ?", run_id) == [("restart_in_place",)]
    assert site.rows("SELECT number FROM attempts WHERE run_id = ?", run_id) == [(1,)]


def test_a_run_is_cancelled_in_the_ui(site: Site, asked: dict[str, str], page: Any, shoot: Shoot) -> None:
    flow_run = asked["cancelled"]
    run_id = site.run_of(flow_run)
    site.becomes(run_id, "training")
    until(lambda: site.step(run_id) > 20, timeout_s=TIMEOUT_S)
    assert len(site.jobs(run_id)) == 1
    assert len(ranks(run_id)) == 2
    pages.open_flow_run(page, site.url, flow_run)
    pages.cancel(page)
    site.becomes(run_id, "cancelled")
    assert until(lambda: site.jobs(run_id) == []), "its job is gone"
    assert until(lambda: ranks(run_id) == []), "and its processes"
    site.flow_becomes(flow_run, "Cancelled")
    pages.open_flow_run(page, site.url, flow_run)
    page.get_by_text("Cancelled", exact=True).first.wait_for()
    shoot("cancelled")


def test_a_failed_run_is_retried_and_continues_from_its_checkpoint(
    site: Site, asked: dict[str, str], page: Any, shoot: Shoot
) -> None:
    flow_run = asked["failed"]
    run_id = site.run_of(flow_run)
    site.becomes(run_id, "failed")
    assert "503" in site.flow_becomes(flow_run, "Failed")
    pages.open_flow_run(page, site.url, flow_run)
    page.get_by_text("Failed", exact=True).first.wait_for()
    shoot("failed")
    site.service_is_up.touch()
    pages.retry(page)
    until(lambda: site.recorded(run_id) == "completed", timeout_s=TIMEOUT_S)
    site.flow_becomes(flow_run, "Completed")
    attempts = site.rows("SELECT number, state, resumed_from_step FROM attempts WHERE run_id = ? ORDER BY 1", run_id)
    assert [attempt[:2] for attempt in attempts] == [(1, "failed"), (2, "completed")]
    assert attempts[1][2] > 0, "from its checkpoint"
    assert site.rows("SELECT run_id FROM runs WHERE name = 'failed'") == [(run_id,)], "never a second run"
    assert {found for (found,) in site.rows("SELECT run_id FROM controllers WHERE flow_run_id = ?", flow_run)} == {
        run_id
    }
    pages.open_flow_run(page, site.url, flow_run)
    page.get_by_role("tab", name="Task Runs").click()
    page.get_by_text("train attempt 2").first.wait_for()
    shoot("tried-again")


# ---------------------------------------------------------------------------------------------------------------------
# Afterwards


def test_the_printed_link_opens_in_the_ui_of_the_first_page(site: Site, asked: dict[str, str], page: Any) -> None:
    flow_run = asked["promoted"]
    run_id = site.run_of(flow_run)
    link = site.rlhf("show", run_id, "--json").json()["controllers"][-1]["flow_run_url"]
    assert link == f"{site.url}/runs/flow-run/{flow_run}"
    page.goto(site.url)
    page.wait_for_url(f"{site.url}/dashboard")
    page.goto(link)
    page.get_by_text(run_id).filter(visible=True).first.wait_for()
    assert page.url.startswith(link)


def test_a_model_is_approved_in_the_ui(site: Site, asked: dict[str, str], page: Any, shoot: Shoot) -> None:
    flow_run = asked["promoted"]
    run_id = site.run_of(flow_run)
    site.flow_becomes(flow_run, "Paused")
    pages.open_flow_run(page, site.url, flow_run)
    form = pages.open_answer(page)
    assert "exact_match, greedy" in form.inner_text(), "the evaluation stands beside the button"
    shoot("question")
    pages.approve(form, "Ada", "sorts well enough")
    shoot("answer")
    pages.send_answer(form)
    assert "by Ada" in site.flow_becomes(flow_run, "Completed")
    question = "SELECT state, decided_by, reason, path FROM promotions WHERE run_id = ?"
    ((state, by, reason, path),) = until(lambda: [row for row in site.rows(question, run_id) if row[0] == "promoted"])
    assert (state, by, reason) == ("promoted", "Ada (through Prefect, unverified)", "sorts well enough")
    assert {"config.json", "model.safetensors", "rlhf.json"} <= {file.name for file in Path(path).iterdir()}
    assert Path(path).name == run_id


def test_the_schedule_requests_runs_until_it_is_removed(
    site: Site, scheduled: str, asked: dict[str, str], page: Any, shoot: Shoot
) -> None:
    question = "SELECT run_id, config_source, overrides, spec FROM runs WHERE name = 'sorting' ORDER BY created_at"
    run_id, source, overrides, spec = until(lambda: site.rows(question), timeout_s=TIMEOUT_S)[0]
    pages.open_deployment(page, site.url, scheduled)
    shoot("scheduled")
    pages.delete_schedule(page, "Every minute")
    assert site.ask(f"/deployments/{scheduled}")[1]["schedules"] == []
    assert "every-minute" in source
    assert json.loads(overrides) == [], "only the deployed settings"
    made = json.loads(spec)
    assert (made["seed"], made["loops"]["main"]["num_steps"], made["resources"]["num_nodes"]) == (5, 2, 1)
    site.becomes(run_id, "completed")
    _, later = site.ask("/flow_runs/filter", {"flow_runs": {"state": {"name": {"any_": ["Scheduled", "Late"]}}}})
    assert [one for one in later if one["deployment_id"] == scheduled] == [], (
        "its scheduled flow runs are removed with it"
    )
    pages.open_page(page, site.url, "runs")
    shoot("runs")
    pages.open_page(page, site.url, "dashboard")
    shoot("dashboard")
