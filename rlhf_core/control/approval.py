"""Answering a promotion request from a process other than the waiting controller, or when no controller is waiting."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_core.config.site import Site
from rlhf_core.control.controller import Controller, opened
from rlhf_core.control.promotion import approve_anew, carry_out, describe, refuse_anew
from rlhf_core.errors import BadInput, LeaseLost
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.journal import PromotionRecord, read_record
from rlhf_core.launch.lease import IfHeld
from rlhf_core.launch.promote import choose, give_answer, promoted_folder, read_answer
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState, RunState
from rlhf_core.schemas.base import label_problem, utc_now
from rlhf_core.schemas.promotion import PromotionAnswer

Verdict = Literal["approved", "refused"]

CONTROLLER_TIMEOUT_S = 60.0
"""Time to wait for a live controller to act on an answer, before reporting only that the answer was recorded."""

_WANTED = {"approved": PromotionState.PROMOTED, "refused": PromotionState.REFUSED}


@dataclass(frozen=True)
class Answered:
    """The outcome of an answer."""

    state: PromotionState
    message: str
    path: Path | None = None
    """Folder of the model, once it has been written."""


def answer_promotion(
    run_dir: RunDir,
    site: Site,
    store: HistoryStore,
    verdict: Verdict,
    by: str,
    reason: str = "",
    *,
    log: Callable[[str], None],
    timeout_s: float = CONTROLLER_TIMEOUT_S,
) -> Answered:
    """Approve or refuse the promotion of a completed run.

    While the promotion is waiting for an answer, the first answer counts. The run's controller acts on it; if no
    controller is alive, this process does. After a refusal, an expired deadline or a full disk, the process that takes
    the lease of the run decides.

    Raises:
        BadInput: the run is not completed, the promotion was already answered, or there is nothing to answer.
        LeaseLost: the answer is not recorded, because another controller has the run and is not waiting for one.
        PromotionFailed: the model could not be written.
    """
    problem = label_problem(by)
    if problem:
        raise BadInput(f"--by: {problem}")
    _require_open(run_dir, verdict)
    present = read_record(run_dir).promotion
    answer = PromotionAnswer(verdict=verdict, by=by, reason=reason, time=utc_now())
    given = False
    until = time.monotonic() + timeout_s
    while True:
        given = given or _give(run_dir, answer)
        try:
            with opened(run_dir, site, store, if_held=IfHeld.FAIL) as controller:
                settled = controller.journal.record.promotion
                if not (given and settled is not None and _is_ours(settled, verdict, by)):
                    log(f"no controller is running for {run_dir.run_id}; carrying out the answer from here")
                    _act(controller, verdict, by, reason)
                return _result(run_dir)  # the controller may already have acted on the answer
        except LeaseLost:
            promotion = read_record(run_dir).promotion
            expired = promotion is not None and promotion.state is PromotionState.EXPIRED
            if promotion is not None and not promotion.open and promotion != present and not expired:
                _require_ours(run_dir, promotion, verdict, by)
                return _result(run_dir)
        if time.monotonic() >= until:
            break
        time.sleep(0.3)
    if not given:
        found = describe(promotion) or "its promotion has not been requested yet"
        raise LeaseLost(
            f"the answer is not recorded, because the controller of {run_dir.run_id} is not waiting for one: {found}. "
            "Try again later"
        )
    return Answered(
        PromotionState.WAITING, f"the answer is recorded; the controller of {run_dir.run_id} will act on it"
    )


def _act(controller: Controller, verdict: Verdict, by: str, reason: str) -> None:
    """Act while holding the lease. A promotion that has been settled in the meantime is left alone."""
    promotion = controller.journal.record.promotion
    if promotion is not None and promotion.open:
        carry_out(controller)
        promotion = controller.journal.record.promotion
        if promotion is not None and promotion.state is not PromotionState.EXPIRED:
            _require_ours(controller.run_dir, promotion, verdict, by)
            return
        # The deadline had passed, but the controller was killed before it could record that.
    _require_open(controller.run_dir, verdict)
    if verdict == "approved":
        approve_anew(controller, by, reason)
    else:
        refuse_anew(controller, by, reason)


def _require_open(run_dir: RunDir, verdict: Verdict) -> None:
    run_id, record = run_dir.run_id, read_record(run_dir)
    if run_dir.read_spec().trial_of:
        raise BadInput(f"{run_id} is a trial run; trial runs cannot be promoted")
    if record.state is not RunState.COMPLETED:
        raise BadInput(f"run {run_id} is {record.state.value}; only a completed run can be promoted")
    state = record.promotion.state if record.promotion is not None else None
    if verdict == "refused" and state is None:
        raise BadInput(f"no promotion of {run_id} has been requested, so there is nothing to refuse")
    if verdict == "approved" and state is None:
        spec = run_dir.read_spec().spec
        choice = choose(run_dir, spec.promote)
        if choice.checkpoint is None:
            raise BadInput(f"{run_id} cannot be promoted to {promoted_folder(run_dir, spec.promote)}: {choice.reason}")
    is_settled = verdict == "refused" and state in (PromotionState.REFUSED, PromotionState.APPROVED)
    if state is PromotionState.PROMOTED or is_settled:
        raise BadInput(f"too late: {describe(record.promotion)}")


def _give(run_dir: RunDir, answer: PromotionAnswer) -> bool:
    """Record an answer; False if the promotion does not wait for one, or its deadline came first.

    Raises:
        BadInput: another answer came first.
    """
    promotion = read_record(run_dir).promotion
    if promotion is None or promotion.state is not PromotionState.WAITING:
        return False
    if give_answer(run_dir, answer):
        return True
    first = read_answer(run_dir)
    if first is not None and first.verdict != "expired":
        raise BadInput(f"too late: {first.by} already {first.verdict} it" + f": {first.reason}" * bool(first.reason))
    return False


def _require_ours(run_dir: RunDir, settled: PromotionRecord, verdict: Verdict, by: str) -> None:
    """Raise if a different answer, given at the same moment, is the one that counted."""
    if settled.state is not PromotionState.FAILED and not _is_ours(settled, verdict, by):
        raise BadInput(f"another answer for {run_dir.run_id} came first: {describe(settled)}")


def _is_ours(settled: PromotionRecord, verdict: Verdict, by: str) -> bool:
    return not settled.open and settled.state is _WANTED[verdict] and settled.by == by


def _result(run_dir: RunDir) -> Answered:
    promotion = read_record(run_dir).promotion
    assert promotion is not None  # it was settled a moment ago
    return Answered(promotion.state, describe(promotion), Path(promotion.path) if promotion.path else None)
