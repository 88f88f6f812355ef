"""Sampling in the trainer's own process, with transformers' KV cache.

It has its own decode loop because transformers' ``generate`` draws all sequences from one random stream, so that a
sequence would depend on its position in the batch. Here each prompt is prefilled once, its cache repeated over its
samples, and finished sequences leave the batch as soon as that saves work.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from rlhf_core.errors import BadConfig
from rlhf_core.training.models.causal_lm import in_evaluation_mode
from rlhf_core.training.models.gathering import whole_model
from rlhf_core.training.rollouts.base import Sampling, completion_of, draw_tokens, require_prompts, require_version
from rlhf_core.training.rollouts.completion_end import StopStrings, stop_strings
from rlhf_core.training.rollouts.weight_probe import require_finite
from rlhf_core.training.types import Completion

_KEEP_SHARE = 0.75
"""Finished sequences are removed from the batch once at most this share is still active: copying the cache takes time
too."""


@dataclass(frozen=True)
class _Slot:
    """One completion to generate, and its position in the result."""

    prompt: int
    sample: int
    seed: int


class TransformersEngine:
    """An engine that samples with the trainer's own model: nothing is copied, so no version can be stale."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._model: PreTrainedModel | None = None
        self.version: int | None = None
        self.continuous = None

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> None:
        """Sample with ``model`` itself from now on."""
        self._model, self.version = model, version

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample completions; see :class:`rlhf_core.training.rollouts.base.RolloutEngine`."""
        require_version(self.version, version)
        assert self._model is not None
        groups = generate(self._model, self._tokenizer, prompts, seeds, sampling, beat)
        return [[replace(completion, weight_version=version) for completion in group] for group in groups]

    def take_counts(self) -> Mapping[str, float]:
        """No counts: an in-process engine cannot fail separately."""
        return {}

    def sleep(self) -> None:
        """Do nothing: the cache is freed after every batch."""

    def close(self) -> None:
        """Release the model."""
        self._model, self.version = None, None


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    beat: Callable[[], None],
) -> list[list[Completion]]:
    """Sample ``len(seeds[i])`` completions of ``prompts[i]``.

    If ZeRO 3 has split the model, every rank holds the full weights meanwhile. The call is then collective at its
    beginning and end, so every rank must make the same number of calls, even without prompts.

    Raises:
        BadConfig: the model keeps no cache of keys and values, as those with recurrent layers alone.
        ValueError: a prompt is empty, or the number of lists of seeds is not the number of prompts.
        NonFiniteLoss: a log-probability of a sampled token is not finite.
    """
    require_prompts(prompts, seeds)
    end_ids = end_token_ids(model, tokenizer).union(sampling.end_ids)
    stop = stop_strings(tokenizer, sampling.stop) if sampling.stop else None
    made: dict[tuple[int, int], Completion] = {}
    # In training mode, gradient checkpointing turns the KV cache off.
    with in_evaluation_mode(model), whole_model(model):
        for slots in _batches(prompts, seeds, sampling.batch_size):
            decoded = _decode_batch(model, prompts, slots, end_ids, sampling, stop, beat)
            for slot, completion in zip(slots, _completions(tokenizer, *decoded, end_ids, stop), strict=True):
                made[slot.prompt, slot.sample] = completion
    # Not before all ranks have left whole_model, which is collective.
    require_finite(logprob for completion in made.values() for logprob in completion.logprobs)
    return [[made[i, j] for j in range(len(prompt_seeds))] for i, prompt_seeds in enumerate(seeds)]


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end a completion: the tokenizer's and those of the model's generation settings."""
    return frozenset((tokenizer.eos_token_id, *_configured_ends(model)))


def also_end_with(model: PreTrainedModel, end_ids: Iterable[int]) -> None:
    """Add tokens that end a completion to the generation settings, with which the model is saved. A reward model has
    none."""
    generation = getattr(model, "generation_config", None)
    known = _configured_ends(model)
    added = [token for token in end_ids if token not in known]
    if added and generation is not None:
        generation.eos_token_id = [*known, *added]


def _configured_ends(model: PreTrainedModel) -> list[int]:
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if configured is None:
        return []
    return configured if isinstance(configured, list) else [configured]


