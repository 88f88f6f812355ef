"""Findings and cost of the probe: every case of ``tests/probes`` on a real Slurm, and healthy probes.

    python tests/benchmarks/bench_probe.py [--healthy 30] [--write]

Prints a table; ``--write`` puts it into docs/benchmarks.md. The nodes of the cluster are namespaces of this machine and
share its processors: the seconds are those of so many cores for three nodes.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "probes"), str(TESTS / "faults")]

from fault_table import write_between  # noqa: E402
from probe_faults import CASES, NUM_NODES, Case, Seen, probe  # noqa: E402
from slurm_cluster import WHY_NO_NAMESPACES, Cluster  # noqa: E402

PAGE = TESTS.parent / "docs" / "benchmarks.md"


def main() -> None:
    """Make all probes, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy", type=int, default=30, help="probes of a healthy cluster")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    if WHY_NO_NAMESPACES:
        sys.exit(WHY_NO_NAMESPACES)
    with tempfile.TemporaryDirectory(prefix="rlhf-probes-") as name:
        folder = Path(name)
        with Cluster(folder / "slurm", nodes=NUM_NODES, namespaces=True).running() as cluster:
            os.environ.update(cluster.environment, XDG_CACHE_HOME=str(folder / "cache"))
            lines = table(cluster, folder, options.healthy)
    print("\n".join(lines))
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(write_between(page, "probe", "\n".join(lines)), encoding="utf-8")


def table(cluster: Cluster, folder: Path, num_healthy: int) -> list[str]:
    """The rows of the table, each printed as soon as it is known."""
    lines = ["| what is wrong | finding | node named | seconds to the finding |", "|---|---|---|---|"]
    for number, case in enumerate(CASES):
        seen = probe(cluster, fresh(folder, f"case-{number}"), case)
        say(case.name, seen, case)
        named = case.node or "none to blame"
        verdict = f"`{case.check}`" if not seen.problems_with(case) else f"WRONG: {seen.problems_with(case)[0][:200]}"
        lines.append(f"| {case.name} | {verdict} | {named} | {seen.seconds:.1f} |")
    seconds, alarms = [], 0
    for number in range(num_healthy):
        seen = probe(cluster, fresh(folder, f"healthy-{number}"))
        say("healthy", seen)
        seconds.append(seen.seconds)
        alarms += bool(seen.problems_with())
    if not seconds:
        return lines
    seconds.sort()
    typical, longest = seconds[len(seconds) // 2], seconds[-1]
    lines.append(
        f"| nothing, {num_healthy} times | {alarms} false alarms | - | median {typical:.1f}, longest {longest:.1f} |"
    )
    return lines


def say(name: str, seen: Seen, *cases: Case) -> None:
    """Print one line about a probe."""
    problems = "; ".join(seen.problems_with(*cases))
    print(f"{name}: {seen.seconds:.1f} s {problems or 'right'}", flush=True)


def fresh(folder: Path, name: str) -> Path:
    """A new, empty folder."""
    made = folder / name
    made.mkdir()
    return made


if __name__ == "__main__":
    main()
