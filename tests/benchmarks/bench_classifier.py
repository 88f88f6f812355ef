"""Generalisation of the log classifier: ``python tests/benchmarks/bench_classifier.py LOGS [--peer REVISION]``.

LOGS is a JSON lines file with ``text``, ``label`` (as in LABELS below, or the name of a kind), ``source``
(``owner/name:path@commit``, or any other name of the origin), and ``retry`` (``retry``, ``retry_elsewhere``,
``change``, ``none``) if it is known. Such data is not part of the project; without it there is nothing to do.

Nothing is fitted, so there are no parameters to leave out. Instead, while the logs of one source are read, every
pattern, class and place that matches in logs of this source and in no others is switched off: the tables then hold what
they would hold, or less, if this source had never been seen. The same is printed without switching anything off, and
for an earlier revision.

- *false stop*: the policy stops, though the same job may well succeed if it is restarted; the policy is asked as agent
  0 and the controller ask it, with words as the only evidence and with the remedies that most runs have
- *false alarm*: a healthy log is classified as a failure
- *wasted retry*: the policy retries a failure that persists until something changes
- *retried for ever*: the kind has no limit of its own, though something must change
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from rlhf_core.diagnosis.logs import code_locations, exceptions, search
from rlhf_core.diagnosis.logs.signatures import table
from rlhf_core.diagnosis.policy import ALLOWED_BY_SPEC, RULES, decide_in_place, decide_next
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.supervision import SuperviseSpec

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = "healthy"
LABELS = {
    "collective_timeout_missing_rank": "collective_hang",
    "collective_timeout_undecided": "collective_hang",
    "nccl_system_error": "network",
    "cuda_illegal_access": "illegal_access",
    "node_fail": "node_lost",
    "user_cancelled": "user_cancel",
    "nan_or_inf": "non_finite",
    "filesystem": "file_system",
    "config_error": "config",
    "import_or_version": "import_error",
    "shape_error": "shape",
    "tokenizer_or_data": "data",
    "port_or_rendezvous": "rendezvous",
    "engine_crash": "engine",
    "reward_function_error": "reward_function",
}
"""Labels that are not the name of a kind."""
OF_THE_SCHEDULER = frozenset({FailureKind.PREEMPTION, FailureKind.TIME_LIMIT})
"""Kinds that are deliberately retried within the run's budget as long as checkpoints advance."""


@dataclass(frozen=True)
class Log:
    """One labelled log."""

    text: str
    kind: str
    source: str
    retry: str
    """Empty if it is unknown."""


class Share(NamedTuple):
    """A count out of a total."""

    count: int
    total: int

    def __str__(self) -> str:
        """The share with its 95 % interval (Wilson)."""
        if self.total == 0:
            return "0 of 0"
        low, high = wilson(self.count, self.total)
        return f"{self.count} of {self.total} ({self.count / self.total:.1%}, 95 % {low:.1%} to {high:.1%})"


def wilson(count: int, total: int) -> tuple[float, float]:
    """Interval of a share, of 95 %."""
    z = 1.96
    share, square = count / total, z * z / total
    middle = (share + square / 2) / (1 + square)
    half = z * sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def read_data(path: Path) -> list[Log]:
    """Read all labelled logs of a file."""
    rows = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return [
        Log(row["text"], LABELS.get(row["label"], row["label"]), _source(row), row.get("retry", "")) for row in rows
    ]


def _source(row: dict[str, str]) -> str:
    return row["source"].partition(":")[0] if "/" in row["source"].partition(":")[0] else row["source"]


def read_all(logs: Sequence[Log]) -> list[str]:
    """Kind that the classifier assigns to each log."""
    return [_kind(log.text) for log in logs]


def read_across_sources(logs: Sequence[Log]) -> list[str]:
    """Kinds with each log read without the table entries that only logs of its own source support."""
    support: dict[str, set[str]] = defaultdict(set)
    for log in logs:
        for event in search.events(log.text):
            support[event.rule].add(log.source)
    only = defaultdict(set)
    for rule, sources in support.items():
        if len(sources) == 1:
            only[next(iter(sources))].add(rule)
    kinds: dict[int, str] = {}
    for source in {log.source for log in logs}:
        with without(only[source]):
            kinds |= {place: _kind(log.text) for place, log in enumerate(logs) if log.source == source}
    return [kinds[place] for place in range(len(logs))]


@contextmanager
def without(rules: set[str]) -> Iterator[None]:
    """Read logs with tables that lack the entries for some rules."""
    signatures = [
        replace(row, expressions=tuple(pattern for pattern in row.expressions if pattern not in rules))
        for row in table.SIGNATURES
    ]
    classes = {name: row for name, row in exceptions.CLASSES.items() if f"class {name}" not in rules}
    places = [place for place in code_locations.CODE_LOCATIONS if place.example not in rules]
    with (
        patch.object(table, "SIGNATURES", signatures),
        patch.object(exceptions, "CLASSES", classes),
        patch.object(code_locations, "CODE_LOCATIONS", places),
    ):
        yield


