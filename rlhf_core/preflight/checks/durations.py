"""Time limit and expected duration of a run."""

import math
from collections.abc import Iterator

from rlhf_core.diagnosis import attempt_caps
from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.predictions import predict
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.text.formatting import duration as duration_text
from rlhf_core.text.formatting import listed

SHORT_ATTEMPT_S = 300
"""Duration in seconds below which an attempt is mostly start-up."""


@check("resources.time_limit")
def time_limit(facts: Facts) -> Iterator[Finding]:
    """With too short a time limit, an attempt ends before training starts; above that of its partition, it waits."""
    limit, supervise = facts.spec.resources.time_limit_s, facts.spec.supervise
    partitions = facts.inventory.settings_for(facts.slurm, facts.spec.resources.gpus_per_node)
    limits = [one.time_limit_s for one in partitions.values()]
    longest = max(limits, default=0) if all(limits) else 0
    requested = attempt_caps.time_limit_s(facts.spec, attempt_caps.Used())
    if limit < SHORT_ATTEMPT_S:
        yield warning(
            f"resources.time_limit_s = {limit}",
            f"at least {SHORT_ATTEMPT_S} s: starting the workers alone takes most of a minute",
            "raise resources.time_limit_s",
        )
    elif longest and requested > longest:
        # A QOS may override the limit of a partition.
        is_placed = facts.inventory.may_choose_partition and not facts.slurm.partitions
        may_be_allowed = bool(facts.slurm.chosen("qos") or facts.inventory.default_qos) or is_placed
        of_cap = f" (a cap of supervise leaves {requested})" if requested < limit else ""
        yield (warning if may_be_allowed else blocked)(
            f"resources.time_limit_s = {limit}{of_cap}, the limit of {listed(list(partitions), 8)} is {longest}",
            f"at most {longest} s: Slurm refuses a longer job, or lets it wait forever",
            f"set resources.time_limit_s={longest}; a run that takes longer continues in a new attempt"
            + (
                ", unless the QOS or a plug-in of the cluster allows more"
                if may_be_allowed
                else "; if a QOS allows you more, name it in slurm.qos"
            ),
        )
    elif supervise.floor_s >= limit:
        yield warning(
            f"supervise.floor_s = {supervise.floor_s:g}, resources.time_limit_s = {limit}",
            "a silence floor well below the time limit",
            "lower supervise.floor_s; otherwise only the time limit ends a hang",
        )
    else:
        yield passed(f"attempts of at most {limit} s")


@check("resources.duration")
def duration(facts: Facts) -> Iterator[Finding]:
    """A run that needs several attempts spends unplanned hours in queues."""
    seconds, limit = facts.baseline.seconds_per_step, facts.spec.resources.time_limit_s
    source = "as in earlier runs of this shape"
    if seconds is None:
        predicted_step = predict(facts).step
        if predicted_step is None:
            return
        seconds, source = predicted_step.seconds, "as predicted from the dimensions of the model"
    steps = facts.spec.total_steps - (facts.resume.step if facts.resume is not None else 0)
    predicted = steps * seconds
    found = f"{steps} steps x {seconds:.3g} s, {source}, take {duration_text(predicted)}"
    if predicted <= limit:
        yield passed(f"{found}; an attempt may take {duration_text(limit)}")
        return
    yield warning(
        f"{found}; resources.time_limit_s allows {duration_text(limit)}",
        "a run that fits into one attempt",
        f"expect about {math.ceil(predicted / limit)} attempts of {duration_text(limit)}; each resumes from the newest "
        "checkpoint automatically. For a single attempt, set resources.time_limit_s to about "
        f"{math.ceil(predicted * 1.2)}",
    )
