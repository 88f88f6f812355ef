"""Short real runs, some healthy and some that learn nothing, judged while they run: for the tests and the benchmark."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

from rank_launcher import make_context, share_right

from rlhf_core.schemas.algorithms import specs
from rlhf_core.schemas.run import RunSpec

JUDGED = (
    "train/grad_norm", "train/learning_rate", "train/changed_share", "train/num_tokens", "reward/mean", "reward/max",
    "reward/min", "rollout/zero_std_groups", "rollout/entropy", "rollout/truncated_share", "rollout/length_mean",
    "rollout/train_gap", "rollout/seed_digest", "reward/length_correlation", "reward/length_slope", "policy/kl",
    "policy/clip_share", "policy/dual_clip_share",
)  # fmt: skip
"""Metrics that the judge reads."""

WARM = {"num_steps": 40, "batch_size": 32, "learning_rate": 1e-2, "warmup_steps": 5}


def base_spec() -> dict[str, Any]:
    """Sorting three digits: about half of the answers are right after the warm start, then 60 steps of GRPO follow."""
    return {
        "name": "health",
        "seed": 0,
        "model": {
            "config": {
                "model_type": "qwen3",
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 24,
                "tie_word_embeddings": False,
                "initializer_range": 0.08,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            },
            "tokenizer": "char",
        },
        "data": {
            "generator": "rlhf_core.training.tasks:sort_digits",
            "generator_args": {"num_digits": 3, "num_train": 600, "num_eval": 16},
        },
        "sft": WARM,
        "train": {"num_steps": 60, "learning_rate": 1e-3, "micro_batch_size": 64, "log_samples_every": 0},
        "grpo": {"prompts_per_step": 8, "samples_per_prompt": 8},
        "rollout": {"max_new_tokens": 5},
        "reward": {"functions": ["rlhf_core.training.rewards:exact_match"]},
        "evaluate": {"num_prompts": 16},
        "checkpoint": {"every_num_steps": 50},
        # A quarter of the default: so few completions are sampled here that the default would excuse everything.
        # Findings that would otherwise only warn end the run: a healthy run has no warnings either.
        "health": {"min_completions": 1024, "actions": dict.fromkeys(("clipped", "train_gap", "kl", "length"), "stop")},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Reward functions


def from_minus_one(*, completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Minus one for the wrong answer, plus one for the right one."""
    return [2.0 * (made == right) - 1.0 for made, right in zip(completions, answer, strict=True)]


def nothing_is_right(*, completions: list[str], **columns: Any) -> list[float]:
    """Reward function that never finds the right answer."""
    return [0.0 for _ in completions]


def by_length(*, completions: list[str], **columns: Any) -> list[float]:
    """Reward of one tenth per digit."""
    return [sum(character.isdigit() for character in made) / 10 for made in completions]


