"""Responsible ranks: the first rule that applies names them."""

import pytest
from made_reports import group_place
from test_diagnosis_liveness import rank

from rlhf_core.diagnosis.hangs.verdict import blame, disagreement
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import Phase, RankStatus

WAITING = [rank(n, 12.0, inside=True, collectives=41) for n in (0, 2, 3)]


@pytest.mark.parametrize(
    ("culprit", "kind", "words"),
    [
        (rank(1, 12.0, state="T", inside=True, collectives=41), FailureKind.HANG, "was stopped (process state T)"),
        (rank(1, 12.0, state="T", collectives=40), FailureKind.HANG, "was stopped"),
        (rank(1, 12.0, collectives=40, phase=Phase.REWARD), FailureKind.HANG, "has not entered collective 41"),
        (rank(1, 12.0, inside=True, collectives=40), FailureKind.COLLECTIVE_HANG, "has not entered collective 41"),
        (rank(1, 12.0, collectives=41, state="D"), FailureKind.HANG, "blocked in the kernel (state D)"),
        (rank(1, 12.0, collectives=41, phase=Phase.CHECKPOINT), FailureKind.HANG, "in phase checkpoint at step 7"),
    ],
)
def test_the_rank_that_keeps_the_others_waiting_is_named(culprit: RankStatus, kind: FailureKind, words: str) -> None:
    verdict = blame([*WAITING, culprit])
    assert (verdict.kind, verdict.ranks) == (kind, (1,))
    assert words in verdict.reason


def test_all_in_the_same_collective_blames_no_rank() -> None:
    verdict = blame(WAITING)
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_HANG, ())
    assert "no single rank" in verdict.reason


@pytest.mark.parametrize(
    ("ended", "ranks", "words"),
    [((1,), (1,), "rank 1 ended with exit code 0 while 3 others"), ((4, 1), (1, 4), "rank 1, rank 4 ended")],
)
def test_a_rank_that_ended_while_the_others_wait_for_it_is_named(
    ended: tuple[int, ...], ranks: tuple[int, ...], words: str
) -> None:
    """As with data that not all ranks have the same number of batches of."""
    verdict = blame(WAITING, ended=ended)
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, ranks)
    assert verdict.is_undecided, "a broken network looks the same if it holds the last collective"
    assert verdict.reason.startswith(words)
    assert "collective 41" in verdict.reason
    still = [*WAITING, rank(5, 12.0, collectives=40)]
    assert blame(still, ended=ended).ranks == (5,), "another one keeps them waiting"


def test_outside_collectives_each_silent_rank_stands_for_itself() -> None:
    ranks = [rank(0, 0.1), rank(1, 30.0), rank(2, 40.0)]
    assert blame(ranks, silent=[1, 2]).ranks == (1, 2)
    assert blame(ranks).ranks == (2,)


def test_a_stopped_rank_is_blamed_before_one_that_is_merely_behind() -> None:
    ranks = [rank(0, 12.0, inside=True, collectives=5), rank(1, 12.0, collectives=4), rank(2, 12.0, state="T")]
    assert blame(ranks).ranks == (2,)


def test_of_ranks_behind_only_the_last_are_blamed() -> None:
    """Rank 1 never came to collective 40, so rank 2 still waits in it, while the root of a broadcast has gone on."""
    ranks = [
        rank(0, 12.0, inside=True, collectives=41),
        rank(1, 12.0, collectives=39, phase=Phase.REWARD),
        rank(2, 12.0, inside=True, collectives=40),
        rank(3, 12.0, inside=True, collectives=41),
    ]
    verdict = blame(ranks)
    assert (verdict.kind, verdict.ranks) == (FailureKind.HANG, (1,))
    verdict = blame([recorded(one.rank, "gloo:all_reduce", one.collectives) for one in ranks])
    assert verdict.ranks == (1,)
    assert "has not entered gloo:all_reduce, number 41 of process group 0, in which rank 0 waits" in verdict.reason


