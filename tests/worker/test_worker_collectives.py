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

from rlhf_core.diagnosis.hangs.verdict import blame
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import RankStatus
from rlhf_core.worker.command import in_rank
from rlhf_core.worker.liveness import collectives
from rlhf_core.worker.liveness.collectives import (
    BUFFER_VARIABLE,
    answer_in_background,
    answer_path,
    read_answers,
    with_collective,
)
from rlhf_core.worker.liveness.heartbeat import Beat, SlotFile


def take_part(slots: Path, store: Path, rank: int, fault: str) -> None:
    """Be one of two ranks in a collective, with a fault of rank 1."""
    import torch
    import torch.distributed as dist

    os.environ[BUFFER_VARIABLE] = "64"
    beat = Beat(slots, rank)
    answer_in_background(beat, slots, rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    with beat.collective():
        if rank == 1 and fault == "other":
            dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
        elif rank == 1:
            time.sleep(1000)
        else:
            dist.all_reduce(torch.ones(4))


def _rank(rank: int, **changes: object) -> RankStatus:
    at = {"node": "n1", "pid": 1, "sequence": 9, "collectives": 5, "in_collective": True, "step": 3, "age_s": 9.0}
    return rank_status(rank, **{**at, **changes})


@pytest.mark.training
@pytest.mark.parametrize(
    ("fault", "kind", "to_blame"),
    [("other", FailureKind.COLLECTIVE_MISMATCH, ()), ("absent", FailureKind.COLLECTIVE_HANG, (1,))],
)
def test_real_ranks_report_the_collective_they_wait_in(
    tmp_path: Path, fault: str, kind: FailureKind, to_blame: tuple[int, ...]
) -> None:
    slots = SlotFile("collectives", 1, tmp_path.name, 2)
    places = (slots.path, tmp_path / "store")
    workers = [fork_server().Process(target=take_part, args=(*places, rank, fault)) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        until(lambda: all(slots.read(index).entered == 1 for index in range(2)))
        ranks = [_rank(index) for index in range(2)]

        def statuses() -> list[RankStatus]:
            answers = read_answers(ranks, slots.path, slots.request_collectives())
            return [with_collective(rank, answers.get(rank.local_rank, "{}")) for rank in ranks]

        # A rank marks itself as inside a collective just before it enters.
        until(lambda: statuses()[0].collective_sequence == 2)
        verdict = blame(statuses())
        assert (verdict.kind, verdict.ranks, verdict.collective_sequence) == (kind, to_blame, 2)
        assert "gloo:all_reduce" in verdict.reason
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


def _entry(**changes: object) -> dict[str, object]:
    return {
        "is_p2p": False, "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce",
        "collective_seq_id": 7, "input_dtypes": ["Float"], "input_sizes": [[4]],
    } | changes  # fmt: skip


def test_only_comparable_numbers_are_used() -> None:
    found = with_collective(_rank(0), json.dumps({"entries": [_entry(), _entry(is_p2p=True, collective_seq_id=9)]}))
    assert (found.collective, found.collective_sequence) == ("gloo:all_reduce", 7)
    assert found.collective_shape == "Float [[4]]"
    other_group = json.dumps({"entries": [_entry(process_group=["1", "pipeline"])]})
    for content in (other_group, "{}", "", "[]", '{"entries": [{}]}', '{"entries": 3}'):
        assert with_collective(_rank(0), content) == _rank(0)


@pytest.mark.parametrize("has_nccl", [True, False])
def test_the_nccl_recorder_is_read_if_it_has_entries(has_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 with CUDA, which is not available here, has a recorder for NCCL and one for all other backends."""

    def dump(name: str, is_used: bool) -> object:
        status = {"0": {"last_enqueued_collective": 7, "last_completed_collective": 6}}
        content = {"entries": [_entry(profiling_name=name)], "pg_status": status} if is_used else {"pg_status": {}}
        return lambda includeCollectives, onlyActive: json.dumps(content).encode()

    recorder = SimpleNamespace(
        _dump_nccl_trace_json=dump("nccl:all_reduce", has_nccl),
        _dump_fr_trace_json=dump("gloo:all_reduce", not has_nccl),
    )
    monkeypatch.setitem(sys.modules, collectives._MODULE, recorder)
    expected = "nccl:all_reduce" if has_nccl else "gloo:all_reduce"
    assert with_collective(_rank(0), collectives._recorded()).collective == expected
    hook = _startup_hook(monkeypatch)
    assert next(hook._dumps(recorder, "entries"))["entries"][0]["profiling_name"] == expected
    assert hook._counts(recorder) == (7, 6, 13)


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
    recorder = SimpleNamespace(_dump_fr_trace_json=lambda **_: json.dumps({"pg_status": content}))
    assert _startup_hook(monkeypatch)._counts(recorder) == counts


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


RECORDED = {"collective": "gloo:all_reduce", "collective_sequence": 7, "collective_shape": "Float [[4]]"}


def test_a_wrong_shape_is_a_mismatch_of_the_deviating_rank() -> None:
    ranks = [_rank(index, **RECORDED) for index in range(3)]
    ranks[2] = _rank(2, **RECORDED | {"collective_shape": "Float [[5]]"})
    verdict = blame(ranks)
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, (2,))
    assert "rank 2 gloo:all_reduce Float [[5]]" in verdict.reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"collective_sequence": None},
        {"collective_shape": "Float [[5]]", "in_collective": False},
        {"collective_shape": "Float [[5]]", "process_state": "T"},
        {"collective_shape": "Float [[5]]", "collective_sequence": 6},
    ],
)
def test_nothing_less_is_a_mismatch(changes: dict[str, object]) -> None:
    """Negative control: a mismatch stops the run, so nothing else may look like one."""
    ranks = [_rank(0, **RECORDED), _rank(1, **RECORDED | changes)]
    assert blame(ranks).kind is not FailureKind.COLLECTIVE_MISMATCH
    broadcasts = [rank.model_copy(update={"collective": "gloo:broadcast"}) for rank in ranks]
    assert blame(broadcasts).kind is not FailureKind.COLLECTIVE_MISMATCH
