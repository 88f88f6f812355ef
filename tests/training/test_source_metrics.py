"""Metrics of the sources of a mixture: the statistics of some rows of a micro-batch."""

from typing import Any

import pytest
import torch

from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.algorithms.preference import DpoSpec, KtoSpec, OrpoSpec, RewardModelSpec
from rlhf_core.schemas.algorithms.supervised import SftSpec
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import MicroBatch, PolicyOutput, StepSums, select_rows

pytestmark = pytest.mark.training

NUM_ROWS = 5


def batch_of(spec: AlgorithmSpec) -> tuple[PolicyOutput, MicroBatch, StepSums]:
    """Random outputs of five rows with completions of different lengths."""
    size = NUM_ROWS * (2 if spec.pairs else 1)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(size) % 4 + 2
    mask = torch.arange(6) < lengths[:, None]

    def random(*shape: int) -> Any:
        return -torch.rand(*shape, generator=generator, dtype=torch.float64)

    if spec.ranks_completions:
        output = PolicyOutput(torch.empty(0), scores=random(size))
    else:
        output = PolicyOutput(random(size, 6) * mask, random(size, 6) * mask if spec.reference else None)
    batch = MicroBatch(
        mask,
        prompt_mask=~mask if spec.scores_prompt else None,
        desirable=torch.arange(size) % 2 == 0 if spec.labelled else None,
        margins=torch.arange(NUM_ROWS) / 10 if spec.ranks_completions else None,
    )
    tokens = float(mask.sum())
    sums = StepSums(tokens, float(size), measured={"kl": 0.1, "num": 5.0}, num_chosen_tokens=tokens / 2)
    return output, batch, sums


@pytest.mark.parametrize(
    "spec",
    [
        SftSpec(name="sft", batch_size=5),
        DpoSpec(name="dpo", batch_size=5),
        OrpoSpec(name="orpo", batch_size=5),
        RewardModelSpec(name="reward_model", batch_size=5),
        KtoSpec(name="kto", batch_size=5),
    ],
    ids=lambda spec: spec.name,
)
def test_statistics_of_the_sources_add_up_to_those_of_the_micro_batch(spec: Any) -> None:
    objective = ALGORITHMS[spec.name]
    output, batch, sums = batch_of(spec)
    if spec.mismatches:
        measured = objective.measure(output, batch, spec)
        sums = StepSums(sums.num_tokens, sums.num_sequences, measured={k: float(v) for k, v in measured.items()})
    _, whole = objective.loss(output, batch, sums, spec)
    parts = [
        objective.loss(*select_rows(output, batch, rows, paired=spec.pairs), sums, spec)[1]
        for rows in ([3, 0], [1, 2, 4])
    ]
    metrics = [one for one in objective.metrics if one.name in ("train/loss", "preference/accuracy")]
    names = {name for one in metrics for name in one.stats} & whole.keys()
    assert names
    for name in names:
        for place in (0, 1):
            found = sum(float(part[name][place]) for part in parts)
            assert found == pytest.approx(float(whole[name][place])), name
