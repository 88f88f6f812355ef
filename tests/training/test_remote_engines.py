"""Rollout engines in separate processes, over real HTTP: their completions equal those of an engine in the trainer."""

import contextlib
import itertools
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import torch
from core_models import PROMPTS, QWEN, SEEDS, char_tokenizer, tiny_model, tokens_of
from engine_groups import EngineGroup, assert_follows, assert_takes_turns, engine_group, no_beat
from process_tools import until
from rank_launcher import launch, make_context, values

from rlhf_core.errors import EnginesLost, StaleWeights, WeightSyncFailed
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.engines import EngineHealth
from rlhf_core.schemas.weight_sync import Transport
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import RolloutEngine, Sampling
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.rollouts.weight_probe import probe_of, require_same

pytestmark = [pytest.mark.training, pytest.mark.end_to_end, pytest.mark.usefixtures("ranks")]

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, batch_size=8)
DRAWN = Sampling(max_new_tokens=12, temperature=1.0, batch_size=8)


@pytest.fixture
def trainer(group: EngineGroup) -> RemoteEngines:
    """A trainer whose version 1 is in force on both engines."""
    trainer = group.trainer(restart=next(STARTS))
    trainer.load(tiny_model(), 1, no_beat)
    return trainer


STARTS = itertools.count(1)


def in_process(seed: int = 0) -> list[list[list[int]]]:
    """Completions of an engine in this process with the weights of this seed."""
    engine = TransformersEngine(char_tokenizer())
    engine.load(tiny_model(seed=seed), 1, no_beat)
    return tokens_of(engine.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat))


def is_diverse(made: Sequence[Sequence[Sequence[int]]]) -> bool:
    """True if no two completions of a prompt are the same."""
    return all(len({tuple(tokens) for tokens in group}) == len(group) for group in made)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_version_is_that_of_the_trainer(group: EngineGroup, tied: bool, tmp_path: Path) -> None:
    """Greedy completions, texts and log-probabilities equal those of an engine in the trainer's process."""
    with contextlib.ExitStack() as stack:
        if not tied:
            group = stack.enter_context(engine_group(tmp_path, 1, {**QWEN, "tie_word_embeddings": False}))
        follows_the_trainer(group)


def follows_the_trainer(group: EngineGroup, **sync: Any) -> None:
    models = [tiny_model(group.spec["model"]["config"], seed=version) for version in range(3)]
    assert_follows(group.trainer(restart=next(STARTS), **sync), models, PROMPTS, SEEDS, GREEDY)


def test_rollouts_of_several_turns(group: EngineGroup, ranks: Ranks) -> None:
    assert_takes_turns(group.trainer(restart=next(STARTS)), tiny_model(), 1, ranks)


@pytest.mark.parametrize("transport", [Transport.SHARED_MEMORY, Transport.FILES])
def test_engines_follow_weights_that_come_another_way(group: EngineGroup, transport: Transport) -> None:
    follows_the_trainer(group, transport=transport)


def test_engines_follow_deltas(group: EngineGroup) -> None:
    """The whole weights, then deltas, and the whole weights again for an engine that was restarted."""
    remote, peer = group.trainer(restart=next(STARTS), delta=True), TransformersEngine(char_tokenizer())
    model = tiny_model()
    moved = []
    for version in range(4):
        if version == 3:
            group.restart(1)
        with torch.no_grad():
            model.get_output_embeddings().weight[version + 40].mul_(-3)
        transfer = remote.load(model, version, no_beat)
        peer.load(model, version, no_beat)
        assert transfer is not None
        assert transfer.transport == "broadcast over gloo"
        moved.append(transfer.bytes)
        found, expected = (tokens_of(one.sample(PROMPTS, SEEDS, GREEDY, version, no_beat)) for one in (remote, peer))
        assert found == expected
    whole, first, second, after_restart = moved
    assert first == second < whole / 20
    assert after_restart == whole


