"""Promoted models that a run names: the newest of a name, looked up when the run is made."""

from pathlib import Path

import pytest
from control_fakes import make_spec

from rlhf_core.config.site import Site, load_site
from rlhf_core.control.site_names import for_site
from rlhf_core.launch.prepare import absolute_paths

OLD, NEW, OTHER = "rm-20260101-000000-abcdef", "rm-20260102-000000-000000", "rm-b-20270101-000000-000000"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    for name in (OLD, NEW, OTHER):
        (tmp_path / "promoted" / name).mkdir(parents=True)
        (tmp_path / "promoted" / name / "rlhf.json").touch()
    (tmp_path / "promoted" / "rm-20280101-000000-000000").mkdir()  # not complete
    return load_site()


@pytest.mark.parametrize(
    ("path", "folder"), [("promoted:rm", NEW), (f"promoted:{OLD}", OLD), ("promoted:rm-b", OTHER), ("promoted:x", "")]
)
def test_the_newest_promoted_model_of_a_name_is_taken(path: str, folder: str, site: Site, tmp_path: Path) -> None:
    spec = absolute_paths(make_spec(reward={"models": {"good": {"path": path}}}), tmp_path)
    found = for_site(spec, site).reward.models["good"].path
    assert found == (str(tmp_path / "promoted" / folder) if folder else path)


def test_a_relative_folder_becomes_a_whole_path(site: Site, tmp_path: Path) -> None:
    spec = absolute_paths(make_spec(reward={"models": {"good": {"path": "models/rm"}}}), tmp_path)
    assert for_site(spec, site).reward.models["good"].path == str(tmp_path / "models" / "rm")
