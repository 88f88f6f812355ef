"""Stages as Prefect tasks. Prefect shows them; it neither retries nor caches them, nor can its absence stop them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from prefect import task
from prefect.cache_policies import NO_CACHE

from rlhf_core.schemas.attempts import StageName


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
    """Carries stages out as task runs with readable names; plainly, once the server was lost."""

    say: Callable[[str], None]
    lost: bool = field(default=False, init=False)

    def __call__(self, title: str, name: StageName, do: Callable[[], None]) -> None:
        """Carry one stage out."""
        work = Work(do)
        if self.lost:
            work()
            return
        try:
            as_task(title, name, work)
        except Exception as error:  # noqa: BLE001 - whatever Prefect raises: training does not depend on it
            self.lost = work.error is None
            work.settle(error, self.say)


def as_task(title: str, name: StageName, work: Callable[[], None]) -> None:
    """One task run. Our own policy decides about retries, our own journal about what was done."""

    @task(
        name=name.value,
        task_run_name=title,
        cache_policy=NO_CACHE,
        retries=0,
        persist_result=False,
        description=f"The stage {name.value} of a run.",
    )
    def stage() -> None:
        work()

    stage()
