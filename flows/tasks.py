"""Stages as Prefect tasks. Prefect shows them; it neither retries nor caches them, nor can its absence stop them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed, Failed

from flows.session import CancelAsked
from flows.site.server import server_answers
from flows.stages import AttemptFailed
from flows.trial import TRIAL
from rlhf_core.errors import RlhfError, RunCancelled
from rlhf_core.schemas.attempts import StageName

MAX_TITLE = 160
"""Longest name of a task run, in characters: a reason can be longer than a list has room for."""


@dataclass
class Work:
    """A piece of work that is done at most once, and remembers how it ended."""

    do: Callable[[], None]
    begun: bool = False
    done: bool = False
    error: BaseException | None = None

    def __call__(self) -> None:
        """Do it."""
        self.begun = True
        try:
            self.do()
        except BaseException as error:
            self.error = error
            raise
        self.done = True

    def settle(self, prefect_error: Exception, say: Callable[[str], None]) -> None:
        """Make good an error that came out of Prefect: raise it if it was our own, do the work if it was not begun."""
        if self.error is not None:
            raise self.error
        say(f"Prefect failed ({type(prefect_error).__name__}: {prefect_error}); the run goes on without it")
        if not self.begun:
            self()


@dataclass
class TaskCaller:
    """Carries stages out as task runs with readable names; plainly, for as long as the server is lost."""

    say: Callable[[str], None]
    lost: bool = field(default=False, init=False)

    def __call__(self, title: str, name: str, do: Callable[[], None]) -> None:
        """Carry one stage, or one wait, out."""
        work = Work(do)
        if self.lost and not server_answers():
            work()
            return
        self.lost = False
        try:
            as_task(title, name, work)
        except Exception as error:  # noqa: BLE001 - whatever Prefect raises: training does not depend on it
            self.lost = work.error is None
            work.settle(error, self.say)


def shorten(text: str) -> str:
    """The first line of a text, at a length that fits a list."""
    first, _, more = text.partition("\n")
    return f"{first[: MAX_TITLE - 3]}..." if len(first) > MAX_TITLE or more else first


def as_task(title: str, name: str, work: Work) -> None:
    """One task run. Our own policy decides about retries, our own journal about what was done.

    What a person needs to know of a failure is its message, not the place in this program where it was raised: the
    state of the task run says it.
    """

    def stage() -> State[None]:
        try:
            work()
        except (CancelAsked, RunCancelled) as cancelled:
            return Cancelled(message=str(cancelled))
        except AttemptFailed as failed:
            return Cancelled(message=str(failed)) if failed.cancelled else Failed(message=str(failed))
        except RlhfError as error:
            return Failed(message=str(error))
        return Completed()

    kind = "A trial" if name == TRIAL else f"The stage {name}" if name in list(StageName) else "A wait between attempts"
    state = _task(title, name, f"{kind} of a run.", stage)(return_state=True)
    if work.error is not None:
        raise work.error
    if not work.begun:
        raise RuntimeError(f"it did not begin the task run: {state.message}")


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
