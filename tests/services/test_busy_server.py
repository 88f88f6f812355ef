"""Requests to a server that is busy: executed and not lost beside other writers of its SQLite database, and answered
while it reads its automations."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect_template import give_prefect_database

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, os, signal, sqlite3, sys
import httpx
from asgi_lifespan import LifespanManager
from prefect.server.events import triggers

AUTOMATION = {
    "name": "of-this-test",
    "trigger": {"type": "event", "expect": ["rlhf.test"], "posture": "Reactive", "threshold": 1, "within": 0},
    "actions": [{"type": "do-nothing"}],
}

async def ask_beside_a_writer(client) -> None:
    async def made(path, **content):
        # The server's own services write at times: what comes before the question is asked until it is done.
        for _ in range(50):
            answer = await client.post(path, json=content)
            if answer.status_code != 503:
                break
            await asyncio.sleep(0.2)
        assert answer.is_success, answer.text
        return answer.json()

    flow = (await made("/flows/", name="flow"))["id"]
    run = (await made("/flow_runs/", flow_id=flow))["id"]
    for state in ({"type": "RUNNING"}, {"type": "PAUSED"}):
        await made(f"/flow_runs/{run}/set_state", state=state, force=True)
    cron = [{"schedule": {"cron": "0 0 1 1 *", "timezone": "UTC"}, "active": True}]
    planned = await made("/deployments/", name="planned", flow_id=flow, schedules=cron)
    deployment, schedule = planned["id"], planned["schedules"][0]["id"]
    other = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30, check_same_thread=False)

    async def meanwhile(method, path):
        # In a thread: a service of the server may be writing, and needs this one to get done.
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
        other.execute("UPDATE flow SET name = name || '.'")
        asked = asyncio.create_task(client.request(method, path))
        await asyncio.sleep(4)  # by then it has read, and waits to write
        other.execute("COMMIT")
        return (await asked).status_code

    print(await meanwhile("POST", f"/flow_runs/{run}/resume"), end=" ")
    print((await client.get(f"/flow_runs/{run}")).json()["state"]["type"], end=" ")
    print(await meanwhile("DELETE", f"/deployments/{deployment}/schedules/{schedule}"), end=" ")
    print(len((await client.get(f"/deployments/{deployment}")).json()["schedules"]), flush=True)

async def change_an_automation(client) -> None:
    async def compares():
        async with triggers._automations_lock():
            held.set()
            await asyncio.sleep(5)  # by then the server of a busy machine has the request, too

    held = asyncio.Event()
    comparing = asyncio.create_task(compares())
    await held.wait()
    signal.alarm(int(sys.argv[2]))  # ends a process whose event loop is blocked
    made = await client.post("/automations/", json=AUTOMATION)
    print(made.status_code, end=" ")
    await comparing
    while not triggers.automations_by_id:
        await asyncio.sleep(0.05)
    print(*(one.name for one in triggers.automations_by_id.values()), flush=True)

async def ask() -> None:
    app = create_app()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        LifespanManager(app, startup_timeout=100, shutdown_timeout=100),
        httpx.AsyncClient(
            transport=transport, base_url="http://localhost/api", timeout=60, auth=("rlhf", "of-this-test")
        ) as client,
    ):
        await ask_beside_a_writer(client)
        await change_an_automation(client)
        # Only the answers are tested. Twice this program, with Prefect's own server, had not ended after 200 s.
        os._exit(0)

asyncio.run(ask())
"""


@dataclass(frozen=True)
class Answers:
    """Answers of a server to the requests of :data:`PROGRAM`."""

    beside_a_writer: str
    """Status and effect of an answer to a paused flow run, and of the removal of a schedule."""
    automation: str
    """Status of an automation's creation while the automations are compared, and the automations then known."""
    ended: int
    """Exit code of the program."""
    stderr: str


def answers_of(home: Path, server: str, limit_s: int) -> Answers:
    """Ask the application of a server that has an empty database, and is ended ``limit_s`` after it was blocked."""
    give_prefect_database(home)
    environment = {"PREFECT_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    environment |= {"PREFECT_SERVER_API_AUTH_STRING": "rlhf:of-this-test"}
    environment |= {"PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false"}  # no other reader of automations
    words = [sys.executable, "-c", f"{server}\n{PROGRAM}", str(home / "prefect.db"), str(limit_s)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    beside_a_writer, _, automation = done.stdout.partition("\n")
    return Answers(beside_a_writer, automation.strip(), done.returncode, done.stderr[-2000:])


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of our server."""
    return answers_of(tmp_path_factory.mktemp("ours"), "from flows.server.app import create_app", 90)


@pytest.fixture(scope="module")
def prefects(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of Prefect's own server, for negative controls, which show when our fixes are no longer needed."""
    return answers_of(tmp_path_factory.mktemp("prefects"), "from prefect.server.api.server import create_app", 15)


def test_requests_beside_a_writer_are_executed(ours: Answers) -> None:
    assert ours.beside_a_writer == "201 RUNNING 204 0", ours.stderr


def test_on_prefects_own_server_requests_are_lost(prefects: Answers) -> None:
    """Negative control of the previous test."""
    assert prefects.beside_a_writer == "503 PAUSED 503 1", prefects.stderr


def test_an_automation_may_change_while_the_server_reads_automations(ours: Answers) -> None:
    assert (ours.ended, ours.automation) == (0, "201 of-this-test"), ours.stderr


def test_prefects_own_server_does_not_respond_any_more_then(prefects: Answers) -> None:
    """Negative control of the previous test."""
    assert (prefects.ended, prefects.automation) == (-signal.SIGALRM, ""), prefects.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Retries


class Busy:
    """An application that returns one status after the other, the last one forever, and records the request bodies."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self.statuses = list(statuses)
        self.bodies: list[bytes] = []

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})
        if status >= 500:
            raise OSError("database is locked")  # as Starlette does after its response


def asked(app: Busy, method: str, body: bytes = b"") -> httpx.Response:
    from flows.server.app import RetriedWhenBusy  # late: it imports all of Prefect's server

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(RetriedWhenBusy(app), raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, "/api/x", content=body)

    return asyncio.run(ask())


def test_a_request_is_retried_whole_and_answered_once() -> None:
    app = Busy([503, 503, 201])
    answer = asked(app, "POST", b"what was typed")
    assert (answer.status_code, answer.content) == (201, b"done")
    assert app.bodies == [b"what was typed"] * 3


def test_the_body_of_a_reading_request_is_not_read() -> None:
    """It is the only request that is retried without a password."""
    from flows.server.app import RetriedWhenBusy

    sent: list[Any] = []

    async def unread() -> dict[str, Any]:
        raise AssertionError("its body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    app = Busy([503, 200])
    scope = {"type": "http", "method": "GET", "path": "/api/csrf-token"}
    asyncio.run(RetriedWhenBusy(app)(scope, unread, send))  # type: ignore[arg-type]
    assert (app.bodies, sent[0]["status"]) == ([b"", b""], 200)


@pytest.mark.parametrize(("method", "status"), [("GET", 503), ("POST", 500), ("POST", 409), ("POST", 201)])
def test_no_other_request_is_retried(method: str, status: int) -> None:
    app = Busy([status])
    assert asked(app, method).status_code == status
    assert len(app.bodies) == 1


def test_a_server_that_stays_busy_finally_responds_with_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.server.app.BUSY_TIMEOUT_S", 0.3)
    app = Busy([503])
    assert asked(app, "DELETE").status_code == 503
    assert len(app.bodies) > 1
