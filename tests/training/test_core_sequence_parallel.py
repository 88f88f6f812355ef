"""Rows shared by several ranks: the gradient of a step is the same for every number of ranks per row.

The ranks of a group are threads here, in double precision; ``test_loop_online.py`` and ``test_preference_runs.py`` have
processes.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from core_models import QWEN, char_tokenizer, tiny_model
from pydantic import JsonValue, TypeAdapter
from test_preference_losses import SPECS, examples, named, ranker
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.algorithms import Algorithm, specs
from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import MicroBatch, SampledBatch, StepSums
from rlhf_core.training.algorithms.ppo import value_loss
from rlhf_core.training.data.batches import SequenceBatch, collate
from rlhf_core.training.data.examples import make_batch, score_batch, scored, step_sums
from rlhf_core.training.distributed import Ranks, SequenceGroup
from rlhf_core.training.models import packing, sequence_parallel
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.models.lean_layers import use_gradient_checkpointing, use_lean_layers
from rlhf_core.training.models.packing import Packing
from rlhf_core.training.models.reward_model import RewardModel
from rlhf_core.training.trainers.ppo import ValueModel
from rlhf_core.training.trainers.shared_batches import of_replica
from rlhf_core.training.trainers.updates import StepBatch
from rlhf_core.training.types import Completion, Episode, NullReporter

pytestmark = pytest.mark.training

WIDE: dict[str, JsonValue] = {**QWEN, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Four heads, so that four ranks can share a row, of which two then have the same keys and values."""


@pytest.fixture(autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(seed: int = 1, config: Mapping[str, JsonValue] = WIDE) -> PreTrainedModel:
    """A language model in double precision. Its norms are ours: those of transformers compute in single precision."""
    built = tiny_model(config, seed).double()
    assert use_lean_layers(built)
    return built


@dataclass
class Threads:
    """Collectives among the threads of one group."""

    size: int
    sent: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.sent = [None] * self.size
        self.barrier = threading.Barrier(self.size)

    def exchange(self, rank: int, content: Tensor) -> list[Tensor]:
        """Contents of all threads."""
        self.sent[rank] = content.clone()
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class ThreadGroup(SequenceGroup):
    """A group whose ranks are threads; ``process_group`` is a :class:`Threads`."""

    def swap(self, parts: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self.process_group.exchange(self.rank, parts)])

    def total(self, values: Tensor) -> Tensor:
        return torch.stack(self.process_group.exchange(self.rank, values)).sum(0)

    def gather(self, values: Tensor) -> list[Tensor]:
        found: list[Tensor] = self.process_group.exchange(self.rank, values)
        return found


def in_groups(size: int, act: Callable[[SequenceGroup | None], Any]) -> list[Any]:
    """Results of a function on each rank of one group; a group of one has none."""
    if size == 1:
        return [act(None)]
    threads = Threads(size)

    def on_rank(rank: int) -> Any:
        try:
            return act(ThreadGroup(rank, size, threads))
        except BaseException:
            threads.barrier.abort()  # the others do not wait for it
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))


# ---------------------------------------------------------------------------------------------------------------------
# Invariance

LossOf = Callable[[nn.Module, Sequence[int]], Tensor]
"""Function (model, rows of a micro-batch) -> its part of the loss of the step."""

NUM_ROWS = 12
LAYOUTS = [(2, 1, 3), (2, 2, 4), (4, 4, 1), (4, 2, 2)]
"""Ranks, ranks per row, and micro-batches of a rank, which pack other sequences together each time."""


@dataclass(frozen=True)
class Case:
    """A model and the loss of an algorithm."""

    trained: nn.Module
    loss_of: LossOf

    def fresh(self) -> nn.Module:
        """A copy of the model for one rank."""
        return copy.deepcopy(self.trained)


def parsed(spec: dict[str, Any]) -> AlgorithmSpec:
    found: AlgorithmSpec = TypeAdapter(Algorithm).validate_python(spec)
    return found


