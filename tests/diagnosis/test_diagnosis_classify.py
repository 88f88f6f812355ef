"""Classification of traces: the root decides, wherever it stands among its consequences."""

from dataclasses import replace

import pytest

from rlhf_core.diagnosis.classify import ERRORS, Evidence, WorkerEnd, classify
from rlhf_core.diagnosis.hangs.verdict import HangVerdict
from rlhf_core.diagnosis.logs.search import find
from rlhf_core.diagnosis.logs.signatures import table as signatures
from rlhf_core.schemas.agent_messages import WorkerReport
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import Phase, WorkerOutcome

RESET = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40213"


def outcome(rank: int, error_type: str = "", message: str = "", traceback: str = "") -> WorkerOutcome:
    return WorkerOutcome(
        role=Role.TRAINER,
        rank=rank,
        node="here",
        ok=not error_type,
        error_type=error_type,
        message=message,
        traceback=traceback,
        step=12,
        phase=Phase.TRAIN,
        time=utc_now(),
    )


def failed(rank: int, error_type: str, message: str, *, order: int = 0, traceback: str = "") -> WorkerEnd:
    written = outcome(rank, error_type, message, traceback)
    return WorkerEnd(WorkerReport(rank=rank, local_rank=rank, code=1, outcome=written), "here", order)


def ended(rank: int, code: int | None, *, order: int = 0, by_agent: bool = False, log: str = "") -> WorkerEnd:
    report = WorkerReport(rank=rank, local_rank=rank, code=code, by_agent=by_agent, log_tail=log)
    return WorkerEnd(report, "here", order)


def cascade(rank: int, order: int = 0) -> WorkerEnd:
    return failed(rank, "builtins.RuntimeError", RESET, order=order)


def kind_of(*workers: WorkerEnd, **more: object) -> FailureKind:
    return classify(Evidence(workers=workers, **more)).kind  # type: ignore[arg-type]


def test_a_killed_rank_is_the_root_although_its_peers_ended_first_and_louder() -> None:
    failure = classify(Evidence(workers=(cascade(0), cascade(2, order=1), ended(1, -9, order=2), cascade(3, order=3))))
    assert (failure.kind, failure.ranks, failure.nodes) == (FailureKind.WORKER_KILLED, (1,), ("here",))
    assert "Rank 1 (local rank 1 on here) was ended by SIGKILL" in failure.message


def test_cascades_alone_blame_no_rank() -> None:
    """The negative control of the rule above: the same resets without a root."""
    failure = classify(Evidence(workers=(cascade(0), cascade(1, order=1))))
    assert (failure.kind, failure.ranks) == (FailureKind.NETWORK, ())


@pytest.mark.parametrize(
    "line",
    [
        "socketProgress: Connection closed by remote peer n2<51224>",
        "socketProgressOpt: Call to recv from 10.0.0.5<35421> failed : Connection reset by peer",
    ],
)
def test_what_nccl_says_about_a_dead_peer_does_not_blame_the_rank_that_says_it(line: str) -> None:
    log = f"ncclRemoteError: A call failed possibly due to a network error.\nLast error:\n{line}\n"
    crashed = ended(1, -11, order=1, log="Fatal Python error: Segmentation fault\n")
    failure = classify(Evidence(workers=(ended(0, -6, log=log), crashed, ended(2, -6, order=2, log=log))))
    assert (failure.kind, failure.ranks) == (FailureKind.UNKNOWN, (1,))
    assert kind_of(ended(0, -6, log=log)) is FailureKind.NETWORK


@pytest.mark.parametrize(
    ("log", "kind", "blamed"),
    [
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", FailureKind.COLLECTIVE_HANG, ((), ())),
        ("Timed out after 901 seconds waiting for clients. 1/2 clients joined.", FailureKind.RENDEZVOUS, ((), ())),
        ("n3:7:9 [0] NCCL WARN NET/IB: Got completion from peer n7<4> with status=12", FailureKind.NETWORK, ((), ())),
        # The negative controls: a port is in use on the node of the rank that says so, and its adapter has failed.
        ("zmq.error.ZMQError: Address already in use", FailureKind.RENDEZVOUS, ((0,), ("here",))),
        ("mlx5_core 0000:3b:00.0 ib0: mlx5_0 port 1 link is down", FailureKind.NETWORK, ((0,), ("here",))),
        ("NCCL WARN NET/IB : mlx5_0:1 Got async event : port error", FailureKind.NETWORK, ((0,), ("here",))),
    ],
)
def test_a_rank_that_waited_in_vain_is_not_to_blame(
    log: str, kind: FailureKind, blamed: tuple[tuple[int, ...], tuple[str, ...]]
) -> None:
    """Two such time-outs would have the node of a healthy rank excluded."""
    failure = classify(Evidence(workers=(ended(0, -6, log=log), ended(1, -9, by_agent=True, order=1))))
    assert (failure.kind, (failure.ranks, failure.nodes)) == (kind, blamed)


