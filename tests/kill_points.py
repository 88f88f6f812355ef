"""Kills of a controller at a point of its life: every wrapped effect is a point before and a point after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.launch.journal import Journal


class Killed(BaseException):
    """The controller was killed here."""


class Points:
    """Counter of the points that a controller passes, which kills it at one of them."""

    def __init__(self, kill_at: int | None, left_behind: Callable[[], bytes] = lambda: b"") -> None:
        self._kill_at = kill_at
        self._left_behind = left_behind
        self._seen: list[bytes] = []
        self.passed = 0

    @property
    def is_deadly(self) -> bool:
        """True if it kills at one of them."""
        return self._kill_at is not None

    @property
    def distinct(self) -> list[int]:
        """The points at which a kill leaves something else behind than at the point before: a kill between one effect
        and the next is the same kill, wherever there."""
        return [point for point, seen in enumerate(self._seen) if point == 0 or seen != self._seen[point - 1]]

    def around(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        """The effect, with a point before and a point after it."""

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            self._pass()
            answer = effect(*arguments, **keywords)
            self._pass()
            return answer

        return wrapped

    def _pass(self) -> None:
        if self.passed == self._kill_at:
            raise Killed
        self._seen.append(self._left_behind())
        self.passed += 1

    @contextmanager
    def at_every_effect(self, scheduler: Any, *writers: ModuleType) -> Iterator[None]:
        """Points around all that a controller does to the world: journal, files that these modules write, scheduler."""
        with pytest.MonkeyPatch.context() as patch:
            for module in writers:
                patch.setattr(module, "write_model", self.around(module.write_model))
            patch.setattr(Journal, "_write", self.around(Journal._write))
            patch.setattr(Path, "rename", self.around(Path.rename))
            for name in ("find", "submit", "cancel"):
                patch.setattr(scheduler, name, self.around(getattr(scheduler, name)))
            yield
