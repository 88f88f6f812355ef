"""Settings of the model: its source, its tokenizer, and an adapter of it."""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlhf_core.schemas.base import Positive, PositiveFloat, Schema
from rlhf_core.schemas.slurm_values import OneLine

BUILT_TOKENIZERS = ("char", "byte", "bpe")
"""Values of `model.tokenizer` that are built from the data; others are folders."""


ALL_LINEAR = "all-linear"
"""Value of `model.lora.target_modules` for every linear layer but the output layer, as in peft."""


ONE_MODEL_SOURCE = "of model.path and model.config; give exactly one of them"


class LoraSpec(Schema):
    """A LoRA adapter (Hu et al. 2021, arXiv 2106.09685), trained through peft in place of the model's own weights."""

    rank: Positive = 16
    """Rank of the two matrices beside each layer, `r` in peft."""
    alpha: PositiveFloat = 32.0
    """Scale of what they add, `lora_alpha` in peft: their product times alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's input, `lora_dropout` in peft. Only with algorithms that do not sample: those take
    log-probabilities of the very distribution that was sampled from."""
    target_modules: tuple[OneLine, ...] = (ALL_LINEAR,)
    """Linear layers that get an adapter, by the last part of their names (`q_proj`); `all-linear` for all but the
    output layer. Embeddings and output layers get none: many models tie them to each other."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, `use_rslora` in peft (arXiv 2312.03732): a high rank then learns as fast as
    a low one."""

    @model_validator(mode="after")
    def _names_targets(self) -> Self:
        if not self.target_modules or (ALL_LINEAR in self.target_modules and len(self.target_modules) > 1):
            raise ValueError(
                f"found model.lora.target_modules = {list(self.target_modules)}, expected names of layers, or "
                f'"{ALL_LINEAR}" alone'
            )
        return self


class ModelSpec(Schema):
    """Model that is trained, and its tokenizer."""

    path: str = ""
    """Folder of a Hugging Face model to start from; empty to build one from `model.config` with random weights."""
    config: dict[str, JsonValue] = {}
    """Transformers configuration of a model built from scratch: `model_type` and its arguments, for instance
    `hidden_size`."""
    tokenizer: str = ""
    """`char`, `byte` or `bpe` to build one from the training data, or a folder to load; empty takes the one in
    `model.path`."""
    tokenizer_vocab_size: Positive = 2048
    """Vocabulary size of a `bpe` tokenizer built here; other tokenizers ignore it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights during training."""
    lora: LoraSpec | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path and self.config:
            raise ValueError(f"found both {ONE_MODEL_SOURCE}")
        if self.config and "model_type" not in self.config:
            raise ValueError('model.config needs a model_type, for instance model_type = "qwen3"')
        if self.config and not self.tokenizer:
            raise ValueError('a model built from model.config needs model.tokenizer: "char", "byte", "bpe" or a folder')
        return self