def test_a_rank_that_lost_its_peer_in_a_collective_is_not_to_blame() -> None:
    """All peers of a broken node report it; the first to end would have its own node excluded."""
    message = "NCCL error in: x.cpp:7, unhandled system error\nLast error:\nNET/IB: Got completion from peer n7<33092>"
    message += " with status=IBV_WC_RETRY_EXC_ERR(12) vendor err 129"
    failure = classify(Evidence(workers=(failed(3, "torch.distributed.DistBackendError", message), cascade(1, 1))))
    assert (failure.kind, failure.ranks, failure.nodes) == (FailureKind.NETWORK, (), ())


def test_an_adapter_that_recovered_is_not_the_cause_of_a_later_error() -> None:
    flap = "NCCL WARN NET/IB : mlx5_0:1 Got async event : port error"
    bars = "\n".join(f" {step}%|# | {step}/100 [00:{step}<00:99, 1.00it/s]" for step in range(1, 9))
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x9)"
    log = f" 0%| | 0/100 [00:00<?, ?it/s]\n{flap}\n{bars}\nTraceback (most recent call last):\n{error}"
    assert kind_of(ended(0, 1, log=log)) is FailureKind.SHAPE
    # The negative control: without progress after it, it counts before what its peers report, which end first.
    lost = "n7:7:9 [0] NCCL WARN NET/IB: Got completion from peer n2<4> with status=12"
    for peer in (lost, "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"):
        failure = classify(Evidence(workers=(ended(0, 1, log=peer), ended(1, 1, log=flap, order=1))))
        assert (failure.kind, failure.ranks) == (FailureKind.NETWORK, (1,))


def test_what_the_agent_killed_says_nothing() -> None:
    assert kind_of(failed(0, "builtins.KeyError", "'x'"), ended(1, -9, by_agent=True, order=1)) is FailureKind.UNKNOWN
    assert kind_of(ended(0, -9, by_agent=True), ended(1, None, by_agent=True)) is FailureKind.UNKNOWN


def test_a_kill_while_the_kernel_was_out_of_memory_is_explained_by_it() -> None:
    killed, terminated = (replace(ended(0, code), oom_kills=1) for code in (-9, -15))
    assert kind_of(killed, cascade(1, 1)) is FailureKind.HOST_OOM
    assert kind_of(terminated) is FailureKind.WORKER_KILLED


def test_a_verdict_decides() -> None:
    verdict = HangVerdict(FailureKind.HANG, (1,), "rank 1 was stopped")
    failure = classify(Evidence(workers=(ended(0, -9, by_agent=True), ended(1, -9, by_agent=True)), verdict=verdict))
    assert (failure.kind, failure.ranks, failure.nodes) == (FailureKind.HANG, (1,), ("here",))


def test_a_hang_of_ranks_on_all_nodes_blames_none_of_them() -> None:
    """Otherwise two stalls of a file system would have every node of the site excluded."""
    workers = tuple(replace(ended(rank, -9, by_agent=True), node=f"n{rank // 2}") for rank in range(6))

    def nodes(*ranks: int) -> tuple[str, ...]:
        return classify(Evidence(workers, HangVerdict(FailureKind.HANG, ranks, "silent"))).nodes

    assert nodes(*range(6)) == ()
    assert nodes(0, 2, 4) == ()
    assert nodes(0, 2) == ("n0", "n1")


