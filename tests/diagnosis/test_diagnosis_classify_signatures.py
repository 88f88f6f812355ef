"""Tables of the log classifier: each row matches its own line and is needed for it; and the parsing of whole logs."""

import re
from collections.abc import Iterable
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from made_tracebacks import kind_of

from rlhf_core.diagnosis.logs import code_locations, exceptions
from rlhf_core.diagnosis.logs.code_locations import CODE_LOCATIONS, CodeLocation
from rlhf_core.diagnosis.logs.events import EvidencePart
from rlhf_core.diagnosis.logs.lines import read_line
from rlhf_core.diagnosis.logs.search import find
from rlhf_core.diagnosis.logs.signatures import table
from rlhf_core.diagnosis.logs.signatures.row import Signature
from rlhf_core.diagnosis.logs.signatures.table import SIGNATURES, match_line, may_match
from rlhf_core.schemas.failures import FailureKind

NUMBERED = list(enumerate(SIGNATURES))
NOT_IN_LOGS = {
    FailureKind.HANG,
    FailureKind.NODE_UNFIT,
    FailureKind.DEGENERATE_RL,
    FailureKind.INCOMPLETE,
    FailureKind.NO_NODES,
}
"""Kinds that no log line shows: they come from supervision, the probe, the trainer itself and the scheduler."""
FROM_EXIT_CODES = {FailureKind.WORKER_KILLED, FailureKind.AGENT_KILLED}
"""A log shows that something was killed, but not by whom."""


@pytest.mark.parametrize(("number", "row"), NUMBERED, ids=[f"{number}-{row.kind}" for number, row in NUMBERED])
def test_each_row_knows_its_example_and_is_needed_for_it(
    number: int, row: Signature, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = read_line(row.example)
    matched = match_line(line)
    assert matched is not None
    assert matched.rule in row.expressions, "an earlier row matches this line"
    # Without the row, its example is classified differently.
    monkeypatch.setattr(table, "SIGNATURES", SIGNATURES[:number] + SIGNATURES[number + 1 :])
    other = match_line(line)
    found = (row.kind, row.part, row.is_local, matched.node)
    assert other is None or (other.kind, other.part, other.is_local, other.node) != found


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.example[:40])
def test_an_example_alone_gives_its_kind_also_behind_a_rank(row: Signature) -> None:
    for line in (row.example, f"[rank12]: {row.example}"):
        assert kind_of(line) is (None if row.part is EvidencePart.TEARDOWN else row.kind)


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: No HIP GPUs are available",
        "hipErrorNoDevice: no ROCm-capable device is detected",
    ],
)
def test_a_node_whose_amd_gpus_are_gone_is_diagnosed_as_one_of_nvidia(line: str) -> None:
    assert kind_of(line) is FailureKind.GPU_HARDWARE


def test_every_kind_that_a_log_can_show_has_a_row() -> None:
    known = {row.kind for row in SIGNATURES} | {meaning.kind for meaning in exceptions.CLASSES.values()}
    assert known == set(FailureKind) - NOT_IN_LOGS - FROM_EXIT_CODES


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.example[:40])
def test_no_pattern_is_skipped_by_the_prefilter(row: Signature) -> None:
    """Every match of a pattern must contain one of the words of the prefilter."""
    assert may_match(row.example)
    for pattern in row.patterns:
        for text in _shortest(_parser.parse(pattern.pattern)):
            assert row.after is not None or may_match(text), text


def _shortest(parsed: Iterable[tuple[Any, Any]]) -> list[str]:
    """The shortest matching texts of a pattern, one for each of its branches."""
    texts = [""]
    for operation, what in parsed:
        match str(operation):
            case "LITERAL":
                parts = [chr(what)]
            case "IN":
                parts = [chr(what[0][1]) if str(what[0][0]) == "LITERAL" else " "]
            case "BRANCH":
                parts = [text for branch in what[1] for text in _shortest(branch)]
            case "SUBPATTERN":
                parts = _shortest(what[3])
            case "MAX_REPEAT" | "MIN_REPEAT":
                parts = [text * what[0] for text in _shortest(what[2])] if what[0] else [""]
            case "ANY" | "NOT_LITERAL":
                parts = [" "]
            case _:
                parts = [""]
        texts = [text + part for text in texts for part in parts]
    return texts


