"""Responsible ranks: the first rule that applies names them."""

import pytest
from test_diagnosis_liveness import rank

from rlhf_core.diagnosis.hangs.verdict import blame
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
    numbered = [one.model_copy(update={"collective_sequence": one.collectives, "collectives": 0}) for one in ranks]
    assert blame([one.model_copy(update={"in_collective": True}) for one in numbered]).ranks == (1,)


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
    ranks = [
        rank(n, 12.0, inside=True).model_copy(
            update={"collective": "gloo:broadcast" if n == 300 else "gloo:all_reduce", "collective_sequence": 7}
        )
        for n in range(512)
    ]
    verdict = blame(ranks)
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, (300,))
    assert "rank 300 gloo:broadcast" in verdict.reason
    assert len(verdict.reason) < 2000
