"""A step of the controller as a Prefect task.

Prefect shows the steps; it neither retries nor caches them, and its absence does not stop them: our own policy decides
about retries, our own journal says what was done.
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
"""Longest name of a task run, in characters: a reason can be longer than a list has room for."""


@dataclass
class TaskRunner:
    """Carries steps out as task runs with readable names; plainly, for as long as the server is lost."""

    say: Callable[[str], None]
    lost: bool = field(default=False, init=False)

    def run(self, step: Step) -> None:
        """Carry one step out, with or without Prefect. Its own error stays in the step."""
        if self.lost and not server_answers():
            step.run()
            return
        self.lost = False
        with Survived() as failed:  # whatever Prefect raises: training does not depend on it
            as_task_run(step)
        if failed.error is not None:
            self.lost = True
            without_prefect(step, failed, self.say)


def without_prefect(step: Step, failed: Survived, say: Callable[[str], None]) -> None:
    """Go on after an error of Prefect: carry the step out, where it was not begun."""
    if step.error is not None:
        return
    say(f"Prefect failed ({failed.problem}); the run goes on without it")
    if not step.begun:
        step.run()


def shorten(text: str) -> str:
    """The first line of a text, at a length that fits a list."""
    first, _, more = text.partition("\n")
    return f"{first[: MAX_TITLE - 3]}..." if len(first) > MAX_TITLE or more else first


def as_task_run(step: Step) -> None:
    """Carry a step out as one task run. Its state has the message of a failure, which tells more than the place in this
    program where it was raised."""

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
            raise error  # a mistake in this program: Prefect logs where it was raised


def _task(title: str, name: str, description: str, do: Callable[[], State[None]]) -> Task[[], State[None]]:
    as_prefect_sees_it = task(
        name=str(name),
        # Prefect fills in braces; a reason may hold some, from the text of an error.
        task_run_name=shorten(title).replace("{", "(").replace("}", ")"),
        cache_policy=NO_CACHE,
        retries=0,
        persist_result=False,
        description=description,
    )
    return as_prefect_sees_it(do)
