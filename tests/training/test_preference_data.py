"""Pairs of completions, as texts and as conversations; errors in them are named."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from core_models import char_tokenizer
from rank_launcher import DATED_TEMPLATE

from rlhf_core.errors import BadConfig, BadData
from rlhf_core.preflight.data_file import scan
from rlhf_core.schemas.algorithms.preference import DpoSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.data.batches import SequenceBatch
from rlhf_core.training.data.chat import common_beginning, turn_end
from rlhf_core.training.data.examples import Example, make_batch, make_examples
from rlhf_core.training.data.loading import encode_prompts, load_data
from rlhf_core.training.data.tokenizers import build_tokenizer
from rlhf_core.training.tasks import sorted_pairs
from rlhf_core.training.types import Row

pytestmark = pytest.mark.training

DPO = DpoSpec(name="dpo")
GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
ASKED = [{"role": "user", "content": "1+1?"}]


def answer_turn(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def spec_of(algorithm: str = "dpo", **data: Any) -> RunSpec:
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "char"}
    loop = {"num_steps": 1, "algorithm": {"name": algorithm}, "optimizer": {"learning_rate": 1e-3}}
    return RunSpec.model_validate({"name": "t", "model": model, "data": data, "loops": {"main": loop}})


def load(folder: Path, *rows: Any, **data: Any) -> list[Row]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(spec_of(train=str(path), **data), "train")[0]


def sequences(rows: list[Row], **data: Any) -> tuple[list[Row], list[Example]]:
    tokenizer = char_tokenizer()
    encoded = encode_prompts(rows, tokenizer, spec_of(train="x.jsonl", **data).data)
    return encoded.rows, make_examples(encoded.rows, encoded.token_ids, tokenizer, DPO)


def test_pairs_need_no_answer_and_have_columns_and_templates(tmp_path: Path) -> None:
    row = {"question": "1+1=", "good": "2", "bad": 3, "by": 0.5}
    columns = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad", "margin_column": "by"}
    (found,) = load(tmp_path, row, **columns, chosen_template=" {chosen}.", rejected_template=" {bad}.")
    assert (found.prompt, found.chosen, found.rejected, found.margin) == ("1+1=", " 2.", " 3.", 0.5)
    assert (found.answer, found.target) == ("", "")
    (with_answer,) = load(tmp_path, {**GOOD, "answer": "2"})
    assert (with_answer.answer, with_answer.target) == ("2", "2")


@pytest.mark.parametrize("missing", [None, float("nan")])
@pytest.mark.parametrize("prompt", ["1+1=", ASKED])
def test_pairs_may_have_a_column_of_answers_with_gaps(tmp_path: Path, missing: Any, prompt: Any) -> None:
    pair = GOOD if isinstance(prompt, str) else {"chosen": answer_turn("2"), "rejected": answer_turn("3")}
    rows = load(tmp_path, {**pair, "prompt": prompt, "answer": missing}, {**pair, "prompt": prompt, "answer": "2"})
    assert [(row.answer, row.chosen) for row in rows] == [("", "2"), ("2", "2")]
    path = tmp_path / "rows.jsonl"
    assert scan(path, spec_of(train=str(path)).data, kinds=frozenset({"pair"})).malformed.count == 0, "preflight agrees"
    with pytest.raises(BadData, match=r'column "answer" is (null|NaN)'):
        load_data(spec_of("sft", train=str(path)), "train")


def test_an_algorithm_without_pairs_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2", "chosen": None}) + "\n")
    ((row,), _) = load_data(spec_of("sft", train=str(path)), "train")
    assert (row.target, row.chosen, row.margin) == ("2", "", 0.0)


BAD_ROWS = [
    ({"rejected": "2"}, "the chosen and the rejected completion are the same"),
    ({"chosen": ""}, "the chosen completion is empty"),
    ({"rejected": ""}, "the rejected completion is empty"),
    ({"rejected": None}, 'column "rejected" is null'),
    ({"prompt": ASKED, "chosen": answer_turn("2"), "rejected": answer_turn("2")}, "are the same"),
    ({"prompt": ASKED, "chosen": [{"role": "assistant"}]}, 'chosen: expected messages with text as "content"'),
    ({"prompt": ["1+1?"]}, 'prompt: expected messages with a "role"'),
    ({"chosen": answer_turn("2")}, "expected a list of messages as prompt as well"),
    ({"margin": "much"}, 'expected a number in column "margin"'),
    ({"margin": 10**400}, 'expected a number in column "margin"'),
]


@pytest.mark.parametrize(("changed", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_pair_that_teaches_nothing_is_named_or_counted(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    good = {**GOOD, "margin": 1}
    with pytest.raises(BadData, match=r"rows\.jsonl:2: .*" + message):
        load(tmp_path, good, {**good, **changed}, margin_column="margin")
    spec = spec_of(train=str(tmp_path / "rows.jsonl"), margin_column="margin", malformed_rows="drop")
    rows, report = load_data(spec, "train")
    assert (len(rows), report.num_malformed) == (1, 1)


def test_preflight_counts_pairs_that_teach_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    pairs: list[dict[str, Any]] = [{"rejected": "4"}, {}, {"rejected": "2"}, {"chosen": ""}, {"chosen": 0}]
    rows = [{**GOOD, **changed} for changed in ({}, *pairs)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = scan(path, spec_of(train="x").data, kinds=frozenset({"pair"}))
    assert [problem.line for problem in found.malformed.first] == [4, 5]
    assert (found.duplicates.count, [problem.line for problem in found.duplicates.first]) == (1, [3])
    assert not found.contradictions.count, "several pairs with one prompt are no contradiction"


def test_completions_end_once_and_only_they_are_learned() -> None:
    rows = [Row("a", "1+1=", "", "", {}, "2", "3<|im_end|>"), Row("b", "2=", "", "", {}, "12", "4")]
    _, examples = sequences(rows)
    tokenizer = char_tokenizer()
    end = tokenizer.eos_token_id
    assert [[tokens[-1] for tokens in example.completions] for example in examples] == [[end, end]] * 2
    assert [len(tokens) for tokens in examples[0].completions] == [2, 2], "the end token is not added twice"
    batch, made = make_batch(examples, DPO, tokenizer.pad_token_id)
    learned = [tokenizer.decode(batch.input_ids[at, 1:][made.mask[at]]) for at in range(4)]
    assert learned == [f"{text}<|im_end|>" for text in ("2", "12", "3", "4")], "all chosen, then all rejected"


@pytest.mark.parametrize("form", ["explicit", "implicit", "beside its text", "text"])
def test_conversations_go_through_the_chat_template(tmp_path: Path, form: str) -> None:
    explicit = {"prompt": ASKED, "chosen": answer_turn("2"), "rejected": answer_turn("3")}
    forms = {
        "explicit": explicit,
        "implicit": {name: [*ASKED, *explicit[name]] for name in ("chosen", "rejected")},
        "text": {"prompt": ASKED, "chosen": "2", "rejected": "3"},
    }
    forms["beside its text"] = {"prompt": "1+1?", **forms["implicit"]}
    rows, (example,) = sequences(load(tmp_path, forms[form]))
    assert rows[0].prompt == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert (rows[0].chosen, rows[0].rejected) == ("2<|im_end|>\n", "3<|im_end|>\n")
    tokenizer = char_tokenizer()
    whole = tokenizer.apply_chat_template([*ASKED, *answer_turn("2")], tokenize=False)
    assert tokenizer.decode([*example.prompt, *example.completions[0]]) == whole, "no end token besides the template's"


def test_completions_of_conversations_also_end_as_a_turn_does(tmp_path: Path) -> None:
    """The tokenizer of Qwen2.5's base models ends a turn with another token than a text."""
    rows = load(tmp_path, {"prompt": ASKED, "chosen": answer_turn("2"), "rejected": answer_turn("3")})
    data, tokenizer = spec_of(train="x.jsonl").data, char_tokenizer()
    end = tokenizer.eos_token_id
    assert encode_prompts(rows, tokenizer, data).end_ids == ()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    assert encode_prompts(rows, tokenizer, data).end_ids == (end,)
    assert encode_prompts(load(tmp_path, GOOD), tokenizer, data).end_ids == (), "a text ends with the end token"
    for template, expected in (
        ("{{ m['content'] }}<|im_end|>", end),
        ("{{ m['content'] }}|", None),
        ("{{ m['role'] }}", None),
    ):
        tokenizer.chat_template = f"<|im_start|>{{% for m in messages %}}{template}{{% endfor %}}"
        assert turn_end(tokenizer) == expected


