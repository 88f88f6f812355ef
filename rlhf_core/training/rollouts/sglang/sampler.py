"""Sampling with an SGLang server, with continuous batching of requests.

The weights of a version go through a folder in main memory (``/update_weights_from_disk``), which works for every model
and device. It has only been run against a stand-in for SGLang (``server.py``).
"""

import asyncio
import json
import math
import queue
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import StaleWeights, WorkerError
from rlhf_core.training.rollouts.base import Sampling, completion_of
from rlhf_core.training.rollouts.checkpoint_layout import CheckpointLayout
from rlhf_core.training.rollouts.completion_end import StopSearch, end_ids_of, stop_strings
from rlhf_core.training.rollouts.http_clients import async_engine_http, engine_http
from rlhf_core.training.rollouts.response_lines import response_lines
from rlhf_core.training.rollouts.samplers import OpenPrompts, SamplerRequest
from rlhf_core.training.rollouts.sglang.server import SglangServer
from rlhf_core.training.types import Completion

POLL_S = 0.05
"""Longest wait of a step for a completion, in seconds."""
UNLIMITED = httpx.Timeout(None, connect=10.0)
_SMALL_FILES = frozenset((".json", ".txt", ".model", ".jinja", ".py"))
"""Suffixes of the files of a model that are not weights."""


class SglangSampler:
    """One SGLang server; see ``samplers.Sampler``."""

    def __init__(self, server: SglangServer, folder: Path, tokenizer: PreTrainedTokenizerBase, weights: Path) -> None:
        """Sample with a running server.

        Args:
            folder: Hugging Face folder with the configuration of the model.
            weights: folder in main memory for the versions, one at a time.
        """
        self._server, self._tokenizer, self._weights = server, tokenizer, weights
        self._end_ids = end_ids_of(folder, tokenizer)
        self._layout = CheckpointLayout(folder)
        shutil.rmtree(weights, ignore_errors=True)
        _copy_without_weights(folder, weights)
        self._http = engine_http(base_url=server.url, headers=server.headers, timeout=UNLIMITED)
        self._open = OpenPrompts()
        self._sent: dict[tuple[int, int], Future[None]] = {}
        self._made: queue.SimpleQueue[tuple[int, int, Completion | Exception]] = queue.SimpleQueue()
        self._num_chunks = 0
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="sglang", daemon=True).start()
        self._stream = async_engine_http(base_url=server.url, headers=server.headers, timeout=UNLIMITED)

    @property
    def num_waiting(self) -> int:
        """Number of unfinished completions."""
        return self._open.num_waiting

    @property
    def exit_code(self) -> int | None:
        """Exit code of the server once it has ended."""
        return self._server.exit_code

    @property
    def pids(self) -> Sequence[int]:
        """Empty: the server has its own health check instead of the agent's inspection."""
        return ()

    def load(self, tensors: Iterable[tuple[str, Tensor]], beat: Callable[[], None]) -> None:
        """Load all weights; see ``samplers.Sampler``."""
        save_file(dict(self._layout.whole(tensors)), self._weights / "model.safetensors", {"format": "pt"})
        beat()
        # By default the format is that of the start, which is random weights, and SGLang refuses an update from those.
        update = {"model_path": str(self._weights), "load_format": "auto", "flush_cache": True}
        answer = self._http.post("/update_weights_from_disk", json=update)
        beat()
        if answer.status_code != httpx.codes.OK or not answer.json().get("success"):
            raise StaleWeights(f"SGLang did not apply the weights: {_error_of(answer)}")

    def count_differing(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """0: SGLang only receives full weights."""
        return 0

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first.

        Raises:
            WorkerError: the server refuses the request, or one is not finite.
        """
        request = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = self._http.post("/generate", json=request)
        if answer.status_code != httpx.codes.OK:
            raise WorkerError(f"SGLang failed to score: {_error_of(answer)}")
        return _logprobs_of(answer.json()["meta_info"]["input_token_logprobs"][1:])

    def submit(self, request: SamplerRequest) -> None:
        """Accept a request."""
        self._open.add(request)
        for place, seed in enumerate(request.seeds):
            work = self._request(request.key, place, request.prompt, seed, request.sampling)
            self._sent[request.key, place] = asyncio.run_coroutine_threadsafe(work, self._loop)

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Collect finished completions after a short wait.

        Raises:
            WorkerError: the server refuses a request, or is lost.
        """
        seen, done = self._num_chunks, []
        timeout_s: float = POLL_S
        while True:
            try:
                key, place, made = self._made.get(timeout=timeout_s)
            except queue.Empty:
                break
            timeout_s = 0.0
            if self._sent.pop((key, place), None) is None:
                continue  # it was cancelled meanwhile
            if isinstance(made, Exception):
                raise WorkerError(f"SGLang failed to complete a prompt: {made!r}") from made
            if (whole := self._open.put(key, place, made)) is not None:
                done.append((key, whole))
        if seen != self._num_chunks:
            beat()
        return done

    def cancel(self, keys: Collection[int]) -> None:
        """Drop unfinished requests: SGLang cancels those with a closed connection."""
        for key in keys:
            for place in self._open.cancel(key):
                self._sent.pop((key, place)).cancel()

    # -----------------------------------------------------------------------------------------------------------------

    async def _request(self, key: int, place: int, prompt: Sequence[int], seed: int, sampling: Sampling) -> None:
        try:
            ends = [*self._end_ids, *sampling.end_ids]
            search = StopSearch(stop_strings(self._tokenizer, sampling.stop)) if sampling.stop else None
            answer, length = await self._last_chunk(prompt, seed, sampling, search, ends)
            sampled = answer["meta_info"]["output_token_logprobs"]
            made: Completion | Exception = (
                answered_completion(answer, self._tokenizer, ends)
                if search is None or length is None
                else search.strings.completion(_tokens_of(sampled)[:length], _logprobs_of(sampled[:length]))
            )
        except (httpx.HTTPError, WorkerError, ValueError, LookupError, TypeError) as error:
            made = error  # also for an answer of another form: without it, the prompt would be waited for
        self._made.put((key, place, made))

    async def _last_chunk(
        self, prompt: Sequence[int], seed: int, sampling: Sampling, search: StopSearch | None, ends: Collection[int]
    ) -> tuple[Mapping[str, Any], int | None]:
        """The complete response: each chunk contains all tokens so far.

        Returns:
            If a stop string was sampled, the response up to then, and the number of its tokens; the server drops the
            rest, because its connection is closed.
        """
        request = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "max_new_tokens": sampling.max_new_tokens,
                "sampling_seed": seed % 2**31,  # SGLang hashes them to 32 bits
                "stop_token_ids": [*self._end_ids, *sampling.end_ids],
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "stream": True,
        }
        chunk: Mapping[str, Any] = {}
        async with self._stream.stream("POST", "/generate", json=request) as answer:
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                raise WorkerError(_error_of(answer))
            async for line in response_lines(answer):
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    chunk = json.loads(data)
                    self._num_chunks += 1
                    if search is not None and "error" not in chunk:
                        tokens = _tokens_of(chunk["meta_info"]["output_token_logprobs"])
                        is_ended = bool(tokens) and tokens[-1] in ends
                        if (length := search.length(tokens[:-1] if is_ended else tokens)) is not None:
                            return chunk, length
        if "error" in chunk or not chunk:
            raise WorkerError(str(chunk.get("error", "a response without tokens")))
        return chunk, None


