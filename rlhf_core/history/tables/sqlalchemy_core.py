"""Tables and views for statements."""

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
WEIGHTS = metadata.tables["weight_versions"]

CURVE = ViewBase.metadata.tables["run_curve"]
GOODPUT = ViewBase.metadata.tables["run_goodput"]
LOST_TIME = ViewBase.metadata.tables["run_lost_time"]