@pytest.mark.parametrize(
    ("error_type", "message", "kind"),
    [
        ("rlhf_core.errors.BadConfig", "x", FailureKind.CONFIG),
        ("rlhf_core.errors.BadData", "train.jsonl:7: not JSON", FailureKind.DATA),
        ("rlhf_core.errors.RewardFailed", "CUDA out of memory, said the reward", FailureKind.REWARD_FUNCTION),
        ("rlhf_core.errors.DiskFull", "no room", FailureKind.DISK_FULL),
        ("rlhf_core.errors.NonFiniteLoss", "loss is nan", FailureKind.NON_FINITE),
        ("rlhf_core.errors.MetricsMismatch", "x", FailureKind.COLLECTIVE_MISMATCH),
        ("rlhf_core.errors.CheckpointCorrupt", "x", FailureKind.CHECKPOINT_CORRUPT),
        ("rlhf_core.errors.ResumeMismatch", "x", FailureKind.CHECKPOINT_CORRUPT),
        ("builtins.ModuleNotFoundError", "No module named 'trl'", FailureKind.IMPORT_ERROR),
        ("builtins.ImportError", "cannot import name 'x' from 'y'", FailureKind.IMPORT_ERROR),
        ("builtins.MemoryError", "", FailureKind.HOST_OOM),
        ("builtins.OSError", "[Errno 28] No space left on device: 'x'", FailureKind.DISK_FULL),
        ("builtins.OSError", "[Errno 116] Stale file handle", FailureKind.FILE_SYSTEM),
        ("builtins.FileNotFoundError", "[Errno 2] No such file or directory: 'x'", FailureKind.CONFIG),
        ("builtins.PermissionError", "[Errno 13] Permission denied: 'x'", FailureKind.CONFIG),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", FailureKind.CUDA_OOM),
        ("builtins.RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", FailureKind.SHAPE),
        ("builtins.RuntimeError", "The size of tensor a (8) must match the size of tensor b (2)", FailureKind.SHAPE),
        ("builtins.RuntimeError", "CUDA error: an illegal memory access was encountered", FailureKind.ILLEGAL_ACCESS),
        ("builtins.RuntimeError", "Timed out waiting 1800000ms for recv operation", FailureKind.COLLECTIVE_HANG),
        ("torch.distributed.DistNetworkError", "The server socket has failed: EADDRINUSE", FailureKind.RENDEZVOUS),
        ("torch.distributed.DistStoreError", "timed out after 300s", FailureKind.RENDEZVOUS),
        ("builtins.ConnectionResetError", "[Errno 104] Connection reset by peer", FailureKind.NETWORK),
        ("json.decoder.JSONDecodeError", "Expecting value: line 1", FailureKind.DATA),
        ("safetensors.SafetensorError", "header too large", FailureKind.CHECKPOINT_CORRUPT),
        ("builtins.ValueError", "never seen", FailureKind.UNKNOWN),
    ],
)
def test_errors_are_known_by_class_and_message(error_type: str, message: str, kind: FailureKind) -> None:
    assert kind_of(failed(1, error_type, message)) is kind
    # The same with the consequence on the other rank, which ended first.
    assert kind_of(cascade(0), failed(1, error_type, message, order=1)) is kind


def test_training_that_learns_nothing_is_the_fault_of_no_rank() -> None:
    message = "Training no longer learns at step 9, since step 2 (identical): all are the same on rank 1 (node2)"
    found = classify(Evidence(workers=tuple(failed(rank, "rlhf_core.errors.DegenerateRl", message) for rank in (0, 1))))
    assert (found.kind, found.message) == (FailureKind.DEGENERATE_RL, message)
    assert (found.ranks, found.nodes) == ((), ())


def test_every_own_error_class_of_the_map_exists() -> None:
    from rlhf_core import errors

    for name in ERRORS:
        module, _, error = name.rpartition(".")
        if module == "rlhf_core.errors":
            assert issubclass(getattr(errors, error), errors.RlhfError)


def test_a_time_out_is_only_the_echo_of_the_rank_that_failed_elsewhere() -> None:
    late = failed(0, "builtins.RuntimeError", "Timed out waiting 1000ms for recv operation")
    assert kind_of(late, failed(1, "rlhf_core.errors.RewardFailed", "x", order=1)) is FailureKind.REWARD_FUNCTION
    assert kind_of(late, cascade(1, 1)) is FailureKind.COLLECTIVE_HANG


