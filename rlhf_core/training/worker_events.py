"""Worker events for the timeline of a run."""

import contextlib
from typing import Literal

from rlhf_core.files.appended import append_lines
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import AgentEvent
from rlhf_core.training.types import WorkerContext


def write_event(context: WorkerContext, kind: Literal["checkpoint", "file"], message: str) -> None:
    """Append an event of this worker. If the disk is full, training continues: the log has the message."""
    path = context.restart_dir.worker_events(context.role, context.node, context.local_rank)
    event = AgentEvent(time=utc_now(), kind=kind, node=context.node, role=context.role, message=message)
    with contextlib.suppress(OSError):
        append_lines(path, event)
