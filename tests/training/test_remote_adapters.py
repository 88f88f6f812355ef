"""Adapters in separate rollout engines: each engine has read the base model itself, and receives only the adapter."""

import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapted_models import LORA, adapted
from core_models import PROMPTS, QWEN, SEEDS, char_tokenizer, tiny_model, tokens_of
from engine_groups import EngineGroup, engine_group, no_beat
from process_tools import until
from rank_launcher import launch, make_context, tiny_spec, values
from test_loop_online import spec_of
from test_loop_runs import metrics_of
from test_remote_engines import DRAWN, weights_of
from transformers import PreTrainedModel

from rlhf_core.errors import StaleWeights
from rlhf_core.run_dir.run import RunDir
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.remote import weights as weights_module
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.rollouts.weight_probe import TOLERANCE, probe_of

pytestmark = [pytest.mark.training, pytest.mark.end_to_end, pytest.mark.usefixtures("ranks")]

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, batch_size=4)
"""One prompt at a time: prompts that are sampled together are rounded differently."""
STARTS = itertools.count(1)


@pytest.fixture(scope="module")
def shared_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineGroup]:
    with engine_group(tmp_path_factory.mktemp("run"), 2, model={"lora": LORA}) as made:
        yield made


def trained(group: EngineGroup, seed: int, size: float = 0.3) -> PreTrainedModel:
    """The base model of a group, with an adapter."""
    return adapted(RunDir(group.root).initial_model, seed, size, group.spec["model"].get("dtype", "float32"))


def follow(group: EngineGroup, remote: RemoteEngines, model: PreTrainedModel, version: int) -> list[list[list[int]]]:
    """Give engines a version and compare them with the trainer's own model; return the tokens of the greedy
    completions."""
    peer = TransformersEngine(char_tokenizer())
    transfer = remote.load(model, version, no_beat)
    peer.load(model, version, no_beat)
    assert transfer is not None
    size = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    assert transfer.bytes < size + 64 * len(list(model.parameters())), "only the adapter"
    found, expected = (one.sample(PROMPTS, SEEDS, GREEDY, version, no_beat) for one in (remote, peer))
    assert found == expected, "bit for bit: the engine has the trainer's base and adapter, and nothing is merged"
    return tokens_of(found)


def test_every_version_is_that_of_the_trainer(group: EngineGroup) -> None:
    """Tied weights on two engines; a version that is sent again after others gives the same results, bit for bit."""
    remote = group.trainer(restart=next(STARTS), num_engines=1)
    first, *others, again = (trained(group, seed) for seed in (1, 2, 3, 1))
    answers = [follow(group, remote, first, 0)]
    made = remote.sample(PROMPTS, SEEDS, GREEDY, 0, no_beat)
    answers += [follow(group, remote, model, version) for version, model in enumerate(others, 1)]
    assert answers[0] != answers[1] != answers[2], "adapters without effect would prove nothing"
    follow(group, remote, again, 3)
    anew = remote.sample(PROMPTS, SEEDS, GREEDY, 3, no_beat)
    assert [[dataclasses.replace(one, weight_version=0) for one in completions] for completions in anew] == made
    both = group.trainer(restart=next(STARTS), delta=True)
    for version in range(2):  # the second time as a delta
        assert follow(group, both, first, version) == answers[0]


def test_bfloat16_and_an_untied_head(tmp_path: Path) -> None:
    """Updates are far below the rounding error of the weights, and are not merged into them."""
    config = {**QWEN, "tie_word_embeddings": False}
    with engine_group(tmp_path, 1, config, model={"lora": LORA, "dtype": "bfloat16"}) as group:
        remote = group.trainer()
        for version, size in enumerate((0.3, 0.001)):
            follow(group, remote, trained(group, version, size), version)


