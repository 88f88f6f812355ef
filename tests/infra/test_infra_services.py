"""Systemd units and containers for the services, validated by the programs that would run them, if installed."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.services import SERVICES
from rlhf_core.config.site import load_site

INFRA = Path(__file__).parents[2] / "infra"
UNITS = sorted((INFRA / "systemd").glob("*.service"))
SECRETS = ("PASSWORD", "AUTH", "DATABASE_URL", "WEBHOOK")


def test_every_service_has_a_unit_that_restarts_and_holds_no_secret() -> None:
    assert [path.stem for path in UNITS] == sorted(f"rlhf-{name}" for name in SERVICES)
    for path in UNITS:
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        name = path.stem.removeprefix("rlhf-")
        assert f"ExecStart=/usr/bin/env rlhf serve {name}" in lines
        assert "Restart=always" in lines
        assert "Environment=RLHF_STARTED_BY=systemd" in lines, "so that `rlhf down` does not fight with systemd"
        assert not [line for line in lines if any(word in line for word in SECRETS)]


def test_service_and_jobs_of_the_local_scheduler_outlive_each_other() -> None:
    """They share the control group of the unit. By default, systemd ends all of it with the service, and the service if
    the kernel kills one of them for lack of memory."""
    for name in ("worker", "daemon"):
        lines = (INFRA / "systemd" / f"rlhf-{name}.service").read_text().splitlines()
        assert {"KillMode=process", "OOMPolicy=continue"} <= set(lines)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units() -> None:
    found = subprocess.run(["systemd-analyze", "verify", *UNITS], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_rejects_a_wrong_unit(tmp_path: Path) -> None:
    """Negative control of the previous test."""
    wrong = tmp_path / "rlhf-wrong.service"
    wrong.write_text(UNITS[0].read_text().replace("Restart=always", "Restart=alwys"))
    found = subprocess.run(["systemd-analyze", "verify", wrong], capture_output=True, text=True, check=False)
    assert "alwys" in found.stderr


@pytest.fixture
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text())
    return content


def test_the_containers_are_the_services_and_a_database(compose: dict[str, Any]) -> None:
    found = compose["services"]
    assert set(found) == {"database", *SERVICES}
    assert {name: found[name]["command"] for name in SERVICES} == {name: ["rlhf", "serve", name] for name in SERVICES}
    named = {volume.partition(":")[0] for one in found.values() for volume in one["volumes"]}
    assert {name for name in named if not name.startswith("$")} == set(compose["volumes"])
    assert {config["source"] for one in found.values() for config in one["configs"]} == set(compose["configs"])
    for one in found.values():
        assert set(one.get("depends_on", {})) <= set(found)


def test_the_database_is_healthy_only_once_others_can_reach_it(compose: dict[str, Any]) -> None:
    """The image creates the databases on a server that listens on no address, and then starts the one that stays."""
    program, *options = compose["services"]["database"]["healthcheck"]["test"][1:]
    assert program == "pg_isready"
    assert options[options.index("-h") + 1] == "127.0.0.1"


def test_the_settings_of_the_containers_are_valid(compose: dict[str, Any], tmp_path: Path) -> None:
    values = {"RLHF_RUNS": "/shared/runs", "RLHF_DATABASE_PASSWORD": "s3cret", "RLHF_PREFECT_AUTH": "me:s3cret"}

    def filled(text: str) -> str:
        return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda found: values.get(found[1], found[2] or ""), text)

    (tmp_path / "rlhf.toml").write_text(filled(compose["configs"]["site"]["content"]))
    environment = {key: filled(value) for key, value in compose["services"]["worker"]["environment"].items()}
    site = load_site({**environment, "RLHF_HOME": str(tmp_path)})
    assert str(site.runs_dir) == "/shared/runs"
    assert site.database_url == "postgresql+psycopg://rlhf:s3cret@database/history"
    assert site.prefect.database_url == "postgresql+asyncpg://rlhf:s3cret@database/prefect"
    assert site.prefect.host == "0.0.0.0"
    assert site.prefect.url == "http://127.0.0.1:4200"


def test_the_compose_file_contains_no_secret(compose: dict[str, Any]) -> None:
    values = [
        (name, value)
        for one in compose["services"].values()
        for name, value in one["environment"].items()
        if any(word in name for word in SECRETS)
    ]
    assert len(values) > 4
    assert [name for name, value in values if "${" not in value] == []
