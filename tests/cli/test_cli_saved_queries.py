"""``rlhf sql`` with saved queries: listed, run, shown, changed."""

import io

import pytest
from history_tools import RunFiles, ingested, whole_run
from process_tools import Rlhf

from rlhf_core.config.site import load_site
from rlhf_core.history.saved_queries import saved


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """A whole run that is in the history."""
    monkeypatch.setenv("COLUMNS", "120")
    return ingested(whole_run(load_site().runs_dir))


def test_the_list_has_every_query(rlhf: Rlhf) -> None:
    lines = rlhf("sql", "--list").stdout.splitlines()
    assert max(map(len, lines)) <= 120
    for query in saved():
        assert any(line.startswith(query.name + " ") for line in lines)
    (first, *_) = rlhf("sql", "--list", "--json").json()
    assert first["name"] == "best-checkpoint"
    assert first["arguments"][0] == {"name": "evaluation", "type": "text", "default": "greedy", "meaning": "evaluation"}


def test_a_query_with_and_without_values(known: RunFiles, rlhf: Rlhf) -> None:
    (best, before) = rlhf("sql", "best-checkpoint", "evaluation=sampled", "--json").json()
    assert (best["run_id"], best["step"], best["value"], before["step"]) == (known.run_id, 10, 0.8, 2)
    assert "checkpoints/step-000010" in rlhf("sql", "evaluated-checkpoints").stdout
    assert rlhf("sql", "trials").stdout == "No rows for days=90.\n"


def test_a_shown_query_can_be_edited_and_run(known: RunFiles, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = rlhf("sql", "best-checkpoint", "--show").stdout
    monkeypatch.setattr("sys.stdin", io.StringIO(shown.replace("-s.value", "s.value")))
    assert [row["value"] for row in rlhf("sql", "-", "evaluation=sampled", "limit=1", "--json").json()] == [0.3]


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
def test_bad_input(arguments: list[str], message: str, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"SELECT '\xff'"), "utf-8"))
    assert message in rlhf("sql", *arguments, code=2).stderr
