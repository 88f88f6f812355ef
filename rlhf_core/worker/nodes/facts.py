"""Facts about this node, gathered before any process group exists, in well under a second and without training imports.

Agent 0 compares the facts that must agree between nodes (``diagnosis/nodes/checks.py``); a problem that a node can
detect by itself is a complaint.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil
from pydantic import ValidationError

import rlhf_core
from rlhf_core.diagnosis.nodes.checks import NodeCheck, blocked, warning
from rlhf_core.files.fingerprints import fingerprint_or_problem
from rlhf_core.files.lookups import paths_in
from rlhf_core.files.whole import read_all
from rlhf_core.machine import amd_gpus
from rlhf_core.machine.amd_gpus import AmdGpus
from rlhf_core.machine.shared_names import SHARED_MEMORY
from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.probe import NodeFacts
from rlhf_core.schemas.run import RunSpec
from rlhf_core.survival import Survived
from rlhf_core.worker.nodes import trainer_facts
from rlhf_core.worker.nodes.membership import Nodes, interface_of
from rlhf_core.worker.nodes.shown_variables import attempt_key, shown_variables
from rlhf_core.worker.nodes.trainer_facts import TrainerFacts
from rlhf_core.worker.telemetry.gpus import open_gpus

PLUGINS = "rlhf_flows.node_checks"
"""Entry point group of functions that take no arguments and return findings about this node."""

MAX_FILES = 1_000
"""Maximum number of files read in a folder on an external trainer's launch line; of larger folders, this many names and
sizes are used instead."""

CPU_SHARED_MEMORY_GB = 0.03
"""Shared memory that suffices for CPU-only ranks."""

MIN_OPEN_FILES = 4096
"""Minimum limit of open files: the sockets of a few hundred ranks exhaust a lower one."""


def gather(
    run_dir: RunDir,
    attempt: int,
    nodes: Nodes,
    spec: RunSpec,
    gpus: int,
    environment: Mapping[str, str] = os.environ,
) -> NodeFacts:
    """Gather all facts about this node.

    Args:
        gpus: Number of GPUs it should have.
        environment: Environment given to the node.
    """
    complaints = [*_room(spec, gpus), *_limits(nodes.num), *_tracing(), *_network(nodes), *_plugins()]
    trainer = trainer_facts.gather(run_dir, spec, environment) if spec.trainer.kind == "command" else TrainerFacts()
    complaints += trainer.complaints
    hardware = {"cores": str(len(os.sched_getaffinity(0)))}
    versions = package_versions()
    if gpus:
        found, driver, faults = _gpus()
        complaints += faults
        hardware |= found
        versions |= driver
    return NodeFacts(
        node=nodes.name,
        index=nodes.index,
        versions=versions,
        trainer_versions=dict(trainer.versions),
        variables=shown_variables(environment, attempt_key(run_dir.attempt(attempt).probe_key)),
        content={
            **content(run_dir, attempt, spec),
            **{name: fingerprint_or_problem(path, MAX_FILES) for name, path in trainer.files.items()},
        },
        hardware=hardware,
        complaints=tuple(one.model_copy(update={"node": nodes.name}) for one in complaints),
    )


def confused(name: str, problem: str) -> NodeFacts:
    """Facts of a node that cannot join the others because its environment is contradictory."""
    advice = "the job's script sets RLHF_NODES, and Slurm SLURM_NODEID: do not change or unset them on a node"
    complaint = blocked(NodeCheck.IDENTITY, problem, "each node at its own position in the allocation", advice, name)
    return NodeFacts(node=name, index=-1, complaints=(complaint,))


def all_confused(attempt: AttemptDir) -> list[NodeFacts]:
    """Facts of nodes that report in their files that a contradictory environment keeps them from joining."""
    return [one for one in read_all(paths_in(attempt.probe, "*.json"), NodeFacts) if one.index < 0]


def package_versions() -> dict[str, str]:
    """Versions of installed packages by normalised name, and of Python and the C library."""
    found = {"python": platform.python_version(), "glibc": "-".join(platform.libc_ver())}
    for one in importlib.metadata.distributions():
        # The folder's name holds name and version; reading its files takes seconds on a cold shared file system.
        stem = Path(str(getattr(one, "_path", ""))).stem
        name, dash, version = stem.rpartition("-") if stem.count("-") == 1 else ("", "", "")
        if not dash:
            name, version = one.metadata["Name"] or "", one.version or ""
        if name:
            found.setdefault(re.sub("[-_.]+", "-", name).lower(), version)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Content that must be the same on all nodes


def content(run_dir: RunDir, attempt: int, spec: RunSpec) -> dict[str, str]:
    """Hashes of the files this node reads: the run's files, our code, data, model and tokenizer."""
    sources = {
        "config (spec.json)": run_dir.spec,
        "placement.json": run_dir.attempt(attempt).placement,
        "user code": run_dir.code / "snapshot",
        "rlhf_core": Path(rlhf_core.__file__).parent,
        **{setting: Path(path) for setting, path in spec.paths.items()},
    }
    return {name: fingerprint_or_problem(path) for name, path in sources.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Problems that a node detects by itself


def _room(spec: RunSpec, gpus: int) -> Iterable[CheckResult]:
    least_gb = spec.preflight.min_free_disk_gb
    for what, path in (
        ("temporary folder", Path(os.environ.get("TMPDIR") or "/tmp")),
        ("shared memory", SHARED_MEMORY),
    ):
        try:
            free_gb = shutil.disk_usage(path).free / 2**30
        except OSError as error:
            yield blocked(NodeCheck.DISK, f"{path}: {error.strerror}", f"a usable {what}", "make it")
            continue
        if free_gb < least_gb:
            # Containers have little shared memory by default. NCCL fails with that; CPU-only ranks need some megabytes.
            enough = path == SHARED_MEMORY and not gpus and free_gb > CPU_SHARED_MEMORY_GB
            finding = warning if enough else blocked
            yield finding(
                NodeCheck.DISK,
                f"{free_gb:.2f} GiB free in {path}",
                f"at least {least_gb:g} GiB in the {what} (preflight.min_free_disk_gb)",
                "free some space; files left by other jobs are a common cause",
            )


def _limits(num_nodes: int) -> Iterable[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES and hard < MIN_OPEN_FILES:
        advice = "raise LimitNOFILE of slurmd, or `ulimit -n` in slurm.setup"
        yield warning(NodeCheck.LIMITS, f"{soft} open files allowed", f"at least {MIN_OPEN_FILES}", advice)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if num_nodes > 1 and Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
        advice = "set LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK"
        yield warning(
            NodeCheck.LIMITS, f"{locked >> 10} KiB of locked memory allowed", "unlimited, for InfiniBand", advice
        )


def _tracing() -> Iterable[CheckResult]:
    """Check the Yama level: 0 and 1 let an agent trace its own workers; from 2 on, only root may."""
    try:
        level = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return
    if level >= 2 and os.geteuid() != 0:
        yield warning(
            NodeCheck.PTRACE,
            f"kernel.yama.ptrace_scope = {level}",
            "0 or 1, which lets py-spy read the stack of a hung rank from outside",
            "ask the administrators; until then hung ranks only have their Python stack, and only while they run",
        )


def _network(nodes: Nodes) -> Iterable[CheckResult]:
    if nodes.num > 1 and not interface_of(nodes.address):
        yield blocked(
            NodeCheck.NETWORK,
            f"{nodes.address} is on none of the interfaces {', '.join(sorted(psutil.net_if_addrs()))}",
            "the address of this node in Slurm (NodeAddr)",
            "correct NodeAddr, or the hosts file of the node",
        )


def _gpus() -> tuple[dict[str, str], dict[str, str], list[CheckResult]]:
    """Number and types of working GPUs, the driver's version, and findings about faulty GPUs."""
    try:
        telemetry = open_gpus()
    except OSError as error:
        silent = blocked(NodeCheck.GPU_HEALTH, f"no driver response: {error}", "NVML", "run nvidia-smi there")
        if amd_gpus.are_present():
            advice = (
                "run rocm-smi there; HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES number those of ROCR_VISIBLE_DEVICES"
            )
            silent = blocked(NodeCheck.GPU_HEALTH, str(error), "a GPU that HIP can use", advice)
        return {"gpus": "0"}, {}, [silent]
    readings = telemetry.read()
    names = telemetry.names()
    lost = {name.partition("_")[0] for name, value in readings.items() if name.endswith("_lost") and value}
    faults = []
    if isinstance(telemetry, AmdGpus) and (problem := telemetry.problem()):
        advice = "add the user to the group of that device, often `render`; a container needs /dev/kfd and /dev/dri"
        faults.append(blocked(NodeCheck.GPU_HEALTH, problem, "a GPU that HIP can use", advice))
    for name, value in sorted(readings.items()):
        device, _, what = name.partition("_")
        entry = _GPU_FAULTS.get(what)
        if entry is not None and value:
            finding, text = entry
            advice = f"do not use the node until the GPU is reset or replaced; `{telemetry.tool}` has the details"
            description = f"{device}: {text.format(value)}"
            faults.append(finding(NodeCheck.GPU_HEALTH, description, "a GPU without errors", advice))
    working = [name for index, name in enumerate(names) if f"gpu{index}" not in lost]
    types = ", ".join(sorted(set(working)))
    return {"gpus": str(len(working)), "gpu_types": types}, {telemetry.package: telemetry.driver()}, faults


_Finding = Callable[..., CheckResult]
_GPU_FAULTS: Mapping[str, tuple[_Finding, str]] = {
    "ecc_uncorrected": (blocked, "{:.0f} uncorrected memory errors since its driver was loaded"),
    "xid": (blocked, "Xid {:.0f}"),
    "lost": (blocked, "has fallen off the bus"),
    "throttle_thermal": (warning, "throttled by heat before anything runs"),
    "throttle_power_brake": (blocked, "throttled by its power supply"),
}
"""GPU readings that should be 0, with the severity and message if they are not."""


def _plugins() -> list[CheckResult]:
    """Findings of the site's own checks. A check that raises is reported but does not end the attempt."""
    found = []
    for entry in importlib.metadata.entry_points(group=PLUGINS):
        results: list[CheckResult] = []
        with Survived() as failed:  # third-party code must not end the attempt
            results = [CheckResult.model_validate(dict(one)) for one in entry.load()()]
        if isinstance(failed.error, ValidationError):
            problem = f"{entry.name} returned something other than a finding: {failed.error.errors()[0]['msg']}"
            results = [_plugin_warning(problem)]
        elif failed.error is not None:
            results = [_plugin_warning(f"{entry.name} failed: {failed.problem}")]
        found += [one.model_copy(update={"id": one.id or entry.name}) for one in results]
    return [one for one in found if one.status is not CheckStatus.PASSED]


def _plugin_warning(problem: str) -> CheckResult:
    return warning(NodeCheck.PLUGIN, problem, "a list of findings", "correct the plug-in, or turn it off")
