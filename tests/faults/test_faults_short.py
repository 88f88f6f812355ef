"""Every mechanism of recovery once, on a real Slurm: four runs, one of them undisturbed. `make faults` covers all
faults.

Without Slurm, the tests run on the local scheduler with one node, without the faults that need a cluster.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from campaign import RECOVERY_TIMEOUT_S, START_S, Campaign
from fault_cases import KINDS, SPACING, Expected, Fault, Scenario, on_one_node
from fault_inject import Place, ask_to_save, kill_engine, node_down, scancel
from fault_measure import Row, measure, same_parameters
from fault_runs import CHECKPOINT_EVERY, DisturbedSite, agent_pids, engines, events, steps, workers
from fault_services import Cluster
from sites import last_step
from slurm_cluster import WHY_NOT, missing_programs

from rlhf_core.control.views.timeline import all_incidents
from rlhf_core.files.whole import read_model
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.resources import Placement

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]

NUM_RANKS = 2
"""Enough ranks for each mechanism: a rank and its peer, the agent of the first node and another. The campaign has
four."""
SPARE_NODES = 2
NUM_COMPARED = 3
"""Number of steps on fewer nodes that are compared with those on all nodes."""
EXPECTED = {kind.row: kind.expected for kind in KINDS}
GOES_ON = (
    ("SIGKILL a rank", "kill_rank"),
    ("SIGSTOP a rank", "stop_rank"),
    ("agent killed, another", "kill_agent"),
    ("USR2: save and end", "ask_to_save"),
    ("flow process kill -9", "kill_flow"),
)
CANCELLED = "scancel from outside"
NODE_DOWN = "node down (scontrol)"


UNPROBED = "preflight.probe=false"
"""Settings of all runs: the tests assert nothing about the probe, and each probe takes a process per rank."""


def chain(name: str, faults: tuple[tuple[str, str], ...], *overrides: str) -> Scenario:
    """One run that suffers these faults from outside, one after another."""
    saved = Expected(frozenset({"none", "preemption", "time_limit"}), frozenset({"new_attempt"}))
    made = tuple(
        Fault(row, EXPECTED.get(row, saved), SPACING * (number + 1) + 2, outside=outside)
        for number, (row, outside) in enumerate(faults)
    )
    overrides = ('checkpoint.memory="peer"', *overrides)
    return Scenario(name, made, SPACING * (len(faults) + 1), NUM_RANKS, NUM_RANKS, overrides)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster | None]:
    if missing_programs():
        yield None
        return
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), NUM_RANKS + SPARE_NODES)
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def campaign(cluster: Cluster | None, tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("faults")
    return Campaign(folder / "results.jsonl", folder, seed=0, cluster=cluster, keep=True, num_ranks=NUM_RANKS)


@pytest.fixture(scope="module")
def reference(campaign: Campaign) -> dict[str, str]:
    return campaign.reference((UNPROBED,))


@pytest.fixture(scope="module")
def goes_on(campaign: Campaign, reference: dict[str, str]) -> dict[str, Row]:
    scenario = chain("goes-on", GOES_ON, UNPROBED)
    scenario = scenario if campaign.cluster else on_one_node(scenario)
    return {row.row: row for row in campaign.disturb(scenario, reference)}


@dataclass(frozen=True)
class SmallerRun:
    """A run on two nodes that continued with one, later with two again, and was then cancelled."""

    placements: list[Placement]
    """Placements of its attempts."""
    steps: list[list[MetricsLine]]
    """Steps of its attempts."""
    shown: str
    """Text of `rlhf show`."""
    lost: Row
    """Row of the node that is lost during training."""
    asked: Row
    """Row of the run that is asked to save, measured as if nothing should have happened."""
    cancelled: Row
    """Row of the job that is cancelled during training."""


@pytest.fixture(scope="module")
def smaller(campaign: Campaign, reference: dict[str, str]) -> SmallerRun:
    """The spare nodes are down from the beginning, and another one goes down during training; then all return, and the
    run is asked to save and end, as before a time limit. Its next job is cancelled."""
    if campaign.cluster is None:
        pytest.skip(WHY_NOT)
    with campaign.site(two_nodes("resources.min_nodes=1")) as place:
        site, cluster = place.site, place.slurm
        for spare in cluster.nodes[NUM_RANKS:]:
            cluster.node_down(spare)
        begin(place, two_nodes("resources.min_nodes=1"))
        site.wait_for(lambda: last_step(place.run) > CHECKPOINT_EVERY, "a checkpoint", START_S)
        struck = node_down(place)
        site.wait_for(
            lambda: len(steps_of(place.run, 2)) >= NUM_COMPARED, "an attempt on one node to train", RECOVERY_TIMEOUT_S
        )
        until_s, num_jobs = time.time(), cluster.num_jobs(place.run.run_id)
        cluster.back_in_service()
        saved = ask_to_save(place)
        site.wait_for(lambda: steps_of(place.run, 3), "an attempt on two nodes to train", RECOVERY_TIMEOUT_S)
        ended = scancel(place)
        site.wait_for(lambda: site.ended, "the end of the run", RECOVERY_TIMEOUT_S)
        attempts, state = place.run.attempts(), read_record(place.run).state.value
        fault = Fault(NODE_DOWN, EXPECTED[NODE_DOWN], struck.step, outside="node_down")
        lost = measure("fewer-nodes", 0, fault, struck, until_s, place.run, state, None, num_jobs)
        num_jobs = cluster.num_jobs(place.run.run_id)
        fault = Fault("asked to save", Expected(), saved.step, outside="ask_to_save")
        asked = measure("fewer-nodes", 1, fault, saved, ended.time, place.run, state, None, num_jobs)
        fault = Fault(CANCELLED, EXPECTED[CANCELLED], ended.step, outside="scancel")
        cancelled = measure("fewer-nodes", 2, fault, ended, time.time(), place.run, state, None, num_jobs)
        return SmallerRun(
            [found for one in attempts if (found := read_model(one.placement, Placement)) is not None],
            [steps_of(place.run, one.number) for one in attempts],
            site.rlhf("show", place.run.run_id).stdout,
            lost,
            asked,
            cancelled,
        )


@dataclass(frozen=True)
class Seats:
    """Nodes of one attempt."""

    allocated: list[str]
    """Nodes in the order of the allocation."""
    trainers: list[str]
    """Nodes of the trainer ranks, by rank."""
    engines: list[str]
    """Nodes of the engines, by rank."""

    @classmethod
    def of(cls, place: Place) -> "Seats":
        """Nodes of the newest attempt."""
        ranks, own = workers(place.run), engines(place.run)
        return cls(place.slurm.allocated(place.job_id), [one.node for one in ranks], [one.node for one in own])


@dataclass(frozen=True)
class EngineNodeRun:
    """A run whose engine has a node of its own. The engine is killed; later that node loses power."""

    run: RunDir
    seats: list[Seats]
    """Nodes of its attempts."""
    shown: str
    """Text of `rlhf show`."""


@pytest.fixture(scope="module")
def apart(campaign: Campaign, reference: dict[str, str]) -> EngineNodeRun:
    if campaign.cluster is None:
        pytest.skip(WHY_NOT)
    overrides = (UNPROBED, "rollout.engines=1", "rollout.nodes=1", "supervise.agent_floor_s=10")
    num_nodes = NUM_RANKS + 1
    scenario = Scenario("engine-node", (), 2 * SPACING, num_nodes, num_nodes, overrides)
    with campaign.site(scenario) as place:
        site, cluster = place.site, place.slurm
        begin(place, scenario)
        site.wait_for(lambda: last_step(place.run) > CHECKPOINT_EVERY, "a checkpoint", START_S)
        kill_engine(place)
        site.wait_for(lambda: last_step(place.run) > SPACING, "another checkpoint", RECOVERY_TIMEOUT_S)
        first = Seats.of(place)
        node = first.allocated[-1]
        cluster.kill_node(node, agent_pids(place.run)[node])
        site.wait_for(lambda: steps_of(place.run, 2), "an attempt on another node to train", RECOVERY_TIMEOUT_S)
        second = Seats.of(place)
        site.wait_for(lambda: site.ended, "the end of the run", RECOVERY_TIMEOUT_S)
        return EngineNodeRun(place.run, [first, second], site.rlhf("show", place.run.run_id).stdout)


def two_nodes(*overrides: str) -> Scenario:
    return Scenario("fewer-nodes", (), 3 * SPACING, NUM_RANKS, NUM_RANKS, (UNPROBED, *overrides))


def begin(place: Place, scenario: Scenario) -> None:
    """Start the run of a scenario, and wait until its directory exists."""
    site = place.site
    site.drive("run", site.prepare([], scenario.pace_s), "--no-prefect", *scenario.settings)
    place.run = site.wait_for(lambda: site.run, "the run directory", START_S)


def steps_of(run: RunDir, attempt: int) -> list[MetricsLine]:
    return [line for restart, line in steps(run) if restart.attempt == attempt]


def check(rows: dict[str, Row], name: str) -> Row:
    """Assert what must hold for every fault. Durations are for the campaign, not for a test."""
    assert name in rows, f"never came to it: {[(row.row, row.state) for row in rows.values()]}"
    row = rows[name]
    assert row.found is not row.control, row
    for good in (row.class_right, row.blame_right, row.action_right):
        assert good is not False, row
    return row


def test_the_undisturbed_run_has_no_incident(reference: dict[str, str]) -> None:
    """Negative control: the same run without faults (a false alarm fails the fixture)."""
    assert len(reference) > SPACING


def test_a_killed_rank_is_started_again_in_place(goes_on: dict[str, Row]) -> None:
    assert check(goes_on, "SIGKILL a rank").action == "restart_in_place"


def test_a_stopped_rank_on_any_node_is_blamed_and_started_again(goes_on: dict[str, Row]) -> None:
    assert check(goes_on, "SIGSTOP a rank").kind == "hang"


def test_a_killed_agent_ends_the_allocation_and_a_new_attempt_goes_on(goes_on: dict[str, Row]) -> None:
    assert check(goes_on, "agent killed, another").action == "new_attempt"


def test_a_warning_of_the_end_saves_early_and_loses_nothing(goes_on: dict[str, Row]) -> None:
    assert check(goes_on, "USR2: save and end").steps_lost == 0


def test_a_new_controller_adopts_the_job_of_a_killed_one(goes_on: dict[str, Row]) -> None:
    row = check(goes_on, "flow process kill -9")
    assert row.again_s is not None
    assert row.submitted_twice == 0


def test_restarts_and_the_next_attempt_go_on_from_the_memory_of_the_nodes(
    campaign: Campaign, goes_on: dict[str, Row]
) -> None:
    """A kill in the middle of a save leaves no whole copy, and the files are used. A save every second makes that
    likely here, but not for every kill."""
    if campaign.cluster is None:
        pytest.skip(WHY_NOT)
    (run,) = (DisturbedSite(home).run for home in campaign.work.glob("goes-on-*"))
    assert run is not None
    messages = [event.message for _, event in events(run) if event.kind == "checkpoint"]
    assert len(messages) == 4, "two restarts in place, an attempt after the killed agent, one after the early save"
    no_copy = "resuming from files: the nodes have no in-memory copy with a part of every rank"
    for message in messages[:3]:
        assert message.startswith("resuming from the copy of step") or message == no_copy
    assert any(message != no_copy for message in messages[:3])
    assert messages[3] == no_copy, "a run that saved and ended leaves nothing in memory"


def test_after_all_that_the_parameters_are_those_of_the_undisturbed_run(goes_on: dict[str, Row]) -> None:
    assert {row.state for row in goes_on.values()} == {"completed"}
    assert {row.same_numbers for row in goes_on.values()} == {True}


def test_a_lost_node_is_left_out_of_the_new_attempt(smaller: SmallerRun) -> None:
    assert check({smaller.lost.row: smaller.lost}, NODE_DOWN).action == "new_attempt"


def test_a_new_attempt_without_an_incident_is_an_alarm_in_a_healthy_run(smaller: SmallerRun) -> None:
    """Negative control of the campaign's own controls: what ends an attempt need not be an incident."""
    row = smaller.asked
    assert (row.control, row.kind, row.action) == (True, "", "new_attempt")
    assert row.found, row
    assert row.message


