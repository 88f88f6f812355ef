"""Options passed to Slurm, and the parsing of its output, without a cluster."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from control_fakes import Clock
from job_requests import job_request
from submitit.slurm.slurm import SlurmJobEnvironment

from rlhf_core.errors import SchedulerError, SchedulerUnavailable, SubmissionDeferred, SubmissionFailed
from rlhf_core.scheduler.base import JobRequest, JobState
from rlhf_core.scheduler.slurm import commands, jobs, queue
from rlhf_core.scheduler.slurm import scheduler as slurm_scheduler
from rlhf_core.scheduler.slurm.acceptance import is_no_answer, refusal, will_pass
from rlhf_core.scheduler.slurm.environment import for_submission
from rlhf_core.scheduler.slurm.jobs import query_job, status_of
from rlhf_core.scheduler.slurm.nodes import gpu_type, num_gpus, takes_no_job
from rlhf_core.scheduler.slurm.queue import QueuedJob
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import Inventory, Submission
from rlhf_core.schemas.slurm_values import is_named


def request(gpus: int = 0, excluded: tuple[str, ...] = (), time_limit_s: int = 3600, **slurm: object) -> JobRequest:
    return job_request(
        Path("/runs/toy-1/attempts/2/scheduler"),
        *("/opt/my python", "-m", "rlhf_core.worker", "agent"),
        run_id="toy-1",
        num_ranks=8,
        placed={"attempt": 2, "num_nodes": 4, "gpus_per_node": gpus, "excluded_nodes": excluded},
        cpus_per_node=8,
        memory_gb=1.5,
        time_limit_s=time_limit_s,
        slurm=SlurmSpec.model_validate(slurm),
    )


def submittable(folder: Path, **slurm: object) -> JobRequest:
    """A request that can be submitted here: its files are in this folder, and its program exists."""
    scheduler_dir = folder / "attempts" / "2" / "scheduler"
    return replace(request(**slurm), scheduler_dir=scheduler_dir, command=(sys.executable,))  # type: ignore[arg-type]


def script(**job_request: object) -> str:
    return SlurmScheduler().script(request(**job_request))  # type: ignore[arg-type]


def test_the_plain_script_names_run_and_attempt_and_starts_one_agent_per_node() -> None:
    text = script()
    for line in (
        "--comment=toy-1/2",
        "--job-name=toy-1",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--mem=1536M",
        "--time=60",
        "--no-requeue",
        "--chdir=/runs/toy-1/attempts/2/scheduler",
        "--signal=USR2@120",
        "--output=/runs/toy-1/attempts/2/scheduler/%j_0_log.out",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "export RLHF_JOB=toy-1/2" in text
    assert "export CUDA_VISIBLE_DEVICES=''" in text
    assert "export HIP_VISIBLE_DEVICES=-1" in text, "HIP ignores an empty list"
    assert "export RLHF_NODES" in text
    command = next(line for line in text.splitlines() if line.startswith("srun"))
    assert "--kill-on-bad-exit=1" in command
    assert "--cpus-per-task=8" in command
    assert "--export=ALL" in command
    assert command.endswith("'/opt/my python' -m rlhf_core.worker agent")
    for absent in ("wckey", "gpus", "exclude", "partition"):
        assert absent not in text.partition("# command")[0].replace("SUBMITIT", "")
    assert "pickle" not in text
    assert "submitit.core" not in text


def test_a_script_with_all_options() -> None:
    text = script(
        gpus=8,
        excluded=("node3",),
        partition="gpu",
        account="nlp",
        qos="high",
        constraint="ib",
        gpu_type="h100",
        gres="nvme:1",
        reservation="friday",
        exclude=("node9", "node3"),
        setup=("module load cuda",),
        environment={"NCCL_DEBUG": "WARN"},
        save_lead_s=300,
        extra=("--exclusive", "--switches=1"),
    )
    for line in (
        "--partition=gpu",
        "--account=nlp",
        "--qos=high",
        "--constraint=ib",
        "--gpus-per-node=h100:8",
        "--gres=nvme:1",
        "--reservation=friday",
        "--exclude=node3,node9",
        "--signal=USR2@300",
        "--exclusive",
        "--switches=1",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "module load cuda" in text
    assert "export NCCL_DEBUG=WARN" in text
    assert "VISIBLE_DEVICES" not in text  # Slurm assigns them


def test_further_options_replace_those_of_the_settings() -> None:
    """Slurm takes the last of two options, and submitit writes its own after these."""
    extra = ("--gpus-per-node=h100:8", "cpus-per-task=96", "--mem=0", "--partition=fast")
    text = script(gpus=8, partition="gpu", extra=extra)
    for option in ("gpus-per-node=h100:8", "cpus-per-task=96", "mem=0", "partition=fast"):
        assert f"#SBATCH --{option}\n" in text
        assert text.count(f"#SBATCH --{option.partition('=')[0]}=") == 1
    assert "srun --unbuffered" in text
    assert "--kill-on-bad-exit=1 --cpus-per-task=96 " in text


def test_whole_nodes_are_requested_where_slurm_does_not_manage_gpus() -> None:
    """sbatch refuses --gpus-per-node there: "Invalid generic resource (gres) specification"."""
    text = script(gpus=8, gpu_type="h100", gpus_as_gres=False)
    assert "#SBATCH --exclusive\n" in text
    assert "gpus-per-node" not in text
    every = "unset CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES\n"
    assert every in text, "whatever the shell that submits may see"
    assert "export CUDA_VISIBLE_DEVICES" not in text
    some = script(gpus=4, gpus_as_gres=False, environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert "export CUDA_VISIBLE_DEVICES=0,1,2,3\n" in some.partition(every)[2]
    assert "unset" not in script(gpus_as_gres=False)
    assert "#SBATCH --exclusive=user\n" in script(gpus=8, gpus_as_gres=False, extra=("--exclusive=user",))
    assert "exclusive" not in script(gpus_as_gres=False), "the control: a job on CPU"


def test_nodes_of_an_own_option_are_excluded_beside_those_at_fault() -> None:
    """Slurm takes only the last of two such options."""
    text = script(excluded=("node3",), exclude=("node9",), extra=("--exclude=node[1,5],node9",))
    assert "#SBATCH --exclude='node3,node9,node[1,5],node9'\n" in text
    assert text.count("--exclude") == 1
    of_site_and_run = script(excluded=("node3",), extra=("--exclude=node1", "--exclude=node5"))
    assert "#SBATCH --exclude=node3,node1,node5\n" in of_site_and_run


def test_nodes_of_a_file_are_excluded_beside_those_at_fault(tmp_path: Path) -> None:
    listed = tmp_path / "bad_nodes"
    listed.write_text("# slow since May\nnode[1-2],node7\n\nnode9 # disk\n")
    text = script(excluded=("node3",), extra=(f"--exclude={listed}",))
    assert "#SBATCH --exclude='node3,node[1-2],node7,node9'\n" in text
    assert text.count("--exclude") == 1
    listed.write_text("node1; rm -rf /\n")
    with pytest.raises(SubmissionFailed, match=r"bad_nodes: found 'node1;', expected names of nodes"):
        script(extra=(f"--exclude={listed}",))
    with pytest.raises(SubmissionFailed, match="cannot read /etc/no_such_file: No such file"):
        script(extra=("--exclude=/etc/no_such_file",))


@pytest.mark.parametrize(
    ("text", "named", "others"),
    [
        ("node7", "node7", "node70 node07"),
        ("node[1-3,7]", "node1 node3 node7", "node4 node01 node"),
        ("node[08-11]", "node08 node11", "node8 node12"),
        ("a1,rack[1-2]n[01-16]", "a1 rack2n16", "rack3n01 rack1n1"),
        ("node[1-", "", "node1"),
    ],
)
def test_names_of_nodes_in_short_form(text: str, named: str, others: str) -> None:
    assert [name for name in (*named.split(), *others.split()) if is_named(name, [text])] == named.split()


def test_nodes_excluded_in_short_form_do_not_count_as_available() -> None:
    names = tuple(f"node{number}" for number in range(1, 6))
    inventory = Inventory(node_names=names, cpus_per_node=1, memory_gb=1, gpus_per_node=0)
    slurm = SlurmSpec(exclude=("node[1-2]",), extra=("--exclude=node5", "--exclude=/etc/bad_nodes"))
    assert inventory.nodes_for(slurm) == ["node3", "node4"]


@pytest.mark.parametrize("option", ["--partition=large", "partition=large"])
def test_a_partition_among_further_options_counts(option: str) -> None:
    assert SlurmSpec(partition="small", extra=(option,)).partitions == {"large"}


def test_a_job_number_that_slurm_gave_again_is_not_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a new installation, numbers begin at 1 again: the job of another run, of this user or of another one is
    neither awaited nor cancelled.

    Controls: a job whose comment a plug-in has rewritten, and one that was also renamed, are the job.
    """
    asked = []
    folder = "/runs/toy-1/attempts/1/scheduler"
    rows = {
        "7": QueuedJob("7", "RUNNING", "None", "node1", "N/A", "toy-2/1"),
        "8": QueuedJob("8", "RUNNING", "None", "node1", "N/A", "(null)", "/home/me", "notebook"),
        "10": QueuedJob("10", "RUNNING", "None", "node1", "N/A", "billed", "/elsewhere", "toy-1"),
        "11": QueuedJob("11", "RUNNING", "None", "node1", "N/A", "billed", folder, "renamed"),
    }

    def run(*words: str, **_: object) -> str:
        asked.append(words[0])
        return "9|RUNNING|None|node1|N/A|/home/anna\tbert\t(null)\n"

    monkeypatch.setattr(queue, "listing", lambda **_: queue.Listing(0.0, rows))
    monkeypatch.setattr(commands, "run", run)
    ids = ("7", "8", "9", "10", "11")
    jobs = [Submission(attempt=1, scheduler="slurm", job_id=job_id, command=(), marker="toy-1/1") for job_id in ids]
    found = SlurmScheduler().status(jobs)
    assert [found[job_id].state for job_id in ids] == [*[JobState.ENDED] * 3, *[JobState.RUNNING] * 2]
    others = ["toy-2/1", "notebook", "bert"]
    assert [found[job_id].reason.rpartition("to ")[2] for job_id in ids[:3]] == others
    assert all(SlurmScheduler().cancel(job) for job in jobs[:3])
    assert "scancel" not in asked


