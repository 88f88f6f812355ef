"""Reading data files without the training libraries: the same verdicts as on the nodes, with line numbers."""

import json
import os
from pathlib import Path

import pytest
from test_preflight_checks import bad_rows

from rlhf_core.files.data_rows import template_columns
from rlhf_core.preflight.data_file import SHOWN, scan
from rlhf_core.schemas.data import DataSpec

DATA = DataSpec(train="x.jsonl")
GOOD = {"prompt": "12>", "answer": "12"}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_good_file(tmp_path: Path) -> None:
    found = scan(write(tmp_path / "a.jsonl", GOOD, {"prompt": "3>", "answer": 3, "level": 1}), DATA)
    assert (found.problem, found.num_rows, found.malformed.count) == ("", 2, 0)
    assert found.columns == {"prompt", "answer", "level"}
    assert len(found.prompt_hashes) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "3', "not valid JSON: Unterminated string starting at (character 12 of the line)"),
        ('{"prompt": ', "not valid JSON: Expecting value (character 11 of the line)"),
        ('{"prompt": "3" "answer": "3"}', "not valid JSON: Expecting ',' delimiter (character 16 of the line)"),
        ("[1, 2]", "expected a JSON object, found list"),
        ('{"prompt": null, "answer": "3"}', 'column "prompt" is null'),
        ('{"prompt": "3>", "answer": NaN}', 'column "answer" is NaN'),
        ('{"prompt": "3>"}', 'no column "answer"'),
        ('{"prompt": "\\ud800", "answer": "3"}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "3", "answer": ' + "9" * 5_000 + "}", "an integer of more than 4300 digits; write it as text"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    found = scan(write(tmp_path / "a.jsonl", GOOD, "", line, GOOD), DATA)
    assert found.malformed.count == 1
    (problem,) = found.malformed.first
    assert problem.line == 3, "empty lines count as lines"
    assert message in problem.message


@pytest.mark.parametrize("name", ["rows", "rows.jsonl"])
def test_a_folder_is_no_data_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert scan(tmp_path / name, DATA).problem == "found a folder, expected a file ending in .jsonl, .csv, .parquet"


@pytest.mark.parametrize("name", ["openai/gsm8k", "rows.json", "rows.jsonl"])
def test_a_file_that_is_not_there_is_no_file_of_the_wrong_kind(tmp_path: Path, name: str) -> None:
    assert scan(tmp_path / name, DATA).problem == "there is no such file"
    (tmp_path / "a.txt").write_text("")
    assert "expected one of .jsonl" in scan(tmp_path / "a.txt", DATA).problem, "control"


@pytest.mark.parametrize("read_elsewhere", [False, True])
def test_a_file_that_cannot_be_looked_up_is_a_finding(tmp_path: Path, *, read_elsewhere: bool) -> None:
    """By its name, as one in a folder of another user is by its rights."""
    assert scan(tmp_path / ("x" * 300), DATA, read_elsewhere=read_elsewhere).problem == "File name too long"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff", "answer": "1"}\n')
    (problem,) = scan(path, DATA).malformed.first
    assert (problem.line, "not UTF-8" in problem.message) == (2, True)


def test_the_first_problems_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    found = scan(write(tmp_path / "a.jsonl", GOOD, *["{"] * 12), DATA)
    assert found.malformed.count == 12
    assert [problem.line for problem in found.malformed.first] == list(range(2, 2 + SHOWN))


def test_a_column_that_no_row_has_is_no_fault_of_the_rows(tmp_path: Path) -> None:
    data = DataSpec(train="x.jsonl", prompt_column="question")
    found = scan(write(tmp_path / "a.jsonl", GOOD, GOOD), data)
    assert found.malformed.count == 0
    assert "question" not in found.columns


def test_empty_prompts_and_answers_are_counted(tmp_path: Path) -> None:
    rows = [GOOD, {"prompt": "", "answer": "1"}, {"prompt": "2>", "answer": ""}]
    found = scan(write(tmp_path / "a.jsonl", *rows), DATA)
    assert (found.empty_prompts, found.empty_answers) == (bad_rows(2), bad_rows(3))


def test_the_number_0_is_a_prompt(tmp_path: Path) -> None:
    found = scan(write(tmp_path / "a.jsonl", {"prompt": 0, "answer": 0}, {"prompt": [], "answer": ""}), DATA)
    assert (found.empty_prompts, found.empty_answers) == (bad_rows(2), bad_rows(2))


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n")
    assert scan(path, DATA).malformed.count == 0


def test_csv_rows_have_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\n"1>",1\n"two\nlines>",2\n3>\n')
    found = scan(path, DATA)
    assert found.num_rows == 2
    (problem,) = found.malformed.first
    assert (problem.line, problem.message) == (5, "found 1 values for 2 columns")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "prompt,answer,answer\n1>,1,2\n",
            "line 1: found the column 'answer' more than once: rename or remove all but",
        ),
        ('prompt,answer\n1>,1\n"2"3,3\n', "line 3: not valid CSV: "),
    ],
)
def test_csv_that_ends_every_rank_cannot_be_read(tmp_path: Path, text: str, problem: str) -> None:
    """Not a malformed row, which could be dropped: what follows is lost."""
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert scan(path, DATA).problem.startswith(problem)


