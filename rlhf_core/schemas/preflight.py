"""Settings of preflight."""

from typing import Literal

from rlhf_core.schemas.base import NonNegativeFloat, Positive, PositiveFloat, Schema, Share


class PreflightSpec(Schema):
    """Checks before training, and how strict they are."""

    off: dict[str, str] = {}
    """Checks that are not made: id of the check to the reason, which is kept with the run."""
    probe: bool = True
    """Compare the nodes of every attempt and measure them, before its workers start."""
    trial: Literal["off", "propose", "run"] = "propose"
    """Answer to data, algorithm, versions or scale that have changed since the last good run of this name: `propose` a
    short trial, `run` one by itself (one node, then all nodes, a few steps each), or neither."""
    trial_steps: Positive = 3
    """Steps of a trial."""
    per_node_variables: tuple[str, ...] = ()
    """Environment variables that may differ between nodes, besides those that always do; `*` stands for any text."""
    max_clock_offset_s: PositiveFloat = 5.0
    """Largest difference between the clocks of two nodes, in seconds."""
    min_free_disk_gb: NonNegativeFloat = 1.0
    """Least room in the temporary folder and the shared memory of every node, in GiB."""
    min_relative_speed: Share = 0.5
    """A node slower than this share of the median of all nodes, or of its own earlier readings, is not trained on; 0
    to only measure."""
    min_bandwidth_gb_s: NonNegativeFloat = 0.0
    """Least bandwidth between two nodes, in GB/s; 0 for no floor of its own."""
    max_latency_ms: NonNegativeFloat = 0.0
    """Largest time of a small message to another node and back, in milliseconds; 0 for no limit of its own."""
    min_matmul_tflops: NonNegativeFloat = 0.0
    """Least speed of matrix products per rank, in TFLOP/s; 0 for no floor of its own."""
    meet_s: PositiveFloat = 60.0
    """Time for which the first node waits for the others, in seconds; then it names who has not come."""
    probe_s: PositiveFloat = 60.0
    """Longest time for all measurements together, in seconds; what does not answer until then is named."""
