"""Weights as the files of a checkpoint name and cut them: the layout that inference engines other than ours load.

transformers 5 holds some models differently from their files: the experts of a mixture as one tensor per layer, for
example, or the output layer of GPT-NeoX under another name. ``save_pretrained`` reverts this, and so must a weight
sync.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

_LAYER = re.compile(r".*?\.\d+\.")


class CheckpointLayout:
    """Conversion of the weights of one version, which may arrive in several parts.

    A tensor of a file may consist of several tensors of its layer, so each layer is converted as a whole, when the
    first tensor after it arrives.
    """

    def __init__(self, folder: Path) -> None:
        """Start with the first tensor of a version.

        Args:
            folder: Hugging Face folder with the configuration of the model.

        Raises:
            OSError, ValueError: transformers knows no causal language model of this configuration.
        """
        self._model = _without_weights(folder)
        self._layer = ""
        self._held: dict[str, Tensor] = {}

    def convert(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the layers that are complete.

        Args:
            tensors: weights named as in the model, in its order. They are referred to until their layer is complete.
        """
        for name, tensor in tensors:
            found = _LAYER.match(name)
            layer = found[0] if found else ""
            if layer != self._layer:
                yield from self.rest()
                self._layer = layer
            self._held[name] = tensor

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is left after the last tensor of a version; then the next version can begin."""
        held, self._held = self._held, {}
        yield from revert_weight_conversion(self._model, held).items()

    def whole(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert all weights of a version that arrives in one part."""
        self.reset()
        yield from self.convert(tensors)
        yield from self.rest()

    def reset(self) -> None:
        """Drop what is left of a version that did not arrive whole."""
        self._held = {}


def _without_weights(folder: Path) -> PreTrainedModel:
    """The structure of a model, which takes no memory."""
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