def test_a_cancelled_job_is_not_started_again(smaller: SmallerRun) -> None:
    row = check({smaller.cancelled.row: smaller.cancelled}, CANCELLED)
    assert row.state in ("failed", "cancelled")
    assert (row.action, row.submitted_twice) == ("stop", 0)


def test_a_run_goes_on_with_fewer_nodes_and_with_all_of_them_when_they_are_back(smaller: SmallerRun) -> None:
    assert [placement.num_nodes for placement in smaller.placements] == [2, 1, 2]
    reason = smaller.placements[1].size_reason
    assert "the cluster cannot give 2 nodes" in reason
    assert "continuing with 1, at least resources.min_nodes = 1; the global batch is unchanged" in reason
    assert "the cluster cannot give 2 nodes" in smaller.shown


def test_the_steps_on_one_node_are_those_of_two(campaign: Campaign, smaller: SmallerRun) -> None:
    """From the same weights, they have the same batch and seeds by content, and sums in another order. Then the run
    continues on two nodes."""
    (undisturbed,) = (DisturbedSite(home).run for home in campaign.work.glob("reference-*"))
    assert undisturbed is not None
    expected = {line.step: line.metrics for _, line in steps(undisturbed)}
    compared = [*smaller.steps[1][:NUM_COMPARED], smaller.steps[2][0]]
    for line in compared:
        for name in ("reward/mean", "rollout/length_mean", "train/loss", "train/grad_norm"):
            assert line.metrics[name] == pytest.approx(expected[line.step][name], rel=1e-3, abs=1e-5), name
    assert any(line.metrics["train/grad_norm"] > 0 for line in compared), "equal zeros would prove nothing"


