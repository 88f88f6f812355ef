"""``rlhf plan``: memory of each role, predicted step, layouts that divide, and the same against earlier runs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.check import ConfigArgument, SetOption
from rlhf_core.cli.commands.history import open_history
from rlhf_core.cli.output import JsonOption
from rlhf_core.errors import BadInput, HistoryError
from rlhf_core.text.formatting import count

if TYPE_CHECKING:
    from rlhf_core.control.run_plan import Proposal, RunPlan
    from rlhf_core.preflight.memory.roles import Estimate
    from rlhf_core.schemas.checks import CheckResult


def plan(config: ConfigArgument, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Predict what a run needs before it takes a node: memory per role, seconds per step, layout of trainers and
    engines.

    A run that `rlhf check` blocks for its layout or its memory is refused, and the nearest layouts that divide are
    shown. After runs of the same shape, the prediction is compared with what they took. Exit code 0: fine, 2: refused.
    """
    found = _plan(config, set_ or [])
    if as_json:
        output.print_json(plan_json(found))
    else:
        _print_plan(found)
    if found.problems:
        raise typer.Exit(2)


def _plan(config: str, overrides: list[str]) -> "RunPlan":
    from rlhf_core.config.site import load_site
    from rlhf_core.control.new_run import resolve, stored_spec
    from rlhf_core.control.run_plan import plan_run
    from rlhf_core.history import queries
    from rlhf_core.history.run_shape import shape_key
    from rlhf_core.preflight.gather_facts import gather_for_predictions
    from rlhf_core.scheduler import get_scheduler

    site = load_site()
    spec = stored_spec(resolve(config, overrides), site)
    if spec.trainer.kind != "native":
        raise BadInput('found trainer.kind = "command"; expected the native trainer: the layout of another program is '
                       "set by its own arguments")  # fmt: skip
    try:
        with open_history() as store:
            measured = queries.measured_shape(store, shape_key(spec), engine_nodes=spec.rollout.nodes)
    except HistoryError as error:
        output.warn(f"the history is unavailable, so nothing is compared: {error}")
        measured = {}
    return plan_run(gather_for_predictions(spec, get_scheduler(site.scheduler).inventory(), site.slurm), measured)


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def _print_plan(found: "RunPlan") -> None:
    for title, columns, rows in (
        (f"memory of {found.spec.name}, GiB (estimate)", ("role", "part", "GiB"), list(_memory_rows(found))),
        (_step_title(found), ("phase", "predicted, s", "measured, s", "measured / predicted"), list(_step_rows(found))),
        ("layouts that fit, the fastest first (predicted)", _PROPOSED, [_proposed(one) for one in found.proposals]),
    ):
        if rows:
            output.print_table(columns, rows, title)
            output.print_text("")
    for note in _notes(found):
        output.print_text(note)
    _print_verdict(found)


def _print_verdict(found: "RunPlan") -> None:
    output.print_text(f"{'Refused' if found.problems else 'Accepted'}: {found.layout}.")
    for one in (*found.problems, *found.warnings):
        output.print_text(f"  {one.status}: found {one.found}; expected {one.expected}; {one.advice}")
    if found.nearest:
        output.print_text(f"Nearest that divide: {'; '.join(map(str, found.nearest))}.")


def _memory_rows(found: "RunPlan") -> Iterator[tuple[str, str, str]]:
    """Parts of each role's peak, largest first, then the sum and its limit."""
    for role, estimate in found.memory.items():
        for part, size in _peak_parts(estimate):
            yield role, part, _gib(size)
        limit = f" of {_gib(found.limit)} ({estimate.peak_bytes / found.limit:.0%})" if found.limit else ""
        too_much = " - too much" if found.limit and estimate.peak_bytes > found.limit else ""
        yield role, f"peak{limit}{too_much}", _gib(estimate.peak_bytes)


def _peak_parts(estimate: "Estimate") -> list[tuple[str, int]]:
    return [(part, size) for part, size in estimate.largest if size]


def _step_title(found: "RunPlan") -> str:
    runs = len(found.measured.get("runs", ()))
    where = f" on {found.gpu_kind}" if found.gpu_kind else ""
    against = f", against the median of {count(runs, 'earlier run')}" if runs else ""
    return f"seconds of a step{where}{against}"


