"""vLLM as the rollout engine of a trainer: the same numbers as transformers after every change of weights."""

import contextlib
import dataclasses
import gc
import importlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from adapted_models import LORA, adapted
from core_models import QWEN, char_tokenizer, tiny_model
from engine_groups import assert_ends_with_stop_strings, assert_follows, assert_takes_turns, no_beat
from pydantic import JsonValue
from transformers import PreTrainedModel

from rlhf_core.errors import NonFiniteLoss, StaleWeights, WorkerError
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.rollouts import VllmSettings
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models import gathering
from rlhf_core.training.rollouts.base import Sampling, _cut
from rlhf_core.training.rollouts.checkpoint_layout import CheckpointLayout
from rlhf_core.training.rollouts.completion_end import StopSearch, StopStrings
from rlhf_core.training.rollouts.open_completion import OpenCompletion
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.rollouts.vllm import engine as engine_module
from rlhf_core.training.rollouts.vllm.engine import VllmEngine, _stopped_at
from rlhf_core.training.rollouts.vllm.process_state import process_variables
from rlhf_core.training.types import Completion, NullReporter

# Not with importorskip: every test process imports this module, and vLLM takes seconds to import.
pytestmark = [
    pytest.mark.training,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

PROMPTS = [[40, 41, 42], [50], [60, 61, 62, 63, 64]]
SEEDS = [[100 * prompt + sample for sample in range(4)] for prompt in range(3)]
GREEDY = Sampling(max_new_tokens=8, temperature=0.0, batch_size=5)
DRAWN = Sampling(max_new_tokens=8, temperature=0.7, batch_size=64)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Process group of one rank, which vLLM joins; the variables that it leaves behind do not reach other tests."""
    importlib.import_module("torch._dynamo.utils")  # the compiler, as in forked workers; not for every test process
    variables = dict(os.environ)
    os.environ["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("cache"))  # as for a new user
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    os.environ.clear()
    os.environ.update(variables)
    with mock.patch.object(gc, "collect"):  # vLLM unfreezes the modules of all tests, and scans them for each engine
        _STARTED.clear()
    gc.collect()
    gc.freeze()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("model")
    model_of().save_pretrained(folder)
    made = started(folder)
    yield made
    made.close()


_STARTED: list[VllmEngine] = []
"""References to engines: an engine without a reference ends the process group of all of them."""


def started(folder: Path, lora: LoraSpec | None = None) -> VllmEngine:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with (
        mock.patch("vllm.platforms.cpu.GiB_bytes", 2**25),  # a smaller cache: vLLM fills it with zeros
        # Fails: another process that looks at the class of a model would import vLLM for that.
        mock.patch("vllm.model_executor.models.registry._SUBPROCESS_COMMAND", ["false"]),
    ):
        engine = VllmEngine(
            folder,
            char_tokenizer(),
            VllmSettings(),
            dtype="float32",
            max_tokens=64,
            on_gpu=False,
            variables=variables,
            lora=lora,
        )
    _STARTED.append(engine)
    return engine


def model_of(seed: int = 0, *, is_tied: bool = True) -> PreTrainedModel:
    # vLLM's attention on CPU supports head sizes of 32 and above.
    return tiny_model({**QWEN, "head_dim": 32, "tie_word_embeddings": is_tied}, seed)


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def _token_ids(groups: Sequence[Sequence[Completion]]) -> list[list[int]]:
    return [one.token_ids for one in flat(groups)]


def test_every_version_is_taken_over_whole(engine: VllmEngine) -> None:
    """Greedy completions and all log-probabilities equal those of transformers with the new weights."""
    models = [model_of(seed=version) for version in range(3)]
    assert_follows(engine, models, PROMPTS, SEEDS, GREEDY)
    transfer = engine.load(models[0], 3, no_beat)
    assert transfer is not None
    assert (transfer.transport, transfer.wire_s, transfer.acknowledged) == ("in_process", 0.0, 1)
    assert transfer.bytes == sum(weight.nbytes for weight in models[0].parameters())
    assert transfer.apply_s > 0
    assert engine.load(models[0], 3, no_beat) is None, "it is in force"
    assert TransformersEngine(char_tokenizer()).load(models[0], 3, no_beat) is None, "it samples with the model itself"
    assert torch._dynamo.utils.counters["frames"] == {}, "nothing was compiled"


def test_a_version_comes_without_a_warning_of_vllm(engine: VllmEngine) -> None:
    """It would be in the log at every step. Control: another warning."""
    from vllm.model_executor.model_loader.reload import layerwise

    records: list[logging.LogRecord] = []
    handler = mock.Mock(level=logging.WARNING, handle=records.append)
    with mock.patch.object(logging.getLogger(layerwise.__name__), "handlers", [handler]):
        engine.load(model_of(), 30, no_beat)
        assert not records
        layerwise.logger.warning("another one")
    assert len(records) == 1


def test_a_head_of_its_own_is_taken_over(tmp_path: Path) -> None:
    models = [model_of(seed=version, is_tied=False) for version in range(2)]
    models[0].save_pretrained(tmp_path)
    engine = started(tmp_path)
    assert_follows(engine, models, PROMPTS, SEEDS, GREEDY)
    engine.close()


def test_a_completion_follows_from_its_seed_and_the_groups_are_diverse(engine: VllmEngine) -> None:
    model = model_of()
    engine.load(model, 10, no_beat)
    first = engine.sample(PROMPTS, SEEDS, DRAWN, 10, no_beat)
    turned = engine.sample(PROMPTS[::-1], SEEDS[::-1], DRAWN, 10, no_beat)[::-1]
    assert [[made.token_ids for made in group] for group in first] == [
        [made.token_ids for made in group] for group in turned
    ]
    assert all(len({made.text for made in group}) == len(group) for group in first)
    # At the sampling temperature, as the trainer records them.
    tokens = torch.tensor([[*PROMPTS[0], *first[0][0].token_ids]])
    with torch.no_grad():
        logprobs = (model(tokens).logits[0] / 0.7).log_softmax(-1)
    expected = [float(logprobs[len(PROMPTS[0]) - 1 + at, token]) for at, token in enumerate(first[0][0].token_ids)]
    assert first[0][0].logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "cut", [{"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.3}, {"top_p": 0.8, "top_k": 9, "min_p": 0.1}]
)
def test_a_cut_distribution_is_that_of_transformers(engine: VllmEngine, cut: dict[str, Any]) -> None:
    model = model_of()
    engine.load(model, 15, no_beat)
    sampling = dataclasses.replace(DRAWN, temperature=0.3, **cut)
    for prompt, group in zip(PROMPTS, engine.sample(PROMPTS, SEEDS, sampling, 15, no_beat), strict=True):
        for made in group:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *made.token_ids]])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / 0.3).log_softmax(-1)
            whole = logprobs.clone()
            _cut(logprobs, sampling)
            tokens = torch.tensor(made.token_ids)[:, None]
            assert made.logprobs == pytest.approx(logprobs.gather(1, tokens)[:, 0].tolist(), abs=1e-3)
            assert (logprobs.gather(1, tokens) > whole.gather(1, tokens) + 0.01).any(), "something was cut"


def test_completions_end_with_stop_strings(engine: VllmEngine) -> None:
    engine.load(model_of(), 16, no_beat)
    assert_ends_with_stop_strings(lambda sampling: engine.sample(PROMPTS, SEEDS, sampling, 16, no_beat), DRAWN)
    assert not engine.is_busy


def test_rollouts_of_several_turns(engine: VllmEngine) -> None:
    ranks = Ranks(0, 1, torch.device("cpu"), NullReporter(), dist.HashStore())
    assert_takes_turns(engine, model_of(), 17, ranks)


def test_prompts_that_are_longer_together_than_a_step_of_vllm(engine: VllmEngine) -> None:
    """Sampling with seeds: vLLM would read a prompt in parts, which ends a request with a seed on CPU."""
    model = model_of()
    engine.load(model, 20, no_beat)
    budget = engine._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    prompts = [[33 + (index + place * place) % 90 for place in range(61)] for index in range(budget // 61 + 4)]
    seeds = [[index] for index in range(len(prompts))]
    last = slice(-8, None)
    for temperature in (0.7, 0.0):
        sampling = Sampling(2, temperature, len(prompts))
        made = engine.sample(prompts, seeds, sampling, 20, no_beat)
        alone = engine.sample(prompts[last], seeds[last], sampling, 20, no_beat)
        assert _token_ids(made[last]) == _token_ids(alone)
    peer = TransformersEngine(char_tokenizer())
    peer.load(model, 20, no_beat)
    assert _token_ids(made[last]) == _token_ids(peer.sample(prompts[last], seeds[last], sampling, 20, no_beat))


def test_another_version_than_the_one_in_force_is_not_sampled_with(engine: VllmEngine) -> None:
    engine.load(model_of(), 20, no_beat)
    with pytest.raises(StaleWeights, match=r"step 20 active.*step 21"):
        engine.sample(PROMPTS, SEEDS, GREEDY, 21, no_beat)


def broken_off(engine: VllmEngine, version: int, patch: pytest.MonkeyPatch) -> None:
    """Give an engine a version that breaks off in the middle of a layer."""
    model = model_of(seed=3)
    part = "model.layers.0.self_attn.q_proj.weight"

    def broken(*_: Any, **__: Any) -> Iterator[dict[str, torch.Tensor]]:
        yield {part: model.get_parameter(part).detach()}
        raise RuntimeError("a bucket did not come")

    with patch.context() as inner:
        inner.setattr(gathering, "gathered_weights", broken)
        with pytest.raises(RuntimeError, match="a bucket did not come"):
            engine.load(model, version, no_beat)


def test_a_copy_that_is_broken_off_leaves_no_version_in_force(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(seed=3)
    engine.load(model, 30, no_beat)
    broken_off(engine, 31, monkeypatch)
    for version in (30, 31):
        with pytest.raises(StaleWeights, match="no step"):
            engine.sample(PROMPTS, SEEDS, GREEDY, version, no_beat)


def test_the_version_after_a_copy_that_was_broken_off_is_whole(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: vLLM counts the received part of a layer towards the next update, and never accepts another
    one."""
    model = model_of(seed=4)
    peer = TransformersEngine(char_tokenizer())
    broken_off(engine, 40, monkeypatch)
    engine.load(model, 41, no_beat)
    peer.load(model, 41, no_beat)
    found, expected = (flat(one.sample(PROMPTS, SEEDS, GREEDY, 41, no_beat)) for one in (engine, peer))
    for made, right in zip(found, expected, strict=True):
        assert made.logprobs == pytest.approx(right.logprobs, abs=1e-4)

    broken_off(engine, 42, monkeypatch)
    engine._engine.model_executor.driver_worker.worker.weight_transfer_engine._is_begun = False
    with pytest.raises(AttributeError, match="weight_loader"):
        engine.load(model, 43, no_beat)
    engine.load(model, 44, no_beat)


def test_the_version_after_one_that_could_not_be_finished_is_whole(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(seed=5)

    def broken(layout: CheckpointLayout) -> None:
        raise RuntimeError("the last layer is not whole")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointLayout, "rest", broken)
        with pytest.raises(RuntimeError, match="the last layer is not whole"):
            engine.load(model, 50, no_beat)
    with pytest.raises(StaleWeights, match="no step"):
        engine.sample(PROMPTS, SEEDS, GREEDY, 50, no_beat)
    assert engine.load(model, 51, no_beat) is not None, "its outputs are those of the trainer"


def test_a_tied_head_that_is_not_packed_anew_is_found(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: vLLM reports nothing, and samples with the old head."""
    from rlhf_core.training.rollouts.vllm import worker as vllm_worker

    monkeypatch.setattr(vllm_worker, "_pack_tied_head", lambda model: None)
    with pytest.raises(StaleWeights, match="different log-probabilities"):
        engine.load(model_of(seed=6), 60, no_beat)
    assert engine.version is None


def test_an_update_that_is_skipped_is_found_however_small_it_is(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step at a usual learning rate changes the outputs by less than rounding may. A version with the same weights
    is no update. Negative control: without the check of every version, as under ZeRO 3, the old weights serve on."""
    before, after = model_of(seed=7), model_of(seed=7)
    with torch.no_grad():
        for weight in after.parameters():
            weight.add_(1e-6 * weight.sign())
    engine.load(before, 70, no_beat)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_copy", lambda tensors: [*tensors])
        engine.load(before, 71, no_beat)
        with pytest.raises(StaleWeights, match="vLLM computes exactly the log-probabilities of the version before"):
            engine.load(after, 72, no_beat)
        with pytest.raises(StaleWeights, match="no step"):
            engine.sample(PROMPTS, SEEDS, GREEDY, 72, no_beat)
        patch.setattr(engine_module, "is_split", lambda model: True)
        engine.load(after, 73, no_beat)
    engine.load(after, 74, no_beat)


GPT_NEOX: Mapping[str, JsonValue] = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
"""A model that vLLM computes with transformers' classes."""


def scattered(config: Mapping[str, JsonValue], seed: int) -> PreTrainedModel:
    """A model without a parameter at its usual start: zero for biases and one for norms would hide lost ones."""
    model = tiny_model({**config}, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def test_models_beside_vllm_are_constructed_and_called_as_without_it(tmp_path: Path) -> None:
    """vLLM changes the classes of transformers that it uses itself."""
    before = tiny_model({**GPT_NEOX})
    tokens = torch.tensor([PROMPTS[2]])
    expected = before(tokens).logits
    before.save_pretrained(tmp_path)
    engine = started(tmp_path)
    calls = []
    for model in (before, tiny_model({**GPT_NEOX})):
        model.base_model.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(model(tokens).logits, expected)
    assert len(calls) == 2, "DeepSpeed gathers weights in such hooks"
    assert_follows(engine, [scattered(GPT_NEOX, version) for version in range(2)], PROMPTS, SEEDS, GREEDY)
    engine.close()


def test_every_version_of_an_adapter_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter alone is sent, next to the base model that vLLM has read; a skipped one is found, however small its
    effect."""
    model_of().save_pretrained(tmp_path)
    engine = started(tmp_path, LoraSpec.model_validate(LORA))
    assert_follows(engine, [adapted(tmp_path, seed=version) for version in range(3)], PROMPTS, SEEDS, GREEDY)
    assert engine._adapter is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine._adapter, "load", lambda *_: None)
        with pytest.raises(StaleWeights, match=r"vLLM has \d+ tensors of the adapter"):
            engine.load(adapted(tmp_path, seed=2, size=0.300001), 3, no_beat)
    with pytest.raises(StaleWeights, match="no step"):
        engine.sample(PROMPTS, SEEDS, GREEDY, 3, no_beat)
    model = adapted(tmp_path, seed=4)
    transfer = engine.load(model, 4, no_beat)
    assert transfer is not None
    assert transfer.bytes == sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    ignored = ("model.layers.0.mlp.gate.lora_A.default.weight", torch.zeros(4, 8))
    assert engine.count_differing([ignored]) == 1, "vLLM leaves out layers that it cannot adapt"
    engine.close()


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.parametrize(("dtype", "is_rounded"), [("float32", False), ("bfloat16", True)])
def test_float32_is_not_rounded_on_gpus(
    dtype: str, is_rounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton multiplies float32 matrices in TF32 by default, which vLLM's attention in float32 leaves as it is."""
    from float_product import instructions

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    for name, value in process_variables(VllmSettings(), dtype, on_gpu=True).items():
        monkeypatch.setenv(name, value)
    assert (".tf32" in instructions()) is is_rounded


def test_memory_that_training_has_freed_is_there_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate engine does not sleep again after its first version, and vLLM warns if it is woken up."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    calls: list[str] = []
    asleep = {"weights", "kv_cache"}
    engine = VllmEngine.__new__(VllmEngine)
    engine._on_gpu, engine._adapter = True, None
    engine._llm = mock.create_autospec(LLM, instance=True)
    engine._llm.wake_up.side_effect = lambda tags: calls.append(tags[0]) or asleep.difference_update(tags)
    engine._engine = mock.create_autospec(LLMEngine, instance=True)
    engine._engine.is_sleeping.side_effect = lambda: bool(asleep)
    monkeypatch.setattr(engine, "_copy", lambda tensors: calls.append("copy"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("return"))
    engine.load_tensors(iter(()))
    assert calls == ["return", "weights", "copy", "return", "kv_cache"]
    engine.load_tensors(iter(()))
    assert calls[5:] == ["copy"]


@pytest.mark.parametrize(
    ("logprob", "reason", "error"),
    [
        (math.nan, "length", pytest.raises(NonFiniteLoss, match="the log-probability nan")),
        (-0.5, "error", pytest.raises(WorkerError, match="gave up a completion after 1 tokens: error")),
        (-0.5, "length", contextlib.nullcontext()),
    ],
    ids=["not finite", "given up", "control"],
)
def test_a_completion_that_cannot_be_used_is_an_error(logprob: float, reason: str, error: Any) -> None:
    """vLLM samples on after NaN. Not with the engine of the other tests, whose cache would keep the NaN."""
    made = mock.Mock(token_ids=[40], logprobs=[{40: mock.Mock(logprob=logprob)}], finish_reason=reason)
    engine = VllmEngine.__new__(VllmEngine)
    engine._open, engine._outputs = {"0.0": OpenCompletion([30], 1, DRAWN, None)}, {}
    engine._tokenizer = char_tokenizer()
    engine._engine = mock.Mock(**{"step.return_value": [mock.Mock(request_id="0.0", finished=True, outputs=[made])]})
    with error:
        assert [completion.token_ids for _, completion in engine.step()] == [[40]]


def test_a_stop_string_is_found_over_a_change_of_weights() -> None:
    """Control: its end without its beginning, which the older weights have sampled, is no stop string."""
    tokenizer = char_tokenizer()
    first, second = tokenizer.encode("ab", add_special_tokens=False)
    search = StopSearch(StopStrings(tokenizer, ["ab"]))
    begun = OpenCompletion([30], 1, dataclasses.replace(DRAWN, stop=("ab",)), search)
    output = mock.Mock(token_ids=[second, first], finish_reason=None)
    assert _stopped_at(begun.after([first], [-1.0]), output) == 2
    assert _stopped_at(begun, output) is None
