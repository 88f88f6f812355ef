"""Orders changed concurrently by both threads of agent 0: no change is lost."""

import threading

import pytest
from agents_in_memory import lone_channel

from rlhf_core.schemas.agent_messages import GroupOrders, InspectionOrder, WorkerEndOrder, WorkerStartOrder
from rlhf_core.schemas.attempts import Role
from rlhf_core.worker.channel.order_book import OrderBook

NUM_CHANGES = 300


@pytest.fixture
def book() -> OrderBook:
    return OrderBook(lone_channel())


def change_from_two_threads(book: OrderBook) -> GroupOrders:
    def inspect() -> None:
        for number in range(NUM_CHANGES):
            book.change_group(Role.ROLLOUT, inspect=InspectionOrder(number=number))

    other = threading.Thread(target=inspect)
    other.start()
    for number in range(NUM_CHANGES):
        book.start_worker(Role.ROLLOUT, WorkerStartOrder(node_index=0, local_rank=0, generation=number))
    other.join()
    return book.group(Role.ROLLOUT)


def test_no_order_of_either_thread_is_lost(book: OrderBook) -> None:
    found = change_from_two_threads(book)
    assert [one.generation for one in found.start_workers] == [*range(NUM_CHANGES)]
    assert found.inspect.number == NUM_CHANGES - 1


def test_a_change_that_is_not_atomic_loses_an_order(book: OrderBook) -> None:
    """Negative control: with a separate read and write, an older inspection reappears."""
    before = book.group(Role.ROLLOUT)
    book.change_group(Role.ROLLOUT, inspect=InspectionOrder(number=7))
    book.set_group(Role.ROLLOUT, before)
    assert book.group(Role.ROLLOUT).inspect.number == 0


def test_starts_and_ends_of_single_workers_are_all_retained(book: OrderBook) -> None:
    for pid in (11, 12):
        book.end_worker(Role.ROLLOUT, WorkerEndOrder(node_index=0, pid=pid))
    book.start_worker(Role.ROLLOUT, WorkerStartOrder(node_index=0, local_rank=0, generation=1))
    found = book.group(Role.ROLLOUT)
    assert ([one.pid for one in found.end_workers], len(found.start_workers)) == ([11, 12], 1)
    assert book.group(Role.TRAINER) == GroupOrders()
