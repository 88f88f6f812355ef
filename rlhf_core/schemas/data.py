"""Settings of the data: where prompts and completions come from."""

from typing import Literal, Self

from pydantic import JsonValue, model_validator

from rlhf_core.schemas.base import NonNegative, OptionalImportPath, Positive, Schema

DataKind = Literal["answer", "pair", "label"]
"""Part of a row besides its prompt: an answer, a chosen and a rejected completion, or a label of its completion."""


class DataSpec(Schema):
    """Source of prompts and answers."""

    train: str = ""
    """Training data: a `.jsonl`, `.parquet` or `.csv` file with one row per prompt; empty when `data.generator` makes
    it."""
    eval: str = ""
    """Held-out data in the same format, never trained on."""
    generator: OptionalImportPath = ""
    """`module:function` that makes both splits instead of files; called as `function(split, seed,
    **data.generator_args)`."""
    generator_args: dict[str, JsonValue] = {}
    """Arguments of the generator."""
    prompt_column: str = "prompt"
    """Column that holds the prompt."""
    answer_column: str = "answer"
    """Column that holds the reference answer. An algorithm that learns from pairs alone does without."""
    chosen_column: str = "chosen"
    """Column that holds the better completion of a pair, for an algorithm that learns from pairs."""
    rejected_column: str = "rejected"
    """Column that holds the worse completion of a pair."""
    label_column: str = "label"
    """Column that says whether the completion (`data.completion_template`) is desirable, for an algorithm that learns
    from labelled completions: true or false, 1 or 0."""
    margin_column: str = ""
    """Column that holds by how much the better completion of a pair is better, for a reward model; empty for none."""
    prompt_template: str = "{prompt}"
    """Text given to the model; `{column}` is replaced by that column of the row."""
    completion_template: str = "{answer}"
    """Text that supervised training teaches after the prompt; `{column}` is replaced likewise."""
    chosen_template: str = "{chosen}"
    """Text of the better completion of a pair; `{column}` is replaced likewise."""
    rejected_template: str = "{rejected}"
    """Text of the worse completion of a pair; `{column}` is replaced likewise."""
    max_prompt_tokens: Positive = 512
    """Longest prompt in tokens."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """Treatment of longer prompts: leave the row out (counted and shown), or stop."""
    max_completion_tokens: NonNegative = 0
    """Longest completion that is learned from, in tokens; 0 for no limit. Both of a pair have to fit."""
    overlong_completions: Literal["drop", "error"] = "drop"
    """Policy for rows whose completions are longer: leave the row out (counted and shown), or stop."""
    malformed_rows: Literal["error", "drop"] = "error"
    """Treatment of lines that are not valid: stop with file and line number, or leave them out (counted and
    shown)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.generator and (self.train or self.eval):
            raise ValueError("found data.generator and data.train/data.eval; give either the generator or the files")
        return self
