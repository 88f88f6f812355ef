"""Model card of a promoted model, generated from recorded facts alone, for the Hub and for readers."""

import json
from collections.abc import Iterator

from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.promotion import ModelProvenance
from rlhf_core.schemas.regression import regression_text, regressions
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.escaping import markdown, markdown_code, yaml_scalar
from rlhf_core.text.formatting import attributed, markdown_table

TO_WRITE = "*To be written by the person who publishes this model.*"


def model_card(provenance: ModelProvenance, spec: RunSpec) -> str:
    """Render ``README.md``: YAML front matter for the Hugging Face Hub, then the same facts as text."""
    return "\n".join(["---", *_front_matter(provenance, spec), "---", "", *_body(provenance, spec), ""])


def data_name(spec: RunSpec) -> str:
    """Name of the training data: the files or the generator."""
    files = [one.train.rpartition("/")[2] for one in spec.data.of_split("train").values()]
    return spec.data.generator or ", ".join(dict.fromkeys(files))


def _front_matter(provenance: ModelProvenance, spec: RunSpec) -> Iterator[str]:
    yield "library_name: transformers"
    task = "text-classification" if spec.makes_reward_model else "text-generation"
    yield f"pipeline_tag: {task}"
    if provenance.base_model:
        yield f"base_model: {yaml_scalar(provenance.base_model)}"
    yield "tags:"
    for tag in dict.fromkeys(["rlhf", spec.algorithm, *provenance.tags]):
        yield f"- {yaml_scalar(tag)}"
    yield "datasets:"
    yield f"- {yaml_scalar(data_name(spec))}"
    results = [report for report in provenance.evaluations if report.when == "after"]
    yield "model-index:"
    yield f"- name: {yaml_scalar(provenance.run_id)}"
    yield "  results:"
    for report in results:
        yield "  - task:"
        yield f"      type: {task}"
        yield "    dataset:"
        yield f"      name: {yaml_scalar(f'held-out part of {data_name(spec)}')}"
        yield f"      type: {yaml_scalar(data_name(spec))}"
        yield "    metrics:"
        yield f"    - type: {yaml_scalar(report.metric)}"
        yield f"      name: {yaml_scalar(f'{report.metric}, {report.name}')}"
        yield f"      value: {_number(report.value)}"
        yield "      args:"
        yield f"        ci_low: {_number(report.ci_low)}"
        yield f"        ci_high: {_number(report.ci_high)}"
        yield f"        confidence: {spec.evaluate.confidence:g}"
        yield f"        num_samples: {report.num_samples}"


def _body(provenance: ModelProvenance, spec: RunSpec) -> Iterator[str]:
    yield f"# {provenance.run_id}"
    yield ""
    started = markdown_code(provenance.base_model) if provenance.base_model else "random weights"
    warm_start = spec.loops.warm_start
    after = f" after a warm start by {warm_start.algorithm.name.upper()}" if warm_start else ""
    trained = spec.algorithm.upper() + after
    # The rewards of an external trainer are in its own arguments.
    rewards = ", ".join(map(markdown_code, (*spec.reward.functions, *spec.reward.models)))
    rewarded = f" with the reward {rewards}" if spec.any_loop_samples else ""
    yield (
        f"Trained from {started} by {trained}, {provenance.checkpoint_step} optimizer steps, on "
        f"{markdown_code(data_name(spec))}{rewarded}."
    )
    yield ""
    yield "## Evaluation"
    yield ""
    yield f"On held-out data; in brackets the {spec.evaluate.confidence:.0%} confidence interval."
    yield ""
    worse = regressions(map(dict, provenance.evaluations))
    if worse:
        yield f"**Regressed**: {markdown(regression_text(worse))}."
        yield ""
    yield from markdown_table(("", "before", "after"), _results(provenance.evaluations))
    yield ""
    yield "## How it was made"
    yield ""
    yield from markdown_table(("", ""), _making(provenance, spec).items())
    yield ""
    yield "`rlhf.json` contains the full specification and the SHA-256 of every file in this folder."
    for title in ("Intended use", "Limitations", "License"):
        yield from ("", f"## {title}", "", TO_WRITE)


def _results(reports: tuple[EvaluationReport, ...]) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys(report.name for report in reports):
        of_name = {report.when: report for report in reports if report.name == name}
        shown = next(iter(of_name.values()))
        title = markdown(f"{shown.metric}, {name}")
        yield title, _interval(of_name.get("before")), _interval(of_name.get("after"))


def _interval(report: EvaluationReport | None) -> str:
    if report is None:
        return "-"
    return f"{report.value:.3f} [{report.ci_low:.3f}, {report.ci_high:.3f}], {report.num_samples} samples"


def _making(provenance: ModelProvenance, spec: RunSpec) -> dict[str, str]:
    requested_by = attributed(provenance.owner, provenance.owner_account)
    return {
        "run": f"`{provenance.run_id}`, requested by {markdown(requested_by)} on "
        f"{provenance.created_at:%Y-%m-%d %H:%M} UTC",
        "checkpoint": f"step {provenance.checkpoint_step} of {spec.total_steps}",
        "seed": str(provenance.seed),
        "code": _code(provenance.code_revision) if provenance.code_revision else "not from a git repository",
        "made with": f"rlhf-flows {provenance.package_version}, config {_code(provenance.config_source)}"
        + (f" with {', '.join(map(_code, provenance.overrides))}" if provenance.overrides else ""),
        "ranks": f"{spec.num_ranks}",
        "attempts, restarts": f"{provenance.num_attempts}, {provenance.num_restarts}",
        "incidents": "; ".join(map(markdown, provenance.incidents)) or "none",
        "promoted": f"{provenance.promoted_at:%Y-%m-%d %H:%M} UTC, by {markdown(provenance.approved_by)}"
        + (f": {markdown(provenance.reason)}" if provenance.reason else ""),
    }


def _number(value: float) -> str:
    return json.dumps(value) if value == value else ".nan"


def _code(text: str) -> str:
    return markdown_code(text, in_table=True)
