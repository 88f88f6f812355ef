"""HTTP server of an engine's process, in its own thread: the main thread samples and sends heartbeats.

    GET  /health            EngineHealth
    POST /sample            SampleRequest -> SampledPrompt or EngineRefusal, one per line, as they finish
    POST /weights/receive   Offer -> Receipt, once the weights are staged and verified
    POST /weights/commit    CommitRequest -> Committed
    POST /weights/confirm   WeightsId: the probe matched, they become current
    POST /weights/refuse    WeightsRefused: the probe did not match; an engine refused repeatedly exits
    POST /weights/abort     version

Every request carries the token of the attempt (``Authorization: Bearer``). The server listens only on its node's
address in the allocation. Traffic is not encrypted, like the weights and the messages of the agents.
"""

import asyncio
import hmac
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf_core.errors import WeightSyncFailed, WorkerError
from rlhf_core.schemas.engines import (
    CommitRequest,
    EngineRefusal,
    SampledPrompt,
    SampleRequest,
    WeightsId,
    WeightsRefused,
)
from rlhf_core.schemas.weight_sync import Offer, Receipt
from rlhf_core.training.rollouts.server.worker import EngineWorker
from rlhf_core.weight_sync.links import CONNECT_TIMEOUT_S
from rlhf_core.weight_sync.receiver import Receiver

Answer = TypeVar("Answer")

BACKLOG = 1024
"""Maximum number of connections waiting to be accepted."""
ALIVE_INTERVAL_S = 1.0
"""Heartbeat interval within a slow response."""
MAX_BODY_BYTES = 256 << 20
"""Longest request accepted."""


class EngineServer:
    """Serves one engine for the duration of the block."""

    def __init__(self, worker: EngineWorker, receiver: Receiver, token: bytes, listen_at: str) -> None:
        """Bind a port.

        Args:
            listen_at: address of an interface; empty for all.

        Raises:
            OSError: no port is available.
        """
        self._socket = socket.create_server((listen_at, 0), backlog=BACKLOG)
        self._handlers = _Handlers(worker, receiver)
        app = _application(self._handlers)
        config = uvicorn.Config(
            _Guard(app, token), log_level="warning", access_log=False, lifespan="off", ws="none", timeout_keep_alive=600
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="server", daemon=True
        )

    @property
    def port(self) -> int:
        """Port on which it listens."""
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def is_alive(self) -> bool:
        """True while its thread runs, and no transfer of weights hangs."""
        return self._thread.is_alive() and not self._handlers.is_stuck

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10.0)


class _Guard:
    """Rejects clients without the token of the attempt."""

    def __init__(self, app: ASGIApp, token: bytes) -> None:
        self._app = app
        self._expected = b"Bearer " + token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            await _refusal("the token of the attempt is missing or wrong", 401)(scope, receive, send)
            return
        if int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES or b"transfer-encoding" in headers:
            await _refusal(f"expected at most {MAX_BODY_BYTES} bytes and their number", 413)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _application(handlers: "_Handlers") -> Starlette:
    return Starlette(
        routes=[
            Route("/health", handlers.health),
            Route("/sample", handlers.sample, methods=["POST"]),
            Route("/weights/receive", handlers.receive, methods=["POST"]),
            Route("/weights/commit", handlers.commit, methods=["POST"]),
            Route("/weights/confirm", handlers.confirm, methods=["POST"]),
            Route("/weights/refuse", handlers.refuse, methods=["POST"]),
            Route("/weights/abort", handlers.abort, methods=["POST"]),
        ],
        exception_handlers={
            WorkerError: _handler(409),
            ValueError: _handler(422),  # malformed, or refused by the sampler
            OSError: _handler(503),
            Exception: _handler(500),  # its traceback goes to the log
        },
    )


