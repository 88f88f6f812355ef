"""Detection of training that learns nothing, without ending training that learns.

    python tests/benchmarks/bench_health.py [--only WORD] [--slice 1/4] [--keep FOLDER]
    python tests/benchmarks/bench_health.py --algorithms [grpo ...] [--healthy 30] [--record]

20 healthy runs with other seeds and settings, then runs that are broken in one way each
(``tests/training/health_runs.py``): two real ranks, a small model that sorts three digits, 60 steps of GRPO, judged at
every step. Prints the outcome of each run and its step; exits with 1 if a healthy run was ended, or a broken one was
not, or not by its rule. A warning counts as an end. ``--keep`` keeps the judge's observations, one file of JSON lines
per run.

With ``--algorithms`` it makes this many healthy runs of each algorithm instead (of all, if none is named), and
``--record`` puts the rows into the table of docs/benchmarks.md, each as soon as it is finished.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "training")]

from health_runs import CASES, DEGENERATE, case_of, judged, lines, make_runs  # noqa: E402
from rank_launcher import launch, values  # noqa: E402

from rlhf_core.schemas.algorithms import specs  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- healthy runs by algorithm: begin -->\n", "<!-- healthy runs by algorithm: end -->\n"
"""Marks around the table that ``--record`` keeps."""
HEAD = "| algorithm | healthy runs | alarms | of which runs | seconds a run | day |\n|---|---|---|---|---|---|\n"


def main() -> int:
    """Make the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="runs whose name has this word")
    parser.add_argument("--slice", default="1/1", help="part of the runs, of how many")
    parser.add_argument("--keep", type=Path, help="folder for what the judge saw")
    parser.add_argument("--algorithms", nargs="*", help="healthy runs of these algorithms; all without a name")
    parser.add_argument("--healthy", type=int, default=30, help="healthy runs of each algorithm")
    parser.add_argument("--record", action="store_true", help="write the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    if arguments.algorithms is not None:
        # What a policy learns from a teacher depends on the teacher, which another run has to train.
        untaught = [name for name, traits in specs().items() if not traits.distils]
        return _by_algorithm(arguments.algorithms or untaught, arguments.healthy, arguments.record)
    part, parts = map(int, arguments.slice.split("/"))
    names = [name for name in CASES if arguments.only in name][part - 1 :: parts]
    wrong, seconds = _make(names, arguments.keep)
    print(f"{len(names)} runs in {seconds:.0f} s, {len(wrong)} judged wrongly")
    return 1 if wrong else 0


def _by_algorithm(algorithms: list[str], count: int, record: bool) -> int:
    num_wrong = 0
    for algorithm in algorithms:
        wrong, seconds = _make([f"{algorithm} {number}" for number in range(count)], None)
        num_wrong += len(wrong)
        names, day = ", ".join(wrong) or "-", f"{datetime.now(UTC):%Y-%m-%d}"
        row = f"| `{algorithm}` | {count} | {len(wrong)} | {names} | {seconds / count:.0f} | {day} |"
        print(row, flush=True)
        if record:
            _record(algorithm, row)
    return 1 if num_wrong else 0


def _record(algorithm: str, row: str) -> None:
    """Put a row into the table of the page, replacing an older one of the algorithm."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {found: line for line in table.splitlines() if (found := line.split("`")[1] if "`" in line else "")}
    rows[algorithm] = row
    ordered = [rows[name] for name in specs() if name in rows]
    PAGE.write_text(before + BEGIN + HEAD + "".join(f"{line}\n" for line in ordered) + END + after)


def _make(names: list[str], keep: Path | None) -> tuple[list[str], float]:
    """Make runs and print a line for each; return the names of the wrongly judged ones and the seconds that they
    took."""
    wrong = []
    print(f"{'run':<32} {'kind':<10} {'steps':>5} {'reward first -> last':>21}  judged")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        started = time.monotonic()
        outcomes = values(
            launch(make_runs, 2, folder / "launch", timeout_s=3600, folder=str(folder / "runs"), names=names)
        )
        seconds = time.monotonic() - started
        for name in names:
            good, row = _row(folder / "runs", name, {ranks[name] for ranks in outcomes})
            wrong += [] if good else [name]
            print(row, flush=True)
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(judged(folder / "runs", name), keep)
    return wrong, seconds


def _row(folder: Path, name: str, outcomes: set[str]) -> tuple[bool, str]:
    """One line of the table, and whether it is as expected. All ranks must agree."""
    case, result = case_of(name), outcomes.pop() if len(outcomes) == 1 else f"the ranks differ: {sorted(outcomes)}"
    if case.rule:
        good = result.startswith("DegenerateRl") and f"({case.rule}): " in result and case.words in result
    else:
        good = result == "done"
    made = lines(folder, name)
    rewards = [line["metrics"]["reward/mean"] for line in made if "reward/mean" in line["metrics"]]
    change = f"{fmean(rewards[:5]):.3f} -> {fmean(rewards[-5:]):.3f}" if rewards else "-"
    kind = "broken" if name in DEGENERATE else "healthy"
    verdict = result if not good else re.findall(r"\((\w+)\): ", result)[0] if case.rule else "well"
    return good, f"{name:<32} {kind:<10} {made[-1]['step'] if made else 0:>5} {change:>21}  {verdict}"


if __name__ == "__main__":
    sys.exit(main())
