"""Transfers of checkpoint parts to another node: strangers, damage, silence and lack of space."""

import contextlib
import hashlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_reports import checkpoint_manifest

from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checkpoint_files import FileChecksum
from rlhf_core.training.checkpoints.memory import peer_copies, peer_transfer
from rlhf_core.training.checkpoints.memory.copies import MemoryCopy, MemoryPart, parts_here
from rlhf_core.training.checkpoints.memory.peer_copies import kept_ranks, rank_on_next_node
from rlhf_core.training.checkpoints.memory.peer_transfer import PartReceiver, PeerRefused, send_part

pytestmark = pytest.mark.training

KINDS = ("parts/rank", "trainer_state/rank")
KEY, OTHER_KEY = b"0" * 64, b"1" * 64
TIME = utc_now()
CONTENT = {"trainer_state/rank-00001.safetensors": bytes(range(256)) * 100, "empty": b""}


def part_of(content: dict[str, bytes], step: int = 4) -> MemoryPart:
    files = {name: FileChecksum(bytes=len(d), sha256=hashlib.sha256(d).hexdigest()) for name, d in content.items()}
    manifest = checkpoint_manifest(step, num_ranks=2, spec_hash="spec", files=files, time=TIME)
    return MemoryPart(save="a", attempt=1, rank=1, manifest=manifest)


Listen = Callable[[bytes], PartReceiver]


@pytest.fixture
def lines() -> list[str]:
    """Lines of the receiver's log."""
    return []


@pytest.fixture
def listen(tmp_path: Path, lines: list[str]) -> Iterator[Listen]:
    """Start receivers in a folder of the test."""
    with contextlib.ExitStack() as stack:

        def start(key: bytes = KEY) -> PartReceiver:
            receiver = PartReceiver(tmp_path / "peer", key, "127.0.0.1", lines.append)
            stack.callback(receiver.close)
            return receiver

        yield start


def test_a_part_arrives_and_counts(listen: Listen, tmp_path: Path) -> None:
    """A part that is sent again replaces the earlier one, which is invalid as soon as the transfer begins."""
    receiver = listen(KEY)
    for step in (4, 6):
        send_part(receiver.address, KEY, part_of(CONTENT, step), CONTENT)
        assert parts_here(tmp_path) == [part_of(CONTENT, step)]
    for name, content in CONTENT.items():
        path = tmp_path / "peer" / name
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == 0o600


def test_parts_of_ranks_that_have_moved_are_removed_at_the_first_save(tmp_path: Path) -> None:
    """A node was lost, so that ranks are on other nodes; the memory of their copies is needed for those of others."""
    left = {f"{place}{kind}-{rank:05d}.x" for place in ("", "peer/") for kind in KINDS for rank in range(4)}
    left |= {f"{place}{folder}/weights" for place in ("", "peer/") for folder in ("model", "critic")}
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    kept = kept_ranks(["a", "a", "b", "c"], "b")
    assert kept == {"": [2], "peer": [0, 1]}
    copy = MemoryCopy(tmp_path, 2, kept)
    expected = {
        *(f"{kind}-00002.x" for kind in KINDS),
        *(f"peer/{kind}-{rank:05d}.x" for kind in KINDS for rank in (0, 1)),
        "peer/model/weights",
        "peer/critic/weights",
    }
    for _ in range(2):
        copy.invalidate()
        found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
        assert found == expected
        (tmp_path / "peer/parts/rank-00003.x").touch()  # not at the first save
        expected.add("peer/parts/rank-00003.x")


def test_a_node_alone_keeps_no_parts_of_others() -> None:
    assert kept_ranks(["a", "a"], "a") == {"": [0, 1], "peer": []}


def test_a_sender_without_the_key_leaves_nothing(listen: Listen, tmp_path: Path, lines: list[str]) -> None:
    """The sender does not trust the receiver either: a stranger that listens is sent no part."""
    receiver = listen(KEY)
    with pytest.raises(PeerRefused, match="is not a rank of this attempt"):
        send_part(receiver.address, OTHER_KEY, part_of(CONTENT), CONTENT)
    assert not (tmp_path / "peer").exists()
    send_part(receiver.address, KEY, part_of(CONTENT), CONTENT)  # control: a legitimate sender after the stranger
    assert parts_here(tmp_path)
    assert lines == []


def test_a_sender_that_believes_every_receiver_is_still_not_believed(
    listen: Listen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger skips the check that would stop an honest sender: the receiver has to refuse it by itself."""
    receiver = listen(KEY)
    forged = part_of(CONTENT).model_dump_json().encode()
    for length, text in ((len(forged), forged + bytes(32)), (1 << 40, b"")):
        with socket.create_connection(receiver.address, 10) as stranger:
            stranger.sendall(bytes(32))
            assert len(peer_transfer._received(stranger, 64)) == 64
            stranger.sendall(length.to_bytes(8, "big") + text)
            assert stranger.recv(1) == b"", "the receiver closes the connection"
    assert not (tmp_path / "peer").exists()


@pytest.mark.parametrize("fault", ["damaged", "torn", "no room"])
def test_a_part_that_does_not_come_whole_does_not_count(
    listen: Listen, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The previous part is invalid too, because its files are gone by then; the receiver keeps working."""
    receiver = listen(KEY)
    send_part(receiver.address, KEY, part_of(CONTENT, 2), CONTENT)
    (name, right), _ = CONTENT.items()
    sent = {**CONTENT, name: {"damaged": right[:-1] + b"x", "torn": right[:-1]}.get(fault, right)}
    with monkeypatch.context() as patch:
        if fault == "no room":
            patch.setattr(peer_transfer, "free_memory", lambda folder: 1000)
        if fault == "torn":
            patch.setattr(peer_transfer, "_receive_line", lambda connection: "")  # process and connection end
        with contextlib.nullcontext() if fault == "torn" else pytest.raises(PeerRefused):
            send_part(receiver.address, KEY, part_of(CONTENT), {**sent, "empty": b""})
        # The next transfer begins once the receiver has ended this one.
        with pytest.raises(PeerRefused, match="is not a rank"):
            send_part(receiver.address, OTHER_KEY, part_of(CONTENT), CONTENT)
    assert parts_here(tmp_path) == []
    words = {"damaged": "does not match its checksum", "torn": "before the end of a file", "no room": "1000 free"}
    assert words[fault] in lines[0]
    send_part(receiver.address, KEY, part_of(CONTENT), CONTENT)
    assert parts_here(tmp_path) == [part_of(CONTENT)]


def test_a_receiver_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfer, "STALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        send_part(silent.getsockname(), KEY, part_of(CONTENT), CONTENT)


def test_a_copy_that_fails_is_a_line_of_the_log_and_training_goes_on(
    listen: Listen, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver = listen(KEY)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    copies = peer_copies.PeerCopies(receiver, address, "node-2", KEY)
    copies.begin(part_of(CONTENT), CONTENT)
    copies.finish()
    copies.close()
    assert "no copy of step 4 on node-2: [Errno 111] Connection refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("nodes", "targets"),
    [
        (["a", "a", "b", "b"], [2, 3, 0, 1]),
        (["a", "b", "c"], [1, 2, 0]),
        (["a", "b", "a", "b"], [1, 0, 3, 2]),
        (["a", "a", "b"], [2, 2, 0]),
        (["a", "a"], [None, None]),
    ],
)
def test_each_node_sends_to_the_next(nodes: list[str], targets: list[int | None]) -> None:
    assert [rank_on_next_node(nodes, rank) for rank in range(len(nodes))] == targets
