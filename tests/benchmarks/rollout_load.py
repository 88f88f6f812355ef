"""Parts of ``bench_rollout.py``: engines in separate processes, each on one core, and timed rollouts over them.

    python tests/benchmarks/rollout_load.py ROOT RANK CORE     # one engine

Engines, client and weight sync are those of a run; only the agents that would start the engines are left out.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

import torch
import torch.distributed as dist
from core_models import char_tokenizer, tiny_model
from rank_launcher import make_context, tiny_spec

from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.environments.conversations import Conversations
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.environments.rollout_steps import RolloutSteps
from rlhf_core.training.rollouts.base import PromptList, Sampling
from rlhf_core.training.rollouts.remote import engine as remote
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.rollouts.server.process import run_engine
from rlhf_core.training.types import Completion, NullReporter, Row

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
"""A model of 3 million random weights over the characters."""
MAX_PROMPT_TOKENS = 1024
MAX_NEW_TOKENS = 64
SPEC = "bench_spec.json"
TURNS = TurnsSpec(environment="uneven_tools:Uneven", max_turn_tokens=64)


@dataclass(frozen=True)
class Load:
    """Prompts of a rollout; each has as many completions as seeds."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[Sequence[int]]
    sampling: Sampling


@dataclass(frozen=True)
class Round:
    """Times of one rollout, in seconds from its beginning."""

    seconds: float
    num_tokens: int
    ends: Sequence[float]
    """Times at which prompts were answered, ascending."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def tail(self) -> float:
        """Share of the time in which the last tenth of the prompts is answered."""
        return (self.ends[-1] - self.ends[len(self.ends) * 9 // 10 - 1]) / self.ends[-1]


class TimedDispatcher(Dispatcher):
    """Dispatcher that records the times at which prompts are answered."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ends: list[float] = []

    def answer(self, engine: int, index: int, completions: Sequence[Completion]) -> bool:
        """Accept an answer; see ``Dispatcher``."""
        accepted = super().answer(engine, index, completions)
        if accepted:
            self.ends.append(time.perf_counter())
        return accepted


class OrderGivenDispatcher(TimedDispatcher):
    """Dispatcher that deals prompts in their order: it knows their numbers of completions, but no lengths."""

    def _cost(self, index: int) -> int:
        return self._size(index)


def rollout(trainer: RemoteEngines, load: Load, dispatcher: type[TimedDispatcher] = TimedDispatcher) -> Round:
    """Sample once with version 1, which is in force."""
    made: list[TimedDispatcher] = []

    def make(*arguments: Any, **settings: Any) -> TimedDispatcher:
        made.append(dispatcher(*arguments, **settings))
        return made[0]

    with mock.patch.object(remote, "Dispatcher", make):
        begin = time.perf_counter()
        groups = trainer.sample(load.prompts, load.seeds, load.sampling, 1, _no_beat)
        seconds = time.perf_counter() - begin
    counts = trainer.take_counts()
    assert not counts["rollout/moved_prompts"], "an engine was lost: these times would be meaningless"
    num_tokens = sum(len(completion.token_ids) for group in groups for completion in group)
    return Round(seconds, num_tokens, [end - begin for end in made[0].ends])


def rollout_of_turns(trainer: RemoteEngines, load: Load, pool: EnvironmentPool, *, in_rounds: bool) -> Round:
    """Sample rollouts of several turns once, with version 1, which is in force."""
    ranks = Ranks(0, 1, torch.device("cpu"), NullReporter(), dist.HashStore())
    conversations = Conversations(TURNS, ranks, RolloutSteps(TURNS, pool, char_tokenizer(), {}, ()))
    rows = [Row(f"{index}", "", "", "", {}) for index in range(len(load.prompts))]
    engine = mock.Mock(sample=trainer.sample, continuous=None if in_rounds else trainer.continuous)
    begin = time.perf_counter()
    groups = conversations.sample(engine, rows, load.prompts, load.seeds, load.sampling, 1, _no_beat)
    seconds = time.perf_counter() - begin
    return Round(seconds, sum(len(made.sampled_ids) for group in groups for made in group), [])


def seconds_of_steps(trainer: RemoteEngines, bound: int, loads: Sequence[Load], training_s: float) -> float:
    """Time of a step: weights go to the engines, its prompts are sampled, and the trainers do something else.

    Args:
        bound: ``rollout.max_staleness``.
        loads: prompts of each step.
        training_s: time of an update, in which this process leaves the engines alone.
    """
    models = [tiny_model(MODEL, seed=seed) for seed in range(2)]
    sources = [PromptList(load.prompts, load.seeds, load.sampling) for load in loads]
    left = deque(enumerate(sources))
    started = time.perf_counter()
    for step in range(len(sources)):
        version = step + 2
        trainer.load(models[step % 2], version, _no_beat)  # up to one step ahead, this waits for what was begun

        def begin_until(last: int, version: int = version) -> None:
            while left and left[0][0] <= last:
                trainer.continuous.begin(left.popleft()[1], version)

        begin_until(step + bound if bound > 1 else step)
        trainer.continuous.collect(_no_beat)
        begin_until(step + bound)
        time.sleep(training_s)
    seconds = time.perf_counter() - started
    counts = trainer.take_counts()
    assert not counts["rollout/moved_prompts"], "an engine was lost: these times would be meaningless"
    return seconds / len(sources)


@dataclass(frozen=True)
class Engines:
    """Running engines, and trainers that use the first of them."""

    root: Path
    spec: dict[str, Any]

    def trainer(self, number: int, restart: int = 0, **settings: Any) -> RemoteEngines:
        """A trainer for the first ``number`` engines, with version 1 in force.

        Args:
            restart: number that tells its versions from those of other trainers.
            settings: further settings of ``[rollout]``.
        """
        spec = {**self.spec, "rollout": {**self.spec["rollout"], "engines": number, **settings}}
        context = make_context(str(self.root), spec, 0, 1, restart)
        trainer = RemoteEngines(context, Ranks(0, 1, torch.device("cpu"), NullReporter(), dist.HashStore()))
        trainer.load(tiny_model(self.spec["model"]["config"]), 1, _no_beat)
        return trainer


@contextlib.contextmanager
def running_engines(root: Path, cores: Sequence[int], **settings: Any) -> Iterator[Engines]:
    """Start one engine on each of these cores; they are stopped at the end of the block.

    Args:
        settings: settings of ``[rollout]``.
    """
    spec = tiny_spec(
        model={"config": MODEL},
        rollout={"engines": len(cores), "max_new_tokens": MAX_NEW_TOKENS, **settings},
        data={"max_prompt_tokens": MAX_PROMPT_TOKENS},
    )
    folder = RunDir(root).initial_model
    tiny_model(MODEL).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    (root / SPEC).write_text(json.dumps(spec))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with contextlib.ExitStack() as running:
        for rank, core in enumerate(cores):
            output = running.enter_context((root / f"engine-{rank}.out").open("wb"))
            words = [sys.executable, __file__, str(root), str(rank), str(core)]
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
            running.callback(process.wait)
            running.callback(process.kill)
        yield Engines(root, spec)


def _engine(root: str, rank: int, core: int) -> None:
    os.sched_setaffinity(0, {core})  # before other threads exist, which inherit it
    spec = json.loads((Path(root) / SPEC).read_text())
    run_engine(replace(make_context(root, spec, rank, spec["rollout"]["engines"]), role=Role.ROLLOUT))


def _no_beat() -> None:
    """Heartbeat that is discarded."""


if __name__ == "__main__":
    _engine(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
