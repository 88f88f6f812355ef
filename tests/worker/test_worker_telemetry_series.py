"""Telemetry of a node over time: the written lines and their times."""

import json
from collections.abc import Iterator

import pytest

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import TelemetryLine
from rlhf_core.worker.telemetry.series import TelemetrySeries


@pytest.fixture
def messages() -> list[str]:
    """Messages of the agent."""
    return []


@pytest.fixture
def series(messages: list[str]) -> Iterator[TelemetrySeries]:
    """A series of node n1."""
    made = TelemetrySeries("n1", messages.append)
    yield made
    made.stop(0.0)


def lines(restart_dir: RestartDir) -> list[TelemetryLine]:
    """The written lines."""
    return read_models(restart_dir.telemetry("n1"), TelemetryLine)


def test_a_line_holds_the_means_of_its_period(series: TelemetrySeries, restart_dir: RestartDir) -> None:
    for now_s in range(0, 13, 2):
        series.add(
            restart_dir, {"cpu_percent": now_s * 10.0, "cpu_cores": 4.0, "gpu0_memory_total_gb": 80.0}, float(now_s)
        )
    series.stop(14.0)
    first, rest = lines(restart_dir)
    assert (first.seconds, first.figures) == (10.0, {"cpu_percent": 50.0})
    assert (rest.seconds, rest.figures) == (4.0, {"cpu_percent": 120.0})


def test_a_figure_that_is_not_a_number_does_not_affect_the_others(
    series: TelemetrySeries, restart_dir: RestartDir
) -> None:
    series.add(restart_dir, {"a": float("nan"), "b": 1.0}, 0.0)
    series.add(restart_dir, {"a": 3.0, "b": 2.0}, 10.0)
    series.stop(10.0)
    assert [line.figures for line in lines(restart_dir)] == [{"a": 3.0, "b": 1.5}]


def test_each_restart_gets_its_own_lines(series: TelemetrySeries, restart_dir: RestartDir) -> None:
    later = RunDir(restart_dir.root.parents[3]).attempt(1).restart(1)
    series.add(restart_dir, {"a": 1.0}, 0.0)
    series.add(later, {"a": 9.0}, 4.0)
    series.stop(5.0)
    assert [line.figures for line in lines(restart_dir)] == [{"a": 1.0}]
    assert [line.figures for line in lines(later)] == [{"a": 9.0}]


def test_a_week_is_small(series: TelemetrySeries, restart_dir: RestartDir) -> None:
    """With the figures of a node with eight GPUs, read every ten seconds: no line covers a shorter time."""
    names = ("util_percent", "memory_used_gb", "power_w", "temperature_c", "sm_clock_mhz", "ecc_corrected", "xid")
    figures = {f"gpu{gpu}_{name}": 1234.5678 for gpu in range(8) for name in names}
    figures |= {f"network_received_mb_per_s_{i}": 12.3456 for i in range(16)}
    for now_s in range(0, 7 * 24 * 3600, 10):
        series.add(restart_dir, figures, float(now_s))
    content = restart_dir.telemetry("n1").read_bytes()
    assert 10_000 < content.count(b"\n") < 11_000
    assert len(content) < 30e6


def test_a_failed_write_is_reported_once_and_later_lines_are_written(
    series: TelemetrySeries, messages: list[str], restart_dir: RestartDir
) -> None:
    restart_dir.root.parent.mkdir(parents=True)
    restart_dir.root.write_text("a file where the folder should be")
    for now_s in (0.0, 10.0, 20.0):
        series.add(restart_dir, {"a": 1.0}, now_s)
    series.stop(20.0)
    assert len(messages) == 1
    assert "failed to write telemetry" in messages[0]


def test_a_torn_line_is_closed_off(series: TelemetrySeries, restart_dir: RestartDir) -> None:
    path = restart_dir.telemetry("n1")
    path.parent.mkdir(parents=True)
    path.write_text('{"time": "2026-')
    series.add(restart_dir, {"a": 1.0}, 0.0)
    series.stop(1.0)
    torn, whole = path.read_text().splitlines()
    assert torn == '{"time": "2026-'
    assert json.loads(whole)["figures"] == {"a": 1.0}
