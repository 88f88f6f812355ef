"""Samples of held-out rows: scored completions, the ranking of their completions by a model, and its loss."""

from collections.abc import Sequence

from rlhf_core.schemas.evaluation import EvaluationSample
from rlhf_core.training.types import Row


def row_sample(row: Row, completion: str, answer: str, score: float, index: int = 0) -> EvaluationSample:
    """Make the ``index``-th sample of a row."""
    return EvaluationSample(
        prompt_uid=row.uid, sample_index=index, prompt=row.prompt, completion=completion, answer=answer, score=score
    )


def pair_sample(row: Row, chosen: float, rejected: float) -> EvaluationSample:
    """Make a sample of the completion with the higher reward in a pair, judged against the chosen one.

    Scored 1 if it is the chosen one, 0 if it is the rejected one, and 0.5 if the rewards are equal: a policy that is
    its own reference has no preferences.
    """
    preferred = row.chosen if chosen > rejected else row.rejected
    return row_sample(row, preferred, row.chosen, _won(chosen, rejected))


def desirable_sample(row: Row, reward: float, undesirable: Sequence[float]) -> EvaluationSample:
    """Make a sample of a desirable completion, scored by the share of undesirable ones with a lower reward.

    Args:
        reward: reward of the row's completion.
        undesirable: rewards of all undesirable completions; at least one.
    """
    share = sum(_won(reward, other) for other in undesirable) / len(undesirable)
    return row_sample(row, row.target, "desirable", share)


def loss_sample(row: Row, loss: float) -> EvaluationSample:
    """Make a sample of the completion of a row that is trained on, of a pair the chosen one, scored by the row's
    loss."""
    return row_sample(row, row.chosen or row.target, row.answer, loss)


def _won(better: float, worse: float) -> float:
    return 0.5 if better == worse else float(better > worse)
