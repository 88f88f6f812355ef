"""Whole weights of a model, whether ZeRO 3 has split its parameters over the ranks or not.

ZeRO 3 (Rajbhandari et al. 2020, arXiv 1910.02054, section 5) leaves a rank 1/N of each parameter, and an empty tensor
in the parameter's place. Checkpoints, evaluation and other engines take whole ones from here.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Size, Tensor, dtype, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlhf_core.schemas.trainers import REDUCE_BUCKET_ELEMENTS

SHARD_BYTES = 4_000_000_000
"""Largest file of weights."""
WEIGHTS_METADATA = {"format": "pt"}
"""Metadata of a file of weights, as transformers expects it."""
_HOOKS = "zero_hooks_owner"


def is_split(model: nn.Module) -> bool:
    """True if the parameters of ``model`` are split over the ranks."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def whole_shape(parameter: Tensor) -> Size:
    """Shape of a parameter when it is whole."""
    shape: Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def own_part(parameter: Tensor) -> Tensor:
    """Elements of a parameter that this rank has at all times, flat: its share under ZeRO 3 (padded), otherwise all."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part.detach().flatten()


def whole_bytes(model: nn.Module) -> int:
    """Bytes of what a checkpoint has of ``model``, as if this rank had it whole: of weights and buffers, or of the
    trained weights where the others are frozen."""
    trained = [one for one in model.parameters() if one.requires_grad]
    saved = [*model.parameters(), *model.buffers()] if is_trained_whole(model) else trained
    return sum(whole_shape(one).numel() * one.element_size() for one in saved)


def is_trained_whole(model: nn.Module) -> bool:
    """True unless a part of ``model`` is frozen and another is trained, as under an adapter."""
    return len({one.requires_grad for one in model.parameters()}) < 2


def gathered_weights(
    model: nn.Module, bucket_elements: int = REDUCE_BUCKET_ELEMENTS, *, trained_only: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Whole weights bucket by bucket: besides its own share, a rank holds one bucket at a time.

    Collective where the model is split: every rank goes through to the end, whatever it does with the weights.

    Args:
        bucket_elements: most elements at once; a larger parameter is a bucket of its own.
        trained_only: leave out what is frozen, and buffers.

    Yields:
        Tensors by name, valid until the next bucket. A tied weight comes once, under its first name; buffers that are
        saved with the model come last.
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
    """Whole weights of :func:`gathered_weights` one by one, with a beat after each bucket. Collective likewise."""
    for bucket in gathered_weights(model, trained_only=trained_only):
        yield from bucket.items()
        beat()


def save_split_model(model: PreTrainedModel, folder: Path, is_first: bool, beat: Callable[[], None]) -> None:
    """Write a model that is split over the ranks as a Hugging Face folder, one file of weights after the other.

    Collective: every rank gathers, rank 0 writes and holds one file of ``SHARD_BYTES`` in main memory. A model whose
    names on the disk are not those in memory (experts that are stored one by one) is whole in rank 0's main memory.

    Raises:
        OSError, SafetensorError: rank 0 could not write; raised when all ranks have gone through all buckets.
    """
    writer = _FolderWriter(model, folder) if is_first else None
    failure: Exception | None = None
    for bucket in gathered_weights(model):
        beat()
        if writer is None or failure is not None:
            continue  # the others gather still: a rank that stopped here would leave them waiting
        try:
            writer.add(bucket)
        except Exception as error:  # noqa: BLE001 - raised below, when no rank waits for this one
            failure = error
    if failure is not None:
        raise failure
    if writer is not None:
        writer.finish()


def save_weights(model: nn.Module, path: Path, is_first: bool, beat: Callable[[], None]) -> None:
    """Write the weights of any model into one file of safetensors; rank 0 has them whole in main memory meanwhile.

    Of a model that is frozen in part, the trained weights alone.

    Collective where the model is split.

    Raises:
        OSError, SafetensorError: rank 0 could not write.
    """
    weights = weights_of_first(model, is_first, beat, trained_only=not is_trained_whole(model))
    if is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, path)


def weights_of_first(
    model: nn.Module, is_first: bool, beat: Callable[[], None], *, trained_only: bool
) -> dict[str, Tensor]:
    """Whole weights of a model in rank 0's main memory, by name; none on the other ranks. Collective where the model is
    split."""
    weights: dict[str, Tensor] = {}
    for bucket in gathered_weights(model, trained_only=trained_only):
        beat()
        if is_first:
            weights |= {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in bucket.items()}
    return weights


class _FolderWriter:
    """Collects weights in their order and writes each file as soon as it is full."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._converts = not keeps_names(model)
        self._files = weight_files(model)
        self._left = list(self._files.items())

    def add(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of one bucket."""
        for name, tensor in weights.items():
            self._waiting[name] = tensor.to("cpu", copy=True).contiguous()
            if not self._converts and len(self._waiting) == len(self._left[0][1]):
                file, _ = self._left.pop(0)
                self._folder.mkdir(parents=True, exist_ok=True)
                save_file(self._waiting, self._folder / file, metadata=WEIGHTS_METADATA)
                self._waiting = {}

    def finish(self) -> None:
        """Write what goes with the weights."""
        if self._converts:
            self._model.save_pretrained(self._folder, state_dict=self._waiting, max_shard_size=SHARD_BYTES)
        else:
            write_model_texts(self._model, self._folder)


def keeps_names(model: PreTrainedModel) -> bool:
    """True if the names of the weights on the disk are those in memory."""
    return not get_model_conversion_mapping(model, add_legacy=False)


def weight_shapes(model: nn.Module, *, trained_only: bool = False) -> dict[str, tuple[dtype, Size]]:
    """Types and shapes of the whole weights, by name, in the order of :func:`gathered_weights`."""
    if trained_only:
        return {name: (one.dtype, whole_shape(one)) for name, one in model.named_parameters() if one.requires_grad}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = model.state_dict().keys()
    return {name: (tensor.dtype, whole_shape(tensor)) for name, tensor in named.items() if name in saved}


def weight_files(model: nn.Module) -> dict[str, list[str]]:
    """Names of the weights by file, in their order; no file is larger than ``SHARD_BYTES`` unless one weight is."""
    parts: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, (kind, shape) in weight_shapes(model).items():
        size = shape.numel() * kind.itemsize
        if parts[-1] and size > room:
            parts.append([])
            room = SHARD_BYTES
        parts[-1].append(name)
        room -= size
    if len(parts) == 1:
        return {SAFE_WEIGHTS_NAME: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": names for number, names in enumerate(parts, 1)}


def write_model_texts(model: PreTrainedModel, folder: Path) -> None:
    """Write what makes a Hugging Face folder of files of weights: configuration, generation settings, index.

    Raises:
        OSError: one cannot be written.
    """
    config: Any = model.config
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    files = weight_files(model)
    if len(files) > 1:
        total = sum(shape.numel() * kind.itemsize for kind, shape in weight_shapes(model).values())
        file_of = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_model(model: nn.Module) -> Iterator[None]:
    """Have all weights of a split model in place meanwhile, and its modules free of DeepSpeed's hooks.

    With the hooks, each module would gather its weights when it is called: a rank whose completions end early makes
    fewer calls, and the others would wait for it for ever. Collective at its beginning and end only; nothing happens
    where the model is not split.
    """
    if not is_split(model):
        yield
        return
    with _gathered(list(model.parameters())), _without_hooks(getattr(model, _HOOKS)):
        yield


def note_hooks(wrapper: nn.Module, offload: Any) -> None:
    """Remember with a split model, and with what it wraps, who has set the hooks (``DeepSpeedZeRoOffload``)."""
    for module in (wrapper, *wrapper.children()):
        setattr(module, _HOOKS, offload)


def unsplit(model: nn.Module) -> None:
    """Give every rank the whole of each parameter again, as a plain one. Collective."""
    plain: dict[int, nn.Parameter] = {}
    parameters = list(model.parameters())
    for parameter in parameters:
        with _gathered([parameter]):
            plain[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    for module in model.modules():
        own = {
            name: None if parameter is None else plain[id(parameter)] for name, parameter in module._parameters.items()
        }
        module._parameters = own  # DeepSpeed has put a table of its own there
        if hasattr(module, _HOOKS):
            delattr(module, _HOOKS)


@contextlib.contextmanager
def _gathered(parameters: Sequence[Tensor]) -> Iterator[None]:
    # DeepSpeed has given these methods to each split parameter. All ranks gather in the order of its numbers.
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
