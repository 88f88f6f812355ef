"""Tells Prefect, by a thread of its own, how a run is getting on.

Neither a server that is away nor one that never answers may hold a controller, which has a lease to keep. What could
not be told is told later, when the server is back, or never; the run directory and the history have it all.
"""

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prefect import get_run_logger, runtime

from flows.server import server_answers
from flows.view.curves import Curves
from flows.view.events import FlowRun
from flows.view.incidents import decided
from flows.view.parts import (
    Checks,
    CurvesPicture,
    Events,
    Incidents,
    Part,
    Progress,
    Restarts,
    Result,
    is_restart,
    place_of,
)
from flows.view.progress import Seen, furthest_step
from flows.view.story import Story, read_story
from rlhf_core.control.controller import Controller, Observer
from rlhf_core.escaping import terminal
from rlhf_core.launch.journal import RunRecord
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.journal import RunMoved
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.watcher import AttemptSnapshot

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

PULSE_S = 5.0
"""How often is looked for something new when nobody says that there is."""

AGAIN_S = 10.0
"""Pause after Prefect could not be told."""

FAREWELL_S = 20.0
"""How long the end of a run waits for what is still to be told."""

LAST_TRIES, LAST_PAUSE_S = 3, 1.0
"""How often the end is told to a server that does not take it, and the pause between."""

_LOGGED_EVENTS = frozenset({"suspect", "checkpoint", "file", "killed", "command", "save_requested", "verdict"})
"""Doings of the agents that stand in the log; their incidents and decisions are logged whole."""


@contextmanager
def shown_in_prefect(controller: Controller) -> Iterator[None]:
    """Show the run in Prefect for as long as the block lasts. Use it in the flow run."""
    log = get_run_logger()
    seen, lock = Seen(controller.spec), threading.Lock()
    flow_run = FlowRun(str(runtime.flow_run.id or ""), controller.run_dir.run_id)
    begun = _begun(controller.run_dir)
    parts: list[Part] = [
        Events(controller.stored, flow_run),
        Progress(seen, lock),
        Incidents(),
        Checks(controller.run_dir),
        Restarts({place_of(told) for told in begun.decisions if is_restart(told)}),
        Result(controller.store),
        # Last: it takes the longest.
        CurvesPicture(Curves(controller.run_dir), seen, lock),
    ]
    teller = Teller(controller.run_dir, parts, controller.observer.says, Chronicle(log, begun))
    teller.before = lambda: _catch_up(seen, controller.run_dir)
    observer, controller.observer = controller.observer, _Onlooker(controller.observer, teller, seen, lock, log)
    teller.start()
    try:
        yield
    finally:
        controller.observer = observer
        # Another controller tells the rest of a run that was taken over.
        teller.close(farewell=not controller.lease_lost)


def _begun(run_dir: RunDir) -> Story:
    """What had happened before; nothing, where a file system that does not answer for a moment would cost the run."""
    try:
        return read_story(run_dir)
    except OSError:
        return Story(run_dir, (), RunRecord(), (), ())


def _catch_up(seen: Seen, run_dir: RunDir) -> None:
    seen.furthest = max(seen.furthest, furthest_step(run_dir))


class _Onlooker:
    """Hands everything on to the observer behind it, logs what a person should read, and has the teller look."""

    def __init__(self, behind: Observer, teller: "Teller", seen: Seen, lock: threading.Lock, log: Log) -> None:
        self._behind = behind
        self._teller = teller
        self._seen = seen
        self._lock = lock
        self._log = log

    def turns_to(self, spec: RunSpec) -> None:
        """Follow a run with this spec from now on."""
        with self._lock:
            self._seen.turns_to(spec)
        self._behind.turns_to(spec)

    def begins(self, title: str) -> None:
        """A stage begins."""
        with self._lock:
            self._seen.title = title
        self._log.info("begins: %s", terminal(title))
        self._teller.look()
        self._behind.begins(title)

    def looked(self, look: AttemptSnapshot) -> None:
        """The watchdog has looked."""
        with self._lock:
            self._seen.saw(look)
        for event in look.events:
            if event.kind in _LOGGED_EVENTS:
                self._log.warning("%s", terminal(f"{event.node}: {event.message}"))
        self._teller.look()
        self._behind.looked(look)

    def says(self, text: str) -> None:
        """Show a message to the user: for instance, that an attempt has ended."""
        self._log.log(logging.WARNING if text.startswith("warning ") else logging.INFO, "%s", terminal(text))
        self._teller.look()
        self._behind.says(text)

    def wants_to_stop(self) -> bool:
        """True if the user has asked to end the run."""
        return self._behind.wants_to_stop()


