"""Data: every row once per epoch, every bad line named."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf_core.errors import BadConfig, BadData
from rlhf_core.preflight.data_file import scan
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.data.loading import DataReport, load_data, load_rows
from rlhf_core.training.data.order import occurrences_before, repeated, row_indices
from rlhf_core.training.tasks import sort_digits
from rlhf_core.training.types import Row

GOOD = '{"question": "1+1?", "answer": "2"}\n'


def spec_of(**data: Any) -> RunSpec:
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "char"}
    return RunSpec.model_validate({"name": "t", "model": model, "data": data, "train": {"num_steps": 1}})


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """Write a file and load it as GSM8K-like training data."""

    def _load(content: str | bytes, name: str = "rows.jsonl", **data: Any) -> Any:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_data(spec_of(train=str(path), **({"prompt_column": "question"} | data)), "train")

    return _load


# --- templates and identities ---


def test_rows_are_filled_templates(load: Callable[..., Any]) -> None:
    rows, report = load(
        '{"question": "How {many}?", "answer": 12, "hint": true, "source": {"a": null}}\n',
        prompt_template="Q: {question} ({hint})\nA:",
        completion_template=" {answer} {{end}}",
    )
    (row,) = rows
    assert row.prompt == "Q: How {many}? (True)\nA:"
    assert (row.answer, row.target) == ("12", " 12 {end}")
    assert row.columns == {"question": "How {many}?", "answer": 12, "hint": True, "source": {"a": None}}
    assert report.num_malformed == 0


def test_prompt_and_answer_name_the_chosen_columns(load: Callable[..., Any]) -> None:
    rows, _ = load('{"q": "1+1?", "gold": "2", "prompt": "other"}\n', prompt_column="q", answer_column="gold")
    assert (rows[0].prompt, rows[0].answer, rows[0].target) == ("1+1?", "2", "2")
    assert rows[0].columns["prompt"] == "other"


def without_answers(**sections: Any) -> RunSpec:
    """A run by a judge, on prompts alone."""
    judge = "my_judge:judged"
    of_judge: dict[str, Any] = {"reward": {"functions": [judge]}, "evaluate": {"scorer": judge}}
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "char"}
    data = {"answer_column": "", "train": "rows.jsonl"}
    common: dict[str, Any] = {"name": "t", "model": model, "data": data, "train": {"num_steps": 1}}
    return RunSpec.model_validate({**common, **of_judge, **sections})


def test_rows_need_no_answer_where_nothing_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1?", "level": 3, "": "odd", "answer": "not read"}\n')
    spec = without_answers(data={"train": str(path), "answer_column": ""})
    spec = with_changes(spec, {"data.prompt_template": "{prompt} {{answer}}"})
    (row,) = load_data(spec, "train")[0]
    assert (row.prompt, row.answer, row.target) == ("1+1? {answer}", "", "")
    assert row.columns["level"] == 3
    found = scan(path, spec.data, kinds=spec.data_kinds)
    assert (found.problem, found.malformed.count, found.num_rows) == ("", 0, 1)
    assert spec.completes_held_out(pairs_have_answers=False)
    assert spec.evaluations == ("greedy", "sampled")
    with pytest.raises(BadData, match='no column "solution"'):
        load_data(with_changes(spec, {"data.answer_column": "solution"}), "train")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sft": {"num_steps": 2}}, "needed by sft; set the column"),
        ({"evaluate": {}}, "needed by rlhf_core.training.rewards:exact_match; set the column"),
        ({"reward": {"functions": ["rlhf_core.training.rewards:gsm8k_answer"]}}, "rewards:gsm8k_answer; set the"),
        (
            {"data": {"train": "a.csv", "answer_column": "", "prompt_template": "{prompt} {answer}"}},
            "{answer} in data.prompt_template",
        ),
    ],
)
def test_what_needs_answers_is_named_where_there_are_none(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        without_answers(**sections)


def test_answers_are_asked_for_only_where_evaluations_use_them() -> None:
    """Such specs were valid before rows without answers could be scored, and are read again from run directories."""
    rate = {"learning_rate": 1e-4}
    dpo = {"main": {"algorithm": {"name": "dpo"}, "num_steps": 1, "optimizer": rate}}
    base = {
        "name": "t",
        "data": {"train": "a.jsonl", "answer_column": ""},
        "model": without_answers().model_dump()["model"],
    }
    pairs = RunSpec.model_validate({**base, "loops": dpo})
    assert [pairs.completes_held_out(pairs_have_answers=have) for have in (False, True)] == [False, False]
    assert pairs.evaluations == ("preference", "loss")
    judged = with_changes(pairs, {"evaluate.scorer": "my_judge:judged"})
    assert judged.completes_held_out(pairs_have_answers=False)
    external = {
        "name": "t",
        "data": {"answer_column": ""},
        "trainer": {"kind": "command", "argv": ["x"], "num_steps": 1},
    }
    RunSpec.model_validate(external)
    with pytest.raises(ValidationError, match=r"needed by .*:exact_match"):
        RunSpec.model_validate({**external, "data": {"answer_column": "", "eval": "b.jsonl"}})
    assert without_answers(evaluate={"completions": False}).evaluations == ()


@pytest.mark.parametrize("teaches", [False, True])
def test_an_answer_that_is_an_object_is_only_for_reward_functions(tmp_path: Path, teaches: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1?", "answer": {"tests": [2]}}\n')
    spec = without_answers(data={"train": str(path)}, **({"sft": {"num_steps": 2}} if teaches else {}))
    if not teaches:
        assert load_data(spec, "train")[0][0].answer == "{'tests': [2]}"
        return
    with pytest.raises(BadData, match='column "answer" has an object, expected text'):
        load_data(spec, "train")


def test_equal_prompts_have_different_identities(load: Callable[..., Any]) -> None:
    rows, _ = load(GOOD + '{"question": "2+2?", "answer": "4"}\n' + GOOD)
    uids = [row.uid for row in rows]
    assert len(set(uids)) == 3
    assert uids[0].removesuffix("-0") == uids[2].removesuffix("-1")
    assert [row.uid for row in load('{"question": "2+2?", "answer": "5"}\n')[0]] == [uids[1]]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{", "data.prompt_template: .*write {{ and }}"),
        ("{}", "found {}, expected {column}"),
        ("{question!r}", "found {question!r}"),
        ("{question:>9}", "found {question:>9}"),
        ("{question.__class__}", "expected {column} with a plain column name"),
    ],
)
def test_templates_that_are_not_well_formed_are_named(load: Callable[..., Any], template: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        load(GOOD, prompt_template=template)


# --- bad rows ---

BAD_LINES = {
    '{"question": "1+1?", "answer": ': r"not valid JSON: Expecting value \(character 31 of the line\)",
    "[1, 2]": "expected a JSON object, found list",
    '{"answer": "2"}': r'no column "question" \(data.prompt_column\); it has: answer',
    '{"question": "1+1?", "answer": null}': 'column "answer" is null',
    '{"question": "1+1?", "answer": NaN}': 'column "answer" is NaN',
    '{"question": NaN, "answer": "2"}': 'column "question" is NaN',
    '{"question": "", "answer": "2"}': "the prompt is empty",
    '{"question": {"role": "user", "content": "1+1?"}, "answer": "2"}': 'column "question" has an object, expected',
    r'{"question": "\ud800", "answer": "2"}': "a text holds half of a surrogate pair",
    "[" * 100_000: "JSON is nested too deeply",
    b'{"question": "\xff", "answer": "2"}': "not UTF-8 at byte 15 of the line",
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_malformed_line_is_named_by_file_and_number(
    load: Callable[..., Any], line: str | bytes, message: str
) -> None:
    line = line.encode() if isinstance(line, str) else line
    content = GOOD.encode() + b"\n" + line + b"\n" + GOOD.encode()
    with pytest.raises(BadData, match=rf"rows\.jsonl:3: {message}"):
        load(content)
    rows, report = load(content, malformed_rows="drop")
    assert [row.answer for row in rows] == ["2", "2"]
    assert report.num_malformed == 1
    assert "rows.jsonl:3: " in report.first_problem


def test_nothing_left_is_an_error(load: Callable[..., Any]) -> None:
    with pytest.raises(BadData, match="it has no rows"):
        load("\n\n")
    with pytest.raises(BadData, match=r"all 2 rows are malformed; the first: .*rows\.jsonl:1: expected a JSON object"):
        load("1\n2\n", malformed_rows="drop")


def test_a_template_with_an_unknown_column_names_the_known_ones(load: Callable[..., Any]) -> None:
    with pytest.raises(BadData, match=r'rows\.jsonl:1: no column "problem" .*it has: question, answer'):
        load(GOOD, prompt_template="{problem}")


def test_missing_files_and_unknown_kinds(tmp_path: Path, load: Callable[..., Any]) -> None:
    with pytest.raises(BadData, match=r"gone\.jsonl: no such file \(data\.train\)"):
        load_rows(spec_of(train=str(tmp_path / "gone.jsonl")), "train")
    with pytest.raises(BadData, match=r"found a folder, expected a file ending in \.jsonl, \.csv, \.parquet"):
        load_rows(spec_of(train=str(tmp_path)), "train")
    with pytest.raises(BadData, match=r'ending in "\.txt"; expected one of \.jsonl, \.csv, \.parquet'):
        load("x", name="rows.txt")
    with pytest.raises(BadData, match=r"no held-out data: set data\.eval"):
        load_rows(spec_of(train="x.jsonl"), "eval")


# --- formats ---


def test_a_byte_order_mark_and_windows_line_ends_are_no_trouble(load: Callable[..., Any]) -> None:
    rows, _ = load(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode() * 2)
    assert [row.prompt for row in rows] == ["1+1?", "1+1?"]


def test_long_texts_fit_into_csv(load: Callable[..., Any]) -> None:
    text = "x" * 200_000
    rows, _ = load(f"question,answer\n{text},1\n", name="rows.csv")
    assert [(row.prompt, row.answer) for row in rows] == [(text, "1")]


def test_csv_stays_text(load: Callable[..., Any]) -> None:
    rows, _ = load('question,answer\n"a, ""b""\nc",007\n\nd,x\n', name="rows.csv")
    assert [(row.prompt, row.answer) for row in rows] == [('a, "b"\nc', "007"), ("d", "x")]
    with pytest.raises(BadData, match=r"rows\.csv:3: found 1 values for 2 columns"):
        load("question,answer\na,b\nc\n", name="rows.csv")
    with pytest.raises(BadData, match=r"rows\.csv:2: not valid CSV"):
        load('question,answer\n"a"b,c\n', name="rows.csv")
    with pytest.raises(BadData, match=r"rows\.csv:1: found the column 'answer' more than once"):
        load("question,answer,answer\na,b,c\n", name="rows.csv", malformed_rows="drop")
    with pytest.raises(BadData, match=r"rows\.csv:3: not UTF-8 at byte 3 of the line"):
        load(b"question,answer\na,b\nc,\xff\n", name="rows.csv")


def test_parquet(tmp_path: Path, load: Callable[..., Any]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet files need the training extra")
    import pyarrow

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"question": ["1+1?", "x"], "answer": [2, 3]}), path)
    rows = load_rows(spec_of(train=str(path), prompt_column="question"), "train")
    assert [(row.prompt, row.answer) for row in rows] == [("1+1?", "2"), ("x", "3")]
    with pytest.raises(BadData, match=r"rows\.parquet: row 0: not a valid parquet file"):
        load("no parquet", name="rows.parquet")
    parquet.write_table(pyarrow.table({"question": [b"1+1?"], "answer": ["2"]}), path)
    with pytest.raises(BadData, match='column "question" has bytes, expected text: in Parquet, a column of strings'):
        load_rows(spec_of(train=str(path), prompt_column="question"), "train")


def test_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    sort = "rlhf_core.training.tasks:sort_digits"
    rows, report = load_data(spec_of(generator=sort, generator_args={"num_eval": 3}), "eval")
    assert [row.columns for row in rows] == sort_digits("eval", 0, num_eval=3)
    assert report == DataReport(sort, 0)
    for broken in ("rlhf_core.training.tasks:gone", "no_such_module:f"):
        with pytest.raises(BadConfig, match="does not import"):
            load_rows(spec_of(generator=broken), "train")
    with pytest.raises(BadConfig, match="cannot be called"):
        load_rows(spec_of(generator=sort, generator_args={"digits": 3}), "train")


def test_a_generator_without_a_seed_of_its_own_makes_the_same_rows_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawn_rows.py").write_text(
        "import random\n\nimport numpy\n\n\n"
        "def drawn(split, seed):\n"
        "    for _ in range(3):\n"
        "        yield {'prompt': f'{random.random()} {numpy.random.rand()}', 'answer': ''}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def prompts_of(split: Literal["train", "eval"], seed_of_process: int) -> tuple[list[str], float]:
        random.seed(seed_of_process)
        numpy.random.seed(seed_of_process)
        return [row.prompt for row in load_rows(spec_of(generator="drawn_rows:drawn"), split)], random.random()

    found, after = prompts_of("train", 1)
    assert (found, random.Random(1).random()) == (prompts_of("train", 2)[0], after)
    assert found != prompts_of("eval", 1)[0]
    assert len(set(found)) == 3


def test_a_generator_may_take_its_rows_from_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy_rows.py").write_text(
        "import numpy\n\n\n"
        "def rows(split, seed):\n"
        "    asked = numpy.array([{'role': 'user', 'content': '1+1?'}], dtype=object)\n"
        "    return [{'prompt': asked, 'answer': numpy.int64(2)}, {'prompt': tuple(asked), 'answer': '2'}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for row in load_rows(spec_of(generator="numpy_rows:rows"), "train"):
        assert row.chat is not None
        assert row.chat.prompt == [{"role": "user", "content": "1+1?"}]
        assert row.answer == "2"


def test_a_generator_with_an_error_of_its_own_is_not_said_to_be_called_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rows.py").write_text(
        "def adds(split, seed):\n    return ['a' + 1]\n"
        "def yields(split, seed):\n    yield 'a' + 1\n"
        "def returns_nothing(split, seed):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("adds", "yields"):
        with pytest.raises(TypeError, match="can only concatenate str"):
            load_rows(spec_of(generator=f"my_rows:{name}"), "train")
    with pytest.raises(BadData, match="my_rows:returns_nothing returned None; expected rows"):
        load_rows(spec_of(generator="my_rows:returns_nothing"), "train")


# --- order ---


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 120), st.integers(0, 120))
def test_every_row_once_per_epoch_and_a_position_is_all_there_is_to_save(
    num_rows: int, seed: int, first: int, second: int
) -> None:
    whole = row_indices(num_rows, seed, 0, first + second)
    assert row_indices(num_rows, seed, 0, first) + row_indices(num_rows, seed, first, second) == whole
    for epoch in range((first + second) // num_rows):
        assert sorted(whole[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_epochs_and_seeds_have_their_own_order() -> None:
    first, second = (row_indices(100, 0, start, 100) for start in (0, 100))
    assert len({tuple(first), tuple(second), tuple(row_indices(100, 1, 0, 100)), tuple(range(100))}) == 4
    assert row_indices(5, 0, 0, 7) == [1, 4, 3, 0, 2, 3, 1]


@given(st.integers(1, 8), st.integers(0, 20), st.integers(0, 30))
def test_rows_of_a_step_have_uids_of_their_own(num_rows: int, start: int, count: int) -> None:
    indices = row_indices(num_rows, 0, start, count)
    uids = [
        repeated(Row(f"{index}-0", "", "", "", {}), number).uid
        for index, number in zip(indices, occurrences_before(indices), strict=True)
    ]
    assert len(set(uids)) == count
    assert {f"{index}-0" for index in indices} <= set(uids), "seeds of rows that do not recur stay the same"


@pytest.mark.training
def test_rows_are_the_same_only_with_everything_that_training_reads() -> None:
    from rlhf_core.training.data.same_rows import _digest

    row = Row("a-0", "12>", "12", "12", {"level": 1, "seen": object(), "tags": {"b", "a"}})
    same = replace(row, columns={"tags": {"a", "b"}, "seen": object(), "level": 1})
    assert _digest([row]) == _digest([same])
    nested = [replace(row, columns={"tests": dict.fromkeys(keys, 1)}) for keys in ("ab", "ba")]
    assert _digest(nested[:1]) == _digest(nested[1:]), "as made from a set, which is in another order on every rank"
    others = [
        replace(row, desirable=False),
        replace(row, margin=0.5),
        replace(row, columns={**row.columns, "level": 2}),
    ]
    assert len({_digest([one]) for one in (row, *others)}) == 4


# --- tokens ---


@pytest.mark.training
def test_prompts_that_are_too_long_are_dropped_or_refused(load: Callable[..., Any]) -> None:
    from rlhf_core.training.data.loading import completion_tokens, encode_prompts
    from rlhf_core.training.data.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("char", [], 0)
    lines = "".join(json.dumps({"question": "x" * length, "answer": "y"}) + "\n" for length in (3, 9, 4))
    rows, _ = load(lines)
    encoded = encode_prompts(rows, tokenizer, spec_of(train="x", max_prompt_tokens=4).data)
    assert [(len(ids), ids.itemsize) for ids in encoded.token_ids] == [(3, 4), (4, 4)], "four bytes per token"
    assert [row.prompt for row in encoded.rows] == ["xxx", "xxxx"]
    assert encoded.num_overlong == 1
    strict = spec_of(train="x", max_prompt_tokens=4, overlong_prompts="error").data
    with pytest.raises(BadData, match=r"has 9 tokens, more than data\.max_prompt_tokens = 4"):
        encode_prompts(rows, tokenizer, strict)
    with pytest.raises(BadData, match="all 3 prompts are longer"):
        encode_prompts(rows, tokenizer, spec_of(train="x", max_prompt_tokens=2).data)
    target = completion_tokens(rows[0].target, rows[0], tokenizer)
    assert target == [*tokenizer.encode("y"), tokenizer.eos_token_id]


@pytest.mark.training
def test_reading_rendering_and_tokenizing_send_heartbeats(tmp_path: Path) -> None:
    from rlhf_core.training.data.chat import AT_ONCE
    from rlhf_core.training.data.loading import encode_prompts
    from rlhf_core.training.data.tokenizers import build_tokenizer

    path, beats = tmp_path / "rows.jsonl", [0]

    def beat() -> None:
        beats[-1] += 1

    path.write_text((json.dumps({"prompt": [{"role": "user", "content": "1"}], "answer": "2"}) + "\n") * 2 * AT_ONCE)
    spec = spec_of(train=str(path), max_completion_tokens=9)
    rows, _ = load_data(spec, "train", beat=beat)
    assert beats == [2]
    beats.append(0)
    encode_prompts(rows, build_tokenizer("char", [], 0), spec.data, beat=beat)
    assert beats == [2, 2 * AT_ONCE + 4], "one for each row rendered, two each for prompts and completions"


@pytest.mark.training
def test_a_token_in_front_comes_once() -> None:
    from tokenizers.processors import TemplateProcessing

    from rlhf_core.training.data.loading import encode_prompts
    from rlhf_core.training.data.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("char", [], 0)
    tokenizer.bos_token = "<|im_start|>"
    front = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", front)]
    )
    rows = [Row(prompt, prompt, "", "", {}) for prompt in ("ab", "<|im_start|>ab")]
    encoded = encode_prompts(rows, tokenizer, spec_of(train="x").data)
    expected = [front, *tokenizer.encode("ab", add_special_tokens=False)]
    assert [ids.tolist() for ids in encoded.token_ids] == [expected] * 2


@pytest.mark.training
def test_an_end_token_that_the_tokenizer_appends_does_not_end_a_prompt() -> None:
    from tokenizers.processors import TemplateProcessing

    from rlhf_core.training.data.loading import encode_prompts
    from rlhf_core.training.data.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("char", [], 0)
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    bare = tokenizer.encode("ab", add_special_tokens=False)
    rows = [Row(prompt, prompt, "", "", {}) for prompt in ("ab", "ab<|im_end|>")]
    encoded = encode_prompts(rows, tokenizer, spec_of(train="x").data)
    assert [ids.tolist() for ids in encoded.token_ids] == [bare, [*bare, end]]


@pytest.mark.training
def test_a_completion_begins_as_it_goes_on_after_its_prompt() -> None:
    """Tokenizers such as those of Llama 2 and the first Mistrals put a space in front of every text."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    from rlhf_core.training.data.loading import completion_lengths, completion_tokens

    vocab = ["<unk>", "</s>", "\n", "▁", "▁▁", "a", "▁a", "b"]
    merges = [("▁", "▁"), ("▁", "a")]
    core = Tokenizer(models.BPE({token: id for id, token in enumerate(vocab)}, merges, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    for text in (" ab", "ab", "  a", "\na", ""):
        row = Row("u", "b", "", text, {})
        joint = tokenizer.encode(row.prompt + text, add_special_tokens=False)
        prompt = tokenizer.encode(row.prompt, add_special_tokens=False)
        assert [*prompt, *completion_tokens(text, row, tokenizer)] == [*joint, tokenizer.eos_token_id]
        assert completion_lengths([row], tokenizer) == ([[len(joint) - len(prompt) + 1]] if text else [[]])
