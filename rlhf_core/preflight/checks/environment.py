"""The interpreter on the nodes, and its packages."""

from collections.abc import Iterator, Sequence

from rlhf_core.machine.installation import pip_install
from rlhf_core.preflight.facts import Facts, Requirement
from rlhf_core.preflight.known_bad_versions import KNOWN_BAD, Use, is_cpu_build, is_version_in
from rlhf_core.preflight.launch_arguments import arguments_of
from rlhf_core.preflight.registry import Finding, blocked, check, passed, skipped, warning

OLDEST_PYTHON = (3, 11)

NEEDED_ALWAYS = frozenset({"torch", "transformers", "deepspeed", "safetensors", "tokenizers"})
"""Packages that every training run needs. Others of the training extra are needed only by some runs."""
NEEDED_TO_SUPERVISE = frozenset({"torch"})
"""Packages that agents and probes need if another program trains."""
NEEDED_TO_EVALUATE = frozenset({"transformers", "safetensors", "tokenizers"})
"""Packages that the evaluation of its checkpoints needs in addition."""


@check("environment.python")
def python(facts: Facts) -> Iterator[Finding]:
    """The nodes start an interpreter by its path; if it is missing there, every attempt ends at once."""
    compute = facts.compute
    version = ".".join(map(str, compute.version))
    if compute.problem:
        yield blocked(
            f"compute interpreter {compute.python}: {compute.problem}",
            "an interpreter that starts",
            "set RLHF_COMPUTE_PYTHON to the Python of the environment with rlhf-flows[training]",
        )
    elif compute.version < OLDEST_PYTHON:
        yield blocked(
            f"compute interpreter {compute.python} is Python {version}",
            "Python 3.11 or newer",
            "create the compute environment with a newer Python",
        )
    else:
        yield passed(f"{compute.python} is Python {version}")


@check("environment.rlhf_flows")
def rlhf_flows(facts: Facts) -> Iterator[Finding]:
    """Different versions on the two sides would misread each other's files."""
    compute = facts.compute
    if compute.problem:
        return
    if not compute.rlhf_flows:
        yield blocked(
            f"rlhf-flows is not installed in {compute.python}",
            f"rlhf-flows {facts.control_version}, as here",
            f"{compute.python} -m {pip_install('training')}",
        )
    elif compute.rlhf_flows != facts.control_version:
        yield blocked(
            f"rlhf-flows {compute.rlhf_flows} in the compute interpreter, {facts.control_version} here",
            "the same version on both sides",
            f"{compute.python} -m {pip_install('training')}",
        )
    else:
        yield passed(f"rlhf-flows {facts.control_version} on both sides")


@check("environment.packages")
def packages(facts: Facts) -> Iterator[Finding]:
    """A training package may be missing, or too old or too new for this program."""
    compute = facts.compute
    if compute.problem:
        return
    if not facts.requirements:
        yield skipped("rlhf-flows is not installed as a package here, so its requirements are unknown")
        return
    needed = _needed(facts)
    wrong = [each for each in facts.requirements if not is_version_in(_installed(facts, each), each.accepts)]
    for report, rows in (
        (blocked, [each for each in wrong if each.name in needed]),
        (warning, [each for each in wrong if each.name not in needed]),
    ):
        if rows:  # one finding for all: one command installs them
            yield report(
                f"{_packages_text(facts, rows)} in {compute.python}",
                ", ".join(f"{each.name}{each.accepts}" for each in rows),
                f"{compute.python} -m {pip_install('training')}, or set RLHF_COMPUTE_PYTHON to an interpreter that has "
                f"{'it' if len(rows) == 1 else 'them'}",
            )
    if not wrong:
        shown = [f"{name} {compute.packages[name]}" for name in sorted(needed) if name in compute.packages]
        yield passed(", ".join(shown))


def _installed(facts: Facts, requirement: Requirement) -> str:
    return facts.compute.packages.get(requirement.name, "")


def _packages_text(facts: Facts, rows: Sequence[Requirement]) -> str:
    """``torch 2.7, transformers 4.50; deepspeed, safetensors are missing``."""
    other = ", ".join(f"{each.name} {_installed(facts, each)}" for each in rows if _installed(facts, each))
    missing = [each.name for each in rows if not _installed(facts, each)]
    verb = "is" if len(missing) == 1 else "are"
    return "; ".join(filter(None, (other, f"{', '.join(missing)} {verb} missing" if missing else "")))


@check("environment.builds")
def builds(facts: Facts) -> Iterator[Finding]:
    """A torch that was built without support for GPUs fails in every rank, after the job has waited for its nodes."""
    torch = facts.training_packages.get("torch", "")
    if not facts.spec.resources.gpus_per_node or not torch:
        return
    if is_cpu_build(torch):
        python = facts.training_python
        yield blocked(
            f"torch {torch} in {python}, a build for CPUs, and resources.gpus_per_node = "
            f"{facts.spec.resources.gpus_per_node}",
            "a build for the GPUs of the nodes",
            f"{python} -m pip install --force-reinstall torch (https://pytorch.org/get-started has the index for each "
            "kind of GPU), or set resources.gpus_per_node=0",
        )
    else:
        yield passed(f"torch {torch}")


@check("environment.versions")
def versions(facts: Facts) -> Iterator[Finding]:
    """Some versions are known to hang, to compute wrong numbers, or to be incompatible."""
    installed, use = facts.training_packages, _use(facts)
    python = facts.training_python
    applicable = [row for row in KNOWN_BAD if row.applies_to(facts.spec)]
    # Problems that affect only another project's commands are reported only for runs that use them.
    found = [
        row for row in applicable if row.matches(installed) and (not row.launcher or row.concerns(facts.spec, use))
    ]
    for row in found:
        shown = " with ".join(f"{name} {installed[name]}" for name in row.packages)
        concerned = row.concerns(facts.spec, use)
        report = blocked if concerned and row.certain else warning
        meant = "" if concerned else "; this run is not affected"
        yield report(
            f"{shown}: {row.happens}{meant}",
            f"versions without this problem ({row.source})",
            f"{python} -m pip install '{row.instead}'",
        )
    if installed and not found:
        yield passed(f"none of {len(applicable)} known bad combinations is installed")


def _use(facts: Facts) -> Use | None:
    """Parts that an external trainer uses; None for the native trainer."""
    if facts.spec.trainer.kind == "native":
        return None
    arguments = arguments_of(facts)
    return Use(engine="vllm" if arguments.is_on("use_vllm") else "", launcher=arguments.line.launcher)


def _needed(facts: Facts) -> frozenset[str]:
    if facts.spec.trainer.kind == "native":
        return NEEDED_ALWAYS if facts.spec.model.lora is None else NEEDED_ALWAYS | {"peft"}
    return NEEDED_TO_SUPERVISE | NEEDED_TO_EVALUATE if facts.spec.is_evaluated else NEEDED_TO_SUPERVISE
