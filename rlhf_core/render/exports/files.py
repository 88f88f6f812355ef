"""One file per table: CSV, or Parquet."""

import csv
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_core.files.whole import replacing
from rlhf_core.history.queries.exports import ExportTable, reading_tables
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.exports.destination import make_folder, require
from rlhf_core.text.escaping import csv_cell, json_text


def to_csv(store: HistoryStore, run_ids: Sequence[str], out: Path) -> list[Path]:
    """Write ``<table>.csv`` to the folder ``out``: UTF-8 with a header line; times are ISO 8601, JSON is text, nulls
    are empty. Text that a spreadsheet would evaluate gets a leading apostrophe (:func:`csv_cell`)."""
    return _tables(store, run_ids, out, "csv", _write_csv)


def to_parquet(store: HistoryStore, run_ids: Sequence[str], out: Path) -> list[Path]:
    """Write ``<table>.parquet`` to the folder ``out``, even for tables without rows; JSON is text.

    Raises:
        BadInput: pyarrow is missing.
    """
    require("pyarrow.parquet", "parquet")
    return _tables(store, run_ids, out, "parquet", _write_parquet)


def _tables(
    store: HistoryStore, run_ids: Sequence[str], out: Path, suffix: str, write: Callable[[ExportTable, Path], None]
) -> list[Path]:
    make_folder(out)
    written = []
    with reading_tables(store, run_ids) as tables:
        for table in tables:
            path = out / f"{table.name}.{suffix}"
            with replacing(path) as temporary:
                write(table, temporary)
            written.append(path)
    return written


def _write_csv(table: ExportTable, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([column.name for column in table.columns])
        for batch in table.batches():
            writer.writerows([_text(value) for value in row] for row in batch)


def _write_parquet(table: ExportTable, path: Path) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    kinds = {
        "text": pyarrow.string(),
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
        "time": pyarrow.timestamp("us", tz="UTC"),
        "json": pyarrow.string(),
    }
    schema = pyarrow.schema([(column.name, kinds[column.kind]) for column in table.columns])
    with parquet.ParquetWriter(path, schema) as writer:
        for batch in table.batches():
            values = zip(*batch, strict=True)
            arrays = [
                pyarrow.array(map(_json, content) if column.kind == "json" else content, kinds[column.kind])
                for column, content in zip(table.columns, values, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _json(value: Any) -> str | None:
    return None if value is None else json_text(value)


def _text(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case dict() | list():
            return json_text(value)
    return csv_cell(value)
