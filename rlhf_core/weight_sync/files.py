"""A file system that trainer and engines share: the fallback for processes that cannot reach each other otherwise.

Every version is a folder of safetensors files, which engines can also load by their own means, and ``COMPLETE``,
written last, with the same bucket checksums that the weights have on every other transport.
"""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.files.whole import write_text
from rlhf_core.schemas.weight_sync import Chain, Manifest, Offer, Transport
from rlhf_core.weight_sync.base import Beat, Weights
from rlhf_core.weight_sync.layout import WHOLE, Share, buckets_of, checksum, packed, tensors_of

COMPLETE, ABANDONED = "COMPLETE", "ABANDONED"
SHARD_BYTES = 1 << 30
"""Size of a file; the trainer holds one file in main memory."""
POLL_INTERVAL_S = 0.05


class FilesOutgoing:
    """The trainer's end."""

    def __init__(self, name: str, folder: Path, *, stall_timeout_s: float = 300.0) -> None:
        """Write nothing yet.

        Args:
            name: name of this process, for messages.
            folder: its own folder for versions; the two newest are kept.
            stall_timeout_s: longest time without growth of a file before an engine gives up.
        """
        self.name, self._folder, self._timeout_s = name, folder, stall_timeout_s
        self._cancelled = threading.Event()

    def offer(self, manifest: Manifest, receivers: Sequence[str], share: Share) -> Offer:
        """Announce a version; see :class:`rlhf_core.weight_sync.base.Outgoing`.

        Raises:
            WeightSyncFailed: its folder cannot be created.
        """
        path = self._path(manifest.version)
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            for old in sorted(self._folder.iterdir(), key=lambda one: one.stat().st_mtime)[:-2]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise WeightSyncFailed(f"{path} cannot be made: {error}", self.name) from error
        self._cancelled.clear()
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
            WeightSyncFailed: also if the file system accepts no more data.
        """
        path = self._path(manifest.version)
        buffer = torch.empty(manifest.bucket_bytes, dtype=torch.uint8)
        shards = _Shards(path)
        found = []
        try:
            for _, bucket in packed(manifest, self._recorded(weights, shards), WHOLE, lambda _: buffer):
                found.append(checksum(bucket))
                beat()
            shards.write()
            write_text(path / COMPLETE, json.dumps([one.hex() for one in found]))
        except BaseException as error:
            with contextlib.suppress(OSError):  # without it, engines wait for stall_timeout_s
                (path / ABANDONED).touch()
            if isinstance(error, OSError | SafetensorError):
                raise WeightSyncFailed(f"{path} cannot be written: {error}", self.name) from error
            raise
        return found

    def _recorded(self, weights: Weights, shards: "_Shards") -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if self._cancelled.is_set():
                raise WeightSyncFailed("sending was cancelled: an engine has failed")
            yield name, shards.add(name, tensor)

    def _path(self, version: int) -> Path:
        return self._folder / f"{version:08d}"

    def cancel(self) -> None:
        """Have :meth:`send` fail at its next tensor."""
        self._cancelled.set()

    def reset(self) -> None:
        """Do nothing: engines keep nothing."""

    def close(self) -> None:
        """Remove the versions."""
        shutil.rmtree(self._folder, ignore_errors=True)


class _Shards:
    """Tensors that wait to be written to files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._bytes = self._written = 0

    def add(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor; returns the copy."""
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        if self._waiting and self._bytes + copy.nbytes > SHARD_BYTES:
            self.write()
        self._waiting[name] = copy
        self._bytes += copy.nbytes
        return copy

    def write(self) -> None:
        """Write the tensors that wait."""
        if self._waiting:
            self._written += 1
            save_file(self._waiting, self._folder / f"weights-{self._written:05d}.safetensors")
        self._waiting, self._bytes = {}, 0


class FilesIncoming:
    """An engine's end."""

    def connect(self, offer: Offer) -> None:
        """Do nothing: :meth:`fill` waits for the trainer."""

    def fill(self, offer: Offer, row: Tensor, beat: Beat) -> list[bytes]:
        """Read a version; see :class:`rlhf_core.weight_sync.base.Incoming`."""
        path = Path(offer.path)
        _await_complete(offer, path, beat)
        row.zero_()  # the checksums include the gaps between tensors
        targets = tensors_of(offer.manifest, row)
        try:
            expected = [bytes.fromhex(text) for text in json.loads((path / COMPLETE).read_bytes())]
            for file in sorted(path.glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a mapping
                        targets.pop(name).copy_(opened.get_tensor(name))
                beat()
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise WeightSyncFailed(f"{path} cannot be read: {error}", offer.sender) from error
        found = [checksum(bucket) for bucket in buckets_of(offer.manifest, row)]
        if targets or found != expected:
            what = f"without {next(iter(targets))}" if targets else "damaged"
            raise WeightSyncFailed(f"version {offer.manifest.version} in {path} is {what}; send it again", offer.sender)
        return found


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes of the files in a folder, without those that the trainer renames or removes in the meantime."""
    sizes = {}
    with contextlib.suppress(FileNotFoundError):
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                sizes[file.name] = file.stat().st_size
    return sizes


def _await_complete(offer: Offer, path: Path, beat: Beat) -> None:
    seen: dict[str, int] = {}
    deadline = time.monotonic() + offer.stall_timeout_s
    while not (path / COMPLETE).exists():
        if (path / ABANDONED).exists() or not path.exists():
            raise WeightSyncFailed(f"{offer.sender} gave up version {offer.manifest.version}", offer.sender)
        found = _sizes(path)
        if found != seen:
            seen, deadline = found, time.monotonic() + offer.stall_timeout_s
        if time.monotonic() > deadline:
            raise WeightSyncFailed(
                f"{offer.sender} wrote nothing to {path} for {offer.stall_timeout_s:g} s", offer.sender
            )
        beat()
        time.sleep(POLL_INTERVAL_S)
