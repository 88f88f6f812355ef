"""The page of a report: its statements about runs of every kind, and its safety as a single file."""

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import records
from html_pages import PageReader, assert_self_contained, read_page
from signing_in import chromium

from rlhf_core.config import loading as config
from rlhf_core.presets import PRESETS
from rlhf_core.render import charts, line_plots, run_page
from rlhf_core.render.config_text import as_toml
from rlhf_core.render.gather import ReportData
from rlhf_core.render.markup import Markup, duration, number, table, tag
from rlhf_core.render.series import Curve
from rlhf_core.schemas.evaluation import EvaluationSample
from rlhf_core.schemas.run import RunSpec

pytestmark = pytest.mark.usefixtures("plots_drawn_once")

RUNS = {"learned": records.learned, "failed": records.failed, "blocked": records.blocked}


def _text(record: ReportData) -> str:
    return " ".join(" ".join(read_page(run_page.page(record)).text).replace("\u00a0", " ").split())


@pytest.mark.parametrize("name", RUNS)
def test_the_page_needs_nothing_from_anywhere_and_ids_are_unique(name: str) -> None:
    assert_self_contained(run_page.page(RUNS[name]()))


def test_a_run_that_learned_says_so() -> None:
    text = _text(records.learned())
    assert "Completed in 2 min 52 s." in text
    assert "Held-out greedy exact match rose from 0.762 to 0.941." in text
    assert "+0.179" in text
    assert "40 warm-start steps, then 80 steps of GRPO" in text
    assert "0.81 M parameters" in text
    assert "torch 2.13.0+cpu" in text
    assert "Learned: wrong before, right after: 5" in text, "completions by what training did to them"
    assert "Wrong both times: 2" in text
    assert "Right both times: 17" in text
    assert "Lost: right before" not in text


def _evaluations(before: tuple[float, float, float], after: tuple[float, float, float]) -> list[dict[str, Any]]:
    common = {"name": "greedy", "metric": "exact_match", "num_samples": 512}
    return [
        {**common, "when": when, "value": value, "ci_low": low, "ci_high": high, "checkpoint_step": step}
        for when, step, (value, low, high) in (("before", 40, before), ("after", 120, after))
    ]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((0.50, 0.46, 0.54), (0.60, 0.56, 0.64), "rose from 0.500 to 0.600."),
        ((0.60, 0.56, 0.64), (0.50, 0.46, 0.54), "fell from 0.600 to 0.500."),
        ((0.50, 0.46, 0.54), (0.53, 0.49, 0.57), "went from 0.500 to 0.530; the confidence intervals overlap."),
    ],
)
def test_no_more_is_claimed_than_the_intervals_allow(
    before: tuple[float, float, float], after: tuple[float, float, float], expected: str
) -> None:
    assert expected in _text(records.learned(evaluations=_evaluations(before, after)))


def test_a_lower_loss_is_a_gain_with_a_chart_of_its_own() -> None:
    scores = _evaluations((0.50, 0.46, 0.54), (0.60, 0.56, 0.64))
    losses = _evaluations((2.0, 1.9, 2.1), (1.5, 1.4, 1.6))
    rows = [*scores, *({**row, "name": "loss", "metric": "cross_entropy"} for row in losses)]
    text = _text(records.learned(evaluations=rows))
    assert "Held-out loss cross entropy fell from 2.000 to 1.500." in text
    assert "The model is worse than before training." not in text
    assert "+0.500" in text
    assert "loss 1.500 at step 120" in run_page.page(records.learned(evaluations=rows))
    assert "Held-out loss" not in _text(records.learned(evaluations=scores))


def test_pass_at_k_has_tiles_and_a_plot_of_its_own() -> None:
    scores = _evaluations((0.50, 0.46, 0.54), (0.60, 0.56, 0.64))
    rows = [*scores, *({**row, "name": f"pass@{k}"} for row in scores for k in (1, 2, 16))]
    text = _text(records.learned(evaluations=rows))
    assert text.index("exact match, pass@2") < text.index("exact match, pass@16")
    assert "Held-out pass@k" in text
    assert "pass@16 0.600 at step 120" in run_page.page(records.learned(evaluations=rows))
    assert "pass@" not in _text(records.learned(evaluations=scores)), "control"


