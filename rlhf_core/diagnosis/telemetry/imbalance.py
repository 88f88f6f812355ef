"""Anomalies in the telemetry of all nodes: a lagging node, a hot or broken GPU, a spinning collective.

Findings are sentences for the user and have no further effect: hangs are detected by heartbeats
(``hangs/liveness.py``). Pure: telemetry and seconds in, sentences out.

Two rules suppress healthy jitter. Figures are means over minutes (a median over time would jump between two nodes with
GPUs that are busy half of the time), and a finding begins or ends only after several equal judgements in a row, with a
lower threshold for its end than for its start.
"""

import functools
import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlhf_core.diagnosis.telemetry.outliers import GPUS, NODES, STAYS_AT, Comparison, Mean, Sign, Values, deviation

WINDOW_S = 180.0
"""Window over which a figure is averaged."""

JUDGE_EVERY_S = 10.0
"""Interval between judgements."""

IN_A_ROW = 3
"""Number of consecutive judgements that begin or end a finding."""

MIN_SAMPLES = 15
"""Minimum number of readings of a unit."""

MIN_UNITS = 3
"""Minimum number of units: of two, neither can be identified as the outlier."""

STEPS_QUIET_S = 60.0
"""Minimum time without progress before a collective counts as spinning."""

STEPS_QUIET_FACTOR = 3.0
"""Minimum of the same as a multiple of the longest wait for progress seen before."""

BUSY_PERCENT = 95.0
"""Utilisation of a GPU that counts as busy all the time."""

LOW_POWER_OF_WORK = 0.6
"""Share of the GPU's power under load below which a kernel counts as waiting."""

LOW_POWER_OF_LIMIT = 0.35
"""The same as a share of its power limit, before the first step."""

HOT_MARGIN_C = 3.0
"""Distance to the throttling temperature below which a GPU counts as hot."""

COOLED_MARGIN_C = 8.0
"""Distance above which it no longer does."""

CORRECTED_ECC = 100.0
"""Corrected memory errors within the window above which they are reported."""

PROGRAM_XIDS = {13, 31, 43, 45}
"""XIDs that a faulty program can also cause (NVIDIA, "XID Errors"): illegal access, page fault, channel ended."""

_GPU = re.compile(r"gpu(\d+)_(\w+)")


@functools.lru_cache(4096)
def _figure_of_gpu(name: str) -> tuple[int, str] | None:
    """Index of the GPU and name of its figure; None for a figure of the node. Every reading has the same names."""
    match = _GPU.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


