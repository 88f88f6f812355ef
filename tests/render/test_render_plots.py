"""Drawings: the numbers behind them, and SVG that can share a page with other drawings."""

import math
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from rlhf_core.render import plots
from rlhf_core.render.series import Marks, Point, PointSeries, Series

CURVE = [(step, 0.5 + step / 1000) for step in range(1, 121)]
MARKS = Marks(last_step=120, warm_start_steps=40, checkpoints=(40, 80), incidents=(77,), resumes=(60,))


def _parsed(svg: str) -> ElementTree.Element:
    """The drawing as XML; links in it need a declared namespace, which HTML does not require."""
    return ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1))


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in _parsed(svg).iter("text")]


def _line(curve: plots.Curve = CURVE, **options: object) -> str:
    settings: dict[str, object] = {"unit": "nats per token", "marks": MARKS, "name": "kl", "description": "a & b"}
    return plots.line_chart([Series("KL", curve)], **{**settings, **options})  # type: ignore[arg-type]


def test_thin_keeps_short_curves_and_averages_long_ones() -> None:
    assert plots.thin(CURVE, 200) == CURVE
    thinned = plots.thin([(step, float(step)) for step in range(1, 1001)], 100)
    assert len(thinned) == 100
    assert thinned[0] == (5.5, 5.5)
    assert sum(value for _, value in thinned) / 100 == pytest.approx(500.5)


def test_rolling_mean_is_the_mean_of_the_neighbours() -> None:
    curve = [(1, 1.0), (2, 2.0), (3, 6.0), (4, 3.0)]
    assert plots.rolling_mean(curve, 3) == [(1, 1.5), (2, 3.0), (3, pytest.approx(11 / 3)), (4, 4.5)]
    assert plots.rolling_mean(curve, 1) == curve