def dense(*, completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Share of correct characters."""
    return share_right(completions=completions, answer=answer)


# ---------------------------------------------------------------------------------------------------------------------
# Faults


def rank_seeds(ranks: tuple[int, ...] = ()) -> Callable[[int], AbstractContextManager[Any]]:
    """Sampling seeds derived from the rank, as in ms-swift #3745, on all or on some ranks."""

    def broken(rank: int) -> AbstractContextManager[Any]:
        if ranks and rank not in ranks:
            return nullcontext()
        return mock.patch("rlhf_core.training.trainers.sampling.sample_seed", return_value=rank)

    return broken


SeedFormula = Callable[[int, int, int, str, int], int]
"""Function of rank, run seed, step, prompt and sample index that returns the seed of a completion."""


def swift_seed(tensor_parallel: int, has_local_rank: bool = True) -> SeedFormula:
    """Formula of ms-swift as of #3745: the rank divided by the size of a tensor-parallel group, plus one for each
    request of that group; without LOCAL_RANK, all ranks of a node count as one. Nothing in it changes with the step."""

    def formula(rank: int, run_seed: int, step: int, uid: str, index: int) -> int:
        return (rank if has_local_rank else rank // 4) // tensor_parallel + index % tensor_parallel

    return formula


def verl_seed(num_replicas: int) -> SeedFormula:
    """Formula of verl under ``full_determinism``: every request gets the seed of the replica that serves it."""

    def formula(rank: int, run_seed: int, step: int, uid: str, index: int) -> int:
        replica = int.from_bytes(blake2b(f"{step} {uid} {index}".encode(), digest_size=4).digest(), "big")
        return replica % num_replicas + run_seed

    return formula


def slime_seed(rank: int, run_seed: int, step: int, uid: str, index: int) -> int:
    """Formula of slime's deterministic mode: the run's seed plus the sample's index, for every prompt and step."""
    return run_seed + index


@dataclass(frozen=True)
class SeedCase:
    """A formula for seeds, and the kinds of repetition that it causes."""

    formula: SeedFormula
    kinds: set[str]


_IN_GROUPS, _EVERY_STEP = "seeds within groups", "seeds across steps"
SEED_FORMULAS: dict[str, SeedCase] = {
    "ms-swift, one rank an engine": SeedCase(swift_seed(1), {_IN_GROUPS, _EVERY_STEP}),
    "ms-swift, engines of two": SeedCase(swift_seed(2), {_IN_GROUPS, _EVERY_STEP}),
    "ms-swift, LOCAL_RANK lost": SeedCase(swift_seed(1, has_local_rank=False), {_IN_GROUPS, _EVERY_STEP}),
    "verl, one replica": SeedCase(verl_seed(1), {_IN_GROUPS, _EVERY_STEP}),
    "verl, two replicas": SeedCase(verl_seed(2), {_IN_GROUPS}),
    "verl, eight replicas": SeedCase(verl_seed(8), {_IN_GROUPS}),
    "slime, deterministic": SeedCase(slime_seed, {"seeds across prompts", _EVERY_STEP}),
}


def seeded_by(formula: SeedFormula) -> Callable[[int], AbstractContextManager[Any]]:
    """Sampling seeds from the formula of another framework."""

    def broken(rank: int) -> AbstractContextManager[Any]:
        return mock.patch("rlhf_core.training.trainers.sampling.sample_seed", functools.partial(formula, rank))

    return broken


@contextmanager
def same_prompts_everywhere(rank: int) -> Iterator[None]:
    """Give every rank the batch part of rank 0, and with it the seeds of rank 0."""
    from rlhf_core.training.distributed import Ranks

    real = Ranks.deal

    def deal(self: Ranks, items: Any) -> Any:
        return real(dataclasses.replace(self, rank=0), items)

    with mock.patch.object(Ranks, "deal", deal):
        yield


@contextmanager
def stuck_data(rank: int) -> Iterator[None]:
    """Use the same prompts and the same seeds at every step of GRPO."""
    from rlhf_core.training.rollouts.seeds import sample_seed
    from rlhf_core.training.trainers.context import TrainingContext

    real = TrainingContext.take_rows

    def take(self: TrainingContext, count: int) -> Any:
        taken = real(self, count)
        if count == base_spec()["grpo"]["prompts_per_step"]:  # the warm start is unaffected
            self.position -= count
        return taken

    def seed(run_seed: int, step: int, uid: str, index: int) -> int:
        return sample_seed(run_seed, 0, uid, index)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(TrainingContext, "take_rows", take))
        stack.enter_context(mock.patch("rlhf_core.training.trainers.sampling.sample_seed", seed))
        yield


@contextmanager
def detached_loss(rank: int) -> Iterator[None]:
    """Detach the loss from the weights."""
    from rlhf_core.training.algorithms.policy_gradient import PolicyGradient

    real = PolicyGradient.loss

    def loss(*arguments: Any) -> Any:
        value, stats = real(*arguments)
        return value * 0, stats

    with mock.patch.object(PolicyGradient, "loss", loss):
        yield


@contextmanager
def frozen_weights(rank: int) -> Iterator[None]:
    """Break the optimizer, so that its updates never reach the weights."""
    from rlhf_core.training.trainers.engine import Engine

    real = Engine.step

    def step(self: Engine, rate: float) -> float:
        return real(self, 0.0)

    with mock.patch.object(Engine, "step", step):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@dataclass(frozen=True)
class Case:
    """One run and its expected outcome."""

    settings: dict[str, Any]
    broken: Callable[[int], AbstractContextManager[Any]] = lambda rank: nullcontext()
    rule: str = ""
    """Rule that must end the run; empty for a healthy run."""
    words: str = ""
    """Words that the message must contain."""


HEALTHY: dict[str, Case] = {
    "seed 1": Case({"seed": 1}),
    "seed 2": Case({"seed": 2}),
    "seed 3": Case({"seed": 3}),
    "seed 4": Case({"seed": 4}),
    "solved by the warm start": Case({"sft": {"num_steps": 150}, "train.learning_rate": 1e-4}),
    "solved on the way": Case({"sft": {"num_steps": 100}, "train.learning_rate": 2e-3, "seed": 5}),
    "dense reward": Case({"reward.functions": ["health_runs:dense"], "seed": 6}),
    "no warm start, dense reward": Case({"sft": {"num_steps": 0}, "reward.functions": ["health_runs:dense"]}),
    "reward from -1 to 1": Case({"reward.functions": ["health_runs:from_minus_one"], "seed": 7}),
    "two rewards": Case(
        {
            "reward": {
                "functions": ["rlhf_core.training.rewards:exact_match", "health_runs:dense"],
                "weights": [1.0, 0.2],
            }
        }
    ),
    "everything cut off": Case({"rollout.max_new_tokens": 3, "seed": 8}),
    "two samples a prompt": Case({"grpo": {"prompts_per_step": 16, "samples_per_prompt": 2}, "seed": 9}),
    "two prompts a step": Case(
        {"grpo": {"prompts_per_step": 2, "samples_per_prompt": 16}, "train.learning_rate": 3e-4}
    ),
    "Dr. GRPO": Case({"grpo": {"advantage_scale": "none", "loss_aggregation": "fixed_length"}, "seed": 10}),
    "clip-higher, batch scale": Case({"grpo": {"advantage_scale": "batch", "clip_high": 0.28}, "seed": 11}),
    "KL penalty": Case({"grpo": {"kl_coefficient": 0.1}, "seed": 12}),
    "high temperature": Case({"rollout.temperature": 1.3, "seed": 13}),
    "slow": Case({"train.learning_rate": 1e-5, "seed": 14}),
    "bfloat16, cosine": Case({"model.dtype": "bfloat16", "train.schedule": "cosine", "seed": 15}),
    "supervised alone": Case({"sft": {"num_steps": 0}, "train.algorithm": "sft", "seed": 16}),
}
"""Other seeds and settings. A judge that ends one of them is wrong."""

DEGENERATE: dict[str, Case] = {
    "seeds from ranks": Case({}, rank_seeds(), "identical", "on rank 0 (node0) and rank 1 (node1)"),
    "seeds from ranks on one node": Case({"seed": 1}, rank_seeds((1,)), "identical", "on rank 1 (node1)"),
    "seeds of ms-swift": Case({}, seeded_by(swift_seed(1)), "identical", "on rank 0 (node0) and rank 1 (node1)"),
    "seeds of verl": Case({}, seeded_by(verl_seed(2)), "identical", "the seed of another one of their group"),
    "seeds of slime": Case({}, seeded_by(slime_seed), "identical", "different prompts are sampled with the same seeds"),
    "reward by length": Case(
        {"reward.functions": ["health_runs:by_length"], "sft.num_steps": 20, "rollout.max_new_tokens": 12},
        rule="length",
        words="the reward rises by length",
    ),
    "same prompts on all ranks": Case({}, same_prompts_everywhere, "identical", "as other ranks"),
    "same prompts at every step": Case({"train.learning_rate": 1e-7}, stuck_data, "identical", "at every step"),
    "learning rate 5": Case({"train.learning_rate": 5.0}, rule="no_spread"),
    "learning rate 0.05": Case({"train.learning_rate": 0.05}, rule="no_spread"),
    "shuffled reward": Case(
        {"reward.functions": ["shuffled_reward:shuffled_exact_match"], "train.learning_rate": 3e-3},
        rule="reward_collapse",
    ),
    "reward always 0": Case({"reward.functions": ["health_runs:nothing_is_right"]}, rule="no_spread"),
    "loss without a gradient": Case({}, detached_loss, "frozen", "the gradient is exactly 0"),
    "weights that do not change": Case({}, frozen_weights, "frozen", "no weight changes"),
}
"""Broken runs: each must be ended by its rule."""

CASES = HEALTHY | DEGENERATE


GROUPS = ((8, 8), (16, 4), (4, 16))
"""Prompts of a step, and samples of each."""
FROM_NOTHING = ("sft", "reward_model")
"""Algorithms that need no warm start, or cannot have one."""
REWARDS = ("rlhf_core.training.rewards:exact_match", "health_runs:dense", "health_runs:from_minus_one")


def healthy_of(algorithm: str, number: int) -> Case:
    """One of arbitrarily many healthy runs of an algorithm: each has its own seed, learning rate, warm start,
    temperature, reward and batch shape."""
    traits = specs()[algorithm]
    prompts, samples = GROUPS[number % 3]
    settings: dict[str, Any] = {
        "seed": 100 + number,
        "main": {"name": algorithm, "prompts_per_step": prompts, "samples_per_prompt": samples},
        "sft": {"num_steps": (20, 40, 80)[number // 3 % 3]},
        "train.learning_rate": (3e-4, 1e-3)[number % 2],
        "rollout.temperature": (1.0, 1.2)[number // 2 % 2],
        "reward.functions": [REWARDS[number // 2 % 3]],
    }
    if not traits.samples:
        settings["main"] = {"name": algorithm, "batch_size": 4 * prompts}
    if traits.pairs or traits.labelled:
        settings["data.generator"] = f"rlhf_core.training.tasks:{'sorted_pairs' if traits.pairs else 'sorted_or_not'}"
    if algorithm in FROM_NOTHING:
        settings["sft"] = {"num_steps": 0}
    return Case(settings)


def with_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The base spec with the settings of a case: a whole section, part of one, one dotted field, or the main
    algorithm."""
    spec = base_spec()
    settings = dict(settings)
    if main := settings.pop("main", None):
        spec = RunSpec.model_validate(with_settings(settings)).model_dump(mode="json")
        spec["loops"]["main"]["algorithm"] = main
        return spec
    for name, value in settings.items():
        section, _, field = name.partition(".")
        if field:
            spec[section] = {**spec[section], field: value}
        else:
            spec[section] = {**spec[section], **value} if isinstance(value, dict) else value
    return spec


def case_of(name: str) -> Case:
    """The case with a name, or with ``<algorithm> <number>``."""
    algorithm, _, number = name.partition(" ")
    return CASES[name] if name in CASES else healthy_of(algorithm, int(number))


def make_runs(rank: int, num_ranks: int, folder: str, names: list[str], num_steps: int | None = None) -> dict[str, Any]:
    """Make some of the runs one after another in one process group; each rank counts as a separate node.

    Args:
        num_steps: steps of the main loop, if not those of the cases.

    Returns:
        By name: ``done`` or the error, and the mean reward of the first and the last five steps.
    """
    from rlhf_core.diagnosis.health.judge import Judge
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.trainers.run import train_run

    def observe(
        self: Judge, step: int, samples: bool, metrics: dict[str, float], by_rank: dict[str, Any], peak_rate: float
    ) -> Any:
        if rank == 0:
            digits = {"rollout/seed_digest": 17}
            kept = {name: float(f"{metrics[name]:.{digits.get(name, 6)}g}") for name in JUDGED if name in metrics}
            seen = {"step": step, "samples": samples, "metrics": kept, "by_rank": by_rank}
            with judged(Path(folder), name).open("a") as file:
                file.write(json.dumps(seen) + "\n")
        return real(self, step, samples, metrics, by_rank, peak_rate)

    ranks = init_process_group(make_context(folder, with_settings({}), rank, num_ranks))
    real = Judge.observe
    results: dict[str, Any] = {}
    for name in names:
        case = case_of(name)
        spec = with_settings(case.settings | ({} if num_steps is None else {"train.num_steps": num_steps}))
        path = f"{folder}/{name.replace(' ', '-')}"
        context = dataclasses.replace(make_context(path, spec, rank, num_ranks), node=f"node{rank}")
        with case.broken(rank), mock.patch.object(Judge, "observe", observe):
            try:
                result = str(train_run(context, dataclasses.replace(ranks, reporter=context.reporter)))
            except Exception as error:  # noqa: BLE001 - what a run raises is its result here
                result = f"{type(error).__name__}: {error}"
        ranks.barrier()
        results[name] = result
    leave_process_group(ranks)
    return results


def judged(folder: Path, name: str) -> Path:
    """File with the observations of a run that the judge received."""
    return folder / f"{name.replace(' ', '-')}.jsonl"


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Metrics of a run, line by line."""
    path = next(folder.glob(f"{name.replace(' ', '-')}/attempts/1/restarts/0/metrics.jsonl"))
    return [json.loads(line) for line in path.read_text().splitlines()]
