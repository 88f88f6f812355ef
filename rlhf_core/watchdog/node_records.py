"""Incidents held against nodes across all runs: strikes from the history, weighted by ``diagnosis/nodes/strikes.py``.

Strikes are derived from incidents and stay in the history. The repair of a node is recorded in a file next to the run
directories (:class:`NodeCleared`): from then on no controller that shares those directories counts earlier strikes.
"""

import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rlhf_core.diagnosis.nodes.strikes import REMEMBERED, NodeStanding, Strike, standings
from rlhf_core.errors import BadInput
from rlhf_core.files.lookups import paths_in
from rlhf_core.files.whole import read_all, replacing, write_model
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import cleared_nodes
from rlhf_core.schemas.failures import FailureKind, NodeCleared


@dataclass(frozen=True)
class NodeRecord:
    """Record of one node."""

    standing: NodeStanding
    """Score of the node; its last strike may be one that no longer counts."""
    cleared: NodeCleared | None
    """Last clearing of the node."""
    num_cleared: int
    """Strikes that no longer count."""


def node_standings(store: HistoryStore, now: datetime, runs: Path) -> list[NodeStanding]:
    """Score every node, worst first.

    Args:
        runs: folder of the run directories, which holds the clearings.

    Raises:
        DatabaseUnavailable: the history does not answer.
    """
    return standings(_counting(_strikes(store, now), clearings(runs)), now)


def node_records(store: HistoryStore, now: datetime, runs: Path) -> list[NodeRecord]:
    """Score every node for display, including cleared nodes; nodes with active strikes come first.

    Raises:
        DatabaseUnavailable: the history does not answer.
    """
    strikes, cleared = _strikes(store, now), clearings(runs)
    counting = {one.node: one for one in standings(_counting(strikes, cleared), now)}
    found = []
    for one in standings(strikes, now):
        present = counting.get(one.node, replace(one, score=0.0, num_strikes=0, excluded_until=None))
        found.append(NodeRecord(present, cleared.get(one.node), one.num_strikes - present.num_strikes))
    return sorted(found, key=lambda one: (-one.standing.score, one.standing.node))


def clear_node(store: HistoryStore, runs: Path, node: str, by: str, reason: str, now: datetime) -> NodeRecord:
    """Record that a node was repaired. Later strikes count again.

    Returns:
        The updated record of the node.

    Raises:
        BadInput: no reason is given, nothing is recorded against the node, or the file cannot be written.
        DatabaseUnavailable: the history does not answer.
    """
    if not reason.strip():
        raise BadInput("--reason is missing: describe the repair, for the next time the node fails")
    records = {one.standing.node: one for one in node_records(store, now, runs)}
    if node not in records:
        known = f"; known are {', '.join(sorted(records))}" if records else ""
        raise BadInput(f"no strikes are recorded against a node {node!r}{known}")
    if not records[node].standing.num_strikes:
        return records[node]
    path = cleared_nodes(runs) / f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}.json"  # one file per writer
    try:
        path.parent.mkdir(exist_ok=True)
        rights = stat.S_IMODE(runs.stat().st_mode)
        with suppress(PermissionError):  # another user has made it
            path.parent.chmod(rights)
        with replacing(path) as temporary:
            write_model(temporary, NodeCleared(node=node, time=now, by=by, reason=reason.strip()))
            temporary.chmod(0o600 | rights & 0o044)  # whatever the umask: the controllers of all users read it
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}; run this as a user with write access") from None
    return next(one for one in node_records(store, now, runs) if one.standing.node == node)


def clearings(runs: Path) -> Mapping[str, NodeCleared]:
    """The newest clearing of every node."""
    found = read_all(paths_in(cleared_nodes(runs), "*.json"), NodeCleared)
    return {one.node: one for one in sorted(found, key=lambda one: one.time)}


def _strikes(store: HistoryStore, now: datetime) -> list[Strike]:
    found = queries.node_strikes(store, now - REMEMBERED)
    return [Strike(run_id, node, FailureKind(kind), time) for run_id, node, kind, time in found]


def _counting(strikes: list[Strike], cleared: Mapping[str, NodeCleared]) -> list[Strike]:
    return [one for one in strikes if one.node not in cleared or one.time > cleared[one.node].time]
