"""One controller per run: acquiring, keeping, losing and waiting for the lease."""

import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from control_fakes import Clock
from history_tools import postgres
from process_tools import until

from rlhf_core.errors import DatabaseUnavailable, LeaseLost
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import TTL_S, HeldLease, IfHeld, Owner, acquire, known_dead, refuse_if_driven
from rlhf_core.machine.accounts import user_name

RUN = "small-20260101-000000-abcdef"


def test_an_owner_survives_serialization() -> None:
    owner = Owner.this_process()
    assert Owner.parse(str(owner)) == replace(owner, started=round(owner.started, 2))
    assert Owner.parse(str(replace(owner, mark=""))) == replace(owner, started=round(owner.started, 2), mark="")
    assert Owner.parse("somebody else") is None


def test_a_user_of_a_domain_is_known_on_its_host() -> None:
    """SSSD gives users of a domain names such as anna@corp.example."""
    here = replace(Owner.this_process(), user="anna@corp.example")
    found = Owner.parse(str(here))
    assert found is not None
    assert (found.user, found.host) == (here.user, here.host)
    assert known_dead(str(replace(here, started=here.started - 3600, mark="")))


def test_this_process_is_not_dead() -> None:
    assert not known_dead(str(Owner.this_process()))


def test_a_process_that_ended_here_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    started = psutil.Process(process.pid).create_time()
    process.wait()
    assert known_dead(str(Owner(user_name(), socket.gethostname(), process.pid, started)))