@pytest.mark.parametrize(
    ("code", "log", "kind"),
    [
        (-6, "terminate called\n  what(): op.preamble.length <= op.nbytes. 500 vs 4", FailureKind.COLLECTIVE_MISMATCH),
        (-7, "ERROR: worker died. This might be caused by insufficient shared memory (shm).", FailureKind.HOST_OOM),
        (-11, "Fatal Python error: Segmentation fault", FailureKind.UNKNOWN),
        (1, "python: No module named rlhf_core", FailureKind.IMPORT_ERROR),
        (-9, "CUDA out of memory was handled an hour ago", FailureKind.WORKER_KILLED),
    ],
)
def test_without_an_outcome_exit_code_and_log_speak(code: int, log: str, kind: FailureKind) -> None:
    assert kind_of(ended(0, code, log=log)) is kind


def test_a_worker_that_ended_before_its_log_began_points_to_the_log_of_its_agent() -> None:
    assert "rlhf logs --role agent" in classify(Evidence(workers=(ended(0, 1),))).message
    assert "rlhf logs" not in classify(Evidence(workers=(ended(0, 1, log="odd\n"),))).message


def test_a_mismatch_is_undecided_where_only_words_tell_of_it() -> None:
    words = "op.preamble.length <= op.nbytes. 500 vs 4"
    by_log = ended(0, -6, log=f"terminate called\n  what(): {words}")
    by_error = failed(0, "builtins.RuntimeError", words)
    for evidence in (Evidence((by_log,)), Evidence((by_error,)), Evidence(agent_log=words)):
        found = classify(evidence)
        assert (found.kind, found.is_undecided) == (FailureKind.COLLECTIVE_MISMATCH, True)
    # It is proven by a comparison of ranks, by their recorders or their metrics.
    verdict = HangVerdict(FailureKind.COLLECTIVE_MISMATCH, (1,), "the ranks disagree about collective number 7")
    by_metrics = failed(0, "rlhf_core.errors.MetricsMismatch", "x")
    for evidence in (Evidence((by_log,), verdict=verdict), Evidence((by_metrics,))):
        found = classify(evidence)
        assert (found.kind, found.is_undecided) == (FailureKind.COLLECTIVE_MISMATCH, False)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("TIMEOUT", FailureKind.TIME_LIMIT),
        ("PREEMPTED", FailureKind.PREEMPTION),
        ("NODE_FAIL", FailureKind.NODE_LOST),
        ("OUT_OF_MEMORY", FailureKind.HOST_OOM),
        ("CANCELLED by 1000", FailureKind.USER_CANCEL),
        ("CANCELLED", FailureKind.USER_CANCEL),
        ("CANCELLED by 0", FailureKind.PREEMPTION),
        ("CANCELLED by another user (uid 5001)", FailureKind.PREEMPTION),
        ("BOOT_FAIL", FailureKind.NODE_LOST),
        ("LAUNCH_FAILED", FailureKind.NODE_LOST),
        ("POWERED_OFF", FailureKind.PREEMPTION),
        ("DEADLINE", FailureKind.TIME_LIMIT),
        ("OUT_OF_ME+", FailureKind.HOST_OOM),
        ("FAILED", FailureKind.AGENT_KILLED),
        ("", FailureKind.AGENT_KILLED),
        ("COMPLETED", FailureKind.AGENT_KILLED),
    ],
)
def test_of_a_job_that_vanished_the_scheduler_speaks(state: str, kind: FailureKind) -> None:
    assert classify(Evidence(scheduler_state=state, agent_vanished=True)).kind is kind


@pytest.mark.parametrize(
    ("line", "kind", "nodes"),
    [
        ("srun: error: node3: task 2: Killed", FailureKind.AGENT_KILLED, ("node3",)),
        ("srun: error: node3: task 2: Exited with exit code 1", FailureKind.AGENT_KILLED, ("node3",)),
        ("srun: error: node3: tasks 2-3: Out Of Memory", FailureKind.HOST_OOM, ("node3",)),
        ("srun: error: Node failure on node3", FailureKind.NODE_LOST, ("node3",)),
        ("srun: error: Unable to confirm allocation", FailureKind.AGENT_KILLED, ()),
    ],
)
def test_of_a_job_that_failed_the_first_line_of_srun_names_kind_and_node(
    line: str, kind: FailureKind, nodes: tuple[str, ...]
) -> None:
    """With --kill-on-bad-exit the other tasks are killed afterwards: the first line is the root."""
    log = f"{line}\nsrun: Terminating StepId=7.0\nsrun: error: node1: task 0: Killed\n"
    failure = classify(Evidence(scheduler_state="FAILED", agent_log=log if nodes else line, agent_vanished=True))
    assert (failure.kind, failure.nodes) == (kind, nodes)


