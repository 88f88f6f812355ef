"""Findings from the measurements of an attempt's nodes: slow or broken devices, nodes and links. Pure.

Every node exchanges data with two others. A node that is slow with both is the cause; if both ends of a slow link are
fast with another node, the link is. Medians are used instead of means, so one slow node does not make the others look
fast.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlhf_core.diagnosis.nodes.checks import NodeCheck, blocked, passed, warning
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.probe import NodeSpeed, PairSpeed

STEPS = ("started", "met", "matmul", "pairs", "all_reduce", "all_gather", "done")
"""Steps of a rank, in order."""


@dataclass(frozen=True)
class Floors:
    """Thresholds below which a measurement counts as slow."""

    relative: float = 0.5
    """Share of the median below which a node counts as slow; 0 for no threshold."""
    bandwidth_gb_s: float = 0.0
    """0 for no floor."""
    latency_ms: float = 0.0
    """0 for no limit."""
    matmul_tflops: float = 0.0
    """0 for no floor."""


@dataclass(frozen=True)
class Edge:
    """Measured link between two nodes."""

    ends: tuple[str, str]
    gb_s: float
    latency_ms: float
    problem: str


def judge_speed(
    speeds: Mapping[int, NodeSpeed], floors: Floors, usual: Mapping[str, Mapping[str, float]]
) -> list[CheckResult]:
    """Judge all measurements.

    Args:
        speeds: Measurements by place in the allocation.
        floors: Thresholds.
        usual: Node to reading to the median of its earlier readings on the same kind of device.
    """
    devices = _matmul(speeds, floors, usual)
    excluded = {result.node for result in devices if result.status is CheckStatus.BLOCKED}
    links = _links(speeds, floors, usual, excluded)
    # A dead link blocks the rendezvous of all ranks, which the finding about the link covers.
    is_broken = any(result.status is CheckStatus.BLOCKED for result in links)
    completion = [
        result for result in _completion(speeds) if result.node or not is_broken or result.status is CheckStatus.PASSED
    ]
    found = [*completion, *devices, *links]
    if (
        any(result.id == NodeCheck.ANSWER and result.status is CheckStatus.PASSED for result in found)
        and len(speeds) > 1
    ):
        found.append(passed(NodeCheck.ALL_REDUCE, "every rank got the correct sum"))
        found.append(passed(NodeCheck.ALL_GATHER, "every rank got all parts"))
    return found


def needs_second_measurement(results: Iterable[CheckResult]) -> bool:
    """Return True if a finding may be due to chance: another process on a core, a burst of traffic."""
    return any(result.status is not CheckStatus.PASSED and result.id not in _NEVER_CHANCE for result in results)


_NEVER_CHANCE = (NodeCheck.ALL_REDUCE, NodeCheck.ALL_GATHER)


def better(first: NodeSpeed, second: NodeSpeed) -> NodeSpeed:
    """Combine two measurements of a node: the better speeds, and the wrong results of both."""
    wrong = [one for one in first.problems if one.partition(":")[0] in ("all_reduce", "all_gather")]
    fastest = max(first, second, key=lambda one: one.matmul_tflops)
    pairs = {pair.peer: pair for pair in first.pairs}
    for pair in second.pairs:
        before = pairs.get(pair.peer)
        if before is None or before.problem or (not pair.problem and pair.gb_s > before.gb_s):
            pairs[pair.peer] = pair
    return fastest.model_copy(
        update={
            "pairs": tuple(pairs[peer] for peer in sorted(pairs)),
            "reached": second.reached,
            "problems": first.problems if wrong else second.problems,
        }
    )


def edges(speeds: Mapping[int, NodeSpeed]) -> list[Edge]:
    """List the measured links, each with the worse of its two ends' measurements."""
    by_ends: dict[tuple[int, int], list[PairSpeed]] = {}
    for index, one in speeds.items():
        for pair in one.pairs:
            by_ends.setdefault((min(index, pair.peer), max(index, pair.peer)), []).append(pair)
    found = []
    for (low, high), measured in sorted(by_ends.items()):
        if low in speeds and high in speeds:
            problem = next((pair.problem for pair in measured if pair.problem), "")
            worst = 0.0 if problem else min(pair.gb_s for pair in measured)
            found.append(
                Edge((speeds[low].node, speeds[high].node), worst, max(pair.latency_ms for pair in measured), problem)
            )
    return found


