"""Findings from the telemetry of all nodes, each with a control without findings."""

import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from unittest import mock

import pytest

from rlhf_core.diagnosis.telemetry import outliers
from rlhf_core.diagnosis.telemetry.imbalance import JUDGE_EVERY_S, STEPS_QUIET_S, WINDOW_S, ImbalanceWatch
from rlhf_core.diagnosis.telemetry.outliers import Values

PERIOD_S = 2.0
NODES = ("node1", "node2", "node3", "node4")
STEP_S = 8.0

Figures = dict[str, float]
Fault = Callable[[str, float, Figures], None]
"""Function that changes the figures of a node at a given second."""


def healthy(chance: random.Random, now_s: float) -> Figures:
    """Telemetry of a node with GPUs that sample half of the time and train the other half, with realistic jitter."""
    trains = now_s % STEP_S > STEP_S / 2
    found = {
        "cpu_percent": chance.gauss(50, 15),
        "cpu_cores": 8.0,
        "workers_cpu_percent": chance.gauss(350, 60),
        "network_received_mb_per_s": chance.expovariate(1 / 300),
        "network_sent_mb_per_s": chance.expovariate(1 / 300),
        "loopback_mb_per_s": chance.expovariate(1 / 50),
    }
    for index in range(2):
        found |= {
            f"gpu{index}_util_percent": min(100.0, chance.gauss(97, 3)) if trains else max(0.0, chance.gauss(30, 25)),
            f"gpu{index}_power_w": chance.gauss(600 if trains else 250, 40),
            f"gpu{index}_power_limit_w": 700.0,
            f"gpu{index}_sm_clock_mhz": chance.gauss(1900, 60),
            f"gpu{index}_temperature_c": chance.gauss(68, 3),
            f"gpu{index}_temperature_slowdown_c": 90.0,
            f"gpu{index}_ecc_uncorrected": 4.0,
            f"gpu{index}_ecc_corrected": 12.0,
            f"gpu{index}_throttle_thermal": 0.0,
            f"gpu{index}_throttle_power_brake": 0.0,
        }
    return found


