"""Trial of reward functions on real rows, each in its own process that cannot take the machine down.

User code may loop forever, exhaust memory or kill its process. It runs in a fork with limits, and the parent waits for
it only until a deadline. Does not import torch; the process must not have started threads before.
"""

import contextlib
import inspect
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf_core.errors import BadConfig, RewardFailed
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.schemas.content import RewardTrial, TrialProblem
from rlhf_core.schemas.rewards import COMPARE_ANSWERS
from rlhf_core.training.rewards.functions import OPTIONAL, Conversations, RewardFunction, load_reward, rewards_of
from rlhf_core.training.types import Completion, Row

TRIAL_S = 20.0
"""Longest time for one function in seconds, including its import."""
ALL_TRIALS_S = 60.0
"""Longest time for all functions together, in seconds."""
MEMORY_BYTES = 4 << 30
"""Memory limit of a function in bytes, on top of what its import took."""
NUM_ROWS = 4
"""Number of rows whose answers are passed to a function."""


NONSENSE = ("", "I do not know.")
"""Completions that are right for no row; empty ones occur in every training."""

_FORK = multiprocessing.get_context("fork")


def try_rewards(
    functions: Sequence[str], rows: Sequence[Row], conversations: Conversations = "text"
) -> list[RewardTrial]:
    """Try functions one after the other.

    Args:
        functions: ``module:function`` of each; importable here.
        rows: real rows; a few of them are used.
        conversations: ``reward.conversations``. As a text, the prompt of a conversation is its JSON here, because no
            tokenizer is loaded; for the same reason, the tokens of a completion are its bytes.
    """
    deadline = time.monotonic() + ALL_TRIALS_S
    trials = []
    for path in functions:
        remaining_s = min(TRIAL_S, deadline - time.monotonic())
        if remaining_s <= 0:
            message = f"the previous functions took {ALL_TRIALS_S:g} s"
            trials.append(RewardTrial(function=path, problem=TrialProblem.NOT_TRIED, message=message))
        else:
            trials.append(_try_in_fork(path, rows, conversations, remaining_s))
    return trials


def completions_for(rows: Sequence[Row]) -> tuple[list[Row], list[str], list[bool]]:
    """Rows with completions to reward: their own answer, the target of training, another row's answer, nonsense; only
    the latter for rows without answers.

    Returns:
        The row of each completion, the completion, and whether it is right.
    """
    used = list(rows[:NUM_ROWS])
    made: list[tuple[Row, str, bool]] = []
    if not any(row.answer or row.target for row in used):
        made = [(row, text, False) for row in used for text in NONSENSE]
        used = []
    for row, other in zip(used, [*used[1:], *used[:1]], strict=True):
        made += [(row, text, True) for text in dict.fromkeys((row.answer, row.target))]
        if other.answer != row.answer:
            made.append((row, other.answer, False))
        made += [(row, text, False) for text in NONSENSE if text != row.answer]
    return [row for row, _, _ in made], [text for _, text, _ in made], [right for _, _, right in made]


def _try_in_fork(path: str, rows: Sequence[Row], conversations: Conversations, timeout_s: float) -> RewardTrial:
    reading, writing = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(path, rows, conversations, writing, timeout_s))
    process.start()
    assert process.pid is not None
    writing.close()
    response: bytes | None = None
    try:
        # One message, not all until the end: a process left running by the function keeps the pipe open.
        if reading.poll(timeout_s):
            response = reading.recv_bytes()
    except EOFError:
        response = b""
    finally:
        reading.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its descendants belong to its group
        process.kill()
        process.join()
    if response is None:
        message = f"no response within {timeout_s:.0f} s"
        return RewardTrial(function=path, problem=TrialProblem.TIMEOUT, message=message)
    if not response:
        message = _exit_message(process.exitcode or 0)
        return RewardTrial(function=path, problem=TrialProblem.DIED, message=message)
    return RewardTrial.model_validate_json(response)


