"""Stand-in for SGLang's server, based on transformers: endpoints, fields and formats of version 0.5.23.

    python sglang_stand_in.py PARENT --config FILE

It ends with the process PARENT that has started it: the agent ends SGLang's server, and tests have no agent. It refuses
the options, requests and keys that SGLang would refuse, as far as the tests use them.
"""

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoTokenizer

from rlhf_core.errors import StaleWeights
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.samplers import SamplerRequest, TransformersSampler

OPTIONS = {
    "model-path", "load-format", "skip-tokenizer-init", "dtype", "context-length", "mem-fraction-static",
    "disable-radix-cache", "enable-deterministic-inference", "random-seed", "host", "port", "api-key", "log-level",
}  # fmt: skip
REQUEST = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream", "rid"}
PARAMETERS = {
    "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "sampling_seed", "stop_token_ids",
    "skip_special_tokens",
}  # fmt: skip


class StandIn:
    """The model, which serves one request at a time."""

    def __init__(self, options: dict[str, Any]) -> None:
        folder = Path(options["model-path"])
        self._key = f"Bearer {options['api-key']}"
        self._sampler = TransformersSampler(
            folder, AutoTokenizer.from_pretrained(folder), options["dtype"], torch.device("cpu")
        )
        self._context_length = options["context-length"]
        self._load_format = options["load-format"]
        self._lock = threading.Lock()
        self._keys = itertools.count()

    def application(self) -> Starlette:
        """HTTP application with the endpoints."""
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/update_weights_from_disk", self.update, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._knows_key(request) else 401)

    async def generate(self, request: Request) -> Response:
        asked = await request.json()
        unknown = (set(asked) - REQUEST) | (set(asked["sampling_params"]) - PARAMETERS)
        if unknown or not self._knows_key(request):
            return JSONResponse({"error": {"message": f"unknown: {sorted(unknown)}"}}, 400 if unknown else 401)
        if not asked.get("stream"):
            return JSONResponse(await asyncio.to_thread(self._answer, asked))

        async def chunks() -> AsyncIterator[bytes]:
            if asked["sampling_params"]["temperature"] < 0:
                refusal = {"message": "temperature must be non-negative", "type": "invalid_request_error", "code": 400}
                yield b"data: " + json.dumps({"error": refusal}).encode() + b"\n\n"
                return
            whole = await asyncio.to_thread(self._answer, asked)
            facts = whole["meta_info"]
            first = {**facts, "finish_reason": None, "output_token_logprobs": facts["output_token_logprobs"][:1]}
            for answer in ({"output_ids": whole["output_ids"][:1], "meta_info": first}, whole):
                yield b"data: " + json.dumps(answer).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def update(self, request: Request) -> Response:
        asked = await request.json()
        if asked.get("load_format", self._load_format) == "dummy":  # of SGLang's loaders, one alone loads into a model
            refusal = {"success": False, "message": "Failed to get model loader", "num_paused_requests": 0}
            return JSONResponse(refusal, 400)
        try:
            tensors = load_file(Path(asked["model_path"]) / "model.safetensors")
            with self._lock:
                self._sampler.load(tensors.items(), lambda: None)
        except (StaleWeights, OSError) as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt, parameters = asked["input_ids"], asked["sampling_params"]
        limit = self._context_length - len(prompt) - 2  # as SGLang's scheduler limits it
        cut = {name: parameters[name] for name in ("top_p", "min_p") if name in parameters}
        top_k = max(0, parameters.get("top_k", -1))
        longest = min(parameters["max_new_tokens"], limit)
        sampling = Sampling(longest, parameters["temperature"], batch_size=1, top_k=top_k, **cut)
        with self._lock:
            scored = [None, *self._sampler.score(prompt)] if asked.get("logprob_start_len") == 0 else []
            request = SamplerRequest(next(self._keys), prompt, [parameters.get("sampling_seed", 0)], sampling)
            self._sampler.submit(request)
            ((_, (made,)),) = self._sampler.step(lambda: None)
        # As SGLang, which compares the length first.
        is_longest = len(made.token_ids) == sampling.max_new_tokens
        ended = {"type": "stop", "matched": made.token_ids[-1]} if made.finished and not is_longest else None
        facts = {
            "id": "0",
            "finish_reason": ended or {"type": "length", "length": len(made.token_ids)},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(made.token_ids),
            "weight_version": "default",
            "input_token_logprobs": [[value, token, None] for value, token in zip(scored, prompt, strict=False)],
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(made.logprobs, made.token_ids, strict=True)
            ],
        }
        return {"output_ids": made.token_ids, "meta_info": facts}

    def _knows_key(self, request: Request) -> bool:
        return request.headers.get("authorization") == self._key


def main() -> None:
    """Serve until the process is terminated, or its parent has ended."""
    die_with_parent(parent=int(sys.argv[1]))
    options = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    if unknown := set(options) - OPTIONS:
        raise SystemExit(f"unknown options: {sorted(unknown)}")
    uvicorn.run(StandIn(options).application(), host=options["host"], port=options["port"], log_level="warning")


if __name__ == "__main__":
    main()
