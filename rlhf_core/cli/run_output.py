"""Plan and summary of a run, for the terminal and as JSON."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhf_core.cli import output
from rlhf_core.errors import BadInput
from rlhf_core.text.formatting import count

if TYPE_CHECKING:
    from rlhf_core.config.site import Site
    from rlhf_core.preflight.predictions import Predictions
    from rlhf_core.render.summary import Summary
    from rlhf_core.run_dir.run import RunDir
    from rlhf_core.schemas.resources import GroupPlan
    from rlhf_core.schemas.run import RunSpec


def print_plan(spec: "RunSpec", site: "Site", as_json: bool) -> None:
    """Print the placement and the batch script of a run that is not started."""
    from rlhf_core.allocation.planner import plan
    from rlhf_core.launch.start import job_request
    from rlhf_core.preflight.gather_facts import gather_for_predictions
    from rlhf_core.preflight.predictions import predict
    from rlhf_core.run_dir.run import RunDir
    from rlhf_core.scheduler import get_scheduler

    scheduler = get_scheduler(site.scheduler)
    inventory = scheduler.inventory()
    slurm = spec.slurm.over(site.slurm)
    predictions = predict(gather_for_predictions(spec, inventory, site.slurm))
    try:
        placement = plan(spec, inventory, attempt=1, slurm=slurm)
    except BadInput as error:
        predicted = [] if as_json else list(_predicted(predictions))
        if predicted:  # requirements for another cluster
            output.print_table((f"dry run of {spec.name}", ""), predicted)
            output.print_text("")
        elsewhere = ", or set RLHF_SCHEDULER=slurm to plan for your cluster" if scheduler.name == "local" else ""
        raise BadInput(f"{error}; change [resources] to fit{elsewhere}") from None
    run_dir = RunDir(site.runs_dir / f"{spec.name}-<date>-<time>-<id>")
    request = job_request(run_dir, spec, placement, site)
    if as_json:
        shown = {"spec": spec, "placement": placement, "command": request.command, "run_dir": run_dir.root}
        shown["predictions"] = {
            "memory_bytes": predictions.memory.peak_bytes if predictions.memory is not None else None,
            "step_s": predictions.step.seconds if predictions.step is not None else None,
        }
        shown["script"] = scheduler.script(request)
        output.print_json({**shown, "scheduler": scheduler.name})
        return
    roles = ", then ".join(
        " beside ".join(
            f"{group.role.value} with {group.workers_per_node} workers per node{_on_nodes(group, placement.num_nodes)}"
            for group in phase
        )
        for phase in placement.phases
    )
    rows = [
        ("steps", ", then ".join(_steps_of(spec))),
        ("stages", "preflight, allocate, train" + (", evaluate" if spec.is_evaluated else "")),
        ("placement", f"{count(placement.num_nodes, 'node')}, {placement.gpus_per_node} GPUs each: {roles}"),
        ("resources", f"{request.cpus_per_node} cores per node, at most {output.seconds_text(request.time_limit_s)}"),
        *_predicted(predictions),
        ("scheduler", scheduler.name),
        ("run directory", run_dir.root),
        ("agent on each node", " ".join(request.command)),
    ]
    output.print_table((f"dry run of {spec.name}", ""), rows)
    output.print_text("")
    output.print_text(scheduler.script(request))
    output.print_text("")
    output.print_text("Nothing was started.")


def _on_nodes(group: "GroupPlan", num_nodes: int) -> str:
    """Describe the nodes of a group; empty if it is on all of them."""
    number = len(group.nodes)
    if number == num_nodes:
        return ""
    return f" on the {'first' if group.nodes[0] == 0 else 'last'} {number} of {num_nodes} nodes"


def _predicted(predictions: "Predictions") -> Iterator[tuple[str, str]]:
    """Rows of the plan with estimates, as far as the config determines them."""
    memory, step = predictions.memory, predictions.step
    if memory is not None:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in memory.largest[:4] if size > 2**30 / 20)
        most = f": {parts}" if parts else ""
        yield "memory of a rank (estimate)", f"{memory.peak_bytes / 2**30:.1f} GiB at most{most}"
    if step is not None:
        parts = ", ".join(f"{name} {output.seconds_text(seconds)}" for name, seconds in step.parts.items())
        yield "step (estimate)", f"{output.seconds_text(step.seconds)} at full lengths: {parts}"


def _steps_of(spec: "RunSpec") -> list[str]:
    loops = [f"{loop.num_steps} of {loop.algorithm.name}" for loop in spec.loops.named.values()]
    return loops or [f"{spec.total_steps} of {spec.algorithm}"]


def print_summary(run_dir: "RunDir", as_json: bool) -> None:
    """Print the summary of a run: gains, times, attempts."""
    from rlhf_core.control.views.summary import summarise

    summary = summarise(run_dir)
    if as_json:
        output.print_json(summary_json(summary))
        return
    from rlhf_core.render.summary import interval, signed
    from rlhf_core.schemas.regression import regression_text

    rows = [
        (f"{row.metric}, {row.name}", interval(row.before), interval(row.after), signed(row.gain))
        for row in summary.accuracy
    ]
    title = f"run {summary.run_id} {summary.state_text}"
    if rows:
        output.print_table((title, "before", "after", "gain"), rows)
    else:
        output.print_text(title)
    if summary.regressed:
        output.warn(regression_text(summary.regressed))
    output.print_text("")
    times = ", ".join(f"{title} {output.seconds_text(seconds)}" for title, seconds in summary.stage_seconds)
    total, kind = summary.stored.spec.total_steps, summary.stored.spec.trainer.kind
    steps = f"{summary.steps} of {total}" if summary.steps or kind == "native" else f"none reported, of {total}"
    output.print_table(
        ("", ""),
        [
            ("steps", "; ".join(part for part in (steps, summary.missing_steps, summary.steps_hint) if part)),
            ("attempts, restarts", f"{summary.num_attempts}, {summary.num_restarts}"),
            ("incidents", ", ".join(one.failure_kind.value for one in summary.incidents) or "none"),
            ("time", times),
            ("run directory", summary.run_dir),
            ("next", f"rlhf show {summary.run_id}   rlhf report {summary.run_id}"),
        ],
    )


def summary_json(summary: "Summary") -> dict[str, Any]:
    """Convert a summary to JSON."""
    return {
        "run_id": summary.run_id,
        "name": summary.stored.spec.name,
        "state": summary.state,
        "regressed": [one.model_dump() for one in summary.regressed],
        "steps": summary.steps,
        "total_steps": summary.stored.spec.total_steps,
        "missing_steps": summary.missing_steps,
        "num_attempts": summary.num_attempts,
        "num_restarts": summary.num_restarts,
        "run_dir": summary.run_dir,
        "stages": [{"name": name, "seconds": seconds} for name, seconds in summary.stage_seconds],
        "evaluations": [
            {"name": row.name, "when": report.when, "metric": report.metric, "value": report.value}
            | {"ci_low": report.ci_low, "ci_high": report.ci_high, "num_samples": report.num_samples}
            for row in summary.accuracy
            for report in (row.before, row.after)
            if report is not None
        ],
    }
