"""Conversion of a source's columns to rows: templates, identities, pairs, labels and margins."""

import contextlib
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from pydantic import JsonValue

from rlhf_core.errors import BadConfig
from rlhf_core.files.data_rows import absent_value, first_answer, label_of, pair_problem, template_columns
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.data.chat import common_beginning, content_of, messages_problem, turns, without_nulls
from rlhf_core.training.types import Conversation, Messages, Row


class MalformedRow(Exception):
    """One row is not valid."""


class RowReader:
    """Makes rows from the columns of a source."""

    def __init__(self, spec: RunSpec, source: str = "", seen: Counter[str] | None = None) -> None:
        """Args:
        source: name of the source in a mixture; empty for the only one.
        seen: numbers of earlier rows by identity, shared by the readers of a split; None for none.
        """
        data = spec.data.source(source)
        self._data, self._source = data, source
        self._table = f"data.sources.{source}" if source else "data"
        self._template_args = {} if source else spec.data.template_args  # those of a mixture are for all its sources
        self._pairs = "pair" in spec.data_kinds
        self._needs_answer = "answer" in spec.data_kinds
        self._labels = "label" in spec.data_kinds
        algorithms = [loop.algorithm for loop in spec.loops.named.values()]
        self._teaches_answers = any(not (algorithm.samples or algorithm.pairs) for algorithm in algorithms)
        self._seen: Counter[str] = Counter() if seen is None else seen
        self._templates = {"prompt": data.prompt_template, "target": data.completion_template}
        if self._pairs:
            self._templates |= {"chosen": data.chosen_template, "rejected": data.rejected_template}
        self._columns = {"prompt": data.prompt_column, "answer": data.answer_column}
        if self._pairs:
            self._columns |= {"chosen": data.chosen_column, "rejected": data.rejected_column}
        keys = {"target": "completion"}
        self._used = {
            name: _template_fields(f"{self._table}.{keys.get(name, name)}_template", template)
            for name, template in self._templates.items()
        }

    def row(self, columns: Mapping[str, JsonValue], place: str = "") -> Row:
        """Make one row.

        Args:
            place: file and line, for errors that appear only when the tokenizer renders the row.

        Raises:
            MalformedRow: the row is not valid.
        """
        fields = self._cut(columns) if self._data.messages_column else self._named(columns)
        completions = ("chosen", "rejected") if self._pairs else ()
        for name in ("answer", *completions, "prompt"):
            if name in fields:
                self._require_value(name, fields[name])
        is_chat = any(isinstance(fields[name], list) for name in ("prompt", *completions))
        answer = fields.get("answer")
        if isinstance(answer, list) and not is_chat:
            if messages_problem(answer):  # a list for reward functions
                fields["answer"] = str(answer)
            elif self._teaches_answers and not self._data.chat and "answer" in self._used["target"]:
                raise MalformedRow(
                    "answer: expected a text beside a prompt of text, found a list of messages; set data.chat, or make "
                    "the prompt a list of messages too"
                )
        if is_chat or self._data.chat:
            row = self._conversation(fields, columns, place)
        else:
            self._refuse_settings_of_conversations(place)
            row = self._texts(fields, columns)
        if self._pairs:
            pair = (row.chat.chosen, row.chat.rejected) if row.chat else (row.chosen, row.rejected)
            if problem := pair_problem(*pair):
                raise MalformedRow(problem)
        self._seen[row.uid] += 1
        uid = f"{row.uid}-{self._seen[row.uid] - 1}"
        margin, desirable = self._margin(columns), self._label(columns)
        return dataclasses.replace(row, uid=uid, margin=margin, desirable=desirable, source=self._source)

    def _named(self, columns: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """The columns, including those that settings name, under their names in templates."""
        data = self._data
        fields = dict(columns)
        for alias, column in self._columns.items():
            is_optional = alias == "answer" and not self._needs_answer
            value = _plain(columns.get(column))
            if column and column in columns and not (is_optional and absent_value(value)):
                fields[alias] = value
            elif is_optional:
                fields.pop(alias, None)
            elif alias != "prompt" or not self._pairs:
                raise MalformedRow(
                    f'no column "{column}" ({self._table}.{alias}_column); it has: {", ".join(columns) or "none"}'
                )
        if self._pairs and (data.prompt_column not in columns or _contain_prompt(fields)):
            fields |= _split(fields["chosen"], fields["rejected"])
        return fields

    def _cut(self, columns: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """The columns, with a whole conversation as a prompt and the messages from the first one of the model to its
        last; later ones teach nothing."""
        name = self._data.messages_column
        if name not in columns:
            raise MalformedRow(
                f'no column "{name}" ({self._table}.messages_column); it has: {", ".join(columns) or "none"}'
            )
        messages = _plain(columns[name])
        if problem := messages_problem(messages):
            raise MalformedRow(f"{name}: {problem}")
        first = first_answer(messages)
        if not first:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise MalformedRow(
                f'{name}: expected messages of the user, then one of the model ("assistant"), found the roles '
                f"{roles:.60}"
            )
        last = len(messages) - (first_answer(messages[::-1]) or 0)
        return {**columns, "prompt": messages[:first], "answer": messages[first:last]}

    def _texts(self, fields: Mapping[str, JsonValue], columns: Mapping[str, JsonValue]) -> Row:
        """Make a row of texts by filling its templates."""
        made = [name for name in self._templates if name != "target" or "answer" in fields]
        texts = {name: self._filled(name, fields, columns) for name in made}
        answer = str(fields.get("answer", ""))
        _check_text("".join(texts.values()) + answer)
        if not texts["prompt"]:
            raise MalformedRow("the prompt is empty")
        return Row(
            _digest(texts["prompt"]),
            texts["prompt"],
            answer,
            texts.get("target", ""),
            dict(columns),
            chosen=texts.get("chosen", ""),
            rejected=texts.get("rejected", ""),
        )

    def _with_system_prompt(self, messages: list[JsonValue]) -> list[JsonValue]:
        first = messages[0]
        has_one = isinstance(first, dict) and first.get("role") in ("system", "developer")
        if has_one or not self._data.system_prompt:
            return messages
        return [{"role": "system", "content": self._data.system_prompt}, *messages]

    def _refuse_settings_of_conversations(self, place: str) -> None:
        data, table = self._data, self._table
        given = {
            f"{table}.system_prompt": data.system_prompt,
            "data.template_args": self._template_args,
            f"{table}.tools_column": data.tools_column,
        }
        for setting, value in given.items():
            if value:
                raise BadConfig(
                    f"found {setting} and a prompt of text ({place}), which no chat template renders; set "
                    f"{table}.chat, use prompts of messages, or leave {setting} out"
                )

    def _conversation(self, fields: Mapping[str, JsonValue], columns: Mapping[str, JsonValue], place: str) -> Row:
        """Make a row of messages. Templates apply to text only; the tokenizer's chat template renders messages."""
        given = fields["prompt"]
        if not isinstance(given, list) and self._data.chat:
            text = self._filled("prompt", fields, columns)
            if not text:
                raise MalformedRow("the prompt is empty")
            given = [{"role": "user", "content": text}]
        elif self._templates["prompt"] != "{prompt}":
            setting = f"{self._table}.prompt_template"
            raise BadConfig(
                f"found {setting} = {self._templates['prompt']!r} and a prompt of messages ({place}), which the chat "
                f"template of the tokenizer renders instead; leave {setting} out, or use text"
            )
        if not isinstance(given, list):
            raise MalformedRow(f"expected a list of messages as prompt as well, found {given!r:.60}; or set data.chat")
        completions: dict[str, Messages] = {}
        for name, column in (("target", "answer"), ("chosen", "chosen"), ("rejected", "rejected")):
            value = fields.get(column) if name == "target" or self._pairs else None
            if value is not None and not isinstance(value, list):
                value = self._filled(name, fields, columns)
            # An answer without text is a turn that ends at once; a pair with such a completion is refused.
            completions[name] = turns(value) if value or (name == "target" and value == "") else []
        needed = ("prompt", "target") if self._teaches_answers else ("prompt",)
        for name, messages in (("prompt", given), *completions.items()):
            if (messages or name in needed) and (problem := messages_problem(list(messages))):  # type: ignore[arg-type]
                raise MalformedRow(f"{name}: {problem}")
        asked = self._with_system_prompt(given)
        prompt = _as_json(asked)
        is_whole = bool(self._data.messages_column)
        target = content_of(completions["target"][0 if is_whole else -1]) if completions["target"] else ""
        answer = target if isinstance(fields.get("answer"), list) else str(fields.get("answer", ""))
        _check_text(prompt + answer + _as_json([list(messages) for messages in completions.values()]))
        if not self._teaches_answers:
            # An answer that is only compared is not rendered: templates of reasoning models begin the turn of the model
            # otherwise than they render a past one.
            completions["target"] = []
        chat = Conversation(
            prompt=turns(asked),
            target=completions["target"],
            chosen=completions["chosen"],
            rejected=completions["rejected"],
            is_whole=is_whole,
            tools=self._tools(columns),
            place=place,
        )
        return Row(
            _digest(prompt),
            prompt,
            answer,
            target,
            dict(columns),
            chosen=content_of(chat.chosen[-1]) if chat.chosen else "",
            rejected=content_of(chat.rejected[-1]) if chat.rejected else "",
            chat=chat,
        )

    def _tools(self, columns: Mapping[str, JsonValue]) -> list[dict[str, JsonValue]]:
        """Tools of a conversation; none if the row has no such column."""
        name = self._data.tools_column
        value = given = _plain(columns.get(name)) if name else None
        if isinstance(given, str):
            with contextlib.suppress(ValueError):  # refused below
                value = json.loads(given) if given.strip() else None
        if absent_value(value):
            return []
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise MalformedRow(
                f'expected a list of descriptions of functions in column "{name}" ({self._table}.tools_column), found '
                f"{given!r:.60}"
            )
        tools: list[dict[str, JsonValue]] = without_nulls(value)
        _check_text(_as_json(tools))
        return tools

    def _filled(self, name: str, fields: Mapping[str, JsonValue], columns: Mapping[str, JsonValue]) -> str:
        """Fill a template of the row."""
        used = sorted(self._used[name])
        for field in used:
            if field not in fields:
                raise MalformedRow(
                    f'no column "{field}" for a template of [{self._table}]; it has: {", ".join(columns)}'
                )
            self._require_value(field, fields[field])
            # An answer that only reward functions read may be anything.
            if isinstance(fields[field], dict) and (name != "target" or self._teaches_answers):
                raise MalformedRow(
                    f'column "{self._columns.get(field, field)}" has an object, expected text: the form in which '
                    "Python prints it would be trained on; a single message needs a list around it"
                )
        return self._templates[name].format_map({field: str(fields[field]) for field in used})

    def _require_value(self, field: str, value: object) -> None:
        column = self._columns.get(field, field)
        if absent := absent_value(value):
            raise MalformedRow(f'column "{column}" is {absent}')
        if isinstance(value, bytes):  # its text would be "b'...'"
            raise MalformedRow(f'column "{column}" has bytes, expected text: in Parquet, a column of strings')

    def _label(self, columns: Mapping[str, JsonValue]) -> bool:
        name = self._data.label_column
        if not self._labels:
            return True
        if name not in columns:
            raise MalformedRow(f'no column "{name}" ({self._table}.label_column); it has: {", ".join(columns)}')
        label = label_of(columns[name])
        if label is None:
            raise MalformedRow(
                f'expected true or false in column "{name}" ({self._table}.label_column), found {columns[name]!r:.60}'
            )
        return label

    def _margin(self, columns: Mapping[str, JsonValue]) -> float:
        name = self._data.margin_column
        if not name or not self._pairs:
            return 0.0
        if name not in columns:
            raise MalformedRow(f'no column "{name}" ({self._table}.margin_column); it has: {", ".join(columns)}')
        try:
            margin = float(columns[name])  # type: ignore[arg-type]  # any type: errors are handled below
        except (TypeError, ValueError, OverflowError):
            margin = math.nan
        if not math.isfinite(margin):
            raise MalformedRow(
                f'expected a number in column "{name}" ({self._table}.margin_column), found {columns[name]!r:.60}'
            )
        return margin


def _split(chosen: JsonValue, rejected: JsonValue) -> dict[str, JsonValue]:
    """Split a pair without a prompt into the common prefix of its completions, the prompt, and their remainders."""
    for kind in (str, list):
        if isinstance(chosen, kind) and isinstance(rejected, kind):
            length = common_beginning(chosen, rejected)
            if not length:
                raise MalformedRow("no prompt, and the chosen and the rejected completion have no common beginning")
            return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}
    raise MalformedRow("no prompt, and completions that are neither both texts nor both lists of messages")


def _contain_prompt(fields: Mapping[str, JsonValue]) -> bool:
    """True for completions that are whole conversations beside the text of their prompt, as in UltraFeedback."""
    prompt, chosen, rejected = (fields[name] for name in ("prompt", "chosen", "rejected"))
    if not (isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list)):
        return False
    return common_beginning(chosen, rejected) > 0


def _plain(value: Any) -> Any:
    """Lists and Python's own values for those of NumPy, which generators take from tables."""
    return list(value) if isinstance(value, tuple) else value.tolist() if hasattr(value, "tolist") else value


def _as_json(value: object) -> str:
    """Format messages. Fields besides the text may be of any type: Parquet has dates in messages."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedRow("a text holds half of a surrogate pair, which is no valid Unicode") from None


def _template_fields(key: str, template: str) -> set[str]:
    names, problem = template_columns(template)
    if problem:
        raise BadConfig(f"{key}: {problem}")
    return set(names)
