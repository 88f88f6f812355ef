"""LoRA adapters through peft: insertion into a model, reference without the adapter, saving, loading and merging.

LoRA (Hu et al. 2021, arXiv 2106.09685, eq. 3) leaves a layer's weights ``W`` unchanged and learns the product of two
narrow matrices added to them, ``h = W x + alpha / r * B A x``; with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732) the
factor is ``alpha / sqrt(r)``. ``B`` is 0 at first, so that training starts from the base model. The layers are replaced
in place: a model with an adapter is the same transformers model, for sampling, scoring and ZeRO alike.
"""

import functools
import json
import warnings
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.errors import BadConfig, ResumeMismatch
from rlhf_core.files.fingerprints import fingerprint
from rlhf_core.files.whole import read_model, write_text
from rlhf_core.run_dir.checkpoint import ADAPTER_WEIGHTS, BASE_RECORD
from rlhf_core.schemas.checkpoint_files import BaseModelRecord
from rlhf_core.schemas.model import ALL_LINEAR, LoraSpec
from rlhf_core.training.models.gathering import weights_of_first

ADAPTER_CONFIG = "adapter_config.json"
"""File that identifies a folder with an adapter (LoRA or similar) instead of a full model."""
_TRAINED, _REFERENCE = "default", "reference"
_PREFIX = "base_model.model."
"""Prefix of the names in peft's files."""
_METADATA = {"format": "pt"}
_HEAD = "score"
"""Head of a reward model, which is trained in full."""
_BASE_FILES = ("config.json", "*.safetensors", "*.bin")


# ---------------------------------------------------------------------------------------------------------------------
# Creation


def add_adapter(model: nn.Module, lora: LoraSpec, seed: int) -> None:
    """Freeze ``model`` and add an adapter, whose initial weights depend only on ``seed``.

    The head of a reward model is trained in full as well.

    Raises:
        BadConfig: peft is missing, a target matches no linear layer, it is an embedding or the output layer, or peft
            refuses it.
    """
    config = _config(lora, target_modules(model, lora), has_head=hasattr(model, _HEAD))
    _inject(model, config, _TRAINED, seed)


def _config(lora: LoraSpec, targets: Iterable[str], *, has_head: bool) -> Any:
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=list(targets),
        modules_to_save=[_HEAD] if has_head else None,
        task_type="SEQ_CLS" if has_head else "CAUSAL_LM",
    )


def add_reference(model: nn.Module, folder: Path) -> None:
    """Add a second, frozen adapter next to the trained one: that of an earlier checkpoint, in ``folder``."""
    trained: Any = model.peft_config
    values = trained[_TRAINED].to_dict() | {"inference_mode": True, "lora_dropout": 0.0}
    _inject(model, type(trained[_TRAINED])(**values), _REFERENCE, seed=0)
    load_adapter(model, folder, _REFERENCE)


def _inject(model: nn.Module, config: Any, name: str, seed: int) -> None:
    before = {id(parameter) for parameter in model.parameters()}
    layers = linear_names(model)
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # about an existing adapter: that of the reference is the second one
        torch.manual_seed(seed)
        try:
            _peft().inject_adapter_in_model(config, model, adapter_name=name)
        except ValueError as error:  # the kernels of recurrent layers read the weights of some layers themselves
            others = [one for one in layers if f"'{one}'" not in str(error)]
            raise BadConfig(
                f"peft puts no adapter into the layers of model.lora.target_modules = {sorted(config.target_modules)}: "
                f"{' '.join(str(error).split())} Other linear layers of {type(model).__name__}: {', '.join(others)}"
            ) from error
    for parameter in model.parameters():
        if id(parameter) not in before:
            parameter.data = parameter.data.to(dtype)


def target_modules(model: nn.Module, lora: LoraSpec) -> tuple[str, ...]:
    """Last components of the names of the linear layers that get an adapter, such as ``q_proj``.

    Raises:
        BadConfig: a name in ``model.lora.target_modules`` matches no such layer; the message lists the available ones.
    """
    found = linear_names(model)
    if lora.target_modules == (ALL_LINEAR,):
        return found
    for name in lora.target_modules:
        if name not in found:
            raise BadConfig(
                f'found "{name}" in model.lora.target_modules, expected "{ALL_LINEAR}" or names of linear layers of '
                f"{type(model).__name__}: {', '.join(found)}. Embeddings and output layers get no adapter, since many "
                f"models tie them to each other"
            )
    return lora.target_modules


