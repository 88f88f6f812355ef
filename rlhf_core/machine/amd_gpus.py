"""AMD GPUs, read from the files of their kernel driver; no library of ROCm is needed. Not run on AMD GPUs yet.

Names, units and formats of the files follow the Linux kernel's documentation of amdgpu ("GPU Power/Thermal Controls and
Monitoring", "Misc AMDGPU driver information", "AMDGPU RAS Support"), and for its compute interface
(``/sys/class/kfd``) the driver's ``kfd_topology.c`` and ``kfd_process.c``.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_core.machine.gpus import HIP_VARIABLE, ROCR_VARIABLE, VISIBLE_VARIABLE

SYSFS = Path("/sys")
DEVICE = Path("/dev/kfd")
"""Device through which every process computes; its own permissions decide who may, whatever sysfs shows."""
GIB = 2**30

_AMD, _NVIDIA = "0x1002", "0x10de"
_GPU_CLASSES = ("0x03", "0x12")
"""PCI classes of GPUs: display controllers and processing accelerators."""
_LIMITS = (ROCR_VARIABLE, HIP_VARIABLE, VISIBLE_VARIABLE)
_Nvidia = TypeVar("_Nvidia")
_SENSORS = ("junction", "edge")
"""Temperature sensors of a GPU, best first: accelerators since the MI300 have none at the edge."""


def are_present() -> bool:
    """True if the machine has AMD GPUs and none of NVIDIA, whose missing driver is otherwise the thing to report."""
    devices = (SYSFS / "bus/pci/devices").glob("*")
    vendors = {_text(device / "vendor") for device in devices if _text(device / "class").startswith(_GPU_CLASSES)}
    return _AMD in vendors and _NVIDIA not in vendors


def nvidia_or_amd(open_nvidia: Callable[[], _Nvidia]) -> "_Nvidia | AmdGpus":
    """The reader of NVIDIA GPUs; where it cannot be opened and the machine has AMD GPUs instead, that of those.

    Raises:
        OSError: the driver of the GPUs is missing or fails to initialise; the message says which.
    """
    try:
        return open_nvidia()
    except OSError:
        if not are_present():
            raise
    return AmdGpus()


@dataclass(frozen=True)
class _AmdGpu:
    """One GPU, or one partition of a GPU."""

    folder: Path
    """Files of its PCI device."""
    kfd_id: str
    """Its number in the compute interface."""
    uuid: str


class AmdGpus:
    """The AMD GPUs visible to the job, numbered as the job numbers them.

    The runtime of ROCm numbers the nodes of ``kfd/topology`` that have compute units and that the job's device cgroup
    lets it read (``topology_sysfs_check_node_supported`` and ``BuildTopology`` of ROCR-Runtime).
    ``ROCR_VISIBLE_DEVICES`` selects among these, and what HIP is given selects among those that remain.
    """

    package = "amdgpu-driver"
    """Name under which the driver's version is compared between nodes."""
    tool = "amd-smi metric"

    def __init__(self, root: Path | None = None, environment: Mapping[str, str] = os.environ) -> None:
        """Find the GPUs.

        Args:
            root: Root of sysfs; ``SYSFS`` by default.
            environment: Variables that may limit the GPUs.

        Raises:
            OSError: the driver offers this job no GPU for computing, or none of those that the variables name.
        """
        self._root = root or SYSFS
        nodes = (self._root / "class/kfd/kfd/topology/nodes").glob("[0-9]*")
        ordered = sorted(nodes, key=lambda node: int(node.name))
        gpus = [gpu for gpu in map(self._open, ordered) if gpu is not None]
        if not gpus:
            raise OSError("amdgpu: /sys/class/kfd has no GPU that this job may use")
        if ROCR_VARIABLE in environment:
            gpus = _selected(gpus, [name.strip() for name in environment[ROCR_VARIABLE].split(",")])
        # Unlike the runtime below it, HIP ignores an empty list, and knows no GPU by a name with spaces.
        listed = environment.get(HIP_VARIABLE) or environment.get(VISIBLE_VARIABLE)
        self._gpus = _selected(gpus, listed.split(",")) if listed else gpus
        if not self._gpus:
            limits = [f"{name}={environment[name]}" for name in _LIMITS if name in environment]
            raise OSError(f"amdgpu: none of the GPUs is left by {', '.join(limits)}")

    def problem(self) -> str:
        """Reason why this user cannot compute on the GPUs that the driver shows; empty if there is none."""
        if os.access(DEVICE, os.R_OK | os.W_OK):
            return ""
        return f"{DEVICE} is not {'open to this user' if DEVICE.exists() else 'there'}, so HIP finds no GPU"

    def read(self) -> dict[str, float]:
        """Metrics of each GPU in a flat mapping, ``gpu0_util_percent`` and so on: those of NVIDIA GPUs that amdgpu has.

        Returns:
            Per GPU, if its driver has them: ``util_percent``, ``memory_used_gb``, ``memory_total_gb``, ``power_w``,
            ``power_limit_w``, ``temperature_c``, ``temperature_slowdown_c``, ``sm_clock_mhz``, ``ecc_corrected`` and
            ``ecc_uncorrected`` (since the driver was loaded), ``lost`` (1 when the driver has given it up; absent
            otherwise). Partitions of a GPU have the metrics of the whole GPU.
        """
        return {f"gpu{i}_{name}": value for i, gpu in enumerate(self._gpus) for name, value in _metrics(gpu).items()}

    def names(self) -> list[str]:
        """Types of the GPUs, in order; those without a name on their board have their PCI device number."""
        return [_text(gpu.folder / "product_name") or f"AMD GPU {_text(gpu.folder / 'device')}" for gpu in self._gpus]

    def driver(self) -> str:
        """Version of the driver: of AMD's own package, or the hash of the kernel's module, or the kernel's version."""
        module = self._root / "module/amdgpu"
        return _text(module / "version") or _text(module / "srcversion") or os.uname().release

    def used_bytes(self) -> list[int]:
        """Memory in use on each GPU, in bytes.

        Raises:
            OSError: the driver has given up a GPU, or its answer is no number.
        """
        try:
            return [int((gpu.folder / "mem_info_vram_used").read_text()) for gpu in self._gpus]
        except ValueError as error:
            raise OSError(f"amdgpu: mem_info_vram_used: {error}") from error

    def are_used_by(self, pids: Collection[int]) -> bool:
        """True if a GPU is busy on which one of these processes holds memory. In a container with process ids of its
        own, the driver knows the processes by other ids, so that none is found."""
        processes = [self._root / "class/kfd/kfd/proc" / str(pid) for pid in pids]
        return any(
            bool(_number(gpu.folder / "gpu_busy_percent"))
            and any(_number(process / f"vram_{gpu.kfd_id}") for process in processes)
            for gpu in self._gpus
        )

    def _open(self, node: Path) -> _AmdGpu | None:
        """GPU of a node of the topology; None for processors, and for GPUs of other jobs, which answer EPERM."""
        properties = dict(line.split(" ", 1) for line in _text(node / "properties").splitlines() if " " in line)
        compute_units, place, domain, unique_id = (
            int(properties.get(name, 0)) for name in ("simd_count", "location_id", "domain", "unique_id")
        )
        if compute_units == 0:
            return None
        # A partition's node is no PCI device, and its number stands where the function would be. A GPU is function 0.
        address = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.0"
        return _AmdGpu(self._root / "bus/pci/devices" / address, _text(node / "gpu_id"), f"GPU-{unique_id:016x}")