def _kind(text: str) -> str:
    event = search.find(text)
    return event.kind.value if event is not None else HEALTHY


def report(name: str, logs: Sequence[Log], kinds: Sequence[str]) -> Share:
    """Print the results, and return the share of correct ones."""
    pairs = list(zip(logs, kinds, strict=True))
    right = Share(sum(log.kind == kind for log, kind in pairs), len(pairs))
    healthy = [kind for log, kind in pairs if log.kind == HEALTHY]
    may_succeed = [(log, kind) for log, kind in pairs if log.retry in ("retry", "retry_elsewhere")]
    must_change = [kind for log, kind in pairs if log.retry == "change"]
    stopped = [(log, kind) for log, kind in may_succeed if _stops(kind)]
    print(f"\n== {name}")
    print(f"class right             {right}")
    print(f"healthy kept healthy    {Share(healthy.count(HEALTHY), len(healthy))}")
    print(f"false stops             {Share(len(stopped), len(may_succeed))}")
    print(f"  of a wrong class      {sum(log.kind != kind for log, kind in stopped)}")
    print(f"false alarms            {Share(len(healthy) - healthy.count(HEALTHY), len(healthy))}")
    print(f"wasted retries          {Share(sum(_retries(kind) for kind in must_change), len(must_change))}")
    print(f"retried for ever        {Share(sum(_for_ever(kind) for kind in must_change), len(must_change))}")
    confused = Counter((log.kind, kind) for log, kind in pairs if log.kind != kind)
    print("read as something else  " + ("; ".join(_confusions(confused)) or "none"))
    return right


def _confusions(confused: Counter[tuple[str, str]]) -> Iterable[str]:
    for (label, kind), count in sorted(confused.items(), key=lambda one: -one[1]):
        yield f"{label} as {kind}" + (f" x {count}" if count > 1 else "")


REMEDIES = {
    FailureKind.CHECKPOINT_CORRUPT: "the damaged one is set aside; resuming from the one before",
    FailureKind.CUDA_OOM: "half the micro-batch",
    FailureKind.NON_FINITE: "going back to the checkpoint before",
}
"""Remedies of a run with an older checkpoint whose batch can be made smaller, as most have."""


def _stops(kind: str) -> bool:
    """True if the run ends at the first such failure, by the rules that agent 0 and then the controller apply."""
    if kind == HEALTHY:
        return False
    found, spec = FailureKind(kind), SuperviseSpec()
    remedy = REMEDIES.get(found, "")
    # The only evidence in these logs is words.
    in_place = decide_in_place(found, 0, spec, remedy=remedy, undecided=True)
    if in_place.action is not Action.NEW_ATTEMPT:
        return in_place.action is Action.STOP
    return decide_next(found, 1, False, spec, 0.0, remedy, undecided=True).action is Action.STOP


def _retries(kind: str) -> bool:
    """True if the same is retried, without a remedy that changes anything."""
    return kind != HEALTHY and not _stops(kind) and FailureKind(kind) not in REMEDIES


def _for_ever(kind: str) -> bool:
    if kind == HEALTHY or kind in OF_THE_SCHEDULER:
        return False
    return RULES[FailureKind(kind)].attempts >= ALLOWED_BY_SPEC


PEER = """
import json, sys
from rlhf_core.diagnosis.classify import read_log
for line in sys.stdin:
    found = read_log(json.loads(line))
    print(found.kind.value if found is not None else "healthy")
"""


def read_by(revision: str, logs: Sequence[Log]) -> list[str]:
    """Kinds that an earlier revision of this project assigns to the logs."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "rlhf_core"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        texts = "".join(json.dumps(log.text) + "\n" for log in logs)
        asked = subprocess.run(
            [sys.executable, "-c", PEER], cwd=folder, input=texts, text=True, check=True, stdout=subprocess.PIPE
        )
    return asked.stdout.split()


def main() -> int:
    """Read all logs in three ways, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="?", help="labelled logs, one JSON object a line")
    parser.add_argument("--peer", default="ab24737", help="revision to compare with: the table of lines before this")
    arguments = parser.parse_args()
    if arguments.logs is None:
        print("no labelled logs given: nothing to measure")
        return 0
    logs = read_data(arguments.logs)
    print(f"{len(logs)} logs from {len({log.source for log in logs})} sources")
    report("as the tables stand (they were made with these logs)", logs, read_all(logs))
    right = report("across sources", logs, read_across_sources(logs))
    peer = report(f"revision {arguments.peer}", logs, read_by(arguments.peer, logs))
    print(f"\nwrong classes, across sources against {arguments.peer}: {_ratio(right, peer)}")
    return 0


def _ratio(ours: Share, theirs: Share) -> str:
    return f"{ours.total - ours.count} to {theirs.total - theirs.count}"


if __name__ == "__main__":
    sys.exit(main())
