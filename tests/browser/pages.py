"""The pages of Prefect's UI that our users visit, as steps for tests in a real browser.

They belong to the newer UI (``/v2``), on which the tour is based; the server's first page, and the links that we write,
belong to the older one (``test_links_browser.py``). Elements are located by what a user reads: labels and names of
buttons.
"""

from collections.abc import Mapping

from playwright.sync_api import Locator, Page

BUSY = 503


def sign_in(page: Page, ui: str, password: str) -> None:
    """Enter the password on the page that requests it at a first visit, whatever page was requested."""
    page.goto(f"{ui}/v2/dashboard", wait_until="domcontentloaded")
    page.locator("input[type=password]").fill(password)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Deployments").first.wait_for()


def leave(page: Page) -> None:
    """Leave the page until another one is opened: an open page is redrawn, and queries the server, all the time."""
    page.goto("about:blank")


def open_run_form(page: Page, ui: str, deployment_id: str) -> None:
    """Open the form of a deployment."""
    page.goto(f"{ui}/v2/deployments/deployment/{deployment_id}/run", wait_until="domcontentloaded")
    page.get_by_role("button", name="Submit").wait_for()


def field(page: Page, name: str) -> Locator:
    """A field of the form of a deployment or of its schedule."""
    required = page.get_by_label(name, exact=True)
    return page.get_by_label(f"{name} (Optional)", exact=True).or_(required).last


def fill(page: Page, values: Mapping[str, str]) -> None:
    """Fill in fields."""
    for name, value in values.items():
        field(page, name).fill(value)


def submit(page: Page) -> str:
    """Submit the form, and wait until the UI leaves it; returns the id of the flow run.

    A server whose SQLite is busy reports "Service Unavailable": the button is pressed again, as a user would do.
    """
    for _ in range(5):
        with page.expect_response(lambda response: response.url.endswith("/create_flow_run")) as answer:
            page.get_by_role("button", name="Submit").click()
        if answer.value.status != BUSY:
            break
    assert answer.value.ok, answer.value.text()
    page.wait_for_url(lambda url: not url.endswith("/run"), wait_until="commit")
    return str(answer.value.json()["id"])


def refuse(page: Page) -> None:
    """Press the button of a form that must be refused; if the browser itself refuses it, nothing is sent."""
    page.get_by_role("button", name="Submit").click()


def browser_says(page: Page, name: str) -> str:
    """Reason for which the browser rejects a field; empty if it accepts it."""
    return str(field(page, name).evaluate("element => element.validationMessage"))


def open_deployment(page: Page, ui: str, deployment_id: str) -> None:
    """Open the page of a deployment."""
    page.goto(f"{ui}/v2/deployments/deployment/{deployment_id}", wait_until="domcontentloaded")
    page.get_by_role("button", name="Run", exact=True).wait_for()


def choose_custom_run(page: Page) -> None:
    """Open the form of the deployment whose page is open, with its button."""
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").click()
    page.get_by_role("button", name="Submit").wait_for()


def make_cron_schedule(page: Page, cron: str) -> None:
    """Add a schedule to the deployment whose page is open, changing only the cron expression."""
    page.get_by_role("button", name="Schedule", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Cron").click()
    dialog.locator('input[name="schedule.cron"]').or_(dialog.get_by_label("Value")).first.fill(cron)
    dialog.get_by_role("button", name="Save").click()
    dialog.wait_for(state="hidden")


def delete_schedule(page: Page, words: str) -> None:
    """Remove a schedule, named as on the page, from the deployment whose page is open."""
    switch = page.get_by_role("switch", name=f"toggle {words}")
    switch.locator("xpath=../..").get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name="Delete").click()
    dialog = page.get_by_role("alertdialog").or_(page.get_by_role("dialog"))
    dialog.get_by_role("button", name="Delete").click()
    dialog.wait_for(state="hidden")
    switch.wait_for(state="hidden")


def open_flow_run(page: Page, ui: str, flow_run_id: str) -> None:
    """Open the page of a flow run."""
    page.goto(f"{ui}/v2/runs/flow-run/{flow_run_id}", wait_until="domcontentloaded")
    menu(page).wait_for()


def menu(page: Page) -> Locator:
    """The menu button of the flow run whose page is open, which has no name of its own."""
    return page.locator('button[aria-haspopup="menu"]').first


def choose(page: Page, entry: str) -> None:
    """Choose a menu entry of the flow run whose page is open."""
    menu(page).click()
    page.get_by_role("menuitem", name=entry).click()


def cancel(page: Page) -> None:
    """Cancel the flow run whose page is open. (The button "Cancel" of the dialog would only close it.)"""
    choose(page, "Cancel")
    dialog = page.get_by_role("alertdialog").or_(page.get_by_role("dialog"))
    dialog.get_by_role("button", name="Cancel Flow Run").click()
    dialog.wait_for(state="hidden")


def retry(page: Page) -> None:
    """Retry the flow run whose page is open."""
    choose(page, "Retry")
    dialog = page.get_by_role("alertdialog").or_(page.get_by_role("dialog"))
    dialog.get_by_role("button", name="Retry").click()
    dialog.wait_for(state="hidden")


def open_answer(page: Page) -> Locator:
    """Open the form that answers the paused flow run whose page is open."""
    choose(page, "Resume")
    form = page.get_by_role("dialog")
    form.locator("textarea").first.wait_for()
    return form


def approve(form: Locator, by: str, reason: str) -> None:
    """Approve in that form, and send it."""
    form.get_by_role("switch").click()
    form.locator("textarea").nth(0).fill(by)
    form.locator("textarea").nth(1).fill(reason)


def send_answer(form: Locator) -> None:
    """Send that form."""
    form.get_by_role("button", name="Resume").click()
    form.wait_for(state="hidden")


def open_artifacts(page: Page) -> None:
    """Open the tab with the artifacts of the flow run whose page is open."""
    page.get_by_role("tab", name="Artifacts").click()
    page.locator("a[href*='/artifacts/key/']").first.wait_for()


def open_artifact(page: Page, kind: str) -> None:
    """Open the newest version of an artifact, such as ``progress``."""
    page.locator(f"a[href*='/artifacts/key/rlhf-{kind}-']").first.click()
    page.locator("a[href*='/artifacts/artifact/']").first.click()
    page.wait_for_url(lambda url: "/artifacts/artifact/" in url, wait_until="commit")


def open_page(page: Page, ui: str, name: str) -> None:
    """Open a page of the menu on the left, such as ``dashboard``."""
    page.goto(f"{ui}/v2/{name}", wait_until="domcontentloaded")
    page.get_by_role("link", name="Deployments").first.wait_for()


def says(page: Page) -> str:
    """Wait for the page's own reason for refusing a form, in red or in a pop-up message."""
    said = page.locator("[data-sonner-toast], [role=alert], .text-destructive, .text-red-500").first
    said.wait_for()
    return said.inner_text()
