"""Memory that was freed goes back to the system if it is much."""

import psutil
import pytest

from rlhf_core.training.trainers import free_memory
from rlhf_core.training.trainers.free_memory import KEPT_BYTES, return_free_memory

pytestmark = pytest.mark.training

PIECE = 100_000
"""Bytes below the size from which glibc asks the system for each allocation."""


def test_the_heap_gives_back_what_lies_between_pieces_in_use() -> None:
    """Control: without the call, the process keeps it."""
    number = 3 * KEPT_BYTES // PIECE
    before = psutil.Process().memory_info().rss
    pieces = [bytearray(PIECE) for _ in range(number)]
    kept = pieces[::10]
    del pieces
    held = psutil.Process().memory_info().rss - before
    assert held > 2 * KEPT_BYTES, "an allocator that frees by itself would prove nothing"
    assert return_free_memory()
    assert psutil.Process().memory_info().rss - before < held / 2
    assert sum(map(len, kept)) == len(kept) * PIECE


def test_little_is_left_to_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "KEPT_BYTES", 1 << 40)
    assert not return_free_memory()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_mallinfo2", None)
    assert not return_free_memory()
