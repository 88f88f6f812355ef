"""Options of sbatch and srun, mapped to ``[resources]`` and ``[slurm]``."""

import re
import shlex
from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from rlhf_core.launch.wrap.draft import Draft, number
from rlhf_core.launch.wrap.slurm_counts import (
    derived_nodes,
    gpu_requests,
    gpus_per_node,
    other_resources,
    tasks_per_node,
)
from rlhf_core.schemas.slurm_values import slurm_seconds
from rlhf_core.shell.launch_line import normalized
from rlhf_core.text.formatting import count

_SHORT = {
    "N": "nodes", "n": "ntasks", "p": "partition", "A": "account", "t": "time", "c": "cpus_per_task", "G": "gpus",
    "J": "job_name", "q": "qos", "C": "constraint", "x": "exclude", "w": "nodelist", "o": "output", "e": "error",
    "D": "chdir", "i": "input", "K": "kill_on_bad_exit", "l": "label", "u": "unbuffered", "O": "overcommit",
    "E": "preserve_env", "Q": "quiet", "v": "verbose", "tasks_per_node": "ntasks_per_node",
}  # fmt: skip
"""Other names of options."""
_NAMED = {
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "constraint": "slurm.constraint",
    "reservation": "slurm.reservation",
}
_OF_RUN = frozenset((
    "output", "error", "open_mode", "mail_type", "mail_user", "requeue", "no_requeue", "signal", "wait",
    "kill_on_bad_exit", "label", "unbuffered", "export", "jobid", "job_id", "overcommit", "overlap", "mpi",
    "cpu_bind", "input", "ntasks", "nodes", "get_user_env", "exclusive_user", "parsable",
    "preserve_env", "quiet", "verbose", "pty",
))  # fmt: skip
"""Options without a counterpart: a run has its own log files, notifications, retries and signals."""
_SBATCH = re.compile(r"^[ \t]*#SBATCH[ \t]+(.*)$", re.MULTILINE)
_MEMORY = {"": 1 / 1024, "M": 1 / 1024, "G": 1, "T": 1024, "K": 1 / 1024**2}


def read_options(words: Iterable[str]) -> dict[str, str]:
    """Parse the words of sbatch options into values by long name."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = normalized(word)
            found[name] = word.partition("=")[2]
        elif re.match(r"-[A-Za-z]", word):
            name = _SHORT.get(word[1], word[1])
            found[name] = word[2:].lstrip("=")
        elif name and not found[name]:
            found[name] = word
    return {_full(_SHORT.get(name, name)): value for name, value in found.items()}


def _full(name: str) -> str:
    """Name of an option that may be abbreviated, as in ``--err``."""
    names = {*_NAMED, *_KNOWN, *_OF_RUN}
    matches = [known for known in names if known.startswith(name)] if len(name) > 2 and name not in names else []
    return matches[0] if len(matches) == 1 else name


def spelled(options: Mapping[str, str]) -> list[str]:
    """Words of the options of a command line, for :func:`read_options`."""
    return [f"-{name}{value}" if len(name) == 1 else f"--{name}={value}" for name, value in options.items()]


def options_in(script: str) -> list[str]:
    """Words of the ``#SBATCH`` lines of a script, without comments; one with unbalanced quotes is split at spaces."""
    words = []
    for found in _SBATCH.finditer(script):
        text = re.sub(r"\s#.*", "", found[1])
        try:
            words += shlex.split(text)
        except ValueError:
            words += text.split()
    return words


def read_slurm(draft: Draft, options: dict[str, str], source: str) -> None:
    """Store a job's options in resources and slurm.

    Args:
        source: ``#SBATCH`` or ``srun``; reports name it.
    """
    nodes = _read_nodes(draft, options, source)
    _read_gpus(draft, options, source, nodes)
    _read_tasks(draft, options, source, nodes)
    _read_memory(draft, options, source)
    _read_time(draft, options, source)
    for name, setting in _NAMED.items():
        if options.get(name):
            draft.set(setting, options[name], f"{source} --{name}")
    if options.get("exclude"):
        # In Slurm's short form, commas within brackets belong to a name.
        draft.set("slurm.exclude", re.split(r",(?![^\[]*\])", options["exclude"]), f"{source} --exclude")
    if options.get("container_image"):
        mounts: list[object] = [mount for mount in options.get("container_mounts", "").split(",") if mount]
        draft.set("slurm.container_kind", "pyxis", f"{source} --container-image", options["container_image"])
        draft.settings |= {"slurm.container_image": options["container_image"], "slurm.container_mounts": mounts}  # type: ignore[dict-item]
    if "exclusive" in options:
        _keep(draft, "exclusive", options["exclusive"], source)
    if options.get("job_name"):
        draft.settings["name"] = options["job_name"]
    known = {*_NAMED, *_KNOWN, *_OF_RUN}
    for name in sorted(options.keys() - known):
        shown = f"{source} --{name.replace('_', '-')}" + (f"={options[name]}" if options[name] else "")
        if name in ("array", "a"):
            draft.missing(shown, "a run is one job: wrap the script once for every value, as runs of their own")
        else:
            draft.missing(shown, "if the job needs it, add it to slurm.extra")


