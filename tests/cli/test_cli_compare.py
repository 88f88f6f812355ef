"""``rlhf compare``: differences between runs, as text, as JSON, and as a page."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from history_tools import RunFiles, ingested, whole_run
from html_pages import assert_self_contained
from process_tools import Rlhf
from signing_in import chromium

from rlhf_core.cli.commands.compare import sparklines
from rlhf_core.cli.main import execute
from rlhf_core.config.site import load_site
from rlhf_core.files.whole import write_model
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.compare import at_last_common_step, config_differences, evaluations

pytestmark = pytest.mark.usefixtures("plots_drawn_once")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two runs: A went back twice and was evaluated; B has a different learning rate and four steps so far."""
    monkeypatch.setenv("COLUMNS", "140")
    site = load_site()
    first = whole_run(site.runs_dir)
    second = RunFiles(site.runs_dir, "sort", "bbbbbb", 100)
    stored = second.dir.read_spec()
    changed = stored.spec.model_copy(
        update={"seed": 8, "loops": stored.spec.loops.model_copy(update={"warm_start": None})}
    )
    write_model(second.dir.spec, stored.model_copy(update={"spec": changed}))
    second.created()
    for step in (1, 2, 3, 4):
        second.metrics(1, 0, step, 100 + 2 * step, **{"reward/mean": 0.1 * step})
    second.evaluation("after", "greedy", 0.5, 120)
    return ingested(first).run_id, ingested(second).run_id


def _json(rlhf: Rlhf, *arguments: str) -> Any:
    return rlhf("compare", *arguments, "--json").json()


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_for_programs(two: tuple[str, str], rlhf: Rlhf) -> None:
    found = _json(rlhf, *two)
    assert [(run["label"], run["run_id"]) for run in found["runs"]] == [("A", two[0]), ("B", two[1])]
    assert found["runs"][0]["incidents"] == {"worker_killed": 1, "node_lost": 1}
    assert (found["runs"][0]["productive_s"], found["runs"][0]["last_step"], found["runs"][1]["last_step"]) == (
        20.0,
        10,
        4,
    )
    assert found["config"] == [
        {"setting": "loops.warm_start.num_steps", "values": [2, 0]},
        {"setting": "seed", "values": [7, 8]},
    ]
    (greedy,) = [row for row in found["evaluations"] if row["name"] == "greedy"]
    assert greedy["runs"][0]["gain"] == pytest.approx(0.18)
    assert [row["against_first"] for row in greedy["runs"]] == [None, "lower"]
    metrics = {row["key"]: row for row in found["metrics"]}
    loss = metrics["train/loss"]
    assert (loss["step"], loss["note"]) == (4, "")
    assert loss["values"] == pytest.approx([1.35, 1.25])  # for A, the one of its second start
    assert metrics["reward/mean"] == {
        "key": "reward/mean",
        "step": None,
        "values": [None, pytest.approx(0.4)],
        "note": "",
    }
    assert [step for step, _ in found["curves"]["train/loss"][0]] == list(range(1, 11))


def test_for_people(two: tuple[str, str], rlhf: Rlhf) -> None:
    text = rlhf("compare", *two).stdout
    assert max(map(len, text.splitlines())) <= 140
    for message in (
        *two,
        "worker killed x 1",
        "loops.warm_start.num_steps",
        "0.930 [0.880, 0.980]",
        "lower",
        "▁",
        "train/loss",
    ):
        assert message in text, message


def test_the_first_run_is_the_reference_for_the_others(two: tuple[str, str], rlhf: Rlhf) -> None:
    found = _json(rlhf, two[1], two[0])
    (greedy,) = [row for row in found["evaluations"] if row["name"] == "greedy"]
    assert [row["against_first"] for row in greedy["runs"]] == [None, "higher"]


def test_metrics_are_chosen(two: tuple[str, str], rlhf: Rlhf) -> None:
    found = _json(rlhf, *two, "--metric", "reward/mean", "--metric", "time/step_s")
    assert [row["key"] for row in found["metrics"]] == list(found["curves"]) == ["reward/mean", "time/step_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["last", "last"], "give two or more different runs"),
        (["last"], "give two or more different runs"),
        (["last", "nobody"], "the history has no run 'nobody'"),
        (
            ["A", "B", "--metric", "reward/men"],
            "none of the runs has the metric 'reward/men'; did you mean reward/mean?",
        ),
        (["A", "B", "--open"], "requires --html FILE"),
        (["A", "B", "--html", "/dev/null/page.html"], "choose another file with --html"),
    ],
)
def test_bad_input(two: tuple[str, str], arguments: list[str], message: str, rlhf: Rlhf) -> None:
    names = {"A": two[0], "B": two[1]}
    assert message in rlhf("compare", *(names.get(word, word) for word in arguments), code=2).stderr


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def test_only_settings_that_differ() -> None:
    specs: list[dict[str, Any]] = [
        {"a": {"x": 1, "y": [1, 2]}, "b": None, "c": "s"},
        {"a": {"x": 1, "y": [1, 3]}, "b": None, "c": "s", "d": True},
    ]
    assert config_differences(specs) == [
        {"setting": "a.y", "values": [[1, 2], [1, 3]]},
        {"setting": "d", "values": ["(none)", True]},
    ]
    assert config_differences([specs[0], specs[0]]) == []


