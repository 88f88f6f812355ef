"""Caps on the total resources of all attempts of a run."""

import control_fakes
import pytest
from pydantic import ValidationError

from rlhf_core.diagnosis.attempt_caps import Used, refusal, time_limit_s
from rlhf_core.schemas.run import RunSpec


def make_spec(num_nodes: int = 2, gpus_per_node: int = 4, **supervise: float) -> RunSpec:
    resources = {"num_nodes": num_nodes, "gpus_per_node": gpus_per_node, "time_limit_s": 36000}
    return control_fakes.make_spec(resources=resources, supervise=supervise)


def test_without_a_cap_nothing_ends() -> None:
    used = Used(attempts=999, allocated_s=1e9)
    assert refusal(make_spec(), used) == ""
    assert time_limit_s(make_spec(), used) == 36000


def test_attempts_are_counted_in_all() -> None:
    spec = make_spec(max_total_attempts=2)
    assert refusal(spec, Used(1)) == ""
    assert refusal(spec, Used(2)) == "supervise.max_total_attempts = 2: 2 attempts made"


def test_hours_count_for_every_gpu_or_node_of_the_allocation() -> None:
    """8 GPUs on 2 nodes: an hour of the allocation is 8 GPU-hours, or 2 node-hours."""
    for spec in (
        make_spec(max_gpu_hours=16),
        make_spec(max_node_hours=4),
        make_spec(max_gpu_hours=16, max_node_hours=9),
    ):
        assert time_limit_s(spec, Used(0)) == 7200
        assert time_limit_s(spec, Used(1, 3600.0)) == 3600
        assert refusal(spec, Used(1, 3600.0)) == ""
        # The 120 s of the save request, and a minute because Slurm may be early.
        assert refusal(spec, Used(1, 7019.0)) == ""
        assert "the remaining time is too short" in refusal(spec, Used(1, 7021.0))
        assert time_limit_s(spec, Used(1, 9999.0)) == 1
    assert refusal(make_spec(max_gpu_hours=16), Used(2, 7200.0)) == (
        "supervise.max_gpu_hours = 16: 16.00 GPU-hours used in 2 attempts; "
        "the remaining time is too short to train and save"
    )


def test_the_remaining_time_must_suffice_for_a_step() -> None:
    """Steps of 10 min end an attempt up to 12 min before the cap: another one would be killed in its first step."""
    spec = make_spec(max_gpu_hours=16)
    assert "too short to train and save" in refusal(spec, Used(1, 6500.0), step_s=600.0)
    assert refusal(spec, Used(1, 6500.0), step_s=300.0) == ""


def test_gpu_hours_without_gpus_are_refused_with_what_to_write() -> None:
    with pytest.raises(ValidationError, match=r"there are no GPU-hours to count; set supervise\.max_node_hours"):
        make_spec(gpus_per_node=0, max_gpu_hours=1)
    assert refusal(make_spec(gpus_per_node=0, max_node_hours=1), Used(1, 9999.0))
