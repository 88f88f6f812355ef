"""The product is the wheel, not the checkout: built, installed elsewhere, and used from there."""

import os
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tools import command_of, until
from site_files import QUICK, options
from sites import Site

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "infra" / "systemd").glob("rlhf-*.service"))
TINY = (
    "loops.main.num_steps=2", "loops.warm_start.num_steps=2", "loops.main.algorithm.prompts_per_step=4",
    "loops.main.algorithm.samples_per_prompt=2", "evaluate.num_prompts=8", "resources.ranks_per_node=1",
)  # fmt: skip


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
    make_environment(home / "venv", wheel)
    return home


@pytest.fixture(scope="session")
def control(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without torch, as a control plane is installed."""
    home = tmp_path_factory.mktemp("control")
    libraries = make_environment(home / "venv", wheel)
    (libraries / "torch.py").write_text("raise ModuleNotFoundError('the control plane has no torch', name='torch')\n")
    return home


def make_environment(folder: Path, wheel: Path) -> Path:
    """Returns its folder of libraries."""
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = folder / "lib" / version / "site-packages"
    # A path file adds the libraries; the path files inside that folder (our editable install) are not read from there.
    (libraries / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*install, "--force-reinstall", str(wheel)], check=True)
    return libraries


def test_the_wheel_carries_flows_core_migrations_and_presets(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "flows/run.py",
        "rlhf_core/cli/main.py",
        "rlhf_core/py.typed",
        "rlhf_core/presets/quickstart.toml",
        "rlhf_core/presets/gsm8k.toml",
        "rlhf_core/definitions/trl.toml",
        "rlhf_core/drivers/ray_node.sh",
        "rlhf_core/history/reader.sql",
        "migrations/env.py",
    ):
        assert needed in names
    assert any(name.startswith("migrations/versions/0007") for name in names)
    strangers = {name.split("/")[0] for name in names} - {"flows", "rlhf_core", "migrations"}
    assert all(name.endswith(".dist-info") for name in strangers), strangers


def rlhf(installed: Path, *arguments: str) -> str:
    """Run the installed command from a folder outside the repository."""
    work = installed / "work"
    work.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
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
    rlhf(installed, "run", "quickstart", "--no-prefect", *options(*TINY))
    assert '"completed"' in rlhf(installed, "runs", "--json")
    assert "report.html" in rlhf(installed, "report", "last")


class Installed(Site):
    """A site whose `rlhf` is the script of an environment, found as a unit of systemd finds it."""

    def environment(self, **more: str) -> dict[str, str]:
        """Environment without the checkout."""
        return {name: value for name, value in super().environment(**more).items() if name != "PYTHONPATH"}

    def command(self, *arguments: str) -> list[str]:
        """The ``rlhf`` command of the environment."""
        return ["/usr/bin/env", "rlhf", *arguments]


@pytest.fixture
def site(control: Path, installed: Path, tmp_path: Path) -> Iterator[Installed]:
    site = Installed(tmp_path / "home", settings=QUICK)
    site.variables = {
        "PATH": os.pathsep.join([str(control / "venv" / "bin"), sysconfig.get_path("scripts"), "/usr/bin", "/bin"]),
        "RLHF_COMPUTE_PYTHON": str(installed / "venv" / "bin" / "python"),
    }
    with site.running(services=False):
        yield site


@pytest.mark.training
@pytest.mark.end_to_end
@pytest.mark.site
def test_a_site_from_the_wheel_whose_control_plane_has_no_torch(site: Installed, control: Path) -> None:
    site.rlhf("up")
    asked = site.rlhf("submit", "quickstart", *options(*TINY), "--json").json()
    until(lambda: site.flow_state(asked["flow_run_id"]) in ("Completed", "Failed", "Crashed"), timeout_s=150)
    shown = site.rlhf("show", asked["run_id"], "--json").json()
    assert shown["run"]["state"] == "completed", f"{shown}\n{site.logs()}"
    assert {one["name"] for one in shown["evaluations"]}
    services = [one for one in site.processes() if "serve" in command_of(one)]
    assert {one.exe() for one in services} == {str((control / "venv" / "bin" / "python").resolve())}
    assert all(str(control) in one.cmdline()[0] for one in services), "of this environment, not of the checkout"
    site.rlhf("down")
    assert site.processes() == []


@pytest.mark.end_to_end
@pytest.mark.site
def test_the_units_of_systemd_find_the_installed_command(site: Installed) -> None:
    lines = [line.partition("=")[2] for unit in UNITS for line in unit.read_text().splitlines() if "ExecStart=" in line]
    assert len(lines) == 3
    services = [site.spawn(line.split(), RLHF_STARTED_BY="systemd") for line in lines]  # in whatever order
    until(lambda: {one["state"] for one in site.status().values()} == {"running"}, timeout_s=150)
    assert {one["started_by"] for one in site.status().values()} == {"systemd"}
    for one in services:
        one.terminate()
    for one in services:
        one.communicate(timeout=60)
    good = (0, -signal.SIGTERM)  # as systemd sees it
    assert [one.returncode for one in services if one.returncode not in good] == []
    assert site.processes() == []
