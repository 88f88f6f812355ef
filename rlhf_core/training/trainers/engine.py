"""A thin wrapper around DeepSpeed: every stage of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) with torch's AdamW.

The loops call ``backward`` with the loss of each micro-batch and ``step`` once per optimizer step. A loss passed to
``backward`` is this rank's part of a sum that is already divided by the global normaliser, so the gradient of the step
is the plain sum over micro-batches and ranks, however a global batch is split.

Stages 0 and 1 keep all gradients until ``step`` reduces them. Stages 2 and 3 reduce within ``backward``, because they
keep only their part of a gradient, and accumulate the parts in float32; stage 3 also gathers weights in every forward
pass. In stages 2 and 3 every rank must make the same number of forward and backward passes.
"""

import contextlib
import copy
import io
import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf_core.errors import ResumeMismatch
from rlhf_core.hidden_modules import hidden
from rlhf_core.machine.variables import with_variables
from rlhf_core.schemas.loops import OptimizerSpec
from rlhf_core.schemas.trainers import LIVE_ELEMENTS, REDUCE_BUCKET_ELEMENTS, NativeTrainer
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.gathering import is_split, note_hooks, own_part, unsplit, whole_shape
from rlhf_core.training.trainers.free_memory import LONG_SEQUENCE, return_free_memory
from rlhf_core.training.trainers.shares import adamw, load_shares, pieces, saved_share

_SAMPLED_ENTRIES = 64


def learning_rate(step: int, spec: OptimizerSpec, num_steps: int) -> float:
    """Learning rate of one step. A pure function, so a resumed run needs no scheduler state.

    After the warm-up, the rates are those of transformers' schedulers, which give the lowest rate to the step after the
    last one: every step trains. Those of the warm-up are one step ahead of theirs, whose first step has rate 0. The
    ``linear`` of transformers has no lowest rate.

    Args:
        step: number among the steps of the loop that train the model, from 1.
        num_steps: number of these steps.
    """
    if step <= spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.learning_rate
    done = (step - spec.warmup_steps - 1) / max(1, num_steps - spec.warmup_steps)
    share = 1 - done if spec.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    lowest = spec.min_learning_rate_ratio
    return spec.learning_rate * (lowest + (1 - lowest) * share)


