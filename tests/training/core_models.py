"""Small models and data shared by the tests of the training core."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.data.tokenizers import build_tokenizer
from rlhf_core.training.models.causal_lm import build_causal_lm
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.seeds import sample_seed
from rlhf_core.training.rollouts.transformers_engine import generate
from rlhf_core.training.types import Completion

QWEN: dict[str, JsonValue] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}
"""A model of 40 thousand parameters whose answers differ clearly from each other."""

OTHER_FAMILIES: dict[str, dict[str, JsonValue]] = {
    "llama": {
        **{k: v for k, v in QWEN.items() if k != "head_dim"},
        "model_type": "llama",
        "tie_word_embeddings": False,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
}

PROMPTS = [[20, 30, 40], [50], [21, 22, 23, 24, 25, 26, 27], [60, 61], [20, 30, 40]]
SEEDS = [[sample_seed(0, 1, f"prompt-{i}", j) for j in range(4)] for i in range(len(PROMPTS))]


def char_tokenizer() -> PreTrainedTokenizerBase:
    """Character tokenizer with 128 tokens."""
    return build_tokenizer("char", [], 0)


def tiny_model(config: Mapping[str, JsonValue] = QWEN, seed: int = 0) -> PreTrainedModel:
    """A model with random weights over the character tokenizer."""
    return build_causal_lm(config, char_tokenizer(), seed)


def tiny_seeing_model() -> PreTrainedModel:
    """A model that also reads images: the settings of its layers are in a part of its configuration."""
    nested = {**QWEN, "model_type": "gemma3_text", "vocab_size": 128, "sliding_window": 4, "num_hidden_layers": 6}
    seeing = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = AutoConfig.for_model("gemma3", text_config=nested, vision_config={**seeing, "image_size": 28})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    **settings: Any,
) -> list[list[Completion]]:
    """Generate with settings that suit tests."""
    beat = settings.pop("beat", lambda: None)
    sampling = Sampling(**{"max_new_tokens": 12, "temperature": 1.0, "batch_size": 64} | settings)
    return generate(model, char_tokenizer(), prompts, seeds, sampling, beat)


def tokens_of(made: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    """Tokens of completions."""
    return [[completion.token_ids for completion in group] for group in made]


def run_spec(**sections: dict[str, Any]) -> RunSpec:
    """A valid spec with some sections replaced."""
    content: dict[str, Any] = {
        "name": "test",
        "model": {"config": QWEN, "tokenizer": "char"},
        "data": {"generator": "rlhf_core.training.tasks:sort_digits"},
        "train": {"num_steps": 1},
    }
    return RunSpec.model_validate(content | sections)
