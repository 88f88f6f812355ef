"""Ranks that wait for each other in several process groups: four ranks, in two pairs of each kind."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_reports import group_place, rank_status
from test_diagnosis_liveness import rank

from rlhf_core.diagnosis.hangs.verdict import blame, disagreement
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import GroupPlace, RankStatus

MEMBERS = {"world": (), "tp0": (0, 1), "tp1": (2, 3), "dp0": (0, 2), "dp1": (1, 3)}
"""Tensor parallel and data parallel pairs, which are also those of a pipeline."""


def job(*ranks: str) -> list[RankStatus]:
    """Ranks by what their flight recorders have.

    ``tp0=8`` has left number 8 of a group, ``tp0=8?`` waits in it, ``tp0=8?5`` with five elements, and ``dp0>2`` waits
    for rank 2 in a send or receive.
    """
    return [_rank(number, [_place(word) for word in words.split()]) for number, words in enumerate(ranks)]


def _place(word: str) -> GroupPlace:
    found = re.fullmatch(r"(?P<name>\w+)(>(?P<peer>\d)|=(?P<number>\d+)(?P<waits>\?)?(?P<size>\d+)?)", word)
    assert found is not None
    number, waits, peer = int(found["number"] or 0), bool(found["waits"]), found["peer"]
    return group_place(
        found["name"],
        MEMBERS[found["name"]],
        number,
        waits_in=number if waits else None,
        shape=f"Float [[{found['size'] or 4}]]",
        peers=(int(peer),) if peer else (),
    )


def _rank(number: int, places: list[GroupPlace]) -> RankStatus:
    inside = any(place.waits_in is not None for place in places)
    return rank(number, 12.0, inside=inside, collectives=1).model_copy(update={"process_groups": tuple(places)})


def test_a_rank_that_keeps_others_waiting_through_others_is_named() -> None:
    """Rank 3 never comes to a collective with rank 2. The others are in the next one already, with ranks 2 and 3."""
    verdict = blame(job("tp0=8 dp0=5?", "tp0=8 dp1=5?", "tp1=8? dp0=4", "tp1=7 dp1=4"))
    assert (verdict.kind, verdict.ranks) == (FailureKind.HANG, (3,))
    assert "rank 3 has not entered gloo:all_reduce, number 5 of process group dp1, in which rank 1" in verdict.reason
    assert (verdict.collective, verdict.collective_sequence) == ("gloo:all_reduce", 5)


def _stuck(program: Sequence[int], culprit: int, last: int) -> list[RankStatus]:
    """Eight ranks that enter the collectives of a program, all in the same order, until none can go on.

    Args:
        program: Groups of each collective: those of ranks that differ only in these of three bits.
        culprit: Rank that hangs after this many collectives.
    """
    groups = {
        (number, bits): tuple(other for other in range(8) if not (number ^ other) & ~bits)
        for number in range(8)
        for bits in program
    }
    done, entered, inside = [0] * 8, dict.fromkeys(groups, 0), [False] * 8
    while True:
        before = [*done]
        for number in range(8):
            if done[number] < (last if number == culprit else len(program)):
                bits = program[done[number]]
                entered[number, bits] += not inside[number]
                members = groups[number, bits]
                inside[number] = any(entered[other, bits] < entered[number, bits] for other in members)
                done[number] += not inside[number]
        if done == before:
            break
    found = []
    for number in range(8):
        waits = [inside[number] and program[done[number]] == bits for bits in {*program}]
        places = tuple(
            group_place(str(groups[number, bits]), groups[number, bits], at, waits_in=at if waiting else None)
            for bits, waiting in zip({*program}, waits, strict=True)
            for at in [entered[number, bits]]
        )
        found.append(rank_status(number, in_collective=True, process_groups=places))
    return found


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12), st.integers(0, 7), st.data())
def test_in_any_program_the_rank_that_hangs_is_named(program: list[int], culprit: int, data: st.DataObject) -> None:
    ranks = _stuck(program, culprit, data.draw(st.integers(0, len(program) - 1)))
    assert blame(ranks).ranks == (culprit,)
    assert blame([one.model_copy(update={"process_groups": ()}) for one in ranks]).ranks == (), "negative control"


def test_without_the_groups_a_rank_that_waits_elsewhere_is_not_found() -> None:
    """Negative control: all ranks are in collectives, and have entered as many of the default group."""
    ranks = job("tp0=8 dp0=5?", "tp0=8 dp1=5?", "tp1=8? dp0=4", "tp1=7 dp1=4")
    ranks[3] = ranks[3].model_copy(update={"in_collective": True})
    assert blame(ranks).ranks == (3,)
    assert blame([one.model_copy(update={"process_groups": ()}) for one in ranks]).ranks == ()


def test_ranks_between_which_the_network_is_broken_are_named() -> None:
    verdict = blame(
        job(
            "tp0=8 dp0=5?",
            "tp0=8 dp1=5?",
            "tp1=8? dp0=4",
            "tp1=8? dp1=4",
        )
    )
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_HANG, (2, 3))
    verdict = blame(job("world=5?", "world=5?", "world=5?", "world=5?"))
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_HANG, ())


def test_a_circle_is_probably_a_mismatch_of_no_single_rank() -> None:
    """Rank 3 has skipped a collective with rank 2, and is one ahead with rank 1."""
    circle = job("tp0=8 dp0=5?", "tp0=9? dp1=5", "tp1=8? dp0=4", "tp1=7 dp1=6?")
    verdict = blame(circle)
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, ())
    assert verdict.is_undecided, "a checkpoint made by another thread may look the same, so it does not end the run"
    assert verdict.reason.endswith(
        "rank 0 waits in gloo:all_reduce, number 5 of process group dp0, for rank 2; "
        "rank 2 waits in gloo:all_reduce, number 8 of process group tp1, for rank 3; "
        "rank 3 waits in gloo:all_reduce, number 6 of process group dp1, for rank 1; "
        "rank 1 waits in gloo:all_reduce, number 9 of process group tp0, for rank 0"
    )
    assert disagreement(circle) is None, "no proof that would end the workers before their time"


def test_members_of_a_group_that_disagree_are_found_while_others_wait_for_them() -> None:
    verdict = disagreement(job("world=3?", "world=3?", "world=2 tp1=8?", "world=2 tp1=8?5"))
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, ())
    assert "number 8 of process group tp1: rank 2 gloo:all_reduce Float [[4]]; rank 3" in verdict.reason
    assert disagreement(job("world=3?", "world=3?", "world=2 tp1=8?", "world=2 tp1=8?")) is None


def test_a_pipeline_stage_that_waits_for_another_is_not_blamed() -> None:
    """Rank 0 waits for a gradient of rank 2, which waits for rank 3."""
    ranks = job("tp0=8 dp0>2", "tp0=9?", "tp1=8?", "tp1=7")
    assert (blame(ranks).kind, blame(ranks).ranks) == (FailureKind.HANG, (3,))
    without = [one.model_copy(update={"process_groups": ()}) for one in ranks]
    assert blame(without).ranks == (0, 3), "negative control: it is outside collectives, too"


def test_a_send_that_a_rank_began_before_it_hung_does_not_excuse_it() -> None:
    assert blame(job("world=2 tp0=8 dp0>2", "world=2 tp0=9?", "world=3?", "world=3?")).ranks == (0,)


def test_peers_that_have_met_do_not_wait_for_each_other() -> None:
    assert blame(job("tp0=8 dp0>2", "tp0=9?", "dp0>0", "tp1=7")).ranks == (0,)


def test_a_rank_that_does_not_answer_is_awaited_only_while_it_is_outside() -> None:
    others = job("world=3?", "world=3?", "world=3?")
    assert blame([*others, rank(3, 12.0, collectives=1)]).ranks == (3,)
    assert blame([*others, rank(3, 12.0, inside=True, collectives=1)]).ranks == ()


@pytest.mark.parametrize(("last", "blamed"), [("tp1=8?", ()), ("tp1=8? dp1=4", (3,))])
def test_a_record_that_was_overwritten_accuses_nobody(last: str, blamed: tuple[int, ...]) -> None:
    """A recorder has the latest collectives only, so rank 3 may have entered that of rank 1 long ago."""
    ranks = job("tp0=8", "dp1=5?", "tp1=8?", last)
    ranks[0] = ranks[0].model_copy(update={"in_collective": True})
    assert blame(ranks).ranks == blamed


def test_only_numbers_of_one_group_are_compared_for_the_last_collective() -> None:
    """A rank may have begun a send in a group without collectives since."""
    numbers = {0: 40, 1: 8, 2: 9}
    ranks = [
        one.model_copy(update={"collective": "gloo:all_reduce", "collective_sequence": numbers[one.rank]})
        for one in job("dp0>2 tp0=40", "dp0>2 world=8", "world=9")
    ]
    verdict = blame([*ranks, rank(3, 12.0, state="T")])
    assert (verdict.ranks, verdict.collective_sequence) == ((3,), 9)


def test_a_wrong_shape_is_a_mismatch_of_the_deviating_rank() -> None:
    verdict = blame(job("world=7?", "world=7?", "world=7?5"))
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, (2,))
    assert "rank 2 gloo:all_reduce Float [[5]]" in verdict.reason


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("world=7?", {}),
        ("", {"in_collective": True}),
        ("world=7?5", {"in_collective": False}),
        ("world=7?5", {"process_state": "T"}),
        ("world=6?5", {}),
        ("world=75", {"in_collective": True}),
    ],
    ids=["equal", "unknown", "not waited for", "stopped", "another number", "left"],
)
def test_nothing_less_is_a_mismatch(words: str, changes: dict[str, object]) -> None:
    """Negative control: a mismatch stops the run, so nothing else may look like one."""
    ranks = job("world=7?", words)
    assert blame([ranks[0], ranks[1].model_copy(update=changes)]).kind is not FailureKind.COLLECTIVE_MISMATCH


def test_operations_that_allow_other_shapes_do_not_disagree_about_them() -> None:
    ranks = [_rank(n, [group_place("0", (), 7, operation="nccl:all_gather", shape=f"Float [[{n}]]")]) for n in range(2)]
    assert disagreement(ranks) is None
