"""Ranking of completions by a model: the metric of preference learning."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.reports import EvaluationSample
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.data.examples import Example, Scorer, make_batch, make_examples, score_batch
from rlhf_core.training.types import Row


def pair_sample(row: Row, chosen: float, rejected: float) -> EvaluationSample:
    """Make a sample of the completion with the higher reward in a pair, judged against the chosen one.

    Scored 1 if it is the chosen one, 0 if it is the rejected one, and 0.5 if the rewards are equal: a policy that is
    its own reference has no preferences.
    """
    return EvaluationSample(
        prompt_uid=row.uid,
        sample_index=0,
        prompt=row.prompt,
        completion=row.chosen if chosen > rejected else row.rejected,
        answer=row.chosen,
        score=_won(chosen, rejected),
    )


def desirable_sample(row: Row, reward: float, undesirable: Sequence[float]) -> EvaluationSample:
    """Make a sample of a desirable completion, scored by the share of undesirable ones with a lower reward.

    Args:
        reward: reward of the row's completion.
        undesirable: rewards of all undesirable completions; at least one.
    """
    return EvaluationSample(
        prompt_uid=row.uid,
        sample_index=0,
        prompt=row.prompt,
        completion=row.target,
        answer="desirable",
        score=sum(_won(reward, other) for other in undesirable) / len(undesirable),
    )


def _won(better: float, worse: float) -> float:
    return 0.5 if better == worse else float(better > worse)


def rate_rows(
    policy: Scorer,
    reference: Scorer | None,
    rows: Sequence[Row],
    prompts: Sequence[list[int]],
    *,
    algorithm: AlgorithmSpec,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    rows_at_once: int,
    num_passes: int,
    beat: Callable[[], None],
) -> list[tuple[Row, tuple[float, ...]]]:
    """Rate the completions of rows by the rewards that an algorithm assigns to them.

    Args:
        reference: the reference model, for an algorithm that has one.
        rows: rows whose texts are ready; at least one.
        prompts: tokens of their prompts.
        algorithm: defines the reward of a completion.
        rows_at_once: number of rows per forward pass.
        num_passes: number of forward passes on every rank, whatever its share of the rows: if the weights are split
            over the ranks, each pass is a collective. Passes without rows left reuse the last row.
        beat: called before every pass.

    Returns:
        The rows in order, each with the rewards of its completions.
    """
    examples = make_examples(rows, prompts, tokenizer, algorithm)
    rated: list[tuple[Row, tuple[float, ...]]] = []
    for start in range(0, num_passes * rows_at_once, rows_at_once):
        beat()
        part = examples[start : start + rows_at_once]
        rewards = _rewards(policy, reference, part or examples[-1:], algorithm, tokenizer, device)
        each = [tuple(rewards[at :: len(part)]) for at in range(len(part))]
        rated += zip(rows[start : start + len(part)], each, strict=True)
    return rated


@torch.no_grad()
def _rewards(
    policy: Scorer,
    reference: Scorer | None,
    examples: Sequence[Example],
    algorithm: AlgorithmSpec,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> list[float]:
    batch, sequences = make_batch(examples, algorithm, tokenizer.pad_token_id, device)
    output = score_batch(policy, reference, batch, sequences, algorithm)
    rewards: list[float] = ALGORITHMS[algorithm.name].rewards(output, sequences, algorithm).tolist()
    return rewards
