"""Split vLLM engines that are killed while they start; without vLLM itself."""

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe, resource_tracker, shared_memory
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from rank_launcher import make_context, tiny_spec
from safetensors import SafetensorError

from rlhf_core.errors import DiskFull, SamplingProcessKilled
from rlhf_core.machine.shared_names import PREFIX_VARIABLE, SHARED_MEMORY
from rlhf_core.run_dir.run import new_run_id
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.training.rollouts.server import process
from rlhf_core.training.rollouts.vllm import adapter
from rlhf_core.training.rollouts.vllm.processes import starting_in
from rlhf_core.worker.liveness.heartbeat import Beat, SlotFile, memory_folder


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's module that starts the processes."""
    executor = SimpleNamespace(WorkerProc=SimpleNamespace(wait_for_ready=_fail))
    module = ModuleType("vllm.v1.executor")
    module.multiproc_executor = executor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.v1", ModuleType("vllm.v1"))
    monkeypatch.setitem(sys.modules, "vllm.v1.executor", module)
    return executor


def _fail(handles: Sequence[Any]) -> None:
    raise RuntimeError("initialization failed due to an exception in a background process. See stack trace")


@pytest.mark.parametrize("remover", ["next start", "agent"])
def test_shared_memory_of_an_engine_killed_at_its_start_is_removed(
    remover: str, tmp_path: Path, executor: SimpleNamespace
) -> None:
    """vLLM's processes open it by name, and only remove the names once all of them have."""
    slots = SlotFile(new_run_id("toy"), 1, "here", 1, "rollout")
    memory = memory_folder(slots.path)
    assert memory is not None, "the tests run where /dev/shm may be written"
    spec = tiny_spec(rollout={"engine": "vllm", "engines": 1, "vllm": {"tensor_parallel": 2}})
    context = replace(make_context(str(tmp_path), spec, 0, 1), memory=memory)
    scratch = process._scratch(context)
    assert scratch is not None
    with starting_in(scratch):
        prefix, sockets = os.environ[PREFIX_VARIABLE], Path(os.environ["VLLM_RPC_BASE_PATH"])
        assert len(f"{sockets}/{uuid4()}") <= 107, "the longest path of a socket"
        queue = shared_memory.SharedMemory(create=True, size=8)
        opened = shared_memory.SharedMemory(queue.name)
        collectives = SHARED_MEMORY / f"{Path(executor.get_file_store_init_method()).name}-tp:0-[0-1]-cpushm_0"
        collectives.touch()
    assert queue.name.startswith(prefix), "as in the processes that vLLM spawns, see vllm/worker.py"
    assert opened.name == queue.name
    sockets.mkdir()
    (sockets / str(uuid4())).touch()
    resource_tracker.unregister(f"/{queue.name}", "shared_memory")  # the agent kills this helper of Python, too
    for one in (queue, opened):
        one.close()
    foreign = shared_memory.SharedMemory(create=True, size=8)
    try:
        assert (SHARED_MEMORY / queue.name).exists()
        if remover == "agent":
            slots.remove()
            assert not memory.exists()
        else:
            process._scratch(context)
        assert not (SHARED_MEMORY / queue.name).exists()
        assert not collectives.exists()
        assert not sockets.exists()
        assert (SHARED_MEMORY / foreign.name).exists()
    finally:
        foreign.close()
        foreign.unlink()
        slots.remove()
        for left in (SHARED_MEMORY / queue.name, collectives):
            left.unlink(missing_ok=True)
        shutil.rmtree(sockets, ignore_errors=True)


@pytest.mark.parametrize("exit_code", [-9, 1])
def test_an_engine_whose_process_is_killed_at_its_start_ends_by_the_same_signal(
    exit_code: int, tmp_path: Path, executor: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refers to a stack trace, which only a process that raised an error has printed."""
    living, ended = _Process(None), _Process(exit_code)
    signals: list[int] = []
    monkeypatch.setattr(process.os, "kill", lambda pid, number: signals.append(number))

    def start(*_: object) -> None:
        with starting_in(tmp_path):
            executor.WorkerProc.wait_for_ready([SimpleNamespace(proc=one) for one in (living, ended)])

    monkeypatch.setattr(process, "_sampler", start)
    monkeypatch.setattr(process, "_model_folder", lambda context: tmp_path)
    monkeypatch.setattr(process, "load_tokenizer", lambda folder: None)
    context = make_context(str(tmp_path), tiny_spec(rollout={"engine": "transformers", "engines": 1}), 0, 1)
    with pytest.raises(SamplingProcessKilled if exit_code < 0 else RuntimeError):
        process.run_engine(context)
    assert signals == ([signal.SIGKILL] if exit_code < 0 else [])
    assert living.is_killed is (exit_code < 0), "vLLM takes 8 s to end it"
    assert executor.WorkerProc.wait_for_ready is _fail


def test_the_processes_of_an_engine_are_represented_while_it_starts(tmp_path: Path, executor: SimpleNamespace) -> None:
    """A stopped one is then found within ``supervise.suspect_s``, as later, instead of ``supervise.setup_floor_s``."""
    slots = SlotFile(new_run_id("toy"), 1, "here", 1, "rollout")
    seen = []

    def wait(handles: Sequence[Any]) -> list[Any]:
        seen.extend(slots.read(0).represents)
        return list(handles)

    executor.WorkerProc.wait_for_ready = wait
    try:
        with starting_in(tmp_path, Beat(slots.path, 0).represent):
            executor.WorkerProc.wait_for_ready([SimpleNamespace(proc=SimpleNamespace(pid=pid)) for pid in (71, 72)])
    finally:
        slots.remove()
    assert seen == [71, 72]


def test_no_room_for_an_adapter_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library names none, and the disk of the run directory has room."""
    module = ModuleType("vllm.lora.request")
    module.LoRARequest = object  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(adapter, "write_adapter", write)
    with pytest.raises(DiskFull, match=rf"an adapter in {tmp_path}/adapter-.*No space left"):
        adapter.VllmAdapter(LoraSpec()).load(None, [])


class _Process:
    """A process of an engine, alive if it has no exit code."""

    pid = 71

    def __init__(self, exit_code: int | None) -> None:
        self.exitcode = exit_code
        self.is_killed = False
        self._ends = Pipe(duplex=False)
        self.sentinel = self._ends[0].fileno()
        if exit_code is not None:
            self._ends[1].close()

    def join(self) -> None:
        assert self.exitcode is not None

    def kill(self) -> None:
        self.is_killed = True
