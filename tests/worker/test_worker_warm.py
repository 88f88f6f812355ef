"""Warm spares: one becomes a worker, and none is used where a new process would do something else."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rlhf_core.worker import processes, warm_workers
from rlhf_core.worker.warm_workers import WarmWorkers

GIB = 2**30
PLENTY = (64 * GIB, 64 * GIB)

FAKE_PACKAGE = """
import json, os, sys
from rlhf_core.worker import roles, warm_process
roles.WARM = "builtins:int"
warm_process.WARM = roles.WARM

def become(arguments):
    with open(arguments[0], "w") as file:
        json.dump({"pid": os.getpid(), "arguments": arguments, "environment": dict(os.environ)}, file)
    return 7

orders, answers = (int(text) for text in sys.argv[-2:])
sys.exit(warm_process.wait_for_order(orders, answers, become))
"""
"""A spare without the imports of torch: what is tested here is the hand-over."""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[WarmWorkers]:
    popen = subprocess.Popen

    def start(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        if "spare" in command:
            command = [sys.executable, "-c", FAKE_PACKAGE, *command[-2:]]
        return popen(command, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(warm_workers.subprocess, "Popen", start)
    monkeypatch.setattr(warm_workers, "CHECK_INTERVAL_S", 0.0)
    spares = WarmWorkers(1, said.append, lambda: PLENTY)
    yield spares
    spares.close()


def ready(warm: WarmWorkers) -> int:
    """Keep until a spare has made its imports; its process id."""

    def is_ready() -> bool:
        warm.keep()
        return warm.num_ready == 1

    until(is_ready)
    (pid,) = warm.pids
    return pid


def environment(**changed: str) -> Mapping[str, str]:
    return {**os.environ, **changed}


def test_a_spare_becomes_the_worker_it_is_told_to_be(warm: WarmWorkers, tmp_path: Path) -> None:
    pid = ready(warm)
    warm.prepare_start()
    process = warm.take([str(tmp_path / "said"), "two"], environment(RANK="3"))
    assert process is not None
    assert process.pid == pid
    assert process.wait(30) == 7, "its exit code is that of the worker"
    found = json.loads((tmp_path / "said").read_text())
    assert (found["pid"], found["arguments"]) == (pid, [str(tmp_path / "said"), "two"])
    assert found["environment"] == dict(environment(RANK="3"))
    assert warm.pids == frozenset(), "it is no spare any more"


def kill(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    os.kill(pid, signal.SIGKILL)
    until(lambda: processes.process_state(pid) == "Z")
    return "ended with exit code -9"


def stop(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: processes.process_state(pid) == "T")
    return "in state T"


def change_the_environment(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    return "environment or code have changed"


def change_the_code(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    fake = Path(os.environ["PYTEST_CURRENT_TEST"].split("::")[0]).resolve()
    monkeypatch.setattr(warm_workers.rlhf_core, "__file__", str(fake))
    return "environment or code have changed"


def make_it_deaf(pid: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(warm_workers, "TAKEN", b"something else\n")
    return "did not answer"


@pytest.mark.parametrize("damage", [kill, stop, change_the_environment, change_the_code, make_it_deaf])
def test_a_spare_that_would_differ_from_a_new_process_is_not_used(
    warm: WarmWorkers,
    said: list[str],
    damage: Callable[[int, pytest.MonkeyPatch], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control is the test above: the same spare, undamaged, is used."""
    pid = ready(warm)
    why = damage(pid, monkeypatch)
    warm.prepare_start()
    assert warm.take([str(tmp_path / "said")], environment()) is None
    assert why in " ".join(said)
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_the_exit_of_a_spare_and_of_the_worker_made_from_it_stays_theirs(warm: WarmWorkers, tmp_path: Path) -> None:
    """The thread that collects orphans leaves what was ever a spare alone: it is too old to be spared for its youth."""
    pid = ready(warm)
    assert warm.started == {pid}
    warm.prepare_start()
    worker = warm.take([str(tmp_path / "said")], environment())
    assert worker is not None
    until(lambda: processes.process_state(worker.pid) == "Z")
    processes.reap_orphans(warm.started)
    assert worker.wait() == 7


def test_spares_are_not_asked_for_more_than_once_an_interval(
    warm: WarmWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_workers, "CHECK_INTERVAL_S", 1000.0)
    asked: list[bool] = []
    seldom = WarmWorkers(1, print, lambda: PLENTY)

    def is_wanted() -> bool:
        asked.append(True)
        return False

    for _ in range(3):
        seldom.keep(is_wanted)
    assert asked == [True]
    assert seldom.pids == frozenset()


def test_a_spare_that_still_imports_is_ended_when_workers_start(warm: WarmWorkers) -> None:
    warm.keep()
    (pid,) = warm.pids
    warm.prepare_start()
    if warm.num_ready == 0:
        assert warm.pids == frozenset()
        assert not Path(f"/proc/{pid}").exists()


def test_no_spare_is_started_into_memory_that_the_run_needs(said: list[str]) -> None:
    spares = WarmWorkers(4, said.append, lambda: (4 * GIB, 24 * GIB))
    spares.keep()
    assert spares.pids == frozenset()
    assert said == [], "there may be room later"


def test_spares_are_ended_when_memory_becomes_short(
    warm: WarmWorkers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = ready(warm)
    monkeypatch.setattr(warm, "_memory", lambda: (2 * GIB, 64 * GIB))
    warm.keep()
    assert not Path(f"/proc/{pid}").exists()
    assert "memory is short (2.0 of 64.0 GiB are free)" in said[0]
    monkeypatch.setattr(warm, "_memory", lambda: PLENTY)
    warm.keep()
    assert warm.pids == frozenset(), "not again in this attempt: it would come and go"


def test_spares_that_cannot_import_are_not_tried_for_ever(
    warm: WarmWorkers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAKE_PACKAGE", "raise SystemExit(3)")
    until(lambda: bool(warm.keep() or said))
    assert "ended with exit code 3 before it was ready" in said[0]
    warm.keep()
    assert warm.pids == frozenset()


def test_a_spare_ends_with_its_agent(warm: WarmWorkers) -> None:
    pid = ready(warm)
    warm.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_real_spare_has_imported_everything_and_touched_nothing() -> None:
    """In a process of its own, as it is started."""
    code = (
        "from rlhf_core.training.warm import import_libraries; import_libraries(); import sys, torch;"
        "import torch.distributed as dist;"
        "assert {'deepspeed', 'transformers', 'rlhf_core.training.trainers.run'} <= set(sys.modules);"
        "assert not torch.cuda.is_initialized() and not dist.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_that_touch_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core.errors import WorkerError
    from rlhf_core.training import warm as imports

    monkeypatch.setattr(imports, "load_deepspeed", lambda on_cpu: None)
    monkeypatch.setattr(imports.dist, "is_initialized", lambda: True)
    with pytest.raises(WorkerError, match="have initialised a process group"):
        imports.import_libraries()
