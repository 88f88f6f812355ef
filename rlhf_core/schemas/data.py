"""Settings of the data: the source of prompts and completions."""

from typing import Literal, Self

from pydantic import JsonValue, model_validator

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


class DataSpec(Schema):
    """Source of prompts and answers."""

    train: str = ""
    """Training data: a `.jsonl`, `.parquet` or `.csv` file with one row per prompt; empty if `data.generator` makes
    it."""
    eval: str = ""
    """Held-out data in the same format, never trained on."""
    generator: OptionalImportPath = ""
    """`module:function` that makes both splits instead of files; called as `function(split, seed,
    **data.generator_args)`, with the global random number generators seeded. It must return the same rows on every
    rank."""
    generator_args: dict[str, JsonValue] = {}
    """Arguments of the generator."""
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
    template_args: dict[str, JsonValue] = {}
    """Further variables of the chat template, the same for all conversations, such as `{enable_thinking = false}` for
    Qwen3."""
    prompt_template: str = "{prompt}"
    """Text given to the model; `{column}` is replaced by that column of the row."""
    completion_template: str = "{answer}"
    """Text that supervised training teaches after the prompt; `{column}` is replaced in the same way."""
    chosen_template: str = "{chosen}"
    """Text of the better completion of a pair; `{column}` is replaced in the same way."""
    rejected_template: str = "{rejected}"
    """Text of the worse completion of a pair; `{column}` is replaced in the same way."""
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
        return self

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
    def _has_arguments_of_templates(self) -> Self:
        for name in self.template_args:
            if name in RESERVED_ARGUMENTS:
                raise ValueError(
                    f"found data.template_args.{name}, which is given by {RESERVED_ARGUMENTS[name]}; expected further "
                    "variables of the chat template, such as enable_thinking"
                )
        return self

    @model_validator(mode="after")
    def _fills_templates(self) -> Self:
        for name in ("prompt_template", "chosen_template", "rejected_template"):
            template = getattr(self, name).replace("{{", "").replace("}}", "")
            if not self.answer_column and "{answer}" in template:
                raise ValueError(f'found {{answer}} in data.{name} and data.answer_column = ""; set the column')
        return self