def test_a_completion_follows_from_its_seed_on_any_number_of_engines(group: EngineGroup) -> None:
    """Completions are distinct and reproducible on one engine, on two, and after a restart; the control has a single
    seed."""
    expected = in_process()
    one, both = group.trainer(restart=next(STARTS), num_engines=1), group.trainer(restart=next(STARTS))
    for trainer in (one, both):
        trainer.load(tiny_model(), 1, no_beat)
        made = tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat))
        assert made == expected
        assert is_diverse(made)
    group.kill(1)
    group.start(1)
    assert tokens_of(both.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)) == expected
    shared = [[7] * len(seeds) for seeds in SEEDS]
    assert not is_diverse(tokens_of(both.sample(PROMPTS, shared, DRAWN, 1, no_beat)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_prompts_of_an_engine_that_fails_in_mid_rollout_go_to_the_others(
    group: EngineGroup, trainer: RemoteEngines, number: int
) -> None:
    """No completion is lost, none occurs twice, and all equal those of an undisturbed rollout."""
    gate = group.gate("decode", 1).close()
    with ThreadPoolExecutor() as pool:
        made = pool.submit(trainer.sample, PROMPTS, SEEDS, DRAWN, 1, no_beat)
        until(gate.reached.exists)
        group.signal(1, number)
        gate.open()
        assert tokens_of(made.result()) == in_process()
    counts = trainer.take_counts()
    assert counts["rollout/moved_prompts"] > 0
    assert counts["rollout/refused_completions"] == 0
    if number == signal.SIGSTOP:
        group.signal(1, signal.SIGCONT)
    else:
        group.start_missing()
    assert tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)) == in_process()


def test_an_engine_that_answers_and_makes_no_step_is_given_up(group: EngineGroup) -> None:
    """The process is alive and its server answers: only the lack of progress shows the fault."""
    group.spec["rollout"]["remote"]["stall_timeout_s"] = 1.0
    trainer = group.trainer(restart=next(STARTS))
    trainer.load(tiny_model(), 1, no_beat)
    gate = group.gate("decode", 0).close()
    assert tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)) == in_process()
    assert trainer.take_counts()["rollout/moved_prompts"] > 0
    gate.open()
    group.spec["rollout"]["remote"]["stall_timeout_s"] = 120.0