def watch_job(
    minutes: float,
    fault: Fault = lambda node, now_s, figures: None,
    *,
    step: Callable[[float], int] = lambda now_s: int(now_s // STEP_S),
    nodes: Iterable[str] = NODES,
    seed: int = 0,
    watch: ImbalanceWatch | None = None,
    begin_s: float = 0.0,
) -> tuple[ImbalanceWatch, set[str]]:
    """Run a job under a watch; return the watch and every finding."""
    chance, watch, ever = random.Random(seed), watch or ImbalanceWatch(), set()
    for reading in range(int(minutes * 60 / PERIOD_S)):
        now_s = begin_s + reading * PERIOD_S
        for node in nodes:
            figures = healthy(chance, now_s)
            fault(node, now_s, figures)
            watch.add(node, figures, step(now_s), now_s)
            ever |= set(watch.findings())
    return watch, ever


def on_node3(changes: Mapping[str, float]) -> Fault:
    def fault(node: str, now_s: float, figures: Figures) -> None:
        if node == "node3":
            figures |= changes

    return fault


def test_healthy_jitter_is_no_finding() -> None:
    """Negative control of all other tests: half an hour each with different seeds, without a finding."""
    for seed in range(4):
        _, ever = watch_job(30, seed=seed)
        assert ever == set()


def test_nodes_without_gpus_are_compared_too_and_healthy_ones_are_not_found() -> None:
    def no_gpus(node: str, now_s: float, figures: Figures) -> None:
        for name in [name for name in figures if name.startswith("gpu")]:
            del figures[name]

    _, ever = watch_job(10, no_gpus)
    assert ever == set()

    def foreign_work(node: str, now_s: float, figures: Figures) -> None:
        no_gpus(node, now_s, figures)
        if node == "node2":
            figures["cpu_percent"] = 99.0

    watch, _ = watch_job(10, foreign_work)
    (found,) = watch.findings()
    assert "node2 is an outlier: its processor use is 99 %" in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu1_util_percent": 15.0}, "GPU 1 of node3 is an outlier: its utilisation is 15 %"),
        ({"gpu1_power_w": 150.0}, "GPU 1 of node3 is an outlier: its power is 150 W"),
        ({"gpu1_sm_clock_mhz": 900.0}, "GPU 1 of node3 is an outlier: its clock is 900 MHz"),
        ({"network_received_mb_per_s": 3.0, "network_sent_mb_per_s": 3.0}, "node3 is an outlier: its network traffic"),
        ({"workers_cpu_percent": 20.0}, "node3 is an outlier: its processor use by its workers is 2 %"),
        ({"gpu0_temperature_c": 89.0}, "GPU 0 of node3 has 89 °C and throttles at 90 °C"),
        ({"gpu0_throttle_thermal": 1.0}, "GPU 0 of node3 is throttled because of heat 100% of the time"),
        ({"gpu0_throttle_power_brake": 1.0}, "GPU 0 of node3 is throttled because of its power supply"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_stands_out_is_found_and_named_and_nothing_else(changes: Figures, words: str) -> None:
    watch, ever = watch_job(10, on_node3(changes))
    (found,) = watch.findings()
    assert words in found
    assert ever == {found}, "one sentence, always in the same words"


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu1_util_percent": 50.0},
        {"gpu1_power_w": 380.0},
        {"gpu1_sm_clock_mhz": 1750.0},
        {"gpu0_temperature_c": 84.0},
        {"cpu_percent": 70.0},
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_difference_below_the_floor_is_not_worth_a_word(changes: Figures) -> None:
    """Negative control of the test before: the same figures with smaller differences."""
    _, ever = watch_job(10, on_node3(changes))
    assert ever == set()


def test_loopback_is_never_compared() -> None:
    """Nodes of a throw-away cluster share one machine and its loopback."""
    _, ever = watch_job(10, on_node3({"loopback_mb_per_s": 9000.0}))
    assert ever == set()


def test_a_short_burst_is_forgiven() -> None:
    """Shorter than the window, for instance a checkpoint written by only one node."""

    def burst(node: str, now_s: float, figures: Figures) -> None:
        if node == "node1" and 300 <= now_s < 330:
            figures["gpu0_util_percent"] = 0.0
            figures["cpu_percent"] = 100.0

    _, ever = watch_job(12, burst)
    assert ever == set()


def test_a_finding_ends_when_its_cause_does() -> None:
    watch, _ = watch_job(10, on_node3({"gpu1_util_percent": 15.0}))
    assert watch.findings()
    watch_job(10, watch=watch, begin_s=600.0, step=lambda now_s: 1000 + int(now_s))
    assert watch.findings() == ()


def test_between_the_two_thresholds_a_finding_neither_begins_nor_ends() -> None:
    """Hysteresis: without it, the finding would flicker at 72 % of the hardware's limit less its margin."""
    between = on_node3({"gpu0_temperature_c": 85.0})
    assert watch_job(10, between)[1] == set()
    watch, _ = watch_job(10, on_node3({"gpu0_temperature_c": 89.0}))
    watch_job(10, between, watch=watch, begin_s=600.0, step=lambda now_s: 1000 + int(now_s))
    assert len(watch.findings()) == 1


def test_too_few_readings_say_nothing() -> None:
    _, ever = watch_job(28 / 60, on_node3({"gpu1_util_percent": 0.0, "cpu_percent": 0.0}))
    assert ever == set()


def test_of_two_nodes_neither_is_an_outlier() -> None:
    def slow(node: str, now_s: float, figures: Figures) -> None:
        if node == "node2":
            figures["cpu_percent"] = 0.0

    assert watch_job(10, slow, nodes=("node1", "node2"))[1] == set()
    assert watch_job(10, slow, nodes=("node1", "node2", "node3"))[1], "control: with a third it is"


def test_where_half_do_other_work_none_is_an_outlier() -> None:
    def roles(node: str, now_s: float, figures: Figures) -> None:
        if node in ("node1", "node2"):
            figures |= {"gpu0_util_percent": 5.0, "gpu1_util_percent": 5.0, "cpu_percent": 99.0}

    assert watch_job(10, roles)[1] == set()


# ---------------------------------------------------------------------------------------------------------------------
# Broken hardware


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu1_ecc_uncorrected": 5.0}, "GPU 1 of node3 had 1 memory errors that ECC could not correct"),
        ({"gpu1_xid": 79.0}, "GPU 1 of node3 reported XID 79, a fault of the hardware or driver. See dmesg on node3"),
        ({"gpu1_xid": 31.0}, "XID 31, which a faulty program can also cause"),
        ({"gpu1_lost": 1.0}, "GPU 1 of node3 no longer responds"),
    ],
)
def test_broken_hardware_is_found_at_once_and_stays(changes: Figures, words: str) -> None:
    def later(node: str, now_s: float, figures: Figures) -> None:
        if node == "node3" and 60 <= now_s <= 60 + 2 * JUDGE_EVERY_S:
            figures |= changes

    watch, ever = watch_job(5, later)
    assert [words in text for text in ever] == [True]
    assert watch.findings() == tuple(ever), "it happened, and the finding stays"


def test_errors_from_before_the_job_are_not_held_against_a_gpu() -> None:
    _, ever = watch_job(5, on_node3({"gpu1_ecc_uncorrected": 44.0, "gpu1_ecc_corrected": 5000.0}))
    assert ever == set()


