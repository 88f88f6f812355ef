"""Cores of the built-in tokenizers (``tokenizers.py``), without transformers, which takes long to import.

All three have ``<|pad|>`` as padding, ``<|im_end|>`` as the end token, and a vocabulary padded to a multiple of 64 with
``<|reserved_N|>``: every id that the model can sample is a token with visible text, so that none of its output is
hidden from a reward function.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.model import BUILT_TOKENIZERS

VOCAB_MULTIPLE = 64
"""Vocabulary sizes are rounded up to a multiple of this, for efficient matrix kernels."""

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"

_SPECIAL = (PAD, START, END)


def build_core(kind: str, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Build the core of a tokenizer; see :func:`rlhf_core.training.data.tokenizers.build_tokenizer`.

    Raises:
        BadConfig: unknown kind, or a vocabulary too small to hold every byte.
    """
    if kind == "char":
        core = _char()
    elif kind == "byte":
        core = _byte()
    elif kind == "bpe":
        core = _bpe(texts, vocab_size)
    else:
        raise BadConfig(f'found tokenizer "{kind}", expected one of: {", ".join(BUILT_TOKENIZERS)}')
    size = core.get_vocab_size()
    reserved = [f"<|reserved_{number}|>" for number in range(-size % VOCAB_MULTIPLE)]
    core.add_special_tokens([*_SPECIAL, *reserved])
    return core


def _char() -> Tokenizer:
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {token: number for number, token in enumerate([*_SPECIAL, UNKNOWN, *characters])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return core


def _byte() -> Tokenizer:
    # ByteLevel writes each byte as one printable character; sorted, because the library returns them as a set.
    vocab = {token: number for number, token in enumerate([*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    return _with_bytes(Tokenizer(models.BPE(vocab, merges=[])))


def _bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(_SPECIAL) + len(alphabet)
    if vocab_size < smallest:
        raise BadConfig(f"found model.tokenizer_vocab_size = {vocab_size}; a bpe tokenizer needs at least {smallest}")
    core = _with_bytes(Tokenizer(models.BPE()))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core


def _with_bytes(core: Tokenizer) -> Tokenizer:
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core
