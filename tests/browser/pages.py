"""The pages of Prefect's UI that a person of ours uses, as steps: for tests in a real browser.

They are those of the second UI (``/v2``), which is the default one. What is looked for is what a person reads: labels
and names of buttons.
"""

from collections.abc import Mapping

from playwright.sync_api import Locator, Page

TIMEOUT_MS = 30_000


def open_run_form(page: Page, ui: str, deployment_id: str) -> None:
    """The form of a deployment."""
    page.set_default_timeout(TIMEOUT_MS)
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


def submit(page: Page) -> None:
    """Ask for the run, and wait until the form has been taken: the UI leaves it then."""
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(lambda url: not url.endswith("/run"))


def refuse(page: Page) -> None:
    """Press the button of a form that is to be refused; where the browser itself does it, nothing is sent."""
    page.get_by_role("button", name="Submit").click()


def browser_says(page: Page, name: str) -> str:
    """Why the browser does not take a field; empty where it does."""
    return str(field(page, name).evaluate("element => element.validationMessage"))


def open_deployment(page: Page, ui: str, deployment_id: str) -> None:
    """The page of a deployment."""
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(f"{ui}/v2/deployments/deployment/{deployment_id}", wait_until="domcontentloaded")
    page.get_by_role("button", name="Run", exact=True).wait_for()


def make_cron_schedule(page: Page, cron: str) -> None:
    """Add a schedule to a deployment whose page is open, changing nothing but when."""
    page.get_by_role("button", name="Schedule", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="Cron").click()
    dialog.locator('input[name="schedule.cron"]').or_(dialog.get_by_label("Value")).first.fill(cron)
    dialog.get_by_role("button", name="Save").click()
    dialog.wait_for(state="hidden")


def open_flow_run(page: Page, ui: str, flow_run_id: str) -> None:
    """The page of a flow run."""
    page.set_default_timeout(TIMEOUT_MS)
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
