"""Agents that have not met: nodes that did not come are blamed, and no node where the cause is unclear."""

import pytest

from rlhf_core.diagnosis.nodes.rendezvous import MAX_NAMES, absence, disconnection
from rlhf_core.schemas.failures import FailureKind

NAMES = ("n1", "n2", "n3")


@pytest.mark.parametrize(
    ("started", "blamed", "sentence"),
    [
        ({"n2", "n3"}, ("n1",), "The agent of n1 did not arrive within 600 s (supervise.join_s), those of n2, n3 did."),
        ({"n1"}, ("n2", "n3"), "The agents of n2, n3 did not arrive within 600 s (supervise.join_s), those of n1 did."),
    ],
)
def test_nodes_that_did_not_come_are_blamed(started: set[str], blamed: tuple[str, ...], sentence: str) -> None:
    found = absence(NAMES, started, 600.0)
    assert found is not None
    assert (found.kind, found.nodes) == (FailureKind.RENDEZVOUS, blamed)
    assert found.message.startswith(sentence)
    assert not found.is_undecided


def test_when_all_have_come_none_is_absent() -> None:
    """Control."""
    assert absence(NAMES, set(NAMES), 600.0) is None


@pytest.mark.parametrize(
    ("names", "joined", "blamed"),
    [
        (NAMES, {"n1", "n3"}, ("n2",)),
        (NAMES, {"n1"}, ("n1",)),  # no other node reaches it
        (NAMES[:2], {"n1"}, ()),  # either side may be cut off
    ],
)
def test_of_those_that_came_the_one_that_is_cut_off_is_blamed(
    names: tuple[str, ...], joined: set[str], blamed: tuple[str, ...]
) -> None:
    assert disconnection(names, joined, 600.0).nodes == blamed


def test_of_many_nodes_only_some_are_named() -> None:
    names = [f"n{number}" for number in range(100)]
    found = absence(names, names[:1], 600.0)
    assert found is not None
    assert len(found.nodes) == 99
    assert f"n{MAX_NAMES} and {99 - MAX_NAMES} more did not arrive" in found.message