def _step_rows(found: "RunPlan") -> Iterator[tuple[str, str, str, str]]:
    from rlhf_core.control.run_plan import PHASES

    predicted = dict(found.step.parts) if found.step is not None else {}
    seconds = found.measured.get("seconds", {})
    for phase in dict.fromkeys([*predicted, *PHASES]):
        measured = seconds.get(PHASES.get(phase, "")) or None
        ratio = found.scale.get(phase) if phase in PHASES else None
        if phase in predicted or measured is not None:
            yield phase, _seconds(predicted.get(phase)), _seconds(measured), f"{ratio:.2f}" if ratio else "-"
    whole, took = found.step.seconds if found.step is not None else None, seconds.get("time/step_s")
    if whole is not None or took is not None:
        yield "whole step", _seconds(whole), _seconds(took), f"{took / whole:.2f}" if whole and took else "-"


_PROPOSED = ("layout", "sampled by", "trainer, GiB", "engine, GiB", "vLLM's share", "sequences at once", "step, s")


def _proposed(one: "Proposal") -> tuple[object, ...]:
    return (
        str(one.layout),
        one.engine,
        _gib(one.trainer_bytes),
        _gib(one.engine_bytes) if one.engine_bytes else "-",
        f"{one.memory_share:g}" if one.memory_share else "-",
        one.sequences or "-",
        _seconds(one.step.seconds),
    )


def _notes(found: "RunPlan") -> Iterator[str]:
    """Sentences on the basis of the figures."""
    spec, measured = found.spec, found.measured
    if not found.memory:
        yield "The size of the model is unknown (no weights, and no dimensions in its config): nothing is predicted."
    elif found.limit is None:
        yield "The GPU type is unknown: set slurm.gpu_type to compare with its memory."
    if found.step is None and found.memory:
        yield "A step is predicted for GPUs whose rates are known; on CPU only earlier measurements are shown."
    elif found.scale:
        yield "Rates of the proposals: predicted, times measured / predicted of the earlier runs, phase by phase."
    elif found.step is not None:
        yield "Rates are assumed (docs/planning.md): the history has no run of this shape yet."
    if spec.ranks_per_row > 1:
        yield f"{spec.ranks_per_row} trainer ranks share each sequence, with equal parts of its tokens and activations."
    if found.gpu_kind and found.limit and not found.proposals:
        yield (
            "No layout uses every GPU of these nodes, divides evenly and fits in memory. `rlhf check` names settings "
            "that need less memory."
        )
    if any(one.layout.tensor_parallel > 1 for one in found.proposals):
        yield "GPUs of each engine: rollout.vllm.tensor_parallel."
    if any(one.layout.engine_nodes for one in found.proposals):
        yield "Engine nodes: rollout.nodes, the last of resources.num_nodes."
    peak = measured.get("gpu_gb") if spec.resources.gpus_per_node else measured.get("workers_gb")
    if peak is not None and found.memory:
        yield _peak_note(found, peak)


def _peak_note(found: "RunPlan", peak_gb: float) -> str:
    resources = found.spec.resources
    estimate = found.memory["trainer"].peak_bytes / 2**30
    if resources.gpus_per_node:
        return f"Measured peak of a GPU: {peak_gb:.1f} GiB, {peak_gb / estimate:.2f} of the estimate of a trainer."
    rank = peak_gb / resources.ranks_per_node
    return (
        f"Measured peak of main memory: {rank:.2f} GiB a rank, {rank / estimate:.2f} of the estimate (means of ten "
        "seconds; pages shared by ranks are counted for each)."
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}" if size < 10 * 2**30 else f"{size / 2**30:.1f}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def plan_json(found: "RunPlan") -> dict[str, Any]:
    """Plan as JSON; bytes and seconds."""
    return {
        "name": found.spec.name,
        "layout": _layout_json(found.layout),
        "problems": list(map(_finding_json, found.problems)),
        "warnings": list(map(_finding_json, found.warnings)),
        "nearest": [_layout_json(one) for one in found.nearest],
        "memory": {
            role: {"parts": dict(_peak_parts(one)), "peak_bytes": one.peak_bytes} for role, one in found.memory.items()
        },
        "limit_bytes": found.limit,
        "gpu": found.gpu_kind,
        "step_s": dict(found.step.parts) if found.step is not None else None,
        "proposals": [
            {
                **_layout_json(one.layout),
                "engine": one.engine,
                "trainer_bytes": one.trainer_bytes,
                "engine_bytes": one.engine_bytes,
                "gpu_memory_share": one.memory_share,
                "sequences": one.sequences,
                "step_s": dict(one.step.parts),
            }
            for one in found.proposals
        ],
        "measured": found.measured,
        "measured_over_predicted": dict(found.scale),
    }


def _finding_json(one: "CheckResult") -> dict[str, str]:
    return {"check": one.id, "found": one.found, "expected": one.expected, "advice": one.advice}


def _layout_json(layout: Any) -> dict[str, int]:
    names = ("trainers", "engines", "tensor_parallel", "engine_nodes")
    return {name: getattr(layout, name) for name in names}
