"""Several trainer ranks that send weights to real engines: completions are those of the model itself, bit for bit."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from core_models import PROMPTS, SEEDS, tiny_model, tokens_of
from engine_groups import EngineGroup, no_beat
from process_tools import until
from rank_launcher import launch, make_context, values
from test_remote_engines import DRAWN, in_process, weights_of

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.weight_sync import broadcast, layout

pytestmark = [pytest.mark.training, pytest.mark.end_to_end, pytest.mark.usefixtures("ranks")]

VERSIONS = (1, 2, 3)
STARTS = itertools.count(1)


def follow(
    rank: int, num_ranks: int, root: str, spec: dict[str, Any], restart: int, zero_stage: int, go_on: str, fails: bool
) -> dict[str, Any]:
    """Scenario of one trainer rank: completions with three versions, and the transfers that it made.

    Args:
        go_on: file whose existence lets the last version start.
        fails: rank 1 fails in the middle of its first share.
    """
    from rlhf_core.schemas.trainers import NativeTrainer
    from rlhf_core.training import distributed
    from rlhf_core.training.models import gathering
    from rlhf_core.training.models.causal_lm import PolicyModel
    from rlhf_core.training.rollouts.remote import senders
    from rlhf_core.training.trainers.engine import split_frozen

    layout.SMALLEST_BUCKET_BYTES = 1024
    context = make_context(root, spec, rank, num_ranks, restart=restart)
    ranks = distributed.init_process_group(context)
    trainer = RemoteEngines(context, ranks)
    sound, sent, tries = broadcast.checksum, 0, list[str]()
    synchronize = senders.synchronize

    def counted(data: Any) -> bytes:
        nonlocal sent
        sent += 1
        if fails and rank == 1 and sent == 5:
            raise ZeroDivisionError("a fault of a test")
        return sound(data)

    def tried(*arguments: Any, **named: Any) -> Any:
        try:
            report = synchronize(*arguments, **named)
        except WeightSyncFailed as error:
            tries.append(error.peer)
            raise
        tries.append("")
        return report

    broadcast.checksum, senders.synchronize = counted, tried
    made = []
    for version in VERSIONS:
        policy = PolicyModel(tiny_model(seed=version))
        if zero_stage == 3:
            split_frozen(policy, "float32", ranks, NativeTrainer(zero_stage=3))
        assert gathering.is_split(policy.causal_lm) == (zero_stage == 3)
        if version == VERSIONS[-1]:
            Path(f"{go_on}-{rank}").touch()
            until(Path(go_on).exists)
        trainer.load(policy.causal_lm, version, no_beat)
        made.append(tokens_of(trainer.sample(ranks.deal(PROMPTS), ranks.deal(SEEDS), DRAWN, version, no_beat)))
    distributed.leave_process_group(ranks)
    trainer.close()
    return {"made": made, "sent": sent, "tries": tries}


def follow_with(group: EngineGroup, folder: Path, zero_stage: int, *, kill: bool = False, fails: bool = False) -> Any:
    """Attempts of rank 0 to send versions, of two ranks that both send; an engine is restarted before the last version.

    Args:
        kill: also kill an engine in the middle of the first rollout.
    """
    go_on, gates = folder / "go-on", [group.gate("decode", rank) for rank in range(2)]
    arguments: dict[str, Any] = {
        "spec": {**group.spec, "rollout": {**group.spec["rollout"], "sync": {"senders": 2}}},
        "restart": next(STARTS),
        "zero_stage": zero_stage,
        "go_on": str(go_on),
        "fails": fails,
    }
    if kill:
        for gate in gates:
            gate.close()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(launch, follow, 2, folder, root=str(group.root), **arguments)
        if kill:
            until(lambda: all(gate.reached.exists() for gate in gates) or running.done())
            group.kill(1)
            gates[1].open()
            group.start(1)
            until(lambda: weights_of(group, 1) == VERSIONS[0] or running.done())
            gates[0].open()
        until(lambda: all(Path(f"{go_on}-{rank}").exists() for rank in range(2)) or running.done())
        group.restart(0)
        go_on.touch()
        first, second = values(running.result())
    made = [one + other for one, other in zip(first["made"], second["made"], strict=True)]
    assert made == [in_process(version) for version in VERSIONS]
    assert made[0] != made[1] != made[2], "weights without effect would prove nothing"
    assert second["sent"] > 0
    assert [weights_of(group, rank) for rank in range(2)] == [3, 3]
    return first["tries"]


def test_engines_that_come_back_cost_no_attempt(group: EngineGroup, tmp_path: Path) -> None:
    """One is killed in mid-rollout, so that rank 0 alone gives it the weights again; another one is restarted between
    two versions."""
    assert follow_with(group, tmp_path, zero_stage=1, kill=True) == ["", "", "", ""]


def test_a_rank_that_fails_in_its_share_is_named_and_the_version_sent_again(group: EngineGroup, tmp_path: Path) -> None:
    """The weights are split, so that all ranks have to gather them to the end."""
    assert follow_with(group, tmp_path, zero_stage=3, fails=True) == ["trainer-1", "", "", ""]
