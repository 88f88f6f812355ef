"""The plan of an attempt: its nodes, the checkpoint it resumes from, and the lessons of earlier runs and attempts."""

from pydantic import JsonValue

from rlhf_core.allocation.planner import plan
from rlhf_core.allocation.sizing import Size, size_of
from rlhf_core.control.attempts.jobs import answer_of
from rlhf_core.control.controller import Controller
from rlhf_core.diagnosis.nodes.strikes import REMEMBERED
from rlhf_core.errors import HistoryError
from rlhf_core.history import queries
from rlhf_core.history.run_shape import shape_key
from rlhf_core.launch.start import record_plan
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.failures import Decision
from rlhf_core.schemas.resources import Inventory, Placement
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.node_records import node_standings

SIZE = "resources.num_nodes"
"""Setting that an attempt with fewer nodes overrides. A later attempt uses the number of nodes available then."""


def plan_attempt(controller: Controller, number: int) -> None:
    inventory = answer_of(controller, controller.scheduler.inventory)
    before = controller.journal.record.attempts.get(number - 1)
    decision = decision_before(controller, number)
    if decision is not None and decision.resume_checkpoint:
        controller.run_dir.put_aside_newer_than(decision.resume_checkpoint, number - 1)
    size = next_size(controller, inventory, decision, before.placement if before is not None else None)
    if size.spared:
        names = ", ".join(size.spared)
        controller.observer.log(f"not excluding {names}, although suspect: too few nodes would be left")
    for node, why in size.excluded.items():
        controller.observer.log(f"attempt {number} excludes {node}: {why}")
    if size.reason:
        controller.observer.log(f"attempt {number}: {size.reason}")
    changes = {
        **(before.placement.config_diff if before is not None else {}),
        **(decision.config_diff if decision is not None else {}),
    }
    changes.pop(SIZE, None)
    smaller: dict[str, JsonValue] = {SIZE: size.num_nodes} if size.reason else {}
    spec = with_changes(controller.spec, smaller)
    placement = plan(
        spec,
        inventory,
        attempt=number,
        slurm=controller.slurm,
        resume_from=controller.run_dir.newest_checkpoint(),
        excluded_nodes=size.excluded,
        config_diff={**changes, **smaller},
        longest_gaps_s=_longest_gaps_s(controller, spec),
        usual_speeds=_usual_speeds(controller),
        size_reason=size.reason,
    )
    if placement.resume_checkpoint:
        controller.observer.log(f"attempt {number} resumes from step {placement.resumed_from_step}")
    record_plan(controller.run_dir, placement, controller.journal)


def next_size(
    controller: Controller, inventory: Inventory, decision: Decision | None, before: Placement | None
) -> Size:
    """Number of nodes for the next attempt, and the nodes to exclude: those with strikes from any run in the history,
    and those excluded by the decision about the previous attempt.

    Args:
        before: placement of the previous attempt.
    """
    decided = dict.fromkeys(decision.excluded_nodes, decision.reason) if decision is not None else {}
    left_alone = {node: why for node, why in _left_alone(controller).items() if node not in decided}
    earlier = before.excluded_nodes if before is not None else ()
    return size_of(
        controller.spec,
        controller.slurm,
        inventory,
        # The run's own suspects come last, so they stay excluded longest.
        {**left_alone, **decided},
        new_suspects={*left_alone, *(node for node in decided if node not in earlier)},
    )


def decision_before(controller: Controller, number: int) -> Decision | None:
    """The decision about the previous attempt."""
    before = controller.journal.record.attempts.get(number - 1)
    return before.decision if before is not None else None


def _longest_gaps_s(controller: Controller, spec: RunSpec) -> dict[str, float]:
    """Longest gaps between heartbeats in earlier runs with the same shape."""
    if not controller.spec.supervise.learn_from_history:
        return {}
    try:
        return queries.longest_gaps(controller.store, shape_key(spec))
    except HistoryError:
        return {}  # they are then learned from scratch


def _usual_speeds(controller: Controller) -> dict[str, dict[str, dict[str, float]]]:
    if not controller.spec.preflight.probe:
        return {}
    try:
        return queries.usual_speeds(controller.store, utc_now() - REMEMBERED)
    except HistoryError:
        return {}  # each node is then only compared with the others


def _left_alone(controller: Controller) -> dict[str, str]:
    """Nodes that the strike ledger currently excludes, with the reason. A machine that is its own scheduler has no
    ledger."""
    if controller.scheduler.name == "local":
        return {}
    try:
        known = node_standings(controller.store, utc_now(), controller.site.runs_dir)
    except HistoryError as error:
        controller.observer.log(f"the history is unreachable, so no nodes are excluded for their strikes: {error}")
        return {}
    except OSError as error:
        controller.observer.log(f"no nodes are excluded for their strikes, since repairs cannot be read: {error}")
        return {}
    return {
        one.node: f"strikes in all runs: {one.num_strikes}, the last {one.last_kind}; until {one.excluded_until:%F %R}"
        for one in reversed(known)
        if one.excluded_until is not None
    }
