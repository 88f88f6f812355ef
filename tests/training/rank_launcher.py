"""Starts trainer ranks as plain processes, without an agent: the environment of the tests of distributed code.

A *scenario* is a function in a test module that is called in every rank as ``scenario(rank, num_ranks, **arguments)``;
its result (JSON) or its exception is returned per rank. Ranks are forked from one process that has imported torch and
transformers (``multiprocessing``'s fork server), because these imports are most of the cost of a short scenario. A rank
whose memory is measured runs as a separate program, with a command in front of its own: this file.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rlhf_core.training.types import Completion

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = (REPOSITORY, Path(__file__).parent, REPOSITORY / "tests" / "benchmarks")

TINY_MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
ONE_LAYER = {**TINY_MODEL, "num_hidden_layers": 1}
"""For runs in which no test depends on the number of layers: a pass takes half the time."""


TIMEOUT_S = 900.0
"""For ranks that never end, in seconds: other work on the machine may make any scenario slow."""


@dataclass(frozen=True)
class RankResult:
    """Outcome of one rank."""

    exit_code: int
    value: Any
    """Return value of the scenario."""
    error: str
    """Raised error as ``Class: message``."""
    output: str


def launch(
    scenario: Any,
    num_ranks: int,
    scratch: Path,
    timeout_s: float = TIMEOUT_S,
    prefix: tuple[str, ...] = (),
    *,
    with_vllm: bool = False,
    **arguments: Any,
) -> list[RankResult]:
    """Run a scenario on ``num_ranks`` processes and wait for all of them.

    Args:
        scenario: a module-level function of a module in this folder.
        scratch: folder for results and output.
        prefix: command line to put in front of the interpreter's.
        with_vllm: fork from a process that has imported vLLM, too.
        arguments: passed on as JSON.
    """
    from process_tools import free_port  # here, because a rank that runs as a separate program lacks its folder

    scratch.mkdir(parents=True, exist_ok=True)
    target = f"{scenario.__module__}:{scenario.__name__}"
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]),
    }
    ranks = []
    for rank in range(num_ranks):
        words = (target, json.dumps(arguments), str(scratch / f"result-{rank}.json"))
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = scratch / f"output-{rank}.txt"
        if prefix:
            ranks.append(_started(prefix, words, environment, output))
        else:
            ranks.append(_forked(words, environment, output, with_vllm=with_vllm))
    deadline = time.monotonic() + timeout_s
    try:
        exit_codes = [wait(deadline - time.monotonic()) for wait, _ in ranks]
    finally:
        for _, kill in ranks:
            kill()
    return [_result(scratch, rank, exit_code) for rank, exit_code in enumerate(exit_codes)]


Started = tuple[Callable[[float], int], Callable[[], None]]
"""A function that waits this many seconds and returns the exit code, and a function that kills the rank."""


def _started(prefix: tuple[str, ...], words: tuple[str, ...], environment: dict[str, str], output: Path) -> Started:
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*prefix, sys.executable, __file__, *words], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    return process.wait, process.kill


def _forked(words: tuple[str, ...], environment: dict[str, str], output: Path, *, with_vllm: bool) -> Started:
    from fork_server import PRELOADED, WITH_VLLM, fork_server  # here, as above

    process = fork_server(WITH_VLLM if with_vllm else PRELOADED).Process(
        target=_rank, args=(words, environment, output)
    )
    process.start()

    def wait(timeout_s: float) -> int:
        process.join(timeout_s)
        if process.exitcode is None:
            raise TimeoutError(f"a rank did not end in time: {output.read_text(errors='replace')}")
        return process.exitcode

    return wait, process.kill


def _rank(words: tuple[str, ...], environment: dict[str, str], output: Path) -> None:
    """Run one rank in a forked process, with the streams, variables and import paths of a separate program."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(path) for path in PATHS]
    _end(main(*words))


def values(results: list[RankResult]) -> list[Any]:
    """Results that the ranks returned; fails with the output of a rank that did not end well."""
    for rank, result in enumerate(results):
        assert result.exit_code == 0, f"rank {rank} ended with {result.exit_code}: {result.error}\n{result.output}"
    return [result.value for result in results]


def of_one_rank(scenario: Any, folder: Path) -> Any:
    """Result of a scenario on one rank, which gets the folder of the runs of a module."""
    (found,) = values(launch(scenario, 1, folder / f"{scenario.__name__}-launch", folder=str(folder)))
    return found


