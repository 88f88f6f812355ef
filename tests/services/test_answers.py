"""The answer to a paused flow run is taken by a server whose SQLite somebody else is writing to."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

OURS = "from flows.site.server_app import create_app"
PREFECTS = "from prefect.server.api.server import create_app"

ANSWER = """
import asyncio, sqlite3, sys
import httpx
from asgi_lifespan import LifespanManager

async def answer() -> None:
    app = create_app()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        LifespanManager(app, startup_timeout=100, shutdown_timeout=100),
        httpx.AsyncClient(transport=transport, base_url="http://server/api", timeout=60) as client,
    ):
        flow = (await client.post("/flows/", json={"name": "flow"})).json()["id"]
        run = (await client.post("/flow_runs/", json={"flow_id": flow})).json()["id"]
        for state in ({"type": "RUNNING"}, {"type": "PAUSED"}):
            await client.post(f"/flow_runs/{run}/set_state", json={"state": state, "force": True})
        other = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE flow SET name = 'renamed'")
        asked = asyncio.create_task(client.post(f"/flow_runs/{run}/resume"))
        await asyncio.sleep(2)
        other.execute("COMMIT")
        print((await asked).status_code, (await client.get(f"/flow_runs/{run}")).json()["state"]["type"])

asyncio.run(answer())
"""


def answered(home: Path, server: str) -> str:
    """What becomes of an answer that comes while somebody writes."""
    environment = {"PREFECT_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"{server}\n{ANSWER}", str(home / "prefect.db")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_an_answer_waits_until_it_can_be_written(tmp_path: Path) -> None:
    assert answered(tmp_path, OURS) == "201 RUNNING"


def test_on_prefects_own_server_it_is_lost(tmp_path: Path) -> None:
    """Negative control of the test before, and what says that it is not needed any more."""
    assert answered(tmp_path, PREFECTS) == "503 PAUSED"
