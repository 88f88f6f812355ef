"""Building DeepSpeed's operation once, and getting rid of locks that nobody holds. Nothing is compiled here."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import REPOSITORY, launch, values

from rlhf_core.errors import WorkerError
from rlhf_core.training import prebuild as module
from rlhf_core.training.prebuild import clear_stale_lock, extensions_dir, prebuild, use_own_scripts

pytestmark = [pytest.mark.training]


@pytest.fixture(autouse=True)
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions" / "deepspeed_shm_comm"


def pretend_to_build(folder: Path) -> None:
    """What the real build leaves behind, slowly, and a note for the test."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "builds.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    (folder / "deepspeed_shm_comm.so").touch()
    (folder / "built_for.json").write_text(json.dumps(module._versions()))


def test_what_is_built_is_not_built_again(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_build", pretend_to_build)
    assert prebuild() == str(extensions)
    assert prebuild() == str(extensions)
    assert len((extensions.parent / "builds.txt").read_text().split()) == 1


def test_another_version_is_built_anew(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_build", pretend_to_build)
    prebuild()
    (extensions / "built_for.json").write_text('{"torch": "1.0", "deepspeed": "0.1"}')
    prebuild()
    assert len((extensions.parent / "builds.txt").read_text().split()) == 2


def test_every_environment_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for prefix in ("/home/one/.venv", "/home/two/.venv", "/home/one/.venv"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr(sys, "prefix", prefix)
        folders.add(extensions_dir())
    assert len(folders) == 2


def build_at_once(rank: int, num_ranks: int) -> str:
    module._build = pretend_to_build
    return prebuild()


def test_two_processes_at_once_build_once(extensions: Path, tmp_path: Path) -> None:
    assert values(launch(build_at_once, 3, tmp_path / "launch")) == [str(extensions)] * 3
    assert len((extensions.parent / "builds.txt").read_text().split()) == 1


HOLDER = """
import fcntl, os, sys, time
folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
ours = open(os.path.join(os.path.dirname(folder), ".deepspeed_shm_comm.prebuild"), "w")
fcntl.flock(ours, fcntl.LOCK_EX)
torchs = os.open(os.path.join(folder, "lock"), os.O_CREAT | os.O_EXCL)
print("holding", flush=True)
time.sleep(600)
"""


def start_holder(folder: Path) -> "subprocess.Popen[bytes]":
    """A process in the middle of a build: it holds our lock and torch's."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"holding\n"
    return process


def test_the_lock_of_a_living_process_stays_and_that_of_a_killed_one_goes(extensions: Path) -> None:
    holder = start_holder(extensions)
    lock = extensions / "lock"
    try:
        assert not clear_stale_lock(lock)
        assert lock.exists()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert lock.exists(), "torch's lock file outlives its owner"
    assert clear_stale_lock(lock)
    assert not lock.exists()
    assert not clear_stale_lock(lock)


def test_a_build_goes_on_after_its_builder_was_killed(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = start_holder(extensions)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    monkeypatch.setattr(module, "_build", pretend_to_build)
    assert prebuild() == str(extensions)
    assert not (extensions / "lock").exists()


def test_without_it_torch_waits_for_ever(extensions: Path) -> None:
    """Negative control: torch takes the lock of the dead for that of the living, and its wait has no end."""
    pytest.importorskip("torch")
    from torch.utils.file_baton import FileBaton

    holder = start_holder(extensions)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not FileBaton(str(extensions / "lock")).try_acquire()
    clear_stale_lock(extensions / "lock")
    baton = FileBaton(str(extensions / "lock"))
    assert baton.try_acquire()
    assert not clear_stale_lock(extensions / "lock"), "its owner is this process"
    baton.release()


def test_no_compiler_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        WorkerError, match=r"found no C\+\+ compiler \(no-such-compiler\); install one .*apt-get install g\+\+"
    ):
        prebuild()


def test_the_folder_is_the_same_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = extensions_dir()
    assert found.parent == tmp_path / "torch_extensions"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(found), "what is started from here looks there too"


def test_own_scripts_come_first_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", "/usr/bin")
    use_own_scripts()
    use_own_scripts()
    assert os.environ["PATH"].split(os.pathsep) == [scripts, "/usr/bin"]


def test_importing_it_costs_no_torch() -> None:
    code = "import sys, rlhf_core.training.prebuild; print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    found: Any = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert found.stdout.strip() == "[]"
