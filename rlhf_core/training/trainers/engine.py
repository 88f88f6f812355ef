"""DeepSpeed, wrapped small: every stage of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) with torch's AdamW.

What the loops see of it is ``backward`` for the loss of each micro-batch and ``step`` once per optimizer step. A loss
given to ``backward`` is this rank's part of a sum that is already divided by the global normaliser; so the gradient of
the step is the plain sum over micro-batches and ranks, and the same for every way of splitting a global batch.

Stages 0 and 1 keep all gradients until ``step`` reduces them. Stages 2 and 3 reduce within ``backward``, because they
keep only their part of a gradient, and add the parts up in float32; stage 3 gathers weights in every forward pass too.
There every rank must make the same number of forward and backward passes.
"""

import contextlib
import copy
import io
import itertools
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf_core.errors import BadConfig, ResumeMismatch
from rlhf_core.schemas.loops import OptimizerSpec
from rlhf_core.schemas.trainers import LIVE_ELEMENTS, REDUCE_BUCKET_ELEMENTS, NativeTrainer
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.gathering import is_split, note_hooks, own_part, unsplit, whole_shape
from rlhf_core.training.trainers.shares import adamw, load_shares, pieces, saved_share

_SAMPLED_ENTRIES = 64


def learning_rate(step: int, spec: OptimizerSpec, num_steps: int) -> float:
    """Learning rate of one step: a pure function, so a resumed run needs no scheduler state.

    Args:
        step: step within its loop, from 1.
        num_steps: steps of that loop; ``linear`` and ``cosine`` reach zero there.
    """
    if step <= spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    done = min(1.0, (step - spec.warmup_steps) / max(1, num_steps - spec.warmup_steps))
    if spec.schedule == "linear":
        return spec.learning_rate * (1 - done)
    return spec.learning_rate * (1 + math.cos(math.pi * done)) / 2