_KNOWN = (
    "nodes", "ntasks", "ntasks_per_node", "gpus", "gpus_per_node", "gpus_per_task", "gres", "cpus_per_task", "mem",
    "time", "exclude", "container_image", "container_mounts", "exclusive", "job_name", "chdir",
)  # fmt: skip


def _read_nodes(draft: Draft, options: dict[str, str], source: str) -> int:
    """Store the number of nodes, and return it; a step that names none runs on those of its job."""
    nodes = number(options.get("nodes", "").partition("-")[0])
    of_job = draft.settings.get("resources.num_nodes")
    if nodes:
        draft.set("resources.num_nodes", nodes, f"nodes ({source})")
    elif options.get("nodes"):
        draft.missing(f"{source} --nodes={options['nodes']}", "set resources.num_nodes")
    elif isinstance(of_job, int):
        nodes = of_job
    else:
        nodes = derived_nodes(options)
        if nodes:
            draft.set("resources.num_nodes", nodes, f"nodes ({source})", f"{nodes}, from tasks or GPUs per node")
    return nodes or 1


def _read_gpus(draft: Draft, options: dict[str, str], source: str, nodes: int) -> None:
    requests = gpu_requests(options)
    found = gpus_per_node(requests, nodes, tasks_per_node(options, nodes) or 1)
    if found:
        name, gpus = found
        draft.set("resources.gpus_per_node", gpus, f"{source} --{name.replace('_', '-')}", requests[name].text)
    if "gpus" in requests:
        total = requests["gpus"].count
        _report_uneven(draft, f"{source} --gpus={total}", total, found and found[1], nodes, "gpus_per_node")
    for request in requests.values():
        draft.settings |= {"slurm.gpu_type": request.kind} if request.kind else {}
    others = other_resources(options.get("gres", ""))
    if others:
        draft.set("slurm.gres", ",".join(others), f"{source} --gres")


def _report_uneven(draft: Draft, what: str, total: int, per_node: int | None, nodes: int, setting: str) -> None:
    """Report a total that is not the number per node, on all nodes."""
    if total != (per_node or 0) * nodes:
        each = f", {per_node} on each" if per_node else ""
        draft.missing(f"{what} with {count(nodes, 'node')}{each}", f"set resources.num_nodes and resources.{setting}")


def _read_tasks(draft: Draft, options: dict[str, str], source: str, nodes: int) -> None:
    tasks = tasks_per_node(options, nodes)
    total = number(options.get("ntasks"))
    if total:
        _report_uneven(draft, f"{source} --ntasks={total}", total, tasks, nodes, "ranks_per_node")
    starts_ranks = draft.line.launcher in ("srun", "python", "")
    if tasks and starts_ranks:
        draft.set("resources.ranks_per_node", tasks, f"tasks on every node ({source})")
    cores = number(options.get("cpus_per_task"))
    if cores:
        # torchrun and similar launchers need one task per node, which starts all its ranks.
        gpus = draft.settings.get("resources.gpus_per_node")
        ranks = 1 if starts_ranks or not isinstance(gpus, int) else max(1, gpus)
        draft.set("resources.cpus_per_rank", max(1, cores // ranks), f"{source} --cpus-per-task", cores)


def _read_memory(draft: Draft, options: dict[str, str], source: str) -> None:
    # A step takes its memory from that of its job.
    if "mem" not in options or "resources.memory_gb" in draft.settings or _is_kept(draft, "mem"):
        return
    memory = re.fullmatch(r"(\d{1,9})([KMGT]?)B?", options["mem"], re.ASCII | re.IGNORECASE)
    if not memory:
        draft.missing(f"{source} --mem={options['mem']}", "set resources.memory_gb")
    elif int(memory[1]):
        found = int(memory[1]) * _MEMORY[memory[2].upper()]
        draft.set("resources.memory_gb", float(f"{found:.6g}"), f"{source} --mem", options["mem"])
    else:  # all memory of the node, whereas resources.memory_gb = 0 is the cluster's default
        _keep(draft, "mem", options["mem"], source)


def _keep(draft: Draft, name: str, value: str, source: str) -> None:
    """Pass an option on to the job as it is, unless a step repeats one of its job."""
    if not _is_kept(draft, name):
        option = f"--{name}={value}" if value else f"--{name}"
        draft.set("slurm.extra", [*_extra(draft), option], f"{source} --{name}", value or "yes")


def _is_kept(draft: Draft, name: str) -> bool:
    return any(normalized(str(option)) == name for option in _extra(draft))


def _extra(draft: Draft) -> list[JsonValue]:
    extra = draft.settings.get("slurm.extra")
    return extra if isinstance(extra, list) else []


def _read_time(draft: Draft, options: dict[str, str], source: str) -> None:
    if options.get("time"):
        seconds = slurm_seconds(options["time"])
        if seconds:
            draft.set("resources.time_limit_s", seconds, f"{source} --time", options["time"])
        else:
            draft.missing(f"{source} --time={options['time']}", "set resources.time_limit_s")