class Engine:
    """Optimizer and gradient reduction for one training loop. Each loop creates its own engine, with a fresh
    optimizer."""

    def __init__(
        self,
        policy: nn.Module,
        spec: OptimizerSpec,
        dtype: Literal["float32", "bfloat16"],
        ranks: Ranks,
        trainer: NativeTrainer | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the parameters of ``policy``: on ``ranks.device`` or, for ZeRO 3, in main memory.

        Collective: every rank creates its engine at the same time.

        Args:
            trainer: ZeRO stage and offloading to main memory; the defaults of the settings if omitted.
            beat: called after each parameter that is split.
        """
        self._ranks = ranks
        self.model = policy
        self._spec = spec
        trainer = trainer or NativeTrainer()
        self._stage = trainer.zero_stage
        self._is_long = False
        deepspeed = _join_deepspeed(ranks)
        config = _config(spec, dtype, trainer, policy)
        if self._stage == 3:
            _split(deepspeed, policy, config, ranks, beat)
        with _quick_and_quiet(), ranks.collective():
            engine, _, _, _ = deepspeed.initialize(
                model=policy, model_parameters=_parameter_groups(policy, spec.weight_decay), config=config
            )
        # Stages 0 and 1: step() reduces, so no micro-batch needs to know whether it is the last.
        engine.enable_backward_allreduce = self._stage >= 2
        self._engine = engine
        # Recorded now: garbage collection of an earlier loop's engine wipes DeepSpeed's own records.
        self._pieces = tuple(pieces(engine, policy))
        if self._stage == 3:
            note_hooks(policy, engine.optimizer.parameter_offload)
        self._sample = _sample_of(policy)

    def __call__(self, input_ids: Tensor, **inputs: Any) -> Any:
        """Run the forward pass of the policy for ``[B, T]`` tokens."""
        self._is_long = input_ids.shape[-1] >= LONG_SEQUENCE
        self._return_free_memory()
        return self._engine(input_ids, **inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch.

        Args:
            loss: scalar; this micro-batch's part of the globally normalised loss.
        """
        self._return_free_memory()
        # DeepSpeed averages over the ranks, but the parts have to be summed.
        self._engine.backward(loss * self._ranks.num_ranks)

    def step(self, learning_rate: float) -> float:
        """Reduce the gradients over the ranks, clip, and update the weights on every rank.

        Returns:
            Global norm of the gradient before clipping. If it is not finite, the weights must no longer be used.
        """
        self._return_free_memory()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._stage < 2:
            with self._ranks.collective():
                self._engine.allreduce_gradients()
        clipped = self._clip() if self._stage == 0 else None
        with self._ranks.collective():
            self._engine.step()
        return float(self._engine.get_global_grad_norm()) if clipped is None else clipped

    def _return_free_memory(self) -> None:
        """Keep the activations of a long sequence on CPU from adding to what is left of those of the pass before."""
        if self._is_long and self._ranks.device.type == "cpu":
            return_free_memory()

    def _clip(self) -> float:
        """Clip in stage 0, where DeepSpeed clips without reporting the norm."""
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), self._spec.max_grad_norm))

    def changed_share(self) -> float:
        """Share of the trained tensors that changed since the last call, judged by a few entries of each.

        A tensor that no input used may stay unchanged; if none changes, nothing is learned.
        """
        sample = _sample_of(self.model)
        changed = (sample != self._sample).any(-1).double().mean()
        self._sample = sample
        return float(changed)

    def state(self) -> dict[str, Any]:
        """This rank's share of the optimizer state: AdamW's moments and its float32 weights, by parameter.

        Tensors, numbers and containers only, so that loading it executes no code.
        """
        return saved_share(self._pieces, adamw(self._engine).state)

    def load_state(self, shares: Iterable[dict[str, Any]]) -> None:
        """Load the results of :meth:`state` from the ranks that wrote a checkpoint, whatever their number and stage.

        Args:
            shares: shares of the ranks, that of the same rank first; read only as far as needed.

        Raises:
            CheckpointCorrupt: the shares are incomplete.
        """
        shares = iter(shares)
        first = next(shares)
        if "adamw" in first:
            self._load_state_of_0_1(first)
        else:
            load_shares(self._pieces, adamw(self._engine).state, itertools.chain([first], shares))

    def _load_state_of_0_1(self, state: dict[str, Any]) -> None:
        """Load the format of rlhf-flows 0.1: DeepSpeed's own stage-1 partitions, for the same number of ranks."""
        own = self._engine.optimizer.state_dict()["single_partition_of_fp32_groups"]
        if self._stage != 1 or [part.shape for part in own] != [part.shape for part in state["weights"]]:
            raise ResumeMismatch(
                "found a checkpoint of rlhf-flows 0.1, whose optimizer state requires trainer.zero_stage = 1 and the "
                "same number of ranks; resume it once that way: later checkpoints fit any number of ranks"
            )
        with torch.no_grad():
            for partition, saved in zip(own, state["weights"], strict=True):
                partition.copy_(saved)
        # Copied, because the loaded tensors are still mapped from the file.
        adamw(self._engine).load_state_dict(copy.deepcopy(state["adamw"]))

    def close(self, *, keep: bool = True) -> None:
        """Release the parameters.

        Args:
            keep: they keep their values, complete on every rank; otherwise the model cannot be used any more.
        """
        self._engine.destroy()
        self._engine.optimizer = None  # frees its memory at once, and a second destroy() finds nothing
        self._pieces = ()
        if keep and is_split(self.model):
            with self._ranks.collective():
                unsplit(self.model)


