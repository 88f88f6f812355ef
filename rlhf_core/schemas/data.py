"""Settings of the data: the source of prompts and completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlhf_core.schemas.base import NonNegative, OptionalImportPath, Positive, Schema

DataKind = Literal["answer", "pair", "label"]
"""Part of a row besides its prompt: an answer, a chosen and a rejected completion, or a label of its completion."""


RESERVED_ARGUMENTS = {
    **dict.fromkeys(("conversation", "messages"), "the rows"),
    "tools": "data.tools_column",
    "chat_template": "the folder of the tokenizer",
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "strftime_now"), "rlhf-flows"),
    **dict.fromkeys(("tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"), "rlhf-flows"),
    **dict.fromkeys(("return_tensors", "return_dict", "return_assistant_tokens_mask"), "rlhf-flows"),
}
"""Arguments of transformers' ``apply_chat_template`` that ``data.template_args`` may not contain, and their source."""


SourceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
"""Name of a source, part of the names of its metrics."""


class RowSource(Schema):
    """Files of rows, and the columns and templates that make prompts and completions of them."""

    train: str = ""
    """Training data: a `.jsonl`, `.parquet` or `.csv` file with one row per prompt; empty with
    `data.generator` or `data.sources`."""
    eval: str = ""
    """Held-out data in the same format, never trained on."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: a text, which the model gets as it is unless `data.chat` is set, or a list of
    messages (`[{"role": "user", "content": ...}]`), which the chat template of the tokenizer renders."""
    messages_column: str = ""
    """Column that holds whole conversations as lists of messages, in place of `data.prompt_column` and
    `data.answer_column`; empty for none. The messages before the first one of the model are the prompt, and its first
    one is the reference answer. Supervised training teaches all messages of the model, and none of others."""
    answer_column: str = "answer"
    """Column that holds the reference answer. Algorithms that learn only from pairs do not need it; empty if no reward
    function and not even `evaluate.scorer` needs one, as with a reward model or a judge."""
    chosen_column: str = "chosen"
    """Column that holds the better completion of a pair, for an algorithm that learns from pairs."""
    rejected_column: str = "rejected"
    """Column that holds the worse completion of a pair."""
    label_column: str = "label"
    """Column that says whether the completion (`data.completion_template`) is desirable (true or false, 1 or 0), for an
    algorithm that learns from labelled completions."""
    margin_column: str = ""
    """Column that holds the margin by which the better completion of a pair is better, for a reward model; empty for
    none."""
    chat: bool = False
    """Put texts through the chat template of the tokenizer as well: the prompt, filled into
    `data.prompt_template`, as a message of the user, and completions as messages of the model."""
    system_prompt: str = ""
    """System message in front of every conversation that does not begin with one; empty for none."""
    tools_column: str = ""
    """Column that holds the tools that the model may call in a conversation, which the chat template writes into its
    prompt: a list of descriptions of functions, or such a list as JSON text; empty for none. Rows may lack it."""
    prompt_template: str = "{prompt}"
    """Text given to the model; `{column}` is replaced by that column of the row."""
    completion_template: str = "{answer}"
    """Text that supervised training teaches after the prompt; `{column}` is replaced in the same way."""
    chosen_template: str = "{chosen}"
    """Text of the better completion of a pair; `{column}` is replaced in the same way."""
    rejected_template: str = "{rejected}"
    """Text of the worse completion of a pair; `{column}` is replaced in the same way."""

    @model_validator(mode="after")
    def _renders_messages_by_the_chat_template(self) -> Self:
        defaults = type(self).model_fields
        for name in ("chat", "prompt_template", "completion_template"):
            if self.messages_column and getattr(self, name) != defaults[name].default:
                raise ValueError(
                    f"found data.messages_column and data.{name}, which is for texts; leave data.{name} out: the chat "
                    "template of the tokenizer renders messages"
                )
        for name in ("prompt_column", "answer_column"):
            if self.messages_column and getattr(self, name) != defaults[name].default:
                raise ValueError(
                    f"found data.messages_column and data.{name}, which it replaces; leave data.{name} out: the prompt "
                    "and the reference answer are messages of the conversation"
                )
        return self

    @model_validator(mode="after")
    def _fills_templates(self) -> Self:
        for name in ("prompt_template", "chosen_template", "rejected_template"):
            template = getattr(self, name).replace("{{", "").replace("}}", "")
            if not self.answer_column and "{answer}" in template:
                raise ValueError(f'found {{answer}} in data.{name} and data.answer_column = ""; set the column')
        return self