def test_a_rollout_waits_for_engines_that_are_restarted(group: EngineGroup, trainer: RemoteEngines) -> None:
    """All engines are killed in mid-rollout; the first one to return is given the weights and finishes the rollout."""
    gates = [group.gate("decode", rank).close() for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        made = pool.submit(trainer.sample, PROMPTS, SEEDS, DRAWN, 1, no_beat)
        for rank, gate in enumerate(gates):
            until(gate.reached.exists)
            group.kill(rank)
            gate.open()
        group.start(0)
        assert tokens_of(made.result()) == in_process()


def test_the_only_engine_is_given_weights_at_once_when_it_comes_back(
    group: EngineGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before, the links to its earlier start were tried first, and the next try came only ``sync_timeout_s`` later."""
    trainer = group.trainer(restart=next(STARTS), num_engines=1, delta=True)
    for version in (0, 1):
        trainer.load(tiny_model(seed=1 - version), version, no_beat)
    group.restart(0)
    assert tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)) == in_process()
    group.restart(0)
    trainer.load(tiny_model(seed=2), 2, no_beat)
    printed = capfd.readouterr().out
    assert printed.count("engine-0 came back and has the weights of step 1") == 1
    assert "did not receive" not in printed


def test_the_loss_of_an_engine_costs_the_others_no_delta(group: EngineGroup) -> None:
    """Negative control of the test above: their links and earlier version are relied on as long as they live."""
    trainer = group.trainer(restart=next(STARTS), delta=True)
    model = tiny_model()
    trainer.load(model, 0, no_beat)
    group.kill(1)
    publisher = trainer._weights._publisher
    assert publisher is not None
    with mock.patch.object(publisher._sender, "reset") as reset:
        transfer = trainer.load(model, 1, no_beat)
    assert transfer is not None
    assert transfer.bytes < sum(weight.nbytes for weight in model.parameters()) / 10
    reset.assert_not_called()


def test_without_an_engine_the_wait_comes_to_an_end(group: EngineGroup, trainer: RemoteEngines) -> None:
    rollouts, registry = trainer.continuous, trainer._weights._registry
    registry._settings = rollouts._spec.remote.model_copy(update={"start_timeout_s": 1.0})
    rollouts._spec = rollouts._spec.model_copy(update={"remote": registry._settings})
    for rank in range(2):
        group.kill(rank)
    with pytest.raises(EnginesLost, match=r"no rollout engine has served.*start_timeout_s = 1"):
        trainer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)
    beats: list[float] = []
    with pytest.raises(EnginesLost, match=r"no rollout engine responded.*engine-0 does not respond"):
        trainer.load(tiny_model(seed=2), 2, lambda: beats.append(time.monotonic()))
    # Otherwise the agent would judge this wait as silence in the phase before, such as the training step.
    assert time.monotonic() - beats[0] >= 1.0
    assert len(beats) == 1, "too few to make the phase warm before the first sync"
    registry._beat_every_s, beats = 0.2, []
    with pytest.raises(EnginesLost):
        trainer.load(tiny_model(seed=2), 2, lambda: beats.append(time.monotonic()))
    assert len(beats) > 3, "an engine may take longer to start than a silence of this phase may last"


def test_an_engine_that_skips_an_update_does_not_serve(group: EngineGroup, trainer: RemoteEngines) -> None:
    """It acknowledges the weights; its outputs show that it has not loaded them."""
    skip = group.gate("skip", 1).close()
    trainer.load(tiny_model(seed=5), 2, no_beat)
    gate = group.gate("decode", 1).close()
    assert tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 2, no_beat)) == in_process(5)
    assert not gate.reached.exists(), "the engine that skipped the update received no requests"
    gate.open()
    skip.open()
    group.processes[1].join()
    group.start(1)


def test_an_update_that_is_skipped_is_found_however_small_it_is(group: EngineGroup, trainer: RemoteEngines) -> None:
    """One step at a usual learning rate changes the outputs by less than rounding may. A version with the same weights
    is no update."""
    before, after = tiny_model(seed=5), tiny_model(seed=5)
    with torch.no_grad():
        for weight in after.parameters():
            weight.add_(1e-6 * weight.sign())
    old, new = (probe_of(model, 32, "float32") for model in (before, after))
    require_same("engine-1", old.logprobs, new)
    trainer.load(before, 2, no_beat)
    skip = group.gate("skip", 1).close()
    trainer.load(before, 3, no_beat)
    assert [weights_of(group, rank) for rank in range(2)] == [3, 3]
    trainer.load(after, 4, no_beat)
    assert [weights_of(group, rank) for rank in range(2)] == [4, None]
    skip.open()
    trainer.load(before, 5, no_beat)
    assert [weights_of(group, rank) for rank in range(2)] == [5, 5]


def test_an_engine_that_skips_two_updates_in_a_row_ends_to_be_started_again(
    group: EngineGroup, trainer: RemoteEngines
) -> None:
    """One skipped update is no reason, nor is another after a correct one. A rollout, which offers the weights again,
    counts too."""
    skip = group.gate("skip", 1)
    for version, skips in ((2, True), (3, False), (4, True)):
        (skip.close if skips else skip.open)()
        trainer.load(tiny_model(seed=version), version, no_beat)
        assert group.processes[1].is_alive()
        assert weights_of(group, 1) == (None if skips else version)
    trainer.load(tiny_model(seed=5), 5, no_beat)
    group.processes[1].join()
    assert "StaleWeights: engine 1 did not load its weights, or not correctly, in 2 syncs" in group.output(1)
    assert weights_of(group, 0) == 5
    skip.open()
    before = group.address(1)
    group.start(1)
    until(lambda: group.address(1) != before)
    trainer.load(tiny_model(seed=6), 6, no_beat)
    assert weights_of(group, 1) == 6


def test_a_run_ends_where_engines_skip_updates_after_a_new_start_as_well(
    group: EngineGroup, trainer: RemoteEngines
) -> None:
    skips = [group.gate("skip", rank).close() for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        loaded = pool.submit(trainer.load, tiny_model(seed=5), 2, no_beat)
        while not loaded.done():
            group.start_missing()
            time.sleep(0.02)
    with pytest.raises(StaleWeights, match="different log-probabilities"):
        loaded.result()
    for skip in skips:
        skip.open()
    trainer.load(tiny_model(seed=6), 3, no_beat)
    group.start_missing()


def test_an_engine_that_fails_every_request_ends_to_be_started_again(
    group: EngineGroup, trainer: RemoteEngines
) -> None:
    """Its server answers and its weights are right, so nothing else ends it. The others have its prompts meanwhile."""
    fault = group.gate("fail", 1).close()
    expected = in_process()

    def is_ended() -> bool:
        assert tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)) == expected
        return not group.processes[1].is_alive()

    until(is_ended)
    assert "SamplingFailed: engine 1 failed 10 requests in a row" in group.output(1)
    assert "The last error: RuntimeError: the cache is corrupt" in group.output(1)
    fault.open()
    group.start(1)
    until(lambda: not is_ended() and weights_of(group, 1))


def test_a_run_ends_where_engines_fail_every_request_after_a_new_start_as_well(
    group: EngineGroup, trainer: RemoteEngines
) -> None:
    faults = [group.gate("fail", rank).close() for rank in range(2)]
    generation = group.generation
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            made = pool.submit(trainer.sample, PROMPTS, SEEDS, DRAWN, 1, no_beat)
            while not made.done():
                group.start_missing()
                time.sleep(0.02)
            with pytest.raises(EnginesLost, match=r"given up after 8 engines failed on it; .*the cache is corrupt"):
                made.result()
    assert group.generation > generation
    for fault in faults:
        fault.open()
    group.start_missing()
    until(lambda: tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)) == in_process())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("place", ["receive", "load"])
def test_an_engine_that_fails_in_mid_sync_is_left_behind(
    group: EngineGroup, trainer: RemoteEngines, place: str, number: int
) -> None:
    """It fails before or during its commit: the others have the new version, and it serves again once it has received
    it."""
    gate = group.gate(place, 1).close()
    with ThreadPoolExecutor() as pool:
        loaded = pool.submit(trainer.load, tiny_model(seed=5), 2, no_beat)
        until(gate.reached.exists)
        group.signal(1, number)
        loaded.result()
    assert weights_of(group, 0) == 2
    gate.open()
    if number == signal.SIGSTOP:
        group.signal(1, signal.SIGCONT)
    group.start_missing()
    expected = in_process(5)
    until(lambda: tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 2, no_beat)) == expected and weights_of(group, 1))


def test_an_engine_that_lives_and_cannot_take_weights_is_left_behind(
    group: EngineGroup, trainer: RemoteEngines, capfd: pytest.CaptureFixture[str]
) -> None:
    """The engine is named, the others have the new version, and a rollout does not wait for the engine again and
    again."""
    no_room = group.gate("no-room", 1).close()
    trainer.load(tiny_model(seed=5), 2, no_beat)
    assert [weights_of(group, rank) for rank in range(2)] == [2, 1]
    expected = in_process(5)
    trainer._weights._sync_timeout_s = 3600.0
    for _ in range(3):
        assert tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 2, no_beat)) == expected
    printed = capfd.readouterr().out
    assert (
        "the engines did not receive the weights of step 2: engine-1: WeightSyncFailed: engine-1 has no room" in printed
    )
    assert printed.count("engine-1 came back and did not receive") == 1
    no_room.open()
    group.kill(1)


def test_engines_that_cannot_take_the_weights_together_are_left_behind_together(tmp_path: Path) -> None:
    """As on a node whose memory is full: the engines elsewhere serve on."""
    with engine_group(tmp_path, 3) as group:
        trainer = group.trainer()
        trainer.load(tiny_model(), 1, no_beat)
        for rank in (1, 2):
            group.gate("no-room", rank).close()
        trainer.load(tiny_model(seed=5), 2, no_beat)
        assert [weights_of(group, rank) for rank in range(3)] == [2, 1, 1]
        trainer.close()


def test_a_sync_that_fails_leaves_the_old_version_in_force(
    group: EngineGroup, trainer: RemoteEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = trainer._weights._publisher
    assert publisher is not None
    outgoing = publisher._sender._outgoing
    send = outgoing.send

    def broken(*arguments: Any) -> list[bytes]:
        send(*arguments)
        raise WeightSyncFailed("the last bucket was lost")

    with monkeypatch.context() as patch:
        patch.setattr(outgoing, "send", broken)
        with pytest.raises(WeightSyncFailed, match="the last bucket was lost"):
            trainer.load(tiny_model(seed=5), 2, no_beat)
    assert [weights_of(group, rank) for rank in range(2)] == [1, 1]
    with pytest.raises(StaleWeights, match="no step"):
        trainer.sample(PROMPTS, SEEDS, DRAWN, 2, no_beat)
    trainer.load(tiny_model(seed=5), 3, no_beat)
    assert [weights_of(group, rank) for rank in range(2)] == [3, 3]


def weights_of(group: EngineGroup, rank: int) -> int | None:
    """Version that an engine has in force; None if it has none, or does not answer."""
    address = group.address(rank)
    assert address is not None
    token = RunDir(group.root).attempt(1).engine_key.read_text()
    try:
        answer = httpx.get(
            f"http://{address.host}:{address.port}/health", headers={"authorization": f"Bearer {token}"}, timeout=10.0
        )
    except httpx.HTTPError:
        return None
    weights = EngineHealth.model_validate_json(answer.content).weights
    return None if weights is None else weights.version


def generation_of(group: EngineGroup, rank: int) -> int:
    """Number of the start that an engine registered last."""
    address = group.address(rank)
    assert address is not None
    return address.generation


def test_ranks_share_the_engines(group: EngineGroup, tmp_path: Path) -> None:
    """Two trainer ranks with their own prompts: one engine is killed under both ranks and returns, or both engines are;
    a restarted trainer sends its own weights under the number of an older version."""
    expected = in_process()
    for restart, killed in ((next(STARTS), [1]), (next(STARTS), [0, 1])):
        gate = group.gate("decode", 1).close()
        with ThreadPoolExecutor() as pool:
            made = pool.submit(
                launch,
                sample_on_rank,
                2,
                tmp_path / str(restart),
                root=str(group.root),
                spec=group.spec,
                restart=restart,
            )
            until(gate.reached.exists)
            for rank in killed:
                group.kill(rank)
            gate.open()
            for rank in killed:
                group.start(rank)
            parts = values(made.result())
        assert parts[0] + parts[1] == expected


def sample_on_rank(rank: int, num_ranks: int, root: str, spec: dict[str, Any], restart: int) -> list[list[list[int]]]:
    """Scenario of one trainer rank: sample its part of the prompts."""
    from rlhf_core.training.distributed import init_process_group, leave_process_group

    context = make_context(root, spec, rank, num_ranks, restart=restart)
    ranks = init_process_group(context)
    trainer = RemoteEngines(context, ranks)
    trainer.load(tiny_model(), 1, no_beat)
    made = trainer.sample(ranks.deal(PROMPTS), ranks.deal(SEEDS), DRAWN, 1, no_beat)
    leave_process_group(ranks)
    return tokens_of(made)


def test_engines_follow_weights_that_are_split(group: EngineGroup, tmp_path: Path) -> None:
    """ZeRO 3: all ranks gather the weights that rank 0 sends, also in the sync in which an engine is killed; once it is
    back, it waits for the next version. Completions equal those of ranks without separate engines."""
    gate, go_on = group.gate("receive", 1).close(), tmp_path / "go-on"
    with ThreadPoolExecutor() as pool:
        made = pool.submit(
            launch,
            follow_split_weights,
            2,
            tmp_path,
            root=str(group.root),
            spec=group.spec,
            restart=next(STARTS),
            go_on=str(go_on),
        )
        until(lambda: gate.reached.exists() or made.done())
        group.kill(1)
        gate.open()
        until(lambda: weights_of(group, 0) == 1 or made.done())
        group.start(1)
        until(lambda: generation_of(group, 1) == group.generation - 1 or made.done())
        assert weights_of(group, 1) is None
        go_on.touch()
        parts = values(made.result())
    assert [weights_of(group, rank) for rank in range(2)] == [2, 2]
    for part in parts:
        assert part["engines"] == part["rank"]
        assert part["engines"][0] != part["engines"][1], "weights without effect would prove nothing"


def follow_split_weights(
    rank: int, num_ranks: int, root: str, spec: dict[str, Any], restart: int, go_on: str
) -> dict[str, list[list[list[list[int]]]]]:
    """Scenario of one trainer rank: complete with two versions, by the engines and by the rank itself."""
    from rlhf_core.schemas.trainers import NativeTrainer
    from rlhf_core.training import distributed
    from rlhf_core.training.models import gathering
    from rlhf_core.training.models.causal_lm import PolicyModel
    from rlhf_core.training.trainers.engine import split_frozen

    gathering.gathered_weights = partial(gathering.gathered_weights, bucket_elements=1)  # type: ignore[assignment]
    context = make_context(root, spec, rank, num_ranks, restart=restart)
    ranks = distributed.init_process_group(context)
    engines: dict[str, RolloutEngine] = {
        "engines": RemoteEngines(context, ranks),
        "rank": TransformersEngine(char_tokenizer()),
    }
    prompts, seeds = ranks.deal(PROMPTS), ranks.deal(SEEDS)
    found: dict[str, list[list[list[list[int]]]]] = {name: [] for name in engines}
    for version in (1, 2):
        policy = PolicyModel(tiny_model(seed=version))
        split_frozen(policy, "float32", ranks, NativeTrainer(zero_stage=3))
        assert gathering.is_split(policy.causal_lm)
        for name, engine in engines.items():
            engine.load(policy.causal_lm, version, no_beat)
            drawn, greedy = (engine.sample(prompts, seeds, how, version, no_beat) for how in (DRAWN, GREEDY))
            found[name].append(tokens_of([*drawn, *greedy]))
        until(Path(go_on).exists)
    distributed.leave_process_group(ranks)
    return found


def test_an_engine_answers_those_alone_that_know_the_token(group: EngineGroup, trainer: RemoteEngines) -> None:
    """Control: the right token is accepted. It is stored in a file of the owner, and nowhere else."""
    address = group.address(0)
    assert address is not None
    url = f"http://{address.host}:{address.port}/health"
    key = RunDir(group.root).attempt(1).engine_key
    assert key.stat().st_mode & 0o077 == 0
    token = key.read_text()
    for headers in ({}, {"authorization": "Bearer none"}, {"authorization": f"Bearer {token[:-1]}x"}):
        assert httpx.get(url, headers=headers).status_code == 401
    assert httpx.get(url, headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert token not in group.output(0)
