"""Tools and environments as users write them: loading, finding calls in a turn, and calling. Does not import torch.

The conventions are those of TRL 1.16.0 (``GRPOTrainer(tools=..., environment_factory=...)``): a tool is a function with
type hints and a docstring; an environment is an object made for each rollout, whose ``reset`` gets the columns of the
row and may return text for the end of the prompt, whose other public methods are tools, and whose ``get_reward``, if
there is one, returns the reward of the rollout. All of them may be asynchronous. Beyond TRL, a ``reset`` that names
``seed`` is given one, and an environment may define ``respond``, which is given the text of each turn and returns the
observation, or None at the end.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.errors import BadConfig
from rlhf_core.survival import Survived
from rlhf_core.training.rewards.functions import imported, result_of

NO_TOOLS = ("reset", "get_reward", "respond")
"""Public methods of an environment that are not tools."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MARKUP = re.compile(r"<\|[a-z_]+\|>")
"""Special tokens that Llama writes around a call: ``<|python_tag|>``, ``<|eom_id|>``."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Reason why it cannot be made, for one that is not well formed."""


@dataclass(frozen=True)
class Answer:
    """Answer to one turn."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls in the form of a message's ``tool_calls``."""
    content: str = ""
    """Text of the turn without its calls."""
    observations: list[dict[str, str]] = field(default_factory=list)
    """Messages that follow the turn; none at the end of the rollout."""
    is_open: bool = False
    """True if the model called something, or the environment expects another turn."""
    num_failed: int = 0
    """Number of calls that failed."""


class Toolbox:
    """Functions that a config names, imported."""

    def __init__(self, tools: Iterable[str], environment: str, parser: str) -> None:
        """Import them.

        Args:
            tools: paths, as the other arguments; those of ``TurnsSpec``, which itself takes longer to import.

        Raises:
            BadConfig: one of them does not import.
        """
        self.tools: dict[str, Callable[..., Any]] = {}
        for path in tools:
            tool = imported(path, "rollout.turns")
            self.tools[tool.__name__] = tool
        self.make_environment = imported(environment, "rollout.turns") if environment else None
        self.find_calls = imported(parser, "rollout.turns") if parser else None

    def describe(self) -> dict[str, Any]:
        """Descriptions of the tools for the chat template, and the abilities of the environment.

        Raises:
            BadConfig: a tool has no type hints or docstring, or the environment cannot be made or has no ``reset``.
        """
        environment = None
        if self.make_environment is not None:
            environment = _made(self.make_environment)
            if not callable(getattr(environment, "reset", None)):
                raise BadConfig(
                    f"rollout.turns.environment: found {type(environment).__name__} without a method reset; expected "
                    "reset(self, **columns), which is called at the beginning of each rollout"
                )
        responds = callable(getattr(environment, "respond", None))
        tools = {} if responds else {**self.tools, **_methods(environment)}
        return {
            "tools": [_description(name, tool) for name, tool in tools.items()],
            "has_reward": callable(getattr(environment, "get_reward", None)),
        }


