"""Export to MLflow: parameters, metrics with steps and times, tags, evaluations, artifacts. A repeated export adds the
new data."""

import hashlib
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import BadInput
from rlhf_core.history import queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.queries.exports import CurvePoint, curve_points
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.config_text import flat, setting_text
from rlhf_core.render.exports.common import evaluation_points, make_folder, require
from rlhf_core.render.exports.mlflow_artifacts import log_artifacts
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
    require("mlflow", "mlflow")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    new: Path | None = None
    if "://" not in out:
        folder = Path(out).absolute()
        make_folder(folder)
        file = folder / "mlflow.db"
        new = None if file.exists() else file
        out = f"sqlite:///{file}"
    exported: list[str] = []
    try:
        client, place = MlflowClient(tracking_uri=out), _artifact_location(out)
        for run_id in run_ids:
            exported.append(_export(client, store, run_id, place, artifacts=artifacts))
    except MlflowException as error:
        raise BadInput(
            f"MLflow at {masked(out)} does not take the export: {masked(str(error)).rstrip('.')}. Correct that (a "
            "deleted experiment can be restored), or choose another place with --out"
        ) from error
    finally:
        if new is not None and not exported:
            new.unlink(missing_ok=True)
    return exported


def _artifact_location(uri: str) -> str | None:
    """Artifact location next to a SQLite file, because MLflow would use the current folder. None if a server
    decides."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri or not path else (Path(path).absolute().parent / "artifacts").as_uri()


def _export(client: "MlflowClient", store: HistoryStore, run_id: str, location: str | None, *, artifacts: bool) -> str:
    details = queries.show_run(store, run_id)
    experiment = _experiment(client, details.run["name"], location)
    run = _find(client, experiment, run_id)
    names = accepted_names([*details.metric_keys, *(point.key for point in evaluation_points(details.evaluations))])
    known = _known_points(client, run) if run is not None else {}
    status = _STATUS.get(details.run["state"])
    is_resumed = run is not None and status is None and run.info.end_time is not None
    if run is not None and (is_resumed or _is_stale(known, names, _points(store, details))):
        # MLflow never takes back the end of a run, and never overwrites the value of a step, which may be repeated.
        client.delete_run(run.info.run_id)
        run, known = None, {}
    if run is None:
        started = _milliseconds(details.run["created_at"])
        run = client.create_run(experiment, start_time=started, tags={RUN_TAG: run_id}, run_name=run_id)
    target = str(run.info.run_id)
    _log_facts(client, target, details)
    _log_points(client, target, known, names, _points(store, details))
    if artifacts:
        log_artifacts(client, target, store, details)
    ended_at = details.run["ended_at"]
    if status is not None and ended_at is not None:
        client.set_terminated(target, status, end_time=_milliseconds(ended_at))
    else:
        client.update_run(target, "RUNNING")
    return target


def _experiment(client: "MlflowClient", name: str, location: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(name, artifact_location=f"{location}/{name}" if location else None))


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


def _points(store: HistoryStore, details: RunDetails) -> Iterator[CurvePoint]:
    return chain(curve_points(store, details.run["run_id"]), evaluation_points(details.evaluations))


def _known_points(client: "MlflowClient", run: "Run") -> dict[str, set[tuple[int, int]]]:
    """Step and time of every value in MLflow, by name. A repeated step has a different time."""
    return {
        key: {(point.step, point.timestamp) for point in client.get_metric_history(run.info.run_id, key)}
        for key in run.data.metrics
    }


def _is_stale(
    known: Mapping[str, set[tuple[int, int]]], names: Mapping[str, str], points: Iterator[CurvePoint]
) -> bool:
    """True if MLflow has values that no longer count."""
    num_valid = sum(_identity(point) in known.get(names[point.key], ()) for point in points)
    return num_valid < sum(map(len, known.values()))


def _log_points(
    client: "MlflowClient",
    target: str,
    known: Mapping[str, set[tuple[int, int]]],
    names: Mapping[str, str],
    points: Iterator[CurvePoint],
) -> None:
    from mlflow.entities import Metric

    new = (
        Metric(names[point.key], _storable(point.value), _identity(point)[1], point.step)
        for point in points
        if _identity(point) not in known.get(names[point.key], ())
    )
    while batch := list(islice(new, _MOST_METRICS)):
        client.log_batch(target, metrics=batch)


def _identity(point: CurvePoint) -> tuple[int, int]:
    return point.step, round(point.time.timestamp() * 1000)


def _storable(value: float) -> float:
    """Replace infinity by the largest number, as MLflow's own databases do; NaN stays."""
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


# ---------------------------------------------------------------------------------------------------------------------
# Tags and parameters


def _log_facts(client: "MlflowClient", target: str, details: RunDetails) -> None:
    from mlflow.entities import Param, RunTag

    run = details.run
    settings = flat(run["spec"])
    names = accepted_names(settings)
    params = [Param(names[name], setting_text(value)[:_LONGEST_PARAM]) for name, value in settings.items()]
    for start in range(0, len(params), _MOST_PARAMS):
        client.log_batch(target, params=params[start : start + _MOST_PARAMS])
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
