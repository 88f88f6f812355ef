"""The services that `rlhf up` started look at each other, and start again what has died.

Any one of them brings all others back; when all are killed at once, the next `rlhf up` does. Under systemd or in
containers that is their work, and nothing is done here. A service that dies again and again is started ever later.
"""

import subprocess
import time
from collections.abc import Callable, Mapping

from flows.services import END_PATIENCE_S, launch
from rlhf_core.config import Site
from rlhf_core.services import wanted
from rlhf_core.services.processes import OURS, ServiceState, ServiceStatus, alone, end, look

SILENT_S = 90.0
"""Silence after which a service is replaced. `rlhf up` waits less, since a person is there: a
machine that is busy, or was asleep, makes services silent that are well."""


class Restarter:
    """One service's look at the others."""

    def __init__(
        self,
        site: Site,
        name: str,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember nothing yet.

        Args:
            name: Of the service that looks.
            environment: Of the services that are started: as `rlhf up` had it.
            say: Told what is done.
        """
        self._site = site
        self._name = name
        self._environment = environment
        self._say = say
        self._clock = clock
        self._silent_since: dict[str, float] = {}
        self._children: list[subprocess.Popen[bytes]] = []

    def watch(self) -> None:
        """Look for ever; meant for a thread that ends with its process."""
        while True:
            time.sleep(self._site.prefect.restart_s)
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a full disk, say: it must not cost the site its restarts
                self._say(f"the other services could not be looked at: {type(error).__name__}: {error}")

    def look(self) -> list[str]:
        """Start again what has died; which were."""
        self._children = [one for one in self._children if one.poll() is None]  # an ended one is seen to be gone
        if not any(self._gone(name) for name in self._others()):
            return []
        with alone(self._site.home, wait=False) as is_alone:
            # Else `rlhf up`, `rlhf down` or another service is about to do something about it.
            return [name for name in self._others() if self._restarted(name)] if is_alone else []

    def _others(self) -> list[str]:
        return [name for name in wanted.read(self._site.home).services if name != self._name]

    def _gone(self, name: str) -> ServiceStatus | None:
        """State of a service that is to be started again; None where it is not."""
        found = look(self._site.home, name)
        if found.state is not ServiceState.SILENT:
            self._silent_since.pop(name, None)
            return found if found.state is ServiceState.STOPPED else None
        since = self._silent_since.setdefault(name, self._clock())
        assert found.record is not None
        is_ours = found.record.started_by == OURS
        return found if is_ours and self._clock() - since >= SILENT_S else None

    def _restarted(self, name: str) -> bool:
        found, now = self._gone(name), time.time()
        present = wanted.read(self._site.home)
        restarts = present.recent(name, now)
        if found is None or present.is_coming(name) or not wanted.is_due(restarts, now):
            return False
        if found.record is not None and found.state is ServiceState.SILENT:
            self._say(f"the {name} (process {found.pid}) has not answered for {SILENT_S:g} s and is ended")
            end(found.record, END_PATIENCE_S[name])
        process = launch(self._site, name, self._environment)
        self._children.append(process)
        wanted.note_restart(self._site.home, name, process.pid, now)
        again = f", the {len(restarts) + 1}. time within an hour" if restarts else ""
        self._say(f"the {name} is gone and is started again{again} (process {process.pid})")
        return True
