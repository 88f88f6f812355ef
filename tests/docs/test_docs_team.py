"""The page for team leads: its commands are run verbatim, on a real PostgreSQL, Prefect and Slurm."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from history_tools import postgres
from process_tools import free_port
from slurm_cluster import Cluster, needs_slurm

pytestmark = [pytest.mark.site, pytest.mark.end_to_end, needs_slurm]

PAGE = Path(__file__).parents[2] / "docs" / "team.md"


def commands() -> list[str]:
    """Blocks of commands to run, in order."""
    return re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=4)
    cluster.up()
    yield cluster
    cluster.down()


def test_every_block_of_the_page_is_found() -> None:
    assert len(commands()) >= 10
    assert "rlhf up" in "".join(commands())


def test_the_page_is_followed(cluster: Cluster, tmp_path: Path) -> None:
    server = postgres()
    tools = next(Path("/usr/lib/postgresql").glob("*/bin/pg_dump"), None) or shutil.which("pg_dump")
    if tools is None:
        pytest.skip("pg_dump is not there")
    home, runs, folder = tmp_path / "home", tmp_path / "shared" / "runs", tmp_path / "folder"
    folder.mkdir()
    admin = server.admin_environment()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RLHF_", "PREFECT_"))},
        **admin,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(Path(tools).parent), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "SLURM_CONF": str(cluster.conf),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    script = "\n".join(commands())
    places = {
        "/var/lib/rlhf": home,
        "/shared/rlhf/runs": runs,
        "/opt/rlhf-flows": PAGE.parents[1],
        "/shared/envs/rlhf/bin/python": sys.executable,
    }
    for written, here in places.items():
        assert written in script, "the page has changed"
        script = script.replace(written, str(here))
    script = script.replace("[prefect]\n", f"[prefect]\nport = {free_port()}\n")
    try:
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-x"],
            input=script,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        output = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, output
        assert "running" in done.stdout, output  # rlhf up --status
        assert "nightly" in done.stdout, output  # rlhf deploy
        assert (home / "history.sql").stat().st_size > 10_000
    finally:
        subprocess.run(
            ["bash", "-c", f". {home}/environment; export RLHF_HOME; rlhf down"], env=environment, check=False
        )
