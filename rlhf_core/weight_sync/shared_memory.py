"""Shared memory, for engines on the trainer's host: the trainer writes each bucket once, and every engine copies it.

The file is in an in-memory file system and is reused for every version. The row of bytes is preceded by a table: the
version, the number of buckets written, and their checksums. The trainer holds a lock on a second file, which the kernel
releases when the trainer dies: an engine that waits for the next bucket and gets the lock knows that it has.
"""

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.files.private import FILE_MODE
from rlhf_core.schemas.weight_sync import Chain, Manifest, Offer, Transport
from rlhf_core.weight_sync.base import Beat, Weights
from rlhf_core.weight_sync.layout import WHOLE, Share, buckets_of, checksum, packed

POLL_INTERVAL_S = 0.001
LOCK_TIMEOUT_S = 1.0
ABANDONED = -1
"""Number of buckets in the table of an abandoned version."""

_VERSION, _BUCKETS = 0, 1
_TABLE_BYTES = 16


class _Mapping:
    """The file, mapped once for all versions: a new mapping faults in each page at its first use, which takes longer
    than the copy."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)
        self._identity: tuple[int, int] | None = None

    def bytes_of(self, file: int, size: int) -> Tensor:
        """The first ``size`` bytes of an open file.

        Raises:
            ValueError: it is shorter.
        """
        status = os.fstat(file)
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or len(self._whole) < size:
            self._whole = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            self._identity = identity
        return self._whole[:size]


class _Area:
    """One version in a mapped file."""

    def __init__(self, mapping: _Mapping, file: int, manifest: Manifest) -> None:
        """Raises:
        ValueError: the file has no room for the version.
        """
        table, begin = _ends(manifest)
        whole = mapping.bytes_of(file, begin + manifest.total_bytes)
        self.state = whole[:_TABLE_BYTES].view(torch.int64)
        self.checksums = whole[_TABLE_BYTES:table].view(-1, 16)
        self.row = whole[begin:]


def _ends(manifest: Manifest) -> tuple[int, int]:
    """Offsets of the end of the table and of the row in bytes; the row begins on a page boundary."""
    table = _TABLE_BYTES + 16 * manifest.num_buckets
    return table, -(-table // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryOutgoing:
    """The trainer's end."""

    def __init__(self, name: str, *, folder: Path, stall_timeout_s: float = 60.0) -> None:
        """Take over the file of an earlier process of this name, or create it.

        Args:
            name: name of this process: of its file, and for messages.
            folder: folder in an in-memory file system, visible to all engines.
            stall_timeout_s: longest wait of an engine for the next bucket.

        Raises:
            WeightSyncFailed: another process of this name holds the file.
        """
        self.name, self._timeout_s = name, stall_timeout_s
        self._path = folder / f"rlhf-weights-{name}"
        self._lock = os.open(_lock_path(self._path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            _take(self._lock)
        except OSError as error:
            os.close(self._lock)
            raise WeightSyncFailed(f"another process sends weights as {name} ({self._path})", name) from error
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        self._mapping = _Mapping()
        self._area: _Area | None = None

    def offer(self, manifest: Manifest, receivers: Sequence[str], share: Share) -> Offer:
        """Announce a version; see :class:`rlhf_core.weight_sync.base.Outgoing`.

        Raises:
            WeightSyncFailed: there is not enough memory.
        """
        self._allocate(_ends(manifest)[1] + manifest.total_bytes)
        self._area = _Area(self._mapping, self._file, manifest)
        self._area.state[_BUCKETS] = 0
        self._area.state[_VERSION] = manifest.version
        return Offer(
            transport=Transport.SHARED_MEMORY,
            manifest=manifest,
            receiver=receivers[0],
            chains=(Chain(sender=self.name, receivers=tuple(receivers)),),
            path=str(self._path),
            stall_timeout_s=self._timeout_s,
        )

    def _allocate(self, size: int) -> None:
        if os.fstat(self._file).st_size >= size:
            return
        try:
            # All of it now: a missing page would later kill this process.
            os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            raise WeightSyncFailed(
                f"{self._path.parent} has no room for {size / 1e9:.3g} GB of weights: {error.strerror}; enlarge it, or "
                "set rollout.sync.transport=broadcast",
                self.name,
            ) from error

    def send(self, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        """Write a version, packed in place; see :class:`rlhf_core.weight_sync.base.Outgoing`."""
        area = self._area
        assert area is not None, "offer before send"
        buckets = list(buckets_of(manifest, area.row))
        found = []
        try:
            for index, bucket in packed(manifest, weights, WHOLE, buckets.__getitem__):
                found.append(checksum(bucket))
                area.checksums[index] = torch.frombuffer(bytearray(found[-1]), dtype=torch.uint8)
                area.state[_BUCKETS] = index + 1
                beat()
        except BaseException:
            area.state[_BUCKETS] = ABANDONED
            raise
        return found

    def reset(self) -> None:
        """Do nothing: engines keep nothing."""

    def close(self) -> None:
        """Remove the file; its memory is freed when the last engine unmaps it."""
        self._area, self._mapping = None, _Mapping()
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        os.close(self._lock)  # its file stays: a lock on a removed file would not exclude a successor


class SharedMemoryIncoming:
    """An engine's end."""

    def __init__(self) -> None:
        """Map nothing yet."""
        self._mapping = _Mapping()

    def connect(self, offer: Offer) -> None:
        """Do nothing: the file is opened for each version."""

    def fill(self, offer: Offer, row: Tensor, beat: Beat) -> list[bytes]:
        """Copy a version from the file; see :class:`rlhf_core.weight_sync.base.Incoming`."""
        path = Path(offer.path)
        with contextlib.ExitStack() as opened:
            try:
                file, lock = (os.open(one, os.O_RDWR | os.O_CLOEXEC) for one in (path, _lock_path(path)))
            except OSError as error:
                raise WeightSyncFailed(
                    f"{path} cannot be opened ({error.strerror}); other hosts need another transport", offer.sender
                ) from error
            opened.callback(os.close, file)
            opened.callback(os.close, lock)
            try:
                area = _Area(self._mapping, file, offer.manifest)
            except ValueError as error:
                raise WeightSyncFailed(f"{path} is shorter than its version", offer.sender) from error
            return self._copied(offer, area, lock, row, beat)

    def _copied(self, offer: Offer, area: _Area, lock: int, row: Tensor, beat: Beat) -> list[bytes]:
        found = []
        source = list(buckets_of(offer.manifest, area.row))
        for index, bucket in enumerate(buckets_of(offer.manifest, row)):
            self._wait(offer, area, lock, index)
            bucket.copy_(source[index])
            found.append(checksum(bucket))
            if bytes(area.checksums[index].tolist()) != found[-1]:
                raise WeightSyncFailed(
                    f"bucket {index} of version {offer.manifest.version} is damaged in {offer.path}; send it again",
                    offer.sender,
                )
            beat()
        return found

    def _wait(self, offer: Offer, area: _Area, lock: int, index: int) -> None:
        deadline = time.monotonic() + offer.stall_timeout_s
        while True:
            version, num_written = area.state.tolist()
            if version != offer.manifest.version or num_written == ABANDONED:
                raise WeightSyncFailed(f"{offer.sender} gave up version {offer.manifest.version}", offer.sender)
            if num_written > index:
                return
            if _is_free(lock):
                raise WeightSyncFailed(f"{offer.sender} died after {num_written} buckets", offer.sender)
            if time.monotonic() > deadline:
                raise WeightSyncFailed(f"{offer.sender} wrote nothing for {offer.stall_timeout_s:g} s", offer.sender)
            time.sleep(POLL_INTERVAL_S)


def _lock_path(path: Path) -> Path:
    # A separate file: a process loses its locks on a file when it closes any descriptor of it, and a mapping has one.
    return path.with_name(f"{path.name}.lock")


def _take(lock: int) -> None:
    """Take the lock; an engine that tests it holds it for a moment."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_INTERVAL_S)


def _is_free(lock: int) -> bool:
    """True if no other process holds the lock."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.lockf(lock, fcntl.LOCK_UN)
    return True
