"""Texts of others on pages, in terminals, spreadsheets and model cards: they are shown, and never acted upon."""

import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import hostile
import pytest
import yaml
from control_fakes import FakeAgent, make_run, make_spec
from history_tools import whole_run
from made_reports import decision_of, model_provenance
from markdown_it import MarkdownIt
from rich.console import Console

from rlhf_core.cli import output, watching
from rlhf_core.cli.main import execute
from rlhf_core.config.site import load_site
from rlhf_core.control.promotion import Question
from rlhf_core.control.views.progress import RunReader
from rlhf_core.control.views.summary import summarise
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.errors import BadInput
from rlhf_core.files.whole import write_model
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.model_card import model_card
from rlhf_core.render.markdown import checks_markdown, incidents_markdown, progress_markdown
from rlhf_core.render.markup import markup, tag
from rlhf_core.render.progress import RunProgress
from rlhf_core.render.summary import summary_markdown
from rlhf_core.render.timeline import decision_text
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.evaluation import EvaluationReport, EvaluationSample
from rlhf_core.schemas.failures import Action, Decision, FailureKind, Incident
from rlhf_core.text.escaping import (
    csv_cell,
    json_text,
    markdown,
    markdown_code,
    markdown_quote,
    storable,
    terminal,
    visible,
    yaml_scalar,
)
from rlhf_core.watchdog.ingest import sync

RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
ACTS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff]"
)
ALLOWED_BY_SCHEMAS = tuple(text for text in hostile.ALL if not re.search(r"[\ud800-\udfff]", text))
"""Halves of characters are refused when a record is made."""


def shape(text: str) -> list[str]:
    """Structure of a text as a renderer sees it: its blocks, and everything in them except plain text."""
    found = []
    for token in RENDERER.parse(text):
        found.append(f"{token.type} {token.tag}")
        found += [child.type for child in token.children or () if child.type not in ("text", "softbreak")]
    return found


def words(text: str) -> str:
    """The plain text of a rendered page."""
    return "".join(child.content for token in RENDERER.parse(text) for child in token.children or ())


def test_no_text_contains_markup_or_hidden_characters_on_a_page() -> None:
    for text in hostile.ALL:
        for built in (markup(text), tag("p", text), tag("a", "x", title=text)):
            assert not ACTS.search(built), text
            assert built.count("<") == built.count("</") * 2, text


PLACES = ("{}", "before {} after", "> {}", "- {}", "# {}", "**{}**", "| a | b |\n|---|---|\n| {} | x |\n| y | {} |")


@pytest.mark.parametrize("place", PLACES)
def test_no_text_begins_or_ends_anything_in_markdown(place: str) -> None:
    for text in hostile.ALL:
        written = markdown(text)
        if place == "**{}**" and not written:
            continue
        assert shape(place.format(written, written)) == shape(place.format("x" * bool(written), "x" * bool(written))), (
            text
        )


def test_a_reader_of_markdown_reads_what_was_written() -> None:
    for text in hostile.ALL:
        assert words(f"x {markdown(text)} x").split() == f"x {visible(' '.join(text.split()))} x".split(), text


def test_a_bare_address_is_no_link_either() -> None:
    """Prefect's UI and GitHub turn such addresses into links; the renderer here does not."""
    for text in hostile.ALL:
        assert not re.search(r"(?<!\\):(?=//)|www(?<!\\)\.|[\w.](?<!\\)@\w", markdown(text)), text


@pytest.mark.parametrize("place", ["before {} after", "- {}", "{}  \n{}  "])
def test_nothing_ends_code(place: str) -> None:
    for text in hostile.ALL:
        if not text.strip():
            continue
        written = markdown_code(text)
        assert shape(place.format(written, written)) == shape(place.format("`x`", "`x`")), text
        (line, *_) = (token for token in RENDERER.parse(f"x {written}") if token.children)
        shown = next(child.content for child in line.children or () if child.type == "code_inline")
        assert shown.strip() == visible(text.expandtabs(4)).replace("  ", "\u00a0\u00a0").strip()


