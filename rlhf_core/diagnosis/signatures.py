"""What failures look like in text: one table of regular expressions, from log lines to kinds of failure.

A line may be the root of a failure, a symptom of one that shows itself elsewhere (a collective that timed out), a
cascade (the connection to a rank that died before) or tear-down. Roots win over symptoms and symptoms over cascades,
wherever they stand; tear-down says nothing. Within the same part the earlier line wins.

The table was developed on logs of real jobs, which are not part of the project; it errs on the side of a retry.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from rlhf_core.schemas.failures import FailureKind


class Part(IntEnum):
    """Which part a line plays in a failure. Lower decides over higher."""

    ROOT = 0
    SYMPTOM = 1
    CASCADE = 2
    TEARDOWN = 3


@dataclass(frozen=True)
class Signature:
    """One row of the table."""

    kind: FailureKind
    part: Part
    pattern: re.Pattern[str]


@dataclass(frozen=True)
class Match:
    """A line that a signature knows."""

    kind: FailureKind
    part: Part
    line: str


def _rows(kind: FailureKind, part: Part, *patterns: str) -> Iterator[Signature]:
    for pattern in patterns:
        yield Signature(kind, part, re.compile(pattern))


SIGNATURES: tuple[Signature, ...] = (
    # Tear-down first: these lines hold words that would otherwise match below.
    *_rows(
        FailureKind.UNKNOWN,
        Part.TEARDOWN,
        r"Sending process \d+ closing signal",
        r"destroy_process_group\(\) was not called",
        r"resource_tracker: There appear to be \d+ leaked",
        r"For debugging consider passing CUDA_LAUNCH_BLOCKING",
        r"CUDA kernel errors might be asynchronously reported",
        r"Force Terminated",
        r"Job step aborted: Waiting up to",
        r"^Killing subprocess \d+",
    ),
    # What the scheduler says.
    *_rows(FailureKind.NODE_LOST, Part.ROOT, r"DUE TO NODE FAILURE", r"error: Node failure on", r"\bNODE_FAIL\b"),
    *_rows(FailureKind.PREEMPTION, Part.ROOT, r"DUE TO PREEMPTION", r"\bPREEMPTED\b"),
    *_rows(FailureKind.TIME_LIMIT, Part.ROOT, r"DUE TO TIME LIMIT", r"^(Slurm state )?TIMEOUT\b", r"\bDEADLINE\b"),
    *_rows(FailureKind.USER_CANCEL, Part.SYMPTOM, r"\*\*\* (JOB|STEP) \S+ ON \S+ CANCELLED AT", r"^CANCELLED by \d+"),
    # Memory.
    *_rows(
        FailureKind.CUDA_OOM,
        Part.ROOT,
        r"(CUDA|HIP) out of memory",
        r"\bOutOfMemoryError\b",
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        r"No available memory for the cache blocks",
    ),
    *_rows(
        FailureKind.HOST_OOM,
        Part.ROOT,
        r"oom[-_]kill|OOM[ -]Killed|\bOUT_OF_MEMORY\b|Out of memory: Killed process",
        r"insufficient shared memory|out of shared memory",
        r"std::bad_alloc|\bCannot allocate memory\b|^MemoryError\b",
    ),
    # Hardware, and kernels that went wrong.
    *_rows(
        FailureKind.GPU_HARDWARE,
        Part.ROOT,
        r"(?i)uncorrectable (NVLink|ECC)|ECCUncorrectable",
        r"NVRM: Xid \(PCI[^)]*\): (48|61|62|63|64|74|79|92|94|95|109|119|120|140)\b",
        r"(?i)GPU has fallen off the bus|GPU is lost|Row Remapp",
        r"Unable to determine the device handle for GPU",
    ),
    *_rows(
        FailureKind.ILLEGAL_ACCESS,
        Part.ROOT,
        r"an illegal memory access was encountered|an illegal instruction was encountered",
        r"device-side assert triggered|misaligned address|unspecified launch failure",
    ),
    # Disks and files.
    *_rows(
        FailureKind.DISK_FULL,
        Part.ROOT,
        r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]|\bENOSPC\b",
        r"inline_container\.cc:\d+\] \. unexpected pos",
    ),
    *_rows(
        FailureKind.FILE_SYSTEM,
        Part.ROOT,
        r"Stale file handle|Read-only file system|\[Errno (5|30|116|121)\]|Transport endpoint is not connected",
        r"database is locked|FileExistsError: \[Errno 17\]|Tried reading schema message, was null",
    ),
    *_rows(
        FailureKind.CHECKPOINT_CORRUPT,
        Part.ROOT,
        r"UnpicklingError|invalid load key|PytorchStreamReader failed|SafetensorError|Error\(s\) in loading state_dict",
    ),
    # Collectives.
    *_rows(
        FailureKind.COLLECTIVE_MISMATCH,
        Part.ROOT,
        r"Detected mismatch between collectives",
        r"op\.preamble\.length <= op\.nbytes",
    ),
    *_rows(
        FailureKind.COLLECTIVE_HANG,
        Part.SYMPTOM,
        r"Watchdog caught collective operation timeout",
        r"Timed out waiting \d+ms for (recv|send|all)",
        r"\bWait timeout\b|Operation timed out!",
    ),
    # Finding each other.
    *_rows(
        FailureKind.RENDEZVOUS,
        Part.ROOT,
        r"EADDRINUSE|[Aa]ddress already in use|failed to listen on any local network address",
        r"Name or service not known|Temporary failure in name resolution",
    ),
    *_rows(
        FailureKind.RENDEZVOUS,
        Part.SYMPTOM,
        r"Rendezvous(Timeout|Connection|Closed)Error",
        r"connectFullMesh failed|client socket has timed out|wait timeout after \d+ms, keys",
    ),
    # What came in from outside: packages, data, settings, user code.
    *_rows(
        FailureKind.IMPORT_ERROR,
        Part.ROOT,
        r"ModuleNotFoundError|ImportError|PackageNotFoundError|No module named ",
        r"undefined symbol|version `?GLIBC",
        r"TypeError: .*__init__\(\) got an unexpected keyword argument",
        r"AttributeError: module '[^']+' has no attribute",
    ),
    *_rows(
        FailureKind.DATA,
        Part.ROOT,
        r"JSONDecodeError|UnicodeDecodeError|DatasetGenerationError",
    ),
    *_rows(
        FailureKind.NON_FINITE,
        Part.ROOT,
        r"(?i)\b(loss|grad(ient)?[ _]norm) (is|became|was|=) ?(nan|inf)",
        r"Detected inf/nan|Current loss scale already at minimum",
    ),
    *_rows(
        FailureKind.SHAPE,
        Part.ROOT,
        r"The size of tensor a \(\d+\) must match|mat1 and mat2 shapes cannot be multiplied",
        r"Sizes of tensors must match",
        r"size mismatch|shape '\[[^]]*\]' is invalid for input|stack expects each tensor to be equal size",
        r"Expected reduction dim",
    ),
    *_rows(
        FailureKind.ENGINE,
        Part.SYMPTOM,
        r"Engine(Dead|Core)\w*Error|EngineCore (encountered|failed)",
    ),
    *_rows(
        FailureKind.CONFIG,
        Part.ROOT,
        r"^(\[rank\d+\]: *)?ValueError: .*(not supported?|not compatible|does not support|Could not find|mismatch)",
        r"Please correct the following .* config values",
        r"forward only supports|error: unrecognized arguments",
    ),
    # Also what a file system does that lags behind: so anything more telling wins.
    *_rows(
        FailureKind.CONFIG,
        Part.SYMPTOM,
        r"FileNotFoundError|PermissionError|\[Errno (2|13)\]|Permission denied",
    ),
    *_rows(
        FailureKind.REWARD_FUNCTION,
        Part.SYMPTOM,
        r'File "[^"]*reward[^"/]*(/[^"]*)?", line \d+, in ',
    ),
    # The network: a root where a device says so, otherwise most often the echo of a rank that died.
    *_rows(
        FailureKind.NETWORK,
        Part.SYMPTOM,
        r"NET/IB ?: Got completion|ncclSystemError|No route to host|Network is unreachable",
    ),
    *_rows(
        FailureKind.NETWORK,
        Part.CASCADE,
        r"Connection (reset|closed|refused)|Broken pipe|Socket closed|connection was closed",
        r"ncclRemoteError|ncclInternalError|NCCL communicator was aborted|Some NCCL operations have failed",
        r"Application timeout caused pair closure",
    ),
)
"""Looked through from top to bottom; the first row that matches a line decides about that line."""


def match_line(line: str) -> Match | None:
    """What the table knows about one line; None when nothing."""
    for signature in SIGNATURES:
        if signature.pattern.search(line):
            return Match(signature.kind, signature.part, line.strip())
    return None


def find(text: str) -> Match | None:
    """The line of a text that decides: roots before symptoms before cascades, then the first; None when there is
    none."""
    matches = [match for match in map(match_line, text.splitlines()) if match is not None]
    telling = [match for match in matches if match.part is not Part.TEARDOWN]
    return min(telling, key=lambda match: match.part, default=None)
