"""Progress of a run that this process drives: a live bar in a terminal, plain lines in a pipe or a log file.

Ctrl-C leads to a question: training runs in separate sessions, which the signal does not reach.
"""

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rlhf_core.cli import output
from rlhf_core.control.controller import Observer
from rlhf_core.control.views.progress import StepTimer, progress_of_poll
from rlhf_core.render.progress import progress_text
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.escaping import terminal
from rlhf_core.watchdog.watcher import AttemptSnapshot

LINE_EVERY_S = 5.0
"""Minimum time between two plain lines, in seconds."""

_SHOWN_EVENTS = frozenset(
    {"suspect", "incident", "decision", "checkpoint", "file", "killed", "command", "save_requested"}
)
"""Events of the agents that are printed as they happen."""


class TerminalProgress(Observer):
    """The observer of ``rlhf run`` and ``rlhf resume``. Use it in a ``with``.

    Args:
        spec: spec of the run.
        run_id: id of the run, for the messages.
        confirm: asks a yes-or-no question at the terminal; None to cancel on Ctrl-C without asking.
    """

    def __init__(self, spec: RunSpec, run_id: str, confirm: Callable[[str], bool] | None = None) -> None:
        self._spec = spec
        self._run_id = run_id
        self._confirm = confirm
        self._console = output.errors()
        self._timer = StepTimer()
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

    # Observer of a controller ----------------------------------------------------------------------------------------

    def follow(self, spec: RunSpec) -> None:
        """Show a run with another spec from now on: a trial, or the run itself again."""
        self._spec, self._timer = spec, StepTimer()
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, total=spec.total_steps, completed=0)

    def stage_started(self, title: str) -> None:
        """Show the start of a stage."""
        self._title = title
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, description=escape(terminal(title)), text="")
        else:
            self._line(title)

    def polled(self, snapshot: AttemptSnapshot) -> None:
        """Show the progress after a poll, and print its events."""
        for event in snapshot.events:
            if event.kind in _SHOWN_EVENTS:
                self._line(f"{event.node}: {event.message}")
        self._print_history(snapshot.history_behind)
        text = terminal(progress_text(progress_of_poll(snapshot, self._spec, self._timer)))
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, completed=snapshot.progress.step, text=escape(text))
        elif time.monotonic() - self._last_line[1] >= LINE_EVERY_S and text != self._last_line[0]:
            self._line(f"{self._title}: {text}")
            self._last_line = (text, time.monotonic())

    def log(self, text: str) -> None:
        """Print a message."""
        self._line(text)

    def stop_requested(self) -> bool:
        """True if Ctrl-C was pressed and confirmed."""
        if not self._interrupts or self._stopping:
            return self._stopping
        self._stopping = self._confirm is None or self._confirm_cancellation()
        self._interrupts = 0
        return self._stopping

    # -----------------------------------------------------------------------------------------------------------------

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1 or self._stopping:
            # Pressed again while the first is being confirmed or carried out: exit at once and leave the run as it is.
            raise KeyboardInterrupt

    def _confirm_cancellation(self) -> bool:
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

    def _print_history(self, behind: str) -> None:
        if behind and not self._behind:
            self._line(f"history behind: {behind.rstrip('.')}. Training continues; nothing is lost.")
        elif self._behind and not behind:
            self._line("history is up to date again")
        self._behind = behind

    def _line(self, text: str) -> None:
        console = self._live.console if self._live else self._console
        console.print(terminal(text), markup=False, highlight=False, soft_wrap=True)


def prompt_user(question: str) -> bool:
    """Ask a question at the terminal; any answer but yes means no."""
    sys.stderr.write(f"{question} Otherwise it continues. [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def terminal_prompt() -> Callable[[str], bool] | None:
    """Return the function that asks at the terminal; None without a terminal."""
    return prompt_user if sys.stdin.isatty() and sys.stderr.isatty() else None


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
