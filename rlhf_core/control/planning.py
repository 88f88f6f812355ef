"""The plan of an attempt: its nodes, the checkpoint it goes on from, and what earlier runs and attempts have taught."""

from rlhf_core.allocation.planner import plan, shortages
from rlhf_core.control.controller import Controller
from rlhf_core.diagnosis.node_strikes import REMEMBERED
from rlhf_core.errors import HistoryError
from rlhf_core.history import queries
from rlhf_core.launch.start import record_plan
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Decision
from rlhf_core.schemas.resources import Inventory
from rlhf_core.schemas.run import shape_key
from rlhf_core.watchdog.node_records import node_standings


def plan_attempt(controller: Controller, number: int) -> None:
    inventory = controller.scheduler.inventory()
    before = controller.journal.record.attempts.get(number - 1)
    decision = decision_before(controller, number)
    if decision is not None and decision.resume_checkpoint:
        controller.run_dir.put_aside_newer_than(decision.resume_checkpoint, number - 1)
    placement = plan(
        controller.spec,
        inventory,
        attempt=number,
        resume_from=controller.run_dir.newest_checkpoint(),
        excluded_nodes=_exclusions(controller, inventory, number),
        config_diff={
            **(before.placement.config_diff if before is not None else {}),
            **(decision.config_diff if decision is not None else {}),
        },
        longest_gaps_s=_longest_gaps_s(controller),
        usual_speeds=_usual_speeds(controller),
    )
    if placement.resume_checkpoint:
        controller.observer.log(f"attempt {number} goes on from step {placement.resumed_from_step}")
    record_plan(controller.run_dir, placement, controller.journal)


def decision_before(controller: Controller, number: int) -> Decision | None:
    """The decision about the attempt before this one."""
    before = controller.journal.record.attempts.get(number - 1)
    return before.decision if before is not None else None


def _exclusions(controller: Controller, inventory: Inventory, number: int) -> dict[str, str]:
    """Nodes to go without, and why: those that all runs of the history speak against, and what was decided about the
    attempt before; of these, the newest suspects as long as it can still be placed."""
    decision = decision_before(controller, number)
    decided = dict.fromkeys(decision.excluded_nodes, decision.reason) if decision is not None else {}
    # The run's own suspects come last, and so are kept longest.
    kept = {node: why for node, why in _left_alone(controller).items() if node not in decided} | decided
    spared = []
    while kept and shortages(controller.spec.resources, inventory, tuple(kept)):
        spared.append(next(iter(kept)))
        del kept[spared[-1]]
    if spared:
        names = ", ".join(spared)
        controller.observer.log(f"{names} is suspect but not excluded: without it there are too few nodes")
    return kept


def _longest_gaps_s(controller: Controller) -> dict[str, float]:
    if not controller.spec.supervise.learn_from_history:
        return {}
    try:
        return queries.longest_gaps(controller.store, shape_key(controller.spec))
    except HistoryError:
        return {}  # they are learned anew then


def _usual_speeds(controller: Controller) -> dict[str, dict[str, dict[str, float]]]:
    if not controller.spec.preflight.probe:
        return {}
    try:
        return queries.usual_speeds(controller.store, utc_now() - REMEMBERED)
    except HistoryError:
        return {}  # each node is then held against the others only


def _left_alone(controller: Controller) -> dict[str, str]:
    """Nodes that the ledger leaves alone for now, and why; a machine that is its own scheduler has no ledger."""
    if controller.scheduler.name == "local":
        return {}
    try:
        known = node_standings(controller.store, utc_now(), controller.site.runs_dir)
    except HistoryError as error:
        controller.observer.log(f"the history does not answer, so nodes are taken as they come: {error}")
        return {}
    return {
        one.node: f"strikes in all runs: {one.num_strikes}, the last {one.last_kind}; until {one.excluded_until:%F %R}"
        for one in reversed(known)
        if one.excluded_until is not None
    }
