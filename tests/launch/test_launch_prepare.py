"""The directory of a new run: complete or absent, with the code of its request."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from control_fakes import make_spec

from rlhf_core.errors import BadConfig, RunDirError
from rlhf_core.files.appended import read_models
from rlhf_core.launch import prepare as launch_prepare
from rlhf_core.launch.prepare import git_revision, prepare, prepare_trial, program_revision, user_modules
from rlhf_core.run_dir.run import is_run_id, new_run_id, run_dirs
from rlhf_core.schemas.journal import JournalLine


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Current folder of the user: a repository with a reward function."""
    path = tmp_path / "work"
    path.mkdir()
    (path / "my_rewards.py").write_text("def score(**columns):\n    return []\n")
    git(path, "init", "-q")
    git(path, "add", ".")
    git(path, "commit", "-qm", "first")
    return path


def test_a_run_directory_has_spec_code_and_journal(tmp_path: Path, folder: Path) -> None:
    spec = make_spec(reward={"functions": ["my_rewards:score"]})
    run = prepare(spec, tmp_path / "runs", config_source="a.toml", overrides=["seed=1"], folder=folder)
    assert is_run_id(run.run_id)
    stored = run.read_spec()
    assert stored.spec == spec
    assert stored.run_id == run.run_id
    assert stored.overrides == ("seed=1",)
    assert stored.code_revision == git_revision(folder)
    (line,) = read_models(run.control, JournalLine)
    assert (line.token, line.sequence, line.event.kind) == (0, 0, "run_created")
    assert [one.run_id for one in run_dirs(tmp_path / "runs")] == [run.run_id]


def test_the_snapshot_does_not_change_with_the_code(tmp_path: Path, folder: Path) -> None:
    spec = make_spec(reward={"functions": ["my_rewards:score"]})
    run = prepare(spec, tmp_path / "runs", config_source="a.toml", folder=folder)
    (folder / "my_rewards.py").write_text("changed while queued\n")
    kept = run.code / "snapshot" / "my_rewards.py"
    assert kept.read_text().startswith("def score")


def test_a_trial_has_the_code_of_its_run_and_is_made_once(tmp_path: Path, folder: Path) -> None:
    """Even if the code has changed since, and if a killed controller has left an unfinished trial behind."""
    spec = make_spec(reward={"functions": ["my_rewards:score"]})
    main = prepare(spec, tmp_path / "runs", config_source="a.toml", folder=folder)
    (folder / "my_rewards.py").unlink()
    trial_id = new_run_id(spec.name)
    (tmp_path / "runs" / f".{trial_id}.new" / "code").mkdir(parents=True)
    small = make_spec(train={"num_steps": 3})
    trial = prepare_trial(main, trial_id, small)
    stored = trial.read_spec()
    assert (stored.run_id, stored.trial_of, stored.spec) == (trial_id, main.run_id, small)
    assert stored.code_revision == main.read_spec().code_revision
    assert (trial.code / "snapshot" / "my_rewards.py").read_text().startswith("def score")
    (trial.root / "mark").touch()
    assert prepare_trial(main, trial_id, small) == trial
    assert (trial.root / "mark").exists(), "one that stands is kept"
    assert {one.run_id for one in run_dirs(tmp_path / "runs")} == {main.run_id, trial_id}
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted([main.run_id, trial_id])


def test_uncommitted_changes_are_kept_as_a_diff(tmp_path: Path, folder: Path) -> None:
    (folder / "my_rewards.py").write_text("def score(**columns):\n    return [1.0]\n")
    run = prepare(make_spec(), tmp_path / "runs", config_source="a.toml", folder=folder)
    assert run.read_spec().code_revision.endswith("-dirty")
    assert "+    return [1.0]" in (run.code / "diff.patch").read_text()


