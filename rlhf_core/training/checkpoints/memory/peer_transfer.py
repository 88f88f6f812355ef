"""Transfer of a rank's part of a checkpoint to a rank on another node, over one TCP connection per part.

    sender     32 random bytes
    receiver   32 random bytes, and an HMAC (RFC 2104, SHA-256) over both
    sender     length (8 bytes, big-endian), `MemoryPart` as JSON, an HMAC over both and this text
    receiver   a line: empty to continue, else the reason for refusal
    sender     the files, in the order of the part, unmodified
    receiver   a line: empty if the part is now valid, else the problem with it

The HMACs use the key of the attempt, which only the owner of the run may read: no other program can receive or send a
part. The JSON text holds the checksums of the files, so these are authenticated too. Nothing is encrypted.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from rlhf_core.files.private import FILE_MODE, make_folder
from rlhf_core.schemas.checkpoint_files import FileChecksum
from rlhf_core.training.checkpoints.background_save import Content
from rlhf_core.training.checkpoints.host_buffers import SPARE_SHARE, free_memory
from rlhf_core.training.checkpoints.memory.copies import MemoryCopy, MemoryPart
from rlhf_core.training.models.tensor_files import chunks

STALL_S = 10.0
"""Time without progress after which a transfer is abandoned, in seconds."""
MAX_TEXT_BYTES = 16 << 20
"""Longest `MemoryPart` text accepted."""

_CODE_BYTES = 32
_LENGTH_BYTES = 8
_MAX_LINE_BYTES = 4096
_CHUNK_BYTES = 4 << 20


class PeerRefused(Exception):
    """A part was not sent or not kept; the message gives the reason."""


def send_part(address: tuple[str, int], key: bytes, part: MemoryPart, content: Content) -> None:
    """Send the files of a part, and wait until it is valid on the other node.

    Raises:
        PeerRefused: the other side is not a rank of this attempt, has no room, or received something else.
        OSError: the other side cannot be reached, or stalls for ``STALL_S``.
    """
    with socket.create_connection(address, STALL_S) as connection:
        own = secrets.token_bytes(_CODE_BYTES)
        connection.sendall(own)
        nonces = own + _received(connection, _CODE_BYTES)
        if not hmac.compare_digest(_received(connection, _CODE_BYTES), _code(key, b"receiver", nonces)):
            raise PeerRefused(f"{address[0]}:{address[1]} is not a rank of this attempt")
        text = part.model_dump_json().encode()
        connection.sendall(len(text).to_bytes(_LENGTH_BYTES, "big") + text + _code(key, b"sender", nonces + text))
        _require_empty(_receive_line(connection))
        for name in part.manifest.files:
            for piece in chunks(content[name], _CHUNK_BYTES):
                connection.sendall(piece)
        _require_empty(_receive_line(connection))


class PartReceiver:
    """Receives parts from ranks of another node, one after the other, in a thread."""

    def __init__(self, folder: Path, key: bytes, host: str, log: Callable[[str], None]) -> None:
        """Start listening.

        Args:
            folder: folder in main memory for the parts.
            key: key of the attempt.
            host: address of the interface to listen on; any free port is used.
            log: called for every part of this attempt that was not kept.

        Raises:
            OSError: the address does not belong to this node.
        """
        self._folder = folder
        self._key = key
        self._log = log
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._run, name="part-receiver", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        # Closing alone would not wake the thread waiting for a connection.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(STALL_S)
            part = self._receive_header(connection)
        except (OSError, PeerRefused):
            return  # any program may connect; one that does not authenticate leaves no trace
        try:
            self._receive_files(connection, part)
            reason = ""
        except (OSError, PeerRefused) as error:
            reason = str(error) or type(error).__name__
            self._log(f"the copy of rank {part.rank}, step {part.manifest.step}, does not count here: {reason}")
        with contextlib.suppress(OSError):
            _send_line(connection, reason)

    def _receive_header(self, connection: socket.socket) -> MemoryPart:
        """Receive the header of a part from a rank of this attempt; it has to arrive within ``STALL_S``."""
        until = time.monotonic() + STALL_S
        other, own = _received(connection, _CODE_BYTES, until), secrets.token_bytes(_CODE_BYTES)
        nonces = other + own
        connection.sendall(own + _code(self._key, b"receiver", nonces))
        length = int.from_bytes(_received(connection, _LENGTH_BYTES, until), "big")
        if length > MAX_TEXT_BYTES:
            raise PeerRefused(f"found a text of {length} bytes, expected at most {MAX_TEXT_BYTES}")
        text = _received(connection, length, until)
        code = _received(connection, _CODE_BYTES, until)
        if not hmac.compare_digest(code, _code(self._key, b"sender", nonces + text)):
            raise PeerRefused("found a part that is not signed with the key of the attempt")
        try:
            return MemoryPart.model_validate_json(text)
        except ValidationError as error:
            raise PeerRefused(f"received no part: {error}") from None

    def _receive_files(self, connection: socket.socket, part: MemoryPart) -> None:
        """Receive the files; the part becomes valid once all have arrived intact.

        Raises:
            PeerRefused: there is no room, or a file does not match its checksum.
            OSError: the connection broke or stalled.
        """
        connection.settimeout(STALL_S)
        copy = MemoryCopy(self._folder, part.rank)
        copy.invalidate()
        for name in part.manifest.files:
            (self._folder / name).unlink(missing_ok=True)
        needed, free = sum(found.bytes for found in part.manifest.files.values()), free_memory(self._folder)
        if needed > (1 - SPARE_SHARE) * free:
            raise PeerRefused(f"it needs {needed} bytes of main memory, of {free} free bytes a tenth stays free")
        _send_line(connection, "")
        for name, expected in part.manifest.files.items():
            receive_file(_stream(connection, expected.bytes), self._folder / name, expected)
        copy.publish(part)


def receive_file(pieces: Iterable[bytes | memoryview], path: Path, expected: FileChecksum) -> None:
    """Write a new file from its chunks.

    Raises:
        PeerRefused: it does not match its checksum.
        OSError: there is no room for it.
    """
    make_folder(path.parent)
    path.unlink(missing_ok=True)  # never overwritten: a model may be mapped from the existing file
    path.touch(FILE_MODE)
    digest = hashlib.sha256()
    with path.open("r+b") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
    if path.stat().st_size != expected.bytes or digest.hexdigest() != expected.sha256:
        raise PeerRefused(f"{path.name} does not match its checksum")


def _stream(connection: socket.socket, num_bytes: int) -> Iterable[memoryview]:
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(num_bytes, 1))))
    left = num_bytes
    while left:
        try:
            count = connection.recv_into(buffer[: min(left, len(buffer))])
        except ConnectionResetError:  # instead of an end, if the peer left something unread
            count = 0
        if not count:
            raise ConnectionError(f"the connection ended {left} bytes before the end of a file")
        left -= count
        yield buffer[:count]


def _received(connection: socket.socket, num_bytes: int, until_s: float | None = None) -> bytes:
    """Receive this many bytes before a deadline on the monotonic clock.

    Raises:
        ConnectionError: the other side closed the connection early.
        TimeoutError: they did not arrive in time.
    """
    found = bytearray()
    while len(found) < num_bytes:
        if until_s is not None:
            connection.settimeout(max(until_s - time.monotonic(), 0.001))
        piece = connection.recv(min(num_bytes - len(found), _CHUNK_BYTES))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        found += piece
    return bytes(found)


def _send_line(connection: socket.socket, reason: str) -> None:
    connection.sendall(reason.replace("\n", " ").encode()[: _MAX_LINE_BYTES - 1] + b"\n")


def _receive_line(connection: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n") and len(found) < _MAX_LINE_BYTES:
        found += _received(connection, 1)
    return found.decode(errors="replace").strip()


def _require_empty(reason: str) -> None:
    if reason:
        raise PeerRefused(reason)


def _code(key: bytes, purpose: bytes, content: bytes) -> bytes:
    return hmac.new(key, b"rlhf-part-1 " + purpose + b" " + content, hashlib.sha256).digest()