def _batches(
    prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], batch_size: int
) -> Iterator[list[_Slot]]:
    """Group completions into batches; prompts of similar length go together, and samples of a prompt stay adjacent."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    slots = [
        _Slot(index, sample, seed)
        for index, prompt_seeds in ((index, seeds[index]) for index in order)
        for sample, seed in enumerate(prompt_seeds)
    ]
    for start in range(0, len(slots), batch_size):
        yield slots[start : start + batch_size]


def _decode_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    slots: Sequence[_Slot],
    end_ids: frozenset[int],
    sampling: Sampling,
    stop: StopStrings | None,
    beat: Callable[[], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and log-probabilities of ``B`` completions, ``[B, max_new_tokens]`` each, and the lengths ``[B]`` of those
    that end with a stop string, otherwise 0; values after an end token or stop string are meaningless."""
    device, max_new_tokens = model.device, sampling.max_new_tokens
    logits, cache, mask = _prefill(model, prompts, slots, device)
    ends = torch.tensor(sorted(end_ids), device=device)
    seeds = torch.tensor([slot.seed for slot in slots], dtype=torch.int64, device=device)
    tokens = torch.zeros(len(slots), max_new_tokens, dtype=torch.int64, device=device)
    logprobs = torch.zeros(len(slots), max_new_tokens, device=device)
    stopped = torch.zeros(len(slots), dtype=torch.int64, device=device)
    rows = torch.arange(len(slots), device=device)  # completion in each row of the batch
    going = torch.ones(len(slots), dtype=torch.bool, device=device)
    for position in range(max_new_tokens):
        drawn, drawn_logprobs = draw_tokens(logits, seeds, position, sampling)
        tokens[rows, position] = drawn
        logprobs[rows, position] = drawn_logprobs
        beat()
        going = going & ~torch.isin(drawn, ends)
        if stop is not None:
            active = going.nonzero().squeeze(-1)
            last = tokens[rows[active], max(0, position + 1 - stop.window) : position + 1]
            ended = active[torch.tensor(stop.are_completed(last.tolist()), dtype=torch.bool, device=device)]
            stopped[rows[ended]] = position + 1
            going[ended] = False
        num_going = int(going.sum())
        if num_going == 0 or position + 1 == max_new_tokens:
            break
        if num_going <= _KEEP_SHARE * len(rows):
            kept = going.nonzero().squeeze(-1)
            cache.reorder_cache(kept)  # selects rows of recurrent states too, unlike batch_select_indices
            rows, seeds, drawn, going = rows[kept], seeds[kept], drawn[kept], going[kept]
            mask = None if mask is None else mask[kept]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = _forward(model, drawn[:, None], mask, cache)[0]
    return tokens, logprobs, stopped


def _prefill(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], slots: Sequence[_Slot], device: torch.device
) -> tuple[Tensor, Cache, Tensor | None]:
    """Prefill each prompt once and repeat the result over its samples.

    Returns:
        Logits of the first token ``[B, V]``, the cache over ``B`` sequences, and the attention mask ``[B, T]`` of the
        left-padded prompts (None when all have the same length).
    """
    unique = list(dict.fromkeys(slot.prompt for slot in slots))
    row_of = {prompt: row for row, prompt in enumerate(unique)}
    width = max(len(prompts[index]) for index in unique)
    padded = [[0] * (width - len(prompts[index])) + list(prompts[index]) for index in unique]
    input_ids = torch.tensor(padded, dtype=torch.int64, device=device)
    mask = None
    if any(len(prompts[index]) < width for index in unique):
        first = torch.tensor([width - len(prompts[index]) for index in unique], device=device)
        mask = (torch.arange(width, device=device) >= first[:, None]).long()
    logits, cache = _forward(model, input_ids, mask, None)
    repeated = torch.tensor([row_of[slot.prompt] for slot in slots], device=device)
    cache.reorder_cache(repeated)
    return logits[repeated], cache, None if mask is None else mask[repeated]


def _forward(
    model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, cache: Cache | None
) -> tuple[Tensor, Cache]:
    """Logits of the last position ``[B, V]`` and the grown cache. ``mask`` covers the cached tokens too.

    Raises:
        BadConfig: the model keeps its state in another form.
    """
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    answer = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    grown = getattr(answer, "past_key_values", None)
    if grown is None:
        raise BadConfig(
            f'found rollout.engine = "transformers", but {type(model).__name__} keeps no cache of keys and values, '
            'which this engine repeats over the samples of a prompt; set rollout.engine = "vllm"'
        )
    return answer.logits[:, -1], grown


def _completions(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Tensor,
    logprobs: Tensor,
    stopped: Tensor,
    end_ids: frozenset[int],
    stop: StopStrings | None,
) -> list[Completion]:
    """Cut each row after its first end token or stop string and decode it."""
    ended = torch.isin(tokens, torch.tensor(sorted(end_ids), device=tokens.device))
    finished = ended.any(-1)
    cut = torch.where(finished, ended.int().argmax(-1) + 1, tokens.shape[1])
    lengths = torch.where(stopped > 0, stopped, cut).tolist()
    kept = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
    kept_logprobs = [row[:length] for row, length in zip(logprobs.tolist(), lengths, strict=True)]
    return [
        stop.completion(row, row_logprobs)
        if stop is not None and has_stopped
        else completion_of(tokenizer, row, done, row_logprobs)
        for row, done, row_logprobs, has_stopped in zip(
            kept, finished.tolist(), kept_logprobs, (stopped > 0).tolist(), strict=True
        )
    ]
