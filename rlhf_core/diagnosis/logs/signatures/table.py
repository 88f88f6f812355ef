"""Table of phrases: regular expressions for causes that only the text of a line reveals.

Error classes are in :mod:`rlhf_core.diagnosis.logs.exceptions`, locations in the code in
:mod:`rlhf_core.diagnosis.logs.code_locations`.

Each row has an example line as the runtime prints it; the tests check every row against its line, and docs/failures.md
lists them. The first row that matches a line decides. The table errs on the side of a retry: a kind that stops a run
needs an unambiguous phrase.
"""

from rlhf_core.diagnosis.logs.events import FailureEvent
from rlhf_core.diagnosis.logs.lines import LogLine
from rlhf_core.diagnosis.logs.signatures import setup, system, training
from rlhf_core.diagnosis.logs.signatures.row import Signature

SIGNATURES: tuple[Signature, ...] = (
    *system.SCHEDULER,
    *system.NOISE,
    *training.NUMBERS,
    *system.MACHINE,
    *training.CHECKPOINTS,
    *training.COLLECTIVES,
    *training.FINDING_EACH_OTHER,
    *setup.ENGINES,
    *setup.SERVICES,
    *setup.PACKAGES,
    *setup.DATA,
    *training.TENSORS,
    *training.USER_CODE,
    *system.NETWORK,
    *setup.SETTINGS,
    *system.ENDS,
)
"""Rows in the order in which they are tried."""

# fmt: off
_WORDS = (
    "0-byte", "429", "502", "503", "504", "^c", "abort", "actor", "address", "alarm", "alloc", "already",
    "argument", "assert", "attribute", "away", "back", "bad", "barrier", "benign", "bfloat", "build", "bus", "c++",
    "cache", "can't", "cancel", "cannot", "ceph", "chat", "client_support", "clients", "close", "closing", "code",
    "column", "connection", "continue", "core", "corrupt", "cosmetic", "could", "couldn't", "crash", "ctrl-c",
    "cuda", "damage", "dead", "deadline", "denied", "destroy_process", "detokenizer", "devices", "dict", "died",
    "disk", "diverge", "doesn't", "down", "driver", "dump", "duplicate", "dynamic", "eaddrinuse", "ecc", "edquot",
    "empty", "endpoint", "enospc", "enqueued", "eof", "erofs", "error", "estale", "eth", "evict", "examples",
    "exceed", "exception", "execve", "exit", "expect", "ext4", "fail", "fatal", "fault", "finite", "forward",
    "free", "frozen", "full", "gated", "gpfs", "gpus", "greater", "hang", "harmless", "heads", "host=", "http",
    "hung", "ib", "ibvwrap", "ignor", "illegal", "incompat", "incomplete", "inf", "install", "instantiat",
    "interrupt", "invalid", "kernel", "keyerror", "kill", "kvpool", "larger", "leak", "limit", "lock", "locked",
    "locks", "longer", "lost", "low", "lustre", "malformed", "match", "maximum", "memory", "misaligned", "mismatch",
    "miss", "mlx5", "module", "more", "must", "nan", "nccl", "needs", "neither", "net/", "network", "ninja", "node",
    "nodename", "non-fatal", "normal", "not", "numpy", "nvcc", "nvlink", "nvswitch", "only", "oom", "option",
    "optional", "out", "override", "pad", "panic", "pending", "permitted", "pickle", "pipe", "please", "plugin",
    "port", "preamble", "preempt", "quota", "raise", "ram", "rank", "read-only", "reading", "reclaim", "recover",
    "refuse", "requeue", "require", "reset", "resol", "resource_", "retri", "retry", "reward", "roce", "rocm", "row",
    "same", "samples", "scale", "scancel", "shape", "should", "sig", "signal", "sigquit", "size", "skip", "smash",
    "socket", "space", "spot", "stack", "stale", "stall", "status_", "stopped", "storage", "stored", "stuck",
    "succeed", "such", "surviv", "terminat", "time", "too", "traceback", "truncat", "type=", "unable", "unaffected",
    "unauthorized", "unavailable", "uncorr", "undefined", "unexpected", "unhandled", "unknown", "upgrade",
    "validation", "vendor", "version", "wait", "watchdog", "went", "xfs", "xid", "your", "zero-byte",
)
# fmt: on
"""Lower-case words; every matching line contains at least one, so most lines can be skipped."""


def may_match(text: str) -> bool:
    """Return True if a row may match the text. A cheap test, because logs have millions of lines."""
    small = text.lower()
    return any(word in small for word in _WORDS)


def match_line(line: LogLine) -> FailureEvent | None:
    """Explain a line by the first row that matches it; None if none does. The event does not tell the line itself.

    A line logged as a warning or below matches only phrases of the scheduler.
    """
    for row in SIGNATURES:
        if line.is_quiet and row.example not in _LOUD_ANYWAY:
            continue
        found = row.search(line.text)
        if found is not None:
            return FailureEvent(
                row.kind,
                row.part,
                rule=found.re.pattern,
                node=found.groupdict().get("node") or "",
                is_end=row.example in _ENDS,
                is_local=row.is_local,
            )
    return None


_LOUD_ANYWAY = frozenset(row.example for row in system.SCHEDULER)
_ENDS = frozenset(row.example for row in system.ENDS)
"""Examples of the rows that only report that something ended."""
