"""Prefect's scheduler on its own database: the rows of planned flow runs are taken by the SQLAlchemy of this site."""

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
import asyncio
from prefect.server import models, schemas
from prefect.server.database import provide_database_interface

async def plan() -> None:
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
        print({row.state_type.value if row.state_type else row.state.type.value for row in rows}, len(rows) >= 2)

asyncio.run(plan())
"""

AS_HERE = "from flows.server.app import let_schedules_be_inserted\nlet_schedules_be_inserted()\n"


def plan(home: Path, code: str) -> "subprocess.CompletedProcess[str]":
    give_prefect_database(home)
    environment = {"PREFECT_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_flow_runs_of_a_schedule_are_planned(tmp_path: Path) -> None:
    found = plan(tmp_path, AS_HERE + PLANS)
    assert found.stdout.strip() == "{'SCHEDULED'} True", found.stderr


@pytest.mark.skipif(Version(version("sqlalchemy")) < Version("2.1"), reason="SQLAlchemy before 2.1 takes the rows")
def test_without_our_word_none_is(tmp_path: Path) -> None:
    """Negative control of the test before, and what says that it is not needed any more."""
    found = plan(tmp_path, PLANS)
    assert found.returncode != 0
    assert "bulk_dml" in found.stderr


def test_before_sqlalchemy_2_1_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There no attribute has a ``bulk_dml_setter``. From 2.1 on those that lack a setter are given ours, no others."""
    from flows.server import app as server_app  # late: it imports all of Prefect's server

    older, newer, with_its_own = SimpleNamespace(), SimpleNamespace(bulk_dml_setter=None), SimpleNamespace()
    with_its_own.bulk_dml_setter = own = object()
    mapper = SimpleNamespace(all_orm_descriptors=[older, newer, with_its_own])
    monkeypatch.setattr(server_app, "Base", SimpleNamespace(registry=SimpleNamespace(mappers=[mapper])))
    server_app.let_schedules_be_inserted()
    assert vars(older) == {}
    assert newer.bulk_dml_setter is server_app.left_out
    assert with_its_own.bulk_dml_setter is own