def _result(scratch: Path, rank: int, exit_code: int) -> RankResult:
    path = scratch / f"result-{rank}.json"
    content: Any = json.loads(path.read_text()) if path.exists() else {"value": None, "error": "(killed)"}
    output = (scratch / f"output-{rank}.txt").read_text(errors="replace")
    return RankResult(exit_code, content["value"], content["error"], output)


# ---------------------------------------------------------------------------------------------------------------------
# Helpers of scenarios


def tiny_spec(**sections: dict[str, Any]) -> dict[str, Any]:
    """A whole run that takes seconds: 2 warm-start steps and 4 of GRPO on sorting 3 digits."""
    spec: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "model": {"config": TINY_MODEL, "tokenizer": "char"},
        "data": {
            "generator": "rlhf_core.training.tasks:sort_digits",
            "generator_args": {"num_digits": 3, "num_train": 40, "num_eval": 10},
        },
        "sft": {"num_steps": 2, "batch_size": 8, "learning_rate": 1e-2},
        "train": {"num_steps": 4, "learning_rate": 3e-3, "micro_batch_size": 5, "log_samples_every": 2},
        "grpo": {"prompts_per_step": 4, "samples_per_prompt": 4, "measure_kl": True},
        "rollout": {"max_new_tokens": 5},
        # In the rank's own process, because the function draws from that process's generators.
        "reward": {"functions": ["rank_launcher:noisy_reward"], "timeout_s": 0},
        "evaluate": {"num_prompts": 0, "keep_samples": 3, "samples_per_prompt": 2},
        "checkpoint": {"every_num_steps": 2, "keep_last": 2},
    }
    for name, content in sections.items():
        spec[name] = {**spec.get(name, {}), **content} if isinstance(content, dict) else content
    return spec


DATED_TEMPLATE = "{{ strftime_now('%d %b %Y') }}|{% for m in messages %}{{ m['content'] }}|{% endfor %}"
"""Chat template that writes the date into every prompt, as those of Llama 3.1 and 3.2 do."""


def ended(texts: Iterable[str]) -> "list[Completion]":
    """Completions that the model ended, with the bytes of their text as tokens."""
    from rlhf_core.training.types import Completion

    return [Completion(list(text.encode(errors="surrogatepass")), text, True, []) for text in texts]


def conversations(split: str, seed: int) -> list[dict[str, Any]]:
    """Rows whose prompts are messages."""
    return [{"prompt": [{"role": "user", "content": f"{digit}{seed}"}], "answer": str(digit)} for digit in range(8)]


def whole_conversations(split: str, seed: int) -> list[dict[str, Any]]:
    """Rows with two questions and answers each."""
    return [
        {
            "messages": [
                {"role": role, "content": content}
                for answer in (digit, digit + 1)
                for role, content in (("user", f"{answer}{seed}"), ("assistant", str(answer)))
            ]
        }
        for digit in range(8)
    ]


def rows_of_this_rank(split: str, seed: int) -> list[dict[str, str]]:
    """Rows in an order that depends on the process, like that of a set."""
    first = int(os.environ.get("FIRST_ROW", os.environ["RANK"]))
    return [{"prompt": f"{(first + digit) % 8}>", "answer": str(digit)} for digit in range(8)]


