"""Snapshot of a rank's part of a checkpoint: its final files in main memory, made with one copy of each tensor."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_NAME

from rlhf_core.training.checkpoints.host_buffers import HostBuffers
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.gathering import (
    WEIGHTS_METADATA,
    gathered_weights,
    is_split,
    keeps_names,
    weight_files,
    weight_shapes,
    write_model_texts,
)
from rlhf_core.training.models.tensor_files import TensorImage, TensorLayout, flattened, lay_out, shapes_of

PADDING = "padding"
"""Name of a tensor in the file of a rank's state that fills it up; nothing reads it."""


def can_be_snapshot(model: nn.Module) -> bool:
    """True if a model's files hold its tensors unchanged, that is, if transformers does not convert them on saving."""
    return isinstance(model, PreTrainedModel) and keeps_names(model)


class Snapshot:
    """Files of one rank: first laid out, then filled."""

    def __init__(
        self,
        ranks: Ranks,
        state_file: str,
        state: Mapping[str, Any],
        weights: Mapping[str, nn.Module],
        previous_sizes: Mapping[str, int],
    ) -> None:
        """Lay out the files.

        Args:
            state_file: path of the file with the state of this rank in the checkpoint.
            state: its content.
            weights: models by their folder in the checkpoint; rank 0 holds their files.
            previous_sizes: sizes of the files of the previous snapshot, whose memory is reused.
        """
        self._ranks = ranks
        self._weights = weights
        self._state_file = state_file
        self._state, metadata = flattened(state)
        if "in_flight" in state:
            self._state[PADDING] = self._padding(metadata, previous_sizes.get(state_file, 0))
        self._layouts = {state_file: lay_out(shapes_of(self._state), metadata)}
        if ranks.is_first:
            for folder, model in weights.items():
                self._layouts |= _weight_layouts(folder, model)

    def _padding(self, metadata: Mapping[str, str], previous_size: int) -> torch.Tensor:
        """Tensor that gives the file the size of the previous one: the completions are of another size at every save.
        If they no longer fit, it leaves room for half as many again."""
        empty = torch.zeros(0, dtype=torch.uint8)
        size = lay_out(shapes_of({**self._state, PADDING: empty}), metadata).num_bytes
        in_flight = sum(tensor.nbytes for name, tensor in self._state.items() if name.startswith("/in_flight/"))
        return empty.new_zeros(previous_size - size if previous_size >= size else in_flight // 2)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes."""
        return {name: layout.num_bytes for name, layout in self._layouts.items()}

    def fill(self, buffers: HostBuffers, beat: Callable[[], None]) -> None:
        """Copy all tensors; collective if a model is split over the ranks.

        Args:
            buffers: with memory for :attr:`sizes`.
        """
        images = {name: TensorImage(layout, buffers[name]) for name, layout in self._layouts.items()}
        for name, tensor in self._state.items():
            images[self._state_file].fill(name, tensor)
        beat()
        for folder, model in self._weights.items():
            if is_split(model):
                with self._ranks.collective():
                    self._fill_weights(folder, model, images)
            elif self._ranks.is_first:
                self._fill_weights(folder, model, images)
            beat()
        self._finish_copies()

    def _fill_weights(self, folder: str, model: nn.Module, images: Mapping[str, TensorImage]) -> None:
        files = _files(folder, model)
        places = {name: images[path] for path, names in files.items() for name in names if path in images}
        for bucket in gathered_weights(model):
            if not self._ranks.is_first:
                continue  # this rank only takes part in the gathering for rank 0
            for name, tensor in bucket.items():
                places[name].fill(name, tensor)
            self._finish_copies()  # the bucket is released when the next one is gathered

    def _finish_copies(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)


def _files(folder: str, model: nn.Module) -> dict[str, list[str]]:
    """Names of the weights by their file's path in the checkpoint."""
    if isinstance(model, PreTrainedModel):
        return {f"{folder}/{file}": names for file, names in weight_files(model).items()}
    return {f"{folder}/{SAFE_WEIGHTS_NAME}": list(weight_shapes(model))}


def _weight_layouts(folder: str, model: nn.Module) -> dict[str, TensorLayout]:
    shapes = weight_shapes(model)
    files = _files(folder, model)
    return {path: lay_out({name: shapes[name] for name in names}, WEIGHTS_METADATA) for path, names in files.items()}


def model_texts(model: PreTrainedModel) -> dict[str, bytes]:
    """Small files that accompany a model's weights, by path in its folder."""
    return _written(lambda folder: write_model_texts(model, folder, weight_shapes(model)))


def tokenizer_texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Files of a tokenizer, by path in the folder."""
    return _written(tokenizer.save_pretrained)


def _written(write: Callable[[Path], object]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="rlhf-") as temporary:
        folder = Path(temporary)
        write(folder)
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