def test_a_template_that_writes_the_date_is_given_a_fixed_one(tmp_path: Path) -> None:
    rows = load(tmp_path, {"prompt": ASKED, "chosen": answer_turn("2"), "rejected": answer_turn("3")})
    tokenizer = char_tokenizer()
    tokenizer.chat_template = DATED_TEMPLATE
    data, day = spec_of(train="x").data, datetime(2026, 1, 31, 23, 59, tzinfo=UTC)
    (row,) = encode_prompts(rows, tokenizer, data, day).rows
    assert (row.prompt, row.chosen) == ("31 Jan 2026|1+1?|", "2|")
    (row,) = encode_prompts(rows, tokenizer, data).rows
    assert not row.prompt.startswith("31 Jan 2026"), "without one, the template asks the clock"


def test_fields_that_are_null_are_not_there(tmp_path: Path) -> None:
    """Parquet gives every message the fields of all others; Llama 3.1 asks whether a message has tool calls."""
    empty = {"name": None, "tool_calls": None}
    chosen, rejected = ([{**answer_turn(text)[0], **empty}] for text in "23")
    rows = load(tmp_path, {"prompt": [{**ASKED[0], **empty}], "chosen": chosen, "rejected": rejected})
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
        "{{ m['content'] }}|{% endfor %}"
    )
    (row,) = encode_prompts(rows, tokenizer, spec_of(train="x").data).rows
    assert (row.prompt, row.chosen, row.rejected) == ("1+1?|", "2|", "3|")