def _completion(speeds: Mapping[int, NodeSpeed]) -> list[CheckResult]:
    """Findings about ranks that did not finish. Those that stopped earliest are the cause; the others only waited for
    them."""
    places = {
        (one.node, local): STEPS.index(step) if step else -1
        for one in speeds.values()
        for local, step in enumerate(one.reached)
    }
    wrong = [
        blocked(
            NodeCheck.ALL_REDUCE if problem.startswith("all_reduce:") else NodeCheck.ALL_GATHER,
            f"rank {local} of {one.node}: {problem.partition(':')[2].strip()}",
            "the same correct result on every rank",
            "exclude the node; its memory or its network corrupts data",
            one.node,
        )
        for one in speeds.values()
        for local, problem in enumerate(one.problems)
        if problem.startswith(("all_reduce:", "all_gather:"))
    ]
    if wrong:
        return wrong
    if all(place == len(STEPS) - 1 for place in places.values()):
        return [passed(NodeCheck.ANSWER, f"all {len(places)} ranks finished")] if places else []
    least = min(places.values())
    slow_nodes = {node for (node, _), place in places.items() if place == least}
    is_everywhere = len(slow_nodes) == len(speeds) and len(speeds) > 1
    # Those that gave up waiting for others explain nothing.
    is_explained = any(
        problem and places[one.node, local] == least and not problem.startswith("Late:")
        for one in speeds.values()
        for local, problem in enumerate(one.problems)
    )
    found = []
    for one in speeds.values():
        behind = [local for local in range(len(one.reached)) if places[one.node, local] == least]
        if not behind:
            continue
        problem = next((one.problems[local] for local in behind if one.problems[local]), "")
        following = STEPS[least + 1]
        reached = f"got no further than {STEPS[least]}" if least >= 0 else "did not start"
        ranks = ", ".join(map(str, behind))
        found.append(
            blocked(
                NodeCheck.LATE if is_everywhere and not is_explained else NodeCheck.ANSWER,
                f"rank {ranks} of {one.node} {reached}: {problem or 'no answer in time'}",
                f"{following} within preflight.probe_s",
                "read logs/probe-*.log of the attempt's first restart; a firewall between the nodes, a wrong "
                "network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) or a hung driver look like this"
                + ("; if all nodes are only slow, raise preflight.probe_s" if is_everywhere else ""),
                "" if is_everywhere else one.node,
            )
        )
        if is_everywhere:
            break
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Devices


def _matmul(
    speeds: Mapping[int, NodeSpeed], floors: Floors, usual: Mapping[str, Mapping[str, float]]
) -> list[CheckResult]:
    measured = [one for one in speeds.values() if one.matmul_tflops > 0]
    if not measured:
        return []
    compared, whose = median(one.matmul_tflops for one in measured), "median of all nodes"
    if len(measured) == 2:
        compared, whose = max(one.matmul_tflops for one in measured), "of the other node"
    found = []
    for one in measured:
        what = f"rank {one.slowest_rank} of {one.node} ({one.device}): {_tflops(one.matmul_tflops)} in matrix products"
        if one.core_share < 0.8:
            what += f"; it got {one.core_share:.0%} of its cores"
        advice = "exclude the node and have it checked: heat, power cap, another job or a limit on its cores"
        earlier = usual.get(one.node, {}).get("matmul_tflops", 0.0)
        if one.matmul_tflops < floors.matmul_tflops:
            expected = f"at least {_tflops(floors.matmul_tflops)} (preflight.min_matmul_tflops)"
            found.append(blocked(NodeCheck.MATMUL, what, expected, advice, one.node))
        elif one.matmul_tflops < floors.relative * compared:
            expected = f"at least {floors.relative:.0%} of the {_tflops(compared)} {whose}"
            found.append(blocked(NodeCheck.MATMUL, what, expected, advice, one.node))
        elif one.matmul_tflops < floors.relative * earlier:
            expected = f"about the {_tflops(earlier)} that this node had before"
            found.append(warning(NodeCheck.MATMUL, what, expected, advice, one.node))
    slowest = min(one.matmul_tflops for one in measured)
    return found or [
        passed(NodeCheck.MATMUL, f"{_tflops(slowest)} to {_tflops(max(one.matmul_tflops for one in measured))}")
    ]


def _tflops(value: float) -> str:
    return f"{value:.3g} TFLOP/s"


# ---------------------------------------------------------------------------------------------------------------------
# Links


