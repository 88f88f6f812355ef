"""A controller on a fake scheduler, with a real history in SQLite and no waiting."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from control_fakes import FakeScheduler, make_run

from flows import stages
from flows.session import opened
from flows.stages import Session
from rlhf_core.config import Site, load_site
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.watch import Look


class Clock:
    """Monotonic seconds that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Notes:
    """An observer that remembers what it was told."""

    titles: list[str] = field(default_factory=list)
    sayings: list[str] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    stop: Callable[[], bool] = lambda: False

    def begins(self, title: str) -> None:
        self.titles.append(title)

    def looked(self, look: Look) -> None:
        self.looks.append(look)

    def says(self, text: str) -> None:
        self.sayings.append(text)

    def wants_to_stop(self) -> bool:
        return self.stop()


@dataclass
class Desk:
    """Where controllers of one site are started, one after the other."""

    site: Site
    scheduler: FakeScheduler
    store: HistoryStore
    clock: Clock
    notes: Notes
    _stack: ExitStack

    def run(self, spec: RunSpec | None = None) -> RunDir:
        """A new run."""
        return make_run(self.site.runs_dir, spec)

    def controller(self, run_dir: RunDir, *, resumed: bool = False) -> Session:
        """A controller of a run; let go of at the end of the test, or by the next one."""
        self._stack.close()
        session = self._stack.enter_context(
            opened(run_dir, self.site, self.store, self.notes, resumed=resumed, patience_s=0)
        )
        session.clock, session.sleep = self.clock, self.clock.sleep
        session.poll_s = 1.0
        return session


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    """What preflight finds; the test changes it."""
    found = [CheckResult(id="a.check", status=CheckStatus.PASSED, found="well")]
    monkeypatch.setattr(stages, "make_checks", lambda spec, around, tick: tuple(found))
    return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: list[CheckResult]) -> Iterator[Desk]:
    scheduler = FakeScheduler()
    monkeypatch.setattr("flows.session.get_scheduler", lambda name: scheduler)
    monkeypatch.setattr("flows.cancelling.get_scheduler", lambda name: scheduler)
    site = load_site({"RLHF_HOME": str(tmp_path / "site")})
    site.home.mkdir()
    with ExitStack() as stack, HistoryStore(site.database_url) as store:
        yield Desk(site, scheduler, store, Clock(), Notes(), stack)
