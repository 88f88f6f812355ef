"""Limits on the number of runs driven at the same time, which Prefect enforces.

The limit ``rlhf-runs`` counts those of all machines. Create a global concurrency limit of this name in the UI or with
``prefect gcl create``; it can be changed at any time. Without it, the number of runs is unlimited. The limit of a
deployment counts its own.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from uuid import UUID

from prefect import flow_engine
from prefect.concurrency._leases import maintain_concurrency_lease
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from flows.server.clients import api_client
from flows.server.settings import server_answers
from rlhf_core.condition_log import ConditionLog
from rlhf_core.control.controller import CancelRequested, Controller
from rlhf_core.schemas.attempts import RunState
from rlhf_core.survival import Survived

LIMIT = "rlhf-runs"
"""Name of the global concurrency limit."""

RETRY_INTERVAL_S = 3.0
"""Pause between two attempts to get a slot."""

ANSWER_TIMEOUT_S = 20.0
"""Time that the server has to grant or refuse a slot; after that the run goes ahead without one."""

PLACE_TTL_S = 90
"""Time that Prefect keeps the slot of a dead controller, in seconds."""

_LOCKED = 423
"""HTTP status of Prefect's server when all slots are taken."""


@contextmanager
def run_slot(controller: Controller) -> Iterator[Callable[[], None]]:
    """Hold a slot for the duration of the block, waiting until one is free. The lease is kept during the wait.

    A run with a job does not wait, for another controller has started it: nothing would respond to failures until other
    runs have ended. It takes the next free slot. A run that is already completed takes none.

    Yields a function that releases the slot early: a completed run may wait days for an approval.

    Raises:
        LeaseLost: another controller has the run.
    """
    completed = controller.journal.record.state is RunState.COMPLETED
    slot = _RunSlot() if not completed and server_answers() else None
    with ExitStack() as stack:
        if slot is not None:
            stack.callback(slot.release)
            last = controller.journal.record.last_attempt
            if last is None or last.ended:
                _wait(controller, slot)
        yield stack.close


def _wait(controller: Controller, slot: "_RunSlot") -> None:
    """Wait for a slot. A request to end the run stops the wait: the first step starts at once and handles it."""
    until = controller.clock() + ANSWER_TIMEOUT_S
    waiting = ConditionLog(controller.observer.log)
    try:
        while not slot.decided.is_set() and (slot.full or controller.clock() < until):
            if slot.full:
                waiting.log_once(f"waits for a place: the limit {LIMIT} of Prefect is reached")
            controller.wait(0.2)
    except CancelRequested:
        return
    if slot.failure or not slot.decided.is_set():
        why = slot.failure or f"no answer within {ANSWER_TIMEOUT_S:g} s"
        controller.observer.log(
            f"the limit {LIMIT} of Prefect could not be asked ({why}); the run continues without it"
        )


class _RunSlot:
    """Thread that gets, holds and releases a slot, so that a server that never answers cannot block a run."""

    def __init__(self) -> None:
        self.decided = threading.Event()
        """Set once a slot is held, is not needed, or cannot be had."""
        self.full = False
        self.failure = ""
        self._released = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="run-slot", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the slot."""
        self._released.set()
        self._thread.join(timeout=ANSWER_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with Survived() as failed:  # whatever Prefect raises: training does not depend on it
                if _limit_is_there():
                    self._hold()
            self.failure = failed.problem
        finally:
            self.decided.set()

    def _hold(self) -> None:
        while not self._released.is_set():
            try:
                with concurrency(
                    LIMIT, max_retries=0, lease_duration=PLACE_TTL_S, strict=False, raise_on_lease_renewal_failure=False
                ):
                    self.decided.set()
                    self._released.wait()
                return
            except Exception as error:
                if not _is_full(error):
                    raise
            self.full = True
            self._released.wait(RETRY_INTERVAL_S)


def _limit_is_there() -> bool:
    with api_client() as client:
        try:
            client.read_global_concurrency_limit_by_name(LIMIT)
        except ObjectNotFound:
            return False
    return True


def _is_full(error: BaseException) -> bool:
    response = getattr(error.__cause__, "response", None)
    return getattr(response, "status_code", None) == _LOCKED


# ---------------------------------------------------------------------------------------------------------------------
# The limit of a deployment


def outlive_slots() -> None:
    """Have the flow runs of this process go on if they lose the slot that the limit of their deployment gave them.

    Prefect's engine would raise an exception anywhere in a controller whose slot can no longer be renewed: some minutes
    after the flow run was paused for an approval, which gives the slot back, and after a long outage of the server.
    """
    vars(flow_engine)[maintain_concurrency_lease.__name__] = _renewed


def _renewed(lease_id: UUID, lease_duration: float, **_: object) -> AbstractContextManager[None]:
    """Renew a slot for the duration of the block, which goes on without it if that fails."""
    return maintain_concurrency_lease(lease_id, lease_duration, suppress_warnings=True)