class SourceSpec(RowSource):
    """One source of a mixture: a table `[data.sources.NAME]`. Settings that it lacks are those of `[data]`."""

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Share of the rows that are trained on, relative to the weights of the other sources; rows of small sources repeat
    to reach it. Without any weights, each row is taken once in an epoch."""


class DataSpec(RowSource):
    """Source of prompts and answers."""

    sources: Annotated[dict[SourceName, SourceSpec], Field(max_length=16)] = {}
    """Several sources in place of `data.train` and `data.eval`, mixed by their weights: by name, each with files,
    columns and templates of its own. One may have only a file of held-out rows."""
    generator: OptionalImportPath = ""
    """`module:function` that makes both splits instead of files; called as `function(split, seed,
    **data.generator_args)`, with the global random number generators seeded. It must return the same rows on every
    rank."""
    generator_args: dict[str, JsonValue] = {}
    """Arguments of the generator."""
    template_args: dict[str, JsonValue] = {}
    """Further variables of the chat template, the same for all conversations, such as `{enable_thinking = false}` for
    Qwen3."""
    max_prompt_tokens: Positive = 512
    """Longest prompt in tokens."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """Treatment of longer prompts: drop the row (counted and reported), or stop."""
    max_completion_tokens: NonNegative = 0
    """Longest completion to learn from, in tokens; 0 for no limit. Both completions of a pair must fit."""
    overlong_completions: Literal["drop", "error"] = "drop"
    """Treatment of rows with longer completions: drop the row (counted and reported), or stop."""
    malformed_rows: Literal["error", "drop"] = "error"
    """Treatment of invalid rows: stop with the file and line number, or drop them (counted and reported)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.generator and (self.train or self.eval):
            raise ValueError("found data.generator and data.train/data.eval; give either the generator or the files")
        if self.sources and (self.train or self.eval or self.generator):
            raise ValueError(
                "found data.sources and data.train, data.eval or data.generator; name all files in the tables "
                "[data.sources.NAME]"
            )
        return self

    @model_validator(mode="after")
    def _has_arguments_of_templates(self) -> Self:
        for name in self.template_args:
            if name in RESERVED_ARGUMENTS:
                raise ValueError(
                    f"found data.template_args.{name}, which is given by {RESERVED_ARGUMENTS[name]}; expected further "
                    "variables of the chat template, such as enable_thinking"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _sources_have_common_settings(cls, content: Any) -> Any:
        """Fill in the settings of ``[data]`` that a source leaves out, so that a stored spec has all of them."""
        if not isinstance(content, Mapping) or not isinstance(content.get("sources"), Mapping):
            return content
        common = {name: content[name] for name in RowSource.model_fields if name in content}
        common = {name: value for name, value in common.items() if name not in ("train", "eval")}
        sources = {
            name: {**common, **one} if isinstance(one, Mapping) else one for name, one in content["sources"].items()
        }
        return {**content, "sources": sources}

    @model_validator(mode="after")
    def _mixes_its_sources(self) -> Self:
        trained = self.of_split("train") if self.sources else {}
        weighted = [name for name, one in self.sources.items() if one.weight]
        for name, one in self.sources.items():
            if not (one.train or one.eval):
                raise ValueError(f"found neither train nor eval in data.sources.{name}, expected a file of rows")
            if one.weight and not one.train:
                raise ValueError(f"found data.sources.{name}.weight without train; only training rows are mixed")
            if bool(one.answer_column) != bool(self.answer_column):
                raise ValueError(
                    f'found data.sources.{name}.answer_column = "{one.answer_column}" and data.answer_column = '
                    f'"{self.answer_column}"; expected answers in all sources or in none'
                )
        if self.sources and not trained:
            raise ValueError("found no train in any of data.sources, expected a file of training rows")
        lacking = [name for name in trained if name not in weighted]
        if weighted and lacking:
            raise ValueError(
                f"found no weight in data.sources.{lacking[0]}, but in {', '.join(weighted)}; give every "
                "source with train a weight of more than 0, or none"
            )
        return self

    def of_split(self, split: Literal["train", "eval"]) -> dict[str, RowSource]:
        """Sources with rows of a split, by name in alphabetical order; the only one has no name."""
        if not self.sources:
            return {"": self}
        return {
            name: one for name, one in sorted(self.sources.items()) if (one.train if split == "train" else one.eval)
        }

    def source(self, name: str) -> RowSource:
        """Source of a name (``Row.source``)."""
        return self.sources[name] if name else self

    @property
    def tables(self) -> dict[str, RowSource]:
        """Tables of settings that name files, columns and templates in use: ``data``, or those of its sources."""
        return {f"data.sources.{name}": one for name, one in sorted(self.sources.items())} or {"data": self}

    @property
    def files(self) -> dict[str, str]:
        """Each setting that names a file of rows, and that file."""
        files = {f"{table}.train": one.train for table, one in self.tables.items()}
        files |= {f"{table}.eval": one.eval for table, one in self.tables.items()}
        return {setting: path for setting, path in files.items() if path}

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the sources of training rows, by name; the only source has no name."""
        return {name: self.sources[name].weight if name else 0.0 for name in self.of_split("train")}

    @property
    def has_eval(self) -> bool:
        """True if there are held-out rows."""
        return bool(self.generator or self.eval or any(one.eval for one in self.sources.values()))