def test_code_in_a_table_cuts_no_row() -> None:
    for text in hostile.ALL:
        rows = [
            token.type
            for token in RENDERER.parse(f"| a | b |\n|---|---|\n| {markdown_code(text, in_table=True)} | x |")
        ]
        assert rows.count("td_open") == 2, text


def test_a_quote_stays_one_quote() -> None:
    for text in hostile.ALL:
        lines = text.splitlines()
        assert set(shape(markdown_quote(text))) <= {"blockquote_open blockquote", "blockquote_close blockquote"} | {
            "paragraph_open p",
            "paragraph_close p",
            "inline ",
            "hardbreak",
        }, lines


# ---------------------------------------------------------------------------------------------------------------------
# The pages


def hostile_run(runs: Path, texts: tuple[str, ...]) -> RunDir:
    """A run whose model, rewards and nodes write these texts wherever they can."""
    run_dir = make_run(runs)
    agent = FakeAgent(run_dir)
    agent.whole_run()
    agent.incident(FailureKind.HANG)
    joined = " ".join(texts)
    folder = run_dir.attempt(1).restart(0)
    found = Incident.model_validate_json(folder.incident(0).read_bytes())
    write_model(folder.incident(0), found.model_copy(update={"message": joined, "phase": joined, "collective": joined}))
    for name in ("stack-n1-0.txt", "log-n1-0.txt"):
        (folder.evidence_dir / name).write_text("\n".join(texts[:12]))
    write_model(folder.decision(0), decision(joined))
    samples = tuple(
        EvaluationSample(prompt_uid="1", sample_index=0, prompt=text, completion=text, answer=text, score=1.0)
        for text in texts
    )
    report = EvaluationReport.model_validate_json(run_dir.evaluation("after", "greedy").read_bytes())
    write_model(run_dir.evaluation("after", "greedy"), report.model_copy(update={"samples": samples, "metric": joined}))
    return run_dir


def decision(text: str) -> Decision:
    return decision_of(
        Action.RESTART_IN_PLACE, reason=text, excluded_nodes=(text,), config_diff={text: text}, resume_checkpoint=text
    )


def pages(run_dir: RunDir) -> dict[str, str]:
    """All pages that Prefect shows of the run."""
    timeline, summary = read_timeline(run_dir), summarise(run_dir)
    message = timeline.incidents[0].incident.message
    after = summary.accuracy[0].after
    reason = "\n".join(sample.prompt for sample in after.samples) if after else ""
    question = Question(run_dir, 10, Path("/models/x"), utc_now(), reason)
    finding = CheckResult.model_construct(
        status=CheckStatus.WARNING, id=message, found=message, advice=message, expected=message, node=message
    )
    progress = RunProgress(RunState.PREFLIGHT, 10, title=message)
    at_work = replace(timeline, state=RunState.PREFLIGHT)
    return {
        "approval": question.text,
        "form": question.form_text,
        "incidents": incidents_markdown(timeline),
        "checks": checks_markdown([(message, finding)]),
        "result": summary_markdown(summary, timeline, None, ""),
        "progress": progress_markdown(progress, at_work),
        "decided": f"| {markdown(decision_text(timeline.decisions[0].decision))} |",
    }


@pytest.mark.parametrize("name", ["approval", "form", "incidents", "checks", "result", "progress", "decided"])
def test_a_page_on_which_a_person_decides_has_the_same_shape_whatever_a_model_writes(
    made: tuple[dict[str, str], dict[str, str]], name: str
) -> None:
    plain, attacked = made
    found, expected = shape(attacked[name]), shape(plain[name])
    if name == "incidents":  # a message and the end of a log may have more lines, of the same kinds
        found, expected = sorted({*found}), sorted({*expected})
    assert found == expected


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    texts = tuple(text for text in ALLOWED_BY_SCHEMAS if text.strip())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_core.control.promotion.SHOWN_SAMPLES", len(texts))
        patch.setattr("rlhf_core.render.evidence.MAX_LINE", 10_000)
        folders = (tmp_path_factory.mktemp(name) for name in ("plain", "attacked"))
        plain, attacked = next(folders), next(folders)
        yield (
            pages(hostile_run(plain / "runs", tuple("x" for _ in texts))),
            pages(hostile_run(attacked / "runs", texts)),
        )


