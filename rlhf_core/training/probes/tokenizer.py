"""Check of a tokenizer: round trips of texts, unknown characters, and its chat template."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import BadConfig
from rlhf_core.schemas.content import TokenizerReport
from rlhf_core.schemas.run import RunSpec
from rlhf_core.survival import Survived
from rlhf_core.training.types import Row

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
ANSWER = {"role": "assistant", "content": "4"}


class CoreTokenizer:
    """A tokenizer built by us, with only the methods that this check needs. It avoids importing transformers, which
    takes longer than the whole check and whose tokenizer calls the same core."""

    bos_token = None
    chat_template = None
    """None: our chat template is known to render (``tests/training/test_core_tokenizers.py``), and no rows are
    messages."""

    def __init__(self, core: "Tokenizer") -> None:
        from rlhf_core.training.data.tokenizer_cores import END, UNKNOWN

        self._core = core
        self.eos_token_id = core.token_to_id(END)
        self.unk_token_id = core.token_to_id(UNKNOWN)

    def __call__(
        self, texts: list[str], *, add_special_tokens: bool, return_attention_mask: bool
    ) -> dict[str, list[list[int]]]:
        """Encode texts."""
        del return_attention_mask
        encoded = self._core.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in encoded]}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text."""
        tokens: list[int] = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        return tokens

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Decode tokens. Tokenizers built by us never clean up."""
        del clean_up_tokenization_spaces
        text: str = self._core.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


def built_tokenizer(
    spec: RunSpec, trained: Sequence[Row], every: Sequence[Row]
) -> "CoreTokenizer | PreTrainedTokenizerBase":
    """The tokenizer that training builds; with transformers only if messages are to be rendered.

    Args:
        trained: training rows.
        every: all rows to be rendered.
    """
    texts = [text for row in trained for text in (row.prompt, row.target)]
    if any(row.chat is not None for row in every):
        from rlhf_core.training.data.tokenizers import build_tokenizer

        return build_tokenizer(spec.model.tokenizer, texts, spec.model.tokenizer_vocab_size)
    from rlhf_core.training.data.tokenizer_cores import build_core

    return CoreTokenizer(build_core(spec.model.tokenizer, texts, spec.model.tokenizer_vocab_size))


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> TokenizerReport:
    """Check a tokenizer: texts that do not survive a round trip, unknown tokens, and rendering of its chat template."""
    num_changed, example, num_tokens, num_unknown = 0, "", 0, 0
    for text, number in Counter(texts).items():  # answers are often equal
        tokens = tokenizer.encode(text, add_special_tokens=False)
        num_tokens += number * len(tokens)
        num_unknown += number * tokens.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
        back = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if back != text:
            num_changed += number
            example = example or _difference(text, str(back))
    return TokenizerReport(
        num_texts=len(texts),
        num_changed=num_changed,
        example=example,
        unknown_share=num_unknown / max(num_tokens, 1),
        chat_problem=_chat_problem(tokenizer),
    )


def difference_of_reference(
    folder: Path, tokenizer: "CoreTokenizer | PreTrainedTokenizerBase", texts: Sequence[str]
) -> str:
    """The first difference between a tokenizer and that of a reference model; empty if there is none.

    A folder without a tokenizer has none to compare with.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return ""
    from rlhf_core.training.data.tokenizers import load_tokenizer

    try:
        other = load_tokenizer(folder)
    except BadConfig as error:
        return " ".join(str(error).split())
    if other.eos_token_id != tokenizer.eos_token_id:
        return f"its end token is {other.eos_token_id}, that of the policy {tokenizer.eos_token_id}"
    for text in dict.fromkeys(texts):
        own, others = (one.encode(text, add_special_tokens=False) for one in (tokenizer, other))
        if own != others:
            at = next(
                (i for i, (a, b) in enumerate(zip(own, others, strict=False)) if a != b), min(len(own), len(others))
            )
            return f"its tokenizer encodes {text[:60]!r} in another way than that of the policy, from token {at + 1} on"
    return ""


def _difference(text: str, back: str, around: int = 20) -> str:
    """Text around the first difference between a text and its round trip."""
    at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    start = max(0, at - around)
    return f"{text[start : at + around]!r} came back as {back[start : at + around]!r}"


def _chat_problem(tokenizer: "PreTrainedTokenizerBase") -> str:
    if not tokenizer.chat_template:
        return ""
    plain: Any = ""
    prompt: Any = ""
    with Survived() as failed:  # a template is code and may raise anything
        plain = tokenizer.apply_chat_template(CHAT, tokenize=False)
        prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    if isinstance(failed.error, ImportError):
        return ""  # without jinja2 the template cannot be rendered, here or in training
    if failed.error is not None:
        return f"does not render: {' '.join(failed.problem.split())}"
    if CHAT[0]["content"] not in prompt:
        return "leaves the user's message out"
    if prompt == plain and not _ends_before_answer(tokenizer, prompt):
        return "adds no generation prompt, so the model does not see that it is its turn"
    return ""


def _ends_before_answer(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> bool:
    """True if an answer follows a prompt without a header, for instance after Mistral's ``[/INST]``.

    A prompt that ends with the user's message does not show the model that it is its turn.
    """
    answer: Any = ""
    with Survived():  # a template may refuse this conversation
        answer = tokenizer.apply_chat_template([*CHAT, ANSWER], tokenize=False)
    text = ANSWER["content"]
    is_next = answer.startswith(prompt) and answer.removeprefix(prompt).lstrip().startswith(text)
    return is_next and not prompt.rstrip().endswith(CHAT[0]["content"])