def test_an_invisible_process_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ``hidepid=2``, under which /proc has no folders for processes of other users."""

    def hidden(pid: int) -> psutil.Process:
        raise psutil.NoSuchProcess(pid)

    def foreign(pid: int, signal: int) -> None:
        raise PermissionError

    owner = Owner.this_process()
    monkeypatch.setattr(psutil, "Process", hidden)
    monkeypatch.setattr(os, "kill", foreign)
    assert not owner.is_known_dead()


def test_a_reused_process_id_is_not_taken_for_the_owner() -> None:
    here = Owner.this_process()
    assert known_dead(str(Owner(here.user, here.host, os.getpid(), here.started - 3600)))
    boot, tick = here.mark.split(".")
    assert known_dead(str(replace(here, mark=f"{boot}.{int(tick) - 1}")))
    assert known_dead(str(replace(here, mark=f"00000000.{tick}"))), "the same number and tick after the next boot"


def test_a_controller_lives_on_when_the_clock_is_set() -> None:
    """The kernel derives start times from the clock of now: each process appears to have started an hour later."""
    here = Owner.this_process()
    assert not known_dead(str(replace(here, started=here.started - 3600)))


def test_nothing_is_known_about_other_hosts() -> None:
    assert not known_dead("anna@other-host:1:0.00")


def live_owner() -> str:
    """Another live process of this machine: the parent of this process."""
    parent = psutil.Process(os.getppid())
    return str(Owner(user_name(), socket.gethostname(), parent.pid, parent.create_time()))


@pytest.fixture
def store(tmp_path: Path) -> HistoryStore:
    return HistoryStore(f"sqlite:///{tmp_path / 'history.db'}")


def test_a_free_lease_is_taken_at_once_and_tokens_grow(store: HistoryStore) -> None:
    waited: list[str] = []
    first = acquire(store, RUN, on_wait=lambda owner, seconds: waited.append(owner))
    first.release()
    second = acquire(store, RUN, on_wait=lambda owner, seconds: waited.append(owner))
    assert second.token > first.token
    assert waited == []


def test_the_token_is_above_those_in_the_journal(store: HistoryStore) -> None:
    assert acquire(store, RUN, on_wait=lambda owner, seconds: None, above=41).token == 42


def test_the_lease_of_a_dead_controller_is_taken_over_at_once(store: HistoryStore) -> None:
    dead = Owner(user_name(), socket.gethostname(), os.getpid(), 1.0)
    store.acquire_lease(RUN, str(dead), 3600)
    lease = acquire(store, RUN, on_wait=lambda owner, seconds: pytest.fail("it must not wait"))
    assert lease.token == 2


def test_the_lease_of_a_live_controller_is_awaited_and_then_refused(store: HistoryStore) -> None:
    store.acquire_lease(RUN, live_owner(), 3600)
    clock = Clock()
    waited: list[float] = []
    with pytest.raises(LeaseLost, match="rlhf watch"):
        acquire(
            store,
            RUN,
            on_wait=lambda owner, seconds: waited.append(seconds),
            clock=clock,
            sleep=clock.sleep,
            timeout_s=20,
        )
    assert waited == [20]
    assert clock.now >= 20


def test_fail_waits_for_no_controller(store: HistoryStore) -> None:
    store.acquire_lease(RUN, "anna@elsewhere:1:1.00", 3600)
    with pytest.raises(LeaseLost, match="driven by another controller"):
        acquire(
            store,
            RUN,
            on_wait=lambda owner, seconds: pytest.fail("it must not wait"),
            sleep=lambda seconds: pytest.fail("it must not sleep"),
            if_held=IfHeld.FAIL,
        )


def test_fail_if_alive_does_not_wait_for_a_live_process(store: HistoryStore) -> None:
    store.acquire_lease(RUN, live_owner(), 3600)
    with pytest.raises(LeaseLost, match=rf"process {os.getppid()}.*`rlhf watch {RUN}`.*`rlhf cancel {RUN}`"):
        acquire(
            store,
            RUN,
            on_wait=lambda owner, seconds: pytest.fail("it must not wait"),
            sleep=lambda seconds: pytest.fail("it must not sleep"),
            if_held=IfHeld.FAIL_IF_ALIVE,
        )
    with pytest.raises(LeaseLost, match="It is running"):
        refuse_if_driven(store, RUN)


def test_fail_if_alive_takes_the_lease_of_a_dead_process(store: HistoryStore) -> None:
    """Negative control: the process must be that of the lease, not another one with the same id."""
    parent = Owner.parse(live_owner())
    assert parent is not None
    store.acquire_lease(RUN, str(replace(parent, started=parent.started - 3600)), 3600)
    refuse_if_driven(store, RUN)
    lease = acquire(
        store, RUN, on_wait=lambda owner, seconds: pytest.fail("it must not wait"), if_held=IfHeld.FAIL_IF_ALIVE
    )
    assert lease.token == 2


def elsewhere(store: HistoryStore, clock: Clock, renewed_at: float | None) -> Callable[[float], None]:
    """Build a sleep function during which a controller on another host renews its lease once, or does not."""
    token = store.acquire_lease(RUN, "anna@elsewhere:1:1.00", 3600)
    refuse_if_driven(store, RUN)  # nothing is known about other hosts at the first look

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if renewed_at is not None and clock.now == renewed_at:
            store.renew_lease(RUN, "anna@elsewhere:1:1.00", token, 3600)

    return sleep


def test_fail_if_alive_gives_up_after_one_renewal_from_another_host(store: HistoryStore) -> None:
    clock, owners = Clock(), []
    sleep = elsewhere(store, clock, renewed_at=12)
    with pytest.raises(LeaseLost, match="driven by another controller: anna on elsewhere, process 1"):
        acquire(
            store,
            RUN,
            on_wait=lambda owner, seconds: owners.append(owner),
            clock=clock,
            sleep=sleep,
            if_held=IfHeld.FAIL_IF_ALIVE,
        )
    assert clock.now == 12
    assert len(owners) == 1


def test_a_lease_that_another_host_does_not_renew_is_awaited(store: HistoryStore) -> None:
    """Negative control: the renewal, and not the waiting, proves that the other controller is alive."""
    clock = Clock()
    sleep = elsewhere(store, clock, renewed_at=None)
    with pytest.raises(LeaseLost):
        acquire(store, RUN, on_wait=lambda owner, seconds: None, clock=clock, sleep=sleep, if_held=IfHeld.FAIL_IF_ALIVE)
    assert clock.now >= TTL_S


def test_a_lease_released_during_the_wait_is_taken(store: HistoryStore) -> None:
    token = store.acquire_lease(RUN, live_owner(), 3600)
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now > 3:
            store.release_lease(RUN, live_owner(), token)

    lease = acquire(store, RUN, on_wait=lambda owner, seconds: None, clock=clock, sleep=sleep)
    assert lease.token == 2
    assert clock.now < 10


def test_keeping_renews_only_when_it_is_time(store: HistoryStore) -> None:
    clock = Clock()
    lease = acquire(store, RUN, on_wait=lambda owner, seconds: None, clock=clock)
    other = store.acquire_lease(RUN, "b@elsewhere:1:1.00", 3600, takeover=lambda owner: True)
    assert other > lease.token
    lease.keep()  # too early: no query is sent
    clock.sleep(TTL_S / 4)
    with pytest.raises(LeaseLost):
        lease.keep()


class AwayStore(HistoryStore):
    """Database that does not respond for a while."""

    def __init__(self) -> None:
        self.away = True
        self.refused = self.renewed = 0

    def renew_lease(self, run_id: str, owner: str, token: int, ttl_s: float) -> None:
        if self.away:
            self.refused += 1
            raise DatabaseUnavailable("no answer")
        self.renewed += 1


def test_a_database_that_is_away_does_not_end_the_controller() -> None:
    clock, store = Clock(), AwayStore()
    lease = HeldLease(store, RUN, "me", 1, clock)
    clock.sleep(TTL_S / 4)
    lease.keep()
    assert (store.refused, store.renewed) == (1, 0)
    store.away = False
    lease.keep()  # retried at once, not a quarter of a minute later
    assert (store.refused, store.renewed) == (1, 1)


# ---------------------------------------------------------------------------------------------------------------------
# The renewing thread, and the check before each action


def taken_within(store: HistoryStore, seconds: float) -> bool:
    """Return True if a controller on another host that polls all the time gets the lease."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(LeaseLost):
            store.acquire_lease(RUN, "b@elsewhere:1:1.00", 3600)
            return True
        time.sleep(0.1)
    return False