@pytest.mark.parametrize("name", exceptions.CLASSES)
def test_each_class_is_known_at_the_end_of_a_traceback(name: str) -> None:
    assert (
        kind_of(f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n{name}: 7\n')
        is exceptions.CLASSES[name].kind
    )


@pytest.mark.parametrize("name", sorted(exceptions.WRAPPERS))
def test_what_a_wrapper_wraps_decides_before_it_and_after_it(name: str) -> None:
    for log in (
        f"{name}: it failed\nOSError: [Errno 116] Stale file handle",
        f"OSError: [Errno 5] x\n{name}: it failed",
    ):
        assert kind_of(log) is FailureKind.FILE_SYSTEM


@pytest.mark.parametrize(("number", "kind"), [(n, m.kind) for n, m in exceptions.NUMBERS.items()])
def test_the_number_of_an_os_error_is_known_whatever_its_words(number: int, kind: FailureKind) -> None:
    assert (
        kind_of(f'Traceback (most recent call last):\n  File "a.py", line 3, in f\nOSError: [Errno {number}] wörter')
        is kind
    )


@pytest.mark.parametrize("place", CODE_LOCATIONS, ids=lambda place: place.example[:60])
def test_each_location_explains_an_error_from_it(place: CodeLocation) -> None:
    """Without the frame, the same error is unknown."""
    frame = place.example if place.example.startswith("File") else 'File "train.py", line 7, in step'
    code = "" if place.example.startswith("File") else f"    {place.example}\n"
    error = "TypeError: 7" if re.fullmatch(place.errors or ".*", "TypeError") else "KeyError: 7"
    event = find(f"Traceback (most recent call last):\n  {frame}\n{code}{error}\n")
    assert event is not None
    assert (event.kind, event.rule) == (place.kind, place.example)
    assert (
        kind_of(f'Traceback (most recent call last):\n  File "train.py", line 7, in step\n    x()\n{error}\n')
        is FailureKind.UNKNOWN
    )


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("/opt/conda/lib/python3.11/site-packages/vllm/v1/engine/core.py", "vllm"),
        ("/usr/lib/python3.11/os.py", code_locations.STDLIB),
        ("<frozen importlib._bootstrap>", code_locations.STDLIB),
        ("/home/me/src/verl/verl/trainer/main_ppo.py", "verl"),
        ("train.py", code_locations.USER),
    ],
)
def test_of_a_frame_is_known_whose_code_it_is(path: str, package: str) -> None:
    from rlhf_core.diagnosis.logs.tracebacks import Frame

    assert code_locations.package_of(Frame(path, "f", "")) == package


