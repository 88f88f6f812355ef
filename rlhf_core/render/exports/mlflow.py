"""Export to MLflow: parameters, metrics with steps and times, tags, evaluations, artifacts. A repeated export adds the
new data."""

import hashlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import BadInput
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.queries.exports import CurvePoint
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.config_text import flat, setting_text
from rlhf_core.render.exports.destination import make_folder, require
from rlhf_core.render.exports.mlflow_artifacts import log_artifacts
from rlhf_core.render.exports.tracked_run import export_whole
from rlhf_core.schemas.regression import regression_text
from rlhf_core.text.redaction import masked

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_TAG = "rlhf.run_id"
"""Tag that identifies an exported run."""

_MOST_METRICS = 1000
_MOST_PARAMS = 100
_LONGEST_PARAM = 6000
_LONGEST_NAME = 250

_STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


def to_mlflow(store: HistoryStore, run_ids: Sequence[str], out: str, *, artifacts: bool = True) -> list[str]:
    """Export each run to one MLflow run, in an experiment named after the run, identified by the tag
    :data:`RUN_TAG`.

    Args:
        out: a tracking URI (``http://...``, ``sqlite:///...``, ``file://...``), or a folder, in which ``mlflow.db`` is
            created.
        artifacts: store report, settings, evaluation tables and model card as well.

    Returns:
        The MLflow run id for each run.

    Raises:
        BadInput: MLflow is missing, does not respond or refuses, or the artifacts cannot be stored.
    """
    database = Path(out) / "mlflow.db"
    is_new = "://" not in out and not database.exists()
    exported: list[str] = []
    try:
        for run_id in run_ids:
            exported.append(export_whole(store, run_id, MlflowRun(out, run_id, artifacts=artifacts)))
    finally:
        if is_new and not exported:
            database.unlink(missing_ok=True)
    return exported


def bound_requests() -> None:
    """Give up a request to MLflow after a minute, unless its variables say otherwise: by default, it retries for many
    minutes before it reports anything."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


class MlflowRun:
    """One run in MLflow."""

    def __init__(self, out: str, run_id: str, *, artifacts: bool = True) -> None:
        """Prepare the export; the arguments and errors are those of :func:`to_mlflow`."""
        require("mlflow", "mlflow")
        from mlflow import MlflowClient

        if "://" not in out:
            make_folder(Path(out))
            out = f"sqlite:///{Path(out).absolute() / 'mlflow.db'}"
        self._uri, self._run_id, self._artifacts = out, run_id, artifacts
        with self._refusals():
            self._client = MlflowClient(tracking_uri=out)
        self._names: dict[str, str] = {}
        self.place = ""
        """MLflow's id of the run, once it is written."""

    def write(self, details: RunDetails, points: Iterable[CurvePoint]) -> None:
        """Add the points that MLflow lacks. If it has some that do not count any more, or an end although the run goes
        on, its run is deleted and created again: MLflow takes back neither."""
        present = list(points)
        self._names = accepted_names(point.key for point in present)
        with self._refusals():
            experiment = self._experiment(details.run["name"])
            run = _find(self._client, experiment, self._run_id)
            known = _known_points(self._client, run) if run is not None else {}
            is_resumed = run is not None and run.info.end_time is not None and _end(details) is None
            if run is not None and (is_resumed or _is_stale(known, self._names, present)):
                self._client.delete_run(run.info.run_id)
                run, known = None, {}
            if run is None:
                started, tags = _milliseconds(details.run["created_at"]), {RUN_TAG: self._run_id}
                run = self._client.create_run(experiment, start_time=started, tags=tags, run_name=self._run_id)
            self.place = str(run.info.run_id)
            _log_params(self._client, self.place, details)
            _log_tags(self._client, self.place, details)
            lacking = (p for p in present if _identity(p) not in known.get(self._names[p.key], ()))
            _log_points(self._client, self.place, self._names, lacking)

    def add(self, details: RunDetails, points: Sequence[CurvePoint]) -> bool:
        """Log points. False if the name of an earlier one, as MLflow accepts it, now means several metrics."""
        names = accepted_names([*self._names, *(point.key for point in points)])
        if not self._names.items() <= names.items():
            return False
        self._names = names
        with self._refusals():
            _log_tags(self._client, self.place, details)
            _log_points(self._client, self.place, names, points)
        return True

    def end(self, store: HistoryStore, details: RunDetails) -> None:
        """Store the artifacts, in place of earlier ones, and record the end of the run, or that it goes on."""
        with self._refusals():
            if self._artifacts:
                log_artifacts(self._client, self.place, store, details)
            end = _end(details)
            if end is None:
                self._client.update_run(self.place, "RUNNING")
            else:
                self._client.set_terminated(self.place, end[0], end_time=end[1])

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise BadInput(
                f"MLflow at {masked(self._uri)} does not take the export: {masked(str(error)).rstrip('.')}. Correct "
                "that (a deleted experiment can be restored), or export to another place"
            ) from error

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        place = _artifact_location(self._uri)
        return str(self._client.create_experiment(name, artifact_location=f"{place}/{name}" if place else None))


