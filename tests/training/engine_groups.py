"""Real rollout engines in separate processes, and a trainer rank that uses them. Helpers, not fixtures."""

import errno
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_models import QWEN, char_tokenizer, tiny_model, tokens_of
from fork_server import PRELOADED, WITH_VLLM, fork_server
from process_tools import until
from rank_launcher import make_context, tiny_spec
from torch import Tensor

from rlhf_core.files.whole import read_model
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.engines import EngineAddress
from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.environments.conversations import Conversations
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.environments.rollout_steps import RolloutSteps
from rlhf_core.training.rollouts.base import RolloutEngine, Sampling
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.rollouts.samplers import TransformersSampler
from rlhf_core.training.rollouts.server.process import run_engine
from rlhf_core.training.rollouts.server.worker import EngineWorker
from rlhf_core.training.rollouts.sglang import server as sglang_server
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.rollouts.vllm import engine as vllm_engine
from rlhf_core.training.types import Completion, NullReporter, Row
from rlhf_core.weight_sync.receiver import Receiver

TIMEOUT_S = 120.0
START_TIMEOUT_S = 400.0
"""Time limit for the start of engines: two vLLM processes took over two minutes beside other tests on two cores."""
PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def no_beat() -> None:
    """Heartbeat that is discarded."""


def assert_follows(
    engine: RolloutEngine,
    models: Iterable[Any],
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    greedy: Sampling,
) -> None:
    """Assert that greedy completions and all log-probabilities equal those of transformers, for each version."""
    peer = TransformersEngine(char_tokenizer())
    answers = []
    for version, model in enumerate(models):
        for one in (engine, peer):
            one.load(model, version, no_beat)
        found, expected = (one.sample(prompts, seeds, greedy, version, no_beat) for one in (engine, peer))
        for made, right in zip(chain(*found), chain(*expected), strict=True):
            assert (made.token_ids, made.text, made.finished) == (right.token_ids, right.text, right.finished)
            assert made.logprobs == pytest.approx(right.logprobs, abs=1e-4)
            assert made.weight_version == version
        answers.append([made.token_ids for made in chain(*found)])
    assert all(one != other for one, other in pairwise(answers)), "weights without effect would prove nothing"


def assert_ends_with_stop_strings(sample: Callable[[Sampling], list[list[Completion]]], sampling: Sampling) -> None:
    """A completion ends with the token that completes a stop string, and is otherwise the one without stop strings."""
    whole, tokenizer = list(chain.from_iterable(sample(sampling))), char_tokenizer()
    drawn = max((one.token_ids for one in whole), key=len)
    stop = (tokenizer.decode(drawn[2:4]), tokenizer.decode(drawn[4:6]))
    stopped = list(chain.from_iterable(sample(replace(sampling, stop=stop))))
    kinds = set()
    for before, made in zip(whole, stopped, strict=True):
        tokens = before.token_ids[:-1] if before.finished else before.token_ids
        texts = [tokenizer.decode(tokens[:end]) for end in range(1, len(tokens) + 1)]
        length = next((end for end, one in enumerate(texts, 1) if any(string in one for string in stop)), None)
        kinds.add(length is not None)
        assert made.token_ids == before.token_ids[:length]
        assert made.logprobs == pytest.approx(before.logprobs[:length], abs=1e-5)
        assert made.finished == (length is not None or before.finished)
        assert made.text.endswith(stop) if length else made.text == before.text
        assert (texts[length - 1] if length else before.text).startswith(made.text)
    assert kinds == {True, False}


@contextmanager
def conversations_of(ranks: Ranks, environment: str, **settings: Any) -> Iterator[Conversations]:
    """Sampling of several turns with an environment of ``turn_tools``."""
    spec = TurnsSpec(environment=f"turn_tools:{environment}", max_turn_tokens=8, **settings)
    with closing(EnvironmentPool(spec)) as pool:
        pool.describe(no_beat)
        yield Conversations(spec, ranks, RolloutSteps(spec, pool, char_tokenizer(), {}, ()))


