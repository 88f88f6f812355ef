"""Building DeepSpeed's operation once, whoever is killed meanwhile, and loading it without torch's lock.

What is compiled here is a tiny module of the same name; DeepSpeed, torch and ninja do it as they would the real one.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rank_launcher import REPOSITORY

from rlhf_core.diagnosis.classify import Evidence, WorkerEnd, classify
from rlhf_core.errors import BuildTookTooLong, DiskFull, WorkerError
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import Phase, WorkerOutcome
from rlhf_core.schemas.resources import Role
from rlhf_core.training import prebuild as module
from rlhf_core.training.prebuild import extensions_dir, prebuild, use_own_scripts

pytestmark = [pytest.mark.training]

TIMEOUT_S = 100.0
WAITING = re.compile(r"^\.\.\. waiting for process \d+ on \S+ to compile", re.MULTILINE)
QUICK = """#!/bin/sh
out="" previous=""
for word; do [ "$previous" = -o ] && out="$word"; previous="$word"; done
case " $* " in
*" -c "*) echo compiled >> {notes}; {way}; echo "$out:" > "$out.d"; : > "$out" ;;
*" -shared "*) exec cc -shared -fPIC -I{include} {source} -o "$out" ;;
*) exec c++ "$@" ;;
esac
"""
SOURCE = """
#include <Python.h>
static struct PyModuleDef one = {PyModuleDef_HEAD_INIT, "deepspeed_shm_comm", 0, -1, 0};
PyMODINIT_FUNC PyInit_deepspeed_shm_comm(void) { return PyModule_Create(&one); }
"""


@pytest.fixture(autouse=True)
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions" / "deepspeed_shm_comm"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a quick compiler into CXX that does something else first."""

    def make(way: str = ":") -> None:
        (tmp_path / "one.c").write_text(SOURCE)
        include = sysconfig.get_path("include")
        script = tmp_path / "quick-c++"
        words = {"notes": tmp_path / "notes", "way": way, "include": include, "source": tmp_path / "one.c"}
        script.write_text(QUICK.format(**words))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return make


def num_builds(tmp_path: Path) -> int:
    """One for every time both sources were compiled."""
    notes = tmp_path / "notes"
    return len(notes.read_text().split()) // 2 if notes.exists() else 0


