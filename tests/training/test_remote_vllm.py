"""vLLM in other processes, forked from one that has imported it: as a separate rollout engine with the same numbers as
transformers after every sync, with mixtures of experts, and in a whole run."""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from adapted_models import LORA, adapted
from core_models import QWEN, tiny_model, tokens_of
from engine_groups import TIMEOUT_S, EngineGroup, assert_follows, assert_takes_turns, engine_group, no_beat
from process_tools import until
from pydantic import JsonValue
from rank_launcher import TINY_MODEL, launch, make_context, tiny_spec
from test_loop_runs import Interrupting, final_state, kill_once_saved, metrics_of
from test_remote_engines import is_diverse
from test_vllm_engine import GREEDY, PROMPTS, SEEDS, scattered, started
from transformers import PreTrainedModel

from rlhf_core.errors import StaleWeights
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import PromptList, Sampling
from rlhf_core.training.rollouts.remote import weights as weights_module
from rlhf_core.training.rollouts.remote.client import HttpEngineControl
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.trainers.run import run_trainer

# Not with importorskip: every test process imports this module, and vLLM takes seconds to import.
pytestmark = [
    pytest.mark.training,
    pytest.mark.end_to_end,
    pytest.mark.usefixtures("ranks"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

DRAWN = Sampling(max_new_tokens=8, temperature=0.7, batch_size=5)


def test_vllm_of_its_own_follows_the_trainer(tmp_path: Path, ranks: Ranks) -> None:
    """Tied weights: vLLM on CPU keeps a packed copy of the head, which its own reload leaves unchanged."""
    config = {**QWEN, "head_dim": 32}
    with engine_group(tmp_path, 1, config, engine="vllm", max_new_tokens=32, max_staleness=2) as group:
        remote = group.trainer()
        assert_follows(remote, [tiny_model(config, seed=version) for version in range(2)], PROMPTS, SEEDS, GREEDY)
        _assert_reproducible_and_diverse(remote)
        assert_takes_turns(remote, tiny_model(config, seed=5), 2, ranks)  # which goes on for three turns
        _assert_continues_with_later_weights(group, remote, [tiny_model(config, seed=seed) for seed in (3, 4)])


def _assert_continues_with_later_weights(
    group: EngineGroup, remote: RemoteEngines, models: Sequence[PreTrainedModel]
) -> None:
    """A version comes in the middle of completions: the first tokens of each have the probabilities of the older
    weights, and all others those of the newer ones, also of the tokens before. Control: completions begun after it."""
    remote.load(models[0], 3, no_beat)
    gate, commit = group.gate("decode", 0).close(), HttpEngineControl.commit
    sampling = replace(DRAWN, max_new_tokens=32, batch_size=64)
    begun, late = (PromptList(PROMPTS, SEEDS, sampling) for _ in range(2))
    remote.continuous.begin(begun, 3)
    until(gate.reached.exists)

    def open_and_commit(self: HttpEngineControl, version: int) -> float:
        gate.open()
        return commit(self, version)

    with mock.patch.object(HttpEngineControl, "commit", open_and_commit):
        remote.load(models[1], 4, no_beat)
    remote.continuous.begin(late, 4)
    for _ in range(2):
        remote.continuous.collect(no_beat)
    assert remote.take_counts()["rollout/moved_prompts"] == 0
    num_inside = 0
    for source, version in ((begun, 3), (late, 4)):
        for prompt, group_of_prompt in zip(PROMPTS, source.results(), strict=True):
            for made in group_of_prompt:
                older, newer = (logprobs_of(model, prompt, made.token_ids, sampling.temperature) for model in models)
                differs = [abs(found - of_older) > 1e-3 for found, of_older in zip(made.logprobs, older, strict=True)]
                first = differs.index(True) if True in differs else len(differs)
                assert made.logprobs[first:] == pytest.approx(newer[first:], abs=1e-3)
                assert made.weight_version == version
                assert first == 0 or source is begun
                num_inside += 0 < first < len(made.token_ids)
    assert num_inside > 3
    assert is_diverse(tokens_of(begun.results()))


def logprobs_of(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> list[float]:
    """Log-probability of each token of a completion by a model."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    found: list[float] = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return found


def test_an_engine_that_is_split_follows_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes receives its part of every version; one that skips it is caught, and one that dies ends the
    engine."""
    monkeypatch.setattr(weights_module, "MAX_SYNCS", 1)  # an engine ends after the second one
    config = {**QWEN, "head_dim": 32}
    (tmp_path / "fork-parts-0").touch()
    with engine_group(tmp_path, 1, config, engine="vllm", vllm={"tensor_parallel": 2}) as group:
        remote = group.trainer()
        assert_follows(remote, [tiny_model(config, seed=version) for version in range(2)], PROMPTS, SEEDS, GREEDY)
        _assert_reproducible_and_diverse(remote)
        skip = group.gate("skip-part", 0).close()
        with pytest.raises(StaleWeights, match="engine-0 and the trainer compute different log-probabilities"):
            remote.load(tiny_model(config, seed=2), 2, no_beat)
        skip.open()
        remote.load(tiny_model(config, seed=2), 2, no_beat)

        parts = _parts(group)
        maps = Path(f"/proc/{parts[0].pid}/maps").read_text().splitlines()
        shared = [line for line in maps if "/dev/shm/vllm_dist_" in line]
        assert shared
        assert all(line.endswith("(deleted)") for line in shared), "it is released however the engine ends"
        # Like a process that waits for another one in a collective, it does not see vLLM's request to exit.
        parts[0].suspend()
        parts[1].kill()
        group.processes[0].join(TIMEOUT_S)
        assert group.processes[0].exitcode == -signal.SIGKILL, "the agent sees why the engine ended"
        assert "SIGKILL ended a sampling process of this engine" in group.output(0)
        assert "still running after grace period" not in group.output(0), "vLLM need not wait for the other process"
        assert not psutil.wait_procs(parts, TIMEOUT_S)[1]


def test_a_split_engine_that_is_killed_leaves_nothing_and_is_given_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process also holds its part of the adapter, bit for bit. What vLLM would leave in the folder for temporary
    files has lost its name once the engine serves, or is in the engine's own folder, which its next start removes."""
    monkeypatch.setattr(weights_module, "MAX_SYNCS", 1)  # an engine ends after the second one
    config = {**QWEN, "head_dim": 32, "tie_word_embeddings": False}
    with engine_group(tmp_path, 1, config, {"lora": LORA}, engine="vllm", vllm={"tensor_parallel": 2}) as group:
        remote = group.trainer()
        models = [adapted(RunDir(tmp_path).initial_model, version) for version in range(3)]
        assert_follows(remote, models[:2], PROMPTS, SEEDS, GREEDY)
        skip = group.gate("skip-part", 0).close()
        with pytest.raises(StaleWeights, match="has 1 tensors of the adapter"):
            remote.load(models[2], 2, no_beat)
        skip.open()
        remote.load(models[2], 2, no_beat)

        parts = _parts(group)
        assert list((tmp_path / "memory" / "engine-0").glob("vllm_dist_*")), "the file in which they have met"
        processes = [psutil.Process(group.processes[0].pid), *parts]
        sockets = {
            Path(str(one.laddr)) for process in processes for one in process.net_connections("unix") if one.laddr
        }
        assert sockets
        assert not [path for path in sockets if path.is_socket()]
        time.sleep(2.0)  # after one second without a call, vLLM's processes wait at such a socket
        remote.sample(PROMPTS, SEEDS, GREEDY, 2, no_beat)
        group.kill(0)
        assert not psutil.wait_procs(parts, TIMEOUT_S)[1]


def _parts(group: EngineGroup) -> list[psutil.Process]:
    """Processes in which a split engine computes."""
    found = [one for one in psutil.Process(group.processes[0].pid).children() if one.name().startswith("VLLM::Worker")]
    assert len(found) == 2
    return found


def _assert_reproducible_and_diverse(remote: RemoteEngines) -> None:
    drawn = remote.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)
    again = remote.sample(PROMPTS[::-1], SEEDS[::-1], DRAWN, 1, no_beat)[::-1]
    texts = [[made.text for made in group] for group in drawn]
    assert texts == [[made.text for made in group] for group in again]
    assert all(len(set(group)) == len(group) for group in texts)


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of experts


MIXTURE: Mapping[str, JsonValue] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
"""A mixture of experts, held by transformers otherwise than in files, and packed by vLLM on CPU."""
GPT_OSS: Mapping[str, JsonValue] = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
"""A mixture whose experts and sinks vLLM's loader copies past its interface for updates."""
MENDS: Mapping[str, tuple[str, Callable[..., object]]] = {
    # Without it, vLLM on CPU reads experts in another order than they are packed in.
    "mixtral": ("_packed_experts", contextlib.nullcontext),
    # Without it, experts and sinks keep the values of the version before.
    "gpt_oss": ("through_weight_loaders", lambda model, tensors: tensors),
}
"""The mend in our part of vLLM's worker for a kind of mixture, and something that does nothing in its place."""


def mixture_reloaded(rank: int, num_ranks: int, folder: str, config: dict[str, JsonValue]) -> str:
    """Two versions as they should be, and one without the mend."""
    from rlhf_core.training.rollouts.vllm import worker as vllm_worker

    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=dist.HashStore())
    engine = started(Path(folder))
    assert_follows(engine, [scattered(config, version) for version in range(2)], PROMPTS, SEEDS, GREEDY)
    without = mock.patch.object(vllm_worker, *MENDS[str(config["model_type"])])
    with without, pytest.raises(StaleWeights) as refused:
        engine.load(scattered(config, 2), 2, no_beat)
    return str(refused.value)


@pytest.mark.parametrize("config", [MIXTURE, GPT_OSS], ids=["mixtral", "gpt_oss"])
def test_the_experts_of_a_mixture_are_taken_over(tmp_path: Path, config: dict[str, JsonValue]) -> None:
    """Negative control: without its mend, the version is refused. In a process of its own, because vLLM cannot start a
    mixture after another model."""
    tiny_model({**config}).save_pretrained(tmp_path / "model")
    (ended,) = launch(
        mixture_reloaded,
        1,
        tmp_path / "logs",
        300,
        with_vllm=True,
        folder=str(tmp_path / "model"),
        config={**config},
    )
    assert ended.value is not None, ended
    assert "different log-probabilities" in ended.value


# ---------------------------------------------------------------------------------------------------------------------
# A whole run


def trained(rank: int, num_ranks: int, run_dir: str, restart: int, killed: bool) -> str:
    """GRPO with samples from vLLM: killed with SIGKILL in the update of step 5, or resumed after that."""
    kill = Interrupting(Phase.TRAIN, 5, kill_once_saved(run_dir, 4)) if killed else None
    spec = tiny_spec(
        model={"config": {**TINY_MODEL, "head_dim": 32}, "tokenizer": "char"},
        rollout={"engine": "vllm", "max_new_tokens": 5},
        evaluate={"num_prompts": 4, "samples_per_prompt": 1},
    )
    return str(run_trainer(make_context(run_dir, spec, rank, num_ranks, restart, kill)))


def test_a_killed_run_goes_on_bitwise(tmp_path: Path) -> None:
    """Samples and weights equal those of the run that was never killed: a newly started engine draws the same
    samples."""
    starts = {"straight": [(0, False)], "killed": [(0, True), (1, False)]}
    for name, parts in starts.items():
        for restart, killed in parts:
            (ended,) = launch(
                trained,
                1,
                tmp_path / f"{name}-{restart}",
                300,
                with_vllm=True,
                run_dir=f"{tmp_path}/{name}",
                restart=restart,
                killed=killed,
            )
            assert (ended.exit_code, ended.value) == ((-9, None) if killed else (0, "done")), ended
    straight, again = metrics_of(tmp_path, "straight"), metrics_of(tmp_path, "killed", restart=1)
    assert min(again) == 5
    assert metrics_of(tmp_path, "killed") | again == straight
    assert len({line["rollout/completion_digest"] for step, line in straight.items() if step > 2}) > 1
    assert final_state(tmp_path, "killed") == final_state(tmp_path, "straight")