def _evaluation(value: float | None, low: float | None, high: float | None, when: str = "after") -> dict[str, Any]:
    return {
        "name": "greedy",
        "metric": "exact_match",
        "when": when,
        "value": value,
        "ci_low": low,
        "ci_high": high,
        "checkpoint_step": 10,
        "num_samples": 512,
    }


@pytest.mark.parametrize(
    ("other", "standing"),
    [
        (_evaluation(0.9, 0.85, 0.95), "higher"),
        (_evaluation(0.1, 0.05, 0.15), "lower"),
        (_evaluation(0.7, 0.6, 0.8), "overlap"),
        (_evaluation(0.9, None, None), None),
        (_evaluation(None, None, None), None),
    ],
)
def test_no_conclusion_goes_beyond_the_intervals(other: dict[str, Any], standing: str | None) -> None:
    (found,) = evaluations([[_evaluation(0.5, 0.4, 0.6)], [other]])
    assert found["runs"][1]["against_first"] == standing
    assert found["runs"][0]["gain"] is None


def _row(algorithm: str, warm_start: int = 0) -> dict[str, Any]:
    return {"algorithm": algorithm, "spec": {"sft": {"num_steps": warm_start}}}


def _steps(*steps: int) -> list[tuple[int, float]]:
    return [(step, step / 10) for step in steps]


@pytest.mark.parametrize(
    ("curves", "runs", "step", "values", "note"),
    [
        ([_steps(1, 2, 3), _steps(1, 2)], [_row("grpo"), _row("grpo")], 2, [0.2, 0.2], ""),
        ([_steps(1, 2, 3), []], [_row("grpo"), _row("grpo")], None, [0.3, None], ""),
        (
            [_steps(1, 3), _steps(2, 4)],
            [_row("grpo"), _row("grpo")],
            None,
            [0.3, 0.4],
            "no step in common: the last value of each",
        ),
        # B is still in its warm start at step 3 and A is not: step 2 is the last comparable one
        ([_steps(1, 2, 3), _steps(1, 2, 3)], [_row("grpo", 2), _row("grpo", 3)], 2, [0.2, 0.2], ""),
        (
            [_steps(1, 2), _steps(1, 2)],
            [_row("sft"), _row("grpo")],
            2,
            [0.2, 0.2],
            "not the same quantity: sft and grpo",
        ),
        ([[(1, 0.1), (2, float("nan"))], _steps(1, 2)], [_row("grpo"), _row("grpo")], 1, [0.1, 0.1], ""),
    ],
)
def test_the_last_common_step(
    curves: Sequence[Any], runs: Sequence[Any], step: int | None, values: list[float | None], note: str
) -> None:
    found = at_last_common_step("train/loss", curves, runs)
    assert found == {"step": step, "values": values, "note": note}


def test_sparklines_share_their_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    rising = [(step, float(step)) for step in range(1, 9)]
    assert sparklines([rising, [(step, 1.0) for step in (5, 6)]]) == ["▁▂▃▄▅▆▇█", "    ▁▁"]
    assert sparklines([[(1, 2.0), (3, 2.0)]]) == ["▅▅▅"]
    assert sparklines([[], []]) == ["", ""]
    assert sparklines([[(1, 1.0), (2, 1.7e308), (3, 2.0)]]) == ["▁▁█"], "beside it, nothing could be seen"
    monkeypatch.setattr("rlhf_core.cli.commands.compare._CURVE_WIDTH", 4)
    assert sparklines([rising, []]) == ["▁▃▆█", ""]


# ---------------------------------------------------------------------------------------------------------------------
# The page


def test_the_page_is_self_contained(two: tuple[str, str], tmp_path: Path, rlhf: Rlhf) -> None:
    path = tmp_path / "page.html"
    assert f"Page: {path}" in rlhf("compare", *two, "--html", str(path)).stdout
    page = path.read_text()
    assert_self_contained(page)
    for message in (*two, "lower than A", "loops.warm_start.num_steps", "node lost × 1", "2 settings differ."):
        assert message in page, message


def test_a_page_of_hostile_names(two: tuple[str, str], tmp_path: Path) -> None:
    from rlhf_core.render.compare import compare
    from rlhf_core.render.compare_page import write_comparison

    with HistoryStore(load_site().database_url) as store:
        compared = compare(store, two)
    compared["config"] = [{"setting": "<script>", "values": ["<b>", "&"]}]
    page = write_comparison(compared, tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_the_page_fits_every_screen(two: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert execute(["compare", *two, "--html", str(path)]) == 0
    colours = {
        "light": {"rgb(37, 99, 201)", "rgb(211, 105, 11)"},
        "dark": {"rgb(110, 163, 247)", "rgb(240, 154, 75)"},
    }
    with chromium() as browser:
        for width, scheme in itertools.product((1280, 390), colours):
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab.goto(path.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator("svg.plot").count() >= 3
            lines = tab.eval_on_selector_all("svg.plot path", "all => all.map(one => getComputedStyle(one).stroke)")
            assert colours[scheme] <= set(lines)
            tab.close()
