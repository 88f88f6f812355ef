"""The web application of a site's Prefect server: Prefect's own, kept from reaching anything but this machine.

Browsers are told by a Content-Security-Policy to talk to this server only: the pages of Prefect ask hosts outside for
their configuration and statistics, and a Markdown artifact may name images of anywhere. The server itself serves the
lists of worker types that come with the package, instead of asking the network for newer ones.
"""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from prefect.server.api import collections
from prefect.server.api.server import create_app as prefect_app
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.database.orm_models import Base

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

POLICY = "; ".join(
    [
        "default-src 'self'",
        # Prefect's pages carry styles and scripts inline, and the drawing of flow runs compiles its shaders.
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
"""What a page of this server may load and whom it may ask: this server, and images that stand in the page itself."""


_resumes: ContextVar[bool] = ContextVar("resumes", default=False)
"""Whether the request at hand is the answer to a flow run that is paused."""


class Guarded:
    """An ASGI application whose every answer says what its page may reach."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; add the header where an answer begins."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(b"content-security-policy", POLICY.encode()), (b"referrer-policy", b"same-origin")]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        _resumes.set(scope.get("method") == "POST" and str(scope.get("path", "")).endswith("/resume"))
        await self._app(scope, receive, guarded)


def create_app() -> Guarded:
    """What uvicorn serves."""
    collections.get_collection_view = shipped_view
    logging.getLogger("docket.dependencies").addFilter(is_news)
    let_schedules_be_inserted()
    let_answers_take_their_turn()
    return Guarded(prefect_app())


def let_schedules_be_inserted() -> None:
    """Let SQLAlchemy 2.1 insert what Prefect 3.7 hands it for a schedule; else no schedule ever starts a run.

    Prefect's scheduler inserts rows that carry computed attributes beside the columns (the state of a flow run, the
    data of a state). Before 2.1 those were left out; 2.1 refuses the whole insert unless it is told what to do with
    them. It asks each attribute for its ``bulk_dml_setter``; before 2.1 none has one, and nothing is changed.

    Seen with Prefect 3.7.7 and a deployment that is due every 5 s: under SQLAlchemy 2.0.58 it ran on a server with and
    on one without this, under 2.1.9 only with it (without: no flow run in 90 s, and an error in each round).
    """
    attribute: Any
    for mapper in Base.registry.mappers:
        for attribute in mapper.all_orm_descriptors:
            if getattr(attribute, "bulk_dml_setter", True) is None:
                attribute.bulk_dml_setter = left_out


def left_out(model: type[Any], row: MutableMapping[str, Any], value: object) -> None:
    """What becomes of a computed attribute in an insert of many rows: nothing, since it has no column."""


def let_answers_take_their_turn() -> None:
    """Let whoever resumes a paused flow run wait for SQLite, instead of losing the answer to it.

    Prefect 3.7 begins every change of a state with SQLite's write lock, but for this one: it reads first, and where
    somebody has written in between, SQLite refuses the change at once ("database is locked"). Prefect answers 503,
    which its own client tries again and its page in the browser does not: the form stays open, and what was typed into
    it went nowhere. Seen in the browser, on a site with some runs at work.
    """
    as_asked: Callable[..., AbstractAsyncContextManager[Any]] = AioSqliteConfiguration.begin_transaction

    def begin_transaction(
        self: AioSqliteConfiguration, session: Any, with_for_update: bool = False
    ) -> AbstractAsyncContextManager[Any]:
        return as_asked(self, session, with_for_update or _resumes.get())

    AioSqliteConfiguration.begin_transaction = begin_transaction  # type: ignore[method-assign, assignment]


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the server's log says something: not that SQLite was busy and the work is tried again.

    Prefect keeps these out of its other logs itself. With a worker that polls they would be most of this one.
    """
    error = record.exc_info[1] if record.exc_info else None
    return "database is locked" not in str(error)


async def shipped_view(view: str) -> dict[str, Any]:
    """A list of what workers and blocks there are, as it was when this version of Prefect was made.

    Raises:
        KeyError: there is no list of that name; Prefect answers 404.
    """
    file = Path(collections.__file__).parent / "collections_data" / "views" / f"{view}.json"
    if view not in collections.KNOWN_VIEWS or not file.is_file():
        raise KeyError(view)
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
