"""The fault campaign: real runs, disturbed at random moments by all faults of ``fault_cases``.

It runs on a real four-node Slurm, which it starts by itself.

    python tests/faults/campaign.py                        the whole campaign; `make faults`
    python tests/faults/campaign.py --only "SIGSTOP"       rows whose name contains this
    python tests/faults/campaign.py --shard 0/2            every second run; the other half is for another machine
    python tests/faults/campaign.py --scheduler local      on this machine as one node, without what needs Slurm
    python tests/faults/campaign.py --namespaces           also faults that swallow packets; root only
    python tests/faults/campaign.py --table                only the table of the finished cases

Every finished case is one line of the results file; a restarted campaign continues after them. An interrupted run is
repeated as a whole. At the end the table goes to the terminal and into docs/benchmarks.md.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import fault_inject
from fault_cases import CHAIN, NUM_RANKS, PACE_S, SPACING, Fault, Scenario, on_one_node, scenarios
from fault_engines import AHEAD_PREFIX, engine_scenarios
from fault_engines import PREFIX as OF_ENGINES
from fault_engines import SPLIT_PREFIX as OF_SPLIT
from fault_inject import Place, Truth
from fault_measure import Row, measure, measure_gone, same_parameters
from fault_runs import DisturbedSite, Stuck, engines, steps
from fault_services import Cluster, has_memory_groups, left_behind, memory_group
from fault_soon import PREFIX, soon_scenarios
from fault_table import markdown, write_between
from fault_wrapped import PREFIX as OF_SCRIPTS
from fault_wrapped import wrapped_scenarios
from postgres_server import PostgresServer
from sites import Site, last_step
from small_disk import small_disk

from rlhf_core.control.views.timeline import all_incidents
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.checkpoint import checksum
from rlhf_core.run_dir.run import RunDir

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
START_S = 240.0
"""Longest time until the moment of a fault has come."""
RECOVERY_TIMEOUT_S = 400.0
"""Longest time until training continues, or the run has ended."""
LONGEST_RUN = SPACING * (CHAIN + 1)
TABLES = {
    PREFIX: "default floors",
    OF_SCRIPTS: "torchrun script",
    OF_ENGINES: "rollout engines",
    AHEAD_PREFIX: "engines several steps ahead",
    OF_SPLIT: "split engines",
}
"""First words of rows, with their table in the page."""


@dataclass
class Campaign:
    """The results file, the reference, and the surroundings of the runs."""

    results: Path
    work: Path
    seed: int
    cluster: Cluster | None
    keep: bool
    num_ranks: int = NUM_RANKS
    """Ranks of the undisturbed run, one on each node."""

    def rows(self) -> list[Row]:
        """Finished cases of the results file."""
        if not self.results.exists():
            return []
        return [Row(**json.loads(line)) for line in self.results.read_text().splitlines()]

    def add(self, rows: list[Row]) -> None:
        """Record finished cases, all of a run at once."""
        with self.results.open("a") as file:
            file.write("".join(json.dumps(asdict(row)) + "\n" for row in rows))

    def reference(self, settings: tuple[str, ...] = ()) -> dict[str, str]:
        """Hash of the weights at every checkpoint of an undisturbed run, by step.

        Args:
            settings: settings shared with the runs that are compared with it.

        Raises:
            Stuck: the run did not reach its end, was judged broken, or learned nothing between two checkpoints, so
                that equal weights would prove nothing.
        """
        file, name = self.results.with_suffix(".references.json"), " ".join(settings)
        known: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
        if name not in known:
            overrides = ("checkpoint.keep_last=1000", *settings)
            plain = Scenario("reference", (), LONGEST_RUN, self.num_ranks, self.num_ranks, overrides)
            if self.cluster is None:
                plain = on_one_node(plain)
            with self.site(plain) as place:
                config = place.site.prepare([], pace_s=0.0)
                place.site.drive("run", config, "--no-prefect", *plain.settings)
                run = place.site.wait_for(lambda: place.site.run if place.site.ended else None, "the reference", 1200)
                hashes = {
                    str(checkpoint.step): checksum(checkpoint.model / "model.safetensors").sha256
                    for checkpoint in run.checkpoints()
                }
                if str(LONGEST_RUN) not in hashes:
                    raise Stuck(f"the undisturbed run did not get to its end; see {place.site.home}/rlhf.log")
                for incident in all_incidents(run, read_record(run)):
                    raise Stuck(f"false alarm in the undisturbed run: {incident.message}")
                require_learning(hashes)
                known[name] = hashes
                file.write_text(json.dumps(known, indent=1))
        return known[name]

    @contextmanager
    def site(self, scenario: Scenario) -> Iterator[Place]:
        """A fresh home with everything that the scenario needs; ended and removed afterwards."""
        home = Path(tempfile.mkdtemp(prefix=f"{scenario.name}-", dir=self.work))
        with ExitStack() as stack:
            site = DisturbedSite(home)
            if self.cluster is not None:
                site.variables = {"RLHF_SCHEDULER": "slurm", **self.cluster.environment}
            place = Place(site, RunDir(home), random.Random(f"{self.seed} {scenario.name}"))
            place.cluster = self.cluster
            if "postgres" in scenario.needs:
                place.postgres = PostgresServer()
                stack.callback(place.postgres.remove)
                site.database_url = place.postgres.url()
            if "prefect" in scenario.needs:
                place.prefect = stack.enter_context(Site(home / "prefect-server").running(services=False))
                place.prefect.serve("server")
                own = {"PREFECT_API_URL": place.prefect.api, "PREFECT_API_AUTH_STRING": place.prefect.password}
                site.variables |= own
            if "small_disk" in scenario.needs:
                site.variables["RLHF_RUNS"] = str(stack.enter_context(small_disk(home / "small", "5m")))
            if "memory_group" in scenario.needs:
                place.memory_group = stack.enter_context(memory_group(home.name))
            if self.cluster is not None:
                stack.callback(self.cluster.restore)
            stack.callback(site.close)
            yield place
        if not self.keep:
            shutil.rmtree(home, ignore_errors=True)

    # -----------------------------------------------------------------------------------------------------------------
    # One run

    def disturb(self, scenario: Scenario, reference: dict[str, str]) -> list[Row]:
        """Make one run, inject all its faults, and measure."""
        with self.site(scenario) as place:
            site = place.site
            inside = [dict(fault.inside) for fault in scenario.faults if fault.inside]
            for row in inside:
                row["group"] = str(place.memory_group)
            prepare = site.prepare_script if scenario.is_wrapped else site.prepare
            config = prepare(inside, scenario.pace_s)
            if place.postgres is not None:
                site.rlhf("db", "upgrade")
            site.drive("run", config, *([] if place.prefect else ["--no-prefect"]), *scenario.settings)
            truths: list[Truth] = []
            problem = ""
            try:
                place.run = site.wait_for(lambda: site.run, "the run directory", START_S)
                for number, fault in enumerate(scenario.faults):
                    truths.append(self._strike(place, fault, number))
                    self._settle(place, truths[-1])
                site.wait_for(lambda: site.ended, "the end of the run", RECOVERY_TIMEOUT_S)
            except Stuck as stuck:
                problem = str(stuck)
            return self._measure(scenario, place, truths, reference, problem)

    def _strike(self, place: Place, fault: Fault, number: int) -> Truth:
        """Wait for the moment of the fault and inject it, or wait until the saboteur has done so."""
        site = place.site
        if fault.inside is not None:
            pattern = f"{fault.inside['name']}*.json"
            found = site.wait_for(lambda: sorted(site.struck.glob(pattern)), f"fault {number} to strike", START_S)
            time.sleep(0.2)  # the file exists before it is written
            struck = json.loads(found[0].read_text())
            rank, node = struck["rank"], struck["node"]
            if "engine" in fault.inside:
                rank, node = next(
                    (one.rank, one.node) for one in engines(place.run) if one.rank == fault.inside["engine"]
                )
            return Truth(struck["time"], struck["step"] - 1, rank, node)
        site.wait_for(lambda: last_step(place.run) >= fault.step, f"step {fault.step}", START_S)
        if fault.step > 0:
            time.sleep(place.chance.uniform(0, 2 * PACE_S))
        truth: Truth = getattr(fault_inject, fault.outside)(place)
        return truth

    def _settle(self, place: Place, truth: Truth) -> None:
        """Wait until training has continued for two steps past the fault, or the run has ended."""

        def settled() -> bool:
            made = [line for _, line in steps(place.run) if line.time.timestamp() > truth.time]
            return place.site.ended or max((line.step for line in made), default=0) >= truth.step + 2

        place.site.wait_for(settled, "training to go on", RECOVERY_TIMEOUT_S)

    def _measure(
        self, scenario: Scenario, place: Place, truths: list[Truth], reference: dict[str, str], problem: str
    ) -> list[Row]:
        if not truths:
            raise Stuck(f"{problem}; see {place.site.home}/rlhf.log")
        if not place.run.spec.exists():
            return [self._measure_gone(scenario, place, truths[0])]
        record = read_record(place.run)
        state = record.state.value
        if not problem and not (self.cluster is not None and self.cluster.is_frozen):
            left = left_behind(place.run.run_id)
            problem = f"{state}, but left behind {len(left)} processes: {'; '.join(left[:3])}" if left else ""
        jobs = self.cluster.num_jobs(place.run.run_id) if self.cluster else len(record.attempts)
        same = same_parameters(place.run, reference) if state == "completed" else False
        untils = [*(truth.time for truth in truths[1:]), time.time() + 1]
        rows = [
            measure(scenario.name, number, fault, truth, until, place.run, problem or state, same, jobs)
            for number, (fault, truth, until) in enumerate(zip(scenario.faults, truths, untils, strict=False))
        ]
        rows = [replace(row, scheduler="slurm" if self.cluster else "local") for row in rows]
        if problem or any(map(wrong_in, rows)):
            keep = self.results.parent / "failed" / place.site.home.name
            keep.parent.mkdir(exist_ok=True)
            shutil.copytree(place.site.home, keep, ignore=shutil.ignore_patterns("small", "*.socket"))
        return rows

    def _measure_gone(self, scenario: Scenario, place: Place, truth: Truth) -> Row:
        run_id, cluster = place.run.run_id, self.cluster
        history_record = place.site.rlhf("show", run_id, "--json").json()
        jobs = cluster.num_jobs(run_id) if cluster else len(history_record["attempts"])
        left = cluster is not None and cluster.is_at_work(run_id)
        row = measure_gone(scenario.name, scenario.faults[0], truth, history_record, jobs, left)
        return replace(row, scheduler="slurm" if cluster else "local")


def require_learning(hashes: Mapping[str, str]) -> None:
    """Refuse a reference with which equal weights would prove nothing.

    Args:
        hashes: hashes of the weights, by step.

    Raises:
        Stuck: two steps have the same hash.
    """
    if len(set(hashes.values())) < len(hashes):
        raise Stuck(f"the undisturbed run has the same weights at two steps: {hashes}")


def wrong_in(row: Row) -> list[str]:
    """The verdicts on a case that are not as expected."""
    verdicts = {
        "FALSE ALARM" if row.control else "MISSED": row.found is not row.control,
        "in time": row.in_time,
        "blame": row.blame_right,
        "class": row.class_right,
        "action": row.action_right,
        "back in time": row.again_in_time,
        "equal": row.same_numbers,
    }
    return [name for name, good in verdicts.items() if good is False]


def _say(row: Row) -> None:
    wrong = wrong_in(row)
    seconds = "found" if row.found else "nothing found"
    if row.found_s is not None:
        seconds += f" after {row.found_s:.1f} s"
    again = f"again {row.again_s:.1f} s" if row.again_s is not None else "not again"
    print(
        f"  {row.row}: {row.kind or '-'} -> {row.action or '-'}; {seconds}, {again}; "
        f"{'WRONG: ' + ', '.join(wrong) if wrong else 'all right'} ({row.state})",
        flush=True,
    )


def main() -> None:
    """Parse the options and continue the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/faults/results.jsonl"))
    parser.add_argument("--scheduler", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--namespaces", action="store_true", help="nodes with networks of their own; needs root")
    parser.add_argument("--node-timeout", type=int, default=5, help="SlurmdTimeout; clusters have 300 s by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times-hang", type=int, default=10, help="cases of every hanging kind")
    parser.add_argument("--times", type=int, default=3, help="cases of every other kind")
    parser.add_argument("--controls", type=int, default=30, help="healthy controls")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--shard", default="0/1", help="i/n: runs i, i+n, i+2n ...")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no run after so many minutes; 0 for no limit")
    parser.add_argument("--table", action="store_true", help="only print and write the table")
    parser.add_argument("--no-page", action="store_true", help="do not write docs/benchmarks.md")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    options = parser.parse_args()

    with ExitStack() as stack:
        options.results.absolute().parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="rlhf-faults-"))
        if not options.keep:
            stack.callback(shutil.rmtree, work, ignore_errors=True)
        cluster = None
        if options.scheduler == "slurm" and not options.table:
            cluster = Cluster(
                work / "slurm", NUM_RANKS, namespaces=options.namespaces, node_timeout_s=options.node_timeout
            )
            stack.enter_context(cluster.running())
        campaign = Campaign(options.results.absolute(), work, options.seed, cluster, options.keep)
        if not options.table:
            _go_on(campaign, options)
        rows = campaign.rows()
    by_table = defaultdict[str, list[Row]](list)
    for row in rows:
        by_table[TABLES.get(row.row.partition(":")[0], "fault campaign")].append(row)
    for place, some in by_table.items():
        table = markdown(some)
        print(table)
        if not options.no_page:
            PAGE.write_text(write_between(PAGE.read_text(), place, table))


