"""Environment variables of a job: secrets, and values that contradict the plan."""

from collections.abc import Iterator

from rlhf_core.diagnosis.nodes.launch_variables import NODE_NUMBERS, planned_numbers
from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.text.redaction import secrets_in


@check("environment.secrets")
def secrets(facts: Facts) -> Iterator[Finding]:
    """A secret in a setting is stored with the run, in files, rows and Prefect pages that others may read."""
    settings = {**facts.spec.model_dump(), "slurm": facts.slurm.model_dump()}
    found = [place for name, value in settings.items() for place in secrets_in(name, value)]
    for place in found:
        variable = place.removeprefix("slurm.environment.") if place.startswith("slurm.environment.") else "NAME"
        read = "" if variable != "NAME" else f", and read it there instead of from {place}"
        file = f" or, as {variable}=..., in {facts.job_secrets} (mode 600)" if facts.job_secrets is not None else ""
        yield warning(
            f"{place} looks like a secret: it is stored with the run and visible to everyone who can read the run",
            "no secret in a setting",
            f'remove it, set slurm.pass_environment = ["{variable}"] and provide the value in the environment of '
            f"the user who submits the run{file}{read}. Stored copies remain: replace the secret",
        )
    if not found:
        yield passed("no setting looks like a secret")


@check("environment.passed")
def passed_environment(facts: Facts) -> Iterator[Finding]:
    """If a secret is missing when the job is submitted, the user code loses its service hours later."""
    names = facts.slurm.pass_environment
    if facts.passed_problem:
        problem, _, advice = facts.passed_problem.partition(". ")
        yield blocked(problem, "a value for every name in slurm.pass_environment", advice or "correct it")
    elif names:
        yield passed(f"{', '.join(names)} can be passed to the job")


@check("environment.launch")
def launch(facts: Facts) -> Iterator[Finding]:
    """NNODES or NPROC_PER_NODE that contradict the plan make a launcher wait for ranks that do not exist."""
    resources = facts.spec.resources
    given = facts.slurm.environment
    planned = planned_numbers(resources.num_nodes, resources.ranks_per_node, facts.spec.num_ranks)
    advice = "remove it from slurm.environment: rlhf-flows does not need it"
    for name, values in planned.items():
        if name in given and given[name] not in values:
            yield blocked(f"slurm.environment.{name} = {given[name]}", f"{' or '.join(values)}, as planned", advice)
    for name in NODE_NUMBERS:
        if name in given and resources.num_nodes > 1:
            found = f"slurm.environment.{name} = {given[name]} for all {resources.num_nodes} nodes"
            yield blocked(found, "a different number for each node", advice)