@dataclass(frozen=True)
class _Gpu:
    """One GPU of the job."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.node}"


@dataclass(frozen=True)
class _Sample:
    """One reading."""

    at_s: float
    figures: Mapping[str, float]
    compared: tuple[float | None, ...]
    """Figures of the comparisons, in their order: read once, and judged many times while the reading is recent."""


@dataclass
class _ImbalanceFinding:
    """Possible finding, with the number of consecutive judgements against its current state."""

    text: str = ""
    active: bool = False
    for_good: bool = False
    against: int = 0


@dataclass
class ImbalanceWatch:
    """Detector of outliers in the last minutes of telemetry of all nodes. One per role and restart."""

    _nodes: dict[str, deque[_Sample]] = field(default_factory=dict)
    _gpus: dict[_Gpu, deque[_Sample]] = field(default_factory=dict)
    _findings: dict[str, _ImbalanceFinding] = field(default_factory=dict)
    _ecc_at_first: dict[_Gpu, float] = field(default_factory=dict)
    _work: dict[str, str] = field(default_factory=dict)
    _progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    _progressed_at_s: float | None = None
    _has_progressed: bool = False
    _longest_wait_s: float = 0.0
    _power_at_work_w: dict[_Gpu, float] = field(default_factory=dict)
    _now_s: float = 0.0
    _judged_at_s: float | None = None

    def add(
        self, node: str, telemetry: Mapping[str, float], step: int, now_s: float, beats: int = 0, work: str = ""
    ) -> None:
        """Add one reading of a node.

        Args:
            node: Name of the node.
            telemetry: Its figures, as in ``AgentStatus.telemetry``.
            step: Current training step of its workers.
            now_s: Time on the caller's monotonic clock, in seconds; the same clock for all nodes.
            beats: Total number of heartbeats of its workers so far; they count as progress if there are no steps.
            work: Work of the node: it is compared only with nodes of the same work. A node of rollout engines is idle
                while trainers are busy, and vice versa.
        """
        self._now_s = max(self._now_s, now_s)
        self._work[node] = work
        self._note_progress(node, (step, beats), now_s)
        _append(self._nodes.setdefault(node, deque()), _sample(now_s, telemetry, NODES))
        for index, figures in _by_gpu(telemetry).items():
            gpu = _Gpu(node, index)
            _append(self._gpus.setdefault(gpu, deque()), _sample(now_s, figures, GPUS))
            if "ecc_uncorrected" in figures:
                self._ecc_at_first.setdefault(gpu, figures["ecc_uncorrected"])
        if self._judged_at_s is None or now_s - self._judged_at_s >= JUDGE_EVERY_S:
            self._judged_at_s = now_s
            self._judge()

    def findings(self) -> tuple[str, ...]:
        """Return the current findings, one sentence each; the wording stays the same while a finding lasts."""
        return tuple(found.text for found in self._findings.values() if found.active)

    # -----------------------------------------------------------------------------------------------------------------
    # Judging

    def _judge(self) -> None:
        self._learn_power()
        signs = {**self._health(), **self._spinning()}
        for work in set(self._work.values()):
            nodes = {node: self._recent(samples) for node, samples in self._nodes.items() if self._work[node] == work}
            gpus = {gpu: self._recent(samples) for gpu, samples in self._gpus.items() if gpu.node in nodes}
            signs |= self._compared("node", NODES, nodes) | self._compared("gpu", GPUS, gpus)
        for key in self._findings.keys() - signs.keys():
            self._weigh(key, Sign("", begins=False, stays=False))
        for key, sign in signs.items():
            self._weigh(key, sign)

    def _weigh(self, key: str, sign: Sign) -> None:
        finding = self._findings.setdefault(key, _ImbalanceFinding())
        if finding.for_good:
            return
        if sign.at_once:
            finding.text, finding.active, finding.for_good = sign.text, True, True
            return
        contradicts = not sign.stays if finding.active else sign.begins
        finding.against = finding.against + 1 if contradicts else 0
        if finding.against >= IN_A_ROW:
            finding.active, finding.against = not finding.active, 0
            finding.text = sign.text

    def _compared(
        self,
        kind: str,
        comparisons: Iterable[Comparison],
        units: Mapping[str, list[_Sample]] | Mapping[_Gpu, list[_Sample]],
    ) -> dict[str, Sign]:
        """Compare every unit and figure, from the readings of the window; one sign each."""
        signs: dict[str, Sign] = {}
        for index, comparison in enumerate(comparisons):
            means = _means(units, index)
            if len(means) < MIN_UNITS:
                continue
            every = Values(mean.value for mean in means.values())
            found = {
                f"{kind} {unit} {comparison.name}": deviation(unit, comparison, mean, every)
                for unit, mean in means.items()
            }
            # If half of the units differ from the other half, they do different work and there is no outlier.
            if sum(sign.begins for sign in found.values()) * 2 < len(found):
                signs |= found
        return signs

    def _recent(self, samples: "deque[_Sample]", window_s: float = WINDOW_S) -> list[_Sample]:
        return [sample for sample in samples if sample.at_s > self._now_s - window_s]

    # -----------------------------------------------------------------------------------------------------------------
    # Health of a GPU

    def _health(self) -> dict[str, Sign]:
        signs: dict[str, Sign] = {}
        for gpu, kept in self._gpus.items():
            samples = self._recent(kept)
            if not samples:
                continue
            last = samples[-1].figures
            signs |= self._broken(gpu, last)
            if len(samples) >= MIN_SAMPLES:
                signs |= _strained(gpu, [sample.figures for sample in samples])
        return signs

    def _broken(self, gpu: _Gpu, last: Mapping[str, float]) -> dict[str, Sign]:
        """Findings that need no confirmation, such as an uncorrectable error."""
        found = {}
        errors = last.get("ecc_uncorrected", 0.0) - self._ecc_at_first.get(gpu, 0.0)
        if errors > 0:
            found[f"ecc {gpu}"] = (
                f"{gpu} had {errors:.0f} memory errors that ECC could not correct since the start of this job. "
                f"Its results cannot be trusted: exclude the node and have the GPU reset or replaced"
            )
        if last.get("lost"):
            found[f"lost {gpu}"] = f"{gpu} no longer responds: it has fallen off the bus. The node must be restarted"
        xid = int(last.get("xid", 0))
        if xid:
            cause = (
                "which a faulty program can also cause" if xid in PROGRAM_XIDS else "a fault of the hardware or driver"
            )
            found[f"xid {gpu} {xid}"] = f"{gpu} reported XID {xid}, {cause}. See dmesg on {gpu.node}"
        return {key: Sign(text, begins=True, stays=True, at_once=True) for key, text in found.items()}

    # -----------------------------------------------------------------------------------------------------------------
    # 100 % busy, no progress

    def _note_progress(self, node: str, progress: tuple[int, int], now_s: float) -> None:
        if self._progressed_at_s is None:
            self._progressed_at_s = now_s
        before = self._progress.get(node)
        self._progress[node] = progress
        if before is not None and progress != before:
            # The wait for the first heartbeat is part of the start and does not predict later waits.
            if self._has_progressed:
                self._longest_wait_s = max(self._longest_wait_s, now_s - self._progressed_at_s)
            self._progressed_at_s = now_s
            self._has_progressed = True

    @property
    def _quiet_s(self) -> float:
        """Return the seconds since anything advanced on any node."""
        return 0.0 if self._progressed_at_s is None else self._now_s - self._progressed_at_s

    def _learn_power(self) -> None:
        """Learn the power draw of a GPU under load: the highest mean of the window while training advances."""
        if not self._has_progressed or self._quiet_s > STEPS_QUIET_S / 2:
            return
        for gpu, samples in self._gpus.items():
            drawn = _mean(self._recent(samples, STEPS_QUIET_S), "power_w")
            if drawn is not None:
                self._power_at_work_w[gpu] = max(drawn, self._power_at_work_w.get(gpu, 0.0))

    def _spinning(self) -> dict[str, Sign]:
        needed_s = max(STEPS_QUIET_S, STEPS_QUIET_FACTOR * self._longest_wait_s)
        if not self._gpus or self._quiet_s < needed_s:
            return {}
        spinning = [gpu for gpu, samples in self._gpus.items() if self._only_waits(gpu, samples)]
        if not spinning or len(spinning) * 2 < len(self._gpus):
            return {}
        others = sorted(str(gpu) for gpu in self._gpus if gpu not in spinning)
        last = max(step for step, _ in self._progress.values())
        text = (
            f"{len(spinning)} of {len(self._gpus)} GPUs are 100 % busy but draw the power of an idle wait, and "
            "nothing has "
            f"advanced for {self._quiet_s:.0f} s (step {last}): they spin in a collective that does not complete. "
            + (f"Not waiting: {', '.join(others)}" if others else f"All of them wait: {_nodes(spinning)}")
        )
        return {"spinning": Sign(text, begins=True, stays=True)}

    def _only_waits(self, gpu: _Gpu, samples: "deque[_Sample]") -> bool:
        recent = self._recent(samples, STEPS_QUIET_S)
        busy, drawn = _mean(recent, "util_percent"), _mean(recent, "power_w")
        if busy is None or drawn is None or busy < BUSY_PERCENT:
            return False
        at_work = self._power_at_work_w.get(gpu)
        if at_work is not None:
            return drawn < LOW_POWER_OF_WORK * at_work
        limit = _mean(recent, "power_limit_w")
        return limit is not None and drawn < LOW_POWER_OF_LIMIT * limit


def _sample(at_s: float, figures: Mapping[str, float], comparisons: Iterable[Comparison]) -> _Sample:
    return _Sample(at_s, figures, tuple([comparison.read(figures) for comparison in comparisons]))


def _means(units: Mapping[str, list[_Sample]] | Mapping[_Gpu, list[_Sample]], index: int) -> dict[str, Mean]:
    """Mean of a compared figure over the window for each unit with enough readings."""
    means = {}
    for unit, samples in units.items():
        values = [value for sample in samples if (value := sample.compared[index]) is not None]
        if len(values) >= MIN_SAMPLES:
            mean = math.fsum(values) / len(values)
            variance = math.fsum([(value - mean) ** 2 for value in values]) / (len(values) - 1)
            means[str(unit)] = Mean(mean, math.sqrt(variance / len(values)))
    return means


def _append(samples: "deque[_Sample]", sample: _Sample) -> None:
    samples.append(sample)
    while samples[0].at_s <= sample.at_s - WINDOW_S:
        samples.popleft()


def _by_gpu(telemetry: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Group telemetry by GPU: ``gpu3_power_w`` of a node becomes ``power_w`` of its GPU 3."""
    found: dict[int, dict[str, float]] = {}
    for name, value in telemetry.items():
        of_gpu = _figure_of_gpu(name)
        if of_gpu is not None:
            index, figure = of_gpu
            found.setdefault(index, {})[figure] = value
    return found


