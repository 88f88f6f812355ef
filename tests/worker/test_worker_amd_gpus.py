"""Nodes with AMD GPUs, against files like those of a real node: no AMD GPU has been used yet."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from amd_node import BUSES, GIB, device, make_amd_node, topology_node, write
from control_fakes import make_run, make_spec

from rlhf_core.diagnosis.nodes.checks import NodeCheck
from rlhf_core.machine import amd_gpus
from rlhf_core.machine.amd_gpus import AmdGpus
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.probe import NodeFacts
from rlhf_core.worker.nodes import facts as node_facts
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.telemetry.gpus import open_gpus

LISTS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine as one with three AMD GPUs and without NVML."""
    root = make_amd_node(tmp_path / "sys")
    monkeypatch.setattr(amd_gpus, "SYSFS", root)
    write(tmp_path / "kfd", "")
    monkeypatch.setattr(amd_gpus, "DEVICE", tmp_path / "kfd")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name in LISTS:
        monkeypatch.delenv(name, raising=False)
    return root


def test_every_figure_of_a_gpu_has_the_unit_of_the_other_readers(node: Path) -> None:
    found = open_gpus().read()
    assert {name: value for name, value in found.items() if name.startswith("gpu1_")} == {
        "gpu1_util_percent": 91.0,
        "gpu1_memory_used_gb": 1.0,
        "gpu1_memory_total_gb": 192.0,
        "gpu1_power_w": 512.5,
        "gpu1_power_limit_w": 750.0,
        "gpu1_temperature_c": 61.0,
        "gpu1_temperature_slowdown_c": 100.0,
        "gpu1_sm_clock_mhz": 2100.0,
        "gpu1_ecc_corrected": 4.0,
        "gpu1_ecc_uncorrected": 0.0,
    }
    assert len(found) == 3 * 10


