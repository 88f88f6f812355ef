"""Settings of the model: source, tokenizer, and adapter."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlhf_core.schemas.base import Positive, PositiveFloat, Schema
from rlhf_core.schemas.slurm_values import OneLine

BUILT_TOKENIZERS = ("char", "byte", "bpe")
"""Values of `model.tokenizer` for tokenizers built from the data; other values are folders."""


ALL_LINEAR = "all-linear"
"""Value of `model.lora.target_modules` for all linear layers except the output layer, as in peft."""


ONE_MODEL_SOURCE = "of model.path and model.config; give exactly one of them"


class LoraSpec(Schema):
    """A LoRA adapter (Hu et al. 2021, arXiv 2106.09685), trained with peft instead of the model's own weights."""

    rank: Positive = 16
    """Rank of the two matrices beside each layer, `r` in peft."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter, `lora_alpha` in peft: the product of its matrices is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's input, `lora_dropout` in peft. Only for algorithms that do not sample: sampling
    algorithms need log-probabilities of exactly the distribution that was sampled from."""
    target_modules: tuple[OneLine, ...] = (ALL_LINEAR,)
    """Linear layers that get an adapter, by the last part of their names (`q_proj`), or `all-linear` for all except the
    output layer. Embeddings and output layers get none, because many models tie them."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, `use_rslora` in peft (arXiv 2312.03732), so a high rank learns as fast as a
    low one."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @model_validator(mode="after")
    def _names_targets(self) -> Self:
        if not self.target_modules or (ALL_LINEAR in self.target_modules and len(self.target_modules) > 1):
            raise ValueError(
                f"found model.lora.target_modules = {list(self.target_modules)}, expected names of layers, or "
                f'"{ALL_LINEAR}" alone'
            )
        return self


class ModelSpec(Schema):
    """The model to train, and its tokenizer."""

    path: str = ""
    """Folder of a Hugging Face model to start from; empty builds one from `model.config` with random weights."""
    config: dict[str, JsonValue] = {}
    """Transformers configuration of a model built from scratch: `model_type` and its arguments, for instance
    `hidden_size`."""
    tokenizer: str = ""
    """Tokenizer: `char`, `byte` or `bpe` builds one from the training data; a folder is loaded; empty uses the one in
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
        if self.path and self.tokenizer in BUILT_TOKENIZERS:
            raise ValueError(
                f'found model.tokenizer = "{self.tokenizer}" with model.path; a model that exists brings its own '
                "tokenizer: leave model.tokenizer out, or name the folder of one that fits it"
            )
        if self.config and "model_type" not in self.config:
            raise ValueError('model.config needs a model_type, for instance model_type = "qwen3"')
        if self.config and not self.tokenizer:
            raise ValueError('a model built from model.config needs model.tokenizer: "char", "byte", "bpe" or a folder')
        return self