def _copy_without_weights(folder: Path, target: Path) -> None:
    """Copy the configuration, the tokenizer and the code of a model.

    Nothing else: a folder may also hold its weights in other formats, and the copy is in main memory.
    """
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix in _SMALL_FILES and not file.name.endswith(".index.json") and file.is_file():
            shutil.copyfile(file, target / file.name)


def answered_completion(
    answer: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> Completion:
    """Completion in a complete response of the server.

    Raises:
        WorkerError: the server did not finish it, or gave a log-probability that is not finite.
    """
    facts = answer["meta_info"]
    reason = facts["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise WorkerError(f"it was ended: {facts['finish_reason']}")
    made = facts["output_token_logprobs"]
    tokens = _tokens_of(made)
    # SGLang compares the length first: an end token in the last place is "length".
    finished = reason == "stop" or tokens[-1] in end_ids
    return completion_of(tokenizer, tokens, finished, _logprobs_of(made))


def _tokens_of(sampled: Sequence[Sequence[Any]]) -> list[int]:
    return [token for _, token, *_ in sampled]


def _logprobs_of(tokens: Sequence[Sequence[Any]]) -> list[float]:
    """Log-probabilities of the tokens of an answer, each at the beginning of its entry.

    Raises:
        WorkerError: one is not a finite number. JSON of Python may contain NaN, and other JSON has null in its place.
    """
    for place, (logprob, token, *_) in enumerate(tokens):
        if not isinstance(logprob, int | float) or not math.isfinite(logprob):
            raise WorkerError(
                f"SGLang gave the log-probability {logprob} for token {token}, number {place + 1} of {len(tokens)}; "
                'expected a finite number. The weights or the kernels overflow: try model.dtype = "float32", and '
                "check the last checkpoint for weights that are not finite"
            )
    return [logprob for logprob, *_ in tokens]


def _error_of(answer: httpx.Response) -> str:
    return f"HTTP status {answer.status_code}: {answer.text[:300]}"
