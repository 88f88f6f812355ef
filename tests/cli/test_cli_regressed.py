"""A regression: a run that completes with a worse model is marked beside ``completed`` in every view."""

import json
from pathlib import Path
from typing import Any

import pytest
from history_tools import RunFiles, at, ingested, whole_run
from made_reports import model_provenance
from process_tools import Rlhf

from flows.publishing.events import FlowRunRef, events_of
from flows.run import ended_well
from rlhf_core.cli.run_output import summary_json
from rlhf_core.cli.watching import headline, json_lines
from rlhf_core.config.site import load_site
from rlhf_core.control.promotion import _results
from rlhf_core.control.views.progress import RunReader
from rlhf_core.control.views.summary import summarise
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.model_card import model_card
from rlhf_core.render.exports import mlflow, wandb
from rlhf_core.render.summary import summary_markdown
from rlhf_core.schemas.regression import regression_text, regressions, state_text

pytestmark = pytest.mark.usefixtures("plots_drawn_once")

FELL = {"name": "greedy", "metric": "exact_match", "before": 0.75, "after": 0.2}
REGRESSION = "held-out greedy exact match 0.750 → 0.200"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> tuple[RunFiles, RunFiles]:
    """A run that improved, and one whose greedy score fell from 0.75 to 0.20 and its sampled one from 0.30 to 0.28."""
    monkeypatch.setenv("COLUMNS", "160")
    folder = load_site().runs_dir
    gained, fell = whole_run(folder), whole_run(folder, "sort", "bbbbbb", 100)
    fell.evaluation("after", "greedy", 0.2, 52)
    fell.evaluation("after", "sampled", 0.28, 53)
    return ingested(gained), ingested(fell)


def _row(when: str, value: float | None, half: float | None = 0.05) -> dict[str, Any]:
    known = value is not None and half is not None
    return {
        "name": "greedy",
        "when": when,
        "metric": "exact_match",
        "value": value,
        "ci_low": value - half if known else None,  # type: ignore[operator]
        "ci_high": value + half if known else None,  # type: ignore[operator]
    }


def _loss(when: str, value: float, metric: str) -> dict[str, Any]:
    return {**_row(when, value), "name": "loss", "metric": metric}


@pytest.mark.parametrize(
    ("before", "after", "fell"),
    [
        (_row("before", 0.5), _row("after", 0.3), True),
        (_row("before", 0.5), _row("after", 0.41), False),  # the intervals overlap
        (_row("before", 0.5), _row("after", 0.7), False),
        (_row("before", 0.5), _row("after", None), False),
        (_row("before", 0.5, float("inf")), _row("after", 0.1), False),
        (_row("before", 0.5, float("nan")), _row("after", 0.1), False),
        (_row("before", 0.5), {**_row("after", 0.1), "metric": "other"}, False),
        (_loss("before", 0.5, "cross_entropy"), _loss("after", 0.3, "cross_entropy"), False),
        (_loss("before", 0.5, "cross_entropy"), _loss("after", 0.7, "cross_entropy"), True),
        (_loss("before", 0.5, "dpo_loss"), _loss("after", 0.7, "dpo_loss"), False),
        ({**_row("before", 0.5), "name": "pass@4"}, {**_row("after", 0.3), "name": "pass@4"}, False),
    ],
)
def test_a_score_is_worse_when_its_intervals_are_apart(
    before: dict[str, Any], after: dict[str, Any], fell: bool
) -> None:
    found = regressions([before, after])
    assert bool(found) == fell
    assert bool(regression_text(found)) == fell
    assert state_text("completed", found) == ("completed, regressed" if fell else "completed")
    assert state_text("failed", found) == "failed", "only beside completed"


def test_in_the_list_of_runs(runs: tuple[RunFiles, RunFiles], rlhf: Rlhf) -> None:
    by_run = {run["run_id"]: run["regressed"] for run in rlhf("runs", "--json").json()}
    assert by_run == {runs[0].run_id: [], runs[1].run_id: [FELL]}
    lines = {line.split()[0]: line for line in rlhf("runs").stdout.splitlines() if line.startswith("sort-")}
    assert "completed, regressed" in lines[runs[1].run_id]
    assert "regressed" not in lines[runs[0].run_id]


def test_in_the_view_of_one_run(runs: tuple[RunFiles, RunFiles], rlhf: Rlhf) -> None:
    texts = rlhf("show", runs[1].run_id).stdout
    assert "completed, regressed" in texts
    assert f"Regressed: the model is worse than before training: {REGRESSION}" in texts
    assert rlhf("show", runs[1].run_id, "--json").json()["regressed"] == [FELL]
    assert "egressed" not in rlhf("show", runs[0].run_id).stdout