def _go_on(campaign: Campaign, options: argparse.Namespace) -> None:
    available = {"postgres", "prefect"} | ({"slurm"} if campaign.cluster else set())
    if os.geteuid() == 0:  # it is mounted
        available.add("small_disk")
    available |= {"namespaces"} if options.namespaces else set()
    if has_memory_groups():
        available.add("memory_group")
    planned = scenarios(options.seed, options.times_hang, options.times, options.controls, frozenset(available))
    planned += soon_scenarios(options.seed, options.times)
    planned += wrapped_scenarios(options.seed, options.times)
    planned += engine_scenarios(options.seed, options.times, frozenset(available))
    if not campaign.cluster:
        planned = [on_one_node(scenario) for scenario in planned]
    index, count = map(int, options.shard.split("/"))
    mine = [one for one in planned[index::count] if any(options.only in fault.row for fault in one.faults)]
    done = {row.scenario for row in campaign.rows()}
    left = [one for one in mine if one.name not in done]
    print(f"{len(mine)} runs, {len(mine) - len(left)} of them finished; results in {campaign.results}", flush=True)
    if not left:
        return
    compared = {one.compared for one in left if not one.is_wrapped}
    references = {settings: campaign.reference(settings) for settings in compared}
    began = time.monotonic()
    for scenario in left:
        if options.minutes and time.monotonic() - began > 60 * options.minutes:
            print("the time is up; start it again to go on")
            return
        print(f"{scenario.name} ({time.strftime('%H:%M:%S')})", flush=True)
        try:
            reference = {} if scenario.is_wrapped else references[scenario.compared]
            rows = campaign.disturb(scenario, reference)
        except Exception:  # noqa: BLE001 - one run that cannot be made must not end the campaign; it stays unfinished
            traceback.print_exc()
            continue
        campaign.add(rows)
        for row in rows:
            _say(row)
        if len(rows) < len(scenario.faults):
            print(f"  {len(scenario.faults) - len(rows)} faults of this run were never made: {rows[-1].state}")


if __name__ == "__main__":
    main()
