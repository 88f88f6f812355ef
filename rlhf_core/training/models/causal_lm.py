"""Language models: building from a configuration, loading from a folder, and a wrapper for training."""

import contextlib
import difflib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME

from rlhf_core.errors import BadConfig
from rlhf_core.files.whole import remove_tree
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.model import BUILT_TOKENIZERS
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.trainers import LOGIT_CHUNK_ELEMENTS
from rlhf_core.training.data.tokenizer_cores import VOCAB_MULTIPLE
from rlhf_core.training.data.tokenizers import build_tokenizer, load_tokenizer
from rlhf_core.training.distributed import SequenceGroup
from rlhf_core.training.models.adapters import base_of, is_adapter, merged
from rlhf_core.training.models.gathering import most_on_any_rank, whole_shape
from rlhf_core.training.models.lean_layers import use_lean_layers
from rlhf_core.training.models.loaded_weights import load_whole
from rlhf_core.training.models.packing import can_pack, hidden_of_targets, values_of_targets
from rlhf_core.training.models.token_logprobs import token_logprobs
from rlhf_core.training.types import Row

# ---------------------------------------------------------------------------------------------------------------------
# Building and loading


def prepare_initial_model(spec: RunSpec, run_dir: RunDir, rows: Iterable[Row]) -> Path:
    """Return the folder of the initial model, building it if needed. Call on rank 0 only, before the others load it.

    A model given by ``model.path`` stays where it is. Otherwise a tokenizer and a model with random weights are built
    in ``run_dir.initial_model``, which appears atomically by a rename; a restart reuses it.

    Args:
        rows: training rows; a ``bpe`` tokenizer is trained on their prompts and targets.

    Raises:
        BadConfig: the configuration describes no model, or a folder is missing.
    """
    if spec.model.path:
        return _existing_folder(Path(spec.model.path), "model.path")
    if run_dir.initial_model.is_dir():
        return run_dir.initial_model
    tokenizer: PreTrainedTokenizerBase
    if spec.model.tokenizer in BUILT_TOKENIZERS:
        texts = (text for row in rows for text in (row.prompt, row.target))
        tokenizer = build_tokenizer(spec.model.tokenizer, texts, spec.model.tokenizer_vocab_size)
    else:
        tokenizer = load_tokenizer(_existing_folder(Path(spec.model.tokenizer), "model.tokenizer"))
    model = build_causal_lm(spec.model.config, tokenizer, spec.seed)
    unfinished = run_dir.root / f".initial_model.{secrets.token_hex(4)}.tmp"
    try:
        tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.rename(run_dir.initial_model)
    finally:
        remove_tree(unfinished)
    return run_dir.initial_model


def tokenizer_folder(spec: RunSpec, model_path: Path) -> Path:
    """Folder of the tokenizer for the model in ``model_path``: the model's own, unless the spec names another.

    Raises:
        BadConfig: the folder is missing.
    """
    if not spec.model.path or not spec.model.tokenizer:
        return model_path
    return _existing_folder(Path(spec.model.tokenizer), "model.tokenizer")


