"""Settings of preflight."""

from typing import Literal

from rlhf_core.schemas.base import NonNegativeFloat, Positive, PositiveSeconds, Schema, UnitInterval


class PreflightSpec(Schema):
    """Checks before training and their thresholds."""

    off: dict[str, str] = {}
    """Checks to turn off: the id of each check, with the reason, which is stored with the run."""
    probe: bool = True
    """Compare and measure the nodes of every attempt before its workers start."""
    trial: Literal["off", "propose", "run"] = "propose"
    """Response to data, algorithm, versions or scale that have changed since the last successful run of this name:
    `propose` a short trial, `run` one automatically (one node, then all nodes, a few steps each), or neither."""
    trial_steps: Positive = 3
    """Steps of a trial."""
    per_node_variables: tuple[str, ...] = ()
    """Environment variables that may differ between nodes, besides those that always do; `*` stands for any text."""
    max_clock_offset_s: PositiveSeconds = 5.0
    """Largest difference between the clocks of two nodes, in seconds."""
    min_free_disk_gb: NonNegativeFloat = 1.0
    """Minimum free space in the temporary folder and the shared memory of every node, in GiB."""
    min_relative_speed: UnitInterval = 0.5
    """Share of the median of all nodes, or of its own earlier readings, below which a node is too slow for training; 0
    only measures."""
    min_bandwidth_gb_s: NonNegativeFloat = 0.0
    """Minimum bandwidth between two nodes, in GB/s; 0 for no fixed floor."""
    max_latency_ms: NonNegativeFloat = 0.0
    """Maximum round trip time of a small message to another node, in milliseconds; 0 for no fixed limit."""
    min_matmul_tflops: NonNegativeFloat = 0.0
    """Minimum speed of matrix products per rank, in TFLOP/s; 0 for no fixed floor."""
    probe_s: PositiveSeconds = 60.0
    """Time limit for all measurements together, in seconds; every node after the first adds a second, because all ranks
    import from one file system and then meet. Ranks and nodes that have not responded by then are reported."""

    def measurement_s(self, num_nodes: int) -> float:
        """Time limit for all measurements of this many nodes together, in seconds."""
        return self.probe_s + num_nodes - 1
