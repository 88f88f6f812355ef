"""SGLang engines, with a stand-in for the server: SGLang itself needs GPUs, and was not run."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
from core_models import PROMPTS, SEEDS, char_tokenizer, tiny_model, tokens_of
from engine_groups import START_TIMEOUT_S, EngineGroup, assert_ends_with_stop_strings, engine_group, no_beat
from process_tools import until
from test_remote_engines import DRAWN, STARTS, follows_the_trainer, is_diverse

from rlhf_core.errors import StaleWeights, WorkerError
from rlhf_core.run_dir.run import RunDir
from rlhf_core.training.rollouts.open_completion import OpenCompletion
from rlhf_core.training.rollouts.samplers import SamplerRequest
from rlhf_core.training.rollouts.sglang.sampler import SglangSampler, answered_completion
from rlhf_core.training.types import Completion

END = char_tokenizer().eos_token_id
UNBEGUN = OpenCompletion(PROMPTS[0], 1, DRAWN, None)

pytestmark = [pytest.mark.training, pytest.mark.end_to_end, pytest.mark.usefixtures("ranks")]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineGroup]:
    with engine_group(tmp_path_factory.mktemp("run"), 1, engine="sglang") as made:
        yield made


def test_engines_of_sglang_follow_the_trainer(group: EngineGroup) -> None:
    follows_the_trainer(group)


def test_completions_follow_from_their_seeds(group: EngineGroup) -> None:
    trainer = group.trainer(restart=next(STARTS))
    trainer.load(tiny_model(), 1, no_beat)
    first, again = (tokens_of(trainer.sample(PROMPTS, SEEDS, DRAWN, 1, no_beat)) for _ in range(2))
    assert first == again
    assert is_diverse(first)
    assert_ends_with_stop_strings(lambda sampling: trainer.sample(PROMPTS, SEEDS, sampling, 1, no_beat), DRAWN)


@pytest.fixture
def sampler(group: EngineGroup, tmp_path: Path) -> SglangSampler:
    """A sampler in this process, with the server of the engine."""
    until(lambda: group.address(0), timeout_s=START_TIMEOUT_S)
    options = json.loads((group.root / "memory" / "engine-0" / "sglang.yaml").read_text())
    return sampler_of(
        f"http://{options['host']}:{options['port']}", options["api-key"], RunDir(group.root).initial_model, tmp_path
    )


def sampler_of(url: str, key: str, model: Path, folder: Path) -> SglangSampler:
    server: Any = SimpleNamespace(url=url, headers={"Authorization": f"Bearer {key}"}, exit_code=None)
    return SglangSampler(server, model, char_tokenizer(), folder / "weights")


def answered_by(
    monkeypatch: pytest.MonkeyPatch, model: Path, answer: Callable[[httpx.Request], httpx.Response]
) -> SglangSampler:
    """A sampler without a server, whose requests for completions have this answer."""
    tiny_model().config.save_pretrained(model)
    sampler = sampler_of("http://engine", "", model, model.parent)
    stream = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(sampler, "_stream", stream)
    return sampler


def test_the_longest_sequence_is_not_cut_short(sampler: SglangSampler) -> None:
    prompt, longest = [PROMPTS[0][0]] * 40, replace(DRAWN, max_new_tokens=4)
    sampler.submit(SamplerRequest(1, prompt, list(range(8)), longest))
    made: list[Completion] = []
    until(lambda: made.extend(one for _, group in sampler.step(no_beat) for one in group) or made)
    assert max(len(one.token_ids) for one in made) == 4


def test_what_the_server_refuses_is_an_error(sampler: SglangSampler) -> None:
    """Weights of another model, a malformed request, a wrong key: never an empty completion."""
    with pytest.raises(StaleWeights, match="nonsense"):
        sampler.load([("nonsense", torch.zeros(2))], no_beat)
    sampler.submit(SamplerRequest(1, PROMPTS[0], [1, 2], DRAWN))
    assert sampler.num_waiting == 2
    sampler.cancel([1])
    assert sampler.num_waiting == 0
    sampler.submit(SamplerRequest(2, PROMPTS[0], [1], replace(DRAWN, temperature=-1.0)))
    with pytest.raises(WorkerError, match="SGLang failed to complete a prompt"):
        until(lambda: sampler.step(no_beat))
    sampler._http.headers["Authorization"] = "Bearer wrong"
    with pytest.raises(WorkerError, match="401"):
        sampler.score(PROMPTS[0])


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "null"])
def test_a_log_probability_that_is_not_finite_is_an_error(
    sampler: SglangSampler, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    entries = f"[[null, 3, null], [-0.5, 4, null], [{value}, 7, null]]"
    scored = f'{{"meta_info": {{"input_token_logprobs": {entries}}}}}'
    answered = httpx.MockTransport(lambda request: httpx.Response(200, text=scored))
    monkeypatch.setattr(sampler, "_http", httpx.Client(base_url="http://engine", transport=answered))
    message = r"log-probability (nan|-inf|None) for token 7, number 2 of 2; expected a finite number"
    with pytest.raises(WorkerError, match=message):
        sampler.score(PROMPTS[0])

    sampled = f'{{"finish_reason": {{"type": "stop"}}, "output_token_logprobs": [[-0.5, 4, null], [{value}, 7, null]]}}'
    chunks = httpx.MockTransport(lambda request: httpx.Response(200, text=f'data: {{"meta_info": {sampled}}}\n\n'))
    monkeypatch.setattr(sampler, "_stream", httpx.AsyncClient(base_url="http://engine", transport=chunks))
    sampler.submit(SamplerRequest(1, PROMPTS[0], [1], DRAWN))
    with pytest.raises(WorkerError, match=message):
        until(lambda: sampler.step(no_beat))


@pytest.mark.parametrize(
    ("last", "reason", "finished"), [(END, "length", True), (END, "stop", True), (7, "length", False)]
)
def test_an_end_token_in_the_last_place_ends_the_completion(last: int, reason: str, finished: bool) -> None:
    """SGLang calls it "length", as if the completion were truncated there."""
    made = {"finish_reason": {"type": reason}, "output_token_logprobs": [[-0.5, 30, None], [-0.1, last, None]]}
    completion = answered_completion({"meta_info": made}, char_tokenizer(), [END], UNBEGUN)
    assert (completion.token_ids, completion.finished) == ([30, last], finished)
    assert completion.text == char_tokenizer().decode([30] if finished else [30, last])


def test_a_paused_completion_is_continued_after_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rest is another request, with other random numbers. What the first one sends afterwards is not used."""
    asked: list[dict[str, Any]] = []

    def line(tokens: list[int], reason: str | None) -> bytes:
        sampled = [[-0.1 * token, token, None] for token in tokens]
        facts = {"finish_reason": reason and {"type": reason}, "output_token_logprobs": sampled}
        return f"data: {json.dumps({'meta_info': facts})}\n\n".encode()

    async def endless() -> AsyncIterator[bytes]:
        yield line([4, 5], None)
        await asyncio.Event().wait()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, content=endless() if len(asked) == 1 else line([6], "length"))

    sampler = answered_by(monkeypatch, tmp_path / "model", answer)
    sampler.submit(SamplerRequest(1, PROMPTS[0], [7], DRAWN))
    until(lambda: sampler._requests[1, 0].sampled)
    sampler.pause()
    assert sampler.num_waiting == 1
    sampler.resume()
    done: list[tuple[int, list[Completion]]] = []
    until(lambda: done.extend(sampler.step(no_beat)) or done)
    ((_, (made,)),) = done
    assert (made.token_ids, made.logprobs) == ([4, 5, 6], pytest.approx([-0.4, -0.5, -0.6]))
    assert [one["input_ids"] for one in asked] == [PROMPTS[0], [*PROMPTS[0], 4, 5]]
    limits = [one["sampling_params"]["max_new_tokens"] for one in asked]
    assert limits == [DRAWN.max_new_tokens, DRAWN.max_new_tokens - 2]
    assert len({one["sampling_params"]["sampling_seed"] for one in asked}) == 2


