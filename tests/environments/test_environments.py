"""Environments of trainers: made, gone on with, recognised; never taken for complete when they are not."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from process_tools import Rlhf

from rlhf_core.config.site import load_site
from rlhf_core.errors import BadConfig, BadInput, EnvironmentFailed
from rlhf_core.machine import environments
from rlhf_core.machine.environments import STAMP, Definition, Made, create, environment_folder, inspect

Begin = Callable[[Path], Path]
TINY = Definition("tiny", "For tests.", "torch==1.0", ("tinytrainer==1.0",), ("tinytrainer==1.0", "torch==1.0"))


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of one empty module."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def write_wheels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two versions of `torch` and of `tinytrainer`, and have pip take everything from there."""
    folder.mkdir()
    for name in ("torch", "tinytrainer"):
        for version in ("1.0", "2.0"):
            write_wheel(folder, name, version)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that pip takes everything from: two versions of `torch` and of `tinytrainer`."""
    return write_wheels(tmp_path / "wheels", monkeypatch)


@dataclass(frozen=True)
class Complete:
    """A complete environment."""

    made: Made
    messages: list[str]
    """Progress while it was made."""


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Complete:
    """An environment that was made where there was none, of wheels that are gone."""
    folder = tmp_path_factory.mktemp("complete")
    messages: list[str] = []
    assert inspect(TINY, folder / "made" / "tiny").state == "absent"
    with pytest.MonkeyPatch.context() as patch:
        wheels = write_wheels(folder / "wheels", patch)
        made = create(TINY, folder / "made" / "tiny", report_progress=messages.append)
        shutil.rmtree(wheels)
    return Complete(made, messages)


@pytest.fixture
def begin(complete: Complete) -> Begin:
    """Lay out an environment that was begun: pip is in it, nothing else, and no stamp. `create` goes on with it.

    A copy: to unpack and compile pip is most of the time of making one.
    """

    def copied(folder: Path) -> Path:
        shutil.copytree(complete.made.folder, folder, symlinks=True)
        (folder / STAMP).unlink()
        (packages,) = folder.glob("lib/*/site-packages")
        for name in ("torch", "tinytrainer"):
            (packages / f"{name}.py").unlink()
            shutil.rmtree(packages / f"{name}-1.0.dist-info")
        shutil.rmtree(packages / "__pycache__")
        return folder

    return copied


def version_in(folder: Path, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([folder / "bin/python", "-c", code], capture_output=True, text=True).stdout.strip()


def test_an_environment_is_made_as_pinned_and_then_left_alone(complete: Complete) -> None:
    folder = complete.made.folder
    assert not complete.made.was_there
    assert (version_in(folder, "torch"), version_in(folder, "tinytrainer")) == ("1.0", "1.0"), "not the newest"
    assert any("tinytrainer" in line for line in complete.messages)
    found = inspect(TINY, folder)
    assert (found.state, found.torch, found.python) == ("ready", "torch==1.0", "{}.{}".format(*sys.version_info))
    assert create(TINY, folder).was_there, "needs no packages"


def test_an_environment_is_made_again_for_another_torch_and_another_definition(
    tmp_path: Path, wheels: Path, begin: Begin
) -> None:
    folder = begin(tmp_path / "tiny")
    create(TINY, folder, torch="torch==2.0")
    assert (version_in(folder, "torch"), version_in(folder, "tinytrainer")) == ("2.0", "1.0")
    assert inspect(TINY, folder).state == "ready"
    assert create(TINY, folder, torch="torch==2.0").was_there
    assert not create(TINY, folder).was_there, "another torch is another environment"
    assert version_in(folder, "torch") == "1.0"
    newer = Definition("tiny", "For tests.", "torch==1.0", ("tinytrainer==2.0",), ("tinytrainer==2.0",))
    assert inspect(newer, folder).state == "outdated"
    assert not create(newer, folder).was_there
    assert version_in(folder, "tinytrainer") == "2.0"
    # If that fails, the packages may be of either version; a stamp that stays would say that they are all right.
    absent = Definition("tiny", "For tests.", "torch==1.0", ("tinytrainer==3.0",), ())
    with pytest.raises(EnvironmentFailed):
        create(absent, folder)
    assert inspect(newer, folder).state == "unfinished"


def test_what_was_not_finished_is_gone_on_with(tmp_path: Path, wheels: Path, begin: Begin) -> None:
    folder = begin(tmp_path / "tiny")
    (wheels / "tinytrainer-1.0-py3-none-any.whl").rename(tmp_path / "kept.whl")
    with pytest.raises(
        EnvironmentFailed, match=r"(?s)its last lines:.*tinytrainer==1\.0.*continues with what is there"
    ):
        create(TINY, folder)
    assert inspect(TINY, folder).state == "unfinished"
    (tmp_path / "kept.whl").rename(wheels / "tinytrainer-1.0-py3-none-any.whl")
    create(TINY, folder)
    assert inspect(TINY, folder).state == "ready"


def test_a_pip_that_was_not_unpacked_whole_is_unpacked_again(tmp_path: Path, wheels: Path, begin: Begin) -> None:
    folder = begin(tmp_path / "tiny")
    (packages,) = folder.glob("lib/*/site-packages")
    (installed,) = packages.glob("pip-*.dist-info")
    shutil.rmtree(installed)
    shutil.rmtree(packages / "pip" / "_vendor")
    create(TINY, folder)
    assert version_in(folder, "torch") == "1.0"
    assert version_in(folder, "pip") != ""


def test_packages_are_compared_with_their_pins_before_the_stamp_is_written(
    tmp_path: Path, wheels: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pip that says it was successful without installing, as with `--dry-run`, is not believed."""
    folder = begin(tmp_path / "tiny")
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    with pytest.raises(EnvironmentFailed, match=r"found torch missing, expected 1\.0; tinytrainer missing"):
        create(TINY, folder)
    assert inspect(TINY, folder).state == "unfinished"


