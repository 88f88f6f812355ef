"""Programs that the parser of launch lines knows: launchers, wrappers, suites, and their options without a value.

The options are those of torch 2.13, accelerate 1.14, deepspeed 0.19 and torchtune 0.6.
"""

import re
from collections.abc import Mapping
from typing import Literal

Launcher = Literal[
    "torchrun", "accelerate", "deepspeed", "swift", "trl", "axolotl", "llamafactory", "torchtune", "mpirun", "srun",
    "python", "",
]  # fmt: skip
"""Program that starts the ranks. ``swift``, ``trl`` and the like start torchrun or accelerate themselves; with srun,
mpirun and python, each process is a rank; empty for an unknown program."""

SHELLS = frozenset(["bash", "sh", "zsh", "dash"])
"""Shells that take a text to run."""
CONDAS = ("conda", "mamba", "micromamba")
"""Programs that activate environments of conda."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FLAGS: Mapping[str, frozenset[str]] = {
    "torchrun": _words("standalone m module no_python run_path virtual_local_rank use_env h help"),
    "accelerate": _words(
        """cpu multi_gpu tpu use_mps_device use_deepspeed use_fsdp use_megatron_lm use_parallelism_config use_xpu quiet
        q m module no_python debug enable_cpu_affinity same_network dynamo_use_fullgraph dynamo_use_dynamic
        dynamo_use_regional_compilation tpu_use_cluster no_tpu_cluster tpu_use_sudo fp8_override_linear_precision h
        help"""
    ),
    "deepspeed": _words(
        "no_python module no_local_rank no_ssh force_multi save_pid bind_cores_to_rank no_ssh_check elastic_training "
        "h help"
    ),
    "python": _words("m u O OO B E I s S v q b d i P x"),
    "mpirun": _words(
        "allow_run_as_root bind_to_none oversubscribe tag_output v q nooversubscribe report_bindings display_map"
        " display_allocation use_hwthread_cpus timestamp_output nolocal"
    ),
    "srun": _words(
        "exclusive overlap overcommit O l label u unbuffered E preserve_env k no_kill v verbose Q quiet s oversubscribe"
        " pty export_all contiguous container_mount_home no_container_mount_home container_writable K kill_on_bad_exit"
        " I immediate X disable_status Z no_allocate H hold exact multi_prog nice propagate quit_on_interrupt"
        " spread_job use_min_nodes container_remap_root no_container_remap_root container_entrypoint"
        " no_container_entrypoint container_readonly"
    ),
    "env": _words("i ignore_environment 0 null v debug"),
    "exec": _words("c l"),
    "time": _words("p portability v verbose q quiet a append"),
    "setsid": _words("c ctty f fork w wait"),
    "numactl": _words("l localalloc a all b balancing"),
    "sudo": _words("E preserve_env H set_home n non_interactive S stdin b background P preserve_groups"),
    "uv": _words(
        """no_sync frozen isolated no_project q quiet v verbose active locked offline all_extras dev no_dev only_dev
        all_groups no_default_groups no_editable exact no_env_file all_packages s script m module no_config no_index
        U upgrade reinstall refresh compile_bytecode no_build_isolation no_build no_binary n no_cache managed_python
        no_managed_python no_python_downloads native_tls no_progress no_sources"""
    ),
    "conda": _words("no_capture_output live_stream v"),
    "pixi": _words("frozen locked no_install clean_env skip_deps as_is q quiet v verbose"),
    "ray": _words("no_wait verbose no_format"),
    "sbatch": _words(
        "parsable W wait H hold exclusive test_only requeue no_requeue Q quiet v verbose s oversubscribe O overcommit"
        " k no_kill contiguous spread_job use_min_nodes reboot ignore_pbs I immediate container_mount_home"
        " no_container_mount_home container_writable"
    ),
    "docker": _words(
        "i t d it interactive tty detach rm privileged init P publish_all read_only no_healthcheck oom_kill_disable"
    ),
    "enroot": _words("r root w rw"),
    "container": _words(
        "nv nvccli rocm cleanenv e c contain C containall writable_tmpfs w writable no_home f fakeroot u userns no_eval"
        " compat"
    ),
}
"""Options without a value, or with one only in the same word; all other options of these programs take one."""
PAIRED = _words("mca gmca omca pmca")
"""Options of mpirun that take two values."""

WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "env": (),
    "nohup": (),
    "exec": (),
    "setsid": (),
    "time": (),
    "nice": (),
    "stdbuf": (),
    "numactl": (),
    "srun": (),
    "sbatch": (),
    "uv": ("run",),
    "poetry": ("run",),
    "pipenv": ("run",),
    "pixi": ("run",),
    "conda": ("run",),
    "micromamba": ("run",),
    "ray": ("job", "submit"),
    "apptainer": ("exec",),
    "singularity": ("exec",),
    "enroot": ("start",),
    "docker": ("run",),
    "podman": ("run",),
    "sudo": (),
}
"""Programs that only start another program, with the words of their subcommand."""
SUBMITTER = "submitter"
"""Name of the wrapper for any program with the words ``-- LAUNCHER``: mason.py of open-instruct, for instance."""
CONTAINERS = _words("apptainer singularity enroot docker podman")
"""Wrappers with one word before the program: the image."""
BOUND_CONTAINERS = _words("apptainer singularity")
"""Those that take folders to bind from a variable, so that a run can show the program its own."""

LAUNCHERS: Mapping[str, tuple[Launcher, tuple[str, ...]]] = {
    "torchrun": ("torchrun", ()),
    "torch-distributed-launch": ("torchrun", ()),
    "accelerate": ("accelerate", ("launch",)),
    "accelerate-launch": ("accelerate", ()),
    "deepspeed": ("deepspeed", ()),
    "tune": ("torchtune", ("run",)),
    "mpirun": ("mpirun", ()),
    "mpiexec": ("mpirun", ()),
}
"""Launchers with options of their own before the program."""
LAUNCHER_MODULES: Mapping[str, tuple[Launcher, int]] = {
    "torch.distributed.run": ("torchrun", 0),
    "torch.distributed.launch": ("torchrun", 0),
    "accelerate.commands.launch": ("accelerate", 0),
    "accelerate.commands.accelerate_cli": ("accelerate", 1),
    "deepspeed.launcher.runner": ("deepspeed", 0),
}
"""Modules that are launchers, with the words of their subcommand."""
SUITES: Mapping[str, Launcher] = {
    "swift": "swift",
    "megatron": "swift",
    "trl": "trl",
    "axolotl": "axolotl",
    "llamafactory-cli": "llamafactory",
    "llamafactory": "llamafactory",
}
"""Programs that start their ranks themselves, with a subcommand."""

PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:t|w)?(?:\.exe)?", re.ASCII)
"""Name of a Python interpreter."""

CONFIGS_OF_DEEPSPEED = _words("deepspeed deepspeed_config ds_config deepspeed_config_file")
"""Options of launchers and programs for a config of DeepSpeed."""
CONFIG_OPTIONS = CONFIGS_OF_DEEPSPEED | _words("config config_file config_path fsdp_config")
FILES_OF_LAUNCHERS = _words("config_file deepspeed_config_file")
"""Options of accelerate that name a file whatever its suffix. A program may use the same option for a name."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")


def flags_of(launcher: str) -> frozenset[str]:
    """Options without a value of a program that starts the ranks."""
    return FLAGS["torchrun" if launcher == "torchtune" else launcher]


RAY_NODE = "ray_node.sh"
"""Our script that starts Ray on the nodes of a job, and a program on the first."""
RAY_PROGRAMS = ("train_ppo_ray", "verl.trainer.main_ppo", "main_dapo")
"""Ends of the names of programs that start Ray."""
RAY_GPUS = (
    "trainer.n_gpus_per_node", "actor_num_gpus_per_node", "actor.num_gpus_per_node", "cluster.gpus_per_node",
)  # fmt: skip
"""Options of such programs for the GPUs of each node."""