def _links(
    speeds: Mapping[int, NodeSpeed],
    floors: Floors,
    usual: Mapping[str, Mapping[str, float]],
    excluded: Collection[str],
) -> list[CheckResult]:
    links = edges(speeds)
    if not links:
        return []
    best = {node: max(edge.gb_s for edge in links if node in edge.ends) for edge in links for node in edge.ends}
    # Each node with its best partner: a slow node slows both of its links, but not its partners' other links.
    floor = max(floors.bandwidth_gb_s, floors.relative * median(best.values()))
    slow = [edge for edge in links if edge.problem or edge.gb_s < floor]
    found = _blame_links(slow, best, floor, excluded)
    for node, speed in best.items():
        earlier = usual.get(node, {}).get("bandwidth_gb_s", 0.0)
        if speed >= floor and speed < floors.relative * earlier:
            found.append(
                warning(
                    NodeCheck.BANDWIDTH,
                    f"{node}: {_gb_s(speed)} to its fastest neighbour",
                    f"about the {_gb_s(earlier)} that this node had before",
                    "check its network: link width, cable, congestion",
                    node,
                )
            )
    if not found:
        speeds_ = [edge.gb_s for edge in links]
        found = [
            passed(NodeCheck.BANDWIDTH, f"{_gb_s(min(speeds_))} to {_gb_s(max(speeds_))} between {len(best)} nodes")
        ]
    return [*found, *_latency([edge for edge in links if not edge.problem], floors)]


def _blame_links(
    slow: Sequence[Edge], best: Mapping[str, float], floor: float, excluded: Collection[str]
) -> list[CheckResult]:
    # Slow with every partner.
    suspects = {node for edge in slow for node in edge.ends if best[node] < floor}
    cleared = set(best) - suspects
    found = []
    for node in sorted(suspects):
        own = [edge for edge in slow if node in edge.ends]
        partners = [next(end for end in edge.ends if end != node) for edge in own]
        if not any(partner in cleared for partner in partners):
            continue  # no partner is known to be healthy
        measured_links = ", ".join(
            f"{edge.problem or _gb_s(edge.gb_s)} with {partner}" for edge, partner in zip(own, partners, strict=True)
        )
        found.append(
            blocked(
                NodeCheck.BANDWIDTH,
                f"{node}: {measured_links}",
                f"at least {_gb_s(floor)}, as between the other nodes",
                "exclude the node and have its network checked: link width, cable, wrong interface",
                node,
            )
        )
    blamed = {result.node for result in found}
    for edge in slow:
        # A node that computes slowly also sends slowly; excluding it solves both.
        is_explained = not edge.problem and not set(edge.ends).isdisjoint(excluded)
        if is_explained or not blamed.isdisjoint(edge.ends):
            continue
        both_healthy = all(end in cleared for end in edge.ends)
        if both_healthy and edge.problem:
            # Training needs the link unless one of the two nodes is excluded; it does not matter which.
            kept, left_out = edge.ends
            found.append(
                blocked(
                    NodeCheck.BANDWIDTH,
                    f"nothing gets through between {kept} and {left_out}: {edge.problem}",
                    "nodes that reach each other",
                    f"both reach other nodes, so {left_out} is excluded: check the path between them",
                    left_out,
                )
            )
            continue
        report = warning if both_healthy else blocked
        where = "between" if both_healthy else "somewhere between"
        found.append(
            report(
                NodeCheck.BANDWIDTH,
                f"{edge.problem or _gb_s(edge.gb_s)} {where} {edge.ends[0]} and {edge.ends[1]}",
                f"at least {_gb_s(floor)}",
                "both are fast with other nodes: check the switches between them"
                if both_healthy
                else "too few nodes to determine which of the two is slow: exclude one with slurm.exclude and "
                "try again",
            )
        )
    return found


def _latency(links: Sequence[Edge], floors: Floors) -> list[CheckResult]:
    if not links:
        return []
    worst = max(links, key=lambda edge: edge.latency_ms)
    if floors.latency_ms and worst.latency_ms > floors.latency_ms:
        return [
            warning(
                NodeCheck.LATENCY,
                f"{worst.latency_ms:.2f} ms between {worst.ends[0]} and {worst.ends[1]}",
                f"at most {floors.latency_ms:g} ms (preflight.max_latency_ms)",
                "check that the right network interface is used",
            )
        ]
    return [passed(NodeCheck.LATENCY, f"{min(edge.latency_ms for edge in links):.2f} to {worst.latency_ms:.2f} ms")]


def _gb_s(value: float) -> str:
    return f"{value:.3g} GB/s"