def test_a_failed_run_begins_with_its_diagnosis_and_what_happened() -> None:
    text = _text(records.failed())
    assert "Failed after 40 s: disk full. Rank 0 ran out of disk while writing a checkpoint" in text
    assert "stop (by the controller): it would fail again." in text
    assert text.index("Timeline") < text.index("Gradient norm")


def test_time_in_which_nothing_drove_a_run_is_told_beside_its_times() -> None:
    """Its stages went on meanwhile: they are longer than the run."""
    assert "nothing drove" not in _text(records.learned())
    run = {**records.learned().run, "undriven_s": 773.0}
    assert "12 min 53 s in which nothing drove the run" in _text(records.learned(run=run))


def test_a_resumed_run_that_fails_before_an_attempt_begins_with_its_own_reason() -> None:
    failed = records.failed()
    run = {**failed.run, "message": "preflight: data.paths: rows.jsonl is gone"}
    text = _text(records.failed(run=run))
    assert "Failed after 40 s: preflight: data.paths: rows.jsonl is gone" in text
    assert "disk full" in text, "its incident is still shown"


def test_a_blocked_run_shows_the_finding() -> None:
    text = _text(records.blocked())
    assert "33 prompts per step for 2 ranks" in text
    assert "set grpo.prompts_per_step to a multiple of 2" in text
    assert "No step was made, so there is nothing to draw." in text


NUM_PLOTS = (
    2
    + len(line_plots.SPEED)
    + len([plot for plot in line_plots.LEARNING if "preference" not in (plot.stage, plot.only_with)])
)
"""Plots of a run with a supervised warm start and reinforcement learning."""


def test_what_cannot_be_drawn_is_a_sentence_and_not_a_frame() -> None:
    curves = {name: curve for name, curve in records.curves().items() if name != "policy/kl"}
    page = run_page.page(records.learned(curves=curves))
    assert "Distance from the start (KL): it was not measured; set measure_kl = true" in page
    figures = [name for name, _ in read_page(page).seen if name == "figure"]
    drawings = [name for name, _ in read_page(page).seen if name == "svg"]
    assert len(figures) == len(drawings) == NUM_PLOTS - 1


def test_every_plot_is_drawn_for_a_whole_run_and_the_two_loops_are_told_apart() -> None:
    record = records.learned()
    assert charts.marks_of(record).warm_start_steps == 40
    assert charts.marks_of(record).resumes == (60, 80), "returns to a checkpoint"
    page = run_page.page(record)
    assert page.count("<svg") == NUM_PLOTS
    assert 'class="missing"' not in page
    assert "supervised warm start" in page
    labels = re.findall(r'aria-label="(Loss of [^"]+)"', page)
    assert [label.split(":")[0] for label in labels] == ["Loss of the supervised steps", "Loss of the policy steps"]
    assert "at step 1 to" in labels[0]
    assert "at step 40" in labels[0]
    assert "at step 41 to" in labels[1]


def test_a_run_that_is_only_supervised_has_no_policy_loss() -> None:
    spec = config.load(
        "quickstart", ["loops.main.algorithm.name=sft", "loops.warm_start.num_steps=0", "loops.main.num_steps=80"]
    )
    curves = {name: records.curves(20, 20)[name] for name in ("train/loss", "train/grad_norm")}
    text = _text(records.learned(spec=spec, curves=curves))
    assert "Loss of the policy steps" not in text
    assert "20 steps of SFT" not in text
    assert "80 steps of SFT" in text


