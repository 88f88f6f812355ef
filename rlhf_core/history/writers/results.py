"""Rows of checkpoints, weights and evaluations."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, update

from rlhf_core.history.batch import WeightSyncEntry
from rlhf_core.history.tables.sqlalchemy_core import (
    CHECKPOINTS,
    EVALUATIONS,
    SAMPLES,
    WEIGHT_SYNCS,
    WEIGHTS,
)
from rlhf_core.history.writers.upserts import Row, columns_of, insert_or_replace
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.schemas.evaluation import EvaluationReport

_MAX_BYTES = 2**63 - 1


def write_checkpoints(
    connection: Connection, run_id: str, checkpoints: Sequence[tuple[str, CheckpointManifest]]
) -> None:
    """Write complete checkpoints, and their weights."""
    rows = [
        {
            "run_id": run_id,
            **columns_of(CHECKPOINTS, manifest),
            "path": path,
            "num_files": len(manifest.files),
            "bytes": min(sum(file.bytes for file in manifest.files.values()), _MAX_BYTES),
            "completed_at": manifest.time,
            "removed_at": None,
        }
        for path, manifest in checkpoints
    ]
    insert_or_replace(connection, CHECKPOINTS, rows)
    weights = [_weights_row(run_id, manifest) for _, manifest in checkpoints]
    insert_or_replace(connection, WEIGHTS, [row for row in weights if row is not None])


def _weights_row(run_id: str, manifest: CheckpointManifest) -> Row | None:
    files = {name: file for name, file in manifest.files.items() if name.startswith("model/") and _holds_weights(name)}
    if not files:
        return None
    return {
        "run_id": run_id,
        "version": manifest.step,
        "sha256": _combined_sha256({name: file.sha256 for name, file in files.items()}),
        "num_files": len(files),
        "checkpoint_step": manifest.step,
        "made_at": manifest.time,
    }


def _holds_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt"))


def _combined_sha256(hashes: Mapping[str, str]) -> str:
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_weight_syncs(connection: Connection, run_id: str, entries: Sequence[WeightSyncEntry]) -> None:
    """Write weight syncs; the last line about a sync counts."""
    newest = {(entry.attempt, entry.restart, entry.line.number): entry for entry in entries}
    rows = [
        {
            "run_id": run_id,
            "attempt": entry.attempt,
            "restart": entry.restart,
            **columns_of(WEIGHT_SYNCS, entry.line),
            "gb_per_s": entry.line.gb_per_s,
        }
        for entry in newest.values()
    ]
    insert_or_replace(connection, WEIGHT_SYNCS, rows)


def write_removed_checkpoints(connection: Connection, run_id: str, removed: Mapping[int, datetime]) -> None:
    """Record the time at which checkpoints were first found missing."""
    for step, seen_at in sorted(removed.items()):
        connection.execute(
            update(CHECKPOINTS)
            .where(CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.step == step, CHECKPOINTS.c.removed_at.is_(None))
            .values(removed_at=seen_at)
        )


def write_evaluations(connection: Connection, run_id: str, reports: Sequence[EvaluationReport]) -> None:
    """Write evaluations and their samples; a repeated evaluation replaces the older one."""
    for report in reports:
        key = {"run_id": run_id, "when_made": report.when, "name": report.name}
        row = {**key, **columns_of(EVALUATIONS, report), "made_at": report.time}
        insert_or_replace(connection, EVALUATIONS, [row])
        connection.execute(
            delete(SAMPLES).where(
                SAMPLES.c.run_id == run_id, SAMPLES.c.when_made == report.when, SAMPLES.c.name == report.name
            )
        )
        samples = [
            {**key, "row_index": index, **columns_of(SAMPLES, sample)} for index, sample in enumerate(report.samples)
        ]
        insert_or_replace(connection, SAMPLES, samples)
