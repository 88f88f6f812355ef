"""Choice of the communication library for the links from trainers to engines: by the nodes' hardware, or as
requested."""

from typing import Any

import pytest
from rank_launcher import tiny_spec

from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.rollouts.remote import senders

pytestmark = pytest.mark.training

GPUS = {"gpus_per_node": 4, "ranks_per_node": 2}
ENGINES = {"engines": 2}


@pytest.mark.parametrize(
    ("resources", "rollout", "expected", "why"),
    [
        (GPUS, ENGINES, "nccl", ""),
        (GPUS, ENGINES | {"sync": {"senders": 2}}, "nccl", ""),
        (GPUS, ENGINES | {"sync": {"backend": "gloo"}}, "gloo", ""),
        (GPUS, ENGINES | {"sync": {"delta": True}}, "gloo", ""),
        ({}, ENGINES, "gloo", "no GPUs"),
        (GPUS | {"gpus_per_node": 3}, ENGINES, "gloo", "share a GPU"),
        (GPUS | {"gpus_per_node": 8}, ENGINES | {"engine": "vllm", "vllm": {"tensor_parallel": 2}}, "gloo", "several"),
        (GPUS, ENGINES | {"engine": "sglang"}, "gloo", "SGLang"),
        ({}, ENGINES | {"sync": {"backend": "nccl"}}, "nccl", "no GPUs"),
    ],
)
def test_nccl_is_taken_where_every_process_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, resources: Any, rollout: Any, expected: str, why: str
) -> None:
    spec = RunSpec.model_validate(tiny_spec(resources=resources, rollout=rollout))
    assert why in spec.why_not_nccl
    assert bool(why) == bool(spec.why_not_nccl)
    monkeypatch.setattr(senders, "has_nccl", lambda: True)
    assert senders.link_backend(spec) == expected
    monkeypatch.setattr(senders, "has_nccl", lambda: False)
    assert senders.link_backend(spec) == ("nccl" if rollout.get("sync") == {"backend": "nccl"} else "gloo")
