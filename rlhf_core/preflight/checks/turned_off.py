"""What is turned off, and why."""

import difflib
import importlib
from collections.abc import Iterator
from typing import Protocol

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import CHECKS, OFF, Finding, blocked, check, passed

NODE_PREFIXES = ("node.", "probe.")
"""What the ids of checks begin with that the nodes make, not the control plane."""


class NodeCheck(Protocol):
    """What is known here of a check that nodes make."""

    @property
    def id(self) -> str:
        """Stable dotted name."""

    @property
    def prevents(self) -> str:
        """What it is for, in a sentence."""


@check(OFF)
def off(facts: Facts) -> Iterator[Finding]:
    """A mistyped id leaves a check on that was meant to be off; an exception without a reason outlives its cause."""
    named = facts.spec.preflight.off
    known = {*(one.id for one in CHECKS), *(plugin.id for plugin in facts.plugins), *(one.id for one in node_checks())}
    for id, reason in named.items():
        if id == OFF:
            yield blocked(
                f"preflight.off names {OFF} itself", "ids of other checks", f"remove {OFF} from preflight.off"
            )
        elif id not in known and not _is_of_a_node(id):
            near = difflib.get_close_matches(id, sorted(known), n=3, cutoff=0.5)
            yield blocked(
                f"preflight.off names {id}, which is no check",
                f"ids as `rlhf check` shows them{', for instance ' + ', '.join(near) if near else ''}",
                f"write {near[0]} or remove it" if near else f"remove {id} from preflight.off",
            )
        elif not reason.strip():
            yield blocked(
                f"preflight.off.{id} has no reason",
                "a sentence that says why the check does not apply; it is kept with the run",
                f'set preflight.off = {{"{id}" = "why"}}',
            )
    if named:
        yield passed(f"{len(named)} turned off: {', '.join(named)}")


def node_checks() -> tuple[NodeCheck, ...]:
    """The checks that nodes make; none where this version has no list of them."""
    try:
        checks: tuple[NodeCheck, ...] = importlib.import_module("rlhf_core.diagnosis.node_checks").NODE_CHECKS
    except ModuleNotFoundError:
        return ()
    return checks


def _is_of_a_node(id: str) -> bool:
    """Without a list of them, checks of nodes are known by how their ids begin."""
    return not node_checks() and id.startswith(NODE_PREFIXES)