@pytest.mark.parametrize(
    "prefix",
    [
        "3: ",
        "[rank3]: ",
        "(EngineCore_DP0 pid=4) ERROR 01-21 04:15:38 [core.py:93] ",
        "│ ",
        "\x1b[36m(WorkerDict pid=4, ip=10.0.0.1)\x1b[0m ",
        "2026-01-01T06:50:07.810058421Z ",
        "[2026-01-01 06:50:07 TP0] ",
        "sglang-1  | ",
        "[1,0]<stderr>: ",
        "- `",
        "# ",
        "> ",
        "E       ",
    ],
)
def test_the_prefix_of_a_line_does_not_hide_the_error_class_at_its_beginning(prefix: str) -> None:
    assert kind_of(f"{prefix}ValueError: packing is not supported") is FailureKind.CONFIG


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
        "Uncorrectable memory error count: 0\nno uncorrectable memory errors found\n",
        "failed to set the governor: Function not implemented\n",
        "exited with code 0 after 137 steps\n",
        "git not found, no revision is recorded\n",
        "bash: conda: command not found\n" + STEPS,
        "number of nan iterations: 0 | NCCL_TIMEOUT=1800 | on_error: stop\n",
    ],
)
def test_scary_words_alone_are_no_failure(log: str) -> None:
    assert kind_of(log) is None


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        (STEPS + "json.decoder.JSONDecodeError: Expecting value: line 1\n", FailureKind.DATA),
        (STEPS + "RuntimeError: CUDA out of memory.\nstep 6 loss 1.0\n", FailureKind.CUDA_OOM),
        ("step 1 loss 2.0 grad_norm: nan\nstep 2 loss 1.9 grad_norm: nan\n", FailureKind.NON_FINITE),
        ("step 1 loss 2.0\nstep 2 loss nan\n", FailureKind.NON_FINITE),
        ("{'loss': 'nan', 'grad_norm': 'nan', 'learning_rate': '1e-06'}\n" * 2, FailureKind.NON_FINITE),
        ("step:3 - actor/pg_loss:np.float64(nan) - actor/grad_norm:np.float64(nan)\n" * 2, FailureKind.NON_FINITE),
        ("Traceback (most recent call last):\n  File 'a.py', line 3\n", FailureKind.UNKNOWN),
        ("ECC Errors: Volatile SRAM Uncorrectable : 5\n", FailureKind.GPU_HARDWARE),
        ("EDAC MC0: UNCORRECTABLE MEMORY ERROR on CPU 0, DIMM A1\n", FailureKind.GPU_HARDWARE),
        ("flock: 9: Function not implemented\n", FailureKind.FILE_SYSTEM),
        ("Container killed on request. Exit code is 137\n", FailureKind.UNKNOWN),
        ("State: Exited (137) 3 seconds ago\n", FailureKind.UNKNOWN),
        ("job.sh: 12: git: not found\n", FailureKind.CONFIG),
        ("bash: conda: command not found\n", FailureKind.CONFIG),
        ("bash: conda: command not found\nRuntimeError: CUDA error: out of memory\n", FailureKind.CUDA_OOM),
    ],
)
def test_the_same_words_where_they_end_it_are_a_failure(log: str, kind: FailureKind) -> None:
    """The negative controls of the test above."""
    assert kind_of(log) is kind


def test_gradients_that_explode_while_the_loss_scale_falls_are_a_divergence_and_a_spike_is_not() -> None:
    line = "iteration {} | lm loss: 4.1 | loss scale: {} | grad norm: {} |\n"
    falling = "".join(line.format(step, 65536.0 / 2**step, 879946.6) for step in range(3))
    spike = "".join(line.format(step, 65536.0, norm) for step, norm in enumerate((1.0, 20000.0, 20000.0)))
    assert kind_of(falling) is FailureKind.NON_FINITE
    assert kind_of(spike) is None


CANCELLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***"


def test_a_cancellation_decides_only_where_nothing_failed_before_it() -> None:
    def kind(*lines: str) -> FailureKind | None:
        return kind_of("\n".join(lines))

    died = "srun: error: n2: task 1: Exited with exit code 1"
    assert kind(CANCELLED, died, "RuntimeError: Connection reset by peer") is FailureKind.USER_CANCEL
    assert kind(died, CANCELLED) is FailureKind.UNKNOWN
    assert kind("AttributeError: 'X' object has no attribute 'y'", CANCELLED) is FailureKind.UNKNOWN
    assert kind(CANCELLED, CANCELLED.replace(" ***", " DUE TO TIME LIMIT ***")) is FailureKind.TIME_LIMIT
    assert kind(CANCELLED, "srun: error: n2: task 1: Out Of Memory") is FailureKind.HOST_OOM


def test_code_that_a_traceback_quotes_is_not_what_happened() -> None:
    quoted = 'File "a.py", line 3, in f\n    raise ValueError("CUDA out of memory")\nKeyError: 7\n'
    assert kind_of(quoted) is FailureKind.UNKNOWN


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
    def read(last: str) -> FailureKind | None:
        return kind_of(f"Traceback (most recent call last):\n  {frame}\n    x()\n{last}\n")

    assert read("KeyError: 7") is kind
    assert read("RuntimeError: Connection closed by peer") is FailureKind.NETWORK
    assert read("OSError: [Errno 116] Stale file handle") is FailureKind.FILE_SYSTEM