def test_a_run_on_pairs_tells_its_loss_from_that_of_its_warm_start() -> None:
    steps = range(1, 91)
    curves: dict[str, Curve] = {
        "train/loss": [(step, 0.5) for step in steps],
        "preference/accuracy": [(step, 0.9) for step in steps if step > 30],
        "preference/margin": [(step, 2.0) for step in steps if step > 30],
    }
    page = run_page.page(records.learned(spec=config.load("dpo"), curves=curves))
    labels = re.findall(r'aria-label="(Loss of [^"]+|Preference[^"]+)"', page)
    assert [label.split(":")[0] for label in labels] == [
        "Loss of the supervised steps",
        "Preferences",
        "Preference margin",
        "Loss of the preference steps",
    ]
    assert "at step 30" in labels[0]
    assert "at step 31 to" in labels[-1]
    assert "measure_kl" not in page, "the algorithm has no such setting"


def test_a_run_on_pairs_alone_says_nothing_of_plots_that_it_cannot_have() -> None:
    curves: dict[str, Curve] = {"train/loss": [(1, 0.7), (2, 0.5)], "train/grad_norm": [(1, math.nan)]}
    text = _text(records.learned(spec=config.load("kto"), curves=curves))
    for wrong in ("Reward:", "Entropy:", "learn from:", "Completion length:", "policy steps", "supervised steps"):
        assert wrong not in text, wrong
    assert "Preferences: the run made no step of preference learning." in text
    assert "Gradient norm: its only value is not finite (NaN or infinite)." in text, "control"


OTHER_PROGRAM = ["model.path=m", "data.train=d"]


def test_the_report_of_another_program_says_nothing_of_loops_that_it_does_not_have() -> None:
    curves = {"train/loss": [(1, 2.0), (9, 1.0)], "preference/margin": [(1, 0.1), (9, 0.2)]}
    record = records.learned(spec=config.load("trl-cpo", OTHER_PROGRAM), curves=curves, samples=())
    page, text = run_page.page(record), _text(record)
    for wrong in (
        "supervised step",
        "policy steps",
        "measure_kl",
        "no step was made",
        "Sampled in training",
        "goodput",
    ):
        assert wrong not in page, wrong
    assert "Preference margin" in text
    assert "Not logged by the trainer: Reward, Distance from the start (KL)" in text
    assert "The trainer logged neither times of its steps nor throughput." in text


def test_times_that_another_program_logs_are_drawn() -> None:
    """Negative control of the test above."""
    curves = {"train/loss": [(1, 2.0), (9, 1.0)], "time/step_s": [(1, 3.0), (9, 3.0)]}
    record = records.learned(spec=config.load("trl-grpo", OTHER_PROGRAM), curves=curves)
    text = _text(record)
    assert "Where the time goes" in text
    assert "goodput" in text
    assert "neither times" not in text


def test_numbers_that_are_not_finite_do_not_break_the_page() -> None:
    curves = {**records.curves(), "train/loss": [(1, math.nan), (2, math.inf), (3, -math.inf)]}
    curves["train/grad_norm"] = [(1, math.nan)]
    text = _text(records.learned(curves=curves))
    assert "NaN" in text
    assert "Loss of the supervised steps: all its 3 values are not finite (NaN or infinite)." in text
    assert "Gradient norm: its only value is not finite (NaN or infinite)." in text
    assert "Loss of the policy steps: the run made no step of reinforcement learning." in text, "control"


def test_what_another_program_logs_is_not_called_missing_because_it_is_not_finite() -> None:
    spec = config.load("trl-cpo", OTHER_PROGRAM)
    curves: dict[str, Curve] = {"train/loss": [(1, math.nan), (2, math.nan)]}
    text = _text(records.learned(spec=spec, curves=curves, samples=()))
    assert "Loss: all its 2 values are not finite (NaN or infinite)." in text
    absent = text.partition("Not logged by the trainer: ")[2].partition(".")[0]
    assert "Reward" in absent
    assert "Loss" not in absent.split(", ")
    every = {key: [(1, 1.0), (2, 2.0)] for plot in line_plots.LEARNING_ELSEWHERE for key, _ in plot.keys}
    assert "Not logged by the trainer" not in _text(records.learned(spec=spec, curves=every, samples=()))