def split_frozen(
    model: nn.Module,
    dtype: Literal["float32", "bfloat16"],
    ranks: Ranks,
    trainer: NativeTrainer,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Shard an inference-only model over the ranks if ZeRO 3 shards the trained one; it may still be in main memory.

    Collective in that case; every rank must then make the same number of calls of the model.

    Args:
        beat: called after each parameter that is split.
    """
    if trainer.zero_stage < 3:
        return
    deepspeed = _join_deepspeed(ranks)
    config = _base_config(dtype) | {"zero_optimization": _zero(trainer, model)}
    config["zero_optimization"].pop("offload_optimizer", None)
    _split(deepspeed, model, config, ranks, beat)
    with _quick_and_quiet(), ranks.collective():
        engine = deepspeed.initialize(model=model, config=config)[0]
    note_hooks(model, engine.optimizer)


def _split(deepspeed: Any, model: nn.Module, config: dict[str, Any], ranks: Ranks, beat: Callable[[], None]) -> None:
    """Move the parameters of a model to the device and split them over the ranks, one after the other.

    DeepSpeed by itself first moves the whole model. All ranks get the values of rank 0. Collective.
    """
    for buffer in model.buffers():
        buffer.data = buffer.data.to(ranks.device)
    parameters: list[Any] = list(model.parameters())  # they get methods of DeepSpeed's
    for parameter in parameters:
        # Not yet a collective: this may read the parameter from a slow disk.
        parameter.data = parameter.data.to(ranks.device)
        with _quick_and_quiet(), ranks.collective():
            if parameter is parameters[0]:
                deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=config)
            else:  # as DeepSpeed does with parameters that are added later
                parameters[0].convert_to_zero_parameters([parameter])
        beat()


def load_deepspeed(*, on_cpu: bool) -> Any:
    """Import DeepSpeed, which takes more than a second the first time; does not initialise CUDA or process groups."""
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed probes for other devices and warns
    # DeepSpeed's autotuner, which is not used here, imports MLflow if it is installed, and that pandas, FastAPI and
    # its telemetry: a second at every start and restart, four fifths of the time to import DeepSpeed.
    with _quick_and_quiet(), hidden("mlflow"):
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _join_deepspeed(ranks: Ranks) -> Any:
    """Import DeepSpeed and attach it to the existing process group."""
    on_cpu = ranks.device.type == "cpu"
    # torch keeps deprecating functions that DeepSpeed calls on every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    deepspeed = load_deepspeed(on_cpu=on_cpu)
    with _quick_and_quiet():
        if on_cpu:
            _compile_nothing(deepspeed)
        with ranks.collective():
            deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl", verbose=False)
    return deepspeed


def _compile_nothing(deepspeed: Any) -> None:
    """Have DeepSpeed join a process group on CPU without its shared-memory operation.

    DeepSpeed compiles that C++ operation when it joins, and uses it only for tensor-parallel inference. It looks up in
    this table which operations it may build; the table is meant to be edited. Replacing it entirely keeps DeepSpeed
    from running compilers to fill it.
    """
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def _sample_of(policy: nn.Module) -> Tensor:
    """Evenly spaced entries of every trained tensor, ``[tensors, 64]``; cheap for any size of model."""
    with torch.no_grad():
        flat = [own_part(parameter) for parameter in policy.parameters() if parameter.requires_grad]
        places = torch.arange(_SAMPLED_ENTRIES, device=flat[0].device)
        return torch.stack([values[places * len(values) // _SAMPLED_ENTRIES] for values in flat])


@contextlib.contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """Keep DeepSpeed's start quick and quiet: no banners in the workers' logs, and no compiler.

    DeepSpeed imports an optimizer that we do not use and that is decorated with ``torch.compile``. This alone would
    load torch's entire compiler, which takes more than a second at every start and restart.
    """
    with with_variables({"TORCHDYNAMO_DISABLE": "1"}), contextlib.redirect_stdout(io.StringIO()):
        yield


def _parameter_groups(policy: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Apply weight decay to matrices only: it would pull norms and biases, which are scales and offsets, towards
    zero."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": trained}]
    matrices = [parameter for parameter in trained if len(whole_shape(parameter)) >= 2]
    others = [parameter for parameter in trained if len(whole_shape(parameter)) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
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
        # With several backward passes per step, step() tells stages 2 and 3 that the last one is done.
        "managed_gradient_accumulation": trainer.zero_stage < 2,
    }


def _base_config(dtype: str) -> dict[str, Any]:
    return {
        # The loops count micro-batches, not DeepSpeed, which sees every step as one batch of size one.
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
        "overlap_comm": False,  # keeps the order of reduction independent of timing
        "contiguous_gradients": False,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
        "allgather_bucket_size": REDUCE_BUCKET_ELEMENTS,
    }
    vectors = [shape.numel() for shape in map(whole_shape, model.parameters()) if len(shape) < 2]
    if trainer.zero_stage == 3:
        content |= {
            # Norms and biases stay whole: gathering each would take longer than using it.
            "stage3_param_persistence_threshold": max(vectors, default=0),
            "stage3_max_live_parameters": LIVE_ELEMENTS,
            "stage3_max_reuse_distance": LIVE_ELEMENTS,
        }
    if trainer.offload != "none":
        content["offload_optimizer"] = {"device": "cpu"}
        content["contiguous_gradients"] = True  # the copy to main memory reads the contiguous buffer
    if trainer.offload == "parameters":
        content["offload_param"] = {"device": "cpu"}
    return content
