"""The limit ``rlhf-runs``: how many runs may be driven at the same time, over all machines. Prefect keeps it.

Make a global concurrency limit of this name, in the UI or with ``prefect gcl create``, and change it there at any time.
Without it there is none.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from flows.server.settings import server_answers
from rlhf_core.control.controller import CancelRequested, Controller
from rlhf_core.errors import LeaseLost
from rlhf_core.schemas.attempts import RunState
from rlhf_core.survival import Survived

LIMIT = "rlhf-runs"
"""Name of the global concurrency limit."""

RETRY_INTERVAL_S = 3.0
"""Pause between two tries to get a place."""

ANSWER_TIMEOUT_S = 20.0
"""Time for the server to say whether there is a place; after that the run goes on without one."""

PLACE_TTL_S = 90
"""Time for which Prefect keeps a place for a controller that has died, in seconds."""

_LOCKED = 423
"""HTTP status of Prefect's server where all places are taken."""


@contextmanager
def run_slot(controller: Controller) -> Iterator[Callable[[], None]]:
    """Hold one of the places for the block, once there is one. The lease on the run is kept while it waits.

    Yields what gives the place back earlier: a completed run that waits days for an approval is not at work. One that
    is completed already takes none.

    Raises:
        LeaseLost: another controller has the run.
    """
    completed = controller.journal.record.state is RunState.COMPLETED
    place = _Place() if not completed and server_answers() else None
    with ExitStack() as stack:
        if place is not None:
            stack.callback(place.give_back)
            _wait(controller, place)
        yield stack.close


def _wait(controller: Controller, place: "_Place") -> None:
    """Wait for a place. A request to end the run is answered by the first step, which begins at once then."""
    until = controller.clock() + ANSWER_TIMEOUT_S
    told = False
    try:
        while not place.decided.is_set() and (place.full or controller.clock() < until):
            if place.full and not told:
                told = True
                controller.observer.log(f"waits for a place: the limit {LIMIT} of Prefect is reached")
            controller.wait(0.2)
    except CancelRequested:
        return
    except LeaseLost:
        controller.lease_lost = True
        raise
    if place.failure or not place.decided.is_set():
        why = place.failure or f"no answer within {ANSWER_TIMEOUT_S:g} s"
        controller.observer.log(f"the limit {LIMIT} of Prefect could not be asked ({why}); the run goes on without it")


class _Place:
    """A thread that gets a place, holds it, and gives it back: a server that never answers holds no run up."""

    def __init__(self) -> None:
        self.decided = threading.Event()
        """Set once a place is held, none is needed, or none can be had."""
        self.full = False
        self.failure = ""
        self._over = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="run-slot", daemon=True)
        self._thread.start()

    def give_back(self) -> None:
        """Let go of it."""
        self._over.set()
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
        while not self._over.is_set():
            try:
                with concurrency(
                    LIMIT, max_retries=0, lease_duration=PLACE_TTL_S, strict=False, raise_on_lease_renewal_failure=False
                ):
                    self.decided.set()
                    self._over.wait()
                return
            except Exception as error:
                if not _is_full(error):
                    raise
            self.full = True
            self._over.wait(RETRY_INTERVAL_S)


def _limit_is_there() -> bool:
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(LIMIT)
        except ObjectNotFound:
            return False
    return True


def _is_full(error: BaseException) -> bool:
    response = getattr(error.__cause__, "response", None)
    return getattr(response, "status_code", None) == _LOCKED