class _Handlers:
    """Request handlers; the main thread does everything that touches the model."""

    def __init__(self, worker: EngineWorker, receiver: Receiver) -> None:
        self._worker = worker
        self._receiver = receiver
        self.is_stuck = False
        """True once a transfer of weights hangs: only a restart of the engine can help."""

    async def health(self, request: Request) -> Response:
        return _json(self._worker.health())

    async def sample(self, request: Request) -> Response:
        sample_request = SampleRequest.model_validate_json(await request.body())
        lines: asyncio.Queue[SampledPrompt | EngineRefusal] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(line: SampledPrompt | EngineRefusal) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        keys = await self._in_main_thread(partial(self._worker.begin, sample_request, deliver))
        return StreamingResponse(self._lines(keys, lines), media_type="application/x-ndjson")

    async def _lines(
        self, keys: list[int], lines: "asyncio.Queue[SampledPrompt | EngineRefusal]"
    ) -> AsyncIterator[bytes]:
        try:
            for _ in keys:
                yield (await lines.get()).model_dump_json().encode() + b"\n"
        finally:
            self._worker.call(partial(self._worker.drop, keys))  # also if the client is gone

    async def receive(self, request: Request) -> Response:
        return _with_keepalive(self._receipt(Offer.model_validate_json(await request.body())))

    async def _receipt(self, offer: Offer) -> Receipt:
        """Receive a version.

        Raises:
            WeightSyncFailed: it is not staged, or the transfer hangs without reaching its own timeout.
        """
        progress_at_s = time.monotonic()

        def note_progress() -> None:
            nonlocal progress_at_s
            progress_at_s = time.monotonic()

        # In its own thread, because it waits for the weights while the engine keeps sampling.
        receiving = asyncio.ensure_future(asyncio.to_thread(self._receiver.receive, offer, note_progress))
        while not (await asyncio.wait([receiving], timeout=ALIVE_INTERVAL_S))[0]:
            silent_s = time.monotonic() - progress_at_s
            if silent_s > _stall_limit_s(offer):
                self.is_stuck = True
                raise WeightSyncFailed(
                    f"{offer.receiver} has made no progress with version {offer.manifest.version} for "
                    f"{silent_s:.0f} s and exits for a restart. See its log for errors of its GPU or file "
                    "system; raise rollout.remote.sync_timeout_s if it works, but slowly",
                    offer.receiver,
                )
        return receiving.result().receipt

    async def commit(self, request: Request) -> Response:
        commit_request = CommitRequest.model_validate_json(await request.body())
        return _with_keepalive(self._in_main_thread(partial(self._worker.commit, commit_request)))

    async def confirm(self, request: Request) -> Response:
        weights = WeightsId.model_validate_json(await request.body())
        await self._in_main_thread(partial(self._worker.confirm, weights))
        return JSONResponse(None)

    async def refuse(self, request: Request) -> Response:
        refusal = WeightsRefused.model_validate_json(await request.body())
        await self._in_main_thread(partial(self._worker.refuse, refusal))
        return JSONResponse(None)

    async def abort(self, request: Request) -> Response:
        await asyncio.to_thread(self._receiver.abort, int(await request.body()))
        return JSONResponse(None)

    async def _in_main_thread(self, function: Callable[[], Answer]) -> Answer:
        return await asyncio.wrap_future(self._worker.call(function))


def _stall_limit_s(offer: Offer) -> float:
    """Time without progress, in seconds, after which a transfer counts as hung.

    It is longer than the timeouts for the neighbours in the chain, so that a lost neighbour is reported instead.
    """
    return 2 * (offer.stall_timeout_s + CONNECT_TIMEOUT_S)


def _with_keepalive(answer: Awaitable[BaseModel]) -> Response:
    """Send empty lines until the response is ready, to distinguish a busy engine from a stopped one."""

    async def lines() -> AsyncIterator[bytes]:
        working = asyncio.ensure_future(answer)
        while not (await asyncio.wait([working], timeout=ALIVE_INTERVAL_S))[0]:
            yield b"\n"
        try:
            yield working.result().model_dump_json().encode()
        except Exception as error:  # noqa: BLE001 - reported to the trainer; the engine goes on without weights
            traceback.print_exception(error)
            yield _error(error).model_dump_json().encode()

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _handler(code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        return _json(_error(error), code)

    return answer


def _error(error: Exception) -> EngineRefusal:
    return EngineRefusal(error=f"{type(error).__name__}: {error}", peer=getattr(error, "peer", ""))


def _refusal(error: str, code: int) -> Response:
    return _json(EngineRefusal(error=error), code)


def _json(model: BaseModel, code: int = 200) -> Response:
    return Response(model.model_dump_json(), code, media_type="application/json")
