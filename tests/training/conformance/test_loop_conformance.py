"""Updates that the loop makes, from sampled completions to the gradient, next to those of TRL.

``test_conformance.py`` calls the objectives. Here ``PolicyUpdates`` also makes the passes, at the temperature of
sampling, and keeps for later updates what the first one has computed.
"""

from typing import Any
from unittest import mock

import pytest
from conformance_cases import CASES, GROUP, MAX_NEW_TOKENS, TEMPERATURE, Case

pytestmark = pytest.mark.training

TOLERANCE = 1e-6
SAMPLED = [case for case in CASES if case.trainer in ("GRPOTrainer", "RLOOTrainer")]
BY_NAME = {case.name: case for case in SAMPLED}


def distance_from_trl(case: Case, ranks: Any, temperature: float = TEMPERATURE) -> float:
    """Largest difference of the gradient of the last update of a step, which has two if the policy is to have moved."""
    import torch
    from conformance_run import ROWS_PER_MICRO_BATCH, TRL, of_sampled, theirs
    from tiny_models import EOS, PAD, config, fill, flat_gradient
    from transformers import OPTForCausalLM

    from rlhf_core.schemas.algorithms import specs
    from rlhf_core.training.models.causal_lm import PolicyModel
    from rlhf_core.training.trainers.sampling import Prompt, Rollout
    from rlhf_core.training.trainers.updates import PolicyUpdates
    from rlhf_core.training.types import Completion, Episode

    def model(name: str) -> PolicyModel:
        causal_lm = OPTForCausalLM(config())
        fill(causal_lm, name)
        return PolicyModel(causal_lm)

    spec = specs()[case.algorithm].model_validate({"name": case.algorithm, **case.settings})
    given = TRL["cases"][case.name]["given"]
    completions = given["completions"]
    flags = given.get("sampled", [[True] * len(tokens) for tokens in completions])
    sampler = of_sampled(given["sampler_logprobs"] if case.sampler else [[0.0] * len(own) for own in flags], given)
    flat = [
        Completion(tokens, "", tokens[-1] == EOS, logprobs, episode=Episode((), own, prompt))
        for tokens, logprobs, own, prompt in zip(completions, sampler, flags, given["prompts"], strict=True)
    ]
    starts = range(0, len(flat), GROUP)
    rollout = Rollout(
        [Prompt(mock.Mock(), given["prompts"][start], []) for start in starts],
        [flat[start : start + GROUP] for start in starts],
        torch.tensor(given["rewards"], dtype=torch.float64),
        mock.Mock(),
    )
    policy = model("old" if case.several_updates else "policy")
    gradients: list[torch.Tensor] = []

    def apply(*_: Any) -> None:
        gradients.append(flat_gradient(policy.causal_lm))
        policy.zero_grad()
        fill(policy.causal_lm, "policy")

    training = mock.Mock(ranks=ranks, apply=apply, tokenizer=mock.Mock(pad_token_id=PAD))
    training.spec.rollout = mock.Mock(max_new_tokens=MAX_NEW_TOKENS, temperature=temperature)
    training.spec.native_trainer = mock.Mock(micro_batch_size=ROWS_PER_MICRO_BATCH, micro_batch_tokens=0)
    engine = mock.Mock(side_effect=policy, backward=torch.Tensor.backward)
    reference = model("reference") if spec.reference else None
    batch = rollout.batch(range(len(starts)), mask_truncated=spec.masks_truncated)
    PolicyUpdates(training, mock.Mock(algorithm=spec), engine, policy, reference, batch, mock.Mock()).make()
    assert len(gradients) == 1 + case.several_updates
    return float((gradients[-1] - theirs(case).gradient).abs().max())


@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: case.name)
def test_the_loop_has_the_gradient_of_trl(case: Case, ranks: Any) -> None:
    assert distance_from_trl(case, ranks) < TOLERANCE


def test_negative_control_the_temperature_of_sampling_counts(ranks: Any) -> None:
    assert distance_from_trl(BY_NAME["grpo, dapo, on-policy"], ranks, temperature=1.0) > 1e-3


def test_negative_control_an_update_that_forgets_the_sampling_policy_is_caught(ranks: Any) -> None:
    from rlhf_core.training.trainers.updates import PolicyUpdates

    with mock.patch.object(PolicyUpdates, "_placed", return_value=None):
        assert distance_from_trl(BY_NAME["grpo, dapo, several updates"], ranks) > 1e-3