def test_an_evaluation_that_is_not_finite_does_not_break_the_page() -> None:
    rows = [{**row, "value": None, "ci_low": None, "ci_high": None} for row in records.learned().evaluations]
    assert "Held-out scores: no evaluation has a finite score and interval." in _text(records.learned(evaluations=rows))
    assert "Held-out scores: no evaluation was made." in _text(records.learned(evaluations=[], tables={})), "control"


@pytest.mark.parametrize("value", [1.7e308, -1.7e308])
def test_scores_at_the_ends_of_the_numbers_do_not_break_the_page(value: float) -> None:
    rows = [{**row, "value": value, "ci_low": -1.7e308, "ci_high": 1.7e308} for row in records.learned().evaluations]
    assert "Held-out scores: no evaluation has a finite score and interval." in _text(records.learned(evaluations=rows))


def test_a_run_that_goes_on_says_that_it_does() -> None:
    text = _text(records.learned(run={**records.learned().run, "state": "training", "ended_at": None}))
    assert "Not over yet (state training)" in text


def test_an_older_spec_costs_the_settings_only() -> None:
    text = _text(records.learned(spec=None, notes=["The settings are left out."]))
    assert "The settings are left out." in text
    assert "Settings that differ" not in text
    assert "Completed in" in text


# ---------------------------------------------------------------------------------------------------------------------
# Texts of users and models

HOSTILE = '<script>alert("x")</script><img src=x onerror=y>&amp;'


def _hostile_record() -> ReportData:
    base = records.learned()
    sample = EvaluationSample(
        prompt_uid="p", sample_index=0, prompt=HOSTILE, completion=HOSTILE, answer=HOSTILE, score=0.0
    )
    return records.learned(
        run={**base.run, "owner": HOSTILE, "message": HOSTILE, "overrides": [HOSTILE]},
        checks=[{"id": HOSTILE, "status": "warning", "found": HOSTILE, "advice": HOSTILE}],
        incidents=[{**records.INCIDENTS[0], "message": HOSTILE, "evidence_dir": HOSTILE}],
        decisions=[{**records.DECISIONS[0], "reason": HOSTILE, "config_diff": {HOSTILE: HOSTILE}}],
        attempts=[{**base.attempts[0], "message": HOSTILE, "nodes": [HOSTILE]}],
        tables={("before", "greedy"): [sample], ("after", "greedy"): [sample]},
        samples=[line.model_copy(update={"prompt": HOSTILE, "completion": HOSTILE}) for line in base.samples],
        notes=[HOSTILE],
    )


def test_text_of_users_and_models_stays_text() -> None:
    reader = read_page(run_page.page(_hostile_record()))
    assert {name for name, _ in reader.seen} & {"script", "img"} == set()
    assert not any("onerror" in attributes for _, attributes in reader.seen)
    assert " ".join(reader.text).count(HOSTILE) >= 12


def test_a_long_word_does_not_widen_the_page(tmp_path: Path) -> None:
    word = "x" * 3000
    base = records.failed()
    record = records.failed(
        run={**base.run, "message": word},
        incidents=[{**records.INCIDENTS[0], "message": word}],
        decisions=[{**records.DECISIONS[0], "reason": word}],
        notes=[word],
    )
    path = tmp_path / "page.html"
    path.write_text(run_page.page(record), encoding="utf-8")
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1000, "height": 900})
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= 1000


def test_markup_that_is_not_escaped_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.render.markup.markup", lambda value: Markup(value))
    assert "script" in {name for name, _ in _lenient(run_page.page(_hostile_record())).seen}


def _lenient(page: str) -> PageReader:
    reader = PageReader()
    reader.handle_endtag = lambda name: None  # type: ignore[method-assign]
    reader.feed(page)
    return reader


