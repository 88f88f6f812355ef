"""Kill points of a controller: each wrapped effect has one point before and one after it."""

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
    """Counter of the kill points that a controller passes; kills the controller at the selected one."""

    def __init__(self, kill_at: int | None, left_behind: Callable[[], bytes] = lambda: b"") -> None:
        self._kill_at = kill_at
        self._left_behind = left_behind
        self._seen: list[bytes] = []
        self.passed = 0

    @property
    def is_deadly(self) -> bool:
        """True if the controller is killed at one of the points."""
        return self._kill_at is not None

    @property
    def distinct(self) -> list[int]:
        """The points at which a kill leaves a different state than at the point before.

        Kills anywhere between two consecutive effects are equivalent.
        """
        return [point for point, seen in enumerate(self._seen) if point == 0 or seen != self._seen[point - 1]]

    def around(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an effect with a kill point before and after it."""

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
        """Kill points around every effect of a controller: journal, files written by these modules, scheduler."""
        with pytest.MonkeyPatch.context() as patch:
            for module in writers:
                patch.setattr(module, "write_model", self.around(module.write_model))
            patch.setattr(Journal, "_write", self.around(Journal._write))
            patch.setattr(Path, "rename", self.around(Path.rename))
            for name in ("find", "submit", "cancel"):
                patch.setattr(scheduler, name, self.around(getattr(scheduler, name)))
            yield
