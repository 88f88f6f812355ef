"""Launchers: their options for nodes, ranks and rendezvous, read and replaced with placeholders."""

import re
from collections.abc import Callable, Mapping

from rlhf_core.launch.wrap.draft import Draft, number
from rlhf_core.launch.wrap.scripts import SCRIPTS
from rlhf_core.shell.known_programs import RAY_GPUS, Launcher
from rlhf_core.shell.launch_line import Role

_TORCHRUN = {
    "nnodes": "{num_nodes}",
    "nproc_per_node": "{ranks_per_node}",
    "node_rank": "{node_rank}",
    "master_addr": "{master_addr}",
    "master_port": "{master_port}",
}
_ACCELERATE = {
    "num_machines": "{num_nodes}",
    "num_processes": "{num_ranks}",
    "machine_rank": "{node_rank}",
    "main_process_ip": "{master_addr}",
    "main_process_port": "{master_port}",
}
_BY_VARIABLES = {
    "NNODES": "{num_nodes}",
    "NODE_RANK": "{node_rank}",
    "NPROC_PER_NODE": "{ranks_per_node}",
    "MASTER_ADDR": "{master_addr}",
    "MASTER_PORT": "{master_port}",
}
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_GIVEN_BY_RUN = "set by the run for every node"


def read_launcher(draft: Draft) -> None:
    """Read nodes, ranks and GPUs from launcher options and variables, and replace them with placeholders."""
    _read_variables(draft)
    for index, item in enumerate(draft.line.items):
        if item.role == "launcher" and draft.words[index] == ("--",):
            draft.words[index] = ()  # options follow the launcher's own, and the program needs no mark
    _LAUNCHERS[draft.line.launcher](draft)
    nodes, ranks = draft.settings.get("resources.num_nodes"), draft.settings.get("resources.ranks_per_node")
    if nodes is None:
        draft.set("resources.num_nodes", 1, "nodes", "not given: 1")
    if ranks is None:
        gpus = draft.settings.get("resources.gpus_per_node")
        one = draft.line.launcher in ("python", "", "swift") and "NPROC_PER_NODE" not in draft.given_variables
        draft.settings["resources.ranks_per_node"] = 1 if one or not gpus else gpus
        if one:
            draft.report("ranks on every node", "one process", "resources.ranks_per_node")
        elif not any(part.what.startswith("ranks on every node") for part in draft.unread):
            draft.missing(
                "ranks on every node",
                f"set resources.ranks_per_node, currently {draft.settings['resources.ranks_per_node']}",
            )
    on_processors = draft.given("argument", "use_cpu", "no_cuda") in ("true", "True", "") or (
        draft.given("argument", "device") == "cpu"
    )
    if on_processors:
        draft.set("resources.gpus_per_node", 0, "GPUs", "none: the launch line selects the CPU")
    if "resources.gpus_per_node" not in draft.settings:
        draft.settings["resources.gpus_per_node"] = 0
        draft.missing(
            "GPUs on every node", "set resources.gpus_per_node (often the number of ranks); currently 0, for CPU"
        )
    if not on_processors and "resources.cpus_per_rank" not in draft.settings:
        user = "Ray and all of its actors on a node" if draft.line.is_of_ray else "each rank"
        draft.missing(
            "cores",
            f"set resources.cpus_per_rank, currently 1 core for {user}: the cores of a node divided by "
            "resources.ranks_per_node, if the job has its nodes to itself",
        )


def _read_variables(draft: Draft) -> None:
    for name, value in draft.variables.copy().items():
        if name in _BY_VARIABLES:
            draft.variables[name] = _BY_VARIABLES[name]
        elif name in _OF_RANKS:
            del draft.variables[name]
            draft.report(name, value, "removed: set for every rank by the run")
    devices = draft.variables.pop("CUDA_VISIBLE_DEVICES", None)
    if devices is not None:
        ids = [one for one in devices.split(",") if one.strip() not in ("", "-1")]
        if "$" in devices:
            draft.report("CUDA_VISIBLE_DEVICES", devices, _GIVEN_BY_RUN)
        else:
            draft.set("resources.gpus_per_node", len(ids), "GPUs (CUDA_VISIBLE_DEVICES)", devices)


