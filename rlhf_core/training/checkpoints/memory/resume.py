"""Restart from the nodes' main memory, if it holds a checkpoint at least as new as that on disk."""

import contextlib
import mmap
from collections.abc import Callable, Iterator

from rlhf_core.files.whole import remove_tree
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.checkpoints.background_save import write_files
from rlhf_core.training.checkpoints.direct_save import together
from rlhf_core.training.checkpoints.memory.copies import MemoryCheckpoint
from rlhf_core.training.checkpoints.memory.nodes import CopyDamaged, NodeMemory
from rlhf_core.training.checkpoints.saving import CheckpointPublication
from rlhf_core.training.checkpoints.soundness import spec_hash
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.types import WorkerContext
from rlhf_core.training.worker_events import write_event


def memory_checkpoint(context: WorkerContext, ranks: Ranks, on_disk: int | None) -> CheckpointDir | None:
    """Find the in-memory checkpoint that this start of the workers resumes from; None to use the files.

    A checkpoint that a kill kept from reaching the disk is written there first, as if it had been completed in time. An
    event records the choice, and the reason if the memory was not used. Collective.

    Args:
        on_disk: step of the checkpoint on disk.

    Raises:
        DiskFull, WorkerError: the checkpoint could not be written to disk; raised by every rank.
    """
    if not _may_have_copies(context, on_disk):
        return None
    (without,) = ranks.sum([float(context.memory is None)])  # all ranks: a single node would wait for the others
    if without or context.memory is None:
        return None

    def beat() -> None:
        context.reporter.beat(Phase.SETUP, 0)

    # In stage 0 every rank has the whole optimizer state, of which each has written a part.
    every_state = context.spec.native_trainer.zero_stage == 0
    memory = NodeMemory(context.memory, context.node, ranks, beat, every_state=every_state)
    found = memory.find(spec_hash(context.spec))
    reason = refusal(context, found, on_disk, lambda found: _is_on_disk(context, ranks, found, on_disk))
    if found is None or reason:
        _log_and_record(context, ranks, f"resuming from files: {reason}")
        return None
    step = found.manifest.step
    try:
        num_from_peers = memory.bring(found)
    except CopyDamaged as damage:
        _log_and_record(context, ranks, f"resuming from files: the copy of step {step} in memory is damaged: {damage}")
        return None
    checkpoint = CheckpointDir(context.memory, step)
    if on_disk is None or step > on_disk:
        _bring_to_disk(context, ranks, found, checkpoint, beat)
    from_peers = f"; files from peer nodes: {num_from_peers}" if num_from_peers else ""
    _log_and_record(context, ranks, f"resuming from the copy of step {step} in the memory of the nodes{from_peers}")
    return checkpoint


def _may_have_copies(context: WorkerContext, on_disk: int | None) -> bool:
    """True for a restart in place; with peer copies also for an attempt that resumes from a checkpoint."""
    kind = context.spec.checkpoint.memory
    return kind != "off" if context.restart > 0 else kind == "peer" and on_disk is not None


def refusal(
    context: WorkerContext,
    found: MemoryCheckpoint | None,
    on_disk: int | None,
    is_on_disk: Callable[[MemoryCheckpoint], bool],
) -> str:
    """Reason not to use the checkpoint in memory; empty if there is none.

    Args:
        is_on_disk: whether the checkpoint on disk is identical, byte for byte.
    """
    if found is None:
        return "the nodes have no in-memory copy with a part of every rank"
    step = found.manifest.step
    if on_disk is not None and step < on_disk:
        return f"the copy in memory is of step {step}, the files are of step {on_disk}"
    if context.run_dir.checkpoint(step).root.name in context.damaged:
        return f"the checkpoint of step {step} was found damaged"
    if found.attempt != context.attempt and not is_on_disk(found):
        # The controller chose the checkpoint of this attempt, perhaps an older one: only identical bytes will do.
        return f"the copy in memory is of step {step} of attempt {found.attempt}, not of the checkpoint to resume from"
    return ""


def _is_on_disk(context: WorkerContext, ranks: Ranks, found: MemoryCheckpoint, on_disk: int | None) -> bool:
    """True if the checksums of all files match the checkpoint on disk. Rank 0 checks for all ranks."""

    def is_same() -> bool:
        manifest = None if on_disk is None else context.run_dir.checkpoint(on_disk).manifest()
        return manifest is not None and manifest.files == found.manifest.files

    return ranks.on_first(is_same)


def _bring_to_disk(
    context: WorkerContext, ranks: Ranks, found: MemoryCheckpoint, source: CheckpointDir, beat: Callable[[], None]
) -> None:
    """Finish an interrupted save: every rank writes the files that the same rank number wrote."""
    checkpoint = context.run_dir.checkpoint(source.step)
    publication = CheckpointPublication(context.run_dir, context.spec, ranks.num_ranks, context.attempt)

    def write_own() -> None:
        for name in found.parts[ranks.rank].manifest.files:
            with _mapped(source, name) as data:
                write_files(checkpoint.partial.root, {name: data}, beat)

    def publish() -> None:
        if ranks.is_first:
            publication.publish(checkpoint, found.manifest)

    together(ranks, publication, checkpoint, lambda: remove_tree(checkpoint.partial.root) if ranks.is_first else None)
    together(ranks, publication, checkpoint, write_own)
    together(ranks, publication, checkpoint, publish)


@contextlib.contextmanager
def _mapped(source: CheckpointDir, name: str) -> Iterator[mmap.mmap | bytes]:
    path = source.root / name
    if not path.stat().st_size:
        yield b""
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _log_and_record(context: WorkerContext, ranks: Ranks, message: str) -> None:
    """Write a log line and an event, once for all ranks."""
    ranks.log(message)
    if ranks.is_first:
        write_event(context, "checkpoint", message)
