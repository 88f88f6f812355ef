"""vLLM as a rollout engine of its own: the numbers of transformers after every sync, reproducible and diverse."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from adapted_models import LORA, adapted
from core_models import QWEN, char_tokenizer, tiny_model
from engine_groups import engine_group, no_beat

from rlhf_core.run_dir import RunDir
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine

pytestmark = [pytest.mark.training, pytest.mark.end_to_end, pytest.mark.usefixtures("ranks")]

PROMPTS = [[40, 41, 42], [50], [60, 61, 62, 63, 64]]
SEEDS = [[100 * prompt + sample for sample in range(4)] for prompt in range(3)]
GREEDY = Sampling(max_new_tokens=8, temperature=0.0, batch_size=5)
DRAWN = Sampling(max_new_tokens=8, temperature=0.7, batch_size=5)


def test_vllm_of_its_own_follows_the_trainer(tmp_path: Path) -> None:
    """Tied weights: vLLM on CPU keeps a packed copy of the head, which its own reload leaves as it was."""
    config = {**QWEN, "head_dim": 32}
    with engine_group(tmp_path, 1, config, engine="vllm") as group:
        remote, peer = group.trainer(), TransformersEngine(char_tokenizer())
        answers = []
        for version in range(2):
            for one in (remote, peer):
                one.load(tiny_model(config, seed=version), version, no_beat)
            found, expected = (one.sample(PROMPTS, SEEDS, GREEDY, version, no_beat) for one in (remote, peer))
            for (made, *_), (right, *_) in zip(found, expected, strict=True):
                assert (made.token_ids, made.text, made.finished) == (right.token_ids, right.text, right.finished)
                assert made.logprobs == pytest.approx(right.logprobs, abs=1e-4)
                assert made.weight_version == version
            answers.append([group[0].text for group in found])
        assert answers[0] != answers[1], "weights that change nothing would show nothing"
        drawn = remote.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)
        again = remote.sample(PROMPTS[::-1], SEEDS[::-1], DRAWN, 1, no_beat)[::-1]
        texts = [[made.text for made in group] for group in drawn]
        assert texts == [[made.text for made in group] for group in again]
        assert all(len(set(group)) == len(group) for group in texts)


def test_vllm_of_its_own_is_given_adapters(tmp_path: Path) -> None:
    """The same with an adapter on a base model that vLLM has read itself."""
    config = {**QWEN, "head_dim": 32, "tie_word_embeddings": False}
    with engine_group(tmp_path, 1, config, {"lora": LORA}, engine="vllm") as group:
        remote, peer = group.trainer(), TransformersEngine(char_tokenizer())
        answers = []
        for version in range(2):
            model = adapted(RunDir(tmp_path).initial_model, version)
            for one in (remote, peer):
                one.load(model, version, no_beat)
            found, expected = (one.sample(PROMPTS, SEEDS, GREEDY, version, no_beat) for one in (remote, peer))
            for (made, *_), (right, *_) in zip(found, expected, strict=True):
                assert made.token_ids == right.token_ids
                assert made.logprobs == pytest.approx(right.logprobs, abs=1e-4)
            answers.append([group[0].text for group in found])
        assert answers[0] != answers[1], "adapters that change nothing would show nothing"
