"""Secrets around a run on this machine: its job has only the requested one, and no remaining file has any.

The same through Prefect, PostgreSQL and Slurm: ``test_site_secrets.py``.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from process_tools import until
from secret_places import environments, files_with
from site_files import ROOT, small
from sites import Site, go

from rlhf_core.run_dir.run import RunDir

pytestmark = pytest.mark.end_to_end

# New ones each time: a run keeps the uncommitted changes of the folder it is started from, perhaps of this very file.
CANARY, OF_THE_SITE, PLANTED = (f"c4nary-{secrets.token_hex(8)}" for _ in range(3))
PASSED = 'slurm.pass_environment=["WANDB_API_KEY"]'
OPEN = f'slurm.environment.OPENAI_KEY="{PLANTED}"'


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A home folder on this machine, surrounded by secrets."""
    site = Site(tmp_path / "home", pretended=True, working_dir=ROOT)
    site.variables = {
        **dict.fromkeys(("WANDB_API_KEY", "OPENAI_KEY", "GITHUB_PAT", "HF_TOKEN", "NPM_AUTH"), CANARY),
        "HTTPS_PROXY": f"http://anna:{CANARY}@127.0.0.1:9",
        "DATABASE_URL": f"postgresql://anna:{CANARY}@127.0.0.1:9/db",
        **dict.fromkeys(("PGPASSWORD", "RLHF_PREFECT_AUTH", "PREFECT_SERVER_DATABASE_PASSWORD"), OF_THE_SITE),
    }
    with site.running(services=False):
        yield site


def test_a_job_has_its_secret_and_no_remaining_file_has_one(site: Site, tmp_path: Path) -> None:
    process = site.start("run", "quickstart", "--no-prefect", *small(PASSED, OPEN))
    runs = site.home / "runs"
    (folder,) = until(lambda: list(runs.glob("quickstart-*")))
    run_dir = RunDir(folder)
    found = until(lambda: environments(run_dir))
    until(lambda: (run_dir.root / "starts").exists())
    words = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    go(run_dir)
    output = "".join(process.communicate(timeout=250))
    assert process.returncode == 0, output

    # The job: the requested secret, and none of the site's.
    assert all(f"WANDB_API_KEY={CANARY}" in text for text in found)
    assert not any(OF_THE_SITE in text for text in found)

    # Run directory with spec, journal, placement and logs; the history; the output; every command line.
    for secret in (CANARY, OF_THE_SITE):
        assert files_with(secret, tmp_path) == []
        assert secret not in output
        assert not any(secret in line for line in words)

    # The control: the named secret and the planted one are found where a secret would be.
    for text in ("WANDB_API_KEY", PLANTED):
        assert {run_dir.spec, site.home / "history.db"} <= set(files_with(text, tmp_path))


def test_a_missing_secret_is_refused_and_a_planted_one_causes_a_warning(site: Site) -> None:
    file = site.home / "job-secrets.env"
    file.touch(mode=0o644)
    file.write_text(f"OTHER={CANARY}\n")
    checked = site.rlhf("check", "quickstart", *small(PASSED, OPEN), "--json", code=2, WANDB_API_KEY="")
    assert "chmod 600" in checked.stdout
    file.chmod(0o600)
    ended = site.rlhf("run", "quickstart", "--no-prefect", *small(PASSED, OPEN), code=2, WANDB_API_KEY="")
    for output in (checked.stdout + checked.stderr, ended.stdout + ended.stderr):
        assert CANARY not in output
        assert PLANTED not in output
        assert "slurm.environment.OPENAI_KEY looks like a secret" in " ".join(output.split())
    assert "WANDB_API_KEY: named in slurm.pass_environment" in " ".join(ended.stderr.split())
    assert str(file) in "".join(ended.stderr.split())