def test_folders_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(BadInput, match="no virtual environment and not empty"):
        create(TINY, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_two_do_not_make_the_same_environment_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(BadInput, match="another process is making"):
            create(TINY, folder)
    finally:
        os.close(other)


def test_an_import_path_of_the_user_does_not_stand_in_for_packages(
    tmp_path: Path, wheels: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with zipfile.ZipFile(wheels / "tinytrainer-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(elsewhere)
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    create(TINY, begin(tmp_path / "tiny"))
    monkeypatch.delenv("PYTHONPATH")
    assert version_in(tmp_path / "tiny", "tinytrainer") == "1.0"


# ---------------------------------------------------------------------------------------------------------------------
# trainer.environment


def bare(folder: Path) -> Path:
    """A folder that passes for a virtual environment."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "pyvenv.cfg").touch()
    return folder


def test_an_environment_is_found_by_name_and_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = bare(tmp_path / "environments" / "trl")
    (ready / STAMP).write_text(json.dumps({"hash": "of an older version"}))
    assert environment_folder("trl", tmp_path) == ready, "an outdated one still runs"
    own = bare(tmp_path / "environments" / "mine")
    assert environment_folder("mine", tmp_path) == own, "one that was put there by hand needs no stamp"
    assert environment_folder(str(own), Path("/nowhere")) == own
    monkeypatch.chdir(tmp_path)
    assert environment_folder("./environments/mine", tmp_path) == own


def test_an_environment_that_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"^trainer\.environment .*swift is not there \(run `rlhf env create swift`\)"):
        environment_folder("swift", tmp_path)
    bare(tmp_path / "environments" / "swift")
    with pytest.raises(BadConfig, match=r"swift was not finished \(run `rlhf env create swift`\)"):
        environment_folder("swift", tmp_path)
    with pytest.raises(BadConfig, match=r"`rlhf env create` knows swift, trl"):
        environment_folder("swfit", tmp_path)
    with pytest.raises(BadConfig, match="without bin/python in it"):
        environment_folder(str(tmp_path), tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Definitions, and the command


@pytest.mark.parametrize("name", environments.names())
def test_a_definition_pins_all_that_it_wants(name: str) -> None:
    wanted = environments.definition(name)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in wanted.constraints}
    assert all("==" in line for line in wanted.constraints)
    for requirement in wanted.requirements:
        assert requirement.partition("==")[0].partition("[")[0].lower() in pinned, requirement
    assert wanted.torch.startswith("torch==")
    assert not any(line.startswith("torch==") for line in wanted.constraints), "torch has a setting of its own"


def test_the_definitions_have_the_versions_that_the_presets_are_for() -> None:
    assert {"ms-swift==4.6.0", "trl==0.29.1", "msgspec"} <= set(environments.definition("swift").requirements)
    assert "trl==1.16.0" in environments.definition("trl").requirements


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"torch": "2.12.1"}, "found --torch 2.12.1, expected a requirement such as torch==1.0"),
        ({"torch": "torchvision==1.0"}, "found --torch torchvision==1.0, expected"),
        ({"python": "/nowhere/python"}, "/nowhere/python, which does not run: No such file or directory"),
        ({"python": "true"}, "found --python true, which is no Python interpreter"),
    ],
)
def test_a_wrong_torch_or_interpreter_is_refused_before_anything_is_made(
    tmp_path: Path, arguments: dict[str, str], says: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(says)):
        create(TINY, tmp_path / "tiny", **arguments)  # type: ignore[arg-type] # one of two options
    assert not (tmp_path / "tiny").exists()


def test_an_environment_for_which_there_is_no_room_is_advised_to_go_elsewhere(tmp_path: Path, begin: Begin) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\n[ $# = 2 ] && echo 3.11 || { echo 'No space left on device' >&2; exit 1; }\n")
    program.chmod(0o755)
    with pytest.raises(EnvironmentFailed, match=r"\nMake room there, or give another --folder\."):
        create(TINY, tmp_path / "tiny", python=str(program))


def test_a_damaged_definition_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('summary = "No more."\n')
    with pytest.raises(BadInput, match=r"odd\.toml is no definition"):
        environments.read_definition(path)


def test_env_makes_lists_and_shows(
    tmp_path: Path, wheels: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch, rlhf: Rlhf
) -> None:
    monkeypatch.setattr(environments, "definition", lambda name: TINY)
    for folder in (load_site().home / "environments" / "trl", tmp_path / "own"):
        begin(folder)
    assert 'Use it with trainer.environment = "trl".' in rlhf("env", "create", "trl").stdout
    assert "already exists" in rlhf("env", "create", "trl").stdout
    assert {row["name"]: row["state"] for row in rlhf("env", "list", "--json").json()} == {
        "swift": "absent",
        "trl": "ready",
    }
    assert rlhf("env", "show", "trl", "--json").json()["requirements"] == ["tinytrainer==1.0"]
    answer = rlhf("env", "create", "trl", "--folder", str(tmp_path / "own"))
    assert f'trainer.environment = "{tmp_path}/own"' in answer.stdout.replace("\n", "")


def test_env_create_ends_with_what_pip_said_last(wheels: Path, begin: Begin, rlhf: Rlhf) -> None:
    """The wheels of the test have no trl."""
    begin(load_site().home / "environments" / "trl")
    output = rlhf("env", "create", "trl", code=1).stderr
    assert re.search(r"pip install for .* ended with 1; its last lines:(.|\n)*torch==2.13.0", output)
    assert "expected one of swift, trl" in rlhf("env", "create", "nope", code=2).stderr