def test_an_update_that_is_skipped_is_found_however_small_it_is(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the engine's outputs would not have shown it."""
    remote = group.trainer(restart=next(STARTS))
    before, after = (trained(group, 1, size) for size in (0.3, 0.300001))
    remote.load(before, 0, no_beat)
    old, new = (probe_of(model, 32, "float32").logprobs for model in (before, after))
    assert 0 < max(abs(one - other) for one, other in zip(old, new, strict=True)) < TOLERANCE["float32"]
    skip = group.gate("skip", 1).close()
    transfer = remote.load(after, 1, no_beat)
    assert transfer is not None
    assert transfer.acknowledged == 1
    assert [weights_of(group, rank) for rank in range(2)] == [1, None]
    skip.open()
    remote.load(before, 2, no_beat)
    monkeypatch.setattr(weights_module, "MAX_SYNCS", 1)  # after the second the engines end
    skips = [group.gate("skip", rank).close() for rank in range(2)]
    with pytest.raises(StaleWeights, match=r"has \d+ tensors of the adapter that differ from those sent"):
        remote.load(trained(group, 2), 3, no_beat)
    for skip in skips:
        skip.open()
    follow(group, remote, before, 4)


def test_an_engine_with_another_base_model_does_not_serve(
    group: EngineGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    """One engine has read other files, and the base of another one differs from its files; an engine that is restarted
    is given the adapter again."""
    remote = group.trainer(restart=next(STARTS))
    model = trained(group, 4)
    folder = RunDir(group.root).initial_model
    kept = group.root / "kept"
    shutil.copytree(folder, kept)
    tiny_model(seed=9).save_pretrained(folder)
    group.restart(1)
    remote.load(model, 0, no_beat)
    assert [weights_of(group, rank) for rank in range(2)] == [0, None]
    assert "engine-1 read a different base model than the trainer" in capfd.readouterr().out
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    group.restart(1)
    damage = group.gate("other-base", 1).close()
    remote.load(model, 1, no_beat)
    assert [weights_of(group, rank) for rank in range(2)] == [1, None]
    assert "engine-1 and the trainer compute different log-probabilities" in capfd.readouterr().out
    damage.open()
    group.restart(1)
    peer = TransformersEngine(char_tokenizer())
    peer.load(model, 1, no_beat)
    expected = tokens_of(peer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat))
    until(
        lambda: (
            tokens_of(remote.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)) == expected and weights_of(group, 1) is not None
        )
    )


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def run_of(stage: int, engines: int, base: str) -> dict[str, Any]:
    """Three steps of GRPO after a warm start of two, with an adapter on the model in ``base``."""
    spec = spec_of("grpo", 3, kl_coefficient=0.1)
    # One prompt at a time: which sequences are sampled together depends on their arrival, and changes the rounding.
    rollout = {"engines": engines, "max_new_tokens": 5, "batch_size": 4}
    model = {"path": base, "lora": LORA}
    trainer = {"micro_batch_size": 8, "zero_stage": stage}  # all sequences of a rank at once
    return {**spec, "model": model, "rollout": rollout, "trainer": trainer}


def every_scenario(rank: int, num_ranks: int, folder: str, engines: str, base: str) -> dict[str, str]:
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.trainers.run import train_run

    ranks = init_process_group(make_context(folder, tiny_spec(), rank, num_ranks))
    results: dict[str, str] = {}
    for restart, (stage, num) in enumerate([(3, 2), (3, 0)], 100):
        name = f"{stage} {num}"
        if ranks.is_first:
            shutil.copytree(engines, RunDir(Path(folder) / name).attempt(1).engines)
        ranks.barrier()
        context = make_context(f"{folder}/{name}", run_of(stage, num, base), rank, num_ranks, restart)
        results[name] = str(train_run(context, dataclasses.replace(ranks, reporter=context.reporter)))
        ranks.barrier()
    leave_process_group(ranks)
    return results


def test_grpo_trains_an_adapter_with_engines(group: EngineGroup, tmp_path: Path) -> None:
    """The run uses ZeRO 3, and has the metrics of a run that samples with the trainers' own model."""
    until(lambda: all(group.address(rank) for rank in range(group.num)))
    run_dir = RunDir(group.root)
    launched = launch(
        every_scenario,
        2,
        tmp_path / "launch",
        300,
        folder=str(tmp_path),
        engines=str(run_dir.attempt(1).engines),
        base=str(run_dir.initial_model),
    )
    assert values(launched) == [{"3 2": "done", "3 0": "done"}] * 2
    runs = {name: metrics_of(tmp_path, name, restart) for restart, name in enumerate(("3 2", "3 0"), 100)}
    for found in runs.values():
        assert set(found) == set(range(1, 6))
        for line in found.values():
            line.pop("rollout/sync_bytes", None)
            for name in ("rollout/moved_prompts", "rollout/refused_completions"):
                assert not line.pop(name, 0)
    assert runs["3 2"] == runs["3 0"], "completions of engines equal those of the trainers' own model"
    digests = [line["rollout/completion_digest"] for step, line in runs["3 2"].items() if step > 2]
    assert len(set(digests)) > 1