def _exit_message(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"its process was ended by {name}" + (", most likely for memory" if name == "SIGKILL" else "")
    return f"its process ended with exit code {code}"


def _child(path: str, rows: Sequence[Row], conversations: Conversations, writing: Connection, timeout_s: float) -> None:
    """Run the trial in the forked child. Never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent()  # the limits below are too long for an orphan
        os.dup2(2, 1)  # its output must not get into the response
        # A fallback above the deadline, in case no process is left to end this one.
        set_limit(resource.RLIMIT_CPU, int(timeout_s * (os.cpu_count() or 1)) + 1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        deadline = time.monotonic() + timeout_s
        trial = _try_function(path, rows, conversations, deadline)
        writing.send_bytes(trial.model_dump_json().encode())
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _limit_memory() -> None:
    """Limit writable memory, not the address space: CUDA reserves many times what it ever uses."""
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    set_limit(resource.RLIMIT_DATA, now + MEMORY_BYTES)


def set_limit(kind: int, value: int) -> None:
    """Limit a resource of this process (``resource.RLIMIT_...``). A lower limit of the machine stays: login nodes often
    limit CPU time, and only root may raise it."""
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


def _try_function(path: str, rows: Sequence[Row], conversations: Conversations, deadline: float) -> RewardTrial:
    try:
        function = load_reward(path)
        _limit_memory()
        if problem := _wrong_columns(function, rows):
            return RewardTrial(function=path, problem=TrialProblem.COLUMNS, message=problem)
        return _call_twice_in_time(path, function, rows, conversations, deadline)
    except (BadConfig, RewardFailed) as error:
        kind = TrialProblem.MEMORY if isinstance(error.__cause__, MemoryError) else TrialProblem.FAILED
        return RewardTrial(function=path, problem=kind, message=" ".join(str(error).split())[:500])
    except MemoryError:
        return RewardTrial(function=path, problem=TrialProblem.MEMORY, message="it ran out of memory")
    except SystemExit as error:
        message = f"it ended its process with {error.code!r}"
        return RewardTrial(function=path, problem=TrialProblem.DIED, message=message)


def _call_twice_in_time(
    path: str, function: RewardFunction, rows: Sequence[Row], conversations: Conversations, deadline: float
) -> RewardTrial:
    used, texts, right = completions_for(rows)
    completions = [Completion(list(text.encode()), text, True, []) for text in texts]
    form: Conversations = "text" if path in COMPARE_ANSWERS else conversations
    for _ in range(2):  # the first call may load a model or import a parser, so the second is timed
        started = time.monotonic()
        rewards = rewards_of(path.partition(":")[2], function, used, completions, form)
        seconds = time.monotonic() - started
        if time.monotonic() + 2 * seconds > deadline:
            break  # one call of a slow function is enough; a second one, which may take longer, would look like a hang
    judged = [(reward, good) for reward, good in zip(rewards, right, strict=True) if reward is not None]
    return RewardTrial(
        function=path,
        num_completions=len(completions),
        num_unjudged=len(completions) - len(judged),
        num_distinct=len({reward for reward, _ in judged}),
        right=_mean([reward for reward, good in judged if good]),
        wrong=_mean([reward for reward, good in judged if not good]),
        seconds=seconds,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _wrong_columns(function: RewardFunction, rows: Sequence[Row]) -> str:
    """Reason why the columns of the data do not fit the function; empty if they do, or if it has no readable
    signature."""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ""
    given: dict[str, Any] = {name: None for row in rows for name in row.columns}
    given |= dict.fromkeys(("prompts", "completions", "answer", *OPTIONAL))
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one.name for one in parameters.values() if one.kind in kinds and one.default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in given]
    if missing:
        return f"it needs {', '.join(missing)}; the data has only {', '.join(sorted(given))}"
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    refused = [name for name in given if name not in parameters and name not in OPTIONAL]
    if refused and not takes_all:
        return f"it does not take {', '.join(refused)}; add **columns to its arguments"
    return ""
