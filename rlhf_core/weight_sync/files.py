"""A file system that trainer and engines share: the fallback for processes that cannot reach each other otherwise.

Every version is a folder with the row of bytes in one file, and ``COMPLETE``, written last, with the checksums of the
buckets.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlhf_core.errors import DiskFull, WeightSyncFailed
from rlhf_core.files.lookups import is_there
from rlhf_core.files.reading import open_regular
from rlhf_core.files.whole import is_disk_full, replacing
from rlhf_core.schemas.weight_sync import Chain, Manifest, Offer, Transport
from rlhf_core.weight_sync.base import Beat, Weights
from rlhf_core.weight_sync.layout import WHOLE, Share, buckets_of, checksum, packed

WEIGHTS, COMPLETE, ABANDONED = "weights", "COMPLETE", "ABANDONED"
POLL_INTERVAL_S = 0.05


class FilesOutgoing:
    """The trainer's end."""

    def __init__(self, name: str, folder: Path, *, stall_timeout_s: float = 300.0) -> None:
        """Write nothing yet.

        Args:
            name: name of this process, for messages.
            folder: its own folder for versions; the two newest are kept.
            stall_timeout_s: longest time without growth of the file before an engine gives up.
        """
        self.name, self._folder, self._timeout_s = name, folder, stall_timeout_s

    def offer(self, manifest: Manifest, receivers: Sequence[str], share: Share) -> Offer:
        """Announce a version; see :class:`rlhf_core.weight_sync.base.Outgoing`.

        Raises:
            DiskFull, WeightSyncFailed: its folder cannot be created.
        """
        path = self._path(manifest.version)
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            for old in sorted(self._folder.iterdir(), key=lambda one: one.stat().st_mtime)[:-2]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise self._refused(f"{path} cannot be made", error) from error
        return Offer(
            transport=Transport.FILES,
            manifest=manifest,
            receiver=receivers[0],
            chains=(Chain(sender=self.name, receivers=tuple(receivers)),),
            path=str(path),
            stall_timeout_s=self._timeout_s,
        )

    def send(self, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        """Write a version; see :class:`rlhf_core.weight_sync.base.Outgoing`.

        Raises:
            DiskFull: the file system has no room for it.
            WeightSyncFailed: also if the file system accepts no more data for another reason.
        """
        path = self._path(manifest.version)
        try:
            found = self._written(path / WEIGHTS, manifest, weights, beat)
            with replacing(path / COMPLETE) as temporary:
                temporary.write_text(json.dumps([one.hex() for one in found]))
        except BaseException as error:
            with contextlib.suppress(OSError):  # without it, engines wait for stall_timeout_s
                (path / ABANDONED).touch()
            if isinstance(error, OSError):
                raise self._refused(f"{path} cannot be written", error) from error
            raise
        return found

    def _refused(self, what: str, error: OSError) -> DiskFull | WeightSyncFailed:
        """Error of a sync; a full disk remains full, whereas another attempt may help otherwise."""
        text = f"{what}: {error}"
        return DiskFull(text) if is_disk_full(error) else WeightSyncFailed(text, self.name)

    def _written(self, file: Path, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        buffer = torch.empty(manifest.bucket_bytes, dtype=torch.uint8)
        found = []
        with file.open("wb") as opened:
            for _, bucket in packed(manifest, weights, WHOLE, lambda _: buffer):
                opened.write(bucket.numpy().data)
                found.append(checksum(bucket))
                beat()
        return found

    def _path(self, version: int) -> Path:
        return self._folder / f"{version:08d}"

    def reset(self) -> None:
        """Do nothing: engines keep nothing."""

    def close(self) -> None:
        """Remove the versions."""
        shutil.rmtree(self._folder, ignore_errors=True)


class FilesIncoming:
    """An engine's end."""

    def connect(self, offer: Offer) -> None:
        """Do nothing: :meth:`fill` waits for the trainer."""

    def fill(self, offer: Offer, row: Tensor, beat: Beat) -> list[bytes]:
        """Read a version; see :class:`rlhf_core.weight_sync.base.Incoming`."""
        path = Path(offer.path)
        _await_complete(offer, path, beat)
        found = []
        try:
            expected = [bytes.fromhex(text) for text in json.loads((path / COMPLETE).read_bytes())]
            with open_regular(path / WEIGHTS) as opened:
                for bucket in buckets_of(offer.manifest, row):
                    if opened.readinto(bucket.numpy().data) < bucket.numel():
                        break  # what was in memory before may be what is missing
                    found.append(checksum(bucket))
                    beat()
        except (OSError, ValueError) as error:
            raise WeightSyncFailed(f"{path} cannot be read: {error}", offer.sender) from error
        if found != expected:
            raise WeightSyncFailed(
                f"version {offer.manifest.version} in {path} is damaged; send it again", offer.sender
            )
        return found


def _await_complete(offer: Offer, path: Path, beat: Beat) -> None:
    seen = 0
    deadline = time.monotonic() + offer.stall_timeout_s
    while not is_there(path / COMPLETE):
        if is_there(path / ABANDONED) or not is_there(path):
            raise WeightSyncFailed(f"{offer.sender} gave up version {offer.manifest.version}", offer.sender)
        found = _size_of(path / WEIGHTS)
        if found != seen:
            seen, deadline = found, time.monotonic() + offer.stall_timeout_s
        if time.monotonic() > deadline:
            raise WeightSyncFailed(
                f"{offer.sender} wrote nothing to {path} for {offer.stall_timeout_s:g} s", offer.sender
            )
        beat()
        time.sleep(POLL_INTERVAL_S)


def _size_of(file: Path) -> int:
    """Bytes written so far; 0 before the first. An NFS client asks for the size of a file when it is opened."""
    with contextlib.suppress(FileNotFoundError), open_regular(file) as opened:
        return os.fstat(opened.fileno()).st_size
    return 0
