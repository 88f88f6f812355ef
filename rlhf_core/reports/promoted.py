"""What became of the model after the run: who was asked, who said what and why, and where it lies."""

from collections.abc import Mapping
from typing import Any

from rlhf_core.reports.gather import RunRecord, find_row
from rlhf_core.reports.markup import Markup, badge, code, facts, join, moment, section, table, tag

_SAID = {
    "waiting": "waits for an answer",
    "approved": "is approved; the model is not written yet",
    "refused": "was refused",
    "expired": "was not promoted: nobody answered in time",
    "promoted": "was promoted",
    "failed": "was approved, but the model could not be written",
}


def promotion(record: RunRecord) -> Markup:
    """The section; nothing for a run that was not to be promoted."""
    if record.promotion:
        return section("Promotion", _standing(record, record.promotion), _history(record))
    stage = find_row(record.stages, name="promote")
    if stage is None:
        return Markup("")
    return section("Promotion", tag("p", stage.get("message") or "Nothing was promoted.", class_="note"))


def _standing(record: RunRecord, promotion: Mapping[str, Any]) -> Markup:
    state = promotion["state"]
    asked, moved = promotion["requested_at"], promotion["state_changed_at"]
    return join(
        [
            tag("p", badge(state), f" The checkpoint of step {promotion['checkpoint_step']} {_SAID[state]}."),
            facts(
                [
                    ("decided by", promotion["decided_by"]),
                    ("requested at", moment(asked)),
                    (f"{state} at", moment(moved) if state != "waiting" else ""),
                    ("reason", promotion["reason"]),
                    ("model", code(promotion["path"]) if promotion["path"] else ""),
                    ("what to do", _advice(record, state)),
                ]
            ),
        ]
    )


def _advice(record: RunRecord, state: str) -> object:
    """What can be done about it; empty where nothing has to be."""
    run_id = record.run_id
    if state == "waiting":
        return join([code(f"rlhf approve {run_id}"), " or ", code(f"rlhf refuse {run_id} --reason ...")])
    if state in ("failed", "expired"):
        return code(f"rlhf approve {run_id}")
    return ""


def _history(record: RunRecord) -> Markup:
    """Every change, where there was more than asking, answering and writing: an answer that was changed, a new try."""
    moves = record.promotion_moves
    decided = [move for move in moves if move["state"] in ("approved", "refused", "expired", "failed")]
    if len(decided) < 2:
        return Markup("")
    rows = [
        [moment(move["time"]), badge(move["state"]), move["by"], f"step {move['checkpoint_step']}", move["reason"]]
        for move in moves
    ]
    return join([tag("h3", "How it came there"), table(["when", "what", "who", "checkpoint", "why"], rows)])
