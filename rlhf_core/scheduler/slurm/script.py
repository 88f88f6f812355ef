"""Batch script of a job: options of sbatch, the environment, and the command that starts an agent on every node."""

import contextlib
import math
import os
import shlex
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmExecutor

from rlhf_core.errors import SubmissionFailed
from rlhf_core.machine.gpus import HIP_VARIABLE, ROCR_VARIABLE, VISIBLE_VARIABLE
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.scheduler.passed_environment import without_private
from rlhf_core.scheduler.slurm import commands
from rlhf_core.scheduler.slurm.acceptance import accepted_job
from rlhf_core.scheduler.slurm.environment import OPTIONS_OF_THE_JOB, end_of_job, export_option, for_submission
from rlhf_core.schemas.resources import job_marker
from rlhf_core.schemas.slurm_values import CONTROL, NODE_NAMES

SUBMIT_S = 180.0
"""Timeout of sbatch, which itself asks a busy controller again for two minutes."""

# The address of each node, from one query to the controller; without an answer, the node's name is used.
# A separate step, so that nodes are listed in the order of the allocation, which SLURM_NODEID counts.
_NODES_LINES = (
    "declare -A rlhf_address",
    "while read -r name address; do rlhf_address[$name]=$address; done < <(scontrol --oneliner show node "
    '"$SLURM_JOB_NODELIST" | sed -n "s/^NodeName=\\([^ ]*\\) .*NodeAddr=\\([^ ]*\\) .*/\\1 \\2/p")',
    'for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do',
    '  RLHF_NODES="${RLHF_NODES:+$RLHF_NODES,}$name=${rlhf_address[$name]:-$name}"',
    "done",
    "export RLHF_NODES",
)


class AgentExecutor(SlurmExecutor):  # type: ignore[misc]
    """submitit's Slurm executor with our command line, and without pickles."""

    def __init__(self, request: JobRequest) -> None:
        super().__init__(folder=request.scheduler_dir)
        self._request = request
        self._internal_update_parameters(**_parameters(request))

    @property
    def _submitit_command_str(self) -> str:
        request, slurm = self._request, self._request.slurm
        command = shlex.join(request.command)
        if slurm.container_kind != "apptainer":
            return command
        words = ["apptainer", "exec", *(["--nv"] if request.placement.gpus_per_node else [])]
        words += [word for mount in _mounts(request) for word in ("--bind", mount)]
        return f"{shlex.join([*words, slurm.container_image])} {command}"

    def text(self, name: str) -> str:
        """Render the batch script."""
        return str(self._make_submission_file_text(self._submitit_command_str, name))

    def submit_script(self) -> str:
        """Write the batch script and submit it; returns the number of the job.

        Raises:
            OSError: it could not be written; nothing was submitted.
            SchedulerError: as :meth:`rlhf_core.scheduler.slurm.scheduler.SlurmScheduler.submit`.
        """
        # With our own environment, which sbatch passes on to the job. This keeps secrets out of scripts and of
        # command lines, which every user of this host can read.
        environment = for_submission(without_private(os.environ), self._request.slurm)
        secrets = self._request.passed.values()
        script = self.folder / f".submission_file_{uuid.uuid4().hex}.sh"
        script.write_text(self.text(script.stem), encoding="utf-8")
        words = ["sbatch", *export_option(self._request, environment), str(script)]
        job_id = accepted_job(commands.run_to_end(words, environment | secrets, SUBMIT_S))
        # The job is accepted, and Slurm has its own copy of the script: no error may hide its number from here on.
        with contextlib.suppress(OSError):
            JobPaths(self.folder, job_id).move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job_id

    @classmethod
    def affinity(cls) -> int:
        return 2  # calls that need Slurm report a missing srun, with a better message