def test_the_shapes_differ_where_a_text_is_not_escaped() -> None:
    """Control: each kind of attack works on this renderer if it is written without escaping."""
    once = ["fine\r\r# Verified", "[click](http://evil.example)", "<b>x</b>", "![](http://e)"]
    for text in once:
        page = f"> {text.replace('|', chr(92) + '|').replace(chr(10), ' ')}\n> more `code`"
        assert shape(page) != shape("> x\n> more `code`"), text


def test_a_model_card_shows_the_texts_unchanged(tmp_path: Path) -> None:
    def card(text: str, many: tuple[str, ...]) -> str:
        by_user = dict.fromkeys(
            ("owner", "approved_by", "reason", "base_model", "code_revision", "config_source"), text
        )
        lists = dict.fromkeys(("tags", "overrides", "incidents"), many)
        # Copied, because the schema would refuse some of the texts.
        origin = model_provenance("small-20260301-120000-aaaaaa").model_copy(update={**by_user, **lists})
        return model_card(origin, make_spec())

    def blocks(written: str) -> list[str]:
        return [one for one in shape(written.split("---\n", 2)[2]) if one != "code_inline"]

    plain = blocks(card("x", ("x",)))
    for text in hostile.ALL:
        written = card(text, (text,))
        written.encode()  # halves of surrogate pairs would not be
        front = yaml.safe_load(written.split("---\n")[1])
        assert front["tags"][2:] == [storable(text)]
        assert front.get("base_model", "") == storable(text)
        if text.strip():
            assert blocks(written) == plain, text


# ---------------------------------------------------------------------------------------------------------------------
# Terminals


