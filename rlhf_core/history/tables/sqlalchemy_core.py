"""Tables and views for statements, and lists of values in them."""

from collections.abc import Collection, Iterator

from rlhf_core.history.tables import metadata
from rlhf_core.history.tables.views import ViewBase

ATTEMPTS = metadata.tables["attempts"]
CHECKPOINTS = metadata.tables["checkpoints"]
CHECKS = metadata.tables["checks"]
CONTROLLERS = metadata.tables["controllers"]
DECISIONS = metadata.tables["decisions"]
EVALUATIONS = metadata.tables["evaluations"]
EVENTS = metadata.tables["events"]
GOODPUT_CACHE = metadata.tables["goodput_cache"]
INCIDENTS = metadata.tables["incidents"]
KEYS = metadata.tables["metric_keys"]
LATEST = metadata.tables["latest_metrics"]
LEASES = metadata.tables["leases"]
METRICS = metadata.tables["metrics"]
NODES = metadata.tables["attempt_nodes"]
OFFSETS = metadata.tables["ingest_offsets"]
PROMOTIONS = metadata.tables["promotions"]
RESTARTS = metadata.tables["restarts"]
RUNS = metadata.tables["runs"]
SAMPLES = metadata.tables["evaluation_samples"]
SPEEDS = metadata.tables["node_speeds"]
STAGES = metadata.tables["stages"]
STRIKES = metadata.tables["node_strikes"]
TAGS = metadata.tables["run_tags"]
TELEMETRY = metadata.tables["node_telemetry"]
WEIGHT_SYNCS = metadata.tables["weight_syncs"]
WEIGHTS = metadata.tables["weight_versions"]

CURVE = ViewBase.metadata.tables["run_curve"]
DUPLICATES = ViewBase.metadata.tables["duplicate_incidents"]
FIGURES = ViewBase.metadata.tables["node_figures"]
GOODPUT = ViewBase.metadata.tables["run_goodput"]
LOST_TIME = ViewBase.metadata.tables["run_lost_time"]
UNDRIVEN = ViewBase.metadata.tables["undriven_times"]

_CHUNK = 500


def chunks(values: Collection[str]) -> Iterator[list[str]]:
    """Split values, in order, into lists for statements, because databases limit the number of parameters of each."""
    ordered = sorted(values)
    for begin in range(0, len(ordered), _CHUNK):
        yield ordered[begin : begin + _CHUNK]
