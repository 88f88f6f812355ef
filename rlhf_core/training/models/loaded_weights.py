"""Loading of models from folders that hold all of their weights."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from rlhf_core.errors import BadConfig
from rlhf_core.text.formatting import listed


def load_whole(
    kind: type[AutoModelForCausalLM | AutoModelForSequenceClassification],
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    beat: Callable[[], None] = lambda: None,
    *,
    new: tuple[str, ...] = (),
    setting: str = "",
) -> PreTrainedModel:
    """Load a model, and refuse a folder that lacks weights of it, which transformers fills with random numbers.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        beat: called after each tensor.
        new: beginnings of the names of weights that need not be there.
        setting: beginning of the message, to name the setting of the folder.

    Raises:
        BadConfig: a weight is missing or has another shape.
        OSError, ValueError: transformers cannot load the model.
    """
    model: PreTrainedModel
    with _beating(beat):
        model, about = kind.from_pretrained(
            str(folder),
            config=config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    missing = [f"no {name}" for name in sorted(about["missing_keys"]) if not name.startswith(new)]
    for name, found, expected in sorted(about["mismatched_keys"]):
        missing.append(f"{name} of shape {list(found)} instead of {list(expected)}")
    if missing:
        raise BadConfig(
            f"{setting}{folder} does not hold all weights of {type(model).__name__}, the model of its config.json: "
            f"found {listed(missing, 3)}. Expected the folder of a whole model with the names of transformers "
            "(save_pretrained)"
        )
    return model


@contextlib.contextmanager
def _beating(beat: Callable[[], None]) -> Iterator[None]:
    """Follow the progress bars of transformers within the block, which advance with every tensor that it loads."""

    def follow(items: Iterable[object]) -> Iterator[object]:
        for item in items:
            yield item
            beat()

    def make(bar: Callable[..., object], arguments: Sequence[Any], options: Mapping[str, Any]) -> object:
        return bar(*map(follow, arguments[:1]), *arguments[1:], **options)

    set_hook: Callable[[object], object] | None = getattr(logging, "set_tqdm_hook", None)
    if set_hook is None:  # the first versions of transformers 5 have none; their weights are read by move()
        yield
        return
    before = set_hook(make)
    try:
        yield
    finally:
        set_hook(before)


def move(model: nn.Module, device: torch.device, beat: Callable[[], None]) -> None:
    """Move a model to a device, layer by layer.

    Weights in the number format of their files are read only now: until then, the files are mapped into main memory.

    Args:
        beat: called after each layer.
    """
    for layer in model.modules():
        if next(layer.children(), None) is None:
            layer.to(device)
            beat()
    model.to(device)
