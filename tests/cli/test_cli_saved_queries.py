"""``rlhf sql`` with saved queries: listed, run, shown, changed."""

import io
import json

import pytest
from history_tools import RunFiles, ingested, whole_run

from rlhf_core.cli.main import execute
from rlhf_core.config.site import load_site
from rlhf_core.history.saved_queries import saved


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """A whole run that is in the history."""
    monkeypatch.setenv("COLUMNS", "120")
    return ingested(whole_run(load_site().runs_dir))


def test_the_list_has_every_query(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["sql", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    for query in saved():
        assert any(line.startswith(query.name + " ") for line in lines)
    assert execute(["sql", "--list", "--json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)
    assert first["name"] == "best-checkpoint"
    assert first["arguments"][0] == {"name": "evaluation", "type": "text", "default": "greedy", "meaning": "evaluation"}


def test_a_query_with_and_without_values(known: RunFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["sql", "best-checkpoint", "evaluation=sampled", "--json"]) == 0
    (best, before) = json.loads(capsys.readouterr().out)
    assert (best["run_id"], best["step"], best["value"], before["step"]) == (known.run_id, 10, 0.8, 2)
    assert execute(["sql", "evaluated-checkpoints"]) == 0
    assert "checkpoints/step-000010" in capsys.readouterr().out
    assert execute(["sql", "trials"]) == 0
    assert capsys.readouterr().out == "No rows for days=90.\n"


def test_a_shown_query_can_be_edited_and_run(
    known: RunFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert execute(["sql", "best-checkpoint", "--show"]) == 0
    shown = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(shown.replace("-s.value", "s.value")))
    assert execute(["sql", "-", "evaluation=sampled", "limit=1", "--json"]) == 0
    assert [row["value"] for row in json.loads(capsys.readouterr().out)] == [0.3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to run"),
        (["godput"], "did you mean goodput?"),
        (["goodput", "3"], "found '3', expected NAME=VALUE"),
        (["step-time", "run=nobody"], "the history has no run 'nobody'"),
        (["SELECT '\udcff'"], "the query has a NUL character or bytes that are not UTF-8"),
        (["SELECT :x", "x=\udcff"], "the value of x has a NUL character or bytes that are not UTF-8"),
        (["-"], "standard input is not utf-8 text: invalid start byte at byte 8"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"SELECT '\xff'"), "utf-8"))
    assert execute(["sql", *arguments]) == 2
    assert message in capsys.readouterr().err