def assert_takes_turns(engine: RolloutEngine, model: Any, version: int, ranks: Ranks) -> None:
    """Rollouts of several turns equal those of transformers: every turn follows the tokens that were sampled."""
    tokenizer, peer = char_tokenizer(), TransformersEngine(char_tokenizer())
    prompts, seeds = [[40, 41, 42], [50]], [[7, 8], [9]]
    for one in (engine, peer):
        one.load(model, version, no_beat)
    whole = peer.sample(prompts, seeds, Sampling(8, 0.0, 8), version, no_beat)
    stop = tuple({tokenizer.decode(made.token_ids[2:4]) for made in chain.from_iterable(whole)})
    sampling = Sampling(48, 0.0, 8, stop=stop)
    with conversations_of(ranks, "Dice", max_turns=3) as conversations:
        rows = [Row(f"u{index}", "", "", "", {}) for index in range(2)]
        found, expected = (
            conversations.sample(one, rows, prompts, seeds, sampling, version, no_beat) for one in (engine, peer)
        )
    episodes = [made.episode for made in chain.from_iterable(expected) if made.episode is not None]
    assert max(len(one.turns) for one in episodes) == 3
    assert tokens_of(found) == tokens_of(expected)
    for made, right in zip(chain(*found), chain(*expected), strict=True):
        assert made.episode == right.episode
        assert made.logprobs == pytest.approx(right.logprobs, abs=1e-4)


def sglang_stand_in() -> tuple[str, ...]:
    """Program in place of SGLang's server, for this process to start."""
    return sys.executable, str(Path(__file__).with_name("sglang_stand_in.py")), str(os.getpid())


@dataclass(frozen=True)
class Gate:
    """A file that holds an engine at a certain place."""

    path: Path

    def close(self) -> "Gate":
        """Make the engine wait when it reaches this place."""
        self.reached.unlink(missing_ok=True)
        self.path.touch()
        return self

    def open(self) -> None:
        """Let the engine continue."""
        self.path.unlink(missing_ok=True)

    @property
    def reached(self) -> Path:
        """File that exists once the engine is waiting."""
        return self.path.with_name(f"{self.path.name}.reached")