def short_lease(store: HistoryStore, ttl_s: float = 4.0) -> HeldLease:
    return acquire(store, RUN, on_wait=lambda owner, seconds: None, ttl_s=ttl_s)


def test_a_controller_that_waits_longer_than_its_lease_keeps_it(store: HistoryStore) -> None:
    lease = short_lease(store)
    lease.start()
    assert not taken_within(store, 6.0), "this is how long the controller does nothing else"
    lease.keep()
    lease.release()
    assert not [thread for thread in threading.enumerate() if RUN in thread.name], "the thread ends with the lease"
    assert taken_within(store, 1.0)


def test_without_its_thread_the_lease_of_a_controller_that_waits_is_taken(store: HistoryStore) -> None:
    """Negative control: a lease that is renewed only between two steps."""
    lease = short_lease(store, ttl_s=1.0)
    assert taken_within(store, 60.0)
    with pytest.raises(LeaseLost):
        lease.require()


def test_a_controller_that_hangs_does_not_keep_its_run(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.launch.lease.HANG_S", 0.5)
    lease = short_lease(store, ttl_s=1.0)
    lease.start()
    assert taken_within(store, 60.0), "nothing has asked for the lease for longer than that"
    with pytest.raises(LeaseLost):
        lease.keep()
    assert lease.lost
    lease.release()


def test_the_lease_is_checked_before_an_action_even_if_just_renewed(store: HistoryStore) -> None:
    lease = short_lease(store, ttl_s=TTL_S)
    store.acquire_lease(RUN, "b@elsewhere:1:1.00", 3600, takeover=lambda owner: True)
    lease.keep()  # the control: it is not time to renew
    with pytest.raises(LeaseLost, match="was taken over"):
        lease.require()
    with pytest.raises(LeaseLost, match="was taken over"):
        lease.keep()


@contextmanager
def unreachable(url: str) -> Iterator[None]:
    """PostgreSQL database that refuses all connections during the block."""
    import psycopg

    name = url.rpartition("/")[2]
    with postgres().superuser() as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        admin.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{name}'")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)
        try:
            yield
        finally:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


class RecordedStore(HistoryStore):
    """Database whose renewals are recorded: True if it answered."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answered: list[bool] = []

    def renew_lease(self, run_id: str, holder: str, token: int, ttl_s: float) -> None:
        try:
            super().renew_lease(run_id, holder, token, ttl_s)
        except DatabaseUnavailable:
            self.answered.append(False)
            raise
        self.answered.append(True)


def test_a_database_that_is_away_when_the_thread_wants_to_renew() -> None:
    url = postgres().migrated_database()
    with RecordedStore(url) as store:
        lease = short_lease(store, ttl_s=1.0)
        lease.start()
        with unreachable(url):
            until(lambda: store.answered[-1:] == [False])
            lease.keep()  # the controller continues its work
        until(lambda: store.answered[-1])
        assert not taken_within(store, 0.5)
        lease.keep()
        lease.release()


def test_without_an_answer_the_lease_is_held_until_it_may_have_expired() -> None:
    url = postgres().migrated_database()
    clock = Clock()
    with HistoryStore(url) as store:
        lease = acquire(store, RUN, on_wait=lambda owner, seconds: None, clock=clock)
        with unreachable(url):
            clock.sleep(TTL_S - 1)
            lease.require()
            clock.sleep(1)
            with pytest.raises(DatabaseUnavailable):
                lease.require()
            lease.keep()
        lease.require()


@pytest.mark.parametrize("taken", [False, True])
def test_a_read_only_database_still_shows_the_owner_of_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """A full disk, or another program that holds a lock."""
    monkeypatch.setattr("rlhf_core.history.database.BUSY_TIMEOUT_S", 0.1)
    clock = Clock()
    with HistoryStore(f"sqlite:///{tmp_path / 'history.db'}") as store:
        lease = acquire(store, RUN, on_wait=lambda owner, seconds: None, clock=clock)
        if taken:
            store.acquire_lease(RUN, "b@elsewhere:1:1.00", 3600, takeover=lambda owner: True)
        clock.sleep(2 * TTL_S)
        with closing(sqlite3.connect(tmp_path / "history.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LeaseLost) if taken else nullcontext():
                lease.require()
