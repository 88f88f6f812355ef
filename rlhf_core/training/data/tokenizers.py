"""Tokenizers: three kinds that are built here, and loading of existing ones.

All three built here have ``<|pad|>`` as padding, ``<|im_end|>`` as the end token, a chat template in ChatML form whose
turns end with that same token, and a vocabulary filled up to a multiple of 64 with ``<|reserved_N|>``: every id that
the model can sample is a token with visible text, so that none of its output is hidden from a reward function.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.model import BUILT_TOKENIZERS

VOCAB_MULTIPLE = 64
"""Vocabulary sizes are rounded up to a multiple of this, for efficient matrix kernels."""

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"

_SPECIAL = (PAD, START, END)
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN if kind == "char" else None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; one without a padding token pads with its end token.

    Raises:
        BadConfig: there is none, or it has no end token.
    """
    if not path.is_dir():
        raise BadConfig(f"{path} is not a folder; expected a folder with a Hugging Face tokenizer")
    from transformers import AutoTokenizer  # it imports torch, which building a tokenizer does not need

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadConfig(
            f"{path} contains no tokenizer that transformers can load: {str(error).splitlines()[0]}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise BadConfig(f"the tokenizer in {path} has no end token (eos_token); completions would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _char() -> Tokenizer:
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {token: number for number, token in enumerate([*_SPECIAL, UNKNOWN, *characters])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return core


def _byte() -> Tokenizer:
    # ByteLevel writes each byte as one printable character; sorted, because the library gives them as a set.
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