def _counts(draft: Draft, nodes: str | None, ranks: str | None) -> None:
    """Store numbers as given; report a value that is not a number."""
    for setting, what, text in (
        ("resources.num_nodes", "nodes", nodes),
        ("resources.ranks_per_node", "ranks on every node", ranks),
    ):
        found, requested = number(text), draft.settings.get("resources.num_nodes")
        if found is not None:
            if setting == "resources.num_nodes" and requested not in (None, found):
                draft.missing(
                    f"nodes: {found} in the launch line, but the job requests {requested}",
                    f"correct one of them, and resources.num_nodes, currently {found}: the ranks wait for every node",
                )
            draft.set(setting, found, what)
        elif text and setting not in draft.settings:
            draft.missing(f"{what}: {text}", f"set {setting}; the launch line has a placeholder there")


def _torchrun(draft: Draft) -> None:
    nodes = draft.given("launcher_option", "nnodes")
    if nodes and re.fullmatch(r"\d+:\d+", nodes):
        draft.missing(f"elastic number of nodes {nodes}", "the number is fixed; resources.num_nodes is the larger one")
        nodes = nodes.partition(":")[2]
    _counts(draft, nodes, _ranks_or_gpus(draft, draft.given("launcher_option", "nproc_per_node")))
    # A static rendezvous numbers ranks by node, as a run's evidence does; c10d numbers them by arrival.
    gone = draft.drop(
        "launcher_option", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr"
    )
    if gone:
        draft.report(
            "rendezvous", ", ".join(filter(None, gone)) or "--standalone", "--master_addr and --master_port of the run"
        )
    if any(count not in ("", "0") for count in draft.drop("launcher_option", "max_restarts")):
        draft.report("--max_restarts", "of torchrun", "removed: supervise.max_restarts, from the newest checkpoint")
    _drop_logs(draft)
    _put(draft, _TORCHRUN)


def _drop_logs(draft: Draft) -> None:
    """Remove the launcher's options for the output of its ranks, which would then be in no log of the run."""
    for names in (("redirects", "r"), ("tee", "t"), ("log_dir",)):
        for value in draft.drop("launcher_option", *names):
            draft.report(f"--{names[0]}", value, "removed: the run keeps the output of every rank (rlhf logs)")


def _ranks_or_gpus(draft: Draft, ranks: str | None) -> str | None:
    gpus = draft.settings.get("resources.gpus_per_node")
    return str(gpus) if ranks in ("gpu", "auto") and gpus else ranks


def _put(draft: Draft, options: Mapping[str, str]) -> None:
    for name, value in options.items():
        draft.put("launcher_option", [name], value, f"--{name}=")
    draft.report("meeting point and node ranks", "options of the launcher", "placeholders in trainer.argv")