def build_causal_lm(config: Mapping[str, JsonValue], tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Build a causal language model with random weights that depend only on ``seed``.

    The vocabulary is the tokenizer's, rounded up to a multiple of 64; padding and end token are the tokenizer's too.

    Args:
        config: ``model_type`` and arguments of that type's transformers configuration.

    Raises:
        BadConfig: unknown model type or argument, or values that do not describe a valid model.
    """
    arguments = dict(config)
    model_type = str(arguments.pop("model_type"))
    _check_config(model_type, arguments)
    arguments.setdefault("vocab_size", -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
    arguments |= {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = _without_dropout(AutoConfig.for_model(model_type, **arguments))
            model: PreTrainedModel = AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    except Exception as error:  # transformers raises many types here, all due to a bad value
        raise BadConfig(
            f"model.config makes no {model_type} model: {type(error).__name__}: {_in_one_line(error)}"
        ) from error
    vocab_size = int(model.config.vocab_size)
    if vocab_size < len(tokenizer):
        raise BadConfig(
            f"found model.config.vocab_size = {vocab_size}, but the tokenizer has {len(tokenizer)} tokens; "
            f"leave vocab_size out to take the tokenizer's"
        )
    return model


def load_causal_lm(
    path: Path, dtype: str, base: Path | None = None, beat: Callable[[], None] = lambda: None
) -> PreTrainedModel:
    """Load a causal language model from a folder, in training's number format and with all dropout off.

    Dropout is off because the sampled and the trained distribution have to be the same. An adapter is merged into its
    base model.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        base: folder of an adapter's base model, if it is not the one recorded in the adapter.
        beat: called after each tensor.

    Raises:
        BadConfig: the folder does not exist, or holds no model or not all of its weights.
    """
    folder = _existing_folder(path, "model.path")
    if is_adapter(folder):
        return merged(load_causal_lm(base or base_of(folder), dtype, beat=beat), folder)
    try:
        model = load_whole(AutoModelForCausalLM, folder, dropout_free_config(folder), dtype, beat)
    except (OSError, ValueError) as error:
        raise BadConfig(
            f"{folder} holds no causal language model that transformers can load: {_in_one_line(error)}"
        ) from error
    _make_savable(model.generation_config, folder)
    use_lean_layers(model)
    return model


def _make_savable(generation: GenerationConfig | None, folder: Path) -> None:
    """Make transformers save the generation settings that it has loaded. It refuses a temperature without
    ``do_sample``, which released models contain because they are meant to be sampled.

    Raises:
        BadConfig: it refuses them for another reason, which would otherwise surface only at the first checkpoint.
    """
    if generation is None:
        return
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
        try:
            generation.validate(strict=True)
        except ValueError as error:
            raise BadConfig(
                f"{folder / GENERATION_CONFIG_NAME} contains settings that transformers reads but does not write into "
                f"checkpoints; correct them: {_in_one_line(error)}"
            ) from error


def random_causal_lm(folder: Path, dtype: str) -> PreTrainedModel:
    """Build the model that a folder describes, with random weights: for an engine that receives its weights later.

    Raises:
        BadConfig: the folder has no configuration of a causal language model.
    """
    try:
        config = dropout_free_config(folder)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        if (folder / GENERATION_CONFIG_NAME).is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadConfig(
            f"{folder} describes no causal language model that transformers knows: {_in_one_line(error)}"
        ) from error
    use_lean_layers(model)
    model.requires_grad_(False)
    model.eval()
    return model


def _existing_folder(path: Path, key: str) -> Path:
    if not path.is_dir():
        raise BadConfig(f'found {key} = "{path}", which is no folder here; give the folder of a Hugging Face model')
    return path


def _check_config(model_type: str, arguments: Mapping[str, JsonValue]) -> None:
    """Reject unknown arguments, which transformers silently ignores: a typo would train a different model."""
    if model_type not in CONFIG_MAPPING:
        raise BadConfig(
            f'model.config.model_type = "{model_type}" is unknown to this transformers'
            f"{_nearest(model_type, CONFIG_MAPPING.keys())}"
        )
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | {"rope_theta"}
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise BadConfig(
            f"model.config.{unknown[0]} is no argument of {config_class.__name__}{_nearest(unknown[0], known)}"
        )


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f'; did you mean "{found[0]}"?' if found else ""


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def dropout_free_config(folder: Path) -> PreTrainedConfig:
    """Load the configuration of a model, with all dropout off.

    Raises:
        OSError, ValueError: the folder has none that transformers supports.
    """
    return _without_dropout(AutoConfig.from_pretrained(str(folder), local_files_only=True))


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):  # that of the language model, in a model that also reads images
            _without_dropout(part)
    return config


# ---------------------------------------------------------------------------------------------------------------------
# Training


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout within the block, so that the model draws no random numbers; then restore the mode of each
    module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def use_training_mode(model: nn.Module) -> None:
    """Turn on training mode, which gradient checkpointing and the dropout of adapters need.

    Not in routers that then add noise to the choice of experts, such as those of Phi-3.5-MoE and Mixtral
    (``router_jitter_noise``): the sampled and the trained distribution have to be the same.
    """
    model.train()
    for module in model.modules():
        if any("jitter" in name for name in vars(module)):
            module.eval()


class PolicyModel(nn.Module):
    """A causal language model that returns log-probabilities instead of logits.

    The logits over the whole vocabulary exist for one chunk of tokens at a time, forward and backward: for 32 thousand
    tokens and a vocabulary of 152 thousand they would take 20 GB. Of right-padded sequences, only the tokens needed for
    a prediction go through the layers, and common prefixes do so once (``packing.py``).
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        chunk_elements: int = LOGIT_CHUNK_ELEMENTS,
        *,
        tried: bool = True,
        sequence: SequenceGroup | None = None,
    ) -> None:
        """Wrap ``causal_lm``.

        Args:
            chunk_elements: the largest number of logits that may exist at once.
            tried: try passes at once; otherwise :meth:`try_passes` has to be called before the first one, when the
                weights are where they are used.
            sequence: ranks that share the tokens of each pass; all of them make the same passes.

        Raises:
            BadConfig: as :meth:`try_passes`.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_elements = chunk_elements
        self.sequence = sequence
        self.packs = False
        """True if no padding goes through the layers; otherwise micro-batches of similar lengths are worthwhile."""
        if tried:
            self.try_passes()

    def try_passes(self) -> None:
        """Find out in a few passes over a few tokens whether sequences can be packed, and check the head. Collective if
        the model is split, or ranks share its tokens.

        Raises:
            BadConfig: the model does not simply apply its head to its last hidden state, or its tokens cannot be
                shared.
        """
        with in_evaluation_mode(self.causal_lm):  # the dropout of an adapter differs from pass to pass
            # First: if a pass fails midway, those of the head let go of the weights that it has gathered.
            self.packs = can_pack(self.causal_lm, self.sequence)
            self._check_head()

    def forward(
        self,
        input_ids: Tensor,
        target_mask: Tensor | None = None,
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of each token given the preceding ones.

        Args:
            input_ids: ``[B, T]`` int64, padded on the right.
            target_mask: ``[B, T-1]`` bool: predictions to compute, all if omitted. Only their logits are computed.
            temperature: divisor of the logits.
            entropy_gradient: gradients flow through the entropy too.

        Returns:
            Two ``[B, T-1]`` tensors in float32 (float64 for a float64 model), zero where ``target_mask`` is false:
            position ``t`` holds the log-probability of token ``t+1``, and the entropy of its distribution in nats.
            Gradients flow through the log-probabilities only, unless ``entropy_gradient`` is set.
        """
        labels = input_ids[:, 1:]
        if target_mask is None:
            target_mask = torch.ones_like(labels, dtype=torch.bool)
        hidden, own = hidden_of_targets(
            self.causal_lm.base_model, input_ids, target_mask, packed=self.packs, group=self.sequence
        )
        scores = torch.stack(self._score(hidden, labels[own], temperature, entropy_gradient))
        picked, entropy = values_of_targets(scores, own, self.sequence)
        return picked, entropy if entropy_gradient else entropy.detach()

    @property
    def pretrained(self) -> PreTrainedModel:
        """The underlying model, which is saved."""
        return self.causal_lm

    def _score(
        self, hidden: Tensor, labels: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """``hidden [N, H]``, ``labels [N]`` -> log-probability and entropy, ``[N]`` each, chunk by chunk."""
        head = self.causal_lm.get_output_embeddings()
        chunk = max(1, self.chunk_elements // whole_shape(head.weight)[0])
        num_chunks = most_on_any_rank(-(-hidden.shape[0] // chunk), head, hidden.device)
        if num_chunks <= 1:
            return _score_chunk(hidden, labels, head, temperature, entropy_gradient)
        bounds = [chunk * number for number in range(1, num_chunks)]
        parts = [
            checkpoint(_score_chunk, hidden_part, labels_part, head, temperature, entropy_gradient, use_reentrant=False)
            for hidden_part, labels_part in zip(hidden.tensor_split(bounds), labels.tensor_split(bounds), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    @torch.no_grad()
    def _check_head(self) -> None:
        """Reject models that scale or cap their logits after the head: training and sampling must use the same
        logits."""
        if self.causal_lm.base_model is self.causal_lm:
            raise BadConfig(
                f"{type(self.causal_lm).__name__} does not say which of its parts comes before its output layer "
                "(base_model_prefix); this trainer cannot train it"
            )
        device = self.causal_lm.device
        probe = torch.arange(1, 5, device=device)[None]
        head = self.causal_lm.get_output_embeddings()
        ours = head(self.causal_lm.base_model(input_ids=probe, use_cache=False).last_hidden_state)
        # A cap shows only in large logits, which new weights do not have yet.
        for factor in (1.0, 1e4):
            with _multiplied(head, factor):
                own = self.causal_lm(input_ids=probe, use_cache=False).logits / factor
            if not torch.allclose(own, ours, rtol=1e-2, atol=1e-3):
                raise BadConfig(
                    f"{type(self.causal_lm).__name__} does more to its logits than apply its output layer "
                    f"(largest difference {float((own - ours).abs().max()):.3g}); this trainer cannot train it"
                )


@contextlib.contextmanager
def _multiplied(layer: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the results of a layer within the block."""
    handle = layer.register_forward_hook(lambda module, inputs, output: output * factor)
    try:
        yield
    finally:
        handle.remove()


def _score_chunk(
    hidden: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor], temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1 else logits.div_(temperature)
    return token_logprobs(logits, labels, entropy_gradient=entropy_gradient)