@pytest.mark.parametrize("algorithm", ["sft", "kto"])
def test_an_answer_without_text_is_a_turn_that_ends_at_once(tmp_path: Path, algorithm: str) -> None:
    path, tokenizer = tmp_path / "rows.jsonl", char_tokenizer()
    spec = spec_of(algorithm, train=str(path))
    for prompt in (ASKED, "1+1?"):
        path.write_text(json.dumps({"prompt": prompt, "answer": "", "label": False}) + "\n")
        encoded = encode_prompts(load_data(spec, "train")[0], tokenizer, spec.data)
        (example,) = make_examples(encoded.rows, encoded.token_ids, tokenizer, spec.main_loop.algorithm)
        assert example.completions[0][:1] == [tokenizer.eos_token_id]
    path.write_text(json.dumps({"prompt": ASKED, "answer": [], "label": False}) + "\n")
    with pytest.raises(BadData, match="target: expected a list of messages"):
        load_data(spec, "train")


def test_templates_of_conversations_are_filled_completely(tmp_path: Path) -> None:
    row = {"prompt": ASKED, "chosen": "2", "rejected": "3", "why": "1 and 1"}
    (found,) = load(tmp_path, row, chosen_template="{why}: {chosen}")
    assert found.chosen == "1 and 1: 2"
    with pytest.raises(BadData, match=r'rows\.jsonl:1: column "why" is null'):
        load(tmp_path, row | {"why": None}, chosen_template="{why}: {chosen}")
    with pytest.raises(BadData, match=r'rows\.jsonl:1: no column "reason" for a template of \[data\]'):
        load(tmp_path, row, chosen_template="{reason}: {chosen}")


def test_a_template_for_prompts_of_messages_is_refused(tmp_path: Path) -> None:
    row = {"prompt": ASKED, "chosen": "2", "rejected": "3"}
    with pytest.raises(BadConfig, match=r"found data\.prompt_template = 'Q: \{prompt\}' and a prompt of messages"):
        load(tmp_path, row, prompt_template="Q: {prompt}")


