"""Decision to run a small trial before the run takes all its resources."""

from collections.abc import Iterator

from rlhf_core.preflight.changes import basis_of, basis_text, changes_since
from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, check, passed, skipped, warning
from rlhf_core.preflight.trial import has_fewest_nodes, is_small, obstacle, rungs
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import count


@check("trial.basis")
def basis(facts: Facts) -> Iterator[Finding]:
    """A run without a record of its versions, data and code cannot be compared with the next one."""
    side = facts.trainer
    unknown = (side.problem or side.unseen or side.python_problem) if side is not None else facts.compute.problem
    if unknown:
        where = facts.compute.python if side is None else side.python or "trainer.environment"
        yield skipped(f"the versions are unknown: {where}: {unknown}")
    else:
        yield passed(basis_text(basis_of(facts)))


@check("trial.needed")
def needed(facts: Facts) -> Iterator[Finding]:
    """Many nodes wait for hours, only to find in the first minute that a change does not work."""
    spec, past = facts.spec, facts.baseline
    # A run with a checkpoint has shown that it works.
    if spec.preflight.trial == "off" or facts.resume is not None:
        return
    if is_small(spec):
        yield passed(f"{spec.total_steps} steps on {rungs(spec)[0].nodes} serve as their own trial")
    elif not past.known:
        return
    elif past.last_good is None:
        # With the fewest nodes, the first steps of a run cost no more than a trial.
        if has_fewest_nodes(spec):
            yield passed(f"the first run of this name, on {rungs(spec)[0].nodes}")
        else:
            yield _proposed(spec, f"no good run named {spec.name} yet")
    elif changed := changes_since(past.last_good, spec, basis_of(facts)):
        what = "; ".join(map(str, changed))
        yield _proposed(spec, f"changed since {past.last_good.run_id}, the last good run of this name: {what}")
    else:
        yield passed(f"data, algorithm, versions and scale are those of {past.last_good.run_id}")


def _proposed(spec: RunSpec, found: str) -> Finding:
    reason = obstacle(spec)
    if reason:
        return skipped(f"{found}, but no trial can be made: {reason}")
    steps, num_nodes = spec.preflight.trial_steps, spec.resources.num_nodes
    where = ", then on ".join(rung.nodes for rung in rungs(spec))
    expected = f"a trial before {spec.total_steps} steps on {count(num_nodes, 'node')}"
    if spec.preflight.trial == "run":
        return warning(found, expected, f"nothing to do: {steps} steps on {where} run first, automatically")
    return warning(
        found,
        expected,
        f"`rlhf run CONFIG --set preflight.trial=run` runs {steps} steps on {where}, then the whole run",
    )
