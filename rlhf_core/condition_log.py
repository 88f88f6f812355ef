"""Log lines about conditions that a loop finds again at every poll, such as an outage: one when a condition begins."""

from collections.abc import Callable, Hashable


class ConditionLog:
    """Log of a condition, or of several with a name each."""

    def __init__(self, log: Callable[[str], None]) -> None:
        """Args:
        log: Called with each line.
        """
        self._log = log
        self._logged: dict[Hashable, str] = {}

    def log_once(self, line: str, condition: Hashable = "") -> None:
        """Log the first line about a condition, and none of the later ones until :meth:`end`."""
        if condition not in self._logged:
            self.log_change(line, condition)

    def log_change(self, line: str, condition: Hashable = "") -> None:
        """Log a line unless it repeats the last one about the condition."""
        if self._logged.get(condition) != line:
            self._logged[condition] = line
            self._log(line)

    def end(self, condition: Hashable = "") -> None:
        """Record that a condition has ended: its next line is logged again."""
        self._logged.pop(condition, None)
