"""The command line as a whole: help, versions, exit codes, and unexpected errors."""

import dataclasses
import errno
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from process_tools import Rlhf
from rich.cells import cell_len
from typer.main import get_command

from rlhf_core import __version__
from rlhf_core.cli import main, output
from rlhf_core.config.fields import describe_fields
from rlhf_core.config.site import SITE_KEYS, load_site
from rlhf_core.config.site_paths import VARIABLES, misspelt
from rlhf_core.errors import BadConfig, RunCancelled, RunFailed
from rlhf_core.history.database import parse_url
from rlhf_core.schemas.site import PRIVATE_VARIABLES

COMMANDS = (
    "init check plan run resume cancel runs show watch logs report sql doctor db".split()  # noqa: SIM905 - as one types them
)


def test_help_names_every_command(rlhf: Rlhf) -> None:
    shown = rlhf("--help").stdout
    for command in COMMANDS:
        assert f" {command} " in shown


def test_help_omits_no_word(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a help text is interpreted as markup, such as the name of a section in square brackets."""
    monkeypatch.setenv("COLUMNS", "1000")
    for words, command in _all_commands(get_command(main.app)):
        shown = " ".join(rlhf(*words, "--help").stdout.replace("│", " ").split())
        texts = [command.help or "", *(getattr(one, "help", None) or "" for one in command.params)]
        for paragraph in "\n\n".join(texts).split("\n\n"):
            # Words in backticks are styled instead.
            assert " ".join(paragraph.replace("`", "").split()) in shown


def _all_commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _all_commands(below, (*words, name))


def test_the_version_is_that_of_the_package(rlhf: Rlhf) -> None:
    assert rlhf("--version").stdout.strip() == f"rlhf-flows {__version__}"


def test_the_help_of_config_show_ends_with_every_setting(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = rlhf("config", "show", "--help").stdout
    for field in describe_fields():
        assert field.name in shown
        assert field.meaning[:60] in shown


@pytest.mark.parametrize("command", ["run", "check", "plan"])
def test_help_fits_a_screen_and_names_the_help_with_the_settings(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.execute([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "rlhf config show --help" in shown
    assert len(shown.splitlines()) < 60


@pytest.mark.parametrize(
    ("error", "code"),
    [(BadConfig("a bad config"), 2), (RunFailed("the diagnosis"), 1), (RunCancelled("it was cancelled"), 130)],
)
def test_expected_errors_are_reported_by_message_and_exit_code(
    error: Exception, code: int, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.config.site.load_site", Mock(side_effect=error))
    printed = rlhf("runs", code=code)
    assert printed.stdout == ""
    assert printed.stderr == f"error: {error}\n"


def test_an_unexpected_error_is_reported_in_one_sentence_with_a_file(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rlhf_core.config.site.load_site", Mock(side_effect=ZeroDivisionError("division by zero")))
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    printed = rlhf("runs", code=1).stderr
    assert "Traceback" not in printed
    (log,) = (tmp_path / "logs").iterdir()
    assert str(log) in printed.replace("\n", "")
    assert "ZeroDivisionError" in log.read_text()


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "Make room on its file system"), (errno.EROFS, "Make its file system writable")]
)
def test_a_full_or_read_only_disk_is_an_expected_error(
    code: int, remedy: str, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = OSError(code, os.strerror(code), "/data/runs/a")
    monkeypatch.setattr("rlhf_core.config.site.load_site", Mock(side_effect=full))
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    assert f"error: cannot write /data/runs/a ({os.strerror(code)}). {remedy}" in rlhf("runs", code=1).stderr
    assert list(tmp_path.iterdir()) == []


def test_the_traceback_is_printed_if_no_file_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(blocked))
    output.report_unexpected(ValueError("oh"), blocked)
    assert "ValueError: oh" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nonsense"], ["run"], ["run", "x.toml", "--nonsense"]])
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    assert main.execute(arguments) == 2


def test_names_of_other_programs_are_answered_with_the_command_here(rlhf: Rlhf) -> None:
    commands = {words[0] for words, _ in _all_commands(get_command(main.app)) if words}
    for name, here in main._OTHER_NAMES.items():
        assert f"The command here is `{here}`." in rlhf(name, code=2).stderr
        assert name not in commands
        assert here.split()[1] in {*commands, "--version"}


def test_completion_after_a_name_of_other_programs_finds_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_RLHF_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "rlhf status ")
    monkeypatch.setenv("COMP_CWORD", "2")
    main.execute([])
    assert "unexpected error" not in capsys.readouterr().err


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.config.site.load_site", Mock(side_effect=KeyboardInterrupt))
    assert main.execute(["runs"]) == 130


def test_relative_paths_in_variables_stay_the_same_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services and jobs inherit the variables of a command."""
    (tmp_path / "elsewhere").mkdir()
    given = {
        "RLHF_HOME": "home",
        "RLHF_RUNS": "runs",
        "RLHF_DATABASE_URL": "sqlite:///history.db",
        "RLHF_COMPUTE_PYTHON": ".venv/bin/python",
        "RLHF_JOB_SECRETS": "../secrets.env",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    expected = load_site()
    assert main.execute(["runs"]) == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load_site()
    assert parse_url(found.database_url).database == str(tmp_path / "history.db")
    assert dataclasses.replace(found, database_url=expected.database_url) == expected


def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch, rlhf: Rlhf) -> None:
    monkeypatch.setenv("RLHF_SCHEDULR", "slurm")
    captured = rlhf("runs", "--json")
    assert "RLHF_SCHEDULR has no effect" in captured.stderr
    assert "did you mean RLHF_SCHEDULER?" in captured.stderr
    assert json.loads(captured.stdout) == []


def test_names_of_jobs_and_scripts_are_no_misspellings() -> None:
    others = (
        "RLHF_JOB RLHF_NODES RLHF_SLOTS RLHF_PREFECT_URL RLHF_PREFECT_PORT RLHF_DATABASE RLHF_DATABASE_PASSWORD "
        "RLHF_DATABASE_USER RLHF_PREFECT_DATABASE RLHF_PREFECT_DATABASE_PASSWORD MY_RUN"
    )
    assert list(misspelt(dict.fromkeys([*VARIABLES, *others.split()], "1"))) == []
    meant = {"RLHF_DATABASE_URI": "RLHF_DATABASE_URL", "RLHF_JOB_SECRET": "RLHF_JOB_SECRETS", "RLHF_RUN": "RLHF_RUNS"}
    assert dict(misspelt(dict.fromkeys(meant, "/x"))) == meant, "negative control"
    assert {*SITE_KEYS.values(), *(name for name in PRIVATE_VARIABLES if name.startswith("RLHF_"))} < {*VARIABLES}


# ---------------------------------------------------------------------------------------------------------------------
# Output


def test_json_has_no_non_standard_values(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": float("nan"), "b": (1, True, None), "path": Path("/x"), "c": float("-inf")})
    assert json.loads(capsys.readouterr().out) == {"a": "NaN", "b": [1, True, None], "path": "/x", "c": "-Infinity"}


def test_foreign_objects_in_json_are_refused() -> None:
    with pytest.raises(TypeError, match="found a object"):
        output.print_json({"a": object()})


def test_characters_that_a_terminal_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    def prints(arguments: Sequence[str]) -> int:
        output.print_json({"completion": "é 日 🙂"})
        output.print_table(("curve",), [("▁▇",)])
        return 0

    printed = io.BytesIO()
    monkeypatch.setattr(main, "execute", prints)
    monkeypatch.setattr(main, "collect_rarely", lambda: None)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1"))
    with pytest.raises(SystemExit, match="0"):
        main.main()
    sys.stdout.flush()
    text = printed.getvalue().decode("latin-1")
    shown, _, table = text.partition("}\n")
    assert json.loads(f"{shown}}}") == {"completion": "é 日 🙂"}
    assert "é" in shown
    assert "\\u2581\\u2587" in table


def test_tables_print_markup_literally(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name", "value"), [("[bold]x[/bold]", 1.5), ("y", None)])
    shown = capsys.readouterr().out
    assert "[bold]x[/bold]" in shown
    assert "1.5" in shown


def test_names_of_functions_are_not_rendered_as_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    found = "rewards:star: reward function star raised ValueError"
    output.print_table(("found",), [(found,)], "rewards:star:")
    output.print_text(found)
    output.warn(found)
    output.print_error(BadConfig(found))
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("rewards:star:") == 5


def test_an_unknown_duration_is_a_dash() -> None:
    assert [output.seconds_text(seconds) for seconds in (None, 8.24)] == ["-", "8.2 s"]


RUNS = [("sort-20261120-090000-aaaaaa", "completed", "2026-11-20 09:00:00", "8 min 41 s", "all roles ended well")]


def test_wide_characters_count_as_the_two_columns_that_they_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chinese, Japanese and Korean text is not folded while there is room, and its columns are aligned."""
    monkeypatch.setenv("COLUMNS", "60")
    rows = [("数字排序的第一次运行", 1), ("run", 2)]
    output.print_table(("name", "steps"), rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4, lines
    assert len({cell_len(line[: line.index(mark)]) for line, mark in zip(lines, "┃╇││", strict=True)}) == 1
    output.print_records(("名称", "of"), [("一", "two")])
    first, second = capsys.readouterr().out.splitlines()
    assert cell_len(first[: first.index("一")]) == cell_len(second[: second.index("two")])


def test_names_and_figures_are_not_folded_where_sentences_can_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    output.print_table(("run", "state", "when", "took", "why"), RUNS)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 90
    assert all(text in shown for text in RUNS[0][:4])
    assert RUNS[0][4] not in shown


def test_a_table_gives_up_a_column_before_a_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ("run", "state", "when", "took", "why")
    for width, is_there in ((200, True), (75, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        output.print_table(columns, RUNS, spare="when")
        shown = capsys.readouterr().out
        assert ("2026-11-20" in shown, RUNS[0][0] in shown) == (is_there, True)


def test_a_table_that_would_fold_every_word_is_printed_line_by_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    output.print_table(("service", "state", "address", "log"), [("server", "stopped", "127.0.0.1:4200", "/a/b")], "Now")
    assert capsys.readouterr().out.splitlines() == [
        "Now",
        "service  server",
        "state    stopped",
        "address  127.0.0.1:4200",
        "log      /a/b",
    ]


def test_values_that_do_not_fit_are_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    output.print_table(("run", "state"), [row[:2] for row in RUNS])
    cells = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert ["".join(column).replace(" ", "") for column in zip(*cells, strict=True)] == list(RUNS[0][:2])
