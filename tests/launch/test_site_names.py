"""Promoted models referenced by a run: the newest of a name, resolved when the run is created."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from control_fakes import make_spec
from made_reports import model_provenance

from rlhf_core.cli.main import execute
from rlhf_core.config.site import Site, load_site
from rlhf_core.control.site_names import for_site
from rlhf_core.files.whole import write_model
from rlhf_core.launch.config_paths import absolute_paths
from rlhf_core.schemas.changes import with_changes

OLD, NEW, OTHER = "rm-20260101-000000-ffffff", "rm-20260101-000000-000000", "rm-b-20270101-000000-000000"
"""OLD and NEW were planned at the same time, as two scheduled runs may be."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    for day, name in enumerate((OLD, NEW, OTHER), start=2):
        write_model(
            tmp_path / "promoted" / name / "rlhf.json",
            model_provenance(name, promoted_at=datetime(2026, 1, day, tzinfo=UTC)),
        )
    (tmp_path / "promoted" / "rm-20280101-000000-000000").mkdir()  # incomplete
    return load_site()


@pytest.mark.parametrize(
    ("path", "folder"), [("promoted:rm", NEW), (f"promoted:{OLD}", OLD), ("promoted:rm-b", OTHER), ("promoted:x", "")]
)
def test_the_newest_promoted_model_of_a_name_is_taken(path: str, folder: str, site: Site, tmp_path: Path) -> None:
    named = make_spec(reward={"models": {"good": {"path": path}}}, grpo={"measure_kl": True})
    spec = absolute_paths(with_changes(named, {"loops.main.reference": path}), tmp_path)
    found = for_site(spec, site)
    expected = str(tmp_path / "promoted" / folder) if folder else path
    assert (found.reward.models["good"].path, found.main_loop.reference) == (expected, expected)


@pytest.mark.usefixtures("site")
def test_a_dry_run_reads_the_promoted_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["reward.models.good.path=promoted:rm"]
    assert execute(["run", "quickstart", "--dry-run", "--json", *(f"--set={one}" for one in settings)]) == 0
    found = json.loads(capsys.readouterr().out)["spec"]["reward"]["models"]["good"]["path"]
    assert found == str(tmp_path / "promoted" / NEW)


def test_a_relative_folder_becomes_an_absolute_path(site: Site, tmp_path: Path) -> None:
    spec = absolute_paths(make_spec(reward={"models": {"good": {"path": "models/rm"}}}), tmp_path)
    assert for_site(spec, site).reward.models["good"].path == str(tmp_path / "models" / "rm")
