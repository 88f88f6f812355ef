"""Role ``rollout``: an engine in its own process, restarted independently (``rollout.engines``)."""

import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from rlhf_core.errors import SamplingProcessKilled, WorkerError
from rlhf_core.files.lookups import is_there
from rlhf_core.files.whole import shared_secret, write_model
from rlhf_core.machine.shared_names import remove_with_names
from rlhf_core.schemas.engines import EngineAddress
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.checkpoints.soundness import initial_folder
from rlhf_core.training.data.tokenizers import load_tokenizer
from rlhf_core.training.distributed import make_deterministic
from rlhf_core.training.models.adapters import base_fingerprint
from rlhf_core.training.models.causal_lm import tokenizer_folder
from rlhf_core.training.rollouts.remote.client import engine_name
from rlhf_core.training.rollouts.samplers import Sampler, TransformersSampler
from rlhf_core.training.rollouts.server.app import EngineServer
from rlhf_core.training.rollouts.server.worker import EngineWorker
from rlhf_core.training.rollouts.sglang.sampler import SglangSampler
from rlhf_core.training.rollouts.sglang.server import SglangServer
from rlhf_core.training.rollouts.shared_tensors import SharedMemory
from rlhf_core.training.types import RoleResult, WorkerContext
from rlhf_core.weight_sync.receiver import Receiver

POLL_S = 0.1


def run_engine(context: WorkerContext) -> RoleResult:
    """Serve completions until the agent ends this process.

    Raises:
        WorkerError: the server has ended.
    """
    disable_progress_bar()
    spec, generation = context.spec, context.generation or 0
    torch.set_num_threads(spec.resources.cpus_per_rank)
    attempt = context.run_dir.attempt(context.attempt)
    folder = _model_folder(context)
    tokenizer = load_tokenizer(tokenizer_folder(spec, folder))
    base = "" if spec.model.lora is None else base_fingerprint(folder, partial(context.reporter.beat, Phase.SETUP, 0))
    scratch = _scratch(context)
    try:
        sampler = _sampler(context, folder, tokenizer, scratch)
    except SamplingProcessKilled as error:
        _die_like(error.exit_code)
        raise
    context.reporter.represent(sampler.pids)
    receiver = _receiver(context, scratch)
    worker = EngineWorker(context.rank, generation, sampler, receiver, context.reporter, base)
    with EngineServer(worker, receiver, shared_secret(attempt.engine_key), context.listening_address) as server:
        address = EngineAddress(
            rank=context.rank, generation=generation, node=context.node, host=context.address, port=server.port
        )
        write_model(attempt.engine(context.rank), address)
        print(f"engine {context.rank} listens on {context.address}:{server.port}", flush=True)
        try:
            worker.serve(lambda: server.is_alive and sampler.exit_code is None)
        finally:
            _die_like(sampler.exit_code)
    raise WorkerError("a server of the engine has ended; see its log")


def _die_like(exit_code: int | None) -> None:
    """Die by the same signal that killed a process of the sampler, so that the agent sees the cause."""
    if exit_code is None or exit_code >= 0:
        return
    number = signal.Signals(-exit_code)
    print(f"{number.name} ended a sampling process of this engine, so the engine ends", flush=True)
    if number is not signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _model_folder(context: WorkerContext) -> Path:
    """Folder of the model, which trainer rank 0 may still be building."""
    folder = initial_folder(context.spec, context.run_dir)
    while not is_there(folder):
        context.reporter.beat(Phase.SETUP, 0)
        time.sleep(POLL_S)
    return folder


def _sampler(context: WorkerContext, folder: Path, tokenizer: PreTrainedTokenizerBase, scratch: Path | None) -> Sampler:
    spec, on_gpu = context.spec, context.spec.resources.gpus_per_node > 0
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")  # the agent makes one GPU visible to it
    if spec.rollout.engine == "transformers":
        make_deterministic(device, on_gpus=False)  # nothing is differentiated here
        return TransformersSampler(folder, tokenizer, spec.model.dtype, device, spec.model.lora)
    if spec.rollout.engine == "sglang":
        assert scratch is not None  # see _scratch
        return _sglang(context, folder, tokenizer, scratch)
    # Only this engine needs vLLM.
    from rlhf_core.training.rollouts.vllm.engine import VllmEngine
    from rlhf_core.training.rollouts.vllm.sampler import VllmSampler

    if spec.rollout.gpus_per_engine == 1:
        # vLLM uses an existing process group, and otherwise opens a port for one.
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    engine = VllmEngine(
        folder,
        tokenizer,
        spec.rollout.vllm,
        dtype=spec.model.dtype,
        max_tokens=spec.max_tokens,
        on_gpu=on_gpu,
        variables={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        lora=spec.model.lora,
        tensor_parallel=spec.rollout.vllm.tensor_parallel,
        scratch=scratch,
        represent=context.reporter.represent,
    )
    return VllmSampler(engine)


def _receiver(context: WorkerContext, scratch: Path | None) -> Receiver:
    """Staging area in memory of this process, or in memory shared by the processes of a split engine."""
    name = engine_name(context.rank)
    if context.spec.rollout.gpus_per_engine == 1:
        return Receiver(name)
    assert scratch is not None  # see _scratch
    return Receiver(name, SharedMemory(scratch).allocate)


def _scratch(context: WorkerContext) -> Path | None:
    """Create a scratch folder for an engine of several processes, in main memory if the agent provides some; an earlier
    one of this engine is removed. None for an engine of one process."""
    rollout = context.spec.rollout
    if rollout.engine != "sglang" and rollout.gpus_per_engine == 1:
        return None
    if context.memory is None:
        return Path(tempfile.mkdtemp(prefix="rlhf-engine-"))
    folder = context.memory / f"engine-{context.rank}"
    remove_with_names(folder)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def _sglang(context: WorkerContext, folder: Path, tokenizer: PreTrainedTokenizerBase, scratch: Path) -> Sampler:
    spec = context.spec
    server = SglangServer(
        folder,
        spec.rollout.sglang,
        dtype=spec.model.dtype,
        max_tokens=spec.max_tokens,
        seed=spec.seed,
        scratch=scratch,
    )
    server.wait(lambda: context.reporter.beat(Phase.SETUP, 0))
    return SglangSampler(server, folder, tokenizer, scratch / "weights")
