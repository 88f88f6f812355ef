"""The table of signatures: every row knows its own line and is needed for it; and how a whole log is read."""

import pytest

from rlhf_core.diagnosis import signatures
from rlhf_core.diagnosis.classify import read_log
from rlhf_core.diagnosis.signatures import SIGNATURES, Part, Signature, find, match_line
from rlhf_core.schemas.failures import FailureKind

NUMBERED = list(enumerate(SIGNATURES))
NOT_IN_LOGS = {FailureKind.HANG, FailureKind.NODE_UNFIT, FailureKind.DEGENERATE_RL}
"""Kinds that no line of a log shows: they come from the watch, the probe and the trainer itself."""


@pytest.mark.parametrize(("number", "row"), NUMBERED, ids=[f"{number}-{row.kind}" for number, row in NUMBERED])
def test_each_row_knows_its_example_and_is_needed_for_it(
    number: int, row: Signature, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = match_line(row.example)
    assert match is not None
    assert (match.kind, match.part) == (row.kind, row.part)
    first = next(index for index, other in NUMBERED if other.pattern.search(row.example))
    assert first == number, f"row {first} takes this line before row {number}"
    # Without the row its example is read in another way.
    monkeypatch.setattr(signatures, "SIGNATURES", SIGNATURES[:number] + SIGNATURES[number + 1 :])
    other = match_line(row.example)
    assert other is None or (other.kind, other.part, other.node) != (row.kind, row.part, match.node)


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.example[:40])
def test_an_example_alone_gives_its_kind_also_behind_a_rank(row: Signature) -> None:
    for line in (row.example, f"[rank12]: {row.example}"):
        match = find(line)
        if row.part is Part.TEARDOWN:
            assert match is None
        elif row.part is not Part.CONTEXT:
            assert match is not None
            assert match.kind is row.kind


def test_every_kind_that_a_log_can_show_has_a_row() -> None:
    assert {row.kind for row in SIGNATURES} == set(FailureKind) - NOT_IN_LOGS


@pytest.mark.parametrize(
    "prefix", ["3: ", "[rank3]: ", "(EngineCore_DP0 pid=4) ERROR 01-21 04:15:38 [core.py:93] ", "│ "]
)
def test_who_printed_a_line_does_not_hide_the_error_class_at_its_begin(prefix: str) -> None:
    match = match_line(f"{prefix}ValueError: packing is not supported")
    assert match is not None
    assert match.kind is FailureKind.CONFIG


STEPS = "".join(f"step {step} loss {2 - step / 10}\n" for step in range(6))


@pytest.mark.parametrize(
    "log",
    [
        "",
        STEPS,
        "WARNING Sequence group 0 is preempted by PreemptionMode.RECOMPUTE mode: not enough KV cache space\n",
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 262144, reducing to 131072\n" + STEPS,
        "step 1 loss 2.0 grad_norm: nan\nstep 2 loss 1.9 grad_norm: 3.1\n",
        "[W socket.cpp:601] [c10d] The addresses of (n1, 1) cannot be retrieved: Name or service not known\n",
        "n1:7:7 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n" + STEPS,
        "ConnectionResetError: [Errno 104] Connection reset by peer\n" + STEPS,
        "json.decoder.JSONDecodeError: Expecting value: line 1 (this line is left out)\n" + STEPS,
        "RuntimeError: CUDA out of memory, once more with half the batch\n{'train_runtime': 12.5}\n",
        "ECC Errors: Volatile SRAM Uncorrectable : 0\n",
        "number of nan iterations: 0 | NCCL_TIMEOUT=1800 | on_error: stop\n",
    ],
)
def test_scary_words_alone_are_no_failure(log: str) -> None:
    assert read_log(log) is None


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        (STEPS + "json.decoder.JSONDecodeError: Expecting value: line 1\n", FailureKind.DATA),
        (STEPS + "RuntimeError: CUDA out of memory.\nstep 6 loss 1.0\n", FailureKind.CUDA_OOM),
        ("step 1 loss 2.0 grad_norm: nan\nstep 2 loss 1.9 grad_norm: nan\n", FailureKind.NON_FINITE),
        ("step 1 loss 2.0\nstep 2 loss nan\n", FailureKind.NON_FINITE),
        ("Traceback (most recent call last):\n  File 'a.py', line 3\n", FailureKind.UNKNOWN),
        ("ECC Errors: Volatile SRAM Uncorrectable : 5\n", FailureKind.GPU_HARDWARE),
    ],
)
def test_the_same_words_where_they_end_it_are_a_failure(log: str, kind: FailureKind) -> None:
    """The negative controls of the test above."""
    diagnosis = read_log(log)
    assert diagnosis is not None
    assert diagnosis.kind is kind


def test_gradients_that_explode_while_the_loss_scale_falls_are_a_divergence_and_a_spike_is_not() -> None:
    line = "iteration {} | lm loss: 4.1 | loss scale: {} | grad norm: {} |\n"
    falling = "".join(line.format(step, 65536.0 / 2**step, 879946.6) for step in range(3))
    spike = "".join(line.format(step, 65536.0, norm) for step, norm in enumerate((1.0, 20000.0, 20000.0)))
    diagnosis = read_log(falling)
    assert diagnosis is not None
    assert diagnosis.kind is FailureKind.NON_FINITE
    assert read_log(spike) is None


CANCELLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***"


def test_a_cancellation_decides_only_where_nothing_failed_before_it() -> None:
    def kind(*lines: str) -> FailureKind:
        diagnosis = read_log("\n".join(lines))
        assert diagnosis is not None
        return diagnosis.kind

    died = "srun: error: n2: task 1: Exited with exit code 1"
    assert kind(CANCELLED, died, "RuntimeError: Connection reset by peer") is FailureKind.USER_CANCEL
    assert kind(died, CANCELLED) is FailureKind.UNKNOWN
    assert kind("AttributeError: 'X' object has no attribute 'y'", CANCELLED) is FailureKind.UNKNOWN
    assert kind(CANCELLED, CANCELLED.replace(" ***", " DUE TO TIME LIMIT ***")) is FailureKind.TIME_LIMIT
    assert kind(CANCELLED, "srun: error: n2: task 1: Out Of Memory") is FailureKind.HOST_OOM


def test_code_that_a_traceback_quotes_is_not_what_happened() -> None:
    quoted = 'File "a.py", line 3, in f\n    raise ValueError("CUDA out of memory")\nKeyError: 7\n'
    diagnosis = read_log(quoted)
    assert diagnosis is not None
    assert diagnosis.kind is FailureKind.UNKNOWN


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ('File "rewards/maths.py", line 3, in score', FailureKind.REWARD_FUNCTION),
        ('File "trainer.py", line 3, in load_checkpoint', FailureKind.CHECKPOINT_CORRUPT),
        ('File "torch/utils/data/_utils/fetch.py", line 3, in fetch', FailureKind.DATA),
        ('File "reward_trainer.py", line 3, in main', FailureKind.UNKNOWN),
        ('File "model.py", line 3, in load', FailureKind.UNKNOWN),
    ],
)
def test_frames_decide_only_about_an_error_that_nothing_else_knows(frame: str, kind: FailureKind) -> None:
    def read(last: str) -> FailureKind:
        diagnosis = read_log(f"Traceback (most recent call last):\n  {frame}\n    x()\n{last}\n")
        assert diagnosis is not None
        return diagnosis.kind

    assert read("KeyError: 7") is kind
    assert read("RuntimeError: Connection closed by peer") is FailureKind.NETWORK
    assert read("OSError: [Errno 116] Stale file handle") is FailureKind.FILE_SYSTEM