def test_no_weights_of_the_model_folder_are_copied_to_main_memory(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model().config.save_pretrained(folder)
    (folder / "original").mkdir()
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "tf_model.h5", "model.gguf")
    for name in (*weights, "original/consolidated.00.pth", "merges.txt", "modeling_own.py"):
        (folder / name).touch()
    sampler_of("http://engine", "", folder, tmp_path)
    copied = sorted(path.name for path in (tmp_path / "weights").rglob("*"))
    assert copied == ["config.json", "merges.txt", "modeling_own.py"]


def test_an_answer_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, its prompt was waited for until the trainers took the engine for stalled."""
    begun = '{"meta_info": {"finish_reason": null, "output_token_logprobs": [[-0.5, 4, null]]}}'
    chunks = httpx.Response(200, text=f"data: {begun}\n\n")
    sampler = answered_by(monkeypatch, tmp_path / "model", lambda request: chunks)
    sampler.submit(SamplerRequest(1, PROMPTS[0], [1], DRAWN))
    with pytest.raises(WorkerError, match="SGLang failed to complete a prompt"):
        until(lambda: sampler.step(no_beat), timeout_s=10.0)


def test_a_failure_of_a_cancelled_request_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may fail a request just before it is cancelled, as when the weights change; the engine serves on."""
    sampler = answered_by(monkeypatch, tmp_path / "model", lambda request: httpx.Response(503))
    sampler.submit(SamplerRequest(1, PROMPTS[0], [1], DRAWN))
    until(lambda: not sampler._made.empty())
    sampler.cancel([1])
    assert sampler.step(no_beat) == []


def test_an_engine_ends_with_its_server(group: EngineGroup) -> None:
    """Its agent sees why the server ended, and restarts both. The server has its key from a file of the owner."""
    (server,) = psutil.Process(group.processes[0].pid).children()
    settings = group.root / "memory" / "engine-0" / "sglang.yaml"
    assert settings.stat().st_mode & 0o077 == 0
    assert json.loads(settings.read_text())["api-key"] not in " ".join(server.cmdline())
    server.send_signal(signal.SIGKILL)
    until(lambda: not group.processes[0].is_alive())
    assert group.processes[0].exitcode == -signal.SIGKILL
