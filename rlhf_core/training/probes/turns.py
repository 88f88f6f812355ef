"""Trial of tools and environments on real rows, in their own processes (``rlhf_core/training/environments``)."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.content import TurnsReport
from rlhf_core.schemas.rollouts import TurnsSpec
from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.environments.server import TurnRequest
from rlhf_core.training.types import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_ROWS = 4
"""Number of rows with which an environment is begun."""


def try_turns(spec: TurnsSpec, rows: Sequence[Row]) -> tuple[TurnsReport, Sequence[Mapping[str, Any]]]:
    """Begin an environment with some rows, answer a turn without calls, and ask for the reward.

    Returns:
        The report, and the descriptions of the tools.
    """
    with contextlib.closing(EnvironmentPool(spec, output=2)) as pool:  # the report goes to standard output
        try:
            pool.describe(_no_beat)
        except BadConfig as error:
            return TurnsReport(problem=str(error)), ()
        problem = ""
        given = {number: {"columns": dict(row.columns), "seed": number} for number, row in enumerate(rows[:NUM_ROWS])}
        requests = {
            "reset": {number: TurnRequest("reset", number, arguments) for number, arguments in given.items()},
            "respond, or the search for calls,": dict.fromkeys(
                given, TurnRequest("answer", 0, {"text": "I do not know.", "is_last": False})
            ),
            "get_reward": dict.fromkeys(given, TurnRequest("reward")),
        }
        for name, asked in requests.items() if spec.environment or spec.parser else ():
            failures = [reply["failure"] for reply in pool.ask(asked, _no_beat).values() if "failure" in reply]
            if failures:
                problem = f"tried on real rows, {name} {failures[0]}"
                break
        names = tuple(str(tool["function"]["name"]) for tool in pool.tools)
        return TurnsReport(problem=problem, tools=names, has_reward=pool.has_reward), pool.tools


def template_problem(spec: TurnsSpec, row: Row, tokenizer: "PreTrainedTokenizerBase", arguments: Any) -> str:
    """Problem of a chat template with a conversation that is rendered; empty if there is none.

    Args:
        row: a rendered row with its tools.
    """
    from rlhf_core.training.environments.observations import ObservationTokens

    assert row.chat is not None
    tools: Sequence[Mapping[str, Any]] = row.chat.tools
    absent = [name for tool in tools if (name := str(tool["function"]["name"])) not in row.prompt]
    if absent:
        return f"the chat template of the tokenizer does not tell the model of {', '.join(absent)}"
    role = "tool" if tools else "user"
    observation = {"role": role, "name": "tool", "content": "a result"}
    try:
        ObservationTokens(tokenizer, arguments, (), spec.max_observation_tokens).after(row, [], [observation])
    except BadConfig as error:
        return str(error)
    return ""


def _no_beat() -> None:
    """Beat of a process without an agent."""