@dataclass
class EngineGroup:
    """The engines of one run, each in a forked process; the test has to restart them."""

    root: Path
    spec: dict[str, Any]
    processes: dict[int, Any] = field(default_factory=dict)
    generation: int = 0

    @property
    def num(self) -> int:
        """Number of engines of the run."""
        return int(self.spec["rollout"]["engines"])

    def start(self, rank: int) -> int:
        """Start or restart an engine; return its process id."""
        preloaded = WITH_VLLM if self.spec["rollout"].get("engine") == "vllm" else PRELOADED
        self.processes[rank] = fork_server(preloaded).Process(
            target=_engine, args=(str(self.root), self.spec, rank, self.generation)
        )
        self.processes[rank].start()
        self.generation += 1
        return int(self.processes[rank].pid)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of an engine."""
        os.kill(self.processes[rank].pid, number)

    def start_missing(self) -> None:
        """Start the engines that are not running."""
        for rank, process in self.processes.items():
            if not process.is_alive():
                self.start(rank)

    def kill(self, rank: int) -> None:
        """Kill an engine, and wait until it has exited."""
        self.signal(rank, signal.SIGKILL)
        self.processes[rank].join()

    def restart(self, rank: int) -> None:
        """Kill an engine, restart it, and wait until it has registered."""
        before = self.address(rank)
        self.kill(rank)
        self.start(rank)
        until(lambda: self.address(rank) != before)

    def gate(self, place: str, rank: int) -> "Gate":
        """Gate for a place at which an engine waits until the gate is opened: ``decode``, ``load`` or ``receive``.

        ``skip``, ``other-base``, ``no-room`` and ``fail`` are not gates but faults, which last as long as the file
        exists: the engine leaves weights out, has damaged the base model of its adapter, has no memory for weights, or
        fails every request.
        ``skip-part`` makes the second process of a split engine leave them out. ``fork-parts``, which has to exist
        before the engine starts, makes it fork its processes, as on GPUs: vLLM on CPU spawns them.
        """
        return Gate(self.root / f"{place}-{rank}")

    def address(self, rank: int) -> EngineAddress | None:
        """Address under which an engine has registered."""
        return read_model(RunDir(self.root).attempt(1).engine(rank), EngineAddress)

    def trainer(self, restart: int = 0, num_engines: int = 0, **sync: Any) -> RemoteEngines:
        """Client of a single-rank trainer, for all engines or the first ``num_engines``; ``sync``: ``rollout.sync``."""
        rollout = {**self.spec["rollout"], "engines": num_engines or self.num, "sync": sync}
        context = make_context(str(self.root), {**self.spec, "rollout": rollout}, 0, 1, restart=restart)
        context = replace(context, memory=self.root / "memory")
        ranks = Ranks(0, 1, torch.device("cpu"), NullReporter(), dist.HashStore())
        return RemoteEngines(context, ranks)

    def output(self, rank: int) -> str:
        """Output of all starts of an engine."""
        return (self.root / f"engine-{rank}.out").read_text(errors="replace")


@contextmanager
def engine_group(
    root: Path, num: int, config: dict[str, Any] = QWEN, model: dict[str, Any] | None = None, **rollout: Any
) -> Iterator[EngineGroup]:
    """Start a group of engines of a tiny model; they are stopped at the end of the block.

    Args:
        model: further settings of the model.
    """
    settings = {"engines": num, "max_new_tokens": 12, **rollout}
    settings["remote"] = {"start_timeout_s": START_TIMEOUT_S, "sync_timeout_s": 2.0, **settings.get("remote", {})}
    spec = tiny_spec(model={"config": config, **(model or {})}, rollout=settings, data={"max_prompt_tokens": 32})
    folder = RunDir(root).initial_model
    tiny_model(config).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    group = EngineGroup(root, spec)
    for rank in range(num):
        group.start(rank)
    try:
        yield group
    finally:
        for process in group.processes.values():
            process.kill()
            process.join()


def _engine(root: str, spec: dict[str, Any], rank: int, generation: int) -> None:
    output = os.open(Path(root) / f"engine-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[:0] = PATHS
    context = replace(
        make_context(root, spec, rank, int(spec["rollout"]["engines"])),
        role=Role.ROLLOUT,
        generation=generation,
        memory=Path(root) / "memory",
    )
    _obey_files(Path(root), rank)
    try:
        run_engine(context)
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _obey_files(root: Path, rank: int) -> None:
    """Make an engine wait, or leave something out, as long as a file says so: see :meth:`EngineGroup.gate`."""

    def pass_gate(place: str) -> None:
        gate = root / f"{place}-{rank}"
        if gate.exists():
            gate.with_name(f"{gate.name}.reached").touch()
        while gate.exists():
            time.sleep(0.01)

    sglang_server.PROGRAM = sglang_stand_in()
    vllm_engine.EXTENSION = "vllm_faults.ObeyingExtension"
    os.environ["SKIP_PART"] = str(root / f"skip-part-{rank}")
    if (root / f"fork-parts-{rank}").exists():
        from vllm.v1.executor import multiproc_executor

        multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
    progressed, load, submit = EngineWorker._progressed, TransformersSampler.load, TransformersSampler.submit
    receive = Receiver.receive

    def gated_progress(self: EngineWorker) -> None:
        pass_gate("decode")
        progressed(self)

    def gated_load(self: TransformersSampler, tensors: Any, beat: Any) -> None:
        pass_gate("load")
        if (root / f"other-base-{rank}").exists():
            self._model.get_input_embeddings().weight.data.mul_(1.5)
        if not (root / f"skip-{rank}").exists():
            load(self, tensors, beat)

    def failing_submit(self: TransformersSampler, request: Any) -> None:
        if (root / f"fail-{rank}").exists():
            raise RuntimeError("the cache is corrupt")
        submit(self, request)

    def gated_receive(self: Any, offer: Any, beat: Any) -> Any:
        pass_gate("receive")
        if (root / f"no-room-{rank}").exists():
            self._row, self._allocate = None, refuse_memory
        return receive(self, offer, beat)

    def refuse_memory(size: int) -> Tensor:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    EngineWorker._progressed = gated_progress  # type: ignore[method-assign]
    TransformersSampler.load = gated_load  # type: ignore[method-assign]
    TransformersSampler.submit = failing_submit  # type: ignore[method-assign]
    Receiver.receive = gated_receive  # type: ignore[method-assign]
