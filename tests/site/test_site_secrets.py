"""Passwords of the control plane stay there: none is in a job, its script, its files, or in Prefect.

A canary is set in every variable that may hold a secret of the site. A second run has one openly as a setting of its
job, and it is found in all of these places, which proves that the right places are searched.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from history_tools import postgres
from process_tools import ASKING_INTERVAL_S, until
from secret_places import environments, files_with, tables_with
from site_files import QUICK, small
from sites import Site, go
from slurm_cluster import Cluster, needs_slurm

from rlhf_core.schemas.site import is_private

pytestmark = [pytest.mark.site, pytest.mark.end_to_end, needs_slurm]

PRESET = "slurm-quickstart"
CANARY = "c4nary-of-the-site"
PLANTED = "c4nary-in-the-open"
HANDED = "c4nary-that-a-job-is-handed"


@pytest.fixture
def site(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site on Slurm whose databases, server, messages and `libpq` all have passwords."""
    server = postgres()
    history, prefect = server.empty_database(), server.empty_database()
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=1, kill_wait_s=1)
    site = Site(tmp_path / "home", cluster=cluster, pretended=True, settings=QUICK, auth=f"team:{CANARY}")
    site.database_url = history.replace("postgresql://rlhf@", f"postgresql+psycopg://rlhf:{CANARY}@")
    site.variables = {
        "RLHF_PREFECT_DATABASE_URL": prefect.replace("postgresql://rlhf@", f"postgresql+asyncpg://rlhf:{CANARY}@"),
        "RLHF_NOTIFY_WEBHOOK_URL": f"https://chat.example.com/{CANARY}",
        "PGPASSWORD": CANARY,
    }
    site.home.mkdir()
    secrets = site.home / "job-secrets.env"
    secrets.touch(mode=0o600)
    secrets.write_text(f"WANDB_API_KEY={HANDED}\n")
    with site.running():
        yield site


def test_no_password_reaches_a_job_its_files_or_prefect(site: Site, tmp_path: Path) -> None:
    assert all(is_private(name) for name, value in site.environment().items() if CANARY in value)
    passed = 'slurm.pass_environment=["WANDB_API_KEY"]'
    first = site.submit(PRESET, passed)
    second = site.submit(PRESET, f"slurm.environment.OPEN={json.dumps(PLANTED)}")
    kept = {run_dir.run_id: environments(run_dir) for run_dir in (first, second)}
    slurm = Path(site.environment()["SLURM_CONF"]).parents[1]
    script = site.rlhf("run", PRESET, *small(f"slurm.environment.OPEN={json.dumps(PLANTED)}"), "--dry-run")
    with_job = files_with(PLANTED, slurm), files_with(CANARY, slurm)
    handed = files_with(HANDED, slurm)
    around = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    for run_dir in (first, second):
        go(run_dir)
        until(lambda one=run_dir: site.flow_runs(one) == [("Completed", False)], interval_s=ASKING_INTERVAL_S)
    site.rlhf("down")

    # The running processes of a job: the script and the agent.
    assert all(len(found) >= 2 for found in kept.values())
    assert not any(CANARY in text for found in kept.values() for text in found)
    assert not any(PLANTED in text for text in kept[first.run_id])
    assert any(PLANTED in text for text in kept[second.run_id]), "the control"

    # A passed secret is in its own job and in no other; apart from it only Slurm's controller keeps it.
    assert any(f"WANDB_API_KEY={HANDED}" in text for text in kept[first.run_id])
    assert not any(HANDED in text for text in kept[second.run_id])
    assert {path.stat().st_mode & 0o077 for path in handed} <= {0}
    assert not any(HANDED in words for words in around)
    assert files_with(HANDED, tmp_path) == [site.home / "job-secrets.env"]
    assert any(first.root in path.parents for path in files_with("WANDB_API_KEY", tmp_path)), "the control"

    # The script, as printed and as submitted; and Slurm's own copy of the job's environment.
    assert CANARY not in script.stdout
    assert PLANTED in script.stdout, "the control"
    assert with_job[1] == []
    assert with_job[0], "the control: Slurm keeps the script of a job"

    # Run directories, logs, kept configs.
    assert files_with(CANARY, tmp_path) == []
    assert any(path.suffix == ".sh" and second.root in path.parents for path in files_with(PLANTED, tmp_path))

    # Prefect: parameters, artifacts, logs, states, events.
    for database in (site.variables["RLHF_PREFECT_DATABASE_URL"], site.database_url):
        assert tables_with(CANARY, database) == []
        assert tables_with(HANDED, database) == []
    assert "flow_run" in tables_with(PLANTED, site.variables["RLHF_PREFECT_DATABASE_URL"]), "the control"
    assert "runs" in tables_with(PLANTED, site.database_url), "the control"
