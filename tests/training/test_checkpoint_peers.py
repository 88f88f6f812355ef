"""Restarts from the copy on a peer after the memory of a node was lost: two ranks, each on its own node.

Supervised training of four steps that saves at 2 and 4. Rank 0 withholds ``COMPLETE`` of step 4, so that only memory
holds that step; a rank is killed at some point of the transfer of step 4, and the memory of its node is lost.
"""

import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import flip_last_bit, launch, make_context, tiny_spec, values
from test_checkpoint_memory import end_after
from test_loop_runs import SUPERVISED, final_state, metrics_of

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import AgentEvent
from rlhf_core.training.checkpoints.memory.copies import MemoryPart, parts_here

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

SPEC = {**SUPERVISED, "checkpoint": {"memory": "peer"}}
STATE = "trainer_state/rank-00001.safetensors"

MOMENTS = ("half sent", "received", "kept")
"""Moments of the transfer at which a rank is killed: the sender in the first, the receiver before the part counts, and
the sender once the parts of both ranks count."""

LOST_AND_DAMAGED = "lost and damaged"
WHENCE = {
    **dict.fromkeys(("half sent", "received"), "files: the nodes have no in-memory copy with a part of every rank"),
    "kept": "the copy of step 4 in the memory of the nodes; files from peer nodes: 1",
    "rank 0 lost": "the copy of step 4 in the memory of the nodes; files from peer nodes: 8",
    "damaged": "the copy of step 4 in the memory of the nodes; files from peer nodes: 1",
    LOST_AND_DAMAGED: f"files: the copy of step 4 in memory is damaged: {STATE} cannot be read: No such file",
    "stale": "files: the nodes have no in-memory copy with a part of every rank",
    "unchecked": "the copy of step 4 in the memory of the nodes; files from peer nodes: 1",
}
"""Copies, and the beginning of what the log says about them after "resuming from"."""


def context_of(rank: int, num_ranks: int, folder: str, name: str, restart: int = 0) -> Any:
    context = make_context(f"{folder}/{name}", tiny_spec(**SPEC), rank, num_ranks, restart)
    return dataclasses.replace(context, node=f"node-{rank}", memory=Path(folder) / f"{name}-memory" / f"node-{rank}")


