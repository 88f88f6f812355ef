"""Counterpart in ``bench_history.py``: MLflow's SQLAlchemy store writing the same rows. It runs in the interpreter of a
separate environment (``make bench-history``), because MLflow's requirements are not ours.

    python tests/benchmarks/mlflow_ingest.py URL NUM_STEPS NUM_KEYS

This is its fairest use: the store itself, without a server in between, and batches of 1,000 metrics, the maximum for
``log_batch``. Prints one JSON object.
"""

import json
import logging
import math
import sys
import tempfile
import time

import mlflow
from mlflow.entities import Metric
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

BATCH = 1000


def main() -> None:
    """Write the rows and print the duration."""
    url, num_steps, num_keys = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as artifacts:
        store = SqlAlchemyStore(url, artifacts)  # creates its tables: not counted
        run = store.create_run(store.create_experiment("bench"), "anna", int(time.time() * 1000), [], "run")
        metrics = [
            Metric(f"group/key_{key}", math.sin(step * key), 1_772_366_400_000 + step * 1000, step)
            for step in range(1, num_steps + 1)
            for key in range(num_keys)
        ]
        start = time.perf_counter()
        for first in range(0, len(metrics), BATCH):
            store.log_batch(run.info.run_id, metrics[first : first + BATCH], [], [])
        seconds = time.perf_counter() - start
        kept = sum(len(store.get_metric_history(run.info.run_id, f"group/key_{key}")) for key in range(num_keys))
        print(json.dumps({"version": mlflow.__version__, "rows": kept, "seconds": seconds}))


if __name__ == "__main__":
    main()
