"""Checks of the checkpoint that a run resumes from."""

from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning


@check("resume.checkpoint")
def checkpoint(facts: Facts) -> Iterator[Finding]:
    """Every rank rejects a damaged checkpoint, after the queue and the start of the nodes."""
    found = facts.resume
    if found is None:
        return
    if found.problems:
        yield blocked(
            f"checkpoint {found.name} is damaged: {'; '.join(found.problems)}",
            "every file as listed in COMPLETE",
            f"remove the folder {found.name} to resume from the checkpoint before it",
        )
    else:
        of = facts.spec.num_ranks
        other = f", written by {found.num_ranks} ranks and redistributed over {of}" if found.num_ranks != of else ""
        yield passed(f"resuming from {found.name}{other}")


@check("resume.version")
def version(facts: Facts) -> Iterator[Finding]:
    """A different version of the program may compute different numbers from the same state."""
    if facts.stored_version and facts.stored_version != facts.control_version:
        yield warning(
            f"the run was started with rlhf-flows {facts.stored_version}, this is {facts.control_version}",
            "the same version, if numbers are to be compared",
            f"install rlhf-flows=={facts.stored_version}, or read the curve with this in mind",
        )
