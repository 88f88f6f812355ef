"""Is training that learns nothing ended, and training that learns left alone?

    python tests/benchmarks/bench_health.py [--only WORD] [--slice 1/4] [--keep FOLDER]

20 healthy runs of other seeds and settings, then runs that are broken in one way each
(``tests/training/health_runs.py``): two real ranks, a small model that sorts three digits, 60 steps of GRPO, judged at
every step. Prints what became of each, and at which step; 1 when a healthy run was ended, or a broken one was not, or
not by its rule. ``--keep`` leaves what the judge saw as one file of JSON lines for each run.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "training")]

from health_runs import CASES, HEALTHY, judged, lines, make_runs  # noqa: E402
from rank_launcher import launch, values  # noqa: E402


def main() -> int:
    """Make the runs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="runs whose name has this word")
    parser.add_argument("--slice", default="1/1", help="which part of the runs, of how many")
    parser.add_argument("--keep", type=Path, help="folder for what the judge saw")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.slice.split("/"))
    names = [name for name in CASES if arguments.only in name][part - 1 :: parts]
    wrong = 0
    print(f"{'run':<32} {'kind':<10} {'steps':>5} {'reward first -> last':>21}  judged")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        started = time.monotonic()
        told = values(launch(make_runs, 2, folder / "launch", timeout_s=3600, folder=str(folder / "runs"), names=names))
        seconds = time.monotonic() - started
        for name in names:
            good, row = _row(folder / "runs", name, {ranks[name] for ranks in told})
            wrong += not good
            print(row, flush=True)
            if arguments.keep:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(judged(folder / "runs", name), arguments.keep)
    print(f"{len(names)} runs in {seconds:.0f} s, {wrong} judged wrongly")
    return 1 if wrong else 0


def _row(folder: Path, name: str, told: set[str]) -> tuple[bool, str]:
    """One line of the table, and whether it is as it should be. All ranks must say the same."""
    case, result = CASES[name], told.pop() if len(told) == 1 else f"the ranks differ: {sorted(told)}"
    if case.rule:
        good = result.startswith("DegenerateRl") and f"({case.rule}): " in result and case.words in result
    else:
        good = result == "done"
    made = lines(folder, name)
    rewards = [line["metrics"]["reward/mean"] for line in made if "reward/mean" in line["metrics"]]
    change = f"{fmean(rewards[:5]):.3f} -> {fmean(rewards[-5:]):.3f}" if rewards else "-"
    kind = "healthy" if name in HEALTHY else "broken"
    verdict = result if not good else result.partition("): ")[0].rpartition("(")[2] if case.rule else "well"
    return good, f"{name:<32} {kind:<10} {made[-1]['step']:>5} {change:>21}  {verdict}"


if __name__ == "__main__":
    sys.exit(main())