def test_messages_may_have_fields_of_any_type(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    asked = [{**turn, "timestamp": datetime(2026, 1, 1, tzinfo=UTC)} for turn in ASKED]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": asked, "chosen": "2", "rejected": "3"}]), path)
    ((row,), _) = load_data(spec_of(train=str(path)), "train")
    assert row.chat is not None
    assert row.chat.prompt[0]["content"] == "1+1?"


def test_a_prompt_that_begins_the_turn_of_the_model_ends_within_it(tmp_path: Path) -> None:
    """Its completions go on with that turn, in sampling as in training: they would end it at once otherwise."""
    path, begun = tmp_path / "rows.jsonl", [*ASKED, *answer_turn("1+1=")]
    expected = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n1+1="
    for algorithm in ("grpo", "sft"):
        path.write_text(json.dumps({"prompt": begun, "answer": "2"}) + "\n")
        spec = spec_of(algorithm, train=str(path))
        (row,) = encode_prompts(load_data(spec, "train")[0], char_tokenizer(), spec.data).rows
        assert (row.prompt, row.target) == (expected, "2" if algorithm == "grpo" else "2<|im_end|>\n")
    (row,), _ = sequences(load(tmp_path, {"prompt": begun, "chosen": answer_turn("2"), "rejected": "3"}))
    assert (row.prompt, row.chosen, row.rejected) == (expected, "2<|im_end|>\n", "3<|im_end|>\n")


def test_an_implicit_prompt_of_text_is_what_both_begin_with(tmp_path: Path) -> None:
    (row,) = load(tmp_path, {"chosen": "Human: hi Assistant: yes", "rejected": "Human: hi Assistant: no"})
    assert (row.prompt, row.chosen, row.rejected) == ("Human: hi Assistant:", " yes", " no")
    assert common_beginning("ab", "abc") == 1, "some of both completions is left"
    for chosen, rejected in (("a", "b"), ("", "b"), ([], ASKED)):
        with pytest.raises(BadData, match="no common beginning"):
            load(tmp_path, {"chosen": chosen, "rejected": rejected})


def test_a_template_that_renders_the_prompt_otherwise_is_refused(tmp_path: Path) -> None:
    rows = load(tmp_path, {"prompt": ASKED, "chosen": answer_turn("2"), "rejected": answer_turn("3")})
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}think{% endif %}"
    )
    data = spec_of(train="x").data
    with pytest.raises(BadData, match="but differently before the chosen completion"):
        encode_prompts(rows, tokenizer, data)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadData, match=r"the conversation that ends with '1\+1\?': .*roles must alternate"):
        encode_prompts(rows, tokenizer, data)
    tokenizer.chat_template = None
    with pytest.raises(BadData, match="a tokenizer without a chat template"):
        encode_prompts(rows, tokenizer, data)


def test_conversations_that_the_template_refuses_are_named_or_dropped(tmp_path: Path) -> None:
    """As those of Llama 2, Mistral and Gemma refuse two turns of the user in a row."""
    path, tokenizer = tmp_path / "rows.jsonl", char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}|{% endfor %}"
    )
    good, bad = ({"prompt": ASKED * times, "answer": "2"} for times in (1, 2))
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, bad, good, bad)))
    strict, dropping = (spec_of("sft", train=str(path), malformed_rows=policy) for policy in ("error", "drop"))
    with pytest.raises(BadData, match=r"rows\.jsonl:2: the chat template .*roles must .*malformed_rows"):
        encode_prompts(load_data(strict, "train")[0], tokenizer, strict.data)
    kept = encode_prompts(load_data(dropping, "train")[0], tokenizer, dropping.data)
    assert ([row.prompt for row in kept.rows], kept.num_malformed) == (["1+1?|", "1+1?|"], 2)
    assert f"{path}:2: the chat template" in kept.first_problem
    path.write_text(json.dumps(bad))
    with pytest.raises(BadData, match=r"all 1 rows are malformed; the first: .*rows.jsonl:1: .*roles must alternate"):
        encode_prompts(load_data(dropping, "train")[0], tokenizer, dropping.data)


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_an_answer_that_is_only_compared_is_not_rendered(tmp_path: Path, algorithm: str) -> None:
    """The templates of DeepSeek-R1-Distill and QwQ begin a turn with ``<think>``, but leave it out of past turns."""
    path = tmp_path / "rows.jsonl"
    pair = {"chosen": "think2", "rejected": "think3"} if algorithm == "dpo" else {}
    path.write_text(json.dumps({"prompt": ASKED, "answer": "2", **pair}) + "\n")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}think{% endif %}"
    )
    (row,) = encode_prompts(
        load_data(spec_of(algorithm, train=str(path)), "train")[0], tokenizer, spec_of(train="x").data
    ).rows
    assert (row.prompt, row.answer, row.chosen) == ("1+1?think", "2", pair.get("chosen", "")[5:])
    with pytest.raises(BadData, match="but differently before the target completion"):
        encode_prompts(load_data(spec_of("sft", train=str(path)), "train")[0], tokenizer, spec_of(train="x").data)


