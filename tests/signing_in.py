"""Clients of a site's Prefect server that are not Prefect's: they need the password, and a token for what writes."""

import base64
import json
import urllib.error
import urllib.request
import uuid
from typing import Any

_READING = ("GET", "HEAD")
_tokens: dict[str, tuple[str, str]] = {}
"""Client and token for each API and password that was asked so far."""


def authorization(password: str) -> dict[str, str]:
    """The header that carries a password; none for an empty one."""
    if not password:
        return {}
    return {"authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}


def ask(api: str, path: str, body: Any = None, *, password: str, method: str = "") -> tuple[int, Any]:
    """Status and answer of an API, asked as a program of the site asks it."""
    method = method or ("GET" if body is None else "POST")
    status, answer = _sent(api, path, body, method, password)
    if status == 403 and "CSRF" in str(answer):  # the server was made anew
        _tokens.pop(f"{api} {password}", None)
        status, answer = _sent(api, path, body, method, password)
    return status, answer


def sign_in(context: Any, password: str) -> None:
    """Sign in the pages of a browser (or of one of its contexts), as Prefect's sign-in page does."""
    context.add_init_script(
        f"try {{ localStorage.setItem('prefect-password', btoa({json.dumps(password)})) }} catch (none) {{}}"
    )


def _sent(api: str, path: str, body: Any, method: str, password: str) -> tuple[int, Any]:
    headers = {"content-type": "application/json", **authorization(password)}
    if method not in _READING:
        headers |= _token(api, password)
    return _answer(f"{api}{path}", None if body is None else json.dumps(body).encode(), method, headers)


def _token(api: str, password: str) -> dict[str, str]:
    """The headers that a writing request needs; none where the server gives no token."""
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
