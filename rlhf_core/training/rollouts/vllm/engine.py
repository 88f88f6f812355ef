"""Sampling with vLLM: colocated in the trainer's process, where every rank has an engine for its own prompts, or in a
separate engine process (``sampler.py``), which may be split over several GPUs.

vLLM stores weights in the layout of its kernels (fused projections, repacked on CPU), so each version is copied bucket
by bucket through vLLM's interface for weight transfer (``worker.py``). Three pitfalls, each with a test:

- an aborted update leaves partly loaded layers, which the next update would count as its own parts;
- on CPU, a tied ``lm_head`` is a repacked *copy* of the embedding that no reload refreshes: outputs are silently wrong.
  It is repacked here;
- prefixes cached under older weights are dropped with each version.

With an adapter (``model.lora``), vLLM reads the base model itself and receives only the adapter (``adapter.py``).
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import StaleWeights, WorkerError
from rlhf_core.garbage import uncollected
from rlhf_core.machine.shared_names import remove_names
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.rollouts import VllmSettings
from rlhf_core.training.checkpoints.state import kept_random_state
from rlhf_core.training.models.gathering import is_split
from rlhf_core.training.rollouts.base import Sampling, WeightTransfer, completion_of, require_prompts, require_version
from rlhf_core.training.rollouts.completion_end import end_ids_of
from rlhf_core.training.rollouts.engine_adapter import given_weights
from rlhf_core.training.rollouts.open_completion import OpenCompletion
from rlhf_core.training.rollouts.shared_tensors import buckets_of_places, place_of
from rlhf_core.training.rollouts.vllm.adapter import VllmAdapter, use_products
from rlhf_core.training.rollouts.vllm.process_state import (
    inspect_models_here,
    kept_classes,
    kept_threads,
    process_variables,
)
from rlhf_core.training.rollouts.vllm.processes import EngineProcesses, starting_in
from rlhf_core.training.rollouts.weight_probe import VersionCheck, probe_of, require_finite
from rlhf_core.training.types import Completion

_WORKER = "rlhf_core.training.rollouts.vllm.worker"
"""Module that vLLM's workers load by name; also the name of the backend in it."""
EXTENSION = f"{_WORKER}.WeightExtension"
"""Extension of vLLM's worker class."""
BUCKET_BYTES = 256 * 2**20
"""Bytes of weights passed at once to the processes of a split engine, with a heartbeat between two parts."""


