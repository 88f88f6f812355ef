"""vLLM in the trainer's process on a GPU: the numbers of transformers after every change of weights, and memory that is
released between two rollouts.

Only the model in bfloat16 is known to pass (docs/benchmarks.md, "On a GPU").
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import LORA, adapted
from core_models import QWEN, char_tokenizer, tiny_model
from rank_launcher import TINY_MODEL, launch, tiny_spec, training_group, values
from test_loop_runs import Interrupting, final_state, interrupt, metrics_of
from test_vllm_engine import DRAWN, PROMPTS, SEEDS, no_beat
from transformers import PreTrainedModel

from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.rollouts import VllmSettings
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.rollouts.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.training,
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

GREEDY = Sampling(max_new_tokens=8, temperature=0.0, batch_size=64)
SHARE = 0.1
"""Share of the GPU's memory for an engine."""
CLOSE = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest difference of a log-probability by number format."""
CLOSE_ADAPTED = 0.25
"""The same for the adapters here in bfloat16, with which the numbers of a CPU differ by up to 0.14."""
ON_GPU: dict[str, Any] = {"resources": {"gpus_per_node": 1}}


def model_of(kind: str, dtype: str, seed: int = 0) -> PreTrainedModel:
    """A model for vLLM's kernels on a GPU, which need heads of 64."""
    config = {**QWEN, "head_dim": 64, "tie_word_embeddings": kind == "tied"}
    return tiny_model(config, seed).to("cuda", getattr(torch, dtype))


def started(folder: Path, dtype: str, lora: LoraSpec | None = None) -> VllmEngine:
    """An engine without CUDA graphs, which take longer to make than a test."""
    return VllmEngine(
        folder,
        char_tokenizer(),
        VllmSettings(gpu_memory_share=SHARE, enforce_eager=True),
        dtype=dtype,
        max_tokens=64,
        on_gpu=True,
        variables={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        lora=lora,
    )


def differences(engine: VllmEngine, model: PreTrainedModel, version: int) -> dict[str, Any]:
    """Sample with an engine, and score its completions with the model itself, a prompt at a time."""
    peer = TransformersEngine(char_tokenizer())
    peer.load(model, version, no_beat)
    drawn = engine.sample(PROMPTS, SEEDS, DRAWN, version, no_beat)
    gaps = []
    for prompt, group in zip(PROMPTS, drawn, strict=True):
        for made in group:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *made.token_ids]], device="cuda")).logits[0].double()
            scored = (logits / DRAWN.temperature).log_softmax(-1)[len(prompt) - 1 : -1].cpu()
            expected = scored.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
            gaps.append(float((torch.tensor(made.logprobs).double() - expected).abs().max()))
    greedy = [
        [made.token_ids for group in one.sample(PROMPTS, SEEDS, GREEDY, version, no_beat) for made in group]
        for one in (engine, peer)
    ]
    return {
        "gap": max(gaps),
        "greedy": greedy,
        "diverse": all(len({made.text for made in group}) == len(group) for group in drawn),
        "drawn": [made.token_ids for group in drawn for made in group],
    }


def versions(rank: int, num_ranks: int, folder: str, kind: str, dtype: str) -> dict[str, Any]:
    """Three versions in one engine, each after a sleep; the memory in use while it is awake and asleep."""
    found: dict[str, Any] = {"versions": [], "used": []}
    with training_group(rank, num_ranks, folder, tiny_spec(**ON_GPU)):
        path = Path(folder) / "model"
        model_of(kind, dtype).save_pretrained(path)
        engine = started(path, dtype)
        for version in range(3):
            model = model_of(kind, dtype, seed=version)
            engine.load(model, version, no_beat)
            found["versions"].append(differences(engine, model, version))
            awake = used_bytes()
            engine.sleep()
            found["used"].append((awake, used_bytes()))
        # As an engine of its own gets them: from main memory.
        engine.load_tensors((name, weights.detach().cpu()) for name, weights in model.named_parameters())
        engine.version = 3
        found["versions"].append(differences(engine, model, 3))
        engine.close()
    return found


