"""The pages of Prefect's UI that a person of ours uses, as steps: for tests in a real browser.

They are those of the newer UI (``/v2``), in which the tour is told; the first page of the server, and the links that we
write, are of the older one (``test_links_browser.py``). What is looked for is what a person reads: labels and names of
buttons.
"""

from collections.abc import Mapping

from playwright.sync_api import Locator, Page
from signing_in import PAGE_TIMEOUT_MS

BUSY = 503


def sign_in(page: Page, ui: str, password: str) -> None:
    """Give the password on the page that asks for it at a first visit, whatever page was wanted."""
    page.set_default_timeout(PAGE_TIMEOUT_MS)
    page.goto(f"{ui}/v2/dashboard", wait_until="domcontentloaded")
    page.locator("input[type=password]").fill(password)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Deployments").first.wait_for()


def leave(page: Page) -> None:
    """Show nothing until another page is opened: an open one is drawn, and asks the server, all the time."""
    page.goto("about:blank")


def open_run_form(page: Page, ui: str, deployment_id: str) -> None:
    """The form of a deployment."""
    page.set_default_timeout(PAGE_TIMEOUT_MS)
    page.goto(f"{ui}/v2/deployments/deployment/{deployment_id}/run", wait_until="domcontentloaded")
    page.get_by_role("button", name="Submit").wait_for()


def field(page: Page, name: str) -> Locator:
    """A field of the form: of a deployment, or of its schedule."""
    required = page.get_by_label(name, exact=True)
    return page.get_by_label(f"{name} (Optional)", exact=True).or_(required).last


def fill(page: Page, values: Mapping[str, str]) -> None:
    """Fill fields in."""
    for name, value in values.items():
        field(page, name).fill(value)


def submit(page: Page) -> str:
    """Ask for the run, and wait until the form was taken: the UI leaves it then. Returns the id of the flow run.

    A server whose SQLite is busy says "Service Unavailable": the button is pressed again, as a person would.
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
    """Press the button of a form that is to be refused; where the browser itself does it, nothing is sent."""
    page.get_by_role("button", name="Submit").click()


def browser_says(page: Page, name: str) -> str:
    """Why the browser does not take a field; empty where it does."""
    return str(field(page, name).evaluate("element => element.validationMessage"))


def open_deployment(page: Page, ui: str, deployment_id: str) -> None:
    """The page of a deployment."""
    page.set_default_timeout(PAGE_TIMEOUT_MS)
    page.goto(f"{ui}/v2/deployments/deployment/{deployment_id}", wait_until="domcontentloaded")
    page.get_by_role("button", name="Run", exact=True).wait_for()


def choose_custom_run(page: Page) -> None:
    """The form of the deployment whose page is open, by its button."""
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").click()
    page.get_by_role("button", name="Submit").wait_for()


def make_cron_schedule(page: Page, cron: str) -> None:
    """Add a schedule to a deployment whose page is open, changing nothing but when."""
    page.get_by_role("button", name="Schedule", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Cron").click()
    dialog.locator('input[name="schedule.cron"]').or_(dialog.get_by_label("Value")).first.fill(cron)
    dialog.get_by_role("button", name="Save").click()
    dialog.wait_for(state="hidden")


def delete_schedule(page: Page, words: str) -> None:
    """Take a schedule away from the deployment whose page is open; it is called as the page calls it."""
    switch = page.get_by_role("switch", name=f"toggle {words}")
    switch.locator("xpath=../..").get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name="Delete").click()
    dialog = page.get_by_role("alertdialog").or_(page.get_by_role("dialog"))
    dialog.get_by_role("button", name="Delete").click()
    dialog.wait_for(state="hidden")
    switch.wait_for(state="hidden")


def open_flow_run(page: Page, ui: str, flow_run_id: str) -> None:
    """The page of a flow run."""
    page.set_default_timeout(PAGE_TIMEOUT_MS)
    page.goto(f"{ui}/v2/runs/flow-run/{flow_run_id}", wait_until="domcontentloaded")
    menu(page).wait_for()


def menu(page: Page) -> Locator:
    """The button of the menu of the flow run whose page is open; it has no name of its own."""
    return page.locator('button[aria-haspopup="menu"]').first


def choose(page: Page, entry: str) -> None:
    """An entry of the menu of the flow run whose page is open."""
    menu(page).click()
    page.get_by_role("menuitem", name=entry).click()


def cancel(page: Page) -> None:
    """Cancel the flow run whose page is open. (The button "Cancel" of the dialog would only close it.)"""
    choose(page, "Cancel")
    dialog = page.get_by_role("alertdialog").or_(page.get_by_role("dialog"))
    dialog.get_by_role("button", name="Cancel Flow Run").click()
    dialog.wait_for(state="hidden")


def retry(page: Page) -> None:
    """Try the flow run again whose page is open."""
    choose(page, "Retry")
    dialog = page.get_by_role("alertdialog").or_(page.get_by_role("dialog"))
    dialog.get_by_role("button", name="Retry").click()
    dialog.wait_for(state="hidden")


def open_answer(page: Page) -> Locator:
    """The form in which the flow run whose page is open, which is paused, is answered."""
    choose(page, "Resume")
    form = page.get_by_role("dialog")
    form.locator("textarea").first.wait_for()
    return form


def approve(form: Locator, by: str, reason: str) -> None:
    """Say yes in that form, and send it."""
    form.get_by_role("switch").click()
    form.locator("textarea").nth(0).fill(by)
    form.locator("textarea").nth(1).fill(reason)


def send_answer(form: Locator) -> None:
    """Send that form."""
    form.get_by_role("button", name="Resume").click()
    form.wait_for(state="hidden")


def open_artifacts(page: Page) -> None:
    """The tab with the artifacts of the flow run whose page is open."""
    page.get_by_role("tab", name="Artifacts").click()
    page.locator("a[href*='/artifacts/key/']").first.wait_for()


def open_artifact(page: Page, kind: str) -> None:
    """The newest version of one of them, as ``progress``."""
    page.locator(f"a[href*='/artifacts/key/rlhf-{kind}-']").first.click()
    page.locator("a[href*='/artifacts/artifact/']").first.click()
    page.wait_for_url(lambda url: "/artifacts/artifact/" in url, wait_until="commit")


def open_page(page: Page, ui: str, name: str) -> None:
    """A page of the menu on the left, as ``dashboard``."""
    page.goto(f"{ui}/v2/{name}", wait_until="domcontentloaded")
    page.get_by_role("link", name="Deployments").first.wait_for()


def says(page: Page) -> str:
    """What the page itself says of a form that it refuses, in red or in a message that comes up; waits for it."""
    said = page.locator("[data-sonner-toast], [role=alert], .text-destructive, .text-red-500").first
    said.wait_for()
    return said.inner_text()
