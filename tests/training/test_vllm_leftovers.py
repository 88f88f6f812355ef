"""What a split vLLM engine leaves on its node if it is killed while it starts; without vLLM itself."""

import os
import sys
from dataclasses import replace
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rank_launcher import make_context, tiny_spec

from rlhf_core.machine.shared_names import PREFIX_VARIABLE, SHARED_MEMORY
from rlhf_core.run_dir.run import new_run_id
from rlhf_core.training.rollouts.server import process
from rlhf_core.training.rollouts.vllm.processes import starting_in
from rlhf_core.worker.liveness.heartbeat import SlotFile, memory_folder


@pytest.mark.parametrize("remover", ["next start", "agent"])
def test_shared_memory_of_an_engine_killed_at_its_start_is_removed(
    remover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's processes open it by name, and only remove the names once all of them have."""
    executor = SimpleNamespace()
    module = ModuleType("vllm.v1.executor")
    module.multiproc_executor = executor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.v1", ModuleType("vllm.v1"))
    monkeypatch.setitem(sys.modules, "vllm.v1.executor", module)
    slots = SlotFile(new_run_id("toy"), 1, "here", 1, "rollout")
    memory = memory_folder(slots.path)
    assert memory is not None, "the tests run where /dev/shm may be written"
    spec = tiny_spec(rollout={"engine": "vllm", "engines": 1, "vllm": {"tensor_parallel": 2}})
    context = replace(make_context(str(tmp_path), spec, 0, 1), memory=memory)
    scratch = process._scratch(context)
    assert scratch is not None
    with starting_in(scratch):
        prefix = os.environ[PREFIX_VARIABLE]
        queue = shared_memory.SharedMemory(create=True, size=8)
        opened = shared_memory.SharedMemory(queue.name)
        collectives = SHARED_MEMORY / f"{Path(executor.get_file_store_init_method()).name}-tp:0-[0-1]-cpushm_0"
        collectives.touch()
    assert queue.name.startswith(prefix), "as in the processes that vLLM spawns, see vllm/worker.py"
    assert opened.name == queue.name
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
        assert (SHARED_MEMORY / foreign.name).exists()
    finally:
        foreign.close()
        foreign.unlink()
        slots.remove()
        for left in (SHARED_MEMORY / queue.name, collectives):
            left.unlink(missing_ok=True)
