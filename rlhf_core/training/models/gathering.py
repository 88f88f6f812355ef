"""Full weights of a model, whether or not ZeRO 3 has split its parameters over the ranks.

ZeRO 3 (Rajbhandari et al. 2020, arXiv 1910.02054, section 5) leaves each rank 1/N of every parameter, and an empty
tensor in its place. Checkpoints, evaluation and other engines obtain full weights from here.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor, dtype, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlhf_core.schemas.trainers import REDUCE_BUCKET_ELEMENTS
from rlhf_core.survival import Survived
from rlhf_core.training.models.tensor_files import Shapes, shapes_of, write_tensors

SHARD_BYTES = 4_000_000_000
"""Maximum size of a weights file in bytes."""
WEIGHTS_METADATA = {"format": "pt"}
"""Metadata of a weights file, as transformers expects it."""
_HOOKS = "zero_hooks_owner"


def is_split(model: nn.Module) -> bool:
    """True if the parameters of ``model`` are split over the ranks."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def whole_shape(parameter: Tensor) -> Size:
    """Shape of the full parameter."""
    shape: Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def most_on_any_rank(number: int, module: nn.Module, device: torch.device) -> int:
    """Largest number of calls of a split module that any rank has to make: each call gathers its weights, so all ranks
    have to make as many. Collective if the module is split; otherwise the number itself."""
    if not is_split(module):
        return number
    most = torch.tensor(number, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def own_part(parameter: Tensor) -> Tensor:
    """Elements of a parameter that this rank always holds, flattened: its padded share under ZeRO 3, otherwise all."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part.detach().flatten()


def whole_bytes(model: nn.Module) -> int:
    """Size of ``model`` in a checkpoint, in bytes, as if it were not split: weights and buffers, or only the trained
    weights if others are frozen."""
    trained = [one for one in model.parameters() if one.requires_grad]
    saved = [*model.parameters(), *model.buffers()] if is_trained_whole(model) else trained
    return sum(whole_shape(one).numel() * one.element_size() for one in saved)


def is_trained_whole(model: nn.Module) -> bool:
    """True unless a part of ``model`` is frozen and another is trained, as under an adapter."""
    return len({one.requires_grad for one in model.parameters()}) < 2


def gathered_weights(
    model: nn.Module, bucket_elements: int = REDUCE_BUCKET_ELEMENTS, *, trained_only: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Yield the full weights bucket by bucket: besides its own share, a rank holds one bucket at a time.

    Collective if the model is split: every rank must iterate to the end, whatever it does with the weights.

    Args:
        bucket_elements: maximum number of elements at once; a larger parameter gets its own bucket.
        trained_only: leave out frozen weights and buffers.

    Yields:
        Tensors by name, valid until the next bucket. A tied weight appears once, under its first name; buffers saved
        with the model come last.
    """
    bucket: dict[str, Tensor] = {}
    room = bucket_elements
    for name, parameter in model.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        size = whole_shape(parameter).numel()
        if bucket and size > room:
            with _gathered(list(bucket.values())):
                yield {key: value.detach() for key, value in bucket.items()}
            bucket, room = {}, bucket_elements
        bucket[name] = parameter
        room -= size
    with _gathered(list(bucket.values())):
        yield {key: value.detach() for key, value in bucket.items()}
    if trained_only:
        return
    saved = model.state_dict().keys()
    yield {name: buffer for name, buffer in model.named_buffers() if name in saved}


def named_weights(
    model: nn.Module, beat: Callable[[], None], *, trained_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of :func:`gathered_weights` one by one, with a heartbeat after each bucket. Also collective."""
    for bucket in gathered_weights(model, trained_only=trained_only):
        yield from bucket.items()
        beat()


def save_model(model: PreTrainedModel, folder: Path, is_first: bool, beat: Callable[[], None]) -> None:
    """Write a model, split over the ranks or not, as a Hugging Face folder, one weights file at a time.

    Collective if the model is split: every rank gathers, rank 0 writes and holds one file of ``SHARD_BYTES`` in main
    memory, or the entire model if its weights have other names on disk than in memory (experts stored individually).

    Args:
        beat: called on progress.

    Raises:
        OSError: rank 0 could not write; raised after all ranks have iterated over all buckets.
    """
    writer = _FolderWriter(model, folder, beat) if is_first else None
    failure: BaseException | None = None
    for bucket in gathered_weights(model):
        beat()
        if writer is None or failure is not None:
            continue  # the others are still gathering: a rank that stopped here would leave them waiting
        with Survived() as outcome:  # raised below, once no rank waits for this one
            writer.add(bucket)
        failure = outcome.error
    if failure is not None:
        raise failure
    if writer is not None:
        writer.finish()


def save_weights(model: nn.Module, path: Path, is_first: bool, beat: Callable[[], None]) -> None:
    """Write the weights of any model into one safetensors file; rank 0 meanwhile holds all of them in main memory.

    Of a partly frozen model, only the trained weights are written.

    Collective if the model is split.

    Raises:
        OSError: rank 0 could not write.
    """
    weights = weights_of_first(model, is_first, beat, trained_only=not is_trained_whole(model))
    if is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, weights, WEIGHTS_METADATA, beat)


def weights_of_first(
    model: nn.Module, is_first: bool, beat: Callable[[], None], *, trained_only: bool
) -> dict[str, Tensor]:
    """Full weights of a model in rank 0's main memory, by name; none on the other ranks. Collective if the model is
    split."""
    weights: dict[str, Tensor] = {}
    for bucket in gathered_weights(model, trained_only=trained_only):
        beat()
        if is_first:
            weights |= {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in bucket.items()}
    return weights


class _FolderWriter:
    """Collects weights in order and writes each file as soon as it is full."""

    def __init__(self, model: PreTrainedModel, folder: Path, beat: Callable[[], None]) -> None:
        self._model = model
        self._folder = folder
        self._beat = beat
        self._is_split = is_split(model)
        self._waiting: dict[str, Tensor] = {}
        self._converts = not keeps_names(model)
        self._left = list(weight_files(model).items())

    def add(self, weights: dict[str, Tensor]) -> None:
        """Add the weights of one bucket."""
        for name, tensor in weights.items():
            # The weights of a split model are valid until the next bucket.
            self._waiting[name] = tensor.to("cpu", copy=True) if self._is_split else tensor
            if not self._converts and len(self._waiting) == len(self._left[0][1]):
                file, _ = self._left.pop(0)
                self._write(file, self._waiting)
                self._waiting = {}

    def finish(self) -> None:
        """Write the weights to be converted, and the files that accompany the weights."""
        shapes = weight_shapes(self._model)
        if self._converts:
            weights = revert_weight_conversion(self._model, self._waiting)
            shapes = shapes_of(weights)
            for file, names in files_of(shapes).items():
                self._write(file, {name: weights.pop(name) for name in names})
        write_model_texts(self._model, self._folder, shapes)

    def _write(self, file: str, weights: dict[str, Tensor]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_tensors(self._folder / file, weights, WEIGHTS_METADATA, self._beat)


def keeps_names(model: PreTrainedModel) -> bool:
    """True if the weights have the same names on disk as in memory."""
    return not get_model_conversion_mapping(model, add_legacy=False)


def weight_shapes(model: nn.Module, *, trained_only: bool = False) -> dict[str, tuple[dtype, Size]]:
    """Types and shapes of the full weights, by name, in the order of :func:`gathered_weights`."""
    if trained_only:
        return {name: (one.dtype, whole_shape(one)) for name, one in model.named_parameters() if one.requires_grad}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = model.state_dict().keys()
    return {name: (tensor.dtype, whole_shape(tensor)) for name, tensor in named.items() if name in saved}


def weight_files(model: nn.Module) -> dict[str, list[str]]:
    """Names of the weights by file, in order, if they are saved unchanged."""
    return files_of(weight_shapes(model))


def files_of(shapes: Shapes) -> dict[str, list[str]]:
    """Names of tensors by file, in order; no file exceeds ``SHARD_BYTES`` unless a single tensor does."""
    parts: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, (kind, shape) in shapes.items():
        size = shape.numel() * kind.itemsize
        if parts[-1] and size > room:
            parts.append([])
            room = SHARD_BYTES
        parts[-1].append(name)
        room -= size
    if len(parts) == 1:
        return {SAFE_WEIGHTS_NAME: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": names for number, names in enumerate(parts, 1)}


def write_model_texts(model: PreTrainedModel, folder: Path, shapes: Shapes) -> None:
    """Write the files that turn weights files into a Hugging Face folder: configuration, generation settings, index.

    Args:
        shapes: types and shapes of the saved weights.

    Raises:
        OSError: a file cannot be written.
    """
    config: Any = model.config
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    files = files_of(shapes)
    if len(files) > 1:
        total = sum(shape.numel() * kind.itemsize for kind, shape in shapes.values())
        file_of = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_model(model: nn.Module) -> Iterator[None]:
    """Within the block, put all weights of a split model in place and remove DeepSpeed's hooks from its modules.

    With the hooks, each module would gather its weights when called: a rank whose completions end early makes fewer
    calls, and the others would wait for it forever. Collective only at its beginning and end; does nothing if the model
    is not split.
    """
    if not is_split(model):
        yield
        return
    with _gathered(list(model.parameters())), _without_hooks(getattr(model, _HOOKS)):
        yield


def note_hooks(wrapper: nn.Module, offload: Any) -> None:
    """Store the owner of the hooks (``DeepSpeedZeRoOffload``) on a split model and on the model it wraps."""
    for module in (wrapper, *wrapper.children()):
        setattr(module, _HOOKS, offload)


def unsplit(model: nn.Module) -> None:
    """Turn each split parameter back into a full, plain one on every rank. Collective."""
    plain: dict[int, nn.Parameter] = {}
    parameters = list(model.parameters())
    for parameter in parameters:
        with _gathered([parameter]):
            plain[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    for module in model.modules():
        own = {
            name: None if parameter is None else plain[id(parameter)] for name, parameter in module._parameters.items()
        }
        module._parameters = own  # DeepSpeed has replaced it with a table of its own
        if hasattr(module, _HOOKS):
            delattr(module, _HOOKS)


@contextlib.contextmanager
def _gathered(parameters: Sequence[Tensor]) -> Iterator[None]:
    # DeepSpeed adds these methods to each split parameter. All ranks gather in the order of its parameter numbers.
    split: dict[int, Any] = {one.ds_id: one for one in parameters if hasattr(one, "ds_id")}
    in_order = [split[number] for number in sorted(split)]
    if not in_order:
        yield
        return
    in_order[0].all_gather(param_list=in_order)
    try:
        yield
    finally:
        in_order[0].partition(param_list=in_order)


@contextlib.contextmanager
def _without_hooks(offload: Any) -> Iterator[None]:
    for parameter in offload.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    try:
        yield
    finally:
        offload._register_deepspeed_module(offload.module)
