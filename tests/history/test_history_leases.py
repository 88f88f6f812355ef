"""One controller per run: acquisition and loss of the lease, and increasing tokens."""

import multiprocessing
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from history_tools import RunFiles, at, new_sqlite, whole_run
from sqlalchemy import update

from rlhf_core.errors import LeaseLost
from rlhf_core.history.store import LEASES, HistoryStore
from rlhf_core.schemas.attempts import RunState
from rlhf_core.watchdog.ingest import sync

RUN = "sort-20260301-120000-aaaaaa"


def expire(store: HistoryStore) -> None:
    """Let all leases expire."""
    with store.writing() as connection:
        connection.execute(update(LEASES).values(expires_at=at(-1e6)))


def test_one_controller_holds_the_lease_of_a_run(store: HistoryStore) -> None:
    assert store.acquire_lease(RUN, "first", 60) == 1
    with pytest.raises(LeaseLost, match=r"driven by another controller, first; its lease expires in (59|60) s"):
        store.acquire_lease(RUN, "second", 60)
    assert store.acquire_lease(RUN, "first", 60) == 2, "the same controller may take it again"
    assert store.acquire_lease("another", "second", 60) == 1, "leases of different runs do not meet"


def test_a_released_lease_is_free_and_its_token_is_not_used_again(store: HistoryStore) -> None:
    store.release_lease(RUN, "first", store.acquire_lease(RUN, "first", 60))
    assert store.acquire_lease(RUN, "second", 60) == 2


def test_an_expired_lease_can_be_taken_and_its_owner_learns_of_it(store: HistoryStore) -> None:
    token = store.acquire_lease(RUN, "first", 60)
    expire(store)
    assert store.acquire_lease(RUN, "second", 60) == token + 1
    with pytest.raises(LeaseLost, match=r"\(first\) held lease 1, now it is held by second with token 2"):
        store.renew_lease(RUN, "first", token, 60)
    store.release_lease(RUN, "first", token)  # does nothing
    store.renew_lease(RUN, "second", token + 1, 60)


def test_an_expired_lease_can_be_renewed_until_another_controller_takes_it(store: HistoryStore) -> None:
    """A laptop that slept continues if nothing happened in the meantime."""
    token = store.acquire_lease(RUN, "first", 60)
    expire(store)
    store.renew_lease(RUN, "first", token, 60)
    with pytest.raises(LeaseLost):
        store.acquire_lease(RUN, "second", 60)


def test_a_living_owner_is_respected_and_a_dead_one_is_not_waited_for(store: HistoryStore) -> None:
    store.acquire_lease(RUN, "first", 60)
    with pytest.raises(LeaseLost):
        store.acquire_lease(RUN, "second", 60, takeover=lambda _holder: False)
    holders = []

    def is_dead(holder: str) -> bool:
        holders.append(holder)
        return True

    assert store.acquire_lease(RUN, "second", 60, takeover=is_dead) == 2
    assert holders == ["first"]


def test_renewing_a_lease_that_never_was(store: HistoryStore) -> None:
    with pytest.raises(LeaseLost, match="held by no controller"):
        store.renew_lease(RUN, "me", 1, 60)


def test_a_token_is_higher_than_those_in_the_journal(store: HistoryStore, runs: Path) -> None:
    """The database was lost and rebuilt from files: the journal still has the tokens."""
    run = RunFiles(runs).created()
    run.moved(RunState.PREFLIGHT, 1, token=7)
    sync(run.dir, store)
    assert store.acquire_lease(run.run_id, "me", 60) == 8
    assert store.acquire_lease("not ingested yet", "me", 60, above=7) == 8


def test_sqlite_leases_follow_the_clock_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HistoryStore(f"sqlite:///{tmp_path}/history.db") as store:
        for seconds, holder, token in ((0, "first", 1), (59.9, "second", None), (60, "second", 2)):
            monkeypatch.setattr("rlhf_core.history.store.utc_now", lambda seconds=seconds: at(seconds))
            with nullcontext() if token else pytest.raises(LeaseLost):
                assert store.acquire_lease(RUN, holder, 60) == token


# ---------------------------------------------------------------------------------------------------------------------
# Races


class Unfenced(HistoryStore):
    """Negative control: takes the lease without checking whether it is still the one that was read."""

    meeting: threading.Barrier

    def acquire_lease(self, run_id: str, holder: str, ttl_s: float, **_options: object) -> int:
        with self.reading() as connection:
            present = connection.execute(LEASES.select().where(LEASES.c.run_id == run_id)).one()
        self.meeting.wait()
        with self.writing() as connection:
            taken = {"holder": holder, "token": present.token + 1, "expires_at": present.expires_at}
            connection.execute(update(LEASES).where(LEASES.c.run_id == run_id).values(taken))
        return int(present.token + 1)


class SlowToTake(HistoryStore):
    """The real store, delayed between read and write until the others have also read."""

    meeting: threading.Barrier

    def _try_lease(self, run_id: str, holder: str, ttl_s: float, takeover: object, above: int) -> int | None:
        waited = threading.Event()

        def wait_for_the_others(_holder: str) -> bool:
            if not waited.is_set():
                waited.set()
                self.meeting.wait()
                return True
            return False  # another living controller has it now

        return super()._try_lease(run_id, holder, ttl_s, wait_for_the_others if self._first() else None, above)

    def _first(self) -> bool:
        tries = getattr(self, "_tries", 0)
        self._tries = tries + 1
        return tries == 0


def race(kind: type[Unfenced] | type[SlowToTake], url: str, controllers: int) -> tuple[list[int], int]:
    """Let several controllers find a dead holder at the same time.

    Returns: tokens of the winners, and number of the losers.
    """
    with HistoryStore(url) as store:
        store.acquire_lease(RUN, "dead", 60)
    meeting = threading.Barrier(controllers)
    won: list[int] = []
    lost: list[str] = []

    def control(number: int) -> None:
        with kind(url) as store:
            store.meeting = meeting
            try:
                won.append(store.acquire_lease(RUN, f"controller {number}", 60))
            except LeaseLost as error:
                lost.append(str(error))

    threads = [threading.Thread(target=control, args=(number,)) for number in range(controllers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won, len(lost)


def test_of_many_controllers_exactly_one_wins(database_url: str) -> None:
    assert race(SlowToTake, database_url, 5) == ([2], 4)


def test_without_the_token_in_the_where_clause_all_of_them_win(database_url: str) -> None:
    assert race(Unfenced, database_url, 5) == ([2] * 5, 0)


def _take(url: str, holder: str, answers: "multiprocessing.Queue[int]") -> None:
    with HistoryStore(url) as store:
        try:
            answers.put(store.acquire_lease(RUN, holder, 60))
        except LeaseLost:
            answers.put(0)


def _take_at_once(url: str, answers: "multiprocessing.Queue[int]") -> None:
    """Fork three controllers from this new process, which has done their imports once and has no connection."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_take, args=(url, f"p{i}", answers)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def test_of_many_processes_exactly_one_wins(tmp_path: Path) -> None:
    """For PostgreSQL, the threads above are as many processes: each has its own connection."""
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[int] = context.Queue()
    parent = context.Process(target=_take_at_once, args=(new_sqlite(tmp_path), answers))
    parent.start()
    found = sorted(answers.get(timeout=60) for _ in range(3))
    parent.join()
    assert found == [0, 0, 1]


def test_a_whole_run_needs_no_lease_to_be_read(store: HistoryStore, runs: Path) -> None:
    run = whole_run(runs)
    store.acquire_lease(run.run_id, "a controller", 60)
    assert sync(run.dir, store).batches == 1
