"""Prefect's scheduler on its own database: rows of scheduled flow runs are accepted by the installed SQLAlchemy."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version
from prefect_template import give_prefect_database

ROOT = Path(__file__).parents[2]

PLANS = """
import asyncio, json
from rlhf_core.garbage import collect_rarely
collect_rarely()
from prefect.server import models, schemas
from prefect.server.database import provide_database_interface

async def plan() -> str:
    database = provide_database_interface()
    await database.create_db()
    async with database.session_context(begin_transaction=True) as session:
        flow = await models.flows.create_flow(session, schemas.core.Flow(name="flow"))
        cron = schemas.schedules.CronSchedule(cron="* * * * *")
        schedule = schemas.core.DeploymentSchedule(schedule=cron, active=True)
        deployment = schemas.core.Deployment(name="planned", flow_id=flow.id, schedules=[schedule])
        made = await models.deployments.create_deployment(session, deployment)
        planned = await models.deployments.schedule_runs(session, made.id, min_runs=2)
        rows = [await models.flow_runs.read_flow_run(session, one) for one in planned]
        states = {row.state_type.value if row.state_type else row.state.type.value for row in rows}
        return f"{states} {len(rows) >= 2}"

def outcome() -> str:
    try:
        return asyncio.run(plan())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

without = outcome()
from flows.server.app import let_schedules_be_inserted
let_schedules_be_inserted()
print(json.dumps({"without": without, "with": outcome()}))
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Outcome of scheduling without our patch and then with it.

    Both are run in one process, because importing the server takes long.
    """
    home = tmp_path_factory.mktemp("prefect")
    give_prefect_database(home)
    environment = {"PREFECT_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        [sys.executable, "-c", PLANS], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert found.returncode == 0, found.stderr
    outcomes: dict[str, str] = json.loads(found.stdout.splitlines()[-1])
    return outcomes


def test_the_flow_runs_of_a_schedule_are_planned(planned: dict[str, str]) -> None:
    assert planned["with"] == "{'SCHEDULED'} True"


@pytest.mark.skipif(Version(version("sqlalchemy")) < Version("2.1"), reason="SQLAlchemy before 2.1 takes the rows")
def test_without_our_patch_no_flow_run_is_planned(planned: dict[str, str]) -> None:
    """Negative control of the previous test, which shows when our patch is no longer needed."""
    assert "Error: " in planned["without"]
    assert "bulk_dml" in planned["without"]


def test_before_sqlalchemy_2_1_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attribute has a ``bulk_dml_setter`` there. From 2.1 on, only those that lack a setter are given ours."""
    from flows.server import app as server_app  # late: it imports all of Prefect's server

    older, newer, with_its_own = SimpleNamespace(), SimpleNamespace(bulk_dml_setter=None), SimpleNamespace()
    with_its_own.bulk_dml_setter = own = object()
    mapper = SimpleNamespace(all_orm_descriptors=[older, newer, with_its_own])
    monkeypatch.setattr(server_app, "Base", SimpleNamespace(registry=SimpleNamespace(mappers=[mapper])))
    server_app.let_schedules_be_inserted()
    assert vars(older) == {}
    assert newer.bulk_dml_setter is server_app.left_out
    assert with_its_own.bulk_dml_setter is own
