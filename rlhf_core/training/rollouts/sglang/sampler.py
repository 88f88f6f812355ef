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
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import StaleWeights, WorkerError
from rlhf_core.training.rollouts.base import completion_of
from rlhf_core.training.rollouts.checkpoint_layout import CheckpointLayout
from rlhf_core.training.rollouts.completion_end import end_ids_of
from rlhf_core.training.rollouts.http_clients import async_engine_http, engine_http, response_lines
from rlhf_core.training.rollouts.open_completion import OpenCompletion
from rlhf_core.training.rollouts.samplers import OpenPrompts, Sampler, SamplerRequest
from rlhf_core.training.rollouts.sglang.server import SglangServer
from rlhf_core.training.types import Completion

POLL_S = 0.05
"""Longest wait of a step for a completion, in seconds."""
UNLIMITED = httpx.Timeout(None, connect=10.0)
_SMALL_FILES = frozenset((".json", ".txt", ".model", ".jinja", ".py"))
"""Suffixes of the files of a model that are not weights."""


class SglangSampler(Sampler):
    """One SGLang server, which has its own health check instead of the agent's inspection of its processes."""

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
        self._requests: dict[tuple[int, int], _Request] = {}
        self._made: queue.SimpleQueue[tuple[int, int, _Request, Completion | Exception]] = queue.SimpleQueue()
        self._is_paused = False
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
            one = OpenCompletion.begin(self._tokenizer, request.prompt, seed, request.sampling)
            self._requests[request.key, place] = _Request(one)
            if not self._is_paused:
                self._send(request.key, place)

    def step(self, beat: Callable[[], None]) -> list[tuple[int, list[Completion]]]:
        """Collect finished completions after a short wait.

        Raises:
            WorkerError: the server refuses a request, or is lost.
        """
        seen, done = self._num_chunks, []
        timeout_s: float = POLL_S
        while True:
            try:
                key, place, request, made = self._made.get(timeout=timeout_s)
            except queue.Empty:
                break
            timeout_s = 0.0
            if self._requests.get((key, place)) is not request:
                continue  # it was cancelled, or sent again, meanwhile
            del self._requests[key, place]
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
                self._requests.pop((key, place)).cancel()

    def pause(self) -> None:
        """Cancel unfinished completions; they keep the tokens that have arrived."""
        self._is_paused = True
        for place, request in self._requests.items():
            self._requests[place] = request.paused()

    def resume(self) -> None:
        """Request the rest of paused completions."""
        self._is_paused = False
        for key, place in self._requests:
            self._send(key, place)

    # -----------------------------------------------------------------------------------------------------------------

    def _send(self, key: int, place: int) -> None:
        request = self._requests[key, place]
        request.sending = asyncio.run_coroutine_threadsafe(self._complete(key, place, request), self._loop)

    async def _complete(self, key: int, place: int, request: "_Request") -> None:
        try:
            made: Completion | Exception = await self._completion(request)
        except (httpx.HTTPError, WorkerError, ValueError, LookupError, TypeError) as error:
            made = error  # also for an answer of another form: without it, the prompt would be waited for
        self._made.put((key, place, request, made))

    async def _completion(self, request: "_Request") -> Completion:
        one = request.completion
        ends = [*self._end_ids, *one.sampling.end_ids]
        answer, length = await self._last_chunk(request, ends)
        sampled = answer["meta_info"]["output_token_logprobs"]
        if one.search is None or length is None:
            return answered_completion(answer, self._tokenizer, ends, one)
        whole = one.after(_tokens_of(sampled), _logprobs_of(sampled))
        return one.search.strings.completion(list(whole.tokens[:length]), list(whole.logprobs[:length]))

    async def _last_chunk(self, request: "_Request", ends: Collection[int]) -> tuple[Mapping[str, Any], int | None]:
        """The complete response: each chunk contains all tokens so far.

        Returns:
            If a stop string was sampled, the response up to then, and the number of tokens of the completion; the
            server drops the rest, because its connection is closed.
        """
        one, sampling = request.completion, request.completion.sampling
        body = {
            "input_ids": one.context,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "max_new_tokens": one.num_left,
                "sampling_seed": one.next_seed % 2**31,  # SGLang hashes them to 32 bits
                "stop_token_ids": [*self._end_ids, *sampling.end_ids],
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "stream": True,
        }
        chunk: Mapping[str, Any] = {}
        async with self._stream.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                raise WorkerError(_error_of(answer))
            async for line in response_lines(answer):
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    chunk = json.loads(data)
                    self._num_chunks += 1
                    if "error" in chunk:
                        continue
                    request.sampled = chunk["meta_info"]["output_token_logprobs"]
                    if one.search is not None:
                        tokens = [*one.tokens, *_tokens_of(request.sampled)]
                        is_ended = bool(tokens) and tokens[-1] in ends
                        if (length := one.search.length(tokens[:-1] if is_ended else tokens)) is not None:
                            return chunk, length
        if "error" in chunk or not chunk:
            raise WorkerError(str(chunk.get("error", "a response without tokens")))
        return chunk, None


@dataclass
class _Request:
    """A request for a completion, or for the rest of one."""

    completion: OpenCompletion
    sending: Future[None] | None = None
    """Its way to the server and back; None before it is sent."""
    sampled: Sequence[Sequence[Any]] = ()
    """Tokens of it that have arrived."""

    def cancel(self) -> None:
        """Close its connection."""
        if self.sending is not None:
            self.sending.cancel()

    def paused(self) -> "_Request":
        """Cancel it, and return a request for what is missing."""
        self.cancel()
        sampled = self.sampled  # read once: the thread of the connection may still replace it
        return _Request(self.completion.after(_tokens_of(sampled), _logprobs_of(sampled)))


def _copy_without_weights(folder: Path, target: Path) -> None:
    """Copy the configuration, the tokenizer and the code of a model.

    Nothing else: a folder may also hold its weights in other formats, and the copy is in main memory.
    """
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix in _SMALL_FILES and not file.name.endswith(".index.json") and file.is_file():
            shutil.copyfile(file, target / file.name)


def answered_completion(
    answer: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], one: OpenCompletion
) -> Completion:
    """Completion in a complete response of the server.

    Args:
        one: the completion before the response.

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
    whole = one.after(tokens, _logprobs_of(made))
    return completion_of(tokenizer, list(whole.tokens), finished, list(whole.logprobs))


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