def test_completions_with_scores_that_are_no_shares_are_sorted_by_their_change() -> None:
    """A penalty of zero is the best score, and no completion with it is wrong."""

    def lowered(by: float) -> list[EvaluationSample]:
        scored = records.learned().tables["before", "greedy"]
        return [sample.model_copy(update={"score": sample.score - by}) for sample in scored]

    before, after = lowered(2.25), lowered(1.5)
    text = _text(records.learned(tables={("before", "greedy"): before, ("after", "greedy"): after}))
    assert "Higher score after training: 24" in text
    assert "-2.25" in text
    assert "-1.5" in text
    assert "Scored: 24" in _text(records.learned(tables={("before", "greedy"): before}))
    assert "rong" not in text


def test_losses_are_neither_right_nor_wrong_and_fall_in_training() -> None:
    """Losses below 1 nat look like shares, of which the higher is the better."""

    def losses(*values: float) -> list[EvaluationSample]:
        rows = records.learned().tables["before", "greedy"]
        return [row.model_copy(update={"score": value}) for row, value in zip(rows, values, strict=False)]

    before, after = losses(0.9, 0.8, 0.3), losses(0.3, 0.2, 0.9)
    text = _text(records.learned(tables={("before", "loss"): before, ("after", "loss"): after}))
    assert "Lower loss after training: 2" in text
    assert "Higher loss after training: 1" in text
    assert "Scored: 3" in _text(records.learned(tables={("before", "loss"): before}))
    for word in ("Learned: wrong", "Lost: right", "Higher score"):
        assert word not in text


def test_an_evaluation_without_its_counterpart_is_shown_alone() -> None:
    tables = {("before", "greedy"): records.learned().tables["before", "greedy"]}
    text = _text(records.learned(tables=tables))
    assert "From the greedy evaluation before training; there is no other to compare with." in text
    assert "Wrong: 7" in text


def test_an_empty_completion_is_named_a_long_one_is_cut_and_control_characters_are_shown() -> None:
    base = records.learned()
    lines = [line.model_copy(update={"completion": ""}) for line in base.samples[:1]]
    lines += [line.model_copy(update={"completion": "x" * 1000}) for line in base.samples[1:2]]
    lines += [line.model_copy(update={"completion": "a\x00\x1b[31mb \u202egnp"}) for line in base.samples[2:3]]
    text = _text(records.learned(samples=lines))
    assert "a\\x00\\x1b[31mb \\u202egnp" in text
    assert "empty" in text
    assert "400 characters more" in text


# ---------------------------------------------------------------------------------------------------------------------
# Details


@pytest.mark.parametrize("preset", PRESETS)
def test_settings_are_shown_as_the_toml_that_gives_them(preset: str) -> None:
    spec = config.load(preset)
    for only_set in (False, True):
        assert RunSpec.model_validate(tomllib.loads(as_toml(spec, only_set=only_set))) == spec


def test_settings_that_differ_leave_out_the_defaults() -> None:
    assert "clip_low" not in as_toml(records.SPEC, only_set=True)
    assert "clip_low" in as_toml(records.SPEC)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "–"), (59.4, "59 s"), (192, "3 min 12 s"),
    ],
)  # fmt: skip
def test_durations_are_said_as_people_say_them(seconds: float | None, expected: str) -> None:
    assert duration(seconds).replace("\u00a0", " ") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"), (0, "0"), (120.0, "120"), (0.12345678, "0.1235"), (6412.7, "6,413"), (12.3456, "12.35"),
        (-0.5, "-0.5"), (1e-9, "1e-09"), (math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "−∞"),
    ],
)  # fmt: skip
def test_numbers_are_short(value: float | None, expected: str) -> None:
    assert number(value) == expected


def test_attributes_are_escaped_too() -> None:
    assert tag("i", "a<b", title='"><script>') == '<i title="&quot;&gt;&lt;script&gt;">a&lt;b</i>'


def test_columns_of_numbers_are_right_aligned() -> None:
    shown = table(["name", "value"], [["a", 1.5], ["b", None]])
    assert shown.count('class="number"') == 3