def _accelerate(draft: Draft) -> None:
    total = _accelerate_counts(draft, "launcher_option")
    ids = draft.drop("launcher_option", "gpu_ids")
    if ids and ids[-1] != "all" and "resources.gpus_per_node" not in draft.settings:
        draft.set("resources.gpus_per_node", len(ids[-1].split(",")), "GPUs (--gpu_ids)", ids[-1])
    if draft.find("launcher_option", "cpu") is not None and (number(total) or 1) > 1:
        draft.missing(
            f"--cpu with {total} processes: accelerate starts one of them and expects mpirun to start the others",
            "start the program with torchrun --nproc_per_node instead, and wrap that line",
        )
    if draft.find("launcher_option", "cpu") is not None:
        draft.settings.setdefault("resources.gpus_per_node", 0)
    draft.drop("launcher_option", "rdzv_backend", "rdzv_conf", "same_network", "max_restarts")
    _drop_logs(draft)
    by_deepspeed = draft.find("launcher_option", "use_deepspeed") is not None
    if by_deepspeed or draft.in_files("distributed_type") == "DEEPSPEED":
        draft.drop("launcher_option", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
        # By default it starts `deepspeed`, which reaches nodes through ssh, or trains on its own node alone.
        name = "deepspeed_multinode_launcher"
        draft.put("launcher_option", [name], "standard", f"--{name}=")
    _put(draft, _ACCELERATE)


def _accelerate_counts(draft: Draft, role: Role) -> str | None:
    """Store the numbers that accelerate's options give, and return that of all processes as given."""
    nodes = draft.given(role, "num_machines") or draft.in_files("num_machines")
    total = draft.given(role, "num_processes") or draft.in_files("num_processes")
    machines, processes = number(nodes) or 1, number(total)
    if processes is not None and processes % machines == 0:
        _counts(draft, nodes, str(processes // machines))
    else:
        _counts(draft, nodes, total if processes is None else None)
    return total


def _deepspeed(draft: Draft) -> None:
    nodes = draft.given("launcher_option", "num_nodes")
    ranks = draft.given("launcher_option", "num_gpus")
    include = draft.given("launcher_option", "include", "i") or ""
    hosts = [part for part in include.split("@") if part]
    slots = hosts[0].partition(":")[2] if hosts else ""
    hostfile = draft.given("launcher_option", "hostfile", "H")
    listed = (
        re.findall(r"^\s*[^#\s]\S*\s+slots=(\d+)", draft.around.read_file(hostfile) or "", re.M) if hostfile else []
    )
    if hostfile and not listed:
        absent = "" if draft.around.exists(hostfile) else ": there is no such file"
        draft.missing(f"the nodes of {hostfile}{absent}", "set resources.num_nodes and resources.ranks_per_node")
    _counts(
        draft,
        nodes or str(len(hosts) or len(listed) or ""),
        ranks or (str(len(slots.split(","))) if slots else listed[0] if listed else None),
    )
    if "resources.ranks_per_node" in draft.settings:  # deepspeed starts one rank per GPU, and none without GPUs
        draft.settings.setdefault("resources.gpus_per_node", draft.settings["resources.ranks_per_node"])
    for index, item in enumerate(draft.line.items):
        if item.role == "launcher":
            draft.words[index] = ("torchrun",) if draft.words[index] else ()
        elif item.role == "launcher_option" and item.name in ("module", "no_python"):
            draft.words[index] = ("-m",) if item.name == "module" else ("--no-python",)
        elif item.role == "launcher_option":
            draft.words[index] = ()
    draft.report("deepspeed", "reaches nodes through ssh", "torchrun, which the agent of each node starts")
    draft.missing(
        "--local_rank: deepspeed gives it to the program, torchrun sets LOCAL_RANK instead",
        "nothing, if the program accepts both (deepspeed and transformers do)",
    )
    draft.launcher_words += [f"--{name}={value}" for name, value in _TORCHRUN.items()]


def _by_variables(draft: Draft) -> None:
    given = draft.given_variables
    _counts(draft, given.get("NNODES"), given.get("NPROC_PER_NODE"))
    draft.variables |= _BY_VARIABLES
    draft.report("meeting point and node ranks", "NNODES, NODE_RANK and the like", "placeholders in trainer.variables")


def _llamafactory(draft: Draft) -> None:
    draft.variables["FORCE_TORCHRUN"] = "1"
    gpus = draft.settings.get("resources.gpus_per_node")
    if gpus and "NPROC_PER_NODE" not in draft.given_variables:
        draft.set("resources.ranks_per_node", gpus, "ranks on every node", f"one on each of {gpus} GPUs")
    _by_variables(draft)


def _trl(draft: Draft) -> None:
    _accelerate_counts(draft, "argument")
    for name, value in _ACCELERATE.items():
        draft.put("argument", [name], value, f"--{name}")
    draft.report("meeting point and node ranks", "options of accelerate", "placeholders in trainer.argv")


def _axolotl(draft: Draft) -> None:
    _counts(draft, None, draft.given("argument", "num_processes", "nproc_per_node"))
    draft.drop("argument", "launcher", "num_processes", "nproc_per_node")
    ends = [index for index, words in enumerate(draft.words) if words == ("--",)]
    for index in range(ends[0], len(draft.words)) if ends else ():
        draft.words[index] = ()
    draft.last_words += ["--launcher", "torchrun"]
    draft.report("meeting point and node ranks", "options of torchrun", "placeholders in trainer.argv")


def axolotl_launcher_words() -> list[str]:
    """Options of torchrun in axolotl's form, after everything else."""
    return ["--", *(f"--{name}={value}" for name, value in _TORCHRUN.items())]


def _per_rank(draft: Draft) -> None:
    program = draft.line.program[0]
    if program.endswith(SCRIPTS):
        draft.missing(
            f"the script {program}: it could not be read",
            'wrap it where it is, if it starts the ranks, set trainer.launch = "per_node"',
        )
    draft.set("trainer.launch", "per_rank", "launcher", "none: each rank is started by the run")


_RAY_NODES = ("trainer.nnodes", "actor_num_nodes", "actor.num_nodes", "cluster.num_nodes")
_RAY_NODE = (
    "{drivers}/ray_node.sh", "{node_rank}", "{num_nodes}", "{master_addr}", "{master_port}", "{gpus_per_node}",
    "{output_dir}/ray-{attempt}-{restart}",
)  # fmt: skip
"""Start of a launch line that starts Ray on its nodes, and the program on the first one."""
_SHARED = ("colocate_all_models", "colocate_all", "train.colocate_all", "colocate")
_OF_ALL_NODES = ("trainer.n_gpus_per_node", "cluster.gpus_per_node")
"""Options for the GPUs of a node that all parts of the program share."""


_STEP_OF_RAY_S = 1800.0
"""Silence allowed to a program on Ray, in seconds: only its steps are seen, which last for minutes."""


def _python(draft: Draft) -> None:
    if not draft.line.is_of_ray:
        _per_rank(draft)
        return
    nodes = draft.given("argument", *_RAY_NODES)
    gpus = number(draft.given("argument", *RAY_GPUS))
    shares = draft.find("argument", *_SHARED, *_OF_ALL_NODES) is not None
    draft.set("trainer.launch", "per_node", "launcher", "Ray, which the program starts itself")
    draft.set("supervise.floor_s", _STEP_OF_RAY_S, "longest step", f"not given: {_STEP_OF_RAY_S:g} s")
    # Parts of the program with nodes of their own are more than one of them; the job has them all.
    _counts(draft, None if "resources.num_nodes" in draft.settings and not shares else nodes, "1")
    if gpus and shares:
        draft.set("resources.gpus_per_node", gpus, "GPUs on every node")
        draft.put("argument", _RAY_NODES, "{num_nodes}", "")
        draft.put("argument", RAY_GPUS, "{gpus_per_node}", "")
    if draft.settings.get("resources.num_nodes", 1) != 1:
        first = next(index for index, item in enumerate(draft.line.items) if item.role in ("launcher", "program"))
        draft.words[first] = (*_RAY_NODE, *draft.words[first])
        draft.report("Ray on all nodes", "not in the launch line", "ray_node.sh before the program")


def _mpirun(draft: Draft) -> None:
    total = draft.given("launcher_option", "np", "n", "c")
    _counts(draft, None, total)
    items = draft.line.items
    python = [index for index, item in enumerate(items) if item.role == "launcher"][1:]
    for index in range(python[0] if python else len(items)):
        if items[index].role == "launcher_option" and items[index].name == "x":
            name, is_given, value = draft.value_at(index).partition("=")
            draft.variables |= {name: value} if is_given else {}
        if items[index].role in ("launcher", "launcher_option"):
            draft.words[index] = ()
    draft.missing(
        "mpirun: the run starts the ranks itself, with RANK, LOCAL_RANK and WORLD_SIZE",
        "change the program if it reads OMPI_COMM_WORLD_RANK or uses MPI itself; set resources.num_nodes for several",
    )
    _per_rank(draft)


def _unknown(draft: Draft) -> None:
    draft.missing(
        f"the program {' '.join(draft.line.program)[:100] or '(none)'}: it is started once on every node",
        'if it starts no ranks itself, set trainer.launch = "per_rank"; if it does, pass it {num_nodes}, '
        "{ranks_per_node}, {node_rank}, {master_addr} and {master_port} in its own options",
    )


_LAUNCHERS: Mapping[Launcher, Callable[[Draft], None]] = {
    "torchrun": _torchrun,
    "torchtune": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "swift": _by_variables,
    "llamafactory": _llamafactory,
    "trl": _trl,
    "axolotl": _axolotl,
    "mpirun": _mpirun,
    "srun": _python,
    "python": _python,
    "": _unknown,
}