def kill_at(moment: str, rank: int, memory: Path) -> None:
    """Have one rank killed in the transfer of the second save, and the other one ended as its agent would end it."""
    from rlhf_core.run_dir import checkpoint as checkpoint_dir
    from rlhf_core.training.checkpoints.memory import copies as memory_copies
    from rlhf_core.training.checkpoints.memory import peer_copies, peer_transfer

    killed_here = memory.with_name("killed")
    plain_write, plain_send = checkpoint_dir.write_model, peer_copies.send_part
    plain_publish = memory_copies.MemoryCopy.publish

    def die() -> None:
        killed_here.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def write_complete(path: Path, model: Any) -> None:
        while model.step == 4:
            time.sleep(0.01)  # until this rank is ended
        plain_write(path, model)

    def half(data: Any, chunk_bytes: int) -> Iterator[bytes]:
        yield bytes(data[: len(data) // 2])
        die()

    def send(address: Any, key: bytes, part: MemoryPart, content: Any) -> None:
        if part.manifest.step == 4 and moment == "half sent":
            peer_transfer.chunks = half  # type: ignore[assignment]
        plain_send(address, key, part, content)
        if part.manifest.step == 4 and moment == "kept":
            while not any(found.rank == 0 and found.manifest.step == 4 for found in parts_here(memory)):
                time.sleep(0.01)
            die()

    def publish(copy: memory_copies.MemoryCopy, part: MemoryPart) -> None:
        if copy.folder.name == "peer" and part.manifest.step == 4 and moment == "received":
            die()
        plain_publish(copy, part)

    if rank == 0:
        checkpoint_dir.write_model = write_complete  # type: ignore[assignment]
        memory_copies.MemoryCopy.publish = publish  # type: ignore[method-assign]
    else:
        peer_copies.send_part = send
    victim = 0 if moment == "received" else 1
    if rank != victim:
        threading.Thread(target=end_after, args=(killed_here,), daemon=True).start()


def killed(rank: int, num_ranks: int, folder: str, moment: str) -> None:
    from rlhf_core.training.trainers.run import run_trainer

    context = context_of(rank, num_ranks, folder, moment)
    kill_at(moment, rank, context.memory)
    run_trainer(context)


def resumed(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    """Scenario: the run that was never killed, those that were, and the next attempts of one of them."""
    from rlhf_core.training.checkpoints.memory import nodes as node_memory
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.trainers.run import train_run

    ranks = init_process_group(context_of(rank, num_ranks, folder, "straight"))
    results = {"straight": str(train_run(context_of(rank, num_ranks, folder, "straight"), ranks))}
    for name in WHENCE:
        with pytest.MonkeyPatch.context() as patch:
            if name == "unchecked":
                patch.setattr(node_memory.NodeMemory, "_damage", is_missing)
                patch.setattr(node_memory, "receive_file", receive_unchecked)
            results[name] = str(train_run(context_of(rank, num_ranks, folder, name, restart=1), ranks))
    for attempt, step in ((2, 4), (3, 2)):
        context = dataclasses.replace(context_of(rank, num_ranks, folder, "kept"), attempt=attempt)
        chosen = context.placement.model_copy(update={"resume_checkpoint": f"step-{step:06d}"})
        results[f"attempt {attempt}"] = str(train_run(dataclasses.replace(context, placement=chosen), ranks))
    leave_process_group(ranks)
    return results


def is_missing(memory: Any, place: str, name: str, expected: Any) -> str:
    """Replacement for the checksum in the negative control."""
    return "" if (memory._folder / place / name).exists() else "cannot be read: No such file"


def receive_unchecked(pieces: Any, path: Path, expected: Any) -> None:
    """Replacement for the receiver in the negative control, without checks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(bytes, pieces)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of runs that were killed, lost or damaged their copies, and resumed."""
    folder = tmp_path_factory.mktemp("peers")
    for moment in MOMENTS:
        ended = launch(killed, 2, folder / f"{moment}-launch", folder=str(folder), moment=moment)
        assert -signal.SIGKILL in [result.exit_code for result in ended], ended
    for variant in set(WHENCE) - set(MOMENTS):
        for part in ("", "-memory"):
            shutil.copytree(folder / f"kept{part}", folder / f"{variant}{part}")
    for name in WHENCE:
        spoil(name, folder / f"{name}-memory")
    done = dict.fromkeys(["straight", *WHENCE, "attempt 2", "attempt 3"], "done")
    for result in values(launch(resumed, 2, folder / "resumed", folder=str(folder))):
        assert result == done
    return folder


def spoil(name: str, memory: Path) -> None:
    """Erase the memory of a node, or damage its contents."""
    lost = {"rank 0 lost": "node-0", "damaged": ""}.get(name, "node-1")
    if lost:
        shutil.rmtree(memory / lost)
    if name == "damaged":
        flip_last_bit(memory / "node-1" / STATE)
    if name in (LOST_AND_DAMAGED, "unchecked"):
        flip_last_bit(memory / "node-0" / "peer" / STATE)
    if name == "stale":
        path = memory / "node-0" / "peer" / "parts" / "rank-00001.json"
        content = path.read_text(encoding="utf-8")
        assert ' 4",' in content
        path.write_text(content.replace(' 4",', ' 2",').replace('"step": 4', '"step": 2'), encoding="utf-8")


@pytest.mark.parametrize("name", WHENCE)
def test_a_run_that_lost_the_memory_of_a_node_goes_on_as_if_nothing_had_happened(folder: Path, name: str) -> None:
    """The result is bitwise equal, from the peer's copy if it is valid, otherwise from the files, with the reason.

    The control runs without checksums: it resumes from a damaged copy, and ends in a different state.
    """
    (event,) = events(folder, name, 1, 1)
    assert event.startswith(f"resuming from {WHENCE[name]}"), event
    assert metrics_of(folder, name) | metrics_of(folder, name, restart=1) == metrics_of(folder, "straight")
    is_same = final_state(folder, name, 4) == final_state(folder, "straight", 4)
    assert is_same is (name != "unchecked")


def test_the_next_attempt_goes_on_from_memory_only_where_it_has_what_the_controller_chose(folder: Path) -> None:
    """The checksums must be those of the checkpoint on disk; a run that was sent back to step 2 starts there."""
    assert events(folder, "kept", 2, 0) == ["resuming from the copy of step 4 in the memory of the nodes"]
    assert events(folder, "kept", 3, 0) == [
        "resuming from files: the copy in memory is of step 4 of attempt 1, not of the checkpoint to resume from"
    ]
    assert final_state(folder, "kept", 4) == final_state(folder, "straight", 4)


def events(folder: Path, name: str, attempt: int, restart: int) -> list[str]:
    start = RunDir(folder / name).attempt(attempt).restart(restart)
    return [event.message for event in read_models(start.worker_events("trainer", "node-0", 0), AgentEvent)]
