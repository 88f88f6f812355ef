"""Comparison of the variables from which launchers build their world with the plan of the run. Pure.

None of them is needed here: the agents assign the ranks. A launcher in user code or in the job's set-up reads them, and
a node that contradicts the plan then waits for ranks that do not exist, or trains alone (ms-swift #3695). A variable
that is set nowhere, or unset where a launcher would take the right value by itself, is no contradiction.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

NODE_NUMBERS = ("NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")
"""Variables of each node's own number, from 0."""
MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Variables of the rendezvous address; they are not in the plan and only have to agree."""
TAKEN_WHERE_UNSET = "1"
"""Default of launchers for unset numbers of nodes and ranks."""

_ALONE = "a launcher there starts a world of its own, and the node trains alone"
_NEVER_WHOLE = "the world is never complete, and all wait for ranks that do not exist"


@dataclass(frozen=True)
class Contradiction:
    """Variable that contradicts the plan."""

    found: str
    expected: str
    advice: str
    node: str = ""
    """The node to blame; empty when it is the run's own, or none is the odd one."""
    is_grave: bool = True
    """True if the run cannot work with it."""


@dataclass(frozen=True)
class NodeVariables:
    """The variables of one node that came."""

    node: str
    index: int
    """Its place in the allocation, from 0."""
    variables: Mapping[str, str]


def contradictions(
    nodes: Sequence[NodeVariables], planned: Sequence[str], ranks_per_node: int, num_ranks: int
) -> list[Contradiction]:
    """Find variables of launchers that contradict the plan. Each node is blamed for its own, the run for those of most.

    Args:
        nodes: Those that came.
        planned: Names of all nodes, in the order of the allocation.
        ranks_per_node: As planned.
        num_ranks: Likewise.
    """
    numbers = planned_numbers(len(planned), ranks_per_node, num_ranks)
    found = [one for name, right in numbers.items() for one in _of_number(name, nodes, right)]
    return found + [one for name in NODE_NUMBERS for one in _of_places(name, nodes, planned)]


def planned_numbers(num_nodes: int, ranks_per_node: int, num_ranks: int) -> dict[str, tuple[str, ...]]:
    """Every variable whose value follows from the plan, and the values that are right.

    Args:
        num_nodes: Nodes of the allocation.
        ranks_per_node: Trainer ranks on each of those that train.
        num_ranks: All of them.
    """
    nodes, ranks = str(num_nodes), str(ranks_per_node)
    return {
        "NNODES": (nodes,),
        "PET_NNODES": (nodes, f"{nodes}:{nodes}"),
        "NPROC_PER_NODE": (ranks,),
        "PET_NPROC_PER_NODE": (ranks,),
        "LOCAL_WORLD_SIZE": (ranks,),
        # Kubernetes calls the number of nodes so.
        "WORLD_SIZE": tuple(dict.fromkeys((str(num_ranks), nodes))),
    }


LAUNCHING = (*planned_numbers(1, 1, 1), *NODE_NUMBERS, *MEETING)
"""All of these variables."""


def _of_number(name: str, nodes: Sequence[NodeVariables], right: Collection[str]) -> Iterator[Contradiction]:
    held = {one.node: one.variables[name] for one in nodes if name in one.variables}
    wrong = {node: value for node, value in held.items() if value not in right}
    unset = [one.node for one in nodes if one.node not in held and TAKEN_WHERE_UNSET not in right]
    num_right = len(held) - len(wrong)
    expected = f"{name} = {' or '.join(right)}, as planned, or unset everywhere"
    follows = _ALONE if name.endswith("NNODES") else _NEVER_WHOLE
    advice = f"set {name} in one place for all nodes, or unset it: rlhf-flows does not need it ({follows})"
    value, count = Counter(wrong.values()).most_common(1)[0] if wrong else ("", 0)
    if 2 * count > len(nodes):
        # What most nodes share comes from one place: without these nodes the mistake would still be there.
        where = "all nodes" if count == len(nodes) else f"{count} of {len(nodes)} nodes"
        yield Contradiction(f"{name} = {value} on {where}", expected, advice)
        return
    for node, value in wrong.items():
        yield Contradiction(f"on {node}: {name} = {value}", expected, advice, node)
    if num_right > len(unset):
        for node in unset:
            yield Contradiction(f"on {node}: {name} absent", expected, advice, node)
    elif num_right and unset:
        yield _set_on_few(name, unset, expected, advice)


def _of_places(name: str, nodes: Sequence[NodeVariables], planned: Sequence[str]) -> Iterator[Contradiction]:
    """A permutation where all nodes have a number; otherwise each number is the place of its node."""
    held = {one.index: one.variables[name] for one in nodes if name in one.variables}
    if not held:
        return
    # A launcher without the variable takes 0, which is right on the first node.
    unset = [one for one in nodes if one.index not in held and one.index != 0]
    places = {index: int(value) for index, value in held.items() if value.isdigit()}
    advice = f"give each node its own {name}, or unset it: rlhf-flows does not need it"
    is_whole = len(held) == len(planned)
    found = []
    for one in nodes:
        problem = _wrong_place(name, one, places, planned, is_whole=is_whole) if one.index in held else ""
        if problem:
            found.append(Contradiction(problem, f"{name} = {one.index} on {one.node}", advice, one.node))
    yield from found
    if sum(place == index for index, place in places.items()) > len(unset):
        for one in unset:
            problem = f"on {one.node}: {name} absent; a launcher takes 0, like the first node"
            yield Contradiction(problem, f"{name} = {one.index} on {one.node}", advice, one.node)
    elif unset and not found:
        yield _set_on_few(name, [one.node for one in unset], f"{name} on all nodes, or on none", advice)


def _wrong_place(
    name: str, one: NodeVariables, places: Mapping[int, int], planned: Sequence[str], *, is_whole: bool
) -> str:
    """Problem with the number of a node, in a sentence; empty when there is none."""
    place = places.get(one.index)
    if place is None:
        return f"on {one.node}: {name} = {one.variables[name]}, which is no number"
    if place == one.index:
        return ""
    twins = [planned[index] for index, other in places.items() if other == place]
    if len(twins) > 1:
        return f"{' and '.join(twins)} have the same {name} = {place}"
    if place >= len(planned):
        return f"on {one.node}: {name} = {place}, with {len(planned)} nodes"
    return "" if is_whole else f"on {one.node}: {name} = {place}, the place of {planned[place]}"


def _set_on_few(name: str, unset: Sequence[str], expected: str, advice: str) -> Contradiction:
    """A variable that is right where it is set, and unset on so many nodes that none of them is the odd one."""
    shown = ", ".join(unset[:4]) + (f" and {len(unset) - 4} more" if len(unset) > 4 else "")
    return Contradiction(f"{name} absent on {shown}, and as planned elsewhere", expected, advice, is_grave=False)
