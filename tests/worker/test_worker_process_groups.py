"""Positions of a rank in its process groups, from flight recorders as torch writes them."""

import json
from typing import Any

import pytest
from made_reports import rank_status

from rlhf_core.schemas.reports import GroupPlace, RankStatus
from rlhf_core.worker.liveness.process_groups import with_places

GROUPS = {"0": [0, 1, 2, 3], "3": [1, 3], "5": [3, 1]}
RANK = rank_status(1)


def entry(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "is_p2p": False, "process_group": ["0", "default_pg"], "pg_id": 0, "profiling_name": "gloo:all_reduce",
        "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[4]], "retired": True,
        "time_created_ns": number, "record_id": number - 1,
    } | changes  # fmt: skip


def transfer(number: int, name: str, **changes: Any) -> dict[str, Any]:
    """A send or receive in NCCL, which is not available here: torch's analysis of recorders documents these names."""
    pipeline = {"process_group": ["5", "undefined"], "pg_id": 2, "profiling_name": name, "is_p2p": True}
    return entry(number, **{**pipeline, "retired": False, **changes})


def read(*entries: dict[str, Any], completed: int = 0, rank: int = 1, num_recorders: int = 1) -> RankStatus:
    status = {"0": {"last_completed_collective": str(completed)}}
    recorder = {"entries": entries, "pg_status": status}
    return with_places(RANK, json.dumps({"rank": rank, "recorders": [recorder] * num_recorders, "groups": GROUPS}))


def places(status: RankStatus) -> dict[str, GroupPlace]:
    return {place.name: place for place in status.process_groups}


def test_the_first_collective_that_is_not_left_is_the_one_waited_in() -> None:
    pair = {"process_group": ["3", "dp"], "pg_id": 1, "retired": False}
    found = read(entry(1), entry(2), entry(3, **pair), entry(4, **pair, profiling_name="gloo:barrier"))
    assert [place.name for place in found.process_groups] == ["3", "0", "5"]
    assert places(found)["3"] == GroupPlace(
        name="3", description="dp", backend="gloo", entered=4, waits_in=3, operation="gloo:all_reduce",
        shape="Float [[4]]", members=(1, 3),
    )  # fmt: skip
    world = places(found)["0"]
    assert (world.entered, world.waits_in, world.members) == (2, None, ())
    assert places(found)["5"] == GroupPlace(name="5"), "no collective of this group was ever entered"
    assert (found.collective, found.collective_sequence, found.collective_shape) == (
        "gloo:all_reduce",
        3,
        "Float [[4]]",
    )


def test_a_group_of_all_ranks_is_not_listed_by_each_of_them() -> None:
    found = places(read(entry(1, retired=False)))["0"]
    assert (found.waits_in, found.members) == (1, ())


def test_what_the_backend_calls_complete_is_not_waited_for() -> None:
    """The parts of a batch are recorded and never marked as done."""
    found = places(read(entry(1, retired=False), entry(2), completed=2))["0"]
    assert (found.entered, found.waits_in) == (2, None)


def test_a_group_that_a_full_recorder_may_have_lost_is_left_out() -> None:
    assert set(places(read(entry(2), entry(3)))) == {"0"}


@pytest.mark.parametrize(
    ("later", "peers"),
    [((), (3,)), ((transfer(3, "nccl:coalesced", retired=True),), ()), ((transfer(3, "nccl:send 1->0"),), (3,))],
    ids=["pending", "complete as a part of a batch", "two of them"],
)
def test_the_peer_of_a_pending_transfer_is_a_rank_of_the_role(later: tuple[dict[str, Any], ...], peers: Any) -> None:
    """Rank 1 of the role is rank 1 of the group 3, 1."""
    found = places(read(entry(1), transfer(2, "nccl:recv 1<-0"), *later))["5"]
    assert (found.peers, found.backend, found.entered) == (peers, "nccl", 0)


def test_groups_that_torch_does_not_list_and_ranks_with_other_numbers_are_left_out() -> None:
    engines = entry(1, process_group=["", ""], pg_id=9, retired=False)
    assert all(place.name in GROUPS and place.waits_in is None for place in read(engines).process_groups)
    assert read(entry(1), rank=0) == RANK


@pytest.mark.parametrize("content", ["{}", "", "[]", "null", '{"rank": 1, "recorders": 3, "groups": {}}'])
def test_an_answer_that_cannot_be_read_changes_nothing(content: str) -> None:
    assert with_places(RANK, content) == RANK


def test_a_rank_that_has_entered_nothing_is_known_to_have_entered_nothing() -> None:
    found = read(num_recorders=0)
    assert {place.name: place.entered for place in found.process_groups} == {"0": 0, "3": 0, "5": 0}
    assert found.collective_sequence is None
