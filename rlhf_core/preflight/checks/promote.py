"""Checks of the promotion that follows the evaluation."""

from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed


@check("promote.folder")
def promote_folder(facts: Facts) -> Iterator[Finding]:
    """A model that is approved after days of training, and then cannot be written."""
    if not facts.promote_folder:
        return
    if facts.promote_problem:
        yield blocked(
            f"the folder of promoted models, {facts.promote_folder}: {facts.promote_problem}",
            "a folder that can be written from here",
            "set promote.folder to one, or promote.when=never",
        )
    else:
        yield passed(f"{facts.promote_folder} can be written")