def test_outside_of_a_lost_job_an_exit_code_alone_is_unknown() -> None:
    """The negative control: the same line if the tasks were not agents without an outcome."""
    log = "srun: error: node3: task 2: Exited with exit code 1"
    assert classify(Evidence(agent_log=log)).kind is FailureKind.UNKNOWN


def test_the_state_of_the_job_decides_before_its_log_but_a_cancellation_does_not_hide_a_root() -> None:
    log = "OSError: [Errno 28] No space left on device"
    for state, kind in (("PREEMPTED", FailureKind.PREEMPTION), ("CANCELLED", FailureKind.DISK_FULL)):
        assert classify(Evidence(scheduler_state=state, agent_log=log, agent_vanished=True)).kind is kind


def test_a_cancelled_step_of_a_job_that_nobody_cancelled_is_no_order_of_the_user() -> None:
    """As of a preempted job whose agents end while they wait for each other: Slurm calls the job FAILED."""
    log = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***"
    kinds = {"FAILED": FailureKind.AGENT_KILLED, "CANCELLED": FailureKind.USER_CANCEL, "": FailureKind.USER_CANCEL}
    for state, kind in kinds.items():
        assert classify(Evidence(scheduler_state=state, agent_log=log, agent_vanished=True)).kind is kind


def test_what_a_worker_printed_last_is_its_own_and_no_echo() -> None:
    log = "AttributeError: 'X' object has no attribute 'y'"
    assert kind_of(cascade(0), ended(1, 1, order=1, log=log)) is FailureKind.UNKNOWN


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the lines that are matched with the signatures."""
    texts: list[str] = []
    match_line = signatures.match_line
    monkeypatch.setattr(signatures, "match_line", lambda line: texts.append(line.text) or match_line(line))
    return texts


def test_lines_that_all_ranks_print_are_matched_once(matched: list[str]) -> None:
    """Each rank has a log of its own, and reading hundreds of them one by one would delay the restart by minutes."""
    log = "[rank{0}]: NCCL error in frame #3 (0x7f{0:010x})\n[rank{0}]: Watchdog caught collective operation timeout\n"
    assert kind_of(*(ended(n, -6, order=n, log=log.format(n)) for n in range(64))) is FailureKind.COLLECTIVE_HANG
    assert len(matched) == 2


def test_what_nccl_logs_at_every_start_is_not_matched(matched: list[str]) -> None:
    """No two of these lines are equal, so they would be matched one by one, on 512 ranks for 20 s of CPU time."""
    line = "n{0}:7{0}:8{0} [0] NCCL INFO Channel 00/0 : {0}[0] -> 1[1] via P2P/CUMEM/read\n"
    torn = "n0:7:8 [0] NCCL INFO ChannelRuntimeError: CUDA error: out of memory\n"
    assert kind_of(*(ended(n, -6, order=n, log=line.format(n)) for n in range(3))) is FailureKind.UNKNOWN
    assert matched == []
    assert find(f'Traceback (most recent call last):\n  File "t.py", line 1, in f\n{torn}') is not None


def test_the_agents_output_speaks_where_there_were_no_workers() -> None:
    log = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'\n"
    assert classify(Evidence(agent_log=log, agent_vanished=True)).kind is FailureKind.IMPORT_ERROR


def test_tear_down_and_echoes_do_not_hide_the_root_in_a_log() -> None:
    log = "\n".join(
        [
            "W0101 Sending process 17 closing signal SIGTERM",
            "RuntimeError: Connection reset by peer",
            "step 12: out of luck",
            "OSError: [Errno 28] No space left on device",
            "destroy_process_group() was not called before program exit",
        ]
    )
    match = find(log)
    assert match is not None
    assert match.kind is FailureKind.DISK_FULL
    assert find("all is well\n[rank0] destroy_process_group() was not called before program exit") is None


def test_the_same_message_from_another_function_is_another_fault() -> None:
    def seen(function: str) -> str:
        traceback = f'File "a.py", line 3, in run\nFile "b.py", line 9, in {function}\n'
        return classify(Evidence(workers=(failed(0, "builtins.KeyError", "'x'", traceback=traceback),))).fingerprint

    assert seen("load") == seen("load")
    assert seen("load") != seen("save")