def start(before: str = "") -> "subprocess.Popen[str]":
    """``python -m rlhf_core.worker prebuild``, after some Python of the test's own."""
    code = f"import sys\n{before}\nfrom rlhf_core.worker.__main__ import main\nsys.exit(main(['prebuild']))"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(processes: "list[subprocess.Popen[str]]") -> list[str]:
    """What they said; all of them with exit code 0."""
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pretend_to_compile(scratch: Path, progress: module.Progress) -> None:
    """What the compilation leaves behind, and a note for the test."""
    (scratch / "deepspeed_shm_comm").mkdir()
    (scratch / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").touch()
    with (scratch.parent / "builds.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")


def test_what_is_built_is_not_built_again(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compile", pretend_to_compile)
    assert prebuild() == str(extensions)
    assert prebuild() == str(extensions)
    assert len((extensions.parent / "builds.txt").read_text().split()) == 1


def test_another_version_is_built_anew(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compile", pretend_to_compile)
    prebuild()
    (extensions / "built_for.json").write_text('{"torch": "1.0", "deepspeed": "0.1"}')
    prebuild()
    assert len((extensions.parent / "builds.txt").read_text().split()) == 2
    assert json.loads((extensions / "built_for.json").read_text()) == module._versions()


def test_every_environment_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for prefix in ("/home/one/.venv", "/home/two/.venv", "/home/one/.venv"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr(sys, "prefix", prefix)
        folders.add(extensions_dir())
    assert len(folders) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Several at once, and those who are killed

LOCKLESS = """
import fcntl
def flock(file, how): raise OSError(38, "Function not implemented")
fcntl.flock = flock
"""


@pytest.mark.parametrize(("before", "builds"), [("", {1}), (LOCKLESS, {2, 3})], ids=["locked", "control: no locks"])
def test_three_at_once_on_an_empty_cache_build_once(
    extensions: Path, tmp_path: Path, compiler: Callable[[str], None], before: str, builds: set[int]
) -> None:
    """With the control that without the lock they compile beside each other; what is put in place is whole all the
    same."""
    compiler("sleep 5")
    said = finish([start(before) for _ in range(3)])
    assert num_builds(tmp_path) in builds
    assert names_in(extensions.parent) == [".deepspeed_shm_comm.prebuild", "deepspeed_shm_comm"]
    assert json.loads((extensions / "built_for.json").read_text()) == module._versions()
    waited = [one for one in said if WAITING.search(one)]
    assert len(waited) == (2 if builds == {1} else 0), "who waits says for whom"
    assert sum("... compiling" in one for one in said) == num_builds(tmp_path)


def test_a_killed_builder_does_not_hold_up_the_next_one(
    extensions: Path, tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    compiler(f"[ -e {tmp_path}/second ] || sleep 300")
    builder = start()
    waiting = start()
    wait_for(lambda: (tmp_path / "notes").exists())
    (tmp_path / "second").touch()
    holder = (extensions.parent / ".deepspeed_shm_comm.prebuild").read_text()
    killed, survivor = (builder, waiting) if f"process {builder.pid} " in holder else (waiting, builder)
    orphans = psutil.Process(killed.pid).children(recursive=True)
    killed.send_signal(signal.SIGKILL)  # a zombie until it is collected, which comes later
    said = finish([survivor])[0]
    assert WAITING.search(said)
    assert num_builds(tmp_path) >= 1
    assert names_in(extensions.parent) == [".deepspeed_shm_comm.prebuild", "deepspeed_shm_comm"], "nothing is left"
    for orphan in orphans:
        with contextlib.suppress(psutil.Error):
            orphan.kill()
    killed.communicate()


def test_the_lock_that_torch_leaves_behind_blocks_nobody(
    extensions: Path, tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    """With the control that torch's own way, and so a rank that came here first, would wait for ever."""
    from torch.utils.file_baton import FileBaton

    compiler("sleep 300")
    use_own_scripts()
    torchs_way = subprocess.Popen([sys.executable, "-c", module._COMPILE], env=os.environ | {"DS_ACCELERATOR": "cpu"})
    wait_for(lambda: (tmp_path / "notes").exists())
    torchs_way.kill()
    torchs_way.wait()
    assert not FileBaton(str(extensions / "lock")).try_acquire(), "the lock of the dead is taken for one of the living"
    compiler(":")
    finish([start()])
    assert not (extensions / "lock").exists()


LOAD = """
import os, sys
os.environ["CXX"] = "false"
from rlhf_core.training.prebuild import load_built
if sys.argv[1] == "ours":
    load_built()
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
print("asking", flush=True)
print(ShareMemCommBuilder().load(verbose=False).__file__)
"""


def test_ranks_load_what_is_built_whatever_lock_lies_beside_it(
    extensions: Path, compiler: Callable[[str], None]
) -> None:
    compiler(":")
    finish([start()])
    (extensions / "lock").touch()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"}

    def load(way: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", LOAD, way]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    assert finish([load("ours")])[0].splitlines()[-1] == str(extensions / "deepspeed_shm_comm.so")
    # Negative control: DeepSpeed by itself asks for the lock, and waits.
    waits = load("theirs")
    assert waits.stdout is not None
    wait_for(lambda: waits.stdout.readline() == "asking\n")  # type: ignore[union-attr]
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(3)
    waits.kill()
    waits.communicate()


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def kind_of(error: WorkerError) -> FailureKind:
    """What a rank that ends with it is classified as."""
    outcome = WorkerOutcome(
        role=Role.TRAINER,
        rank=0,
        node="n1",
        time=utc_now(),
        ok=False,
        phase=Phase.SETUP,
        step=0,
        error_type=f"{type(error).__module__}.{type(error).__name__}",
        message=str(error),
    )
    return classify(Evidence(workers=(WorkerEnd(0, "n1", 0, 1, outcome=outcome),))).kind


@pytest.mark.parametrize(
    ("words", "error", "kind"),
    [
        ("shm.cpp:9:10: fatal error: omp.h: No such file or directory", WorkerError, FailureKind.IMPORT_ERROR),
        ("c++: fatal error: Killed signal terminated program cc1plus", WorkerError, FailureKind.HOST_OOM),
        ("/tmp/cc.s: Assembler error: No space left on device", DiskFull, FailureKind.DISK_FULL),
    ],
)
def test_what_the_compiler_said_is_told_and_decides(
    extensions: Path, compiler: Callable[[str], None], words: str, error: type[WorkerError], kind: FailureKind
) -> None:
    compiler(f"echo '{words}' >&2; exit 1")
    with pytest.raises(error) as found:
        prebuild()
    assert (
        str(found.value).splitlines()[0] == f"DeepSpeed's operation deepspeed_shm_comm could not be compiled: {words}"
    )
    assert kind_of(found.value) is kind
    assert names_in(extensions.parent) == [".deepspeed_shm_comm.prebuild"], "nothing half done is left"


def test_a_compilation_has_an_end_and_so_has_waiting_for_one(
    extensions: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may pass: nothing says that it cannot be compiled."""
    compiler("sleep 3071")
    monkeypatch.setattr(module, "BUILD_LIMIT_S", 20.0)
    beats: list[str] = []
    with pytest.raises(BuildTookTooLong, match="was not compiled within 20 s") as late:
        prebuild(beats.append)
    assert kind_of(late.value) is FailureKind.HANG
    assert len(beats) > 20, "it said all the time that it was at work"
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "3071"]]
    holder = start_holder(extensions)
    try:
        monkeypatch.setattr(module, "BUILD_LIMIT_S", -59.0)
        with pytest.raises(BuildTookTooLong, match=r"process 77 on n9 holds .* if it has been stopped, end it"):
            prebuild(beats.append)
    finally:
        holder.kill()
        holder.wait()
    assert beats[-1].startswith("waiting for process 77 on n9")


HOLDER = """
import fcntl, os, sys, time
file = open(os.path.join(os.path.dirname(sys.argv[1]), ".deepspeed_shm_comm.prebuild"), "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("process 77 on n9", end="", file=file, flush=True)
print("holding", flush=True)
time.sleep(600)
"""


def start_holder(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that holds the lock and does nothing."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"holding\n"
    return process


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
