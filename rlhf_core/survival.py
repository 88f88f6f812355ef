"""Recovery from errors that cannot be named beforehand: those of Prefect's client, of a plug-in of a site or a user, of
a complete iteration of a thread that must live on, or of work whose outcome is reported elsewhere.

Every use has a plan for the error. Where its kinds are known, they are named there, and this is not used.
"""

import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

from rlhf_core.errors import RlhfError


class Survived:
    """Block whose exceptions are kept, so that its thread goes on. A cancellation and the exit of the process still
    propagate.

    Args:
        but: Errors that propagate as well.
        also: Further exceptions to survive, such as the ``SystemExit`` of an imported module.
    """

    def __init__(self, *, but: tuple[type[Exception], ...] = (), also: tuple[type[BaseException], ...] = ()) -> None:
        self.error: BaseException | None = None
        """Error of the block; None if it raised none."""
        self._goes_up = but
        self._kinds: tuple[type[BaseException], ...] = (Exception, *also)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> bool:
        if not isinstance(error, self._kinds) or isinstance(error, self._goes_up):
            return False
        self.error = error
        return True

    @property
    def problem(self) -> str:
        """Kind and text of the error; empty if there was none."""
        return f"{type(self.error).__name__}: {self.error}" if self.error is not None else ""

    @property
    def message(self) -> str:
        """The same, without the kind if the text was written to be read alone."""
        return str(self.error) if isinstance(self.error, RlhfError | OSError) else self.problem

    @property
    def trace(self) -> str:
        """Traceback of the error; empty if there was none."""
        return "".join(traceback.format_exception(self.error)) if self.error is not None else ""


def relative_path_advice(error: BaseException | None) -> str:
    """Advice about user code that does not find a file by its relative path, as the end of a sentence; empty for other
    errors. The code of a run is copied, and is not started in the folder where it was written."""
    path = error.filename if isinstance(error, FileNotFoundError) else None
    if not isinstance(path, str) or Path(path).is_absolute():
        return ""
    return "; code of a run does not start in your folder: use an absolute path, or see code.paths"
