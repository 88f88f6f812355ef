"""The web application of a site's Prefect server: Prefect's own, restricted so that it contacts no other host.

A Content-Security-Policy makes browsers talk to this server only: Prefect's pages query external hosts for
configuration and statistics, and a Markdown artifact may embed images from anywhere. The server itself serves the lists
of worker types that ship with the package, instead of downloading newer ones. Requests pass :mod:`flows.server.guards`
first, and a server without a password is refused.

Three faults of Prefect 3.7 on SQLite are worked around here as well: schedules that never fire
(:func:`let_schedules_be_inserted`), browser requests that get lost (:class:`RetriedWhenBusy`), and servers that stop
responding when an automation changes (:func:`let_automations_change`).
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Coroutine, MutableMapping
from pathlib import Path
from typing import Any

from prefect.server.api import collections
from prefect.server.api.server import create_app as prefect_app
from prefect.server.database.orm_models import Base
from prefect.server.events.models import automations
from prefect.settings import PREFECT_SERVER_API_AUTH_STRING, PREFECT_UI_STATIC_DIRECTORY

from flows.server.guards import (
    READING,
    App,
    Authenticated,
    Known,
    Limited,
    Message,
    Names,
    Receive,
    Scope,
    Send,
    names_of,
)
from rlhf_core.errors import BadInput
from rlhf_core.files.whole import write_text

POLICY = "; ".join(
    [
        "default-src 'self'",
        # Prefect's pages have inline styles and scripts, and the flow-run graph compiles its shaders.
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'self'",
        "object-src 'none'",
    ]
)
"""Sources that a page of this server may load from or query: this server, and images embedded in the page."""


BUSY_TIMEOUT_S = 20.0
"""Time for which a request is retried while SQLite is busy."""
RETRY_INTERVAL_S = 0.1
"""Pause before each retry."""

SERVER_LOGGER = "prefect.server"
RETRYING_LOGGERS = (
    "docket.dependencies",
    "prefect.server.utilities.worker_channel",
    "prefect.server.models.deployments",
    SERVER_LOGGER,
)
"""Loggers of components that retry after a busy SQLite: services, workers, which reconnect and use REST meanwhile, the
service that marks deployments without a worker, and the rules of states, which pass the error on to a request or a
service."""
STATE_RULES = "rules"
"""Module of the rules of states. Other modules with the same logger do not retry."""

_WRITING_PATH = "/csrf-token"
"""Path suffix of a GET request that writes: each client gets a token that the server stores."""


class RetriedWhenBusy:
    """ASGI wrapper that retries requests that failed because SQLite was busy.

    Most transactions of Prefect 3.7 read before they write. If another client writes in between, SQLite refuses at once
    ("database is locked"), the transaction is rolled back, and Prefect answers 503. Its own client then retries, but
    its browser pages do not: the user's request or answer is lost, and the form stays open. Observed with approvals and
    with the removal of a schedule, on a site with several active runs.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; retry a writing request while the answer is 503, up to ``BUSY_TIMEOUT_S``."""
        if scope["type"] != "http" or (scope["method"] in READING and not scope["path"].endswith(_WRITING_PATH)):
            await self._app(scope, receive, send)
            return
        # Only reading requests arrive without a password (Authenticated); their bodies stay unread.
        body = b"" if scope["method"] in READING else await _whole_body(receive)
        if body is None:
            return
        until = time.monotonic() + BUSY_TIMEOUT_S
        while await self._is_refused(scope, _again(body, receive), send, is_last=time.monotonic() > until):
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _is_refused(self, scope: Scope, receive: Receive, send: Send, *, is_last: bool) -> bool:
        """Make one attempt; True if it was refused and nothing was sent."""
        refused = False

        async def unless_refused(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 503 and not is_last:
                refused = True
            if not refused:
                await send(message)

        try:
            await self._app(dict(scope), receive, unless_refused)
        except Exception:
            if not refused:  # otherwise it is the error that was answered with 503
                raise
        return refused


async def _whole_body(receive: Receive) -> bytes | None:
    """The body of a request; None if the client disconnected before its end."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Replay a body that was already read, then continue with the original messages."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(messages, None) or await receive()

    return replay


