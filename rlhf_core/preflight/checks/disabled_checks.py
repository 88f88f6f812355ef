"""Checks that the config turns off, with the reasons given."""

import difflib
from collections.abc import Iterator

from rlhf_core.diagnosis.nodes.checks import NEVER_OFF, NodeCheck
from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import CHECKS, OFF, Finding, blocked, check, passed, warning

SITE = "site."
"""Prefix of the ids of a site's own node checks, which are installed on the nodes and unknown here."""

RETIRED = (
    "environment.compiler",
    "optimizer.betas",
    "resume.settings",
    "resume.steps",
    "supervise.backoff",
)
"""Ids of checks that only rlhf-flows 0.1 had."""


@check(OFF)
def off(facts: Facts) -> Iterator[Finding]:
    """A mistyped id leaves a check on that was meant to be off; an exception without a reason outlives its cause."""
    named = facts.spec.preflight.off
    known = {*(one.id for one in CHECKS), *(plugin.id for plugin in facts.plugins), *NodeCheck}
    for id, reason in named.items():
        if id == OFF or id in NEVER_OFF:
            why = "itself" if id == OFF else f"{id}: the run cannot continue without that node"
            yield blocked(f"preflight.off names {why}", "ids of other checks", f"remove {id} from preflight.off")
        elif id in RETIRED:
            yield warning(
                f"preflight.off names {id}, a check that no longer exists",
                "ids as `rlhf check` shows them",
                f"remove {id} from preflight.off",
            )
        elif id not in known and not id.startswith(SITE):
            near = difflib.get_close_matches(id, sorted(known), n=3, cutoff=0.5)
            yield blocked(
                f"preflight.off names {id}, which is not a check",
                f"ids as `rlhf check` shows them{', for instance ' + ', '.join(near) if near else ''}",
                f"write {near[0]} or remove it" if near else f"remove {id} from preflight.off",
            )
        elif not reason.strip():
            yield blocked(
                f"preflight.off.{id} has no reason",
                "the reason why the check does not apply; it is stored with the run",
                f'set preflight.off = {{"{id}" = "why"}}',
            )
    if named:
        yield passed(f"{len(named)} turned off: {', '.join(named)}")
