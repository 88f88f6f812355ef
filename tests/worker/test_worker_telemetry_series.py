"""Telemetry of a node over time: the written lines and their times; no thread waits for the file system."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import TelemetryLine
from rlhf_core.worker.telemetry import series as telemetry_series
from rlhf_core.worker.telemetry.series import TelemetrySeries


@pytest.fixture
def place(tmp_path: Path) -> RestartDir:
    """The folder of a restart."""
    return RunDir(tmp_path / "run").attempt(1).restart(0)


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


def lines(place: RestartDir) -> list[TelemetryLine]:
    """The written lines."""
    return read_models(place.telemetry("n1"), TelemetryLine)


def test_a_line_holds_the_means_of_its_period(series: TelemetrySeries, place: RestartDir) -> None:
    for now_s in range(0, 13, 2):
        series.add(place, {"cpu_percent": now_s * 10.0, "cpu_cores": 4.0, "gpu0_memory_total_gb": 80.0}, float(now_s))
    series.stop(14.0)
    first, rest = lines(place)
    assert (first.seconds, first.figures) == (10.0, {"cpu_percent": 50.0})
    assert (rest.seconds, rest.figures) == (4.0, {"cpu_percent": 120.0})


def test_a_figure_that_is_not_a_number_does_not_affect_the_others(series: TelemetrySeries, place: RestartDir) -> None:
    series.add(place, {"a": float("nan"), "b": 1.0}, 0.0)
    series.add(place, {"a": 3.0, "b": 2.0}, 10.0)
    series.stop(10.0)
    assert [line.figures for line in lines(place)] == [{"a": 3.0, "b": 1.5}]


def test_each_restart_gets_its_own_lines(series: TelemetrySeries, place: RestartDir) -> None:
    later = RunDir(place.root.parents[3]).attempt(1).restart(1)
    series.add(place, {"a": 1.0}, 0.0)
    series.add(later, {"a": 9.0}, 4.0)
    series.stop(5.0)
    assert [line.figures for line in lines(place)] == [{"a": 1.0}]
    assert [line.figures for line in lines(later)] == [{"a": 9.0}]


def test_a_week_is_small(series: TelemetrySeries, place: RestartDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the figures of a node with eight GPUs, read every ten seconds: no line covers a shorter time."""
    monkeypatch.setattr(series, "_lines", written := _Collected())
    names = ("util_percent", "memory_used_gb", "power_w", "temperature_c", "sm_clock_mhz", "ecc_corrected", "xid")
    figures = {f"gpu{gpu}_{name}": 1234.5678 for gpu in range(8) for name in names}
    figures |= {f"network_received_mb_per_s_{i}": 12.3456 for i in range(16)}
    for now_s in range(0, 7 * 24 * 3600, 10):
        series.add(place, figures, float(now_s))
    size = sum(len(line.model_dump_json()) + 1 for _, line in written.items)
    assert 10_000 < len(written.items) < 11_000
    assert size < 30e6


class _Collected:
    """Stand-in for the queue that collects its items."""

    def __init__(self) -> None:
        self.items: list[tuple[RestartDir, TelemetryLine]] = []

    def put_nowait(self, item: tuple[RestartDir, TelemetryLine] | None) -> None:
        if item is not None:
            self.items.append(item)


def test_an_unresponsive_file_system_blocks_no_thread(
    messages: list[str], place: RestartDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = threading.Event()
    original = telemetry_series.LineWriter

    def stuck(path: Path, log: Callable[[str], None]) -> telemetry_series.LineWriter:
        away.wait()
        return original(path, log)

    monkeypatch.setattr(telemetry_series, "LineWriter", stuck)
    series = TelemetrySeries("n1", messages.append)
    for reading in range(3 * telemetry_series._MOST_WAITING):  # hangs here if anything waits
        series.add(place, {"a": 1.0}, reading * 10.0)
    away.set()
    series._lines.put(None)
    series._thread.join()
    assert telemetry_series._MOST_WAITING <= len(lines(place)) < 2 * telemetry_series._MOST_WAITING


def test_a_failed_write_is_reported_once_and_later_lines_are_written(
    series: TelemetrySeries, messages: list[str], place: RestartDir
) -> None:
    place.root.parent.mkdir(parents=True)
    place.root.write_text("a file where the folder should be")
    for now_s in (0.0, 10.0, 20.0):
        series.add(place, {"a": 1.0}, now_s)
    while not messages:
        series._thread.join(0.01)
    series.stop(20.0)
    assert len(messages) == 1
    assert "failed to write telemetry" in messages[0]


def test_a_torn_line_is_closed_off(series: TelemetrySeries, place: RestartDir) -> None:
    path = place.telemetry("n1")
    path.parent.mkdir(parents=True)
    path.write_text('{"time": "2026-')
    series.add(place, {"a": 1.0}, 0.0)
    series.stop(1.0)
    torn, whole = path.read_text().splitlines()
    assert torn == '{"time": "2026-'
    assert json.loads(whole)["figures"] == {"a": 1.0}
