"""Checkpoints of training: written atomically, verified before use.

    checkpoints/step-000040/
        model/                      weights, configuration and tokenizer, as Hugging Face expects them (rank 0)
        critic/                     weights of a value model trained alongside the policy (rank 0)
        trainer_state/rank-00000.safetensors
                                    progress, optimizer share (by parameter, see ``trainers.shares``) and random number
                                    generators of one rank
        trainer_state/settings.json settings of the run, to name differences when it is resumed (rank 0)
        COMPLETE                    checksums of all of the above, written last

A checkpoint is written under a temporary name, and renamed once every rank has written its part and ``COMPLETE``
exists. A failure before that leaves earlier checkpoints untouched.

The step waits for a copy in main memory (``snapshot.py``); a thread of each rank writes it (``background_save.py``).
At most one is in progress. Without room for the copy, or with ``checkpoint.background`` off, the step waits until the
checkpoint is complete.
"""

import functools
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import DiskFull, FileSystemStalled
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checkpoint_files import FileChecksum
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import size
from rlhf_core.training.checkpoints.background_save import BackgroundSave, Content
from rlhf_core.training.checkpoints.direct_save import DirectSave
from rlhf_core.training.checkpoints.host_buffers import HostBuffers
from rlhf_core.training.checkpoints.memory.copies import MemoryCopy, MemoryPart
from rlhf_core.training.checkpoints.memory.peer_copies import PeerCopies
from rlhf_core.training.checkpoints.saving import CheckpointPart, CheckpointPublication
from rlhf_core.training.checkpoints.snapshot import Snapshot, can_be_snapshot, model_texts, tokenizer_texts
from rlhf_core.training.checkpoints.soundness import initial_folder, settings_file
from rlhf_core.training.checkpoints.state import Progress, random_state, state_file
from rlhf_core.training.distributed import Ranks, collective_timeout, own_line
from rlhf_core.training.models.adapters import has_adapter
from rlhf_core.training.models.gathering import whole_bytes
from rlhf_core.training.models.tensor_files import flattened

LEAVE_S = 5.0
"""Time for which a process ending with an error waits for a checkpoint without progress, in seconds."""

SMALL_FILES_BYTES = 1 << 20
"""Bytes allowed for configuration, manifest and a small tokenizer."""


