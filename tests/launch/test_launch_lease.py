"""One controller per run: taking, keeping, losing and waiting for the lease."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from control_fakes import Clock

from rlhf_core.errors import DatabaseUnavailable, LeaseLost
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import RENEW_EVERY_S, TTL_S, Lease, Owner, acquire, known_dead, refuse_if_driven, user_name

RUN = "small-20260101-000000-abcdef"


def test_an_owner_survives_being_written_down() -> None:
    owner = Owner.this_process()
    assert Owner.parse(str(owner)) == Owner(owner.user, owner.host, owner.pid, round(owner.started, 2))
    assert Owner.parse("somebody else") is None


def test_this_process_is_not_dead() -> None:
    assert not known_dead(str(Owner.this_process()))


def test_a_process_that_ended_here_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    started = psutil.Process(process.pid).create_time()
    process.wait()
    assert known_dead(str(Owner(user_name(), socket.gethostname(), process.pid, started)))


def test_a_reused_process_id_is_not_taken_for_the_owner() -> None:
    here = Owner.this_process()
    assert known_dead(str(Owner(here.user, here.host, os.getpid(), here.started - 3600)))


def test_nothing_is_known_about_other_hosts() -> None:
    assert not known_dead("anna@other-host:1:0.00")


def live_owner() -> str:
    """Another process of this machine that is alive: the one that started this."""
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


def test_the_token_is_above_what_the_journal_has(store: HistoryStore) -> None:
    assert acquire(store, RUN, on_wait=lambda owner, seconds: None, above=41).token == 42


def test_the_lease_of_a_dead_controller_is_taken_over_at_once(store: HistoryStore) -> None:
    dead = Owner(user_name(), socket.gethostname(), os.getpid(), 1.0)
    store.acquire_lease(RUN, str(dead), 3600)
    lease = acquire(store, RUN, on_wait=lambda owner, seconds: pytest.fail("it must not wait"))
    assert lease.token == 2


def test_the_lease_of_a_living_controller_is_waited_for_and_then_refused(store: HistoryStore) -> None:
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
            patience_s=20,
        )
    assert waited == [20]
    assert clock.now >= 20


def test_who_gives_way_does_not_wait_for_a_process_that_is_there(store: HistoryStore) -> None:
    store.acquire_lease(RUN, live_owner(), 3600)
    with pytest.raises(LeaseLost, match=rf"process {os.getppid()}.*`rlhf watch {RUN}`.*`rlhf cancel {RUN}`"):
        acquire(
            store,
            RUN,
            on_wait=lambda owner, seconds: pytest.fail("it must not wait"),
            sleep=lambda seconds: pytest.fail("it must not sleep"),
            gives_way=True,
        )
    with pytest.raises(LeaseLost, match="It is alive"):
        refuse_if_driven(store, RUN)


def test_who_gives_way_takes_what_a_dead_process_held(store: HistoryStore) -> None:
    """Negative control: that it is looked whether the process is the one of the lease, and not any of that number."""
    parent = Owner.parse(live_owner())
    assert parent is not None
    store.acquire_lease(RUN, str(replace(parent, started=parent.started - 3600)), 3600)
    refuse_if_driven(store, RUN)
    lease = acquire(store, RUN, on_wait=lambda owner, seconds: pytest.fail("it must not wait"), gives_way=True)
    assert lease.token == 2


def elsewhere(store: HistoryStore, clock: Clock, renewed_at: float | None) -> Callable[[float], None]:
    """Sleeping, while a controller on another host renews its lease once, or does not."""
    token = store.acquire_lease(RUN, "anna@elsewhere:1:1.00", 3600)
    refuse_if_driven(store, RUN)  # nothing is known about other hosts at the first look

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if renewed_at is not None and clock.now == renewed_at:
            store.renew_lease(RUN, "anna@elsewhere:1:1.00", token, 3600)

    return sleep


def test_who_gives_way_leaves_after_one_renewal_from_another_host(store: HistoryStore) -> None:
    clock, told = Clock(), []
    sleep = elsewhere(store, clock, renewed_at=12)
    with pytest.raises(LeaseLost, match="driven by another controller: anna on elsewhere, process 1"):
        acquire(store, RUN, on_wait=lambda owner, seconds: told.append(owner), clock=clock, sleep=sleep, gives_way=True)
    assert clock.now == 12
    assert len(told) == 1


def test_a_lease_that_another_host_does_not_renew_is_waited_for(store: HistoryStore) -> None:
    """Negative control: that it is the renewal, and not the waiting, which tells that the other one is alive."""
    clock = Clock()
    sleep = elsewhere(store, clock, renewed_at=None)
    with pytest.raises(LeaseLost):
        acquire(store, RUN, on_wait=lambda owner, seconds: None, clock=clock, sleep=sleep, gives_way=True)
    assert clock.now >= TTL_S


def test_a_lease_that_is_given_back_while_waiting_is_taken(store: HistoryStore) -> None:
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
    lease.keep()  # it is early: nothing is asked
    clock.sleep(RENEW_EVERY_S)
    with pytest.raises(LeaseLost):
        lease.keep()


class AwayStore:
    """A database that does not answer for a while."""

    def __init__(self) -> None:
        self.away = True
        self.renewed = 0

    def renew_lease(self, run_id: str, owner: str, token: int, ttl_s: float) -> None:
        if self.away:
            raise DatabaseUnavailable("no answer")
        self.renewed += 1


def test_a_database_that_is_away_does_not_end_the_controller() -> None:
    clock, store = Clock(), AwayStore()
    lease = Lease(store, RUN, "me", 1, clock)
    clock.sleep(RENEW_EVERY_S)
    lease.keep()
    assert lease.behind == "no answer"
    store.away = False
    lease.keep()  # tried again at once, not a quarter of a minute later
    assert (store.renewed, lease.behind) == (1, "")