def test_in_the_comparison(runs: tuple[RunFiles, RunFiles], rlhf: Rlhf, tmp_path: Path) -> None:
    page, names = tmp_path / "page.html", [run.run_id for run in runs]
    assert rlhf("compare", *names, "--html", str(page)).stdout.count("completed, regressed") == 1
    assert page.read_text().count('<span class="badge bad">regressed</span>') == 1
    found = rlhf("compare", *names, "--json").json()
    assert [run["regressed"] for run in found["runs"]] == [[], [FELL]]


def test_in_the_report(runs: tuple[RunFiles, RunFiles], rlhf: Rlhf, tmp_path: Path) -> None:
    for run, count in zip(runs, (0, 1), strict=True):
        page = tmp_path / f"{run.run_id}.html"
        rlhf("report", run.run_id, "--output", str(page))
        assert page.read_text().count('<span class="badge bad">regressed</span>') == count
        assert page.read_text().count("The model is worse than before training.") == count


def test_while_watching(runs: tuple[RunFiles, RunFiles]) -> None:
    gained, fell = (RunReader(run.dir).read() for run in runs)
    assert headline(fell).startswith(f"{runs[1].run_id} completed, regressed,")
    assert headline(gained).startswith(f"{runs[0].run_id} completed,")
    assert "regressed" not in headline(gained)
    assert [json.loads(json_lines(view)[0])["regressed"] for view in (gained, fell)] == [[], [FELL]]


def test_in_the_summary_of_a_run_and_in_prefect(runs: tuple[RunFiles, RunFiles]) -> None:
    gained, fell = (summarise(run.dir) for run in runs)
    assert [summary.state_text for summary in (gained, fell)] == ["completed", "completed, regressed"]
    assert [summary_json(summary)["regressed"] for summary in (gained, fell)] == [[], [FELL]]
    page, other = (
        summary_markdown(summary, read_timeline(run.dir), None, "")
        for summary, run in ((fell, runs[1]), (gained, runs[0]))
    )
    assert f"# {runs[1].run_id}: completed, regressed" in page
    assert f"> **Regressed**: the model is worse than before training: {REGRESSION}" in page
    assert "egressed" not in other


def test_in_the_approval_of_a_model(runs: tuple[RunFiles, RunFiles]) -> None:
    texts = ["\n".join(_results(summarise(run.dir))) for run in runs]
    assert "egressed" not in texts[0]
    assert f"> **Regressed**: the model is worse than before training: {REGRESSION}." in texts[1]


def test_in_the_model_card(runs: tuple[RunFiles, RunFiles]) -> None:
    for run, is_shown in zip(runs, (False, True), strict=True):
        summary, stored = summarise(run.dir), run.dir.read_spec()
        reports = [report for row in summary.accuracy for report in (row.before, row.after) if report is not None]
        origin = model_provenance(stored.run_id, evaluations=tuple(reports))
        assert ("**Regressed**: the model is worse" in model_card(origin, stored.spec)) is is_shown


def test_in_the_event_of_the_end(runs: tuple[RunFiles, RunFiles]) -> None:
    texts = []
    for run in runs:
        news = events_of(read_timeline(run.dir), run.dir.read_spec(), FlowRunRef("", ""), now=at(60))
        texts += [one.payload["message"] for one in news if one.name == "rlhf.run.completed"]
    assert texts[0] == "exact match went from 0.75 to 0.93"
    assert texts[1].endswith(f"; the model is worse than before training: {REGRESSION}")


def test_in_exports(runs: tuple[RunFiles, RunFiles]) -> None:
    with HistoryStore(load_site().database_url) as store:
        gained, fell = (queries.show_run(store, run.run_id) for run in runs)
    assert [mlflow.facts(shown)["regressed"] for shown in (gained, fell)] == [
        "",
        f"the model is worse than before training: {REGRESSION}",
    ]
    assert ["regressed" in wandb.tags(shown) for shown in (gained, fell)] == [False, True]


@pytest.mark.parametrize("which", [0, 1])
def test_in_the_end_of_the_flow_run(runs: tuple[RunFiles, RunFiles], which: int) -> None:
    """In the message of the flow run's state, of which Prefect shows one line in its lists."""
    message = ended_well(runs[which].dir).message
    assert message == f"run {runs[which].run_id} completed" + (
        f"; the model is worse than before training: {REGRESSION}" if which else ""
    )
