"""Services that `rlhf up` has started and `rlhf down` has not ended, and their restarts.

One file, ``services/wanted.json``. Only the holder of the lock of
:func:`rlhf_core.services.processes.alone` writes it.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_core.run_dir import read_model, write_model
from rlhf_core.schemas.base import Schema
from rlhf_core.services.processes import started_ticks

FIRST_PAUSE_S = 5.0
"""Pause before the second restart of a service that died again; doubled with each further one."""

LONGEST_PAUSE_S = 300.0
"""The longest such pause."""

RECENT_S = 3600.0
"""Time for which a restart counts."""


class Launched(Schema):
    """A process that was started to be a service, and may not be it yet."""

    pid: int
    started_ticks: int


class Wanted(Schema):
    """``services/wanted.json``."""

    services: tuple[str, ...] = ()
    restarts: Mapping[str, tuple[float, ...]] = {}
    """Times at which each service was started again within the last hour; in seconds since 1970."""
    launched: Mapping[str, Launched] = {}
    """The newest restart of each."""

    def recent(self, name: str, now: float) -> tuple[float, ...]:
        """Restarts of a service that count."""
        return tuple(at for at in self.restarts.get(name, ()) if 0 <= now - at < RECENT_S)

    def is_coming(self, name: str) -> bool:
        """True if a process that was started to be the service lives: it takes seconds until it is the service."""
        one = self.launched.get(name)
        return one is not None and started_ticks(one.pid) == one.started_ticks


def pause_s(restarts: Sequence[float]) -> float:
    """Pause after the last of its recent restarts before a service may be started again."""
    return 0.0 if not restarts else min(FIRST_PAUSE_S * 2.0 ** min(len(restarts) - 1, 10), LONGEST_PAUSE_S)


def is_due(restarts: Sequence[float], now: float) -> bool:
    """True if a service that has died may be started again."""
    return not restarts or now - restarts[-1] >= pause_s(restarts)


def read(home: Path) -> Wanted:
    """Services that are wanted; none where `rlhf up` was never called."""
    return read_model(_file(home), Wanted) or Wanted()


def add(home: Path, names: Sequence[str]) -> None:
    """`rlhf up` starts these: they are to be there from now on, and what was tried before does not count."""
    present = read(home)
    services = (*present.services, *(name for name in names if name not in present.services))
    kept = {name: at for name, at in present.restarts.items() if name not in names}
    write_model(_file(home), present.model_copy(update={"services": services, "restarts": kept}))


def remove(home: Path, names: Sequence[str]) -> None:
    """`rlhf down` ends these: they are not to come back."""
    present = read(home)
    services = tuple(name for name in present.services if name not in names)
    write_model(_file(home), present.model_copy(update={"services": services}))


def note_restart(home: Path, name: str, pid: int, now: float | None = None) -> None:
    """A service was started again, as a process that is still alive or gone already."""
    now = time.time() if now is None else now
    present = read(home)
    restarts = {**present.restarts, name: (*present.recent(name, now), now)}
    launched = {**present.launched, name: Launched(pid=pid, started_ticks=started_ticks(pid) or 0)}
    write_model(_file(home), present.model_copy(update={"restarts": restarts, "launched": launched}))


def _file(home: Path) -> Path:
    return home / "services" / "wanted.json"