def noisy_reward(*, completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Share of correct characters, plus noise from all three global random number generators."""
    import random

    import numpy as np
    import torch

    right = share_right(completions=completions, answer=answer)
    return [share + 0.1 * (random.random() + float(np.random.rand()) + float(torch.rand(()))) for share in right]


def share_right(*, completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Share of correct characters."""
    pairs = zip(completions, answer, strict=True)
    return [sum(a == b for a, b in zip(found, expected, strict=False)) / len(expected) for found, expected in pairs]


def make_context(
    run_dir: str,
    spec: dict[str, Any],
    rank: int,
    num_ranks: int,
    restart: int = 0,
    reporter: Any = None,
    **placement: Any,
) -> Any:
    """Context of a worker that has no agent."""
    from rlhf_core.run_dir.run import RunDir
    from rlhf_core.schemas.attempts import Role
    from rlhf_core.schemas.resources import Placement
    from rlhf_core.schemas.run import RunSpec
    from rlhf_core.schemas.stored_spec import StoredSpec
    from rlhf_core.training.types import NullReporter, WorkerContext

    spec = {**spec, "resources": {**spec.get("resources", {}), "ranks_per_node": num_ranks}}
    return WorkerContext(
        run_dir=RunDir(Path(run_dir)),
        attempt=1,
        restart=restart,
        stored=StoredSpec(
            run_id="tiny-20260101-000000-abcdef",
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            owner="test",
            config_source="test",
            package_version="0",
            spec=RunSpec.model_validate(spec),
        ),
        placement=Placement(attempt=1, num_nodes=1, phases=(), **placement),
        role=Role.TRAINER,
        rank=rank,
        local_rank=rank,
        num_ranks=num_ranks,
        node="here",
        reporter=reporter or NullReporter(),
    )


@dataclass
class TrainingGroup:
    """A process group in which a scenario makes short runs one after another."""

    folder: str
    """Parent of the run directories."""
    ranks: Any

    def train(
        self,
        name: str,
        spec: dict[str, Any],
        restart: int = 0,
        reporter: Any = None,
        *,
        damaged: frozenset[str] = frozenset(),
    ) -> str:
        """Start a run once; return its result, or the raised error as ``Class: message``."""
        from rlhf_core.training.trainers import run as run_module

        ranks = self.ranks
        context = make_context(f"{self.folder}/{name}", spec, ranks.rank, ranks.num_ranks, restart, reporter)
        context = replace(context, damaged=damaged)
        try:
            result = str(run_module.train_run(context, replace(ranks, reporter=context.reporter)))
        except Exception as error:  # noqa: BLE001 - what a run raises is its result here
            result = f"{type(error).__name__}: {error}"
        ranks.barrier()
        return result

    def copy(self, source: str, target: str) -> None:
        """Copy a run, once for all ranks."""
        if self.ranks.is_first:
            shutil.copytree(f"{self.folder}/{source}", f"{self.folder}/{target}")
        self.ranks.barrier()

    def rewind(self, source: str, target: str, step: int) -> None:
        """Copy a run without its last checkpoint, of ``step``: as if it had been killed after the one before."""
        from rlhf_core.run_dir.run import RunDir

        if self.ranks.is_first:
            shutil.copytree(f"{self.folder}/{source}", f"{self.folder}/{target}")
            shutil.rmtree(RunDir(Path(self.folder) / target).checkpoint(step).root)
        self.ranks.barrier()

    def damage(self, path: Path) -> None:
        """Change the last bit of a file, once for all ranks."""
        if self.ranks.is_first:
            flip_last_bit(path)
        self.ranks.barrier()


@contextmanager
def training_group(rank: int, num_ranks: int, folder: str, spec: dict[str, Any]) -> Iterator[TrainingGroup]:
    """Process group of all ranks of a scenario."""
    from rlhf_core.training.distributed import init_process_group, leave_process_group

    ranks = init_process_group(make_context(folder, spec, rank, num_ranks))
    yield TrainingGroup(folder, ranks)
    leave_process_group(ranks)


def every_scenario(rank: int, num_ranks: int, folder: str, module: str) -> Any:
    """Scenario: the function ``runs_of`` of a test module, whose runs share one process group."""
    with training_group(rank, num_ranks, folder, tiny_spec()) as group:
        return importlib.import_module(module).runs_of(group)


def flip_last_bit(path: Path, where: int = -1) -> None:
    """Flip the last bit of a file, or of another byte of it."""
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)


def whole_role(rank: int, num_ranks: int, run_dir: str, spec: dict[str, Any], restart: int = 0) -> str:
    """Scenario: the trainer role, as an agent starts it."""
    from rlhf_core.training.trainers.run import run_trainer

    return str(run_trainer(make_context(run_dir, spec, rank, num_ranks, restart)))


def main(target: str, arguments: str, result: str) -> int:
    """Run one rank; return its exit code."""
    module, _, name = target.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(
            int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), **json.loads(arguments)
        )
        Path(result).write_text(json.dumps({"value": value, "error": ""}))
    except Exception as error:  # noqa: BLE001 - it is handed on to the test, which judges it
        traceback.print_exc()
        Path(result).write_text(json.dumps({"value": None, "error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End as a worker does: the interpreter's own shutdown may abort, or wait for threads of the process group."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main(*sys.argv[1:]))
