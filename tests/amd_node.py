"""The sysfs of a node with AMD GPUs, as far as it is read.

Layout and contents of the files are those of an MI300X node. Names, formats and units: the Linux kernel's documentation
of amdgpu (thermal.rst, driver-misc.rst, ras.rst) and ``kfd_topology.c``. Sensors: the log of rocm-smi on an MI300 in
ROCm/legacy-rocm-build#4411. Properties of topology nodes: ROCm/rocm-cli#343 and other tools' tests for the MI300. What
is different on an MI250X (a second die without a power meter, an edge sensor): ``aldebaran_ppt.c``.
"""

from pathlib import Path

GIB = 1 << 30
BUSES = (0x75, 0x05, 0x65)
"""PCI buses of the GPUs in the order of ROCm, which need not be that of their addresses."""


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def device(root: Path, gpu: int) -> Path:
    """PCI device of a GPU."""
    return root / f"bus/pci/devices/0000:{BUSES[gpu]:02x}:00.0"


def topology_node(root: Path, number: int, *lines: str, gpu_id: int = 0) -> Path:
    """A node of the compute interface."""
    folder = root / "class/kfd/kfd/topology/nodes" / str(number)
    write(folder / "gpu_id", f"{gpu_id}\n")
    write(folder / "properties", "".join(f"{line}\n" for line in lines))
    return folder


def make_amd_node(root: Path) -> Path:
    """A node with two processors and three MI300X, the last of which has no name on its board."""
    for number in range(2):
        topology_node(root, number, "cpu_cores_count 96", "simd_count 0", "location_id 0", "drm_render_minor 0")
    for gpu, bus in enumerate(BUSES):
        # Ten and more, which come before 2 in the order of texts.
        topology_node(
            root,
            9 + gpu,
            "cpu_cores_count 0",
            "simd_count 1216",
            "gfx_target_version 90402",
            "vendor_id 4098",
            "device_id 29857",
            f"location_id {bus << 8}",
            "domain 0",
            f"drm_render_minor {128 + gpu}",
            "hive_id 11638818706288400384",
            f"unique_id {0xA0B0 + gpu}",
            gpu_id=30000 + gpu,
        )
        files = {
            "vendor": "0x1002",
            "class": "0x120000",
            "device": "0x74a1",
            "product_name": "AMD Instinct MI300X OAM" if gpu < 2 else "",
            "gpu_busy_percent": str(90 + gpu),
            "mem_info_vram_total": str(192 * GIB),
            "mem_info_vram_used": str((gpu + 1) * GIB // 2),
            "ras/umc_err_count": "ue: 0\nce: 4",
            "hwmon/hwmon4/power1_input": "512500000",
            "hwmon/hwmon4/power1_cap": "750000000",
            "hwmon/hwmon4/temp2_label": "junction",
            "hwmon/hwmon4/temp2_input": "61000",
            "hwmon/hwmon4/temp2_crit": "100000",
            "hwmon/hwmon4/temp3_label": "mem",
            "hwmon/hwmon4/temp3_input": "55000",
            "hwmon/hwmon4/freq1_input": "2100000000",
        }
        for name, content in files.items():
            write(device(root, gpu) / name, f"{content}\n")
    write(root / "module/amdgpu/version", "6.10.5\n")
    return root