def test_columns_without_a_name_may_be_many_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer,,\n1>,1,,\n")
    assert (scan(path, DATA).problem, scan(path, DATA).num_rows) == ("", 1)


def test_parquet_is_left_to_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and so on")
    assert (scan(path, DATA).scanned, scan(path, DATA).problem) == (False, "")
    path.write_bytes(b"something else")
    assert "PAR1" in scan(path, DATA).problem


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert scan(tmp_path / "pipe.jsonl", DATA).problem == "found a FIFO, expected a regular file"
    write(tmp_path / "file.jsonl", GOOD)
    (tmp_path / "link.jsonl").symlink_to("file.jsonl")
    assert scan(tmp_path / "link.jsonl", DATA).num_rows == 1, "negative control"


def test_scanning_can_be_stopped(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    with pytest.raises(Stop):
        scan(write(tmp_path / "a.jsonl", GOOD), DATA, stop)


@pytest.mark.parametrize(
    ("template", "columns", "wrong"),
    [
        ("{prompt}", ["prompt"], False),
        ("Q: {question}\nA{{}}: {question}{level}", ["question", "level"], False),
        ("no column", [], False),
        ("{0.x}", [], True),
        ("{}", [], True),
        ("{a:>3}", [], True),
        ("{a", [], True),
    ],
)
def test_columns_of_templates(template: str, columns: list[str], wrong: bool) -> None:
    found, problem = template_columns(template)
    assert found == columns
    assert bool(problem) == wrong


@pytest.mark.training
@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "3',
        "[1]",
        '{"prompt": null, "answer": "3"}',
        '{"prompt": "3>"}',
        '{"prompt": "", "answer": "3"}',
        '{"prompt": "\\ud800", "answer": "3"}',
        '{"prompt": 3, "answer": 4}',
        json.dumps(GOOD),
    ],
)
def test_the_nodes_would_say_the_same(tmp_path: Path, line: str) -> None:
    """Each side reads the data with its own code: they must agree on valid rows."""
    from rlhf_core.errors import BadData
    from rlhf_core.schemas.run import RunSpec
    from rlhf_core.training.data.loading import load_rows

    path = write(tmp_path / "a.jsonl", GOOD, line)
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "model": {"path": "/m"},
            "data": {"train": str(path), "eval": str(path)},
            "train": {"num_steps": 1},
        }
    )
    found = scan(path, spec.data)
    refused_here = bool(found.malformed.count or found.empty_prompts.count)
    try:
        load_rows(spec, "train")
        refused_there = False
    except BadData:
        refused_there = True
    assert refused_here == refused_there


def test_rows_that_come_twice_are_counted(tmp_path: Path) -> None:
    other = {"prompt": "12>", "answer": "21"}
    found = scan(write(tmp_path / "a.jsonl", GOOD, other, GOOD, {"prompt": " \t", "answer": "1"}), DATA)
    assert (found.duplicates, found.contradictions, found.blank_prompts) == (bad_rows(3), bad_rows(2), bad_rows(4))
    assert len(found.prompt_hashes) == 2