def _mean(samples: Iterable[_Sample], name: str) -> float | None:
    values = [sample.figures[name] for sample in samples if name in sample.figures]
    return statistics.fmean(values) if values else None


def _strained(gpu: _Gpu, readings: list[Mapping[str, float]]) -> dict[str, Sign]:
    """Findings about heat, throttling and corrected memory errors."""
    signs = {}
    heat = [one["temperature_c"] for one in readings[-MIN_SAMPLES:] if "temperature_c" in one]
    limit = readings[-1].get("temperature_slowdown_c")
    if heat and limit is not None:
        mean = statistics.fmean(heat)
        signs[f"heat {gpu}"] = Sign(
            f"{gpu} has {mean:.0f} °C and throttles at {limit:.0f} °C. Check the cooling of {gpu.node}",
            begins=mean >= limit - HOT_MARGIN_C,
            stays=mean >= limit - COOLED_MARGIN_C,
        )
    for name, cause in (("throttle_thermal", "heat"), ("throttle_power_brake", "its power supply")):
        flags = [one[name] for one in readings if name in one]
        if flags:
            share = statistics.fmean(flags)
            signs[f"{name} {gpu}"] = Sign(
                f"{gpu} is throttled because of {cause} {share:.0%} of the time. The whole job waits for it: "
                f"check {'the cooling' if name == 'throttle_thermal' else 'the power supply'} of {gpu.node}",
                begins=share >= 0.5,
                stays=share >= 0.25,
            )
    corrected = [one["ecc_corrected"] for one in readings if "ecc_corrected" in one]
    if corrected:
        errors = corrected[-1] - corrected[0]
        signs[f"corrected {gpu}"] = Sign(
            f"{gpu} had {errors:.0f} memory errors corrected by ECC in {WINDOW_S:.0f} s. Its results are correct, "
            f"but such memory tends to fail: have {gpu.node} checked",
            begins=errors >= CORRECTED_ECC,
            stays=errors >= STAYS_AT * CORRECTED_ECC,
        )
    return signs


def _nodes(gpus: Iterable[_Gpu]) -> str:
    return ", ".join(sorted({gpu.node for gpu in gpus}))
