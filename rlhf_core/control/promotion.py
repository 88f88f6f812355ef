"""The last step of a run, independent of Prefect: its evaluated checkpoint may become a model for others to use.

The run is completed by then, and stays completed whatever happens to its promotion. Every answer goes through one file
(``promotion.json``), which is created only once. So it does not matter whether the answer comes from Prefect's form,
from `rlhf approve` on another machine, or from the deadline, nor how many answers arrive at the same time.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from rlhf_core.control.controller import CancelRequested, Controller
from rlhf_core.control.views.summary import summarise
from rlhf_core.errors import CheckpointCorrupt, PromotionFailed
from rlhf_core.launch.journal import PromotionRecord, RunRecord
from rlhf_core.launch.model_card import model_card
from rlhf_core.launch.promote import (
    choose,
    give_answer,
    model_source,
    promoted_folder,
    read_answer,
    write_model_directory,
)
from rlhf_core.render.summary import Summary, accuracy_table
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState, RunState, StageName, StageState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.journal import PromotionMoved
from rlhf_core.schemas.promotion import ModelProvenance, PromotionAnswer
from rlhf_core.schemas.regression import regression_text
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.text.escaping import markdown, markdown_code
from rlhf_core.text.formatting import THROUGH_PREFECT, attributed, markdown_table

POLICY = "promote.when=always"
"""Approver that is recorded if no approval is required."""

SHOWN_SAMPLES = 5
"""Completions shown with the question."""

_MACHINES = {"slurm", "resources", "supervise", "preflight"}
"""Sections of the spec that say nothing about the model, and may hold private settings."""


@dataclass(frozen=True)
class Question:
    """A request for approval, as shown to the user."""

    run_dir: RunDir
    checkpoint_step: int
    target: Path
    """Folder that the model will be written to."""
    deadline: datetime
    reason: str
    """Reason for promoting it."""

    @property
    def _question(self) -> str:
        question = f"May step {self.checkpoint_step} of {self.run_dir.run_id} become a model for others?"
        return f"**{question}** {markdown(self.reason)}."

    @property
    def form_text(self) -> str:
        """The question for the top of a form, as Markdown: short, so that the fields stay in view."""
        lines = [
            self._question,
            "",
            *_results(summarise(self.run_dir)),
            "*approve* on approves, off refuses; the button hands in either answer. Samples and incidents: artifact "
            "*approval* of this flow run.",
        ]
        return "\n".join(lines)

    @property
    def text(self) -> str:
        """The question with everything needed to answer it, as Markdown."""
        run_id = self.run_dir.run_id
        summary, stored = summarise(self.run_dir), self.run_dir.read_spec()
        lines = [
            self._question,
            "",
            f"Approved, it is copied to {markdown_code(str(self.target))}. Without an answer until "
            f"{self.deadline:%Y-%m-%d %H:%M} UTC nothing is promoted. From a terminal: `rlhf approve {run_id}` or "
            f"`rlhf refuse {run_id} --reason ...`",
            "",
            f"The run was asked for by {_cell(attributed(stored.owner, stored.owner_account))}. Names are claims: an "
            f"answer from a terminal is kept with its user of the machine, one from here as *{THROUGH_PREFECT}*.",
            "",
            *_results(summary),
            *_samples(summary),
            *_incidents(summary),
        ]
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The step


def is_due(stored: StoredSpec, record: RunRecord) -> bool:
    """True if a controller of this run still has to start its promotion, wait for the answer, or write the model."""
    if stored.trial_of or record.state is not RunState.COMPLETED:
        return False
    if record.promotion is not None:
        return record.promotion.open
    done = record.stage_state(StageName.PROMOTE, 0) is StageState.COMPLETED
    return stored.spec.promote.when != "never" and not done


def carry_out(controller: Controller) -> None:
    """Bring the promotion to its end from its current state. May be killed at any point and started again.

    Raises:
        PromotionFailed: the model could not be written; nothing of it is left.
        CancelRequested: the user at this terminal has left; the question stays open.
    """
    journal = controller.journal
    index = journal.begin_stage(StageName.PROMOTE, 0)
    controller.record()
    controller.observer.stage_started("promote")
    try:
        _begin(controller)
        _wait_for_answer(controller)
        _write(controller)
    except CancelRequested:
        journal.end_stage(index, StageState.CANCELLED, "left; the question stays open")
        controller.observer.log(f"left; {how_to_answer(controller.run_dir.run_id)}")
        raise
    except (PromotionFailed, CheckpointCorrupt) as error:
        _move(controller, PromotionState.FAILED, reason=str(error))
        journal.end_stage(index, StageState.FAILED, str(error))
        controller.record()
        raise PromotionFailed(str(error)) from error
    message = (
        describe(journal.record.promotion)
        or f"not promoted: {choose(controller.run_dir, controller.spec.promote).reason}"
    )
    journal.end_stage(index, StageState.COMPLETED, message)
    controller.record()
    controller.observer.log(message)


def approve_anew(controller: Controller, by: str, reason: str) -> None:
    """Approve a promotion that was never requested, refused, expired or could not be written, and write the model.

    Raises:
        PromotionFailed: there is nothing to promote, or it could not be written.
    """
    choice = choose(controller.run_dir, controller.spec.promote)
    if choice.checkpoint is None:
        raise PromotionFailed(f"{controller.run_dir.run_id} cannot be promoted: {choice.reason}")
    _move(controller, PromotionState.APPROVED, by=by, reason=reason, step=choice.checkpoint.step)
    carry_out(controller)


def refuse_anew(controller: Controller, by: str, reason: str) -> None:
    """Refuse a promotion that expired or could not be written, so that its record shows the refusal."""
    _move(controller, PromotionState.REFUSED, by=by, reason=reason)
    controller.record()


def describe(promotion: PromotionRecord | None) -> str:
    """The state of a promotion in a sentence; empty if there is none."""
    if promotion is None:
        return ""
    why = f" by {promotion.by}" * bool(promotion.by) + f": {promotion.reason}" * bool(promotion.reason)
    match promotion.state:
        case PromotionState.PROMOTED:
            return f"step {promotion.checkpoint_step} was promoted to {promotion.path}{why}"
        case PromotionState.WAITING:
            return f"step {promotion.checkpoint_step} waits for approval"
        case PromotionState.EXPIRED:
            return f"step {promotion.checkpoint_step} was not promoted: nobody answered in time"
        case PromotionState.FAILED:
            return f"step {promotion.checkpoint_step} could not be promoted: {promotion.reason}"
        case PromotionState.APPROVED | PromotionState.REFUSED:
            return f"step {promotion.checkpoint_step} was {promotion.state.value}{why}"


def how_to_answer(run_id: str) -> str:
    """Commands that answer the request from a terminal."""
    return f"`rlhf approve {run_id}` promotes it, `rlhf refuse {run_id} --reason ...` does not"


def _begin(controller: Controller) -> None:
    """Request approval, or approve if none is required. Does nothing if this was done before or there is no model."""
    if controller.journal.record.promotion is not None:
        return
    choice = choose(controller.run_dir, controller.spec.promote)
    if choice.checkpoint is None:
        return
    waits = controller.spec.promote.when == "approved"
    state, by = (PromotionState.WAITING, "") if waits else (PromotionState.APPROVED, POLICY)
    _move(controller, state, by=by, reason=choice.reason, step=choice.checkpoint.step)
    controller.record()


def _wait_for_answer(controller: Controller) -> None:
    waiting = controller.journal.record.promotion
    if waiting is None or waiting.state is not PromotionState.WAITING:
        return
    question = _question(controller, waiting)
    run_id = controller.run_dir.run_id
    controller.observer.log(
        f"waits for approval until {question.deadline:%Y-%m-%d %H:%M} UTC: {waiting.reason}. {how_to_answer(run_id)}"
    )
    with controller.show_question(question):
        while (answer := _answer(controller)) is None:
            if utc_now() >= question.deadline:
                # Through the same file, so that an answer that arrives at this moment and the expiry cannot both count.
                give_answer(controller.run_dir, PromotionAnswer(verdict="expired", time=utc_now()))
            else:
                controller.wait(controller.poll_s)
        _move(controller, PromotionState(answer.verdict), by=answer.by, reason=answer.reason)
        controller.record()


def _answer(controller: Controller) -> PromotionAnswer | None:
    """The answer, if there is one. None also while its file system does not respond: the wait counts how long."""
    with suppress(OSError):
        return read_answer(controller.run_dir)
    return None


def _question(controller: Controller, waiting: PromotionRecord) -> Question:
    return Question(
        controller.run_dir,
        waiting.checkpoint_step,
        promoted_folder(controller.run_dir, controller.spec.promote),
        waiting.requested_at + timedelta(hours=controller.spec.promote.timeout_h),
        waiting.reason,
    )


def _write(controller: Controller) -> None:
    """Write the model if it was approved.

    Raises:
        PromotionFailed: it could not be written.
        CheckpointCorrupt: the checkpoint has changed since it was approved.
    """
    approved = controller.journal.record.promotion
    if approved is None or approved.state is not PromotionState.APPROVED:
        return
    target = promoted_folder(controller.run_dir, controller.spec.promote)
    source = model_source(controller.run_dir, approved.checkpoint_step)
    provenance = _provenance(controller, approved)
    controller.observer.log(f"step {approved.checkpoint_step} is being copied to {target}")
    write_model_directory(source, target, model_card(provenance, controller.spec), provenance, controller.lease.keep)
    _move(controller, PromotionState.PROMOTED, by=approved.by, reason=approved.reason, path=str(target))


def _move(
    controller: Controller,
    state: PromotionState,
    *,
    by: str = "",
    reason: str = "",
    path: str = "",
    step: int | None = None,
) -> None:
    present = controller.journal.record.promotion
    if step is None:
        assert present is not None  # None only at the first move, which gives the step
        step = present.checkpoint_step
    controller.journal.move_promotion(
        PromotionMoved(state=state, checkpoint_step=step, by=by, reason=reason, path=path)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Contents of the question and of the model card


def _provenance(controller: Controller, approved: PromotionRecord) -> ModelProvenance:
    summary, stored, spec = summarise(controller.run_dir), controller.stored, controller.spec
    manifest = controller.run_dir.checkpoint(approved.checkpoint_step).manifest()
    return ModelProvenance(
        run_id=stored.run_id,
        name=spec.name,
        owner=stored.owner,
        owner_account=stored.owner_account,
        tags=stored.tags,
        created_at=stored.created_at,
        promoted_at=utc_now(),
        approved_by=approved.by,
        reason=approved.reason,
        checkpoint_step=approved.checkpoint_step,
        spec_hash=manifest.spec_hash if manifest is not None else "",
        base_model=spec.model.path,
        seed=spec.seed,
        package_version=stored.package_version,
        code_revision=stored.code_revision,
        config_source=stored.config_source,
        overrides=stored.overrides,
        num_attempts=summary.num_attempts,
        num_restarts=summary.num_restarts,
        incidents=tuple(
            f"{one.failure_kind.value} in attempt {one.attempt}: {one.message}" for one in summary.incidents
        ),
        evaluations=tuple(_without_samples(summary, approved.checkpoint_step)),
        spec=spec.model_dump(mode="json", exclude=_MACHINES),
    )


def _without_samples(summary: Summary, step: int) -> Iterator[EvaluationReport]:
    for report in itertools.chain.from_iterable((row.before, row.after) for row in summary.accuracy):
        if report is not None and (report.when == "before" or report.checkpoint_step == step):
            yield report.model_copy(update={"samples": ()})


def _results(summary: Summary) -> Iterator[str]:
    if summary.regressed:
        yield f"> **Regressed**: {markdown(regression_text(summary.regressed))}."
        yield ""
    yield from accuracy_table([row for row in summary.accuracy if row.after is not None])
    yield ""


def _incidents(summary: Summary) -> Iterator[str]:
    if not summary.incidents:
        yield "No incidents on the way."
        return
    yield from markdown_table(
        ("incident", "attempt", "what happened"),
        ((one.failure_kind.value, one.attempt, _cell(one.message)) for one in summary.incidents),
    )


def _samples(summary: Summary) -> Sequence[str]:
    """A few completions after training, to illustrate the numbers."""
    after = next((row.after for row in summary.accuracy if row.after is not None and row.after.samples), None)
    if after is None:
        return ()
    rows = (
        (_cell(sample.prompt), _cell(sample.completion), _cell(sample.answer), f"{sample.score:g}")
        for sample in after.samples[:SHOWN_SAMPLES]
    )
    return (*markdown_table(("prompt", "completion", "answer", "score"), rows), "")


def _cell(text: str) -> str:
    return markdown(text if len(text) <= 200 else f"{text[:197]}...")
