"""Rows that go through the chat template: their tools and variables, texts, and whole conversations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from core_models import char_tokenizer
from pydantic import ValidationError
from test_preference_data import ASKED, GOOD, answer_turn, load, spec_of

from rlhf_core.errors import BadConfig, BadData
from rlhf_core.preflight.data_file import scan
from rlhf_core.training.data.examples import make_batch, make_examples, mismatched
from rlhf_core.training.data.loading import completion_lengths, encode_prompts, load_data
from rlhf_core.training.data.tokenizers import CHAT_TEMPLATE
from rlhf_core.training.types import Row

pytestmark = pytest.mark.training

TOOLS_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool['name'] }}({{ tool['in'] | join(',') }});{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] if m['content'] else m['tool_calls'][0] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{% if think is defined and not think %}{% endif %}"
)


@pytest.mark.parametrize("algorithm", ["sft", "grpo", "dpo"])
def test_tools_of_a_conversation_are_in_its_prompt(tmp_path: Path, algorithm: str) -> None:
    tools = [{"name": "add", "in": ["a", "b"], "out": None}]
    path, tokenizer = tmp_path / "rows.jsonl", char_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    calls = [{"role": "assistant", "content": None, "tool_calls": ["add(1,1)"]}]
    row = {"prompt": ASKED, "answer": calls, "chosen": calls, "rejected": "2"}
    given: tuple[Any, ...] = (tools, json.dumps(tools), [], "", None)
    path.write_text("".join(json.dumps({**row, "tools": one}) + "\n" for one in given) + json.dumps(row))
    spec = spec_of(algorithm, train=str(path), tools_column="tools")
    encoded = encode_prompts(load_data(spec, "train")[0], tokenizer, spec.data)
    assert [one.prompt for one in encoded.rows] == ["add(a,b);u:1+1?|a:"] * 2 + ["u:1+1?|a:"] * 4
    taught = {"sft": "target", "dpo": "chosen"}.get(algorithm)
    assert {getattr(one, taught) for one in encoded.rows if taught} <= {"add(1,1)|"}, "a turn that only calls a tool"
    two_functions = [{"function": {"name": "add", "arguments": {"a": 1, "city": None}}}]  # as Parquet has them
    path.write_text(json.dumps({**row, "answer": [{**calls[0], "tool_calls": two_functions}], "chosen": calls}))
    (read,) = load_data(spec, "train")[0]
    assert "city" not in str(read.chat and read.chat.target)
    path.write_text(json.dumps({**row, "tools": [{"name": "\ud800"}]}))
    with pytest.raises(BadData, match=r"rows\.jsonl:1: a text holds half of a surrogate pair"):
        load_data(spec, "train")
    for wrong in ("add", '["add"]', 7):
        path.write_text(json.dumps({**row, "tools": wrong}))
        with pytest.raises(BadData, match=r'rows\.jsonl:1: expected a list of descriptions .* column "tools"'):
            load_data(spec, "train")


def test_variables_of_the_chat_template_reach_prompts_and_completions(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}|{% if thinks is true and loop.last %}hm|{% endif %}{% endfor %}"
        "{% if thinks is undefined %}<|im_end|>{% endif %}"
    )
    path.write_text(json.dumps({"prompt": ASKED, "answer": "2"}))
    spec = spec_of("sft", train=str(path), template_args={"thinks": False})
    encoded = encode_prompts(load_data(spec, "train")[0], tokenizer, spec.data)
    assert (encoded.rows[0].prompt, encoded.rows[0].target, encoded.end_ids) == ("1+1?|", "2|", ())
    path.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}))
    with pytest.raises(BadConfig, match=r"found data\.template_args and a prompt of text \(.*rows\.jsonl:1\)"):
        load_data(spec, "train")
    with pytest.raises(
        ValidationError, match=r"found data\.template_args\.tools, which is given by data\.tools_column"
    ):
        spec_of("sft", train="x", template_args={"tools": []})


ASKED_BY_TEXT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ: 1+1?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("algorithm", ["sft", "grpo", "dpo", "kto"])
@pytest.mark.parametrize("prompt", ["1+1?", [{"role": "user", "content": "Q: 1+1?"}]])
def test_texts_and_messages_get_the_same_chat_template(tmp_path: Path, algorithm: str, prompt: Any) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", char_tokenizer()
    path.write_text(json.dumps({"prompt": prompt, "answer": 2, "chosen": "2", "rejected": "3", "label": True}))
    template = {"prompt_template": "Q: {prompt}"} if isinstance(prompt, str) else {}
    spec = spec_of(algorithm, train=str(path), chat=True, system_prompt="Be brief.", **template)
    encoded = encode_prompts(load_data(spec, "train")[0], tokenizer, spec.data)
    (row,) = encoded.rows
    assert (row.prompt, row.answer) == (ASKED_BY_TEXT, "2")
    assert (row.chosen, row.rejected) == (("2<|im_end|>\n", "3<|im_end|>\n") if algorithm == "dpo" else ("", ""))
    assert row.target == ("2<|im_end|>\n" if algorithm in ("sft", "kto") else "2")
    by_messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q: 1+1?"}]
    path.write_text(json.dumps({"prompt": by_messages, "answer": "2", "chosen": "2", "rejected": "3", "label": True}))
    bare = spec_of(algorithm, train=str(path), system_prompt="Be long.")
    (same,) = load_data(bare, "train")[0]
    assert (same.uid, encode_prompts([same], tokenizer, bare.data).rows[0].prompt) == (row.uid, ASKED_BY_TEXT)


@pytest.mark.parametrize("algorithm", ["sft", "grpo", "dpo"])
def test_a_prompt_of_text_goes_with_completions_of_messages_in_a_chat(tmp_path: Path, algorithm: str) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", char_tokenizer()
    path.write_text(
        json.dumps({"prompt": "1+1?", "answer": answer_turn("2"), "chosen": answer_turn("2"), "rejected": "3"})
    )
    spec = spec_of(algorithm, train=str(path), chat=True, system_prompt="Be brief.", prompt_template="Q: {prompt}")
    (row,) = encode_prompts(load_data(spec, "train")[0], tokenizer, spec.data).rows
    assert row.prompt == ASKED_BY_TEXT
    assert {"sft": row.target, "dpo": row.chosen}.get(algorithm, "2<|im_end|>\n") == "2<|im_end|>\n"
    assert row.answer == "2" or algorithm == "dpo"
    if algorithm == "sft":
        with pytest.raises(BadData, match=r"rows\.jsonl:1: answer: expected a text beside a prompt of text"):
            load_data(spec_of("sft", train=str(path)), "train")


def test_texts_of_a_chat_are_checked_as_others_are(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="the prompt is empty"):
        load(tmp_path, {"prompt": "", "chosen": "2", "rejected": "3"}, chat=True)
    with pytest.raises(BadData, match="the rejected completion is empty"):
        load(tmp_path, {"prompt": "1", "chosen": "2", "rejected": ""}, chat=True)
    with pytest.raises(BadData, match="the prompt is empty"):
        load(tmp_path, {"prompt": "", "chosen": answer_turn("2"), "rejected": "3"}, chat=True)
    with pytest.raises(BadConfig, match=r"found data\.system_prompt and a prompt of text .*; set data\.chat"):
        load(tmp_path, GOOD, system_prompt="Be brief.")


WHOLE = [*ASKED, *answer_turn("2"), {"role": "user", "content": "+1?"}, *answer_turn("3")]
MARKED = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% if loop.last and m['role'] == 'assistant' %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def taught(path: Path, algorithm: str, template: str, messages: Any = WHOLE) -> tuple[list[Row], list[str], list[str]]:
    """Rows of whole conversations, and what each teaches; also the text that others contribute to its sequence."""
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    path.write_text("".join(json.dumps({"turns": one, "label": True}) + "\n" for one in (messages, WHOLE[:2])))
    spec = spec_of(algorithm, train=str(path), messages_column="turns", max_completion_tokens=300)
    encoded = encode_prompts(load_data(spec, "train")[0], tokenizer, spec.data)
    examples = make_examples(encoded.rows, encoded.token_ids, tokenizer, spec.main_loop.algorithm)
    lengths = completion_lengths(encoded.rows, tokenizer)
    assert lengths == [[len(example.completions[0])] for example in examples], "limits count the same tokens"
    batch, made = make_batch(examples, spec.main_loop.algorithm, tokenizer.pad_token_id)
    assert [int(mask.sum()) for mask in made.mask] == [example.num_tokens for example in examples]
    ends = [len(example.prompt) + len(example.completions[0]) for example in examples]

    def texts(*, learned: bool) -> list[str]:
        chosen = [(made.mask[at] == learned)[: end - 1] for at, end in enumerate(ends)]
        return [tokenizer.decode(batch.input_ids[at, 1:end][chosen[at]]) for at, end in enumerate(ends)]

    return encoded.rows, texts(learned=True), texts(learned=False)


@pytest.mark.parametrize("algorithm", ["sft", "kto"])
def test_whole_conversations_teach_the_messages_of_the_model_only(tmp_path: Path, algorithm: str) -> None:
    rows, learned, others = taught(tmp_path / "rows.jsonl", algorithm, CHAT_TEMPLATE, [*WHOLE, *ASKED])
    asked = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert [(row.prompt, row.answer) for row in rows] == [(asked, "2"), (asked, "2")]
    assert rows[0].target == f"2<|im_end|>\n{asked.replace('1+1?', '+1?')}3<|im_end|>\n", (
        "the last question is left out"
    )
    assert learned == ["2<|im_end|>\n3<|im_end|>\n", "2<|im_end|>\n"]
    first = asked.removeprefix("<|im_start|>")  # nothing predicts it
    assert others == [f"{first}{asked.replace('1+1?', '+1?')}", first]


def test_a_template_may_mark_what_the_model_writes(tmp_path: Path) -> None:
    rows, learned, others = taught(tmp_path / "rows.jsonl", "sft", MARKED)
    assert [row.target for row in rows] == ["2<|im_end|>u:+1?a:3<|im_end|> ", "2<|im_end|> "]
    assert learned == ["2<|im_end|>3<|im_end|>", "2<|im_end|>"]
    assert others == [":1+1?a:u:+1?a: ", ":1+1?a: "]
    with pytest.raises(BadData, match=r"rows\.jsonl:1: the chat template renders message 2 .* differently once others"):
        taught(
            tmp_path / "rows.jsonl", "sft", MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        )
    nothing = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'tool'")
    with pytest.raises(BadData, match=r"rows\.jsonl:1: the chat template marks nothing as written by the model"):
        taught(tmp_path / "rows.jsonl", "sft", nothing)


def test_the_mismatched_completions_of_kto_are_those_of_the_model_too(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", char_tokenizer()
    path.write_text("".join(json.dumps({"turns": one, "label": True}) + "\n" for one in (WHOLE, WHOLE[:2])))
    spec = spec_of("kto", train=str(path), messages_column="turns")
    encoded = encode_prompts(load_data(spec, "train")[0], tokenizer, spec.data)
    examples = make_examples(encoded.rows, encoded.token_ids, tokenizer, spec.main_loop.algorithm)
    swapped = mismatched(examples, encoded.rows[::-1], tokenizer)
    assert [one.num_tokens for one in swapped] == [one.num_tokens for one in examples[::-1]] == [3, 6]


def test_prompts_of_whole_conversations_are_sampled_from(tmp_path: Path) -> None:
    """Then a template that renders past messages otherwise is none of its business."""
    path, tokenizer = tmp_path / "rows.jsonl", char_tokenizer()
    tokenizer.chat_template = MARKED
    path.write_text(json.dumps({"messages": WHOLE}))
    spec = spec_of("grpo", train=str(path), messages_column="messages")
    (row,) = encode_prompts(load_data(spec, "train")[0], tokenizer, spec.data).rows
    assert (row.prompt, row.answer, row.target) == ("u:1+1?a:", "2", "2")


WRONG_CONVERSATIONS = [
    (None, "expected a list of messages"),
    ([], "expected a list of messages"),
    (ASKED, 'one of the model ("assistant"), found the roles user'),
    (WHOLE[1:], 'one of the model ("assistant"), found the roles assistant, user, assistant'),
    ([{"role": "user"}], 'expected messages with text as "content"'),
]


@pytest.mark.parametrize(("messages", "problem"), WRONG_CONVERSATIONS, ids=range(len(WRONG_CONVERSATIONS)))
def test_a_conversation_without_question_or_answer_is_refused(tmp_path: Path, messages: Any, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    with pytest.raises(BadData, match=re.escape(problem)):
        load_data(spec_of("sft", train=str(path), messages_column="messages"), "train")
    with pytest.raises(BadData, match=r'no column "turns" \(data\.messages_column\); it has: messages'):
        load_data(spec_of("sft", train=str(path), messages_column="turns"), "train")


def test_settings_of_texts_and_pairs_do_not_go_with_whole_conversations() -> None:
    for name, value in (("chat", True), ("prompt_template", "Q: {prompt}"), ("completion_template", "A: {answer}")):
        with pytest.raises(ValidationError, match=rf"found data\.messages_column and data\.{name}, which is for texts"):
            spec_of("sft", train="x", messages_column="messages", **{name: value})
    for name in ("prompt_column", "answer_column"):
        with pytest.raises(ValidationError, match=rf"found data\.messages_column and data\.{name}, which it replaces"):
            spec_of("sft", train="x", messages_column="messages", **{name: "solution"})
    with pytest.raises(ValidationError, match=r"found data\.messages_column and loops\.main with dpo"):
        spec_of("dpo", train="x", messages_column="messages")


def test_preflight_compares_rows_with_their_tools(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt": ASKED, "answer": "2"}
    tools: list[Any] = [[{"name": "add"}], [{"name": "ask"}], [], None, [{"name": "add"}]]
    path.write_text("".join(json.dumps({**row, "tools": one}) + "\n" for one in tools))
    for column, expected in (("tools", [4, 5]), ("", [2, 3, 4, 5])):
        spec = spec_of("sft", train=str(path), tools_column=column)
        found = scan(path, spec.data, kinds=spec.data_kinds)
        assert [problem.line for problem in found.duplicates.first] == expected


def test_preflight_reads_whole_conversations(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    conversations: list[Any] = [WHOLE, WHOLE[:2], WHOLE, WHOLE[1:], "hi", None, ASKED]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations) + "{}\n")
    spec = spec_of("sft", train=str(path), messages_column="messages")
    found = scan(path, spec.data, kinds=spec.data_kinds)
    assert ([problem.line for problem in found.malformed.first], found.empty_prompts.count) == ([4, 5, 6, 7, 8], 0)
    assert (found.duplicates.count, found.contradictions.count) == (1, 0)
    assert len(found.prompt_hashes) == 1
