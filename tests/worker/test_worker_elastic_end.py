"""End of workers that torch elastic has started, if one of them cannot be killed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from process_tools import until

pytest.importorskip("torch")

from torch.distributed.elastic.agent.server.api import WorkerSpec

from rlhf_core.run_dir.run import RunDir
from rlhf_core.worker import processes
from rlhf_core.worker.groups import elastic

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def workers() -> Iterator[dict[int, SimpleNamespace]]:
    """Elastic's handles of two workers."""
    started = [subprocess.Popen(SLEEP, start_new_session=True) for _ in range(2)]
    yield {local_rank: SimpleNamespace(proc=process) for local_rank, process in enumerate(started)}
    for process in started:
        process.kill()
        process.wait(60)


def test_a_worker_that_is_blocked_in_the_kernel_is_left_behind(
    workers: dict[int, SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of torch wait for every worker that is left to them, without a limit."""
    blocked = workers[1].proc.pid
    kill = processes.kill_group
    monkeypatch.setattr(processes, "kill_group", lambda pid: kill(pid) if pid != blocked else None)
    monkeypatch.setattr(elastic, "CLOSE_TIMEOUT_S", 1.0)
    start = elastic.ElasticStart("a start", "", (), RunDir(tmp_path).attempt(1).restart(0))
    spec = WorkerSpec("trainer", 2, elastic._KnownNodes(start, 0, 1), entrypoint=sys.executable)
    agent = elastic._Elastic(spec, lambda: False)
    left_to_torch: list[int] = []
    agent._pcontext = SimpleNamespace(  # type: ignore[assignment]
        subprocess_handlers=workers, close=lambda *_: left_to_torch.extend(one.proc.pid for one in workers.values())
    )
    ended = workers[0].proc
    agent.close()
    assert left_to_torch == [ended.pid]
    until(lambda: ended.poll() is not None)
    assert processes.process_state(blocked) != "-"
