"""Conversation rows: rendering of messages by a tokenizer's chat template. Does not import torch.

Formats are those of TRL 1.16.0 (``trl/data_utils.py``): a prompt is a list of messages with ``role`` and ``content``, a
completion is one too, or the text of one turn of the model; in a pair without a prompt, the prompt is the common prefix
of both completions, in turns (or characters).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from rlhf_core.errors import BadData, UnrenderedChat
from rlhf_core.survival import Survived
from rlhf_core.training.types import Conversation, Messages, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


AT_ONCE = 1024
"""Number of rows that are read or tokenized between two heartbeats."""


def messages_problem(value: JsonValue) -> str:
    """Problem of a value as a list of messages; empty if it is one."""
    if not isinstance(value, list) or not value:
        return f"expected a list of messages, found {value!r:.60}"
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'expected messages with a "role", found {message!r:.60}'
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return f'expected messages with text as "content", found {message!r:.60}'
    return ""


def turns(completion: JsonValue) -> Messages:
    """A completion as messages without fields that are null: a text is one turn of the model."""
    if isinstance(completion, list):
        return [without_nulls(message) for message in completion if isinstance(message, Mapping)]
    return [{"role": "assistant", "content": completion}]


def without_nulls(value: Any) -> Any:
    """Leave out fields that are null, as TRL does, also those of calls of functions and of their descriptions.

    Parquet gives every message the fields of all others, and every call the arguments of all other functions. Templates
    ask whether a message has a field (``'tool_calls' in message`` in Llama 3.1), and write arguments as JSON.
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def common_beginning(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Length of the common prefix of both completions of a pair, which is their prompt, in messages or characters.

    As in ``extract_prompt`` of TRL 1.16.0: a space before the point of divergence belongs to the completions, and
    neither completion becomes empty.
    """
    shorter = min(len(chosen), len(rejected))
    length = next((at for at in range(shorter) if chosen[at] != rejected[at]), max(0, shorter - 1))
    return length - 1 if length and chosen[length - 1] == " " else length


NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
"""Arguments of a chat template that is given nothing but messages."""


def template_arguments(given: Mapping[str, JsonValue] = NO_ARGUMENTS, now: datetime | None = None) -> dict[str, Any]:
    """Arguments of a chat template besides messages and tools.

    Args:
        given: ``data.template_args``.
        now: time given to templates that write the date into prompts, as those of Llama 3.1 and 3.2; None for the
            clock. A run gives the time of its request: prompts would differ between ranks that start around midnight,
            and after a resume on another day.
    """
    return {**given, **({} if now is None else {"strftime_now": now.strftime})}  # transformers' name, for its own


def with_tools(rows: Sequence[Row], tools: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows whose conversations describe these tools to the model; a row that is a text stays unchanged."""
    return [
        dataclasses.replace(row, chat=dataclasses.replace(row.chat, tools=tools)) if row.chat and tools else row
        for row in rows
    ]


def render_rows(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
    beat: Callable[[], None] = lambda: None,
) -> tuple[list[Row], list[str]]:
    """Render the messages of rows; see :func:`rendered`.

    Args:
        beat: called for every row: a whole conversation is rendered twice for each message of the model.

    Returns:
        The rendered rows, and the problems of those that are left out, with file and line.

    Raises:
        BadData: the tokenizer has no chat template.
    """
    found: list[Row] = []
    problems: list[str] = []
    for row in rows:
        beat()
        try:
            found.append(rendered(row, tokenizer, arguments))
        except UnrenderedChat as error:
            place = row.chat.place if row.chat else ""
            problems.append(f"{place}: {error}" if place else str(error))
    return found, problems


def rendered(row: Row, tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any] = NO_ARGUMENTS) -> Row:
    """Render the messages of a row with the chat template; a row without messages stays unchanged.

    The prompt ends with the beginning of the model's turn, as it does when completions are sampled, and a completion is
    the text that the template adds for its messages. A prompt that ends with a turn of the model ends within it, and
    the completion goes on with it.

    Args:
        arguments: those of :func:`template_arguments`.

    Raises:
        BadData: the tokenizer has no chat template.
        UnrenderedChat: rendering fails, or the prompt renders differently when a completion follows: the model
            would be trained on a different prompt than it later receives.
    """
    chat = row.chat
    if chat is None:
        return row
    is_begun = chat.prompt[-1].get("role") == "assistant"
    if chat.tools:
        arguments = {**arguments, "tools": [dict(tool) for tool in chat.tools]}
    prompt = apply_template(
        tokenizer, chat.prompt, arguments, add_generation_prompt=not is_begun, continue_final_message=is_begun
    )
    texts: dict[str, Any] = {}
    for name in ("target", "chosen", "rejected"):
        completion: Messages = getattr(chat, name)
        if not completion:
            continue
        whole = apply_template(tokenizer, _continued(chat.prompt, completion), arguments)
        if not whole.startswith(prompt):
            raise UnrenderedChat(
                f"the chat template renders a prompt as {prompt[-60:]!r}, but differently before the {name} completion "
                f"({whole[max(0, len(prompt) - 60) : len(prompt) + 20]!r}); use a chat template that renders it "
                "identically"
            )
        texts[name] = whole[len(prompt) :]
        if chat.is_whole:
            spans = _learned(tokenizer, chat, prompt, whole, arguments)
            learned = tuple((begin - len(prompt), end - len(prompt)) for begin, end in spans)
            texts["chat"] = dataclasses.replace(chat, learned=learned)
    return dataclasses.replace(row, prompt=prompt, **texts)