class RolloutTools:
    """The tools and the environment of one rollout."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._environment = _made(toolbox.make_environment) if toolbox.make_environment is not None else None
        self._respond = getattr(self._environment, "respond", None)
        self._tools = {**toolbox.tools, **_methods(self._environment)}

    def reset(self, columns: Mapping[str, Any], seed: int) -> str:
        """Begin the rollout of a row; returns text for the end of its prompt."""
        if self._environment is None:
            return ""
        reset = self._environment.reset
        parameters = inspect.signature(reset).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        given = {name: value for name, value in columns.items() if takes_all or name in parameters}
        if "seed" in parameters:
            given.setdefault("seed", seed)
        found = _awaited(reset(**given))
        return "" if found is None else str(found)

    def answer(self, text: str, *, is_last: bool) -> Answer:
        """Answer one turn.

        Args:
            text: the turn.
            is_last: no turn can follow: calls are counted, but not made.
        """
        if self._respond is not None:
            return self._response(text)
        calls, content = self._calls(text)
        if not calls:
            return Answer(content=text)
        made = [{"type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in calls]
        if is_last:
            return Answer(made, content, is_open=True)
        results = [self._result(call) for call in calls]
        observations = [
            {"role": "tool", "name": call.name, "content": text} for call, (text, _) in zip(calls, results, strict=True)
        ]
        return Answer(made, content, observations, is_open=True, num_failed=sum(failed for _, failed in results))

    def reward(self) -> float | None:
        """Reward of the rollout; None if the environment gives none."""
        get_reward = getattr(self._environment, "get_reward", None)
        value = None if get_reward is None else _awaited(get_reward())
        return None if value is None else float(value)

    def _response(self, text: str) -> Answer:
        found = None
        with Survived() as failed:  # user code may raise anything; the model observes it
            found = _awaited(self._respond(text))  # type: ignore[misc]  # only called if there is one
        if failed.error is not None:
            return Answer(content=text, observations=[_user(_error(failed.error))], is_open=True, num_failed=1)
        if found is None:
            return Answer(content=text)
        return Answer(content=text, observations=[_user(str(found))], is_open=True)

    def _calls(self, text: str) -> tuple[list[ToolCall], str]:
        if self._toolbox.find_calls is None:
            return find_calls(text, self._tools)
        found = [ToolCall(one["name"], one.get("arguments", {})) for one in self._toolbox.find_calls(text)]
        return found, text

    def _result(self, call: ToolCall) -> tuple[str, bool]:
        """Text of the result, and whether the call failed; errors have TRL's form."""
        problem = call.problem or ("" if call.name in self._tools else f"Tool {call.name} not found.")
        if problem:
            return str({"error": problem}), True
        with Survived() as failed:  # user code may raise anything; the model observes it
            return str(_awaited(self._tools[call.name](**call.arguments))), False
        return _error(failed.error), True


def find_calls(text: str, tools: Mapping[str, object]) -> tuple[list[ToolCall], str]:
    """Find the calls in a turn.

    Args:
        tools: known tools: a turn that is a bare JSON object is a call only with the name of one.

    Returns:
        The calls, and the text in front of them.
    """
    tagged = _TAGGED.findall(text)
    if tagged:
        return [_call_of(part) for part in tagged], text.partition("<tool_call>")[0].strip()
    bare = _MARKUP.sub("", text).strip()
    if bare.startswith("{"):
        call = _call_of(bare)
        if not call.problem and call.name in tools:
            return [call], ""
    return [], text


def _call_of(text: str) -> ToolCall:
    try:
        found = json.loads(text)
        name = found["name"]
        arguments = found["arguments"] if "arguments" in found else found.get("parameters", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        name = arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        expected = 'expected a JSON object with "name" and "arguments"'
        return ToolCall("unknown", {}, f"the call is not well formed; {expected}")
    return ToolCall(name, arguments)


def _methods(environment: object) -> dict[str, Callable[..., Any]]:
    """Public methods of an environment that are tools. They are found on its class, so that no property is read."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return {name: getattr(environment, name) for name, _ in members if name not in NO_TOOLS and name[0] != "_"}


def _made(factory: Callable[[], object]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise BadConfig(f"rollout.turns.environment: making one raised {type(error).__name__}: {error}") from error


def _description(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Description of a tool for the chat template."""
    # An import of a second, which an environment without tools saves.
    from transformers.utils import chat_template_utils

    # It would import torch to recognise tensors, which takes longer. Without torch, no hint of a tool is a tensor.
    chat_template_utils.is_torch_available = lambda: "torch" in sys.modules
    try:
        found: dict[str, Any] = chat_template_utils.get_json_schema(tool)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException, or of unusual hints
        raise BadConfig(
            f"tool {name}: its description cannot be made: {' '.join(str(error).split())}; expected a type hint for "
            "each argument, and a docstring with an Args section that describes each"
        ) from error
    return found


def _awaited(value: object) -> Any:
    return result_of(value) if isinstance(value, Coroutine) else value


def _error(error: BaseException | None) -> str:
    return str({"error": str(error)})


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def message_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The turn that was answered, as a message.

    Args:
        answer: :class:`Answer` as JSON.
    """
    calls: Sequence[object] = answer["calls"]
    return {"role": "assistant", "content": answer["content"], **({"tool_calls": calls} if calls else {})}
