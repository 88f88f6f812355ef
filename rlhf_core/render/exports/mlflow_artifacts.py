"""Files under *Artifacts* of a run in MLflow: report, settings, evaluation tables, model card.

Only small texts, replaced as a whole by a repeated export. Weights are not copied: the model card and ``rlhf.json``
give their location and checksums.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlhf_core.errors import BadInput
from rlhf_core.history import queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.config_text import as_toml
from rlhf_core.render.gather import gather
from rlhf_core.render.run_page import page
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.escaping import json_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

MOST_BYTES = 16 << 20
"""Size above which a text is left out: artifacts are meant to be viewed in a browser."""

_CARD_FILES = ("README.md", "rlhf.json")
"""Files in a promoted model's folder that describe the model."""

_TABLES_TAG = "mlflow.loggedArtifacts"
"""Tag by which MLflow recognises artifacts that are tables."""

_TABLE_COLUMNS = ("prompt_uid", "sample_index", "prompt", "completion", "answer", "score")


def log_artifacts(client: "MlflowClient", target: str, store: HistoryStore, details: RunDetails) -> None:
    """Store the texts of a run as artifacts of its MLflow run.

    Raises:
        BadInput: MLflow's artifact location is not writable.
    """
    from mlflow.exceptions import MlflowException

    tables = []
    try:
        for path, text in _texts(store, details):
            if len(text.encode()) > MOST_BYTES:
                continue
            client.log_text(target, text, path)
            if path.startswith("evaluation/"):
                tables.append({"path": path, "type": "table"})
        client.set_tag(target, _TABLES_TAG, json.dumps(tables))
    except (MlflowException, OSError) as error:
        raise BadInput(
            f"the numbers of {details.run['run_id']} are in MLflow, but its artifacts cannot be stored at "
            f"{client.get_run(target).info.artifact_uri}: {error}. Mend that and export again, or give --no-artifacts"
        ) from None


def _texts(store: HistoryStore, details: RunDetails) -> Iterator[tuple[str, str]]:
    """Path and content of each artifact."""
    run_id, spec = details.run["run_id"], details.run["spec"]
    yield "report.html", page(gather(store, RunDir(Path(details.run["run_dir"]))))
    yield "config/spec.json", json_text(spec, indent=2) + "\n"
    with suppress(ValidationError):  # written by another version: the JSON has it
        yield "config/config.toml", as_toml(RunSpec.model_validate(spec))
    for row in details.evaluations:
        samples = queries.evaluation_samples(store, run_id, row["when"], row["name"])
        if samples:
            yield f"evaluation/{row['when']}_{row['name']}.json", _table(samples)
    folder = details.promotion["path"] if details.promotion else ""
    for name in _CARD_FILES if folder else ():
        with suppress(OSError, UnicodeDecodeError):  # moved since, or not visible from here
            yield f"model_card/{name}", (Path(folder) / name).read_text(encoding="utf-8")


def _table(rows: list[dict[str, Any]]) -> str:
    """A table in the form read by ``mlflow.load_table`` and MLflow's pages."""
    columns = [name for name in _TABLE_COLUMNS if name in rows[0]]
    return json.dumps({"columns": columns, "data": [[row[name] for name in columns] for row in rows]})
