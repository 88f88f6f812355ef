"""Rows of incidents, decisions and strikes against nodes."""

from collections.abc import Sequence

from sqlalchemy import Connection, delete

from rlhf_core.history.tables.sqlalchemy_core import DECISIONS, INCIDENTS, STRIKES
from rlhf_core.history.writers.upserts import columns_of, insert_or_replace
from rlhf_core.schemas.failures import NODE_FAILURES, Decision, Incident


def write_incidents(
    connection: Connection, run_id: str, incidents: Sequence[Incident], incident_id: str = "", found_by: str = "agent"
) -> None:
    """Write incidents, and their strikes against nodes.

    Args:
        incident_id: empty for incidents of agents, which are identified by attempt, restart and number.
    """
    rows = []
    strikes = []
    for incident in incidents:
        identity = incident_id or _agent_identity(incident)
        key = {"run_id": run_id, "incident_id": identity}
        rows.append({**key, "found_by": found_by, **columns_of(INCIDENTS, incident)})
        if incident.failure_kind in NODE_FAILURES:
            strikes += [
                {
                    **key,
                    "node": node,
                    "attempt": incident.attempt,
                    "failure_kind": incident.failure_kind.value,
                    "struck_at": incident.seen_at,
                }
                for node in sorted(set(incident.suspect_nodes))
            ]
    insert_or_replace(connection, INCIDENTS, rows)
    for row in rows:  # a rewritten incident may suspect other nodes
        connection.execute(
            delete(STRIKES).where(STRIKES.c.run_id == run_id, STRIKES.c.incident_id == row["incident_id"])
        )
    insert_or_replace(connection, STRIKES, strikes)


def write_decisions(connection: Connection, run_id: str, decisions: Sequence[Decision], decision_id: str = "") -> None:
    """Write decisions; ``decision_id`` as ``incident_id`` in :func:`write_incidents`."""
    rows = [
        {
            "run_id": run_id,
            "decision_id": decision_id or _agent_identity(decision),
            **columns_of(DECISIONS, decision),
        }
        for decision in decisions
    ]
    insert_or_replace(connection, DECISIONS, rows)


def _agent_identity(one: Incident | Decision) -> str:
    number = f".{one.number}" if one.number else ""
    return f"{one.attempt}.{one.restart}{number}"