def used_bytes() -> int:
    """Bytes of the GPU in use, by this process or another."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize(("kind", "dtype"), [("tied", "bfloat16"), ("untied", "float32"), ("tied", "float32")])
def test_every_version_is_taken_over_whole(tmp_path: Path, kind: str, dtype: str) -> None:
    (found,) = values(launch(versions, 1, tmp_path / "logs", folder=str(tmp_path), kind=kind, dtype=dtype))
    assert [one["gap"] < CLOSE[dtype] for one in found["versions"]] == [True] * 4, found
    assert all(one["diverse"] for one in found["versions"])
    if dtype == "float32":
        assert all(engine == peer for engine, peer in (one["greedy"] for one in found["versions"]))
    drawn = [one["drawn"] for one in found["versions"]]
    assert drawn[0] != drawn[1] != drawn[2] == drawn[3], "the same weights and seeds give the same samples"
    _, total = torch.cuda.mem_get_info()
    assert all(awake - asleep > SHARE / 2 * total for awake, asleep in found["used"]), found["used"]


def adapters(rank: int, num_ranks: int, folder: str) -> list[dict[str, Any]]:
    """Three versions of an adapter, each after a sleep."""
    found = []
    with training_group(rank, num_ranks, folder, tiny_spec(**ON_GPU)):
        path = Path(folder) / "model"
        model_of("tied", "bfloat16").save_pretrained(path)
        engine = started(path, "bfloat16", LoraSpec.model_validate(LORA))
        for version in range(3):
            model = adapted(path, version, dtype="bfloat16").to("cuda")
            engine.load(model, version, no_beat)
            found.append(differences(engine, model, version))
            engine.sleep()
        engine.close()
    return found


def test_every_version_of_an_adapter_is_taken_over(tmp_path: Path) -> None:
    (found,) = values(launch(adapters, 1, tmp_path / "logs", folder=str(tmp_path)))
    assert [one["gap"] < CLOSE_ADAPTED for one in found] == [True] * 3, found
    assert found[0]["drawn"] != found[1]["drawn"] != found[2]["drawn"]


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def run_spec() -> dict[str, Any]:
    """GRPO with samples from vLLM in the trainer's process."""
    return tiny_spec(
        **ON_GPU,
        model={"config": {**TINY_MODEL, "head_dim": 64}, "tokenizer": "char", "dtype": "bfloat16"},
        rollout={"engine": "vllm", "max_new_tokens": 5, "vllm": {"gpu_memory_share": SHARE, "enforce_eager": True}},
        evaluate={"num_prompts": 4, "samples_per_prompt": 1},
        trainer={"deterministic": True},
    )


def runs(rank: int, num_ranks: int, folder: str, name: str, restart: int, ends: bool) -> str:
    """One start of a run, which is ended in the update of step 5 if asked."""
    reporter = Interrupting(Phase.TRAIN, 5, interrupt) if ends else None
    with training_group(rank, num_ranks, folder, run_spec()) as group:
        return group.train(name, run_spec(), restart, reporter)


@pytest.fixture(scope="module")
def ended_runs(folder: Path) -> list[str]:
    starts = [("straight", 0, False), ("ended", 0, True), ("ended", 1, False)]
    return [
        values(
            launch(
                runs,
                1,
                folder / f"{name}-{restart}-logs",
                300,
                folder=str(folder),
                name=name,
                restart=restart,
                ends=ends,
            )
        )[0]
        for name, restart, ends in starts
    ]


def test_a_run_samples_with_the_weights_that_it_trains(ended_runs: list[str], folder: Path) -> None:
    assert ended_runs[0] == "done"
    gaps = [
        line["rollout/train_gap"] for line in metrics_of(folder, "straight").values() if "rollout/train_gap" in line
    ]
    assert len(gaps) == 4
    assert max(gaps) < CLOSE["bfloat16"]


def test_an_ended_run_goes_on_bitwise(ended_runs: list[str], folder: Path) -> None:
    assert ended_runs[1].startswith("InterruptedError")
    assert ended_runs[2] == "done"
    straight, again = metrics_of(folder, "straight"), metrics_of(folder, "ended", restart=1)
    assert again == {step: line for step, line in straight.items() if step >= 5}
    assert final_state(folder, "ended") == final_state(folder, "straight")