def _learned(
    tokenizer: "PreTrainedTokenizerBase", chat: Conversation, prompt: str, whole: str, arguments: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """Beginning and end of what the model writes in a rendered conversation.

    A template may mark it (``{% generation %}``). Otherwise it is what the template adds for each message of the model.

    Args:
        prompt: the prompt as rendered.
        whole: the conversation as rendered, which begins with it.

    Raises:
        UnrenderedChat: the template marks nothing, or renders a message otherwise once others follow.
    """
    messages = [*chat.prompt, *chat.target]
    template: Any = tokenizer.get_chat_template(tools=arguments.get("tools"))
    if re.search(r"{%-?\s*generation\s*-?%}", template):
        from transformers.utils.chat_template_utils import render_jinja_template

        given: Any = {**tokenizer.special_tokens_map, **arguments, "return_assistant_tokens_mask": True}
        _, (marked,) = render_jinja_template([list(map(dict, messages))], chat_template=template, **given)
        found = [(max(len(prompt), begin), end) for begin, end in marked if end > len(prompt)]
        if not found:
            raise UnrenderedChat("the chat template marks nothing as written by the model ({% generation %})")
        return found
    found = []
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = prompt, whole
        if at > len(chat.prompt):
            before = apply_template(tokenizer, messages[:at], arguments, add_generation_prompt=True)
        if at < len(messages) - 1:
            after = apply_template(tokenizer, messages[: at + 1], arguments)
        if not (after.startswith(before) and whole.startswith(after)):
            raise UnrenderedChat(
                f"the chat template renders message {at + 1} of the conversation ({content_of(message)!r:.60}) "
                "differently once others follow, as templates do that leave out past reasoning, so what the model "
                "writes cannot be told from the rest; use a template that renders it identically, or one that marks it "
                "with {% generation %}"
            )
        found.append((len(before), len(after)))
    return found


def turn_end(tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any] = NO_ARGUMENTS) -> int | None:
    """Token that ends a turn of the model: the first special one that the chat template writes after its message. None
    if there is none, or if the template does not render a question with an answer.

    Base models have a chat template whose turns end with ``<|im_end|>``, and ``<|endoftext|>`` as end token (Qwen 2.5).
    """
    answer = "An answer."
    try:
        text = apply_template(tokenizer, [{"role": "user", "content": "A question?"}, *turns(answer)], arguments)
    except UnrenderedChat:
        return None
    _, found, after = text.rpartition(answer)
    added = tokenizer.added_tokens_decoder
    tokens = tokenizer(after if found else "", add_special_tokens=False)["input_ids"]
    return next((token for token in tokens if token in added and added[token].special), None)


def _continued(prompt: Messages, completion: Messages) -> Messages:
    """Messages of a prompt and its completion."""
    begun, (first, *others) = prompt[-1], completion
    if not begun.get("role") == first.get("role") == "assistant":
        return [*prompt, *completion]
    return [*prompt[:-1], {**begun, "content": f"{content_of(begun)}{content_of(first)}"}, *others]


def content_of(message: Mapping[str, JsonValue]) -> str:
    """Text of a message; empty for one that only calls tools."""
    return str(message.get("content") or "")


def apply_template(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, arguments: Mapping[str, Any], **end: bool
) -> str:
    """Render messages to text.

    Args:
        arguments: those of :func:`template_arguments`, and ``tools``.
        end: ``add_generation_prompt`` or ``continue_final_message``.

    Raises:
        BadData: the tokenizer has no chat template.
        UnrenderedChat: rendering fails.
    """
    if not tokenizer.chat_template:
        raise BadData(
            "found a prompt of messages (or data.chat), and a tokenizer without a chat template; use text, or set "
            "model.tokenizer to the folder of a tokenizer with a chat template"
        )
    text: Any = ""
    conversation: Any = [dict(message) for message in messages]
    with Survived() as failed:  # a template is code and may raise anything
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **end, **arguments)
    if failed.error is not None:
        raise UnrenderedChat(
            f"the chat template of the tokenizer does not render the conversation that ends with "
            f"{messages[-1].get('content')!r:.80}: {' '.join(failed.problem.split())}"
        )
    return str(text)
