"""Links written by our program, opened in a real browser: they lead into the UI that the server's first page opens."""

import re
from typing import Any
from urllib.parse import urlsplit

import pytest
from harness import ControllerHarness
from signing_in import page_of
from sites import Site

from flows.publishing.artifacts import artifact_key
from flows.run import run_in_prefect
from rlhf_core.cli.main import execute
from rlhf_core.run_dir.run import RunDir


@pytest.fixture
def run_dir(
    harness: ControllerHarness, real_prefect: Site, blank_curves: None, monkeypatch: pytest.MonkeyPatch
) -> RunDir:
    """A run that has completed as a flow run, on the site that `rlhf show` uses."""
    monkeypatch.setenv("RLHF_HOME", str(harness.site.home))
    run_dir = harness.good_run()
    # Opened like `rlhf run` does: the flow run is recorded as driver in the journal.
    with real_prefect.in_use():
        run_in_prefect(harness.controller(run_dir, flow_run=None))
    return run_dir


def shows(page: Any, path: str, text: str) -> None:
    """Wait until the page with that path is open and shows that text visibly."""
    page.wait_for_url(lambda url: urlsplit(url).path == path, wait_until="commit")
    page.get_by_text(text).filter(visible=True).first.wait_for()


def opened_by(page: Any, name: str) -> Any:
    """Click a link in a text. The older UI opens it in a window of its own."""
    link = page.get_by_role("link", name=name, exact=True).first
    if link.get_attribute("target") != "_blank":
        link.click()
        return page
    with page.context.expect_page() as window:
        link.click()
    return window.value


def test_the_link_of_rlhf_show_opens_the_flow_run_in_the_ui_of_the_first_page(
    run_dir: RunDir, real_prefect: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["show", run_dir.run_id]) == 0
    (link,) = re.findall(r"In Prefect: (\S+)", capsys.readouterr().out)
    path = f"/runs/flow-run/{real_prefect.flow_run(run_dir)}"
    assert link == f"{real_prefect.url}{path}"
    with page_of(real_prefect, "/") as page:
        shows(page, "/dashboard", "Deployments")  # the newer UI would redirect to /v2/dashboard
        page.goto(link, wait_until="domcontentloaded")
        shows(page, path, run_dir.run_id)
        shows(page, path, "Completed")


@pytest.mark.parametrize("ui", ["", "/v2"])
def test_links_of_an_artifact_stay_in_the_ui_and_lead_to_the_run(run_dir: RunDir, real_prefect: Site, ui: str) -> None:
    flow_run, run_id = real_prefect.flow_run(run_dir), run_dir.run_id
    with page_of(real_prefect, f"{ui}/artifacts/key/{artifact_key(run_id, 'result')}") as page:
        page.locator(f"a[href^='{ui}/artifacts/artifact/']").first.click()
        checks = opened_by(page, "checks")
        shows(checks, f"{ui}/artifacts/key/{artifact_key(run_id, 'checks')}", run_id)
        checks.locator(f"a[href^='{ui}/runs/flow-run/{flow_run}']").first.click()
        shows(checks, f"{ui}/runs/flow-run/{flow_run}", run_id)