class Guarded:
    """ASGI wrapper that adds the security headers to every response."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; add the header at the start of a response."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(b"content-security-policy", POLICY.encode()), (b"referrer-policy", b"same-origin")]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        await self._app(scope, receive, guarded)


STYLE = (
    "<style>a[href^='data:']{display:inline-block;max-width:40rem;overflow:hidden;text-overflow:ellipsis;"
    "white-space:nowrap}</style>"
)
"""Styles for Prefect's pages. Prefect prints an image's address below it, and for the curves that is the whole image as
a data URI, wider than any screen."""


def style_pages(folder: Path) -> None:
    """Add :data:`STYLE` to the pages of the UI that Prefect has copied into a folder, unless they have it."""
    with contextlib.suppress(OSError):  # pages without it work, too
        for page in folder.rglob("index.html"):
            text = page.read_text(encoding="utf-8")
            if STYLE not in text:
                write_text(page, text.replace("</head>", f"{STYLE}</head>", 1))


def create_app(names: Names | None = None) -> Guarded:
    """Create the application that uvicorn serves.

    Args:
        names: Accepted names of the server. Default: those of loopback.

    Raises:
        BadInput: no password is set (``PREFECT_SERVER_API_AUTH_STRING``).
    """
    password = PREFECT_SERVER_API_AUTH_STRING.value()
    if not password:
        raise BadInput("the Prefect server has no password; `rlhf serve server` gives it one")
    collections.get_collection_view = shipped_view
    for name in RETRYING_LOGGERS:
        logging.getLogger(name).addFilter(is_news)
    let_schedules_be_inserted()
    let_automations_change()
    inner = Limited(RetriedWhenBusy(prefect_app()))
    copied_pages = PREFECT_UI_STATIC_DIRECTORY.value()
    if copied_pages:
        style_pages(Path(copied_pages))
    return Guarded(Known(Authenticated(inner, password), names or names_of(())))


def let_schedules_be_inserted() -> None:
    """Let SQLAlchemy 2.1 insert the rows of Prefect 3.7's scheduler; otherwise no schedule ever starts a run.

    These rows contain computed attributes as well as columns (the state of a flow run, the data of a state). Before 2.1
    SQLAlchemy ignored them; 2.1 rejects the whole insert unless each attribute has a ``bulk_dml_setter``. Earlier
    versions have no such setters, so this changes nothing there.

    Observed with Prefect 3.7.7 and a deployment that is due every 5 s: under SQLAlchemy 2.0.58 it ran on a server with
    and on one without this, under 2.1.9 only with it (without: no flow run in 90 s, and an error in each round).
    """
    attribute: Any
    for mapper in Base.registry.mappers:
        for attribute in mapper.all_orm_descriptors:
            if getattr(attribute, "bulk_dml_setter", True) is None:
                attribute.bulk_dml_setter = left_out


def left_out(model: type[Any], row: MutableMapping[str, Any], value: object) -> None:
    """Insert nothing for a computed attribute, which has no column."""


_cache_updates: set[asyncio.Task[None]] = set()
"""Updates at work: the event loop itself keeps only weak references to tasks."""


def let_automations_change() -> None:
    """Let Prefect 3.7 update its cache of automations without blocking the server's event loop.

    After the commit of a change on SQLite, it runs the update in another event loop and blocks the server's until that
    is done. The update needs a lock; if the server is comparing its automations with the database at that moment, it
    holds the lock and cannot release it, and no request is answered any more (PrefectHQ/prefect#23055; observed with
    3.7.7 while notifications were registered). Here, the server's loop runs the update next.
    """
    automations.run_coro_as_sync = _run_next  # type: ignore[assignment, attr-defined]


def _run_next(update: Coroutine[Any, Any, None]) -> None:
    """Run an update in the present event loop, which logs its failure. Prefect repeats one that is missing."""
    task = asyncio.get_running_loop().create_task(update)
    _cache_updates.add(task)
    task.add_done_callback(_cache_updates.discard)


def is_news(record: logging.LogRecord) -> bool:
    """Filter for the server's log: False for lines that report a busy SQLite and a retry.

    Prefect filters these from its other logs itself. With a polling worker they would be most of this one.
    """
    error = record.exc_info[1] if record.exc_info else None
    is_retried = record.name != SERVER_LOGGER or record.module == STATE_RULES
    return not is_retried or "database is locked" not in str(error)


async def shipped_view(view: str) -> dict[str, Any]:
    """A list of worker or block types, as shipped with this version of Prefect.

    Raises:
        KeyError: there is no list of that name; Prefect answers 404.
    """
    file = Path(collections.__file__).parent / "collections_data" / "views" / f"{view}.json"
    if view not in collections.KNOWN_VIEWS or not file.is_file():
        raise KeyError(view)
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