@contextlib.contextmanager
def captured(capsys: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    capsys.readouterr()
    found: list[str] = []
    yield found
    streams = capsys.readouterr()
    found.append(streams.out + streams.err)


WAYS: dict[str, Callable[[str], object]] = {
    "text": output.print_text,
    "note": output.note,
    "warning": output.warn,
    "error": lambda text: output.print_error(BadInput(text)),
    "table": lambda text: output.print_table((text, "b"), [(text, Path(text.replace("\x00", "")))], text),
    "records": lambda text: output.print_records((text, "b"), [(text, [text])]),
    "json": lambda text: output.print_json({text: [text]}),
    "bug": lambda text: output.report_unexpected(ValueError(text), Path("/proc/none")),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_is_printed_acts_upon_the_terminal(
    way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with captured(capsys) as found:
        for text in hostile.ALL:
            WAYS[way](text)
    assert not ACTS.search(found[0])
    assert "evil.example" in found[0], "it is shown"


def test_json_is_the_same_data(capsys: pytest.CaptureFixture[str]) -> None:
    for text in hostile.ALL:
        assert json.loads(json_text({text: [text]}, indent=2)) == {text: [text]}


def test_terminal_keeps_every_word_and_every_line() -> None:
    assert terminal("a\tb\nc\rd\r\ne") == "a\tb\nc\nd\ne"
    assert terminal("\x1b[31m\x9b2J \u202e \ud800") == "\\x1b[31m\\x9b2J \\u202e \\ud800"
    assert terminal("Grüße, 日本語, עברית, 👩\u200d🚀") == "Grüße, 日本語, עברית, 👩\u200d🚀"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A site with one ended run whose files hold all hostile texts: its home, and the id of the run."""
    home = tmp_path_factory.mktemp("site") / "home"
    site = load_site({"RLHF_HOME": str(home)})
    run = whole_run(site.runs_dir)
    joined = "\n".join(text for text in ALLOWED_BY_SCHEMAS if "\x00" not in text)
    folder = run.dir.attempt(1).restart(0)
    found = Incident.model_validate_json(folder.incident(0).read_bytes())
    write_model(folder.incident(0), found.model_copy(update={"message": joined[:4000]}))
    folder.logs.mkdir(parents=True, exist_ok=True)
    text = "\n".join(hostile.ALL).encode("utf-8", "surrogatepass")
    (folder.logs / "trainer-n1-0.log").write_bytes(text)
    stored = json.loads(run.dir.spec.read_text())
    stored["tags"] = [one[:60] for one in (*hostile.CSV, *hostile.TERMINAL) if "\x00" not in one and one.strip()]
    run.dir.spec.write_text(json.dumps(stored))
    with HistoryStore(site.database_url) as store:
        sync(run.dir, store)
    return home, run.run_id


@pytest.mark.parametrize(
    "words",
    [
        "show {}",
        "show {} --json",
        "watch {}",
        "watch {} --json",
        "logs {} --attempt 1 --restart 0 --tail 0",
        "logs {} --attempt 1 --restart 0 --tail 0 --json",
        "runs",
        "sql|SELECT message FROM incidents",
        "sql|SELECT tag FROM run_tags|--json",
        "show no-such\x1b]52;c;eA==\x07",
    ],
)
def test_commands_show_a_hostile_run_and_act_upon_nothing(
    attacked: tuple[Path, str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, run_id = attacked
    monkeypatch.setenv("RLHF_HOME", str(home))
    line = words.split("|") if "|" in words else words.format(run_id).split(" ")
    with captured(capsys) as found:
        assert execute(line) == (2 if "no-such" in words else 0)
    assert not ACTS.search(found[0])
    assert "Traceback" not in found[0]
    if "sql" not in words and "runs" not in words and "no-such" not in words:
        assert "[2J" in found[0], "it is shown"


def test_the_live_view_acts_upon_nothing(attacked: tuple[Path, str]) -> None:
    home, run_id = attacked
    view = RunReader(RunDir.of(home / "runs", run_id)).read()
    shown = io.StringIO()
    Console(file=shown, width=400).print(watching.draw(view))
    assert "[2J" in shown.getvalue()
    assert not ACTS.search(shown.getvalue())


# ---------------------------------------------------------------------------------------------------------------------
# Spreadsheets and YAML


def test_no_cell_is_calculated_and_every_one_can_be_read_back() -> None:
    for text in hostile.ALL:
        cell = csv_cell(text)
        assert cell[:1] == "'" or cell.lstrip()[:1] not in set("=+-@\uff1d"), text
        assert cell[:1] not in ("\t", "\r", "\n")
        assert cell.removeprefix("'") == storable(text)
    numbers = ["-1", "+1.5", "-1e9", "-inf", "nan", "0.25"]
    assert [csv_cell(one) for one in numbers] == numbers
    assert [csv_cell(value) for value in (-1, -0.5, None, True)] == [-1, -0.5, None, True]


def test_an_exported_table_begins_no_formula(
    attacked: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run_id = attacked
    monkeypatch.setenv("RLHF_HOME", str(home))
    assert execute(["export", run_id, "--to", "csv", "--out", str(tmp_path)]) == 0
    cells = [
        cell
        for path in tmp_path.glob("*.csv")
        for row in csv.reader(path.read_text(encoding="utf-8").splitlines(keepends=True))
        for cell in row
    ]
    assert "'=cmd|' /C calc'!A0" in cells
    acting = [
        cell for cell in cells if cell.lstrip()[:1] in tuple("=+-@") and not re.fullmatch(r"[-+][\d.e+-]+|-inf", cell)
    ]
    assert acting == []


def test_yaml_carries_every_text() -> None:
    for text in hostile.ALL:
        assert yaml.safe_load(f"key: {yaml_scalar(text)}") == {"key": storable(text)}, text
    assert yaml.safe_load(json.dumps("\U0001f600")) != "\U0001f600", "control: JSON is not enough"