def _artifact_location(uri: str) -> str | None:
    """Artifact location next to a SQLite file, because MLflow would use the current folder. None if a server
    decides."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri or not path else (Path(path).absolute().parent / "artifacts").as_uri()


def _end(details: RunDetails) -> tuple[str, int] | None:
    """Status and time of the end of a run, as MLflow has them; None if it has not ended."""
    status, ended_at = _STATUS.get(details.run["state"]), details.run["ended_at"]
    return None if status is None or ended_at is None else (status, _milliseconds(ended_at))


def _find(client: "MlflowClient", experiment: str, run_id: str) -> "Run | None":
    found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run_id}'")
    return found[0] if found else None


# ---------------------------------------------------------------------------------------------------------------------
# Names


def accepted_names(names: Iterable[str]) -> dict[str, str]:
    """Names of metrics or parameters as MLflow accepts them; distinct names stay distinct."""
    clean = {name: _clean_name(name) for name in names}
    times = Counter(clean.values())
    return {
        name: found
        if len(found) <= _LONGEST_NAME and (found == name or times[found] == 1)
        else f"{found[: _LONGEST_NAME - 9]}_{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
        for name, found in clean.items()
    }


def _clean_name(text: str) -> str:
    """Replace the characters that MLflow refuses in names, and the parts that would not stay in a path."""
    parts = re.sub(r"[^\w\-./ ]", "_", text).split("/")
    return "/".join(re.sub(r"^\.+", lambda dots: "_" * len(dots[0]), part) or "_" for part in parts)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def _known_points(client: "MlflowClient", run: "Run") -> dict[str, set[tuple[int, int]]]:
    """Step and time of every value in MLflow, by name. A repeated step has a different time."""
    return {
        key: {(point.step, point.timestamp) for point in client.get_metric_history(run.info.run_id, key)}
        for key in run.data.metrics
    }


def _is_stale(
    known: Mapping[str, set[tuple[int, int]]], names: Mapping[str, str], points: Iterable[CurvePoint]
) -> bool:
    """True if MLflow has values that no longer count."""
    num_valid = sum(_identity(point) in known.get(names[point.key], ()) for point in points)
    return num_valid < sum(map(len, known.values()))


def _log_points(client: "MlflowClient", target: str, names: Mapping[str, str], points: Iterable[CurvePoint]) -> None:
    from mlflow.entities import Metric

    logged = (Metric(names[point.key], _storable(point.value), _identity(point)[1], point.step) for point in points)
    while batch := list(islice(logged, _MOST_METRICS)):
        client.log_batch(target, metrics=batch)


def _identity(point: CurvePoint) -> tuple[int, int]:
    return point.step, round(point.time.timestamp() * 1000)


def _storable(value: float) -> float:
    """Replace infinity by the largest number, as MLflow's own databases do; NaN stays."""
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


# ---------------------------------------------------------------------------------------------------------------------
# Tags and parameters


def _log_params(client: "MlflowClient", target: str, details: RunDetails) -> None:
    from mlflow.entities import Param

    settings = flat(details.run["spec"])
    names = accepted_names(settings)
    params = [Param(names[name], setting_text(value)[:_LONGEST_PARAM]) for name, value in settings.items()]
    for start in range(0, len(params), _MOST_PARAMS):
        client.log_batch(target, params=params[start : start + _MOST_PARAMS])


def _log_tags(client: "MlflowClient", target: str, details: RunDetails) -> None:
    from mlflow.entities import RunTag

    tags = [RunTag(f"rlhf.{name}", str(value)) for name, value in facts(details).items() if value not in (None, "")]
    client.log_batch(target, tags=tags)


def facts(details: RunDetails) -> dict[str, Any]:
    """Tags of a run, without their prefix; those without a value are omitted."""
    run: Mapping[str, Any] = details.run
    return {
        **{name: run[name] for name in ("state", "owner", "algorithm", "code_revision", "package_version", "message")},
        "regressed": regression_text(details.regressed),
        "tags": ", ".join(run["tags"]),
        "num_attempts": len(details.attempts),
        "num_incidents": len(details.counted_incidents),
        **{f"goodput.{name}": details.goodput.get(name) for name in ("ettr", "wall_s", "lost_s")},
    }


def _milliseconds(iso: str) -> int:
    return round(datetime.fromisoformat(iso).timestamp() * 1000)