def linear_names(model: nn.Module) -> tuple[str, ...]:
    """Last components of the names of a model's linear layers, without its output layer or head.

    Routers that choose experts themselves, as that of Phi-3.5-MoE, return more than the result of a linear layer.
    """
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    heads = (output, getattr(model, _HEAD, None))
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and not type(module).__name__.endswith("Router")
        and not any(module is head for head in heads)
    }
    return tuple(sorted(names))


def has_adapter(model: nn.Module) -> bool:
    """True if an adapter is trained in ``model``."""
    return hasattr(model, "peft_config")


# ---------------------------------------------------------------------------------------------------------------------
# The reference


class AdapterReference:
    """The policy as it was at the start of its loop, without a second model: with its adapter off, or with an earlier
    one.

    Called like the policy. The layers then perform the same operations as without the trained adapter, so the results
    equal those of a second model bit for bit.
    """

    def __init__(self, policy: nn.Module, model: PreTrainedModel, earlier: Path | None) -> None:
        """Prepare the reference of ``policy``, before an engine takes the policy over.

        Args:
            model: the model with the adapter, which ``policy`` wraps.
            earlier: folder of the adapter that the loop began with; None if it began with the base model.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        if earlier is not None:
            add_reference(model, earlier)
        self._policy = policy
        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self._has_adapter = earlier is not None
        self._switch_back()  # peft activates the most recently added adapter

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the reference, without gradient."""
        for layer in self._layers:
            if self._has_adapter:
                layer.set_adapter(_REFERENCE, inference_mode=True)
            else:
                layer.enable_adapters(False)
        try:
            return self._policy(*args, **kwargs)
        finally:
            self._switch_back()

    def _switch_back(self) -> None:
        for layer in self._layers:
            layer.set_adapter(_TRAINED)
            layer.enable_adapters(True)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def save_adapter(model: PreTrainedModel, folder: Path, base: Path, is_first: bool, beat: Callable[[], None]) -> None:
    """Write the trained adapter in peft's format, together with the fingerprints of its base model.

    Collective if the model is split: the trained weights are gathered, those of the base model are not. Rank 0 writes.

    Args:
        base: folder of the base model.

    Raises:
        OSError, SafetensorError: rank 0 could not write.
    """
    weights = weights_of_first(model, is_first, beat, trained_only=True)
    if not is_first:
        return
    named = _peft().get_peft_model_state_dict(
        model, state_dict=weights, adapter_name=_TRAINED, save_embedding_layers=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{_PREFIX}{name}": tensor for name, tensor in named.items()},
        folder / ADAPTER_WEIGHTS,
        metadata=_METADATA,
    )
    configs: Any = model.peft_config
    values = configs[_TRAINED].to_dict() | {"inference_mode": True, "base_model_name_or_path": str(base.resolve())}
    type(configs[_TRAINED])(**values).save_pretrained(str(folder))
    record = BaseModelRecord(files=base_files(base, beat))
    write_text(folder / BASE_RECORD, record.model_dump_json(indent=2) + "\n")


