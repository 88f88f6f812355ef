"""Authenticated clients of a site's Prefect server other than Prefect itself, including browsers.

They need the password, and a token for requests that write.
"""

import base64
import json
import shutil
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sites import Site

PAGE_TIMEOUT_MS = 180_000
"""Time for a page to show something: nothing is measured by it, and the machine may be busy."""

_READING = ("GET", "HEAD")
_tokens: dict[str, tuple[str, str]] = {}
"""Client and token for each API and password that was asked so far."""


def authorization(password: str) -> dict[str, str]:
    """The header that carries a password; empty for an empty one."""
    if not password:
        return {}
    return {"authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}


def ask(api: str, path: str, body: Any = None, *, password: str, method: str = "") -> tuple[int, Any]:
    """Status and answer of an API request, sent as a program of the site sends it."""
    method = method or ("GET" if body is None else "POST")
    status, answer = _sent(api, path, body, method, password)
    if status == 403 and "CSRF" in str(answer):  # the server was recreated
        _tokens.pop(f"{api} {password}", None)
        status, answer = _sent(api, path, body, method, password)
    return status, answer


def sign_in(context: Any, password: str) -> None:
    """Sign in a browser (or one of its contexts), as Prefect's sign-in page does."""
    context.add_init_script(
        f"try {{ localStorage.setItem('prefect-password', btoa({json.dumps(password)})) }} catch (none) {{}}"
    )


@contextmanager
def chromium(*arguments: str, **options: Any) -> Iterator[Any]:
    """Run a browser for the block; skips the test if none is installed.

    Args:
        arguments: further arguments of its command line.
        options: further options of Playwright.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next((path for name in names if (path := shutil.which(name)) is not None), None)
    if executable is None:
        pytest.skip("there is no browser on this machine (chromium): sh infra/system_packages.sh browser")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=executable, args=["--no-sandbox", *arguments], **options)
        yield started
        started.close()


@contextmanager
def page_of(site: "Site", path: str) -> Iterator[Any]:
    """A page of a site's UI in a signed-in browser."""
    with chromium() as started:
        page = started.new_page(viewport={"width": 1400, "height": 1200})
        sign_in(page, site.password)
        page.set_default_timeout(PAGE_TIMEOUT_MS)
        page.goto(f"{site.url}{path}", wait_until="domcontentloaded")
        yield page


def _sent(api: str, path: str, body: Any, method: str, password: str) -> tuple[int, Any]:
    headers = {"content-type": "application/json", **authorization(password)}
    if method not in _READING:
        headers |= _token(api, password)
    return _answer(f"{api}{path}", None if body is None else json.dumps(body).encode(), method, headers)


def _token(api: str, password: str) -> dict[str, str]:
    """The headers that a writing request needs; empty if the server issues no token."""
    key = f"{api} {password}"
    if key not in _tokens:
        client = str(uuid.uuid4())
        status, found = _answer(f"{api}/csrf-token?client={client}", None, "GET", authorization(password))
        if status != 200:
            return {}
        _tokens[key] = client, str(found["token"])
    client, token = _tokens[key]
    return {"Prefect-Csrf-Client": client, "Prefect-Csrf-Token": token}


def _answer(url: str, data: bytes | None, method: str, headers: dict[str, str]) -> tuple[int, Any]:
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            content = response.read()
            return response.status, json.loads(content) if content else None
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