def test_many_corrected_errors_are_worth_a_look_and_a_few_are_not() -> None:
    def growing(per_second: float) -> Fault:
        def fault(node: str, now_s: float, figures: Figures) -> None:
            if node == "node3":
                figures["gpu1_ecc_corrected"] = per_second * now_s

        return fault

    watch, _ = watch_job(5, growing(2.0))
    assert ["corrected by ECC" in text for text in watch.findings()] == [True]
    assert watch_job(5, growing(0.1))[1] == set()


# ---------------------------------------------------------------------------------------------------------------------
# 100 % busy, no progress

STOPS_AT_S = 300.0


def stops(now_s: float) -> int:
    """Last step at this time; steps advance until :data:`STOPS_AT_S`."""
    return int(min(now_s, STOPS_AT_S) // STEP_S)


def all_at(util: float, power: float, *, but: str = "") -> Fault:
    """Fault from :data:`STOPS_AT_S` on: every GPU has this utilisation and power; those of node ``but`` are idle."""

    def fault(node: str, now_s: float, figures: Figures) -> None:
        if now_s > STOPS_AT_S:
            for index in range(2):
                figures[f"gpu{index}_util_percent"] = 0.0 if node == but else util
                figures[f"gpu{index}_power_w"] = 70.0 if node == but else power

    return fault


def spins(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if "spin" in text]


def test_busy_gpus_with_little_power_and_no_progress_spin_in_a_collective() -> None:
    watch, _ = watch_job(8, all_at(100.0, 180.0), step=stops)
    (found,) = spins(watch.findings())
    assert "8 of 8 GPUs are 100 % busy" in found
    assert "(step 37)" in found


def test_the_node_that_does_not_wait_is_named() -> None:
    watch, _ = watch_job(8, all_at(100.0, 180.0, but="node2"), step=stops)
    (found,) = spins(watch.findings())
    assert found.endswith("Not waiting: GPU 0 of node2, GPU 1 of node2")


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        (all_at(100.0, 560.0), stops),
        (all_at(40.0, 180.0), stops),
        (all_at(100.0, 180.0), lambda now_s: int(now_s // STEP_S)),
        (all_at(100.0, 180.0), lambda now_s: int(now_s // (STEPS_QUIET_S * 0.8))),
    ],
    ids=["a long step at full power", "idle", "steps go on", "steps go on, slowly"],
)
def test_work_is_not_called_spinning(fault: Fault, step: Callable[[float], int]) -> None:
    """Negative controls: each lacks one of the three signs."""
    assert spins(watch_job(12, fault, step=step)[1]) == []


def test_beats_are_progress_where_there_are_no_steps() -> None:
    """An evaluation generates for minutes at one step, at full utilisation and little power."""
    for beats_go_on in (True, False):
        watch, chance = ImbalanceWatch(), random.Random(0)
        for reading in range(240):
            now_s = reading * PERIOD_S
            for node in NODES:
                figures = healthy(chance, now_s) | {"gpu0_util_percent": 100.0, "gpu1_util_percent": 100.0}
                figures |= {"gpu0_power_w": 150.0, "gpu1_power_w": 150.0}
                watch.add(node, figures, 40, now_s, beats=reading if beats_go_on else 7)
        assert bool(spins(watch.findings())) is not beats_go_on


def test_a_learned_wait_between_steps_is_not_called_spinning() -> None:
    """In a run with steps of five minutes, most of it waiting, this is normal."""
    slow = 100.0
    _, ever = watch_job(30, all_at(100.0, 180.0), step=lambda now_s: int(now_s // slow))
    assert spins(ever) == []


def test_the_memory_is_bounded_by_the_window() -> None:
    watch, _ = watch_job(20)
    readings = WINDOW_S / PERIOD_S + 1
    assert max(len(kept) for kept in watch._nodes.values()) <= readings
    assert max(len(kept) for kept in watch._gpus.values()) <= readings


@pytest.mark.parametrize("size", [2, 3, 4, 9, 10])
def test_every_unit_is_compared_with_the_median_of_the_others(size: int) -> None:
    chance = random.Random(size)
    for _ in range(50):
        units = [float(chance.randint(0, 6)) for _ in range(size)]
        values = Values(units)
        for at, value in enumerate(units):
            others = units[:at] + units[at + 1 :]
            middle = statistics.median(others)
            spread = statistics.median(abs(other - middle) for other in others)
            assert values.others(value) == (middle, spread)


def test_a_comparison_of_all_units_sorts_a_handful_of_times() -> None:
    """With a sort for every unit, 8,192 GPUs take minutes of every ten seconds, in the thread that finds hangs."""
    chance = random.Random(0)
    values = Values(chance.gauss(600, 40) for _ in range(1001))
    with mock.patch.object(outliers, "sorted", side_effect=sorted, create=True) as sorting:
        for value in tuple(values._sorted):
            values.others(value)
    assert sorting.call_count == 3, "one for each median that differs"
