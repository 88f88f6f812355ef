"""Figures that are about equal on all nodes and GPUs of a healthy job, and deviations from them."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

MAD_FACTOR = 5.0
"""Threshold of the deviation from the median of the others, in robust standard deviations."""

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, of a normal distribution."""

NOISE_FACTOR = 6.0
"""Threshold in standard errors of the unit's own mean, which fluctuates if the figure is bursty."""

STAYS_AT = 0.7
"""Share of a threshold above which a finding persists."""


@dataclass(frozen=True)
class Comparison:
    """Figure that is about equal on all nodes of a healthy job."""

    name: str
    """Name of the compared figure."""
    unit: str
    floor: float
    """Minimum difference that is reported, in ``unit``."""
    share: float
    """Minimum difference that is reported, as a share of the median."""
    read: Callable[[Mapping[str, float]], float | None]
    """Extract the figure from one reading; None if it is missing."""
    advice: str
    """Advice for the user."""


def _sum_of(*names: str) -> Callable[[Mapping[str, float]], float | None]:
    def read(telemetry: Mapping[str, float]) -> float | None:
        known = [telemetry[name] for name in names if name in telemetry]
        return sum(known) if known else None

    return read


def _per_core(telemetry: Mapping[str, float]) -> float | None:
    share, cores = telemetry.get("workers_cpu_percent"), telemetry.get("cpu_cores")
    return share / cores if share is not None and cores else None


NODES = (
    Comparison(
        name="processor use",
        unit="%",
        floor=25.0,
        share=0.3,
        read=_sum_of("cpu_percent"),
        advice="Check for other processes there, or for work that only this node does",
    ),
    Comparison(
        name="processor use by its workers",
        unit="%",
        floor=25.0,
        share=0.3,
        read=_per_core,
        advice="Check for workers that wait for data, or that do more than their share",
    ),
    Comparison(
        name="network traffic",
        unit="MB/s",
        floor=20.0,
        share=0.5,
        read=_sum_of(
            "network_received_mb_per_s",
            "network_sent_mb_per_s",
            "infiniband_received_mb_per_s",
            "infiniband_sent_mb_per_s",
        ),
        advice="Check for a slow or unused interface there (NCCL_SOCKET_IFNAME, ibstat), or for other transfers",
    ),
)
"""Figures compared between nodes. Loopback is excluded: nodes on one machine share that figure."""

GPUS = (
    Comparison(
        name="utilisation",
        unit="%",
        floor=25.0,
        share=0.3,
        read=_sum_of("util_percent"),
        advice="Check for a slow data source, uneven batches, or another process on it",
    ),
    Comparison(
        name="power",
        unit="W",
        floor=80.0,
        share=0.3,
        read=_sum_of("power_w"),
        advice="Check its clocks and its power limit (nvidia-smi -q -d PERFORMANCE,POWER, or amd-smi metric)",
    ),
    Comparison(
        name="clock",
        unit="MHz",
        floor=200.0,
        share=0.15,
        read=_sum_of("sm_clock_mhz"),
        advice="Check its clock limits and temperature (nvidia-smi -q -d CLOCK,PERFORMANCE, or amd-smi metric)",
    ),
)
"""Figures compared between GPUs, over all nodes."""


@dataclass(frozen=True)
class Mean:
    """Mean of a figure of one unit over the window."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Sign:
    """Evidence of one judgement for one possible finding."""

    text: str
    begins: bool
    """Strong enough to begin a finding."""
    stays: bool
    """Strong enough to keep an existing finding."""
    at_once: bool = False
    """True for a yes-or-no fact: it begins with the first judgement and never ends."""


class Values:
    """Values of one figure of all units, sorted once: thousands of GPUs are each compared with all others."""

    def __init__(self, values: Iterable[float]) -> None:
        self._sorted = sorted(values)
        self._distances: dict[float, list[float]] = {}

    @property
    def num_others(self) -> int:
        """Number of units that one of them is compared with."""
        return len(self._sorted) - 1

    def others(self, value: float) -> tuple[float, float]:
        """Return the median of all other values, and their median absolute deviation from it."""
        middle = _median_without(self._sorted, value)
        if middle not in self._distances:  # at most three medians differ
            self._distances[middle] = sorted(abs(one - middle) for one in self._sorted)
        return middle, _median_without(self._distances[middle], abs(value - middle))


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Median of sorted numbers without one of them."""
    left_out = bisect.bisect_left(ordered, value)
    half, is_odd = divmod(len(ordered) - 1, 2)
    low, high = (ordered[at + (at >= left_out)] for at in (half - 1 + is_odd, half))
    return (low + high) / 2


def deviation(unit: str, comparison: Comparison, mean: Mean, values: Values) -> Sign:
    """Deviation of one unit from the median of the others, if it exceeds floor, share, spread and its own noise."""
    middle, spread = values.others(mean.value)
    limit = max(
        comparison.floor,
        comparison.share * abs(middle),
        MAD_FACTOR * MAD_TO_SIGMA * spread,
        NOISE_FACTOR * mean.standard_error,
    )
    off = abs(mean.value - middle)
    text = (
        f"{unit} is an outlier: its {comparison.name} is {mean.value:.0f} {comparison.unit}, the median of the other "
        f"{values.num_others} is {middle:.0f} {comparison.unit} (differences up to {limit:.0f} {comparison.unit} are "
        f"usual). {comparison.advice}"
    )
    return Sign(text, begins=off > limit, stays=off > STAYS_AT * limit)