class VllmEngine:
    """One vLLM engine on this rank's device, or split over several."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        settings: VllmSettings,
        *,
        dtype: str,
        max_tokens: int,
        on_gpu: bool,
        variables: Mapping[str, str],
        lora: LoraSpec | None = None,
        tensor_parallel: int = 1,
        scratch: Path | None = None,
        represent: Callable[[Sequence[int]], None] = lambda pids: None,
    ) -> None:
        """Start an engine without a version. Collective: all ranks of the process group start theirs together.

        Args:
            folder: Hugging Face folder of the model; without ``lora`` only its configuration is read.
            max_tokens: longest sequence, prompt and completion together.
            variables: variables of torchrun for this rank (RANK, LOCAL_RANK, WORLD_SIZE), for vLLM to read.
            lora: adapter that versions consist of; None for full weights.
            tensor_parallel: number of computing processes, each with its own GPU. Above 1 they are children of this
                process, which then has no process group, and weights must be in shared memory.
            scratch: folder used only by this engine, for one of several processes.
            represent: called with the ids of these processes while they start.
        """
        self._tokenizer = tokenizer
        self._open: dict[str, OpenCompletion] = {}
        self._outputs: dict[str, Any] = {}
        self._is_paused = False
        self._on_gpu = on_gpu
        self._max_tokens, self._dtype = max_tokens, dtype
        self._check = VersionCheck(of_adapters=lora is not None)
        self._is_split = tensor_parallel > 1
        self._end_ids = end_ids_of(folder, tokenizer)
        self.version: int | None = None
        self.continuous = None
        os.environ.update({**process_variables(settings, dtype, on_gpu), **variables})
        if not on_gpu:
            torch._dynamo.config.disable = True  # the variable is too late where torch's compiler is already imported
        self._adapter = None if lora is None else VllmAdapter(lora)
        options: dict[str, Any] = {"dtype": dtype, "load_format": "dummy"}
        if self._adapter is not None:
            options |= {"load_format": "auto", **self._adapter.options}
        else:
            # Set at the start, so vLLM does not select kernels with immutable weights.
            options["weight_transfer_config"] = {"backend": _WORKER}
        if on_gpu:
            options["gpu_memory_utilization"] = settings.gpu_memory_share
        else:
            # After a partial prefill vLLM resets the generator of a request, which CPU generators do not support.
            options["enable_chunked_prefill"] = False
        # A process that does not compute stays off the GPUs: otherwise vLLM spawns its workers instead of forking them.
        device = torch.device("cuda" if on_gpu and not self._is_split else "cpu")
        starting = contextlib.nullcontext() if scratch is None else starting_in(scratch, represent)
        with kept_threads(), kept_random_state(device), kept_classes(), starting:
            gc.collect()  # what is frozen below stays
            with uncollected():
                from vllm import LLM  # only runs with this engine need it, and the import takes seconds

            inspect_models_here(on_gpu)
            if self._adapter is not None and not on_gpu and not self._is_split:
                use_products()
            self._llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                max_model_len=max_tokens,
                enforce_eager=settings.enforce_eager or not on_gpu,
                enable_prefix_caching=settings.prefix_caching,
                enable_sleep_mode=on_gpu,
                logprobs_mode="processed_logprobs",
                tensor_parallel_size=tensor_parallel,
                distributed_executor_backend="mp" if self._is_split else "external_launcher",
                worker_extension_cls=EXTENSION,
                disable_log_stats=True,
                **options,
            )
        self._engine = self._llm.llm_engine
        workers = self._engine.model_executor.workers if self._is_split else []
        self._processes = EngineProcesses([one.proc for one in workers])
        if scratch is not None:
            remove_names(scratch)
        self.sleep()

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> WeightTransfer | None:
        """Copy the weights of ``model``, or its adapter; see :class:`rlhf_core.training.rollouts.base.RolloutEngine`.

        Raises:
            StaleWeights: vLLM's adapter or outputs show that it did not apply this version.
        """
        if self.version == version:
            return None
        self.version = None
        started, num_bytes = time.monotonic(), 0

        def copies() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in given_weights(model, beat):
                num_bytes += tensor.nbytes
                yield name, tensor.clone()  # vLLM keeps it until its layer is complete, which may be in a later bucket

        given = copies() if self._adapter is None else list(copies())
        self.load_tensors(iter(given))
        apply_s = time.monotonic() - started
        if self._adapter is not None and (number := self.count_differing(given)):
            raise StaleWeights(f"vLLM has {number} tensors of the adapter that differ from those sent")
        self._require_applied(model, version)
        self.version = version
        return WeightTransfer("in_process", num_bytes, wire_s=0.0, apply_s=apply_s)

    def _require_applied(self, model: PreTrainedModel, version: int) -> None:
        """Compare the outputs with the trainer's. Collective if the model is split.

        The whole weights of a split model are checked only the first time: the trainer's log-probabilities take one
        more gathering, and nothing that a step computes anyway replaces them. The gap between sampling and training is
        on other tokens in every step, and a single update changes it by less than rounding.

        Raises:
            StaleWeights: its log-probabilities differ from the trainer's, or stayed as they were.
        """
        if self._adapter is None and is_split(model) and self._check.has_seen("vLLM"):
            return
        probe = probe_of(model, self._max_tokens, self._dtype)
        # The number of a version stands for its digest: no version is made twice in a process.
        found, advice = self.score(probe.tokens), ': use rollout.engine = "transformers"'
        self._check.require_applied("vLLM", "vLLM", str(version), found, probe, advice)

    def load_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Copy weights into vLLM, and drop the prefixes cached under older ones.

        Args:
            tensors: all weights by name, or those of an adapter, valid until the last one is consumed. Always iterated
                to the end. For a split engine they are in ``shared_tensors.SharedMemory``.

        Raises:
            StaleWeights: requests are still running.
        """
        self._wake("weights")
        if self._adapter is None:
            self._copy(tensors)
        else:
            self._adapter.load(self._engine, list(tensors))
        self._wake("kv_cache")
        if not self._engine.reset_prefix_cache():
            raise StaleWeights("vLLM keeps cached prefixes of older weights: requests are still running")

    def count_differing(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Number of tensors of an adapter that differ in any bit from the active layers; 0 for full weights."""
        if self._adapter is None:
            return 0
        held = self._adapter.loaded
        if self._is_split:
            places = [place_of(name, tensor) for name, tensor in tensors]
            return int(max(self._call("count_differing_shared", held, places)))
        return int(max(self._call("count_differing", held, list(tensors))))

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample completions; see :class:`rlhf_core.training.rollouts.base.RolloutEngine`.

        vLLM batches the requests itself; ``sampling.batch_size`` limits the number passed at a time.
        """
        require_version(self.version, version)
        require_prompts(prompts, seeds)
        waiting = [(index, place) for index, own in enumerate(seeds) for place in range(len(own))]
        made: dict[tuple[int, int], Completion] = {}
        for start in range(0, len(waiting), sampling.batch_size):
            for index, place in waiting[start : start + sampling.batch_size]:
                self.submit(f"{index}.{place}", prompts[index], seeds[index][place], sampling)
            while self.is_busy:
                for name, completion in self.step():
                    index, place = map(int, name.split("."))
                    made[index, place] = replace(completion, weight_version=version)
                beat()
        return [[made[index, place] for place in range(len(own))] for index, own in enumerate(seeds)]

    @property
    def pids(self) -> Sequence[int]:
        """Worker processes of a split engine; none if this process computes itself."""
        return self._processes.pids

    @property
    def exit_code(self) -> int | None:
        """Exit code of the worker process that ended first, after which the others are ended; None while all are
        running."""
        return self._processes.exit_code

    @property
    def is_busy(self) -> bool:
        """True if completions are unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def submit(self, name: str, prompt: Sequence[int], seed: int, sampling: Sampling) -> None:
        """Request one completion, which :meth:`step` returns by this name."""
        self._open[name] = OpenCompletion.begin(self._tokenizer, prompt, seed, sampling)
        if not self._is_paused:
            self._start(name)

    def step(self) -> list[tuple[str, Completion]]:
        """Run one decoding step; returns finished completions by name, without a version."""
        done = []
        for output in self._engine.step():
            name, made = output.request_id, output.outputs[0]
            one = self._open[name]
            if one.search is not None and (length := _stopped_at(one, made)) is not None:
                if not output.finished:
                    self._engine.abort_request([name])
                tokens, logprobs = _whole(one, made)
                done.append((name, one.search.strings.completion(tokens[:length], logprobs[:length])))
            elif output.finished:
                done.append((name, self._completion(one, made)))
            else:
                self._outputs[name] = made
                continue
            self._forget(name)
        return done

    def cancel(self, names: Sequence[str]) -> None:
        """Drop unfinished completions."""
        self._engine.abort_request(list(names))
        for name in names:
            self._forget(name)

    def pause(self) -> None:
        """Take unfinished completions out of vLLM, before other weights are loaded; they keep their tokens."""
        self._is_paused = True
        self._engine.abort_request(list(self._open))
        for name, made in self._outputs.items():
            self._open[name] = self._open[name].after(*_sampled(made))
        self._outputs.clear()

    def resume(self) -> None:
        """Continue paused completions after their tokens."""
        self._is_paused = False
        for name in self._open:
            self._start(name)

    def _start(self, name: str) -> None:
        one = self._open[name]
        self._add(name, one.context, self._parameters(one))

    def _forget(self, name: str) -> None:
        self._open.pop(name, None)
        self._outputs.pop(name, None)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first, as computed by vLLM. Requires that there are no other requests.

        Args:
            tokens: fewer than the longest sequence.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._add("probe", tokens, parameters)
        while True:
            for output in self._engine.step():
                if output.finished:
                    rows = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
                    return [row[token].logprob for row, token in rows]

    def _add(self, name: str, prompt: Sequence[int], parameters: Any) -> None:
        adapter = None if self._adapter is None else self._adapter.request
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters, lora_request=adapter)

    def take_counts(self) -> Mapping[str, float]:
        """No counts: an in-process engine cannot fail separately."""
        return {}

    def sleep(self) -> None:
        """Release the memory of weights and cache until the next version is loaded. vLLM has no sleep mode on CPU.

        The base model of an adapter moves to main memory, because no version contains it.
        """
        self.version = None
        if self._on_gpu:
            self._llm.sleep(level=2 if self._adapter is None else 1)

    def close(self) -> None:
        """Put the engine to sleep permanently; it ends with its process.

        vLLM's own shutdown, also that of an unreferenced engine, destroys the trainer's process group. Worker processes
        of a split engine end here.
        """
        self.sleep()
        if self._is_split:
            self._processes.allow_exit()
            self._engine.model_executor.shutdown()

    def _wake(self, part: str) -> None:
        """Take back memory that :meth:`sleep` has released; a separate engine sleeps only before its first version."""
        if self._on_gpu and self._engine.is_sleeping():
            # vLLM takes it from the driver, where memory that training has freed is missing as long as torch keeps it.
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=[part])

    def _copy(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Pass all weights to vLLM's loader, which fuses, repacks and places them layer by layer."""
        self._call("start_weight_update")
        try:
            if self._is_split:
                for places in buckets_of_places(tensors, BUCKET_BYTES):
                    self._call("update_weights", {"places": places})
            else:
                self._call("update_weights", {"tensors": tensors})
            self._call("finish_weight_update")
        except BaseException:
            self._call("give_up_weight_update")
            raise
        finally:
            for _ in tensors:  # the other ranks are gathering, so this one iterates to the end too
                pass

    def _call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of vLLM's worker, or of its extension, in each computing process; returns the results."""
        return list(self._engine.collective_rpc(method, args=arguments))

    def _parameters(self, one: OpenCompletion) -> Any:
        from vllm import SamplingParams

        sampling = one.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=one.num_left,
            seed=one.next_seed,
            stop_token_ids=[*self._end_ids, *sampling.end_ids],
            logprobs=0,
            detokenize=False,
        )

    def _completion(self, one: OpenCompletion, output: Any) -> Completion:
        if output.finish_reason not in ("stop", "length"):
            raise WorkerError(f"vLLM gave up a completion after {len(output.token_ids)} tokens: {output.finish_reason}")
        tokens, logprobs = _whole(one, output)
        return completion_of(self._tokenizer, tokens, output.finish_reason == "stop", logprobs)


def _stopped_at(one: OpenCompletion, output: Any) -> int | None:
    """Number of tokens of a completion that contains a stop string; None if it contains none."""
    tokens = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
    assert one.search is not None
    return one.search.length([*one.tokens, *tokens] if one.tokens else tokens)


def _whole(one: OpenCompletion, output: Any) -> tuple[list[int], list[float]]:
    """All tokens of a completion, and their log-probabilities.

    Raises:
        NonFiniteLoss: one of these is not finite: vLLM samples on after NaN, which spoils the cache of others, too.
    """
    whole = one.after(*_sampled(output))
    require_finite(whole.logprobs)
    return list(whole.tokens), list(whole.logprobs)


def _sampled(output: Any) -> tuple[list[int], list[float]]:
    """Tokens of an output of vLLM, and their log-probabilities."""
    tokens = list(output.token_ids)
    return tokens, [row[token].logprob for row, token in zip(output.logprobs, tokens, strict=True)]