def test_a_root_that_has_left_a_broadcast_early_makes_no_culprits_of_all_others() -> None:
    verdict = blame([rank(0, 12.0, inside=True, collectives=41), *(rank(n, 12.0, inside=True) for n in range(1, 512))])
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_HANG, ())
    assert "511 of 512 ranks" in verdict.reason


def test_a_verdict_on_hundreds_of_ranks_is_a_short_sentence() -> None:
    verdict = blame([rank(n, 400.0) for n in range(512)], silent=range(512))
    assert len(verdict.ranks) == 512
    assert len(verdict.reason) < 2000
    assert verdict.reason.endswith("and 504 more")


def test_of_hundreds_of_ranks_the_one_that_disagrees_is_listed() -> None:
    verdict = blame([recorded(n, "gloo:broadcast" if n == 300 else "gloo:all_reduce") for n in range(512)])
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, (300,))
    assert "rank 300 gloo:broadcast" in verdict.reason
    assert len(verdict.reason) < 2000


def test_ranks_behind_are_blamed_unless_most_of_all_ranks_wait_inside() -> None:
    ahead = [rank(0, 12.0, inside=True, collectives=41), rank(1, 12.0, inside=True, collectives=41)]
    half = [rank(2, 12.0, inside=True, collectives=40), rank(3, 12.0, inside=True, collectives=40)]
    verdict = blame([*ahead, *half])
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_HANG, (2, 3))
    verdict = blame([*ahead, *half, rank(4, 12.0, collectives=40)])
    assert (verdict.kind, verdict.ranks) == (FailureKind.HANG, (2, 3, 4)), "rank 4 waits for nothing"


def recorded(number: int, collective: str, sequence: int = 7, *, inside: bool = True) -> RankStatus:
    """A rank whose flight recorder has this as its last collective."""
    place = group_place("0", (), sequence, operation=collective, waits_in=sequence if inside else None)
    changes = {"collective": collective, "collective_sequence": sequence, "process_groups": (place,)}
    return rank(number, 12.0, inside=inside).model_copy(update=changes)


def test_of_two_halves_that_disagree_neither_is_blamed() -> None:
    verdict = blame([recorded(n, "gloo:broadcast" if n < 2 else "gloo:all_reduce") for n in range(4)])
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, ())
    assert "rank 0 gloo:broadcast" in verdict.reason
    assert "rank 3 gloo:all_reduce" in verdict.reason


def test_ranks_outside_disagree_about_nothing() -> None:
    """Their recorders have the last collective that each has left."""
    ranks = [recorded(n, "gloo:broadcast" if n else "gloo:all_reduce", inside=False) for n in range(2)]
    assert disagreement(ranks) is None
    assert blame(ranks, [1]).kind is FailureKind.HANG
    waiting = [recorded(n, "gloo:broadcast" if n else "gloo:all_reduce") for n in range(2)]
    found = disagreement(waiting)
    assert found is not None
    assert found.kind is FailureKind.COLLECTIVE_MISMATCH
    assert disagreement([waiting[0], waiting[0]]) is None


def test_the_collective_that_others_wait_in_is_part_of_the_verdict() -> None:
    verdict = blame([recorded(0, "gloo:broadcast", 7), recorded(1, "gloo:all_reduce", 8), rank(2, 12.0, state="T")])
    assert (verdict.ranks, verdict.collective, verdict.collective_sequence) == ((2,), "gloo:all_reduce", 8)
    assert verdict.reason.endswith("the last collective that was entered is gloo:all_reduce, number 8")
    assert blame([rank(0, 12.0), rank(1, 12.0, state="T")]).collective == "", "no rank has a record"
    alone = blame([recorded(0, "gloo:all_reduce", inside=False)], [0])
    assert (alone.ranks, alone.collective) == ((0,), ""), "no other rank waits for it"
