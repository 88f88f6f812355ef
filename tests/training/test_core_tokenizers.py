"""Tokenizers built here: lossless where they promise it, reproducible, and with a text for every number."""

import json
import string
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.model import BUILT_TOKENIZERS
from rlhf_core.training.data.tokenizers import build_tokenizer, load_tokenizer

pytestmark = pytest.mark.training

CORPUS = ["Natalia sold clips to 48 of her friends in April.", "48/2 = <<48/2=24>>24 clips in May.\n#### 72"] * 20
TOKENIZERS = {kind: build_tokenizer(kind, CORPUS, 320) for kind in BUILT_TOKENIZERS}

any_text = st.text(st.characters(exclude_categories=["Cs"]))
printable = st.text("".join(c for c in string.printable if c.isprintable()) + "\n")


def round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False))


@given(any_text)
@example("👩‍👩‍👧 é e\u0301 \r\n\t\x00 　")
@example("  two  spaces <|pad|> a<|im_end|>b  ")
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_any_text_survives(kind: str, text: str) -> None:
    assert round_trip(TOKENIZERS[kind], text) == text


@given(printable)
@example("12 ,. 's n't  don't <|pad|>")
def test_printable_text_survives_characters(text: str) -> None:
    tokenizer = TOKENIZERS["char"]
    assert round_trip(tokenizer, text) == text


def test_other_characters_are_shown_as_unknown() -> None:
    assert round_trip(TOKENIZERS["char"], "a é") == "a <|unk|>"


@pytest.mark.parametrize("kind", BUILT_TOKENIZERS)
def test_every_number_has_a_visible_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert len(tokenizer) % 64 == 0
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert all(tokenizer.decode([number]) for number in range(len(tokenizer)))


@pytest.mark.parametrize("kind", BUILT_TOKENIZERS)
def test_a_saved_tokenizer_loads_alike(kind: str, tmp_path: Path) -> None:
    built = TOKENIZERS[kind]
    built.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "1 + 2 = 3\n <|im_end|>"
    assert loaded.get_vocab() == built.get_vocab()
    assert loaded.encode(text) == built.encode(text)
    assert round_trip(loaded, text) == text
    assert (loaded.pad_token, loaded.eos_token) == ("<|pad|>", "<|im_end|>")
    assert loaded.chat_template == built.chat_template


@pytest.mark.parametrize("kind", BUILT_TOKENIZERS)
def test_a_chat_turn_ends_with_the_end_token(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked)
    assert tokenizer.encode(text).count(tokenizer.eos_token_id) == 2


def test_byte_pairs_are_learned_and_always_the_same() -> None:
    first, second = (build_tokenizer("bpe", CORPUS, 320) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert len(first) == 320
    assert len(first.encode(CORPUS[0])) < len(CORPUS[0]) / 2 < len(TOKENIZERS["byte"].encode(CORPUS[0]))


def test_what_makes_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match='found tokenizer "word"'):
        build_tokenizer("word", [], 320)
    with pytest.raises(BadConfig, match="tokenizer_vocab_size = 100; a bpe tokenizer needs at least 259"):
        build_tokenizer("bpe", CORPUS, 100)
    with pytest.raises(BadConfig, match="is not a folder"):
        load_tokenizer(tmp_path / "gone")
    with pytest.raises(BadConfig, match="contains no tokenizer"):
        load_tokenizer(tmp_path)
    build_tokenizer("byte", [], 0).save_pretrained(tmp_path)
    core = json.loads((tmp_path / "tokenizer.json").read_text())
    core["model"]["type"] = "of a newer version"
    (tmp_path / "tokenizer.json").write_text(json.dumps(core))
    with pytest.raises(BadConfig, match=r"that transformers can load: Exception: .*variant"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_end_or_padding_token(tmp_path: Path) -> None:
    endless = build_tokenizer("byte", [], 0)
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "endless")
    with pytest.raises(BadConfig, match="has no end token"):
        load_tokenizer(tmp_path / "endless")
    unpadded = build_tokenizer("byte", [], 0)
    unpadded.pad_token = None
    unpadded.save_pretrained(tmp_path / "unpadded")
    assert load_tokenizer(tmp_path / "unpadded").pad_token == "<|im_end|>"
