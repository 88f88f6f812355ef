"""Every mechanism of recovery once, on a real Slurm: three runs, one of them undisturbed. `make faults` has it all.

Where Slurm is not installed, the same on the local scheduler as one node, without what only a cluster can suffer.
"""

from collections.abc import Iterator

import pytest
from campaign import Campaign
from fault_cases import KINDS, SPACING, Expected, Fault, Scenario, on_one_node
from fault_measure import Row
from fault_services import Cluster
from slurm_cluster import WHY_NOT, missing_programs

pytestmark = [pytest.mark.end_to_end, pytest.mark.training, pytest.mark.timeout(900)]

NUM_RANKS = 2
"""Enough for each mechanism: a rank and its peer, the agent of the first node and another. The campaign has four."""
SPARE_NODES = 1
EXPECTED = {kind.row: kind.expected for kind in KINDS}
GOES_ON = (
    ("SIGKILL a rank", "kill_rank"),
    ("SIGSTOP a rank", "stop_rank"),
    ("agent killed, another", "kill_agent"),
    ("USR2: save and end", "ask_to_save"),
    ("flow process kill -9", "kill_flow"),
)
LEAVES_NODES = (("node down (scontrol)", "node_down"), ("scancel from outside", "scancel"))


def chain(name: str, faults: tuple[tuple[str, str], ...]) -> Scenario:
    """One run that suffers these faults from outside, one after the other."""
    saved = Expected(frozenset({"none", "preemption", "time_limit"}), frozenset({"new_attempt"}))
    made = tuple(
        Fault(row, EXPECTED.get(row, saved), SPACING * (number + 1) + 2, outside=outside)
        for number, (row, outside) in enumerate(faults)
    )
    return Scenario(name, made, SPACING * (len(faults) + 1), NUM_RANKS, NUM_RANKS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster | None]:
    if missing_programs():
        yield None
        return
    with Cluster.started(NUM_RANKS + SPARE_NODES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def campaign(cluster: Cluster | None, tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("faults")
    return Campaign(folder / "results.jsonl", folder, seed=0, cluster=cluster, keep=True, num_ranks=NUM_RANKS)


@pytest.fixture(scope="module")
def reference(campaign: Campaign) -> dict[str, str]:
    return campaign.reference()


@pytest.fixture(scope="module")
def goes_on(campaign: Campaign, reference: dict[str, str]) -> dict[str, Row]:
    scenario = chain("goes-on", GOES_ON)
    scenario = scenario if campaign.cluster else on_one_node(scenario)
    return {row.row: row for row in campaign.disturb(scenario, reference)}


@pytest.fixture(scope="module")
def leaves_nodes(campaign: Campaign, reference: dict[str, str]) -> dict[str, Row]:
    if campaign.cluster is None:
        pytest.skip(WHY_NOT)
    return {row.row: row for row in campaign.disturb(chain("leaves-nodes", LEAVES_NODES), reference)}


def check(rows: dict[str, Row], name: str) -> Row:
    """What must hold of every fault. How long it took is for the campaign, not for a test."""
    assert name in rows, f"never came to it: {[(row.row, row.state) for row in rows.values()]}"
    row = rows[name]
    assert row.found is not row.control, row
    for good in (row.class_right, row.blame_right, row.action_right):
        assert good is not False, row
    return row


def test_the_undisturbed_run_has_no_incident(reference: dict[str, str]) -> None:
    """Negative control: the same run, nothing done to it (a false alarm fails the fixture)."""
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


def test_after_all_that_the_parameters_are_those_of_the_undisturbed_run(goes_on: dict[str, Row]) -> None:
    assert {row.state for row in goes_on.values()} == {"completed"}
    assert {row.same_numbers for row in goes_on.values()} == {True}


def test_a_lost_node_is_left_out_of_the_new_attempt(leaves_nodes: dict[str, Row]) -> None:
    assert check(leaves_nodes, "node down (scontrol)").action == "new_attempt"


def test_a_job_that_somebody_cancelled_is_not_started_again(leaves_nodes: dict[str, Row]) -> None:
    assert check(leaves_nodes, "scancel from outside").state in ("failed", "cancelled")
