"""Keys on which nodes disagree, and the value of the majority."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

ABSENT = "absent"
"""Value of a key that a node lacks."""


@dataclass(frozen=True)
class Difference:
    """Key on which nodes disagree."""

    key: str
    usual: str | None
    """Value that more than half of the nodes have; None if there is none."""
    odd: Mapping[str, str]
    """Values of the deviating nodes, by node; of all nodes without a majority."""
    num_usual: int
    """Number of nodes with the usual value."""


def differences(values: Mapping[str, Mapping[str, str]]) -> list[Difference]:
    """List the disagreements between nodes.

    Args:
        values: Keys and values of each node. A key that a node lacks counts as ``absent``.
    """
    keys = sorted({key for own in values.values() for key in own})
    found = []
    for key in keys:
        held = {node: own.get(key, ABSENT) for node, own in values.items()}
        usual, count = Counter(held.values()).most_common(1)[0]
        if count == len(held):
            continue
        if 2 * count > len(held):
            odd = {node: value for node, value in held.items() if value != usual}
            found.append(Difference(key, usual, odd, count))
        else:
            found.append(Difference(key, None, held, 0))
    return found


def by_value(held: Mapping[str, str]) -> dict[str, list[str]]:
    """Group nodes by value."""
    found: dict[str, list[str]] = {}
    for node, value in held.items():
        found.setdefault(value, []).append(node)
    return found