def test_long_completions_are_left_out_or_refused() -> None:
    rows = [Row("a", "1=", "", "", {}, "2", "3"), Row("b", "1=", "", "", {}, "2", "3333")]
    kept = encode_prompts(rows, char_tokenizer(), spec_of(train="x", max_completion_tokens=4).data)
    assert ([row.uid for row in kept.rows], kept.num_overlong) == (["a"], 1)
    strict = spec_of(train="x", max_completion_tokens=4, overlong_completions="error")
    with pytest.raises(BadData, match=r"the completion '3333'\.\.\. has 5 tokens, .*overlong_completions"):
        encode_prompts(rows, char_tokenizer(), strict.data)


def test_parquet_and_csv_hold_pairs_too(tmp_path: Path) -> None:
    chat = {"chosen": [*ASKED, *answer_turn("2")], "rejected": [*ASKED, *answer_turn("3")]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([chat]), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected\n1=,1,2\n")
    (nested,), (flat,) = (
        load_data(spec_of(train=str(tmp_path / name)), "train")[0] for name in ("rows.parquet", "rows.csv")
    )
    assert nested.chat is not None
    assert nested.chat.chosen == answer_turn("2")
    assert (flat.prompt, flat.chosen, flat.rejected) == ("1=", "1", "2")


def test_the_task_of_pairs_is_sound() -> None:
    rows = sorted_pairs("train", 0, num_digits=4, num_train=200, num_eval=50)
    assert rows == sorted_pairs("train", 0, num_digits=4, num_train=200, num_eval=50)
    assert {row["prompt"] for row in rows}.isdisjoint(row["prompt"] for row in sorted_pairs("eval", 0, 4, 200, 50))
    for row in rows:
        assert row["chosen"] == row["answer"] == "".join(sorted(row["prompt"][:-1]))
        assert row["rejected"] != row["chosen"]
        assert sorted(row["rejected"]) == sorted(row["chosen"])


def test_bytes_survive_both_halves(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("byte", [], 0)
    rows = load(tmp_path, {"prompt": "é?", "chosen": "ja ✓", "rejected": "nein"})
    encoded = encode_prompts(rows, tokenizer, spec_of(train="x").data)
    batch: SequenceBatch = make_batch(make_examples(rows, encoded.token_ids, tokenizer, DPO), DPO, 0)[0]
    assert tokenizer.decode(batch.input_ids[0][:-1]) == "é?ja ✓"


def test_labels_may_be_numbers_or_words(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,label\n1=,1,True\n2=,1,0\n3=,1,maybe\n")
    spec = spec_of("kto", train=str(path), answer_column="completion", malformed_rows="drop")
    rows, report = load_data(spec, "train")
    assert [(row.target, row.desirable) for row in rows] == [("1", True), ("1", False)]
    assert 'expected true or false in column "label"' in report.first_problem
    assert not spec.has_references
    found = scan(path, spec.data, kinds=spec.data_kinds)
    assert [problem.line for problem in found.malformed.first] == [4]


def test_the_script_of_the_page_makes_pairs_of_judged_solutions(tmp_path: Path) -> None:
    """The split is by problem, not by pair; a problem without a wrong solution makes no pair."""
    page = (Path(__file__).parents[2] / "docs" / "preferences.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "pairs.py").write_text(script)
    names = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    right = {name: {"is_correct": True, "solution": f"{name}: 2"} for name in names}
    mixed = {
        **right,
        names[0]: {"is_correct": False, "solution": "3"},
        names[1]: {"is_correct": False, "solution": "4"},
    }
    rows = [{"question": f"{number}?", **(right if number == 1 else mixed)} for number in range(5)]
    (tmp_path / "source.jsonl").write_text("\n".join(map(json.dumps, rows)))
    subprocess.run([sys.executable, "pairs.py", "source.jsonl", "."], cwd=tmp_path, check=True)
    made = {split: (tmp_path / f"{split}.jsonl").read_text().splitlines() for split in ("train", "eval")}
    assert [len(lines) for lines in made.values()] == [12, 4]
    assert {json.loads(line)["prompt"] for line in made["eval"]} == {"4?\n"}
    assert {json.loads(line)["rejected"] for line in made["train"]} == {"3", "4"}