def _selected(gpus: Sequence[_AmdGpu], names: Sequence[str]) -> list[_AmdGpu]:
    """GPUs by their numbers or the beginnings of their UUIDs, up to the first that is unknown or repeated."""
    found: list[_AmdGpu] = []
    for name in names:
        if name.isdecimal():
            matches = [gpus[int(name)]] if int(name) < len(gpus) else []
        else:
            matches = [gpu for gpu in gpus if name and gpu.uuid.lower().startswith(name.lower())]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found


def _metrics(gpu: _AmdGpu) -> dict[str, float]:
    folder = gpu.folder
    if not (folder / "mem_info_vram_total").exists():
        return {"lost": 1.0}
    sensors = next(folder.glob("hwmon/hwmon*"), folder)
    labels = {_text(path): path.name.removesuffix("_label") for path in sensors.glob("temp*_label")}
    heat = next((labels[name] for name in _SENSORS if name in labels), "temp1")
    errors = dict(line.split(": ", 1) for line in _text(folder / "ras/umc_err_count").splitlines() if ": " in line)
    read: dict[str, float | None] = {
        "util_percent": _number(folder / "gpu_busy_percent"),
        "memory_used_gb": _number(folder / "mem_info_vram_used", GIB),
        "memory_total_gb": _number(folder / "mem_info_vram_total", GIB),
        # The second die of an MI200 has no power meter; some versions of the driver say 0 there.
        "power_w": _number(sensors / "power1_average", 1e6) or _number(sensors / "power1_input", 1e6) or None,
        "power_limit_w": _number(sensors / "power1_cap", 1e6) or None,
        "temperature_c": _number(sensors / f"{heat}_input", 1000),
        "temperature_slowdown_c": _number(sensors / f"{heat}_crit", 1000),
        "sm_clock_mhz": _number(sensors / "freq1_input", 1e6),
        "ecc_corrected": float(errors["ce"]) if "ce" in errors else None,
        "ecc_uncorrected": float(errors["ue"]) if "ue" in errors else None,
    }
    return {name: round(value, 3) for name, value in read.items() if value is not None}


def _text(path: Path) -> str:
    """Content of a file; empty if it is missing or the driver refuses to answer."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path, unit: float = 1) -> float | None:
    """Content of a file in multiples of the unit; None if it is missing or no number."""
    try:
        return int(_text(path)) / unit
    except ValueError:
        return None
