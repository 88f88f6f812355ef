"""The product is the wheel, not the checkout: built, installed elsewhere, and used from there."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from rlhf_core.training.prebuild import extensions_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        text=True,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has our wheel, and the libraries of this one; not the checkout."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv", with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "venv" / "lib" / version / "site-packages"
    # A path file adds the libraries; the path files inside that folder (our editable install) are not read from there.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    return home


def test_the_wheel_carries_flows_core_migrations_and_presets(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "flows/run.py",
        "rlhf_core/cli/main.py",
        "rlhf_core/py.typed",
        "rlhf_core/presets/quickstart.toml",
        "rlhf_core/presets/gsm8k.toml",
        "migrations/env.py",
    ):
        assert needed in names
    assert any(name.startswith("migrations/versions/0001") for name in names)
    strangers = {name.split("/")[0] for name in names} - {"flows", "rlhf_core", "migrations"}
    assert all(name.endswith(".dist-info") for name in strangers), strangers


def rlhf(installed: Path, *arguments: str) -> str:
    """Run the installed command from a folder outside the repository."""
    work = installed / "work"
    work.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # The libraries are this environment's, so let it use their compiled operation too, with the same ninja.
    environment["TORCH_EXTENSIONS_DIR"] = str(extensions_dir())
    environment["PATH"] = sysconfig.get_path("scripts") + os.pathsep + environment["PATH"]
    ended = subprocess.run(
        [str(installed / "venv" / "bin" / "python"), "-m", "rlhf_core.cli.main", *arguments],
        cwd=work,
        env={**environment, "RLHF_HOME": str(installed / "home"), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0, f"{arguments}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_the_code_that_runs_is_the_wheels(installed: Path) -> None:
    python = installed / "venv" / "bin" / "python"
    where = subprocess.run(
        [
            str(python),
            "-c",
            "import rlhf_core, flows, migrations; print(rlhf_core.__file__, flows.__file__, migrations.__file__)",
        ],
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(ROOT) not in where
    assert where.count(str(installed)) == 3


@pytest.mark.training
@pytest.mark.end_to_end
def test_a_run_from_the_wheel_outside_the_repository(installed: Path) -> None:
    small = (
        "train.num_steps=2", "sft.num_steps=2", "grpo.prompts_per_step=4", "grpo.samples_per_prompt=2",
        "evaluate.num_prompts=8", "resources.ranks_per_node=1",
    )  # fmt: skip
    overrides = [word for override in small for word in ("--set", override)]
    rlhf(installed, "run", "quickstart", "--no-prefect", *overrides)
    assert '"completed"' in rlhf(installed, "runs", "--json")
    assert "report.html" in rlhf(installed, "report", "last")
