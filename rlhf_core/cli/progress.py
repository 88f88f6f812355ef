"""What a person sees while a run is driven: a live bar in a terminal, plain lines in a pipe or a log file.

It also turns Ctrl-C into a question: training runs in sessions of its own and does not notice the key.
"""

import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rlhf_core.cli import output
from rlhf_core.escaping import terminal
from rlhf_core.schemas.reports import AgentEvent
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.watch import Look

LINE_EVERY_S = 5.0
"""How often a plain line is written where there is no terminal."""

_TOLD_EVENTS = frozenset(
    {"suspect", "incident", "decision", "checkpoint", "file", "killed", "command", "save_requested"}
)
"""Doings of the agents that a person wants to read as they happen."""


class Pace:
    """Steps per second over the last looks, for the time that is left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=60)

    def saw(self, step: int) -> None:
        """Take note of the last step that was done."""
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # rewound to a checkpoint
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((self._clock(), step))

    def left_s(self, steps: int) -> float | None:
        """Seconds that so many steps will take; None when not known yet."""
        if len(self._seen) < 2:
            return None
        (first_time, first_step), (last_time, last_step) = self._seen[0], self._seen[-1]
        return steps * (last_time - first_time) / (last_step - first_step)


def describe(look: Look, spec: RunSpec, pace: Pace) -> str:
    """One look in one line: what is done, how far it is, how well, how fast, how long still."""
    parts = [f"step {look.step}/{spec.total_steps}"]
    if look.evaluating:
        parts = ["evaluating"]
    elif look.loop:
        parts[0] = f"{look.loop} {parts[0]}"
        parts += figures(look)
        left = pace.left_s(spec.total_steps - look.step)
        if left is not None and look.step < spec.total_steps:
            parts.append(f"{output.seconds_text(left)} left")
    else:
        parts = [waiting_for(look)]
    if look.restarts_made:
        parts.append(f"restart {look.restarts_made}")
    return ", ".join(parts)


def figures(look: Look) -> list[str]:
    """The metrics worth a glance."""
    metrics = look.metrics
    found = []
    if "reward/mean" in metrics:
        found.append(f"reward {metrics['reward/mean']:.3f}")
    elif "train/loss" in metrics:
        found.append(f"loss {metrics['train/loss']:.3f}")
    if "speed/tokens_per_s" in metrics:
        found.append(f"{metrics['speed/tokens_per_s']:,.0f} tokens/s")
    return found


def waiting_for(look: Look) -> str:
    """What happens before the first step."""
    if look.role is None:
        return f"waiting for nodes: {look.job.reason}" if look.job.reason else "starting"
    return f"{look.role.value} starts" if look.phase in ("", "setup") else f"{look.role.value}: {look.phase}"


class TerminalProgress:
    """The observer of ``rlhf run`` and ``rlhf resume``. Use it in a ``with``.

    Args:
        spec: what was asked for.
        run_id: the run, for the advice that is printed.
        confirm: asks a person a yes-or-no question; None takes Ctrl-C for a yes.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        confirm: Callable[[str], bool] | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._run_id = run_id
        self._confirm = confirm
        self._console = console or output.errors()
        self._clock = clock
        self._pace = Pace(clock)
        self._title = ""
        self._interrupts = 0
        self._stopping = False
        self._behind = ""
        self._last_line = ("", float("-inf"))
        self._live = _live_bar(self._console) if self._console.is_terminal else None
        self._bar = self._live.add_task("begins", total=spec.total_steps, text="") if self._live else None
        self._previous_handler: Any = None

    def __enter__(self) -> Self:
        self._previous_handler = signal.signal(signal.SIGINT, self._interrupted)
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        signal.signal(signal.SIGINT, self._previous_handler)

    # What the flow calls ---------------------------------------------------------------------------------------------

    def turns_to(self, spec: RunSpec) -> None:
        """What follows is about a run with this spec: its steps, and its pace."""
        self._spec, self._pace = spec, Pace(self._clock)
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, total=spec.total_steps, completed=0)

    def begins(self, title: str) -> None:
        """A stage begins."""
        self._title = title
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, description=escape(terminal(title)), text="")
        else:
            self._line(title)

    def looked(self, look: Look) -> None:
        """The watchdog has looked: show how far it is, and tell what happened."""
        for event in look.events:
            self._tell(event)
        self._tell_history(look.history_behind)
        self._pace.saw(look.step)
        text = terminal(describe(look, self._spec, self._pace))
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, completed=look.step, text=escape(text))
        elif self._clock() - self._last_line[1] >= LINE_EVERY_S and text != self._last_line[0]:
            self._line(f"{self._title}: {text}")
            self._last_line = (text, self._clock())

    def says(self, text: str) -> None:
        """Something a person should read."""
        self._line(text)

    def wants_to_stop(self) -> bool:
        """Whether Ctrl-C was pressed, and meant."""
        if not self._interrupts or self._stopping:
            return self._stopping
        self._stopping = self._confirm is None or self._ask()
        self._interrupts = 0
        return self._stopping

    # -----------------------------------------------------------------------------------------------------------------

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1 or self._stopping:
            # Once more, while the first is being answered or carried out: leave at once, with everything as it is.
            raise KeyboardInterrupt

    def _ask(self) -> bool:
        assert self._confirm is not None
        if self._live:
            self._live.stop()
        try:
            return self._confirm(f"Cancel run {self._run_id}?")
        except KeyboardInterrupt:
            return True
        finally:
            if self._live:
                self._live.start()

    def _tell(self, event: AgentEvent) -> None:
        # A compilation that goes on has no result yet; what comes of it is said by what follows.
        compiling = event.kind == "prebuild" and not event.data
        if event.kind in _TOLD_EVENTS or compiling:
            self._line(f"{event.node}: {event.message}")

    def _tell_history(self, behind: str) -> None:
        if behind and not self._behind:
            self._line(f"history behind: {behind.rstrip('.')}. Training goes on; nothing is lost.")
        elif self._behind and not behind:
            self._line("history is up to date again")
        self._behind = behind

    def _line(self, text: str) -> None:
        console = self._live.console if self._live else self._console
        console.print(terminal(text), markup=False, highlight=False, soft_wrap=True)


def ask_person(question: str) -> bool:
    """Ask at the terminal; anything but yes is no."""
    sys.stderr.write(f"{question} It goes on otherwise. [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def person_at_terminal() -> Callable[[str], bool] | None:
    """How to ask, when there is somebody to ask."""
    return ask_person if sys.stdin.isatty() and sys.stderr.isatty() else None


def _live_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
        transient=True,
    )
