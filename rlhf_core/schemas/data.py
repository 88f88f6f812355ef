"""Settings of the data: the source of prompts and completions."""

from typing import Literal, Self

from pydantic import JsonValue, model_validator

from rlhf_core.schemas.base import NonNegative, OptionalImportPath, Positive, Schema

DataKind = Literal["answer", "pair", "label"]
"""Part of a row besides its prompt: an answer, a chosen and a rejected completion, or a label of its completion."""


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
    """Column that holds the prompt."""
    answer_column: str = "answer"
    """Column that holds the reference answer. Algorithms that learn only from pairs do not need it."""
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
