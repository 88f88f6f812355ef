"""GPUs visible to the workers of a group."""

import pytest

from rlhf_core.machine.gpus import VISIBLE_VARIABLE, numbered_gpus
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker.groups.gpus import gpus_of, visible_gpus


def plan(*gpus: int, workers: int = 2) -> GroupPlan:
    return GroupPlan(role=Role.ROLLOUT, nodes=(0,), workers_per_node=workers, gpus=gpus, restart="alone")


@pytest.mark.parametrize(
    ("group", "local_rank", "given", "visible"),
    [
        (plan(), None, "", None),
        (plan(0, 1, 2, 3), None, "", None),
        (plan(2, 3), None, "", "2,3"),
        (plan(2, 3), 1, "", "3"),
        (plan(0, 1, 2, 3), 1, "", "2,3"),
        (plan(2, 3), 0, "GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c"),
        (plan(3, workers=2), 1, "", "3"),
    ],
    ids=["no GPU", "all of the node", "a part", "a share", "a share of all", "as the scheduler names them", "shared"],
)
def test_workers_see_the_gpus_of_their_group(
    group: GroupPlan, local_rank: int | None, given: str, visible: str | None
) -> None:
    environment = {VISIBLE_VARIABLE: given} if given else {}
    expected = {} if visible is None else {VISIBLE_VARIABLE: visible}
    assert visible_gpus(group, 4, local_rank, environment) == expected


@pytest.mark.parametrize(
    ("given", "numbered", "visible"),
    [
        ({"HIP_VISIBLE_DEVICES": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0,1"}, "4,5,6,7", "6,7"),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, "0,1,2,3", "2,3"),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "3,2,1,0"}, "3,2,1,0", "1,0"),
    ],
    ids=["as HIP is given them", "as HIP numbers them", "within the runtime's list"],
)
def test_on_an_amd_node_hip_is_given_the_list_too(given: dict[str, str], numbered: str, visible: str) -> None:
    assert numbered_gpus(given) == numbered
    assert visible_gpus(plan(2, 3), 4, None, given) == {VISIBLE_VARIABLE: visible, "HIP_VISIBLE_DEVICES": visible}


def test_slurms_list_for_every_vendor_changes_nothing_for_cuda() -> None:
    given = {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert visible_gpus(plan(2, 3), 4, None, given) == {VISIBLE_VARIABLE: "6,7"}
    assert numbered_gpus({**given, "CUDA_VISIBLE_DEVICES": ""}) == "", "a job without GPUs"
    assert numbered_gpus({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}) == ""


def test_a_worker_restarted_with_others_computes_on_the_gpu_of_its_number() -> None:
    """It sees all GPUs of its group; a worker that is restarted alone sees only its share."""
    alone = plan(4, 5, 6, 7)
    together = alone.model_copy(update={"restart": "together"})
    assert [gpus_of(alone, one) for one in (0, 1)] == [(4, 5), (6, 7)]
    assert [gpus_of(together, one) for one in (0, 1)] == [(4,), (5,)]
    assert gpus_of(plan(), 1) == ()
