"""Kills a controller at a point of its life: every effect that is wrapped is a point before and a point after it."""

from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """The controller was killed here."""


class Points:
    """Counts the points that a life of the controller passes, and ends it at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self._kill_at = kill_at
        self.passed = 0

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
        self.passed += 1
