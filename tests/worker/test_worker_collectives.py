"""The collective in which a worker hangs, reported while it hangs by two real ranks that disagree."""

import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork_server import fork_server
from made_reports import rank_status
from process_tools import until

from rlhf_core.diagnosis.hangs.verdict import HangVerdict, blame
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.worker import in_rank
from rlhf_core.worker.in_rank import rlhf_flight_recorder
from rlhf_core.worker.liveness import collectives
from rlhf_core.worker.liveness.collectives import (
    BUFFER_VARIABLE,
    answer_in_background,
    answer_path,
    read_answers,
)
from rlhf_core.worker.liveness.heartbeat import Beat, SlotFile
from rlhf_core.worker.liveness.process_groups import with_process_groups

FAULTS = {
    "another operation": ["reduce", "gather", "reduce", "reduce"],
    "absent": ["reduce", "", "reduce", "reduce"],
    "absent from a pair": ["row column row column"] * 3 + [""],
    "another order": ["row column row column"] * 3 + ["column column row row"],
}
"""Collectives of four ranks: all together, and in pairs of a row or a column."""


def take_part(slots: Path, store: Path, rank: int, collectives: str) -> None:
    """Be one of four ranks and enter these collectives, after one with all."""
    import torch
    import torch.distributed as dist

    os.environ[BUFFER_VARIABLE] = "64"
    beat = Beat(slots, rank)
    answer_in_background(beat, slots, rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    rows = [dist.new_group([0, 1], group_desc="row"), dist.new_group([2, 3], group_desc="row")]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = {"reduce": None, "row": rows[rank // 2], "column": columns[rank % 2]}
    dist.all_reduce(torch.ones(4))
    with beat.collective():
        for name in collectives.split():
            if name == "gather":
                dist.all_gather([torch.ones(4)] * 4, torch.ones(4))
            else:
                dist.all_reduce(torch.ones(4), group=groups[name])
        time.sleep(1000)


def _rank(rank: int, **changes: object) -> RankStatus:
    at = {"node": "n1", "pid": 1, "sequence": 9, "collectives": 5, "in_collective": True, "step": 3, "age_s": 9.0}
    return rank_status(rank, **{**at, **changes})


@pytest.mark.training
@pytest.mark.parametrize(
    ("fault", "kind", "to_blame", "words"),
    [
        ("another operation", FailureKind.COLLECTIVE_MISMATCH, (1,), "rank 1 gloo:all_gather"),
        ("absent", FailureKind.COLLECTIVE_HANG, (1,), "has not entered gloo:all_reduce, number 2 of process group 0"),
        ("absent from a pair", FailureKind.COLLECTIVE_HANG, (3,), "number 1 of process group 4, in which rank 1 waits"),
        ("another order", FailureKind.COLLECTIVE_MISMATCH, (), "number 1 of process group 2 (row), for rank 3; rank 3"),
    ],
)
def test_real_ranks_report_the_collectives_they_wait_in(
    tmp_path: Path, fault: str, kind: FailureKind, to_blame: tuple[int, ...], words: str
) -> None:
    slots = SlotFile("collectives", 1, tmp_path.name, 4)
    given = [(slots.path, tmp_path / "store", rank, own) for rank, own in enumerate(FAULTS[fault])]
    workers = [fork_server().Process(target=take_part, args=one) for one in given]
    for worker in workers:
        worker.start()
    try:
        until(lambda: all(slots.read(index).entered == 1 for index in range(4)))
        ranks = [_rank(index) for index in range(4)]

        def verdict() -> HangVerdict:
            return blame(with_process_groups(ranks, read_answers(ranks, slots.path, slots.request_collectives())))

        # A rank marks itself as inside a collective just before it enters.
        until(lambda: words in verdict().reason)
        assert (verdict().kind, verdict().ranks, verdict().collective) == (kind, to_blame, "gloo:all_reduce")
        unknown = blame(ranks)
        assert (unknown.kind, unknown.ranks) == (FailureKind.COLLECTIVE_HANG, ()), "negative control"
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        slots.remove()


def test_a_stopped_rank_is_not_awaited_and_late_answers_are_removed(tmp_path: Path) -> None:
    slots = SlotFile("collectives-stopped", 1, tmp_path.name, 1)
    number = slots.request_collectives()
    assert read_answers([_rank(0, process_state="T"), _rank(1, sequence=0)], slots.path, number, 1000.0) == {}
    late = answer_path(slots.path, 0, number)
    late.write_text("{}")
    slots.remove()
    assert not late.exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_that_was_not_read_makes_room_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SlotFile("collectives-unread", 1, tmp_path.name, 1)
    monkeypatch.setattr(collectives, "_source", [lambda: "{}"])
    monkeypatch.setattr(collectives.processes, "name_thread", lambda name: None)
    is_over = threading.Event()

    def pause(seconds: float) -> None:
        if is_over.wait(0.01):
            sys.exit()  # this thread: in a worker, it lives as long as the process

    monkeypatch.setattr(collectives, "time", SimpleNamespace(sleep=pause))
    before = {*threading.enumerate()}
    try:
        collectives.answer_in_background(Beat(slots.path, 0), slots.path, 0)
        for _ in range(3):
            number = slots.request_collectives()
            until(answer_path(slots.path, 0, number).exists)
        assert [path.name for path in slots.path.parent.glob(f"{slots.path.name}.*.json")] == [
            answer_path(slots.path, 0, number).name
        ]
    finally:
        is_over.set()
        for thread in {*threading.enumerate()} - before:
            thread.join(30)
        slots.remove()


@pytest.mark.parametrize("has_nccl", [True, False])
def test_the_recorder_that_has_entries_is_read(has_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 with CUDA, which is not available here, has a recorder for NCCL and one for all other backends."""

    def dump(name: str, is_used: bool) -> object:
        status = {"0": {"last_enqueued_collective": 7, "last_completed_collective": 6}}
        content = {"entries": [{"profiling_name": name}], "pg_status": status} if is_used else {"pg_status": {}}
        return lambda includeCollectives, onlyActive: json.dumps(content).encode()

    recorder = SimpleNamespace(
        _dump_nccl_trace_json=dump("nccl:all_reduce", has_nccl),
        _dump_fr_trace_json=dump("gloo:all_reduce", not has_nccl),
    )
    monkeypatch.setitem(sys.modules, rlhf_flight_recorder._MODULE, recorder)
    expected = "nccl:all_reduce" if has_nccl else "gloo:all_reduce"
    (content,) = rlhf_flight_recorder.dumps("entries")
    assert content["entries"][0]["profiling_name"] == expected
    assert _startup_hook(monkeypatch)._counts(rlhf_flight_recorder.dumps("pg_status")) == (7, 6, 13)


@pytest.mark.parametrize(
    ("status", "counts"),
    [
        ({"0": (2, 2), "1": (5, 4)}, (2, 1, 13)),
        ({"0": (2, 2), "1": (5, 5)}, (2, 2, 14)),
        ({"0": (3, 2), "10": (5, 5)}, (3, 2, 15)),
        ({"0": (-1, -1), "1": (1, 0)}, (0, -1, 1)),
        ({}, (0, 0, 0)),
    ],
    ids=["in a subgroup", "in none", "in the default group", "in a subgroup, before any other", "not started"],
)
def test_all_groups_are_progress_and_the_default_one_has_the_number(
    status: dict[str, tuple[int, int]], counts: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {
        name: {"last_enqueued_collective": entered, "last_completed_collective": left}
        for name, (entered, left) in status.items()
    }
    assert _startup_hook(monkeypatch)._counts([{"pg_status": content}] if content else []) == counts


def _startup_hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that processes of external trainers load at startup."""
    folder = Path(in_rank.__file__).parent
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    spec = importlib.util.spec_from_file_location("startup_hook", folder / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
