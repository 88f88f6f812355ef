"""Rows of the history: :func:`write_batch` writes one batch of ingestion, inside one transaction of the store.

Every statement is an upsert on a key from the files, or an update with the states that it may start from.
"""

from sqlalchemy import Connection

from rlhf_core.history.batch import IngestBatch
from rlhf_core.history.writers import attempts, checks, events, incidents, journal, metrics, results, runs


def write_batch(connection: Connection, run_id: str, batch: IngestBatch) -> None:
    """Write the rows of a batch and the offsets after it.

    Raises:
        IllegalMove: the journal has a change of state that is not in the table of moves.
    """
    journal.write_journal(connection, run_id, batch.journal)
    events.write_notes(connection, run_id, batch.notes)
    attempts.write_attempts(connection, run_id, batch.attempts)
    attempts.write_restarts(connection, run_id, batch)
    events.write_events(connection, run_id, batch.events)
    events.write_set_aside(connection, run_id, batch.set_aside)
    names = {name for entry in batch.metrics for name in entry.line.metrics}
    metrics.write_metrics(connection, run_id, batch.metrics, metrics.write_metric_keys(connection, names))
    results.write_weight_syncs(connection, run_id, batch.weight_syncs)
    attempts.write_nodes(connection, run_id, batch.nodes)
    checks.write_probes(connection, run_id, batch.probes)
    incidents.write_incidents(connection, run_id, batch.incidents)
    incidents.write_decisions(connection, run_id, batch.decisions)
    attempts.write_outcomes(connection, run_id, batch.outcomes)
    results.write_checkpoints(connection, run_id, batch.checkpoints)
    results.write_removed_checkpoints(connection, run_id, batch.removed_checkpoints)
    results.write_evaluations(connection, run_id, batch.evaluations)
    attempts.write_telemetry(connection, run_id, batch.telemetry)
    runs.write_progress(connection, run_id, batch)
    runs.write_offsets(connection, run_id, batch)
    runs.cache_goodput(connection, run_id, batch)