def test_an_engine_has_the_last_node_and_the_trainers_have_the_others(apart: EngineNodeRun) -> None:
    for seats in apart.seats:
        assert (seats.trainers, seats.engines) == (seats.allocated[:NUM_RANKS], seats.allocated[NUM_RANKS:])


def test_an_engine_on_its_own_node_is_started_again_and_the_trainers_go_on(apart: EngineNodeRun) -> None:
    killed, *_ = all_incidents(apart.run, read_record(apart.run))
    assert (killed.role, killed.failure_kind.value) == (Role.ROLLOUT, "worker_killed")
    assert (killed.suspect_ranks, list(killed.suspect_nodes)) == ((0,), apart.seats[0].engines)
    attempt, *_ = apart.run.attempts()
    assert [restart.restart for restart in attempt.restarts()] == [0], "one start of the trainers"
    made = [line.step for line in steps_of(apart.run, 1)]
    assert made == [*range(1, len(made) + 1)], "each step was made once"


def test_a_lost_node_of_an_engine_leads_to_an_attempt_without_it(apart: EngineNodeRun) -> None:
    """The trainers wait for it longer than they may be silent: only the node may be blamed."""
    _, lost = all_incidents(apart.run, read_record(apart.run))
    assert (lost.failure_kind.value, list(lost.suspect_nodes)) == ("node_lost", apart.seats[0].engines)
    second = read_model(apart.run.attempts()[1].placement, Placement)
    assert second is not None
    assert list(second.excluded_nodes) == apart.seats[0].engines
    assert apart.seats[0].trainers == apart.seats[1].trainers
    assert read_record(apart.run).state.value == "completed"


def test_the_parameters_are_those_of_trainers_that_sample_themselves(
    apart: EngineNodeRun, reference: dict[str, str]
) -> None:
    """They are equal bit for bit, after both faults."""
    assert same_parameters(apart.run, reference)
    sampled = [
        line.metrics for attempt in (1, 2) for line in steps_of(apart.run, attempt) if line.step > CHECKPOINT_EVERY
    ]
    assert any(metrics["train/grad_norm"] > 0 for metrics in sampled), "equal zeros would prove nothing"


def test_every_sync_went_to_the_one_engine(apart: EngineNodeRun) -> None:
    assert "versions to 1 engine, broadcast" in apart.shown


def test_without_min_nodes_the_run_waits_for_all_of_them_and_says_so(campaign: Campaign) -> None:
    """Negative control."""
    if campaign.cluster is None:
        pytest.skip(WHY_NOT)
    with campaign.site(two_nodes()) as place:
        for node in place.slurm.nodes[1:]:
            place.slurm.node_down(node)
        begin(place, two_nodes())
        place.site.wait_for(
            lambda: "ReqNodeNotAvail" in (place.site.home / "rlhf.log").read_text(), "the reason of waiting", START_S
        )
        assert steps(place.run) == []