class Engine:
    """Optimizer and gradient reduction for one training loop. A new loop makes a new engine: a fresh optimizer."""

    def __init__(
        self,
        policy: nn.Module,
        spec: OptimizerSpec,
        dtype: Literal["float32", "bfloat16"],
        ranks: Ranks,
        trainer: NativeTrainer | None = None,
    ) -> None:
        """Take over the parameters of ``policy``, which lies on ``ranks.device`` already.

        Collective: every rank makes its engine at the same time.

        Args:
            trainer: stage of ZeRO and what lies in main memory; the settings' defaults where it is left out.

        Raises:
            BadConfig: this DeepSpeed is too old for stages 2 and 3.
        """
        self._ranks = ranks
        self._policy = policy
        self._spec = spec
        trainer = trainer or NativeTrainer()
        self._stage = trainer.zero_stage
        deepspeed = _join_deepspeed(ranks)
        with _quick_and_quiet(), ranks.reporter.collective():
            engine, _, _, _ = deepspeed.initialize(
                model=policy,
                model_parameters=_parameter_groups(policy, spec.weight_decay),
                config=_config(spec, dtype, trainer, policy),
            )
        if self._stage >= 2 and not hasattr(engine, "managed_gradient_accumulation"):
            raise BadConfig(
                f"found trainer.zero_stage = {self._stage} and DeepSpeed {deepspeed.__version__}, which takes every "
                f"backward pass for a whole step; install the version of constraints.txt, or use stage 0 or 1"
            )
        # Stages 0 and 1: the reduction belongs to step(); then no micro-batch needs to know whether it is the last.
        engine.enable_backward_allreduce = self._stage >= 2
        self._engine = engine
        # Noted now: the engine of an earlier loop wipes DeepSpeed's own notes when it is collected.
        self._pieces = tuple(pieces(engine, policy))
        if self._stage == 3:
            note_hooks(policy, engine.optimizer.parameter_offload)
        self._sample = _sample_of(policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass of the policy."""
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch.

        Args:
            loss: scalar; this micro-batch's part of the globally normalised loss.
        """
        # DeepSpeed divides by the number of ranks what it sums over them; the parts are to be summed.
        self._engine.backward(loss * self._ranks.num_ranks)

    def step(self, learning_rate: float) -> float:
        """Reduce the gradients over the ranks, clip, update the weights everywhere.

        Returns:
            Global norm of the gradient before clipping. If it is not finite, the weights must not be used any more.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._stage >= 2:
            with self._ranks.reporter.collective():
                self._engine.step()
            return float(self._engine.get_global_grad_norm())
        with self._ranks.reporter.collective():
            self._engine.allreduce_gradients()
        norm = self._clip() if self._stage == 0 else 0.0
        with self._ranks.reporter.collective():
            self._engine.step()
        return norm if self._stage == 0 else float(self._engine.get_global_grad_norm())

    def _clip(self) -> float:
        """Clip in stage 0, where DeepSpeed does so without telling the norm."""
        most = self._spec.max_grad_norm or math.inf
        return float(nn.utils.clip_grad_norm_(self._policy.parameters(), most))

    def changed_share(self, policy: nn.Module) -> float:
        """Share of the trained tensors that differ from the last time this was asked, by a few entries of each.

        A tensor may stay as it is where nothing it is for came up; when none changes, nothing is learned.
        """
        sample = _sample_of(policy)
        changed = (sample != self._sample).any(-1).double().mean()
        self._sample = sample
        return float(changed)

    def state(self) -> dict[str, Any]:
        """This rank's share of the optimizer: AdamW's moments and the float32 weights they belong to, by parameter.

        Tensors, numbers and containers only, so that it can be read back without running code.
        """
        return saved_share(self._pieces, adamw(self._engine).state)

    def load_state(self, shares: Iterable[dict[str, Any]]) -> None:
        """Take over what :meth:`state` gave on the ranks that wrote a checkpoint, whatever their number and stage.

        Args:
            shares: of the ranks, that of the same rank first; read as far as they are needed.

        Raises:
            CheckpointCorrupt: they lack a part.
        """
        shares = iter(shares)
        first = next(shares)
        if "adamw" in first:
            self._load_state_of_0_1(first)
        else:
            load_shares(self._pieces, adamw(self._engine).state, itertools.chain([first], shares))

    def _load_state_of_0_1(self, state: dict[str, Any]) -> None:
        """The form of rlhf-flows 0.1: partitions of stage 1 as DeepSpeed has them, for the same number of ranks."""
        own = self._engine.optimizer.state_dict()["single_partition_of_fp32_groups"]
        if self._stage != 1 or [part.shape for part in own] != [part.shape for part in state["weights"]]:
            raise ResumeMismatch(
                "found a checkpoint of rlhf-flows 0.1, whose optimizer state fits trainer.zero_stage = 1 and as many "
                "ranks as wrote it; resume it so once: checkpoints written from then on fit any number of ranks"
            )
        with torch.no_grad():
            for partition, saved in zip(own, state["weights"], strict=True):
                partition.copy_(saved)
        # Copied, because what was loaded lies in the file still.
        adamw(self._engine).load_state_dict(copy.deepcopy(state["adamw"]))

    def close(self) -> None:
        """Let go of the parameters, which keep their values and are whole on every rank."""
        self._engine.destroy()
        self._engine.optimizer = None  # its memory is free at once, and a second destroy() finds nothing
        self._pieces = ()
        if is_split(self._policy):
            with self._ranks.reporter.collective():
                unsplit(self._policy)


def split_frozen(model: nn.Module, dtype: Literal["float32", "bfloat16"], ranks: Ranks, trainer: NativeTrainer) -> None:
    """Split a model that is only called, never trained, over the ranks where ZeRO 3 splits the trained one.

    Collective there; every rank calls the model equally often afterwards.
    """
    if trainer.zero_stage < 3:
        return
    deepspeed = _join_deepspeed(ranks)
    config = _base_config(dtype) | {"zero_optimization": _zero(trainer, model)}
    config["zero_optimization"].pop("offload_optimizer", None)
    with _quick_and_quiet(), ranks.reporter.collective():
        engine = deepspeed.initialize(model=model, config=config)[0]
    note_hooks(model, engine.optimizer)


def load_deepspeed(*, on_cpu: bool) -> Any:
    """Import DeepSpeed, which takes more than a second the first time; CUDA and process groups stay untouched."""
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed looks for other devices, and warns
    with _quick_and_quiet(), _without("mlflow"):
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _join_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed and join it to the process group that is there."""
    on_cpu = ranks.device.type == "cpu"
    # torch deprecates by the month what DeepSpeed calls on every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    deepspeed = load_deepspeed(on_cpu=on_cpu)
    with _quick_and_quiet():
        if on_cpu:
            _compile_nothing(deepspeed)
        with ranks.reporter.collective():
            deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl", verbose=False)
    return deepspeed


def _compile_nothing(deepspeed: Any) -> None:
    """Have DeepSpeed join a process group on CPU without its shared-memory operation.

    It compiles that operation by C++ when it joins, and uses it for tensor-parallel inference only. DeepSpeed asks this
    table which operations it may build; it is meant to be edited. Set as a whole, it is not filled by trying compilers.
    """
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def _sample_of(policy: nn.Module) -> Tensor:
    """Entries of every trained tensor ``[tensors, 64]``, spread evenly; cheap however large the model is."""
    with torch.no_grad():
        flat = [own_part(parameter) for parameter in policy.parameters() if parameter.requires_grad]
        return torch.stack([values[_spread(len(values), values.device)] for values in flat])


def _spread(size: int, device: torch.device) -> Tensor:
    return torch.arange(_SAMPLED_ENTRIES, device=device) * size // _SAMPLED_ENTRIES


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Hide an installed module from what is imported meanwhile.

    DeepSpeed's autotuner, which we do not use, imports MLflow where it is installed, and MLflow imports pandas, FastAPI
    and its telemetry: a second of every start and restart, four fifths of the import of DeepSpeed.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # the import system's way to say that there is none
    try:
        yield
    finally:
        del sys.modules[module]


@contextlib.contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """For DeepSpeed's start: no banners in the workers' logs, and no compiler.

    DeepSpeed imports an optimizer that we do not use and that is decorated with ``torch.compile``; that alone would
    load all of torch's compiler, more than a second of every start and restart.
    """
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def _parameter_groups(policy: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices only: norms and biases are scales and offsets, which decay would pull towards a useless zero."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": trained}]
    groups = [
        {
            "params": [parameter for parameter in trained if len(whole_shape(parameter)) >= 2],
            "weight_decay": weight_decay,
        },
        {"params": [parameter for parameter in trained if len(whole_shape(parameter)) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _config(spec: OptimizerSpec, dtype: str, trainer: NativeTrainer, policy: nn.Module) -> dict[str, Any]:
    return _base_config(dtype) | {
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": spec.learning_rate,
                "betas": [spec.adam_beta1, spec.adam_beta2],
                "weight_decay": spec.weight_decay,
                "torch_adam": True,  # DeepSpeed's own kernels would be compiled first
            },
        },
        "gradient_clipping": spec.max_grad_norm if trainer.zero_stage else 0.0,
        "zero_optimization": _zero(trainer, policy),
        # With several backward passes per step, stages 2 and 3 are told by step() that it was the last.
        "managed_gradient_accumulation": trainer.zero_stage < 2,
    }


def _base_config(dtype: str) -> dict[str, Any]:
    return {
        # Micro-batches are counted by the loops, not by DeepSpeed: to it every step is one batch of one.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "wall_clock_breakdown": False,
    }


def _zero(trainer: NativeTrainer, model: nn.Module) -> dict[str, Any]:
    content: dict[str, Any] = {
        "stage": trainer.zero_stage,
        "overlap_comm": False,  # the order of reduction must not depend on timing
        "contiguous_gradients": False,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
        "allgather_bucket_size": REDUCE_BUCKET_ELEMENTS,
    }
    vectors = [shape.numel() for shape in map(whole_shape, model.parameters()) if len(shape) < 2]
    if trainer.zero_stage == 3:
        content |= {
            # Norms and biases stay whole: to gather each of them would take longer than to use it.
            "stage3_param_persistence_threshold": max(vectors, default=0),
            "stage3_max_live_parameters": LIVE_ELEMENTS,
            "stage3_max_reuse_distance": LIVE_ELEMENTS,
        }
    if trainer.offload != "none":
        content["offload_optimizer"] = {"device": "cpu"}
        content["contiguous_gradients"] = True  # the copy to main memory is made from the contiguous buffer
    if trainer.offload == "parameters":
        content["offload_param"] = {"device": "cpu"}
    return content