@pytest.mark.parametrize(("state", "ends_after_s", "is_gone"), [("COMPLETING", 240, True), ("RUNNING", 240, False)])
def test_a_job_that_slurm_completes_is_given_the_time_of_an_epilog(
    state: str, ends_after_s: float, is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: one that keeps running for as long although it was told to end."""
    clock = Clock()

    def listing(**_: object) -> queue.Listing:
        word = state if clock.now < ends_after_s else "COMPLETED"
        return queue.Listing(0.0, {"7": QueuedJob("7", word, "None", "node1", "N/A", "toy-1/1")})

    monkeypatch.setattr(queue, "listing", listing)
    monkeypatch.setattr(commands, "run", lambda *words, **_: "node1 mix" if words[0] == "sinfo" else "")
    monkeypatch.setattr(slurm_scheduler, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep))
    job = Submission(attempt=1, scheduler="slurm", job_id="7", command=(), marker="toy-1/1")
    assert SlurmScheduler().cancel(job) is is_gone


def test_a_job_that_slurm_completes_needs_no_order_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reconciler would wait for it in every round, and note that it could not be ended."""
    states = {"7": "RUNNING", "8": "COMPLETING", "9": "COMPLETED"}
    rows = {job_id: QueuedJob(job_id, state, "None", "n1", "N/A", "toy-1/1") for job_id, state in states.items()}
    monkeypatch.setattr(queue, "listing", lambda **_: queue.Listing(0.0, rows))
    monkeypatch.setattr(commands, "cluster_name", lambda: "throwaway")
    assert [one.submission.job_id for one in SlurmScheduler().living()] == ["7"]


def test_the_signal_to_save_is_never_in_the_first_half_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell's SUBMITIT_PREEMPT_SIGNAL, which submitit reads when it is imported, must not change it either: agents
    die of other signals."""
    monkeypatch.setattr(SlurmJobEnvironment, "USR_SIG", "USR1")
    assert "--signal=USR2@60\n" in script(time_limit_s=120)


def test_a_job_knows_when_its_limit_ends_it() -> None:
    """From Slurm itself, or from a version that does not tell: counted from the start of the script."""
    (line,) = (line for line in script(time_limit_s=90).splitlines() if "RLHF_JOB_ENDS_AT" in line)
    told = ["bash", "-c", f"{line}; echo $RLHF_JOB_ENDS_AT"]
    environment = {"PATH": os.environ["PATH"]}
    assert _printed(told, {**environment, "SLURM_JOB_END_TIME": "1800000000"}) == 1_800_000_000
    assert 80 < _printed(told, environment) - time.time() < 91


def _printed(command: list[str], environment: dict[str, str]) -> int:
    return int(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)


def test_containers() -> None:
    pyxis = script(container_kind="pyxis", container_image="img.sqsh", container_mounts=("/data:/data",))
    assert "--container-image=img.sqsh --container-mounts=/runs/toy-1:/runs/toy-1,/data:/data" in pyxis
    apptainer = script(gpus=1, container_kind="apptainer", container_image="img.sif")
    assert "apptainer exec --nv --bind /runs/toy-1:/runs/toy-1 img.sif '/opt/my python' -m" in apptainer


def test_the_site_fills_in_missing_settings_of_the_run() -> None:
    site = SlurmSpec(
        partition="batch", account="nlp", exclude=("bad1",), setup=("a",), environment={"A": "1", "B": "1"}
    )
    run = SlurmSpec(partition="gpu", exclude=("bad2",), setup=("b",), environment={"B": "2"})
    both = run.over(site)
    assert (both.partition, both.account) == ("gpu", "nlp")
    assert both.exclude == ("bad1", "bad2")
    assert both.setup == ("a", "b")
    assert both.environment == {"A": "1", "B": "2"}
    assert SlurmSpec().over(site) == site


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", JobState.PENDING),
        ("CONFIGURING", JobState.PENDING),
        ("RUNNING", JobState.RUNNING),
        ("SUSPENDED", JobState.RUNNING),
        ("COMPLETING", JobState.RUNNING),  # some of its processes may still run
        ("COMPLETED", JobState.ENDED),
        ("CANCELLED by 1000", JobState.ENDED),
        ("PREEMPTED", JobState.ENDED),
        ("OUT_OF_MEMORY", JobState.ENDED),
        ("A_STATE_OF_TOMORROW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),  # a line that was cut short
    ],
)
def test_states(state: str, expected: JobState) -> None:
    status = status_of(QueuedJob("1", state, "None", "node1", "N/A", "toy-1/2"))
    assert status.state is expected
    assert status.scheduler_state == (state.partition(" ")[0] or "?")


@pytest.mark.parametrize(
    ("accounted", "user", "expected"),
    [
        ("CANCELLED by 0", 1000, "CANCELLED by 0"),
        ("CANCELLED by 0", 0, "CANCELLED"),  # the user is root
        ("CANCELLED by 1000", 1000, "CANCELLED"),
        ("CANCELLED by 5001", 1000, "CANCELLED by another user (uid 5001)"),  # an operator, or the user slurm
        ("CANCELLED by 5001", 0, "CANCELLED by another user (uid 5001)"),
        ("", 1000, "CANCELLED"),  # no accounting
    ],
)
def test_cancellations_by_an_administrator_and_by_the_user_are_distinguished(
    accounted: str, user: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*words: str) -> str:
        if words[0] == "sacct" and accounted:
            return f"{accounted}\n"
        raise SchedulerError("squeue: slurm_load_jobs error: Invalid job id specified")

    monkeypatch.setattr(commands, "run", answer)
    monkeypatch.setattr(jobs.os, "getuid", lambda: user)
    assert status_of(QueuedJob("7", "CANCELLED", "None", "node1", "N/A", "toy-1/2")).scheduler_state == expected
    assert query_job(Submission(attempt=2, scheduler="slurm", job_id="7", command=())).scheduler_state == (
        expected if accounted else ""
    )


@pytest.mark.parametrize(
    ("rows", "lost"),
    [
        ("node1 mix\nnode2 down\nnode3 drng\nnode4 drain", ("node2",)),
        ("node1 mix\nnode2 drain*\nnode3 drain", ("node2",)),
        ("node1 idle\nnode2 drain", ("node2",)),
        ("node1 alloc*\nnode2 down*", ("node1", "node2")),
        ("node1 inval\nnode2 drain", ("node1",)),
        ("node1\nnode2 down", ("node2",)),  # a line that was cut short
    ],
)
def test_a_node_that_an_administrator_drains_is_not_the_one_that_failed(
    rows: str, lost: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "run", lambda *words: rows if words[0] == "sinfo" else "node1\nnode2")
    assert status_of(QueuedJob("7", "NODE_FAIL", "None", "node[1-4]", "N/A", "toy-1/2")).lost_nodes == lost


@pytest.mark.parametrize(
    ("rows", "state", "lost"),
    [
        ("node1 down~\nnode2 down~", "POWERED_OFF", ()),
        ("node1 idle\nnode2 down%", "POWERED_OFF", ()),
        ("node1 idle~\nnode2 idle~", "POWERED_OFF", ()),  # the plug-in of the cloud has put them back
        ("node1 down\nnode2 down~", "NODE_FAIL", ("node1", "node2")),
        ("node1 idle\nnode2 down", "NODE_FAIL", ("node2",)),
        ("node1 idle\nnode2 idle", "NODE_FAIL", ()),
    ],
)
def test_a_node_that_a_cloud_does_not_start_is_not_lost(
    rows: str, state: str, lost: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm 22.05 shows nodes with ResumeProgram after the ResumeTimeout: NODE_FAIL, and ``down~``."""
    monkeypatch.setattr(commands, "run", lambda *words: rows if words[0] == "sinfo" else "node1\nnode2")
    status = status_of(QueuedJob("7", "NODE_FAIL", "NodeDown", "node[1-2]", "N/A", "toy-1/2"))
    assert (status.state, status.scheduler_state, status.lost_nodes) == (JobState.ENDED, state, lost)
    assert status.nodes == ("node1", "node2")


@pytest.mark.parametrize(
    ("drained", "lost"),
    [
        ("2026-11-28T15:18:51|Prolog error", ("node2",)),
        ("2026-11-28T15:18:51|Job env setup error", ("node2",)),
        ("2026-11-28T17:18:51|Prolog error", ()),  # that of another job on the node
        ("2026-11-28T15:18:51|bad fan", ()),
        ("Unknown|none", ()),
    ],
)
def test_a_job_without_the_prolog_of_a_node_is_not_cancelled_by_its_user(
    drained: str, lost: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm 22.05 answers: with --no-requeue, slurmd cancels the job, and slurmctld drains the node."""
    answers = {
        "sinfo": f"node1|Unknown|none\nnode2|{drained}\nnode2|{drained}\n",
        "scontrol": "node1 node2",
        "sacct": "",
    }
    monkeypatch.setattr(commands, "run", lambda *words: answers[words[0]])
    status = status_of(QueuedJob("7", "CANCELLED", "None", "node[1-2]", "2026-11-28T15:18:50", "toy-1/2"))
    assert (status.state, status.nodes, status.lost_nodes) == (JobState.ENDED, ("node1", "node2"), lost)
    assert status.scheduler_state == ("LAUNCH_FAILED" if lost else "CANCELLED")


def test_a_submission_takes_only_defaults_from_variables() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "nlp", "SBATCH_EXPORT": "NONE"}
    ignored = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "64", "SBATCH_TIMELIMIT": "1", "SBATCH_PARTITION": "debug"}
    assert for_submission(kept | ignored, SlurmSpec(partition="gpu")) == kept


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        ("Batch job submission failed: Required partition not available (inactive or drain)", True),
        (f"AssocMaxSubmitJobLimit {POLICY}", True),
        (f"QOSMaxSubmitJobPerUserLimit {POLICY}", True),
        (POLICY, True),
        ("Batch job submission failed: Resource temporarily unavailable", True),
        ("Batch job submission failed: I/O error writing script/environment to file", True),
        (f"QOSMaxNodePerJobLimit {POLICY}", False),
        (f"QOSMinCpuNotSatisfied {POLICY}", False),
        (f"AssocGrpCpuLimit {POLICY}", False),
        (f"AssocGrpSubmitJobsLimit {POLICY}", True),
        ("Batch job submission failed: Requested node configuration is not available", False),
        ("invalid partition specified: nowhere", False),
        ("Batch job submission failed: Invalid account or account/partition combination specified", False),
    ],
)
def test_temporary_refusals(message: str, passes: bool) -> None:
    assert will_pass(message) is passes


@pytest.mark.parametrize(("message", "error"), [(POLICY, SubmissionDeferred), ("Invalid qos", SubmissionFailed)])
def test_temporary_and_permanent_refusals_are_distinguished(
    message: str, error: type[SubmissionFailed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(tmp_path, monkeypatch, sbatch=f'echo "sbatch: error: {message}" >&2; exit 1')
    with pytest.raises(SubmissionFailed) as found:
        SlurmScheduler().submit(submittable(tmp_path))
    assert type(found.value) is error


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Replace programs of Slurm with shell scripts."""
    (folder / "bin").mkdir(parents=True)
    for name, text in {"scontrol": "echo 'Slurmctld(primary) at here is UP'", **programs}.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


@pytest.mark.parametrize(
    "answer",
    [
        "kill -9 $$",
        "exit 1",
        "echo 'accepted as 7'",
        "echo sbatch: hello >&2; kill -9 $$",
        "echo '--> Checking available allocation ... OK'; exit 1",  # a wrapper whose sbatch was killed
        "echo 'queued as job 7'; exit 1",
    ],
)
def test_an_unclear_end_of_sbatch_is_no_refusal(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job may have been accepted: the next controller looks for it before it submits another one."""
    stand_ins(tmp_path, monkeypatch, sbatch=answer)
    with pytest.raises(SchedulerUnavailable, match="did not confirm"):
        SlurmScheduler().submit(submittable(tmp_path))


def test_a_refusal_of_a_wrapper_on_standard_output_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, sbatch="echo '--> Checking available allocation ... FAILED (project 12)'; exit 1")
    with pytest.raises(SubmissionFailed, match=r"refused the job: --> Checking .* FAILED \(project 12\)$") as found:
        SlurmScheduler().submit(submittable(tmp_path))
    assert type(found.value) is SubmissionFailed


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'this is job 12 of 100 of your project'; echo Submitted batch job 7",
        "echo Submitted batch job 7; echo 'job 12 of 100'",
        "echo Submitted batch job 7 on cluster east",
        "echo 'queued as job 7'",
        "echo Submitted batch job 7; echo 'sbatch: error: cannot write the log of submissions' >&2; exit 1",
    ],
)
def test_the_number_of_a_job_among_other_lines(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, sbatch=answer)
    assert SlurmScheduler().submit(submittable(tmp_path)).job_id == "7"


def test_a_submission_that_the_operating_system_prevents_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a crowded login node, or without quota. No error of the config, which would end the run."""
    job_request = submittable(tmp_path)
    stand_ins(tmp_path, monkeypatch, sbatch="echo Submitted batch job 7")
    with monkeypatch.context() as crowded:
        crowded.setattr(commands.subprocess, "run", raising(BlockingIOError(errno.EAGAIN, "try again")))
        with pytest.raises(SchedulerUnavailable, match="scontrol could not be started: try again"):
            SlurmScheduler().submit(job_request)
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", raising(OSError(errno.EDQUOT, "Disk quota exceeded")))
        with pytest.raises(SchedulerUnavailable, match=r"script could not be written: .*quota"):
            SlurmScheduler().submit(job_request)
    assert SlurmScheduler().submit(job_request).job_id == "7"


def raising(error: OSError) -> Callable[..., NoReturn]:
    def call(*args: object, **options: object) -> NoReturn:
        raise error

    return call


def test_sbatch_may_answer_in_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, sbatch=r"printf 'caf\xe9\n' >&2; printf 'caf\xe9\nSubmitted batch job 7\n'")
    assert SlurmScheduler().submit(submittable(tmp_path)).job_id == "7"


def test_an_outage_is_told_from_a_machine_without_slurm_and_from_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage is waited for; the other two do not end by themselves."""
    scheduler = SlurmScheduler()
    monkeypatch.setattr(commands, "_cluster_name", commands._cluster_name.__wrapped__)  # not from another test
    with monkeypatch.context() as other:
        stand_ins(tmp_path / "other", other, squeue="true", scontrol="echo 'is UP'; echo ClusterName = there")
        with pytest.raises(SchedulerError, match="belongs to the cluster there") as found:
            scheduler.find("toy-1", 2, "here")
        assert type(found.value) is SchedulerError
    with monkeypatch.context() as away:
        banner = "echo '*****'; echo '** RESTORE SLURMCTLD DAEMON TO SERVICE **'; echo '*****'; exit 1"
        stand_ins(tmp_path / "away", away, scontrol=f"echo 'Slurmctld(primary) at here is DOWN'; {banner}")
        for ask in (scheduler.inventory, scheduler.living, lambda: scheduler.find("toy-1", 2)):
            with pytest.raises(SchedulerUnavailable, match=r"respond: scontrol: Slurmctld\(primary\) at here is DOWN$"):
                ask()
        with pytest.raises(SchedulerUnavailable, match="name of this host's cluster could not be read"):
            scheduler.find("toy-1", 2, "here")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="scontrol is not installed") as found:
        scheduler.inventory()
    assert type(found.value) is SchedulerError


@pytest.mark.parametrize(
    ("scontrol", "sinfo", "advice"),
    [
        ("scontrol: fatal: Only one cluster can be used at a time with scontrol", "", "Set SLURM_CLUSTERS to one"),
        ("", "slurm_load_node: Access/permission denied", "PrivateData"),
    ],
)
def test_a_refusal_that_does_not_pass_is_not_waited_for(
    scontrol: str, sinfo: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: an outage is."""
    fail = "echo '{}' >&2; exit 1"
    programs = {"scontrol": fail.format(scontrol)} if scontrol else {}
    with monkeypatch.context() as refused:
        stand_ins(tmp_path / "refused", refused, sinfo=fail.format(sinfo), **programs)
        with pytest.raises(SchedulerError, match=advice) as found:
            SlurmScheduler().inventory()
        assert type(found.value) is SchedulerError
    stand_ins(tmp_path / "away", monkeypatch, sinfo=fail.format("slurm_load_node: Unable to contact slurm controller"))
    with pytest.raises(SchedulerUnavailable):
        SlurmScheduler().inventory()


def test_an_accepted_job_is_not_lost_when_its_script_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk without room for another name, or a file server that fails."""
    job_request = submittable(tmp_path)
    folder = job_request.scheduler_dir
    stand_ins(tmp_path, monkeypatch, sbatch=f"mv {folder} {folder}.gone; echo Submitted batch job 7")
    assert SlurmScheduler().submit(job_request).job_id == "7"


def test_the_comment_of_another_job_may_have_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = r"printf '7|RUNNING|None|n1|N/A|/home\tmine\tcaf\xe9\n8|RUNNING|None|n2|N/A|/runs\ttoy-1\ttoy-1/2\n'"
    stand_ins(tmp_path, monkeypatch, squeue=rows)
    found = SlurmScheduler().find("toy-1", 2)
    assert found is not None
    assert found.job_id == "8"


@pytest.mark.parametrize("comment", ["toy-1-2026", "proj/42", "a|b", "(null)"])
def test_a_job_whose_comment_a_plugin_rewrote_is_known_by_its_folder_and_name(
    comment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second job would write the same checkpoints. A comment may even look like the marker of another attempt."""
    cancelled = tmp_path / "cancelled"
    row = f"7|RUNNING|None|n1|N/A|/my|runs/toy-1/attempts/2/scheduler\ttoy-1\t{comment}"
    stand_ins(
        tmp_path,
        monkeypatch,
        squeue=f"[[ $* == *--user=* && -e {cancelled} ]] || echo '{row}'",  # as a listing that is late
        scancel=f"echo $* >> {cancelled}",
        sacct="exit 1",
    )
    scheduler = SlurmScheduler()
    job = scheduler.find("toy-1", 2)
    assert job is not None
    assert [(one.run_id, one.submission.attempt) for one in scheduler.living()] == [("toy-1", 2)]
    assert scheduler.status([job])["7"].state is JobState.RUNNING
    assert query_job(job).state is JobState.RUNNING
    monkeypatch.setattr(slurm_scheduler, "CANCEL_S", 0.1)
    assert not scheduler.cancel(job)
    assert cancelled.read_text().splitlines()[0] == "7"
    assert scheduler.find("toy-1", 1) is None


def test_a_job_that_its_user_starts_in_the_folder_of_an_attempt_is_not_the_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logs are there, and salloc records the current folder. The reconciler would cancel the user's session."""
    row = "7|RUNNING|None|n1|N/A|/runs/toy-1/attempts/2/scheduler\tinteractive\t(null)"
    stand_ins(tmp_path, monkeypatch, squeue=f"echo '{row}'")
    assert SlurmScheduler().living() == []
    assert SlurmScheduler().find("toy-1", 2) is None


def test_jobs_and_nodes_of_a_hidden_partition_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm answers users: without --all, it leaves out partitions with Hidden=YES, and their jobs."""
    hidden = """[[ " $* " == *" --all "* ]] && echo '{}' || true"""
    stand_ins(
        tmp_path,
        monkeypatch,
        squeue=hidden.format("8|RUNNING|None|n2|N/A|/runs\ttoy-1\ttoy-1/2"),
        sinfo="echo 'n1|8|64000|(null)|idle|cpu*|(null)'; " + hidden.format("n2|8|64000|gpu:8|idle|scavenger|(null)"),
    )
    found = SlurmScheduler().find("toy-1", 2)
    assert found is not None, "the job would be submitted a second time"
    assert [one.run_id for one in SlurmScheduler().living()] == ["toy-1"]
    assert SlurmScheduler().inventory().nodes_for(SlurmSpec(partition="scavenger"), 8) == ["n2"]


def test_nodes_are_those_with_the_features_and_in_the_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    reservations = (
        "ReservationName=ours StartTime=2026-11-28T15:30:44 Duration=1-00:00:00 Nodes=n[2-3] NodeCnt=2 Flags=MAINT\n"
        "ReservationName=licenses StartTime=2026-11-28T15:30:44 Nodes=(null) NodeCnt=0 Licenses=matlab:1\n"
    )
    nodes = (
        "n1|8|64000|(null)|idle|all*|ib,h100\nn2|8|64000|(null)|idle|all*|h100\nn3|8|64000|(null)|idle|all*|(null)\n"
    )
    answers = {"reservation": reservations, "ping": "Slurmctld(a) is UP"}
    answer(monkeypatch, sinfo=nodes, **answers)
    inventory = SlurmScheduler().inventory()
    assert inventory.nodes_for(SlurmSpec()) == ["n1", "n2", "n3"]
    assert inventory.nodes_for(SlurmSpec(constraint="h100")) == ["n1", "n2"]
    assert inventory.nodes_for(SlurmSpec(constraint="h100", reservation="ours")) == ["n2"]
    assert inventory.nodes_for(SlurmSpec(extra=("--reservation=ours",))) == ["n2", "n3"]
    assert inventory.nodes_for(SlurmSpec(reservation="licenses")) == ["n1", "n2", "n3"]


def test_a_stopped_process_blocks_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was stopped during a query and keeps the lock."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(queue, "LOCK_S", 0.1, raising=False)
    monkeypatch.setattr(queue, "_query", lambda: queue.Listing(1.0, {}, "queried"))
    with queue._locked(queue._cache_file()) as held:
        assert held
        answers: list[queue.Listing] = []
        other = threading.Thread(target=lambda: answers.append(queue.listing()), daemon=True)
        other.start()
        other.join(timeout=5)
        assert [one.problem for one in answers] == ["queried"]
        assert not queue._cache_file().exists(), "only the holder of the lock writes"


def inventory_of(rows: str, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """The inventory of a cluster whose nodes sinfo lists in these rows."""
    answer(monkeypatch, sinfo=rows)
    return SlurmScheduler().inventory()


def answer(monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """Answer commands of Slurm by their name, or by what scontrol is to show."""
    others = {"ping": "Slurmctld(a) is UP", **answers}
    monkeypatch.setattr(commands, "run", lambda *words, **_: others.get(words[0], "") or others.get(words[-1], ""))


def test_a_federation_is_one_with_other_clusters_that_may_start_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    alone = "Federation: site\nSelf:       east:10.0.0.1:6817 ID:1 FedState:ACTIVE Features:\n"
    sibling = "Sibling:    west:10.0.0.2:6817 ID:2 FedState:ACTIVE Features: PersistConnSend/Recv:Yes/Yes Synced:Yes\n"
    rows = "a|8|64000|(null)|idle|main*|(null)\n"
    for text, name in (("", ""), (alone, ""), (alone + sibling, "site")):
        answer(monkeypatch, sinfo=rows, federation=text)
        assert SlurmScheduler().inventory().federation == name
    monkeypatch.setenv("SLURM_CLUSTERS", "east")
    assert SlurmScheduler().inventory().federation == ""


def test_limits_and_defaults_of_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm 22.05 shows them; shortened."""
    partitions = (
        "PartitionName=main Default=YES MaxTime=UNLIMITED JobDefaults=(null) DefMemPerNode=UNLIMITED\n"
        "PartitionName=short MaxTime=01:00:00 JobDefaults=DefCpuPerGPU=4,DefMemPerGPU=2048 DefMemPerNode=512\n"
        "PartitionName=long MaxTime=7-00:00:00 JobDefaults=(null) DefMemPerCPU=3072 MaxMemPerNode=UNLIMITED\n"
    )
    config = (
        "ClusterName = here\nDefMemPerCPU            = 1024\nJobDefaults             = (null)\nEnforcePartLimits = NO\n"
    )
    answer(monkeypatch, sinfo="a|8|64000|(null)|idle|main*|(null)\n", partition=partitions, config=config)
    settings = SlurmScheduler().inventory().partition_settings
    limits = {name: one.time_limit_s for name, one in settings.items()}
    assert limits == {"main": 0, "short": 3600, "long": 7 * 86_400}
    memory = {name: (one.default_memory_gb(8, 2), one.default_memory_gb(8, 0)) for name, one in settings.items()}
    assert memory == {"main": (8, 8), "short": (4, 0.5), "long": (24, 24)}
    answer(monkeypatch, sinfo="a|8|64000|(null)|idle|main*|(null)\n", partition=partitions)
    (main, *_) = SlurmScheduler().inventory().partition_settings.values()
    assert main.default_memory_gb(8, 2) == 0, "the whole node"


def test_memory_is_that_of_nodes_that_a_job_may_get(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        "a|8|4096000|(null)|idle|cpu*|(null)\n"
        "b|8|1024000|gpu:h100:8|idle|gpu|(null)\n"
        "c|8|512000|gpu:h100:8|idle|gpu|(null)\n"
    )
    inventory = inventory_of(rows, monkeypatch)
    assert inventory.memory_gb == inventory.memory_for(SlurmSpec()) == 4000
    assert inventory.memory_for(SlurmSpec(partition="gpu"), 8) == 1000
    assert inventory.memory_for(SlurmSpec(partition="gpu", exclude=("b",)), 8) == 500


def test_cores_are_those_of_nodes_that_a_job_may_get(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        "a|256|1024|(null)|idle|gpu|(null)\n"
        "b|64|1024|gpu:h100:8|idle|gpu*|(null)\n"
        "c|32|1024|gpu:h100:8|idle|gpu|(null)\n"
    )
    inventory = inventory_of(rows, monkeypatch)
    assert inventory.cpus_per_node == inventory.cpus_for(SlurmSpec()) == 256
    assert inventory.cpus_for(SlurmSpec(), 8) == 64
    assert inventory.cpus_for(SlurmSpec(exclude=("b",)), 8) == 32


def test_memory_that_is_not_configured_in_slurm_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "a|8|1|gpu:8|idle|all*|(null)\n"
    inventory = inventory_of(rows, monkeypatch)
    assert inventory.memory_gb == inventory.memory_for(SlurmSpec(), 8) == 0


def test_the_default_partition_and_qos_are_those_of_a_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "a|8|64000|(null)|idle|cpu*|(null)\nb|8|64000|gpu:h100:8|idle|gpu|(null)\n"
    inventory = inventory_of(rows, monkeypatch)
    assert (inventory.default_partition, inventory.nodes_for(SlurmSpec())) == ("cpu", ["a"])
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    monkeypatch.setenv("SBATCH_QOS", "high")
    assert SlurmScheduler().inventory().default_qos == "high"
    assert SlurmScheduler().inventory().nodes_for(SlurmSpec()) == ["b"]
    assert SlurmScheduler().inventory().nodes_for(SlurmSpec(partition="cpu")) == ["a"]


@pytest.mark.parametrize(("plugins", "nodes"), [("(null)", []), ("lua", ["b"])])
def test_a_plugin_of_the_site_may_find_a_partition_with_gpus(
    plugins: str, nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(
        monkeypatch,
        sinfo="a|8|64000|(null)|idle|cpu*|(null)\nb|8|64000|gpu:h100:8|idle|gpu|(null)\n",
        config=f"CliFilterPlugins        = (null)\nJobSubmitPlugins        = {plugins}\nClusterName = here\n",
    )
    inventory = SlurmScheduler().inventory()
    assert inventory.nodes_for(SlurmSpec(), 8) == nodes
    assert inventory.nodes_for(SlurmSpec()) == ["a"], "a job on CPU stays in the default partition"
    assert inventory.nodes_for(SlurmSpec(partition="cpu"), 8) == []


def test_an_outage_while_the_plugins_are_asked_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look as if no partition had the GPUs of the run, which ends it. Control: a refusal for good."""
    nodes = "echo 'a|8|64000|(null)|idle|cpu*|(null)'"
    refuse = "[[ $* != 'show config' ]] && echo is UP || {{ echo 'scontrol: {}' >&2; exit 1; }}"
    with monkeypatch.context() as away:
        no_answer = refuse.format("Unable to contact slurm controller (connect failure)")
        stand_ins(tmp_path / "away", away, sinfo=nodes, scontrol=no_answer)
        with pytest.raises(SchedulerUnavailable, match="Unable to contact"):
            SlurmScheduler().inventory()
    stand_ins(tmp_path / "no", monkeypatch, sinfo=nodes, scontrol=refuse.format("Access/permission denied"))
    assert not SlurmScheduler().inventory().may_choose_partition


@pytest.mark.parametrize(
    ("state", "is_out"),
    [("inval", True), ("drained", True), ("idle*", True), ("idle~", False), ("mixed", False), ("planned", False)],
)
def test_nodes_that_take_no_jobs(state: str, is_out: bool) -> None:
    assert takes_no_job(state) is is_out


def test_the_reason_and_the_expected_start_of_a_waiting_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm gives times of the time zone in which its command runs."""
    with monkeypatch.context() as in_tokyo:
        in_tokyo.setenv("TZ", "JST-9")
        time.tzset()
        status = status_of(QueuedJob("1", "PENDING", "Resources", "", "2026-11-21T10:00:00", "toy-1/2"))
    time.tzset()
    assert status.reason == "Resources, expected to start 2026-11-21 01:00 UTC"
    assert status_of(QueuedJob("1", "PENDING", "Resources", "", "N/A", "toy-1/2")).reason == "Resources"


@pytest.mark.parametrize(
    ("reason", "needs_action"),
    [
        ("PartitionTimeLimit", True),
        ("AssocMaxWallDurationPerJobLimit", True),
        ("QOSMaxNodePerJobLimit", True),
        ("QOSMinCpuNotSatisfied", True),
        ("JobHeldAdmin", True),
        ("DependencyNeverSatisfied", True),
        ("launch failed requeued held", True),
        ("Priority", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("AssocGrpGRES", False),
        ("ReqNodeNotAvail, Reserved for maintenance", False),
        ("None", False),
    ],
)
def test_jobs_that_wait_until_an_act_are_told_from_those_that_wait_for_resources(
    reason: str, needs_action: bool
) -> None:
    status = status_of(QueuedJob("1", "PENDING", reason, "", "N/A", "toy-1/2"))
    assert (status.state, status.needs_action) == (JobState.PENDING, needs_action)
    assert status.reason.endswith(", until its user or an administrator acts") is needs_action


@pytest.mark.parametrize(
    ("gres", "number"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:h100:4(S:0-1),nvme:1", 4), ("nvme:2,gpu:2", 2), ("gpu:a:1,gpu:b:2", 3)],
)
def test_gpus_of_a_node(gres: str, number: int) -> None:
    assert num_gpus(gres) == number


@pytest.mark.parametrize(
    ("gres", "kind"),
    [("gpu:h100:4(S:0-1),nvme:1", "h100"), ("gpu:8", ""), ("(null)", ""), ("gpu:a:1,gpu:b:2", ""), ("nvme:2", "")],
)
def test_type_of_the_gpus_of_a_node(gres: str, kind: str) -> None:
    assert gpu_type(gres) == kind


def test_a_refusal_and_a_missing_answer_are_distinguished() -> None:
    refused = "Traceback ...\nsbatch: error: Batch job submission failed: Invalid account"
    assert refusal(refused) == "Batch job submission failed: Invalid account"
    assert not is_no_answer(refusal(refused))
    silent = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    assert is_no_answer(refusal(silent))