class CheckpointWriter:
    """Saves the checkpoints of one run. All ranks call its methods at the same steps."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        beat: Callable[[], None],
        attempt: int,
        memory: MemoryCopy | None = None,
        peer: PeerCopies | None = None,
    ) -> None:
        """Create a writer. Collective.

        Args:
            beat: called on progress while the step waits.
            attempt: attempt of the run that writes; one that a newer attempt has superseded publishes nothing.
            memory: storage in which the snapshot outlives this process; None if it need not.
            peer: copies the snapshot to another node; None if not needed.
        """
        self._publication = CheckpointPublication(run_dir, spec, ranks.num_ranks, attempt)
        self._direct = DirectSave(ranks, tokenizer, self._publication, beat, initial_folder(spec, run_dir))
        self._run_dir = run_dir
        self._spec = spec
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._beat = beat
        self._attempt = attempt
        self._memory = memory
        self._peer = peer
        self._hosts = ranks.gather(socket.gethostname())
        self._buffers = HostBuffers(None if memory is None else memory.folder, ranks.device)
        # Unique to this writer: the store may have served another one.
        self._topic = f"checkpoint/{ranks.from_first(secrets.token_hex(8))}"
        self._num_saves = 0
        self._texts: dict[str, bytes] = {}
        self._on_its_way: BackgroundSave | None = None
        self._write_s = 0.0

    # -----------------------------------------------------------------------------------------------------------------
    # For the step

    def begin(
        self,
        progress: Progress,
        model: PreTrainedModel,
        state: Mapping[str, Any],
        critic: nn.Module | None = None,
    ) -> CheckpointDir:
        """Take a snapshot and write it in the background; first wait for the previous checkpoint.

        Checkpoints that need not be kept are removed once it is complete.

        Args:
            progress: progress of training.
            model: the model, whose weights rank 0 writes, gathered from all ranks if they are split.
            state: of this rank: its ``Engine.state`` as ``engine``, that of a value model as ``critic``, and its
                completions for steps that have not run yet as ``in_flight`` (``trainers/in_flight.py``).
            critic: the value model, likewise.

        Returns:
            The folder that the checkpoint will have once complete.

        Raises:
            DiskFull: there is no room, by the estimate beforehand or while writing. Raised by every rank; the partial
                checkpoint is removed, older ones are untouched.
            WorkerError: a rank could not write for another reason, or a newer attempt has superseded this one. Raised
                by every rank.
        """
        self.finish()
        checkpoint = self._run_dir.checkpoint(progress.step)
        own = {"progress": progress.model_dump(mode="json"), "random": random_state(self._ranks.device)}
        part = CheckpointPart(progress, checkpoint, model, critic, {**own, **state})
        if self._ranks.is_first:
            self._remove_leftovers()
        snapshot = self._snapshot(part)
        if self._has_room(part, has_snapshot=snapshot is not None) and snapshot is not None:
            self._write_in_background(part, snapshot)
        else:
            self._direct.write(part)
        return checkpoint

    def finish(self) -> None:
        """Wait for the checkpoint in progress, if any.

        Raises:
            DiskFull, WorkerError: as in :meth:`begin`, for that checkpoint.
        """
        save = self._on_its_way
        if save is None:
            return
        save.wait(self._beat)
        self._write_s += save.take_seconds()
        self._on_its_way = None
        save.require_complete()

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written in the background."""
        return self._on_its_way is not None and not self._on_its_way.is_over

    def close(self) -> None:
        """Wait as :meth:`finish` does, and stop receiving from other nodes."""
        self.finish()
        if self._peer is not None:
            self._peer.close()

    def leave(self) -> None:
        """Let a checkpoint in progress finish, if it can, after an error that ends this process."""
        if self._on_its_way is not None:
            self._on_its_way.leave(LEAVE_S)

    def take_write_s(self) -> float:
        """Time spent writing checkpoints in the background since the last call, in seconds; a checkpoint counts once it
        is complete."""
        save = self._on_its_way
        if save is not None and save.is_over:
            self._write_s += save.take_seconds()
        found, self._write_s = self._write_s, 0.0
        return found

    def has_failed(self) -> bool:
        """True if the checkpoint in progress has failed, in which case all ranks have to call :meth:`finish`. Never
        waits.

        Raises:
            FileSystemStalled: writing has made no progress for ``supervise.checkpoint_floor_s``.
        """
        save = self._on_its_way
        if save is None:
            return False
        longest_s = self._spec.supervise.checkpoint_floor_s
        if save.stands_still_s > longest_s:
            raise FileSystemStalled(
                f"checkpoint {save.step} is written in the background, and nothing of it was written for "
                f"{save.stands_still_s:.0f} s (expected: for at most supervise.checkpoint_floor_s = {longest_s:g} s): "
                f"the file system of {self._run_dir.checkpoints_dir} does not respond"
            )
        return save.has_failed

    # -----------------------------------------------------------------------------------------------------------------
    # Room

    def _remove_leftovers(self) -> None:
        """Remove leftovers of interrupted saves and removals of checkpoints; no other process writes here. Those of
        whole branches that were put aside are left to the site's daemon: they may take longer than a step."""
        for leftover in self._run_dir.leftovers():
            if leftover.name.lstrip(".").startswith("step-"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _snapshot(self, part: CheckpointPart) -> Snapshot | None:
        """Lay out this rank's files and reserve memory for them; None if the step has to wait for the disk."""
        if self._memory is not None:
            self._memory.invalidate()
        if not self._is_in_background(part.model):
            return None
        name = state_file(part.checkpoint, self._ranks.rank).relative_to(part.checkpoint.root).as_posix()
        snapshot = Snapshot(self._ranks, name, part.state, part.weights, self._buffers.sizes)
        return snapshot if self._reserve(snapshot.sizes) else None

    def _reserve(self, sizes: Mapping[str, int]) -> bool:
        """Reserve memory for the files of a snapshot; False if the ranks of this node need more than there is.
        Collective."""
        # Before anything is allocated: the ranks of a node see the same free memory.
        own, available = self._buffers.num_missing(sizes), self._buffers.num_available()
        of_ranks = zip(self._ranks.gather_numbers([own]), self._hosts, strict=True)
        on_node = sum(missing for (missing,), host in of_ranks if host == self._hosts[self._ranks.rank])
        return on_node <= available and self._buffers.reserve(sizes)

    def _is_in_background(self, model: PreTrainedModel) -> bool:
        """True if a thread pays off: an adapter is written in less time than a thread costs."""
        return self._spec.checkpoint.background and can_be_snapshot(model) and not has_adapter(model)

    def _has_room(self, part: CheckpointPart, *, has_snapshot: bool) -> bool:
        """True if there is room on the disk and, for the snapshots of all ranks, in memory."""
        needed = sum(tensor.nbytes for tensor in flattened(part.state)[0].values()) + SMALL_FILES_BYTES
        if self._ranks.is_first:
            needed += sum(whole_bytes(model) + SMALL_FILES_BYTES for model in part.weights.values())
        folder = self._run_dir.checkpoints_dir  # which may be a link to another file system
        folder = folder if folder.exists() else self._run_dir.root
        free = shutil.disk_usage(folder).free if self._ranks.is_first else 0
        needed_by_all, free_for_all, without = self._ranks.sum([needed, free, float(not has_snapshot)])
        if needed_by_all > free_for_all:
            raise DiskFull(
                f"no room for the checkpoint of step {part.progress.step}: it needs about {size(needed_by_all)}, "
                f"{folder} has {size(free_for_all)} free. Older checkpoints are untouched; make room, "
                "then resume the run"
            )
        if without and self._spec.checkpoint.background and not has_adapter(part.model):
            self._ranks.log(
                f"{without:.0f} ranks lack main memory for a snapshot of their state, or convert weights for the disk: "
                "the step waits until the checkpoint is written"
            )
        return not without

    # -----------------------------------------------------------------------------------------------------------------
    # In the background

    def _write_in_background(self, part: CheckpointPart, snapshot: Snapshot) -> None:
        snapshot.fill(self._buffers, self._beat)
        content: Content = {name: self._buffers[name] for name in snapshot.sizes}
        if self._ranks.is_first:
            content = {**content, **self._small_files(part)}
        self._num_saves += 1
        self._on_its_way = BackgroundSave(
            part,
            content,
            self._ranks,
            self._publication,
            f"{self._topic}/{self._num_saves}",
            # As long as a collective: longer than the agent takes to detect a rank that never arrives.
            collective_timeout(self._spec.supervise).total_seconds(),
            keep=functools.partial(self._keep_in_memory, part, content),
            release=self._finish_copy,
        )

    def _small_files(self, part: CheckpointPart) -> dict[str, bytes]:
        checkpoint, folder = part.checkpoint, part.checkpoint.model.name
        if not self._texts:  # built once: some are large, and they do not change
            self._texts = {f"{folder}/{name}": text for name, text in tokenizer_texts(self._tokenizer).items()}
            settings = settings_file(checkpoint).relative_to(checkpoint.root).as_posix()
            self._texts[settings] = self._publication.settings()
        return self._texts | {f"{folder}/{name}": text for name, text in model_texts(part.model).items()}

    def _keep_in_memory(self, part: CheckpointPart, content: Content, files: dict[str, FileChecksum]) -> None:
        """Publish the snapshot as an in-memory copy; if that fails, a restart reads the disk."""
        if self._memory is None:
            return
        own = MemoryPart(
            save=f"{self._topic} {part.progress.step}",
            attempt=self._attempt,
            rank=self._ranks.rank,
            manifest=self._publication.manifest(part.progress, files),
        )
        try:
            self._memory.keep(own, content)
        except OSError as error:
            own_line(f"no copy of {part.checkpoint.root.name} in memory: {error}")
        if self._peer is not None:
            self._peer.begin(own, content)

    def _finish_copy(self) -> None:
        """Wait until the copy is on another node; afterwards the buffers may change."""
        if self._peer is not None:
            self._peer.finish()