def test_a_huge_value_changes_no_mean_but_those_of_its_neighbours() -> None:
    curve = [(step, 1e20 if step == 10 else 0.5) for step in range(1, 61)]
    means = plots.rolling_mean(curve, 9)
    assert [value for step, value in means if abs(step - 10) > 4] == [0.5] * 51
    assert {value for step, value in means if abs(step - 10) <= 4} == {1e20 / 9}
    for window in (3, 5, 61, 99):
        for num_points in range(1, 14):
            part = [(step, float(step * step)) for step in range(num_points)]
            around = ([v for s, v in part if abs(s - step) <= window // 2] for step in range(num_points))
            assert [value for _, value in plots.rolling_mean(part, window)] == [
                sum(near) / len(near) for near in around
            ]


@pytest.mark.parametrize("curve", [[(1, 1.7e308)], [(1, 1e300), (2, -1e300)], [(1, 5e-324)]])
def test_values_at_the_ends_of_the_numbers_break_no_drawing(curve: plots.Curve) -> None:
    assert "<path" in _line(curve)


@pytest.mark.parametrize(("num_points", "window"), [(1, 1), (29, 1), (30, 5), (80, 5), (120, 9), (600, 41)])
def test_smoothing_window_is_odd_and_grows(num_points: int, window: int) -> None:
    assert plots.smoothing_window(num_points) == window


def test_axes_are_labelled_with_units() -> None:
    texts = _texts(_line())
    assert "nats per token" in texts
    assert "optimizer step" in texts


def test_a_single_step_is_drawn() -> None:
    assert "<path" in _line([(3, 0.5)])


def test_points_that_are_not_finite_are_left_out() -> None:
    broken = [(step, math.nan if step % 2 else value) for step, value in CURVE]
    assert _line(broken).lower().count("nan") == 0


def test_a_warm_start_an_incident_and_checkpoints_are_seen() -> None:
    def uses(svg: str, variable: str) -> bool:
        return f"var(--{variable})" in svg

    assert uses(_line(), "warm-start")
    assert uses(_line(), "bad")
    calm = Marks(last_step=120)
    assert not uses(_line(marks=calm), "warm-start")
    assert not uses(_line(marks=calm), "bad")


def test_marks_outside_of_the_axis_are_left_out() -> None:
    assert "var(--bad)" not in _line(span=(1, 40))
    assert "var(--bad)" in _line(span=(41, 120))


def test_only_names_of_colours_are_left() -> None:
    drawn = [
        _line(),
        plots.stacked_chart([Series("train", CURVE)], unit="s", marks=MARKS, name="t", description=""),
        plots.point_chart(
            [PointSeries("greedy", (Point(40, 0.7, 0.6, 0.8), Point(120, 0.9, 0.8, 0.95)), ((80, 0.8),))],
            unit="exact match",
            marks=MARKS,
            name="p",
            description="",
        ),
    ]
    for svg in drawn:
        assert re.findall(r"#[0-9a-fA-F]{6}\b", svg) == []


def test_a_value_rounded_to_outside_its_interval_is_drawn() -> None:
    """Records of earlier versions: the value of equal scores was a sum, and its interval was around their mean."""
    points = (Point(40, sum([0.1] * 512) / 512, 0.1, 0.1), Point(120, 0.1, 0.10000000000000002, 0.2))
    svg = plots.point_chart([PointSeries("greedy", points)], unit="score", marks=MARKS, name="p", description="")
    assert "greedy" in _texts(svg)


def _assert_marks_are_within_the_axis(svg: str) -> None:
    """Those of the legend are above it."""
    root = _parsed(svg)
    (axis,) = root.iterfind(".//clipPath/rect")
    left, top, width, height = (float(axis.attrib[name]) for name in ("x", "y", "width", "height"))
    places = [
        (float(use.attrib["x"]), float(use.attrib["y"]))
        for use in root.iter("use")
        if "--series-" in use.attrib.get("style", "")
    ]
    assert any(y > top for _, y in places)
    assert all(left < x < left + width and y < top + height for x, y in places)


def test_scores_below_zero_are_on_the_axis() -> None:
    points = (Point(40, -0.3, -0.35, -0.25), Point(120, -0.1, -0.15, -0.05))
    svg = plots.point_chart([PointSeries("greedy", points)], unit="penalty", marks=MARKS, name="p", description="")
    _assert_marks_are_within_the_axis(svg)


def test_no_point_of_seven_runs_is_cut_off() -> None:
    """Points at one step are offset sideways."""
    points = (Point(0, 0.3, 0.2, 0.4), Point(120, 0.4, 0.3, 0.5))
    runs = [PointSeries(label, points) for label in "ABCDEFG"]
    _assert_marks_are_within_the_axis(plots.point_chart(runs, unit="score", marks=MARKS, name="p", description=""))


def test_parts_of_a_whole_may_lack_steps() -> None:
    parts = [Series("train", CURVE), Series("checkpoint", [(20, 0.3), (40, 0.3)])]
    svg = plots.stacked_chart(parts, unit="seconds per step", marks=MARKS, name="time", description="")
    assert {"train", "checkpoint"} <= set(_texts(svg))


def test_drawings_of_one_page_share_no_ids() -> None:
    def ids(svg: str) -> list[str]:
        return [element.attrib["id"] for element in _parsed(svg).iter() if "id" in element.attrib]

    first, second = ids(_line(name="one")), ids(_line(name="two"))
    assert first
    assert len(set(first + second)) == len(first) + len(second)


def test_every_reference_inside_a_drawing_has_its_target() -> None:
    svg = _line()
    used = set(re.findall(r"""(?:url\(#|href="#)([^)"]+)""", svg))
    assert used
    assert used == set(re.findall(r' id="([^"]+)"', svg))


def test_a_drawing_carries_a_description_and_no_address() -> None:
    svg = _line()
    assert 'aria-label="a &amp; b"' in svg
    assert "http" not in svg


def test_the_same_numbers_give_the_same_drawing() -> None:
    """Also with other settings of the user, as from a ``matplotlibrc`` in the current folder."""
    expected = _line()
    assert _line() == expected
    with matplotlib.rc_context({"lines.dash_capstyle": "round", "axes.titlesize": 30, "axes.xmargin": 0.4,
                                "xtick.direction": "in", "font.size": 20, "savefig.bbox": "tight"}):  # fmt: skip
        assert _line() == expected


def test_a_long_run_stays_small() -> None:
    svg = _line([(step, math.sin(step)) for step in range(1, 100_001)])
    assert len(svg) < 80_000


def test_a_power_of_ten_is_not_written_under_the_legend() -> None:
    points = (Point(40, -123456.0, -124456.0, -122456.0),)
    texts = _texts(plots.point_chart([PointSeries("A", points)], unit="score", marks=MARKS, name="p", description=""))
    assert "score, in 1e5" in texts
    assert "1e5" not in texts


def test_a_curve_keeps_its_colour_if_another_one_is_missing() -> None:
    svg = plots.line_chart([Series("C", CURVE, 2)], unit="mean", marks=MARKS, name="c", description="c")
    assert "var(--series-3)" in svg
    assert "var(--series-1)" not in svg


def test_no_line_joins_the_two_loops() -> None:
    def lines(warm_start_steps: int) -> int:
        svg = _line(CURVE[::6], marks=Marks(last_step=120, warm_start_steps=warm_start_steps))
        return len(re.findall(r'<path d="[^"]+" clip-path="[^"]+" style="fill: none; stroke: var\(--series-1\)', svg))

    assert lines(0) == 1
    assert lines(40) == 2