def test_figures_that_a_gpu_lacks_are_left_out(node: Path) -> None:
    """The second die of an MI250X has no power meter and an edge sensor; during a reset, errors cannot be counted."""
    sensors = device(node, 0) / "hwmon/hwmon4"
    write(sensors / "power1_average", "0\n")
    (sensors / "power1_input").unlink()
    write(sensors / "power1_cap", "0\n")
    write(sensors / "temp2_label", "edge\n")
    write(device(node, 0) / "ras/umc_err_count", "Query currently inaccessible\n")
    (device(node, 0) / "gpu_busy_percent").unlink()
    assert (
        open_gpus().read().keys() & {f"gpu0_{name}" for name in ("power_w", "power_limit_w", "util_percent")} == set()
    )
    found = {name: value for name, value in open_gpus().read().items() if name.startswith("gpu0_")}
    assert not any("ecc" in name for name in found)
    assert found["gpu0_temperature_c"] == 61.0
    shutil.rmtree(device(node, 0) / "hwmon")
    assert "gpu0_temperature_c" not in open_gpus().read()
    assert open_gpus().read()["gpu0_memory_used_gb"] == 0.5


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [0, 1, 2]),
        ({"ROCR_VISIBLE_DEVICES": "2, 0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "2,1"}, [2, 1]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "2"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000A0B1,2"}, [1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-000000000000a0b2"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000,1"}, None),
        ({"ROCR_VISIBLE_DEVICES": "0,9,1"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "1,1,0"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": ""}, None),
        ({"ROCR_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"}, None),
    ],
)
def test_gpus_are_those_that_rocm_shows(node: Path, environment: Mapping[str, str], expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(OSError, match="none of the GPUs is left by"):
            AmdGpus(node, environment)
    else:
        used = [(gpu + 1) * GIB // 2 for gpu in expected]
        assert AmdGpus(node, environment).used_bytes() == used


def test_gpus_of_other_jobs_are_not_counted(node: Path) -> None:
    """The device cgroup of a job refuses the properties of GPUs that are not its own; root may read every real file."""
    (node / "class/kfd/kfd/topology/nodes/9/properties").unlink()
    (node / "class/kfd/kfd/topology/nodes/9/properties").mkdir()
    assert AmdGpus(node, {"CUDA_VISIBLE_DEVICES": "0"}).used_bytes() == [GIB]


def test_a_partition_has_the_figures_of_its_gpu(node: Path) -> None:
    """In mode CPX, all partitions of a GPU are at its address, with their number in place of the function."""
    topology_node(node, 12, "simd_count 152", f"location_id {BUSES[2] << 8 | 7}", "unique_id 1", gpu_id=1)
    assert AmdGpus(node, {"HIP_VISIBLE_DEVICES": "3"}).read()["gpu0_util_percent"] == 92.0


def gather(tmp_path: Path) -> NodeFacts:
    return node_facts.gather(make_run(tmp_path / "runs"), 1, Nodes(("n1",), ("127.0.0.1",), 0), make_spec(), gpus=3)


def health(facts: NodeFacts) -> list[tuple[CheckStatus, str, str]]:
    return [(one.status, one.found, one.advice) for one in facts.complaints if one.id == NodeCheck.GPU_HEALTH]


def test_a_node_with_amd_gpus_is_accepted(node: Path, tmp_path: Path) -> None:
    facts = gather(tmp_path)
    assert health(facts) == []
    assert (facts.hardware["gpus"], facts.hardware["gpu_types"]) == ("3", "AMD GPU 0x74a1, AMD Instinct MI300X OAM")
    assert facts.versions["amdgpu-driver"] == "6.10.5"
    (node / "module/amdgpu/version").unlink()
    assert gather(tmp_path).versions["amdgpu-driver"] == os.uname().release
    write(node / "module/amdgpu/srcversion", "533BB7E5866E52F63B9ACCB\n")
    assert gather(tmp_path).versions["amdgpu-driver"] == "533BB7E5866E52F63B9ACCB"


def test_uncorrected_errors_and_lost_gpus_exclude_the_node(node: Path, tmp_path: Path) -> None:
    write(device(node, 1) / "ras/umc_err_count", "ue: 2\nce: 4\n")
    shutil.rmtree(device(node, 2))
    facts = gather(tmp_path)
    assert [(status, found) for status, found, _ in health(facts)] == [
        (CheckStatus.BLOCKED, "gpu1: 2 uncorrected memory errors since its driver was loaded"),
        (CheckStatus.BLOCKED, "gpu2: has fallen off the bus"),
    ]
    assert all("amd-smi" in advice and "nvidia" not in advice for *_, advice in health(facts))
    assert facts.hardware["gpus"] == "2"


def test_a_node_whose_amd_gpus_cannot_be_used_is_refused(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sets both lists unless its configuration says that these are AMD GPUs, and HIP then finds nothing."""
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    (finding,) = health(gather(tmp_path))
    assert finding[:2] == (
        CheckStatus.BLOCKED,
        "amdgpu: none of the GPUs is left by ROCR_VISIBLE_DEVICES=2, CUDA_VISIBLE_DEVICES=2",
    )
    assert "rocm-smi" in finding[2]
    shutil.rmtree(node / "class")
    (finding,) = health(gather(tmp_path))
    assert finding[1] == "amdgpu: /sys/class/kfd has no GPU that this job may use"


def test_a_node_on_which_this_user_may_not_compute_is_refused(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver shows its GPUs to all users; the permissions of its device decide which of them may compute."""
    monkeypatch.setattr(amd_gpus.os, "access", lambda path, mode: path != amd_gpus.DEVICE)  # root may open everything
    facts = gather(tmp_path)
    (finding,) = health(facts)
    assert finding[:2] == (CheckStatus.BLOCKED, f"{amd_gpus.DEVICE} is not open to this user, so HIP finds no GPU")
    assert "`render`" in finding[2]
    (tmp_path / "kfd").unlink()
    (finding,) = health(gather(tmp_path))
    assert finding[1] == f"{amd_gpus.DEVICE} is not there, so HIP finds no GPU"


@pytest.mark.parametrize("vendor", ["0x10de", "0x1002"], ids=["beside an AMD GPU", "without one"])
def test_a_broken_driver_of_nvidia_is_reported_as_before(node: Path, tmp_path: Path, vendor: str) -> None:
    write(device(node, 0) / "vendor", f"{vendor}\n")
    if vendor == "0x1002":
        shutil.rmtree(node / "bus")
    (finding,) = health(gather(tmp_path))
    assert finding[1].startswith("no driver response: nvidia-ml-py is not installed")
    assert finding[2] == "run nvidia-smi there"