def _parameters(request: JobRequest) -> dict[str, object]:
    """Parameters for submitit; options that it has no name for are passed on unchanged."""
    slurm, placement = request.slurm, request.placement
    minutes = math.ceil(request.time_limit_s / 60)
    # Agents save on this signal; submitit would take another one from SUBMITIT_PREEMPT_SIGNAL. Not in the first half of
    # the job, or it would never get to train.
    signal = f"USR2@{min(slurm.save_lead_s, minutes * 30)}"
    # Not the current folder: that of a flow run is temporary, and differs for a later attempt.
    further: dict[str, object] = {"no-requeue": True, "chdir": str(request.scheduler_dir), "signal": signal}
    if slurm.reservation:
        further["reservation"] = slurm.reservation
    if placement.gpus_per_node and not slurm.gpus_as_gres:
        further["exclusive"] = True  # Slurm might give another job the same GPUs
    further |= dict(_further_options(slurm.extra))
    further.pop("exclude", None)
    further = {name: _one_line(name, value) for name, value in further.items()}
    gpus = f"{slurm.gpu_type}:{placement.gpus_per_node}" if slurm.gpu_type else placement.gpus_per_node
    parameters = {
        "job_name": request.run_id,
        "comment": job_marker(request.run_id, placement.attempt),
        "nodes": placement.num_nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": request.cpus_per_node,
        "gpus_per_node": gpus if placement.gpus_per_node and slurm.gpus_as_gres else None,
        "mem": f"{math.ceil(request.memory_gb * 1024)}M" if request.memory_gb else None,
        "time": minutes,
        "partition": slurm.partition or None,
        "account": slurm.account or None,
        "qos": slurm.qos or None,
        "constraint": slurm.constraint or None,
        "gres": slurm.gres or None,
        "exclude": ",".join(_excluded_nodes(request)) or None,
        "stderr_to_stdout": True,
        "setup": [*_exports(request), *_require_passed(request), *_NODES_LINES, *slurm.setup],
        "srun_args": _srun_arguments(request),
        "additional_parameters": further,
    }
    # An option in slurm.extra replaces ours, which submitit spells with underscores and would write after it.
    replaced = {name.replace("-", "_") for name in further if name not in OPTIONS_OF_THE_JOB}
    given = {
        name: _one_line(name, value) for name, value in parameters.items() if value is not None and name not in replaced
    }
    return {**given, "wckey": None}  # submitit would set its own name, which clusters that check wckeys reject


def _excluded_nodes(request: JobRequest) -> Sequence[str]:
    """Nodes to exclude, those of options in ``slurm.extra`` included: of several options, Slurm would only take the
    last.

    Raises:
        SubmissionFailed: an option names a file that cannot be read, or something other than nodes.
    """
    named = [*request.placement.excluded_nodes, *request.slurm.exclude]
    for value in request.slurm.in_extra("exclude"):
        named += _nodes_in_file(Path(value)) if "/" in value else [_node_names(value, "--exclude")]
    return list(dict.fromkeys(filter(NODE_NAMES.fullmatch, named)))


def _nodes_in_file(path: Path) -> list[str]:
    """Nodes that a file lists, as sbatch reads it: one or several in a line, with comments."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SubmissionFailed(f"slurm.extra: --exclude: cannot read {path}: {error.strerror}") from None
    words = [word for line in text.splitlines() for word in line.partition("#")[0].split()]
    return [_node_names(word.strip(","), str(path)) for word in words]


def _node_names(text: str, where: str) -> str:
    if not NODE_NAMES.fullmatch(text):
        raise SubmissionFailed(f"slurm.extra: {where}: found {text!r}, expected names of nodes such as node[1-3],node7")
    return text


def _one_line(name: str, value: object) -> object:
    """Return the value of an option unchanged, if it is one line: quotes do not help against a line break in an
    ``#SBATCH`` line, the rest of which becomes a line of the script.

    Raises:
        SubmissionFailed: it contains a control character, such as a line break; the message names the option.
    """
    if isinstance(value, str) and CONTROL.search(value):
        raise SubmissionFailed(
            f"sbatch --{name.replace('_', '-')}: found {value!r}, expected one line without control characters. "
            "Correct it in the config, or move the run to a folder with a path without them"
        )
    return value


def _exports(request: JobRequest) -> Iterator[str]:
    has_gpus, assigned = request.placement.gpus_per_node > 0, request.slurm.gpus_as_gres
    if has_gpus and not assigned:
        yield f"unset {VISIBLE_VARIABLE} {HIP_VARIABLE} {ROCR_VARIABLE}"  # of the shell that submits
    for name, value in request.environment().items():
        # Slurm assigns the GPUs; if it assigns none, the job must see none.
        if name != VISIBLE_VARIABLE or not (has_gpus and assigned):
            yield f"export {name}={shlex.quote(value)}"
    yield end_of_job(request)


def _require_passed(request: JobRequest) -> Iterator[str]:
    for name in request.passed.names:
        why = "named in slurm.pass_environment, but the job did not receive it; does the cluster filter variables?"
        yield f': "${{{name}:?{why}}}"'


def _srun_arguments(request: JobRequest) -> list[str]:
    # Since Slurm 22.05, srun no longer inherits the number of cores from sbatch. On sites with SBATCH_EXPORT=NONE, it
    # would also withhold what the batch script exports.
    cpus = [str(request.cpus_per_node), *request.slurm.in_extra("cpus-per-task")][-1]
    words = ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", "--export=ALL"]
    if request.slurm.container_kind == "pyxis":
        words += [f"--container-image={request.slurm.container_image}"]
        words += [f"--container-mounts={','.join(_mounts(request))}"]
    return words


def _mounts(request: JobRequest) -> list[str]:
    run_dir = request.scheduler_dir.parents[2]
    return [f"{run_dir}:{run_dir}", *request.slurm.container_mounts]


def _further_options(options: Sequence[str]) -> Iterator[tuple[str, object]]:
    for option in options:
        name, equals, value = option.removeprefix("--").partition("=")
        yield name, value if equals else True
