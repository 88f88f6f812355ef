"""A step of the controller as a Prefect task.

Prefect only displays the steps; it neither retries nor caches them, and they run without it too. Our own policy decides
about retries, and our own journal records the work done.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed, Failed

from flows.server.settings import server_answers
from rlhf_core.control.controller import CancelRequested
from rlhf_core.control.stages import StageFailed
from rlhf_core.control.steps import Step
from rlhf_core.control.trials import TRIAL
from rlhf_core.errors import RlhfError, RunCancelled
from rlhf_core.schemas.attempts import StageName
from rlhf_core.survival import Survived

MAX_TITLE = 160
"""Longest name of a task run, in characters, so that a long reason still fits a list."""


@dataclass
class TaskRunner:
    """Runs steps as task runs with readable names, or without Prefect while the server is unreachable."""

    log: Callable[[str], None]
    lost: bool = field(default=False, init=False)

    def run(self, step: Step) -> None:
        """Run one step, with or without Prefect. The step keeps its own error."""
        if self.lost and not server_answers():
            step.run()
            return
        self.lost = False
        with Survived() as failed:  # whatever Prefect raises: training does not depend on it
            as_task_run(step)
        if failed.error is not None:
            self.lost = True
            without_prefect(step, failed, self.log)


def without_prefect(step: Step, failed: Survived, log: Callable[[str], None]) -> None:
    """Recover from a Prefect error: run the step if it has not started."""
    if step.error is not None:
        return
    log(f"Prefect failed ({failed.problem}); the run continues without it")
    if not step.begun:
        step.run()


def shorten(text: str) -> str:
    """The first line of a text, shortened to fit a list."""
    first, _, more = text.partition("\n")
    return f"{first[: MAX_TITLE - 3]}..." if len(first) > MAX_TITLE or more else first


def as_task_run(step: Step) -> None:
    """Run a step as one task run. A failed state carries the error's message, which says more than a traceback."""

    def carried_out() -> State[None]:
        step.run()
        return _state_of(step)

    name = step.name
    kind = "A trial" if name == TRIAL else f"The stage {name}" if name in list(StageName) else "A wait between attempts"
    state = _task(step.title, name, f"{kind} of a run.", carried_out)(return_state=True)
    if not step.begun:
        raise RuntimeError(f"it did not begin the task run: {state.message}")


def _state_of(step: Step) -> State[None]:
    match step.error:
        case None:
            return Completed()
        case CancelRequested() | RunCancelled() as cancelled:
            return Cancelled(message=str(cancelled))
        case StageFailed(cancelled=True) as failed:
            return Cancelled(message=str(failed))
        case StageFailed() | RlhfError() as error:
            return Failed(message=str(error))
        case error:
            raise error  # a bug in this program: Prefect logs the traceback


def _task(title: str, name: str, description: str, do: Callable[[], State[None]]) -> Task[[], State[None]]:
    as_prefect_sees_it = task(
        name=str(name),
        # Prefect expands braces, and a reason may contain some from an error message.
        task_run_name=shorten(title).replace("{", "(").replace("}", ")"),
        cache_policy=NO_CACHE,
        retries=0,
        persist_result=False,
        description=description,
    )
    return as_prefect_sees_it(do)