@functools.cache
def reference() -> PolicyModel:
    """The reference of every algorithm that has one."""
    return PolicyModel(model(seed=2)).requires_grad_(False)


def of_rows(spec: dict[str, Any]) -> Case:
    """An algorithm that learns from rows."""
    algorithm = parsed(spec)
    rows, objective = examples(algorithm), ALGORITHMS[algorithm.name]
    frozen = reference() if algorithm.reference else None
    num_tokens, num_sequences, num_chosen = step_sums(rows, algorithm)
    sums = StepSums(num_tokens, num_sequences, num_chosen_tokens=num_chosen, measured={"mismatched": 0.3})

    def loss_of(trained: nn.Module, part: Sequence[int]) -> Tensor:
        batch, made = make_batch([rows[index] for index in part], algorithm, char_tokenizer().pad_token_id)
        output = score_batch(trained, frozen, batch, made, algorithm)
        return objective.loss(output, made, sums, algorithm)[0]

    if algorithm.ranks_completions:
        classifier = ranker(config=WIDE).double()
        assert use_lean_layers(classifier) == 0, "it was loaded with ours"
        return Case(RewardModel(classifier), loss_of)
    return Case(PolicyModel(model()), loss_of)


def sampled_rows(part: Sequence[int]) -> SequenceBatch:
    """Completions of different lengths, of which three share a prompt."""
    prompts = [[5 + 7 * (row // 3), 6, 9][: 1 + row // 3] for row in part]
    return collate(
        prompts,
        [[20 + (3 * row + at) % 60 for at in range(1 + (5 * row) % 7)] for row in part],
        char_tokenizer().pad_token_id,
    )


def columns_of(part: Sequence[int], batch: SequenceBatch, phase: float) -> Tensor:
    """A figure of each sampled token, whatever micro-batch it is in."""
    rows = torch.tensor(part, dtype=torch.float64)[:, None]
    first = batch.prompt_mask.sum(-1, keepdim=True)
    values = torch.sin(rows * 1.7 + (torch.arange(batch.target_mask.shape[1]) - first) * 0.9 + phase)
    return torch.where(batch.target_mask, values, 0.0)


def sums_of_samples() -> StepSums:
    whole = sampled_rows(range(NUM_ROWS))
    return StepSums(float(whole.target_mask.sum()), NUM_ROWS, max_new_tokens=7)


def of_samples(name: str) -> Case:
    """An algorithm that samples."""
    algorithm = parsed({"name": name, "kl_coefficient": 0.1})
    objective, sums = ALGORITHMS[name], sums_of_samples()
    frozen = reference() if algorithm.reference else None

    def loss_of(trained: nn.Module, part: Sequence[int]) -> Tensor:
        batch = sampled_rows(part)
        output, _ = scored(
            trained,
            frozen,
            batch.input_ids,
            batch.target_mask,
            temperature=0.9,
            entropy_gradient=algorithm.entropy_in_loss,
        )
        old = output.logprobs.detach() + columns_of(part, batch, 0.0) / 5
        made = MicroBatch(
            batch.target_mask,
            advantages=columns_of(part, batch, 1.0),
            old_logprobs=old,
            sampler_logprobs=old + columns_of(part, batch, 2.0) / 9,
        )
        return objective.loss(output, made, sums, algorithm)[0]

    return Case(PolicyModel(model()), loss_of)


def of_values() -> Case:
    """The value model of PPO."""

    def loss_of(trained: nn.Module, part: Sequence[int]) -> Tensor:
        batch = sampled_rows(part)
        values = trained(batch.input_ids, batch.target_mask)
        old, returns = (columns_of(part, batch, phase) for phase in (0.0, 1.0))
        normaliser = sums_of_samples().num_tokens
        return value_loss(values, old, returns, batch.target_mask, normaliser=normaliser, value_clip=0.2)[0]

    values = ValueModel(model())
    nn.init.normal_(values.head.weight)
    values.try_passes()
    return Case(values, loss_of)


CASES: dict[str, Callable[[], Case]] = {
    **{named(spec): (lambda spec=spec: of_rows(spec)) for spec in SPECS},
    **{name: (lambda name=name: of_samples(name)) for name, spec in specs().items() if spec.samples},
    "value model": of_values,
}


def gradient(case: Case, num_ranks: int, size: int, accumulation: int) -> Tensor:
    """Gradient of a step, summed over ranks and micro-batches.

    Args:
        size: ranks that share each row.
    """
    num_replicas = num_ranks // size
    found: list[Tensor] = []
    for replica in range(num_replicas):
        own = range(replica, NUM_ROWS, num_replicas)
        parts = [own[start::accumulation] for start in range(accumulation)]

        def on_rank(group: SequenceGroup | None, parts: list[range] = parts) -> Tensor:
            trained: Any = case.fresh()
            trained.sequence = group
            if isinstance(trained, RewardModel):  # the others have tried their passes
                trained.try_passes()
            for part in parts:
                case.loss_of(trained, part).backward()
            return torch.cat([one.grad.flatten() for one in trained.parameters() if one.grad is not None])

        found += in_groups(size, on_rank)
    return torch.stack(found).sum(0)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_does_not_depend_on_the_ranks_that_share_a_row(name: str) -> None:
    case = CASES[name]()
    expected = gradient(case, 1, 1, 1)
    assert float(expected.norm()) > 1e-3
    for layout in LAYOUTS:
        assert float((gradient(case, *layout) - expected).abs().max()) <= 1e-10, layout


def test_the_gradient_is_the_same_with_activations_that_are_recomputed() -> None:
    """The exchanges of a layer are then made again in the backward pass."""
    case = of_samples("grpo")
    expected = gradient(case, 1, 1, 1)
    policy: Any = case.trained
    use_gradient_checkpointing(policy.causal_lm)
    policy.train()
    assert float((gradient(case, 4, 2, 2) - expected).abs().max()) <= 1e-10


def test_negative_control_labels_that_are_shifted_after_the_cut_are_caught() -> None:
    """The last token of a piece then does not know its label, which is on the next rank."""
    case = of_rows({"name": "sft"})
    expected = gradient(case, 1, 1, 1)

    def without_last(cut: Packing) -> Tensor:
        length = cut.tokens.shape[1]
        return whose.__get__(cut) & (cut.source % length < length - (1 if cut.group is not None else 0))

    whose = Packing.own
    with mock.patch.object(Packing, "own", property(without_last)), mock.patch.object(packing, "agrees"):
        assert float((gradient(case, 2, 2, 1) - expected).abs().max()) > 1e-4


def test_negative_control_a_gather_whose_gradient_is_summed_is_caught() -> None:
    """Every rank derives the same loss: a sum over the ranks counts its gradient once per rank."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
            ctx.group = group
            return group.total(values)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return ctx.group.total(grad), None

    case = of_rows({"name": "sft"})
    expected = gradient(case, 1, 1, 1)
    with mock.patch.object(sequence_parallel, "_Whole", Summed):
        assert float((gradient(case, 2, 2, 1) - 2 * expected).abs().max()) <= 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# Memory, and what cannot be shared


def test_every_rank_keeps_its_part_of_the_tokens() -> None:
    """Hidden states of the layers, of a row that is padded to a multiple of the ranks."""
    batch = sampled_rows(range(NUM_ROWS))
    number = packing.pack(batch.input_ids, batch.target_mask).tokens.shape[1]
    assert number % 4, "there is padding"
    case = of_rows({"name": "sft"})

    def widths(group: SequenceGroup | None) -> set[int]:
        policy: Any = case.fresh()
        policy.sequence = group
        found: set[int] = set()
        for layer in policy.causal_lm.base_model.layers:
            layer.mlp.register_forward_hook(lambda module, inputs, output: found.add(output.shape[1]))
        policy(batch.input_ids, batch.target_mask)
        return found

    assert in_groups(1, widths) == [{number}]
    assert in_groups(4, widths) == [{-(-number // 4)}] * 4


REFUSED: dict[str, tuple[dict[str, JsonValue], int, str]] = {
    "heads": (WIDE, 3, "has 4 attention heads, which 3 ranks cannot share evenly"),
    "window": ({**WIDE, "model_type": "mistral", "sliding_window": 4}, 2, "mixes tokens in other ways"),
    "rope": (
        {
            **{key: value for key, value in WIDE.items() if key != "head_dim"},
            "model_type": "llama",
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        2,
        "rotary embeddings of type dynamic",
    ),
}


def refusals(built: PreTrainedModel, size: int) -> list[str]:
    """Messages with which the ranks of one group refuse to share the tokens of a model."""

    def refusal(group: SequenceGroup | None) -> str:
        with pytest.raises(BadConfig) as refused:
            PolicyModel(copy.deepcopy(built), sequence=group)
        return str(refused.value)

    return in_groups(size, refusal)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_tokens_cannot_be_shared_is_refused(name: str) -> None:
    config, size, reason = REFUSED[name]
    for message in refusals(tiny_model(config), size):
        assert f"found trainer.sequence_parallel = {size}" in message
        assert reason in message


def test_negative_control_a_pass_that_exchanges_nothing_is_refused() -> None:
    """Each rank attends to its own piece alone, as a model would whose attention is not ours."""

    def apart(query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup) -> tuple[Tensor, ...]:
        heads = query.shape[1] // group.size
        return tuple(part[:, :heads].repeat(1, 1, group.size, 1) for part in (query, key, value))

    built = model(config={**WIDE, "num_key_value_heads": 4})
    with mock.patch.object(packing, "to_heads", apart):
        for message in refusals(built, 2):
            assert "gives other results if ranks share its tokens" in message


# ---------------------------------------------------------------------------------------------------------------------
# Completions


def test_ranks_that_share_rows_train_on_the_completions_of_all_of_them() -> None:
    """One has two groups of two completions, one with an observation; the other one has none."""
    whole = Completion([7, 8], "", True, [-0.5, -0.25])
    turns = Completion([5, 6, 7], "", False, [-1.0, -3.0], episode=Episode((), [True, False, True], [1, 2, 9]))
    empty = Completion([], "", False, [])
    made = [whole, turns, empty, whole]
    mask = torch.tensor([[1, 1], [1, 1], [0, 0], [1, 1]]).bool()
    trained = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 1]]).bool()
    rewards = torch.tensor([[0.1, 0.2], [1 / 3, float("nan")]], dtype=torch.float64)
    both = StepBatch([[1, 2]] * 4, made, [0, 1, 6, 7], SampledBatch(rewards, mask, trained, torch.tensor([2, 3, 0, 2])))
    nothing = mask[:0, :0]
    neither = StepBatch([], [], [], SampledBatch(rewards[:0], nothing, nothing, torch.tensor([], dtype=torch.int64)))

    def of_rank(group: SequenceGroup | None) -> StepBatch:
        assert group is not None
        ranks = Ranks(group.rank, 2, torch.device("cpu"), NullReporter(), Mock(), group)
        return of_replica(both if group.rank else neither, ranks)

    for found in in_groups(2, of_rank):
        assert found.prompts == both.prompts
        assert found.places == both.places
        for one, other in zip(found.completions, made, strict=True):
            assert (one.token_ids, one.logprobs, one.finished) == (other.token_ids, other.logprobs, other.finished)
            assert list(one.sampled) == list(other.sampled)
        for name in ("rewards", "mask", "trained", "lengths"):
            torch.testing.assert_close(
                getattr(found.sampled, name), getattr(both.sampled, name), rtol=0, atol=0, equal_nan=True
            )
