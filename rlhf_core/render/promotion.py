"""Promotion section of a report: its state, the answers and their reasons, the model's folder."""

from rlhf_core.history.queries.rows import PromotionRow
from rlhf_core.render.gather import ReportData, find_row
from rlhf_core.render.markup import Markup, badge, code, facts, join, moment, remark, section, table, tag

_SENTENCES = {
    "waiting": "waits for an answer",
    "approved": "is approved; the model is not written yet",
    "refused": "was refused",
    "expired": "was not promoted: there was no answer in time",
    "promoted": "was promoted",
    "failed": "was approved, but the model could not be written",
}


def promotion(record: ReportData) -> Markup:
    """Build the section; empty for a run without a promotion."""
    if record.promotion:
        return section("Promotion", _standing(record, record.promotion), _history(record))
    stage = find_row(record.stages, name="promote")
    if stage is None:
        return Markup("")
    return section("Promotion", remark(stage["message"] or "Nothing was promoted."))


def _standing(record: ReportData, promotion: PromotionRow) -> Markup:
    state = promotion["state"]
    requested, moved = promotion["requested_at"], promotion["state_changed_at"]
    return join(
        [
            tag("p", badge(state), f" The checkpoint of step {promotion['checkpoint_step']} {_SENTENCES[state]}."),
            facts(
                [
                    ("decided by", promotion["decided_by"]),
                    ("requested at", moment(requested)),
                    (f"{state} at", moment(moved) if state != "waiting" else ""),
                    ("reason", promotion["reason"]),
                    ("model", code(promotion["path"]) if promotion["path"] else ""),
                    ("what to do", _advice(record, state)),
                ]
            ),
        ]
    )


def _advice(record: ReportData, state: str) -> object:
    """The next command; empty if there is nothing to do."""
    run_id = record.run_id
    if state == "waiting":
        return join([code(f"rlhf approve {run_id}"), " or ", code(f"rlhf refuse {run_id} --reason ...")])
    if state in ("failed", "expired"):
        return code(f"rlhf approve {run_id}")
    return ""


def _history(record: ReportData) -> Markup:
    """List all changes if there was more than one decision: a changed answer, or another try."""
    moves = record.promotion_moves
    decided = [move for move in moves if move["state"] in ("approved", "refused", "expired", "failed")]
    if len(decided) < 2:
        return Markup("")
    rows = [
        [moment(move["time"]), badge(move["state"]), move["by"], f"step {move['checkpoint_step']}", move["reason"]]
        for move in moves
    ]
    return join([tag("h3", "How it came there"), table(["when", "what", "who", "checkpoint", "why"], rows)])
