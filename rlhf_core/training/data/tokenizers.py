"""Tokenizers: three built-in kinds, and loading of existing ones.

The built-in ones are the cores of ``tokenizer_cores.py`` with a chat template in ChatML form, whose turns end with the
end token.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_core.errors import BadConfig
from rlhf_core.training.data.tokenizer_cores import END, PAD, UNKNOWN, build_core

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template of the built-in tokenizers."""


def build_tokenizer(kind: str, texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer. The same arguments give the same tokenizer.

    Args:
        kind: ``char``: one token per printable ASCII character and newline; others become ``<|unk|>``.
            ``byte``: one token per byte of UTF-8; loss-free for any text. ``bpe``: byte pairs learned from ``texts``
            (Sennrich et al. 2016, arXiv 1508.07909, on bytes); loss-free as well.
        texts: read by ``bpe`` only.
        vocab_size: size of a ``bpe`` vocabulary with its special tokens, rounded up to a multiple of 64.

    Raises:
        BadConfig: unknown kind, or a vocabulary too small to hold every byte.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_core(kind, texts, vocab_size),
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN if kind == "char" else None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder. If it has no padding token, its end token is used for padding.

    Raises:
        BadConfig: the folder holds no tokenizer, or the tokenizer has no end token.
    """
    if not path.is_dir():
        raise BadConfig(f"{path} is not a folder; expected a folder with a Hugging Face tokenizer")
    from transformers import AutoTokenizer  # it imports torch, which building a tokenizer does not need

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # many types; that of a file of a newer tokenizers is Exception itself
        found = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise BadConfig(f"{path} contains no tokenizer that transformers can load: {found}") from error
    if tokenizer.eos_token_id is None:
        raise BadConfig(f"the tokenizer in {path} has no end token (eos_token); completions would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Text of tokens, with special tokens and spaces as they are."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
