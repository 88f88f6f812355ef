"""Comparison of launchers' environment variables with the plan of the run. Pure.

rlhf-flows does not need them, because the agents assign the ranks. But a launcher in user code or in the job's set-up
reads them, and a node that contradicts the plan then waits for ranks that do not exist, or trains alone (ms-swift
#3695). A variable that is set nowhere, or unset where the launcher's default is right, is not a contradiction.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.schemas.probe import NodeFacts
from rlhf_core.text.formatting import listed

NODE_NUMBERS = ("NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")
"""Variables with each node's number, from 0."""
MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Variables of the rendezvous address; they are not planned and only have to agree."""
TAKEN_WHERE_UNSET = "1"
"""Default of launchers for unset numbers of nodes and ranks."""

_ALONE = "a launcher there starts a separate world, and the node trains alone"
_NEVER_WHOLE = "the world is never complete, and all ranks wait for others that do not exist"


@dataclass(frozen=True)
class Contradiction:
    """Variable that contradicts the plan."""

    found: str
    expected: str
    advice: str
    node: str = ""
    """The responsible node; empty if the run itself is, or no single node is."""
    is_grave: bool = True
    """True if it prevents the run."""


def contradictions(
    nodes: Sequence[NodeFacts], planned: Sequence[str], ranks_per_node: int, num_ranks: int
) -> list[Contradiction]:
    """Find launcher variables that contradict the plan. Each node is responsible for its own, the run for those of a
    majority.

    Args:
        nodes: Facts of the nodes that reported.
        planned: Names of all nodes, in the order of the allocation.
        ranks_per_node: As planned.
        num_ranks: Likewise.
    """
    numbers = planned_numbers(len(planned), ranks_per_node, num_ranks)
    found = [one for name, right in numbers.items() for one in _of_number(name, nodes, right)]
    return found + [one for name in NODE_NUMBERS for one in _of_places(name, nodes, planned)]


def planned_numbers(num_nodes: int, ranks_per_node: int, num_ranks: int) -> dict[str, tuple[str, ...]]:
    """Correct values of every variable that follows from the plan.

    Args:
        num_nodes: Nodes of the allocation.
        ranks_per_node: Trainer ranks on each training node.
        num_ranks: Trainer ranks on all nodes.
    """
    nodes, ranks = str(num_nodes), str(ranks_per_node)
    return {
        "NNODES": (nodes,),
        "PET_NNODES": (nodes, f"{nodes}:{nodes}"),
        "NPROC_PER_NODE": (ranks,),
        "PET_NPROC_PER_NODE": (ranks,),
        "LOCAL_WORLD_SIZE": (ranks,),
        # On Kubernetes, this is the number of nodes.
        "WORLD_SIZE": tuple(dict.fromkeys((str(num_ranks), nodes))),
    }


LAUNCHING = (*planned_numbers(1, 1, 1), *NODE_NUMBERS, *MEETING)
"""All of these variables."""


def _of_number(name: str, nodes: Sequence[NodeFacts], right: Collection[str]) -> Iterator[Contradiction]:
    held = {one.node: one.variables[name] for one in nodes if name in one.variables}
    wrong = {node: value for node, value in held.items() if value not in right}
    unset = [one.node for one in nodes if one.node not in held and TAKEN_WHERE_UNSET not in right]
    num_right = len(held) - len(wrong)
    expected = f"{name} = {' or '.join(right)}, as planned, or unset everywhere"
    follows = _ALONE if name.endswith("NNODES") else _NEVER_WHOLE
    advice = f"set {name} in one place for all nodes, or unset it: rlhf-flows does not need it ({follows})"
    value, count = Counter(wrong.values()).most_common(1)[0] if wrong else ("", 0)
    if 2 * count > len(nodes):
        # A value on most nodes comes from one place: excluding these nodes would not remove the mistake.
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


def _of_places(name: str, nodes: Sequence[NodeFacts], planned: Sequence[str]) -> Iterator[Contradiction]:
    """Check node numbers: a permutation if all nodes have one, otherwise each must be the node's place."""
    held = {one.index: one.variables[name] for one in nodes if name in one.variables}
    if not held:
        return
    # A launcher's default is 0, which is right on the first node.
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
            problem = f"on {one.node}: {name} absent; a launcher's default is 0, the number of the first node"
            yield Contradiction(problem, f"{name} = {one.index} on {one.node}", advice, one.node)
    elif unset and not found:
        yield _set_on_few(name, [one.node for one in unset], f"{name} on all nodes, or on none", advice)


def _wrong_place(
    name: str, one: NodeFacts, places: Mapping[int, int], planned: Sequence[str], *, is_whole: bool
) -> str:
    """Problem with the number of a node, in a sentence; empty if there is none."""
    place = places.get(one.index)
    if place is None:
        return f"on {one.node}: {name} = {one.variables[name]}, which is not a number"
    if place == one.index:
        return ""
    twins = [planned[index] for index, other in places.items() if other == place]
    if len(twins) > 1:
        return f"{' and '.join(twins)} have the same {name} = {place}"
    if place >= len(planned):
        return f"on {one.node}: {name} = {place}, with {len(planned)} nodes"
    return "" if is_whole else f"on {one.node}: {name} = {place}, the place of {planned[place]}"


def _set_on_few(name: str, unset: Sequence[str], expected: str, advice: str) -> Contradiction:
    """Report a variable that is right where it is set, but unset on too many nodes to name a deviating one."""
    return Contradiction(
        f"{name} absent on {listed(unset, 4)}, and as planned elsewhere", expected, advice, is_grave=False
    )