def write_adapter(folder: Path, lora: LoraSpec, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the tensors of a language model's adapter in peft's format, without its base model.

    Args:
        folder: an empty folder.
        tensors: tensors by their names in the trained model.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    named = {
        f"{_PREFIX}{name.replace(f'.{_TRAINED}.', '.')}": tensor.to("cpu", copy=True).contiguous()
        for name, tensor in tensors
    }
    targets = {name.partition(".lora_")[0].rpartition(".")[2] for name in named}
    save_file(named, folder / ADAPTER_WEIGHTS, metadata=_METADATA)
    _config(lora, sorted(targets), has_head=False).save_pretrained(str(folder))


def load_adapter(model: nn.Module, folder: Path, name: str = _TRAINED) -> None:
    """Load the weights of an adapter written by :func:`save_adapter` into the adapter of ``model``.

    Raises:
        ResumeMismatch: they belong to other layers.
    """
    weights = {key.removeprefix(_PREFIX): tensor for key, tensor in load_file(folder / ADAPTER_WEIGHTS).items()}
    if hasattr(model, _HEAD):
        # A language model's adapter has no reward head, so a reward model keeps its own.
        weights = {**_head_weights(model, name), **weights}
    result: Any = _peft().set_peft_model_state_dict(model, weights, adapter_name=name)
    missing = [key for key in result.missing_keys if f".lora_A.{name}." in key or f".lora_B.{name}." in key]
    if missing or result.unexpected_keys:
        other = [*missing, *result.unexpected_keys]
        raise ResumeMismatch(
            f"the adapter in {folder} is of other layers than model.lora.target_modules asks for, by {len(other)} "
            f"weights: {', '.join(sorted(other)[:3])}"
        )


def _head_weights(model: nn.Module, name: str) -> dict[str, Tensor]:
    head: Any = getattr(model, _HEAD)
    return {f"{_HEAD}.{key}": tensor for key, tensor in head.modules_to_save[name].state_dict().items()}


def is_adapter(folder: Path) -> bool:
    """True if a folder holds an adapter instead of a full model."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """Folder of the base model recorded in an adapter."""
    return Path(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path") or "")


def merged(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge the adapter of ``folder`` into the weights of a base model: ``W + alpha / r * B A``.

    Raises:
        BadConfig: peft is missing, or the adapter lacks weights for layers that its settings name.
    """
    peft = _peft()
    with warnings.catch_warnings():
        # Without its weights an adapter changes nothing, and peft only warns.
        warnings.filterwarnings("error", ".*missing adapter keys", UserWarning)
        try:
            model: PreTrainedModel = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
        except UserWarning as error:
            raise BadConfig(
                f"the weights of the adapter in {folder} have other names than the layers of {type(base).__name__} "
                f"that its {ADAPTER_CONFIG} names, so they would change nothing: {' '.join(str(error).split())[:300]}"
            ) from error
    return model


# ---------------------------------------------------------------------------------------------------------------------
# The base model


def base_files(base: Path, beat: Callable[[], None]) -> dict[str, str]:
    """Fingerprints of the configuration and the weights of a base model, by name; each file is read once per process.

    Of large files only samples are read, in a fraction of the time of loading them: training changes all weights.

    Raises:
        OSError: a file cannot be read.
    """
    found = {}
    for path in sorted(path for pattern in _BASE_FILES for path in base.glob(pattern) if path.is_file()):
        facts = path.stat()
        found[path.name] = _fingerprint(path.resolve(), facts.st_size, facts.st_mtime_ns)
        beat()
    return found


def base_fingerprint(base: Path, beat: Callable[[], None] = lambda: None) -> str:
    """Fingerprint of all these files."""
    found = "".join(f"{name} {one}\n" for name, one in base_files(base, beat).items())
    return blake2b(found.encode(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=1024)
def _fingerprint(path: Path, size: int, modified_ns: int) -> str:
    """Fingerprint of a file, cached while its size and modification time stay the same."""
    return fingerprint(path)


def require_base(folder: Path, base: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Refuse an adapter whose base model is not the one it was trained on: their sum would be meaningless.

    An adapter without such a record, written by another program, is accepted.

    Args:
        beat: called after every file of the base model.

    Raises:
        ResumeMismatch: a file of the base model differs.
    """
    record = read_model(folder / BASE_RECORD, BaseModelRecord)
    if record is None:
        return
    present = base_files(base, beat)
    differing = sorted(
        name for name in record.files.keys() | present.keys() if record.files.get(name) != present.get(name)
    )
    if differing:
        raise ResumeMismatch(
            f"the adapter in {folder} was trained on another base model than {base} holds now: {', '.join(differing)} "
            f"differ by their fingerprints. Bring the base model back, or start a new run"
        )


def _peft() -> Any:
    """Import peft.

    Raises:
        BadConfig: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise BadConfig(f"found a LoRA adapter, expected peft to handle it ({error}): pip install peft") from error
    return peft
