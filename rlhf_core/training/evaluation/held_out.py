"""Forward passes over held-out rows: the rewards that the main algorithm assigns to their completions, and its loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import select_rows
from rlhf_core.training.data.examples import RowPasses, Scorer, make_examples
from rlhf_core.training.data.loading import EncodedPrompts
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.causal_lm import PolicyModel, in_evaluation_mode
from rlhf_core.training.models.reward_model import RewardModel
from rlhf_core.training.types import Row


@dataclass(frozen=True)
class ScoredRow:
    """A held-out row as the main algorithm judges it."""

    row: Row
    rewards: list[float]
    """Reward of each of its completions."""
    loss: float
    """Loss of the row: in nats per token for supervised training, otherwise of the pair or the labelled completion."""
    weight: float
    """Weight of ``loss`` in the mean over all rows, which is the loss of a step with all of them: the tokens of the
    completion for supervised training, otherwise 1."""


@torch.no_grad()
def scored_rows(
    spec: RunSpec,
    ranks: Ranks,
    tokenizer: PreTrainedTokenizerBase,
    data: EncodedPrompts,
    policy: PolicyModel | RewardModel,
    reference: Scorer | None,
    beat: Callable[[], None],
) -> list[ScoredRow]:
    """Score this rank's rows, or those of its replica on the first rank of it, and none on the others. Collective.

    Args:
        spec: a run whose main loop learns from rows.
        data: the held-out rows; the same on every rank.
        reference: reference of the main loop, if its algorithm has one.
        beat: called before every pass.
    """
    algorithm, rows, deal = spec.main_loop.algorithm, data.rows, ranks.deal_to_replicas
    objective, own = ALGORITHMS[algorithm.name], deal(rows)
    examples = make_examples(own, deal(data.token_ids), tokenizer, algorithm)
    before = deal([*rows[-1:], *rows[:-1]]) if algorithm.mismatches else []
    passes = RowPasses(examples, before, tokenizer, ranks, spec.native_trainer, algorithm, packed=policy.packs)
    by_tokens = not (algorithm.pairs or algorithm.labelled)

    found: dict[int, ScoredRow] = {}
    with in_evaluation_mode(policy):
        sums = passes.sums(policy, reference, beat)
        total = sums.num_tokens if by_tokens else len(rows)
        for part, batch, output in passes.run(policy, reference, beat):
            count = len(batch.mask) // (2 if algorithm.pairs else 1)
            rewards = objective.rewards(output, batch, algorithm).reshape(-1, count).T.tolist()
            alone = (select_rows(output, batch, [place], paired=algorithm.pairs) for place in range(len(part)))
            shares = [objective.loss(*one, sums, algorithm)[0] for one in alone]
            for index, of_row, share in zip(part, rewards, _floats(shares), strict=False):
                weight = float(examples[index].num_tokens) if by_tokens else 1.0
                # A completion without tokens counts for nothing.
                loss = share * total / weight if weight else 0.0
                found[index] = ScoredRow(own[index], of_row, loss, weight)
    return [found[index] for index in range(len(own))] if ranks.is_first_of_replica else []


def _floats(scalars: Sequence[Tensor]) -> list[float]:
    """Read scalars in one copy from the device."""
    values: list[float] = torch.stack(list(scalars)).tolist() if scalars else []
    return values