@pytest.mark.parametrize("setting", ["diff.external=echo", "color.ui=always", "diff.noprefix=true"])
def test_the_diff_is_a_patch_whatever_the_settings_of_the_user(
    tmp_path: Path, folder: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = folder / "my_rewards.py"
    before, after = code.read_text(), "def score(**columns):\n    return [1.0]\n"
    code.write_text(after)
    name, _, value = setting.partition("=")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", name)
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", value)
    run = prepare(make_spec(), tmp_path / "runs", config_source="a.toml", folder=folder)
    code.write_text(before)
    subprocess.run(["git", "-C", folder, "apply", "-p1", run.code / "diff.patch"], check=True)
    assert code.read_text() == after


def test_outside_a_repository_there_is_no_revision(tmp_path: Path) -> None:
    run = prepare(make_spec(), tmp_path / "runs", config_source="a.toml", folder=tmp_path)
    assert run.read_spec().code_revision == ""
    assert not (run.code / "diff.patch").exists()


def test_packages_are_copied_without_files_that_are_not_code(tmp_path: Path, folder: Path) -> None:
    package = folder / "rewards"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__pycache__" / "junk.pyc").write_text("")
    spec = make_spec(code={"paths": [str(package)]})
    run = prepare(spec, tmp_path / "runs", config_source="a.toml", folder=folder)
    found = {path.name for path in (run.code / "snapshot" / "rewards").iterdir()}
    assert found == {"__init__.py"}


def test_only_modules_of_this_folder_are_taken(folder: Path) -> None:
    spec = make_spec(reward={"functions": ["my_rewards:score", "json:loads", "rlhf_core.training.rewards:exact_match"]})
    assert user_modules(spec, folder) == [folder / "my_rewards.py"]


def test_missing_code_leaves_no_run_behind(tmp_path: Path, folder: Path) -> None:
    spec = make_spec(code={"paths": [str(folder / "nothing.py")]})
    with pytest.raises(BadConfig, match=r"nothing\.py"):
        prepare(spec, tmp_path / "runs", config_source="a.toml", folder=folder)
    assert list((tmp_path / "runs").iterdir()) == []


def test_code_that_may_not_be_read_is_named(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    reward = {"functions": ["my_rewards:score"]}
    monkeypatch.setattr(shutil, "copy2", refuse)
    with pytest.raises(BadConfig, match=r"cannot copy .*my_rewards.py with the code of the run: Permission denied"):
        prepare(make_spec(reward=reward), tmp_path / "runs", config_source="a.toml", folder=folder)
    elsewhere = make_spec(code={"paths": [str(tmp_path / ("x" * 300))]})
    with pytest.raises(BadConfig, match=r"cannot copy .*xxx with the code of the run: File name too long"):
        prepare(elsewhere, tmp_path / "runs", config_source="a.toml", folder=folder)
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_unwritable_folder_is_named(tmp_path: Path, folder: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RunDirError, match="RLHF_RUNS"):
        prepare(make_spec(), blocked, config_source="a.toml", folder=folder)


@pytest.mark.parametrize(
    ("code", "says"), [(errno.ENOSPC, "Make room there"), (errno.EACCES, "`rlhf submit`"), (errno.EROFS, "writable")]
)
def test_a_run_directory_that_cannot_be_made_is_reported_with_a_remedy(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str
) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(launch_prepare, "write_model", refused)
    with pytest.raises(RunDirError, match=f"{os.strerror(code)}. .*{says}"):
        prepare(make_spec(), tmp_path / "runs", config_source="a.toml", folder=folder)


def test_a_folder_that_cannot_be_searched_is_reported(tmp_path: Path, folder: Path) -> None:
    """By its name, as a folder of another user is by its rights: nothing in it can be looked up or removed."""
    with pytest.raises(RunDirError, match=r"File name too long\. Set RLHF_RUNS"):
        prepare(make_spec(), tmp_path / ("x" * 300), config_source="a.toml", folder=folder)


def test_a_disk_that_fills_up_with_code_is_reported_as_such(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = make_spec(code={"paths": [str(folder)]})
    main = prepare(spec, tmp_path / "runs", config_source="a.toml", folder=folder)
    monkeypatch.setattr(shutil, "copyfile", refused)
    with pytest.raises(RunDirError, match=r"No space left on device\. Make room there"):
        prepare(spec, tmp_path / "runs", config_source="a.toml", folder=folder)
    with pytest.raises(RunDirError, match=r"No space left on device\. Make room there"):
        prepare_trial(main, new_run_id(spec.name), spec)
    assert list((tmp_path / "runs").iterdir()) == [main.root]


def test_an_unfinished_directory_is_no_run(tmp_path: Path) -> None:
    half = tmp_path / "runs" / ".small-20260101-000000-abcdef.new"
    half.mkdir(parents=True)
    (half / "spec.json").write_text("{}")
    assert run_dirs(tmp_path / "runs") == []


def test_the_revision_of_the_program_is_that_of_its_checkout(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    package = checkout / "rlhf_core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    assert program_revision(package) == git_revision(checkout) != ""
    # Installed as a package, in an environment inside another repository.
    installed = checkout / ".venv" / "rlhf_core"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert git_revision(installed) != ""
    assert program_revision(installed) == ""