class Chronicle:
    """Writes into the log of the flow run what happened since it began. A log line is only queued: it holds nobody."""

    def __init__(self, log: Log, begun: Story) -> None:
        self._log = log
        self._begun = self._entries(begun).keys()

    def write(self, story: Story) -> None:
        """Log what is new."""
        entries = self._entries(story)
        for key, entry in entries.items():
            if key not in self._begun:
                self._log.log(*entry)
        self._begun = entries.keys()

    @staticmethod
    def _entries(story: Story) -> dict[object, tuple[int, str, str]]:
        moved = [line for line in story.lines if isinstance(line.event, RunMoved)]
        entries: dict[object, tuple[int, str, str]] = {}
        for line in moved:
            assert isinstance(line.event, RunMoved)
            text = terminal(f"run is {line.event.state.value}: {line.event.cause}")
            entries[(line.token, line.sequence)] = (logging.INFO, "%s", text)
        for told in story.incidents:
            entries[(told.run_dir, told.incident.seen_at)] = (
                logging.ERROR,
                "%s",
                terminal(f"{told.incident.failure_kind.value}: {told.incident.message}"),
            )
        for made in story.decisions:
            text = f"decided by the {made.decision.decided_by.value}: {decided(made.decision, terminal)}"
            entries[(made.run_dir, made.decision.decided_at)] = (logging.WARNING, "%s", text)
        return entries


class Teller:
    """The thread that tells Prefect."""

    def __init__(
        self, run_dir: RunDir, parts: Sequence[Part], say: Callable[[str], None], chronicle: Chronicle
    ) -> None:
        """Made in a flow run, to which what it tells will belong.

        Args:
            run_dir: The run.
            parts: What is shown, in the order in which it is told.
            say: Told, once per outage, that Prefect does not listen.
            chronicle: Writes the log.
        """
        self.before: Callable[[], None] = lambda: None
        """What the thread does first."""
        self._run_dir = run_dir
        self._parts = parts
        self._say = say
        self._chronicle = chronicle
        self._something = threading.Event()
        self._over = threading.Event()
        self._farewell = True
        self._silent = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="prefect-teller", daemon=True)

    def start(self) -> None:
        """Begin, with what there is already."""
        self._something.set()
        self._thread.start()

    def look(self) -> None:
        """There may be something new. Never blocks."""
        self._something.set()

    def close(self, *, farewell: bool = True) -> None:
        """Tell what is left, but not for long.

        Args:
            farewell: False to tell nothing more.
        """
        self._farewell = farewell
        self._over.set()
        self._something.set()
        self._thread.join(timeout=FAREWELL_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self.before()
        while not self._over.is_set():
            self._something.wait(timeout=PULSE_S)
            self._something.clear()
            if not self._over.is_set() and not self._tells(last=False):
                self._something.set()
                self._over.wait(AGAIN_S)
        for again in range(LAST_TRIES if self._farewell else 0):
            if again:
                threading.Event().wait(LAST_PAUSE_S)
            if self._tells(last=True):
                return

    def _tells(self, *, last: bool) -> bool:
        """Tell what is due; whether Prefect took it all."""
        try:
            self._tell(last=last)
        except Exception as error:  # noqa: BLE001 - whatever Prefect raises must not end the telling
            if not self._silent:
                self._silent = True
                with contextlib.suppress(Exception):
                    self._say(f"Prefect could not be told how the run gets on: {type(error).__name__}: {error}")
            return False
        self._silent = False
        return True

    def _tell(self, *, last: bool) -> None:
        story = read_story(self._run_dir)
        self._chronicle.write(story)
        due = [telling for part in self._parts if (telling := part.due(story, last=last)) is not None]
        if not due:
            return
        # Prefect's own client tries again for a minute.
        if not server_answers():
            raise ConnectionError("its server does not answer")
        failures = []
        for telling in due:
            try:
                telling()
            except Exception as error:  # noqa: BLE001 - one part that Prefect does not take leaves the others alone
                failures.append(error)
        if failures:
            raise failures[0]
