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
