"""Whether a run can be gone on with from its checkpoint."""

from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning


@check("resume.checkpoint")
def checkpoint(facts: Facts) -> Iterator[Finding]:
    """Optimizer state is split over the ranks that wrote it: another number of ranks cannot read it."""
    found = facts.resume
    if found is None:
        return
    if found.problems:
        yield blocked(
            f"checkpoint {found.name} is damaged: {'; '.join(found.problems)}",
            "every file as COMPLETE says",
            f"remove the folder {found.name} to go on from the checkpoint before it",
        )
    elif found.num_ranks != facts.spec.num_ranks:
        yield blocked(
            f"checkpoint {found.name} was written by {found.num_ranks} ranks, this run has {facts.spec.num_ranks}",
            "the same number of ranks",
            f"run with {found.num_ranks} ranks, or start a new run from the model in {found.name}/model",
        )
    else:
        yield passed(f"going on from {found.name}")


@check("resume.version")
def version(facts: Facts) -> Iterator[Finding]:
    """Another version of the program may compute other numbers from the same state."""
    if facts.stored_version and facts.stored_version != facts.control_version:
        yield warning(
            f"the run was started with rlhf-flows {facts.stored_version}, this is {facts.control_version}",
            "the version it was started with, when its numbers are to be compared",
            f"install rlhf-flows=={facts.stored_version}, or read the curve with this in mind",
        )
