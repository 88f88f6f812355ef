"""Reward models that score completions, loaded next to the policy in every rank's process.

A reward model has a vocabulary of its own. Its tokenizer re-tokenizes the texts in the form that the model was trained
on: prompt, completion and, if the policy ended it, the end token, or their rendering by its chat template. The score is
taken at the position where its own forward pass takes it, the last non-padding token.

No rank waits for another while scoring: ranks may have completions of different lengths, or none.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import BadConfig, ResumeMismatch, UnrenderedChat
from rlhf_core.files.fingerprints import fingerprint
from rlhf_core.schemas.scoring_models import ScoringModelSpec, ScoringModelState
from rlhf_core.training.data.chat import rendered, template_arguments
from rlhf_core.training.data.loading import completion_tokens, continued_tokens, prompt_tokens
from rlhf_core.training.data.tokenizers import load_tokenizer
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.causal_lm import dropout_free_config
from rlhf_core.training.models.loaded_weights import load_whole, move
from rlhf_core.training.models.reward_model import RewardModel, is_reward_model
from rlhf_core.training.types import Completion, Conversation, Row

Sampled = tuple[Row, Completion]
"""A completion to be scored, and its row."""

_CUT = "<|the completion was truncated here|>"
"""Mark of the end of a truncated completion while a chat template renders it; never part of a scored text."""


@dataclass(frozen=True)
class ModelScores:
    """Scores of a rank's completions by one reward model."""

    raw: list[float]
    """Raw scores of the model; NaN or infinite if it overflows, NaN for a completion that it cannot read."""
    num_cut: int
    """Number of sequences truncated at the beginning because they exceed the model's maximum length."""
    counted: list[float] = field(default_factory=list)
    """Scores as they enter the sum, on the configured scale."""
    unread: Mapping[int, str] = field(default_factory=dict)
    """Reasons why completions cannot be read, by index: its chat template does not render their conversations."""


class _Input(NamedTuple):
    """Tokens of one sequence, as a model expects them."""

    ids: list[int]
    segments: list[int]
    """Segment of each token (``token_type_ids``) for encoders that distinguish the texts of a pair; empty for
    others."""
    is_cut: bool
    """True if its beginning was cut off because it exceeds the model's maximum length."""


class ScoringModel:
    """A reward model with its tokenizer."""

    def __init__(
        self,
        name: str,
        settings: ScoringModelSpec,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        now: datetime | None = None,
    ) -> None:
        """Combine model and tokenizer.

        Args:
            name: name of the model in the run.
            model: model with one output; its weights are frozen.
            now: time given to chat templates that write the date into prompts; None for the clock.

        Raises:
            BadConfig: ``max_tokens`` is more than the number of the model's positions.
        """
        self.name = name
        self._settings = settings
        self._model = model.requires_grad_(False).eval()
        # Decoders are scored at one token by their head; other models (encoders) by their own forward pass.
        self._decoder = RewardModel(model) if is_reward_model(model) else None
        self._tokenizer = tokenizer
        self._now = now
        self._arguments = inspect.signature(model.forward).parameters
        self._max_tokens = _max_tokens(name, settings, model)
        if self._decoder is None:
            tokenizer.truncation_side = "left"

    @torch.no_grad()
    def scores(self, made: Sequence[Sampled], beat: Callable[[], None]) -> ModelScores:
        """Score completions, batching those of similar length.

        Args:
            beat: called after every batch.
        """
        inputs: dict[int, _Input] = {}
        unread: dict[int, str] = {}
        for index, one in enumerate(made):
            try:
                inputs[index] = self._input(*one)
            except UnrenderedChat as error:
                unread[index] = str(error)
        order = sorted(inputs, key=lambda index: len(inputs[index].ids))
        found = [math.nan] * len(made)
        for first in range(0, len(order), self._settings.batch_size):
            part = order[first : first + self._settings.batch_size]
            for index, score in zip(part, self._batch([inputs[index] for index in part]).tolist(), strict=True):
                found[index] = score
            beat()
        return ModelScores(found, sum(one.is_cut for one in inputs.values()), unread=unread)

    def _batch(self, inputs: Sequence[_Input]) -> Tensor:
        """``[B]`` scores of one batch, padded on the right."""
        lengths = torch.tensor([len(one.ids) for one in inputs])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long().to(self._model.device)
        ids = self._padded([one.ids for one in inputs], self._tokenizer.pad_token_id)
        if self._decoder is not None:
            scores: Tensor = self._decoder(ids, mask)
            return scores
        named = {"input_ids": ids, "attention_mask": mask}
        if inputs[0].segments and "token_type_ids" in self._arguments:
            named["token_type_ids"] = self._padded([one.segments for one in inputs], self._tokenizer.pad_token_type_id)
        logits: Tensor = self._model(**named).logits
        return logits.squeeze(-1).float()

    def _padded(self, rows: Sequence[Sequence[int]], filler: int) -> Tensor:
        """``[B, T]`` int64 on the model's device."""
        longest = max(map(len, rows))
        filled = [[*row, *[filler] * (longest - len(row))] for row in rows]
        return torch.tensor(filled).to(self._model.device)

    def _input(self, row: Row, made: Completion) -> _Input:
        """Prompt and completion in the form that the model was trained on, cut at the beginning if they are too
        long."""
        scored = self._rendered(row, made)
        if self._decoder is None:
            return self._pair(scored)
        (prompt,) = prompt_tokens([scored], self._tokenizer)
        if made.finished:
            tokens = [*prompt, *completion_tokens(scored.target, scored, self._tokenizer)]
        else:
            # A truncated completion gets no end token.
            tokens = [*prompt, *continued_tokens([scored.target], self._tokenizer)[0]]
        is_cut = bool(self._max_tokens) and len(tokens) > self._max_tokens
        return _Input(tokens[-self._max_tokens :] if is_cut else tokens, [], is_cut)

    def _pair(self, scored: Row) -> _Input:
        """Both texts as an encoder expects them, with special tokens around them, which truncation leaves in place."""
        read = self._tokenizer(scored.prompt, scored.target)
        is_cut = bool(self._max_tokens) and len(read["input_ids"]) > self._max_tokens
        if is_cut:
            added = self._tokenizer.num_special_tokens_to_add(pair=True)
            target = self._tokenizer.encode(scored.target, add_special_tokens=False)
            # If the completion fills the model, no token of the prompt fits.
            fits = len(target) + added < self._max_tokens
            texts = (scored.prompt if fits else "", scored.target)
            strategy = "only_first" if fits else "only_second"
            read = self._tokenizer(*texts, truncation=strategy, max_length=self._max_tokens)
        return _Input(read["input_ids"], read.get("token_type_ids", []), is_cut)

    def _rendered(self, row: Row, made: Completion) -> Row:
        """Build a row whose target is the completion, as text or rendered by this model's chat template."""
        template = self._settings.template
        if template == "text" or (template == "data" and row.chat is None):
            return dataclasses.replace(row, target=made.text, chat=None)
        messages = row.chat.prompt if row.chat is not None else ({"role": "user", "content": row.prompt},)
        several = made.episode.messages if made.episode is not None and row.chat is not None else ()
        *before_last, last = several or ({"role": "assistant", "content": made.text},)
        # The end of a truncated completion is marked, to leave out what the template writes after it.
        last = last if made.finished else {**last, "content": f"{last['content']}{_CUT}"}
        tools = row.chat.tools if row.chat is not None else ()
        chat = Conversation(messages, target=(*before_last, last), tools=tools)
        whole = rendered(dataclasses.replace(row, chat=chat), self._tokenizer, template_arguments(now=self._now))
        before, mark, _ = whole.target.rpartition(_CUT)
        return dataclasses.replace(whole, target=before) if mark and not made.finished else whole


def _max_tokens(name: str, settings: ScoringModelSpec, model: PreTrainedModel) -> int:
    """Maximum length of a sequence; 0 for any."""
    table = _position_table(model)
    if table is not None and settings.max_tokens > table:
        raise BadConfig(
            f"found reward.models.{name}.max_tokens = {settings.max_tokens}, and a model with positions for {table} "
            f"tokens; set it to {table} at most, or to 0 for all of them"
        )
    return settings.max_tokens or table or getattr(model.config, "max_position_embeddings", 0) or 0


def _position_table(model: PreTrainedModel) -> int | None:
    """Number of tokens that a table of learned positions covers; None without such a table, as with rotary
    positions."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and its descendants count positions from the one after the padding's.
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None


@dataclass
class ScoringModels:
    """All reward models of a run on one rank, with running statistics of their scores."""

    settings: Mapping[str, ScoringModelSpec]
    models: Sequence[ScoringModel]
    states: dict[str, ScoringModelState]
    ranks: Ranks

    def score(self, made: Sequence[Sampled], beat: Callable[[], None]) -> dict[str, ModelScores]:
        """Score completions by each model. Collective if a model normalises; ranks may have any number of
        completions."""
        found = {model.name: model.scores(made, beat) for model in self.models}
        self._count(found)
        return {
            name: dataclasses.replace(scores, counted=self._normalised(name, scores.raw))
            for name, scores in found.items()
        }

    def rate(self, name: str, made: Sequence[Sampled], beat: Callable[[], None]) -> ModelScores:
        """Score completions by one model, without counting them in its statistics. Not collective."""
        (model,) = (one for one in self.models if one.name == name)
        return model.scores(made, beat)

    def _count(self, found: Mapping[str, ModelScores]) -> None:
        """Add this step's scores of all ranks to the running sums of the normalised models."""
        names = [name for name in found if self.settings[name].normalise != "none"]
        if not names:
            return
        own = [value for name in names for value in _moments(found[name].raw)]
        sums = [math.fsum(values) for values in zip(*self.ranks.gather_numbers(own), strict=True)]
        for place, name in enumerate(names):
            before = self.states[name]
            count, total, squares = sums[3 * place : 3 * place + 3]
            self.states[name] = before.model_copy(
                update={
                    "count": before.count + round(count),
                    "total": before.total + total,
                    "squares": before.squares + squares,
                }
            )

    def _normalised(self, name: str, raw: Sequence[float]) -> list[float]:
        how, state = self.settings[name].normalise, self.states[name]
        if how == "none" or not state.count:
            return list(raw)
        mean = state.total / state.count
        variance = max(0.0, state.squares / state.count - mean * mean)
        scale = math.sqrt(variance) if how == "standardise" and variance > 0 else 1.0
        return [(value - mean) / scale for value in raw]


def _moments(values: Sequence[float]) -> tuple[float, float, float]:
    """Count, sum and sum of squares of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    return float(len(finite)), math.fsum(finite), math.fsum(value * value for value in finite)


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load_scoring_models(
    settings: Mapping[str, ScoringModelSpec],
    ranks: Ranks,
    policy_tokenizer: PreTrainedTokenizerBase,
    before: Mapping[str, ScoringModelState],
    beat: Callable[[], None],
    *,
    has_conversations: bool = False,
    now: datetime | None = None,
) -> ScoringModels:
    """Load the reward models of a run, and check them against a checkpoint. Collective.

    Args:
        policy_tokenizer: the policy's tokenizer; a model with a different one is logged.
        before: states from the checkpoint being resumed from; empty for a fresh start.
        has_conversations: True if rows are conversations, which a chat template has to render.
        now: time given to chat templates that write the date into prompts; None for the clock.

    Raises:
        BadConfig: a folder holds no reward model, the nodes hold different ones, or a required chat template is
            missing.
        ResumeMismatch: a model's weights differ from those that scored the training of the checkpoint.
    """
    models, states = [], {}
    for name, one in settings.items():
        beat()
        found = _same_everywhere(name, one, ranks)
        known = before.get(name)
        if known is not None and known.fingerprint != found:
            raise ResumeMismatch(
                f"reward.models.{name}: {one.path} contains other files than those used for the checkpoint "
                f"(fingerprint {found}, then {known.fingerprint}); restore them, or start a new run"
            )
        states[name] = known or ScoringModelState(fingerprint=found)
        model, tokenizer = load_scoring_model(name, one, ranks.device, beat)
        if not tokenizer.chat_template and (one.template == "chat" or (one.template == "data" and has_conversations)):
            raise BadConfig(
                f"reward.models.{name}: found conversations to score, but no chat template in {one.path}; expected "
                f'the one used to train the model, or template = "text"'
            )
        models.append(ScoringModel(name, one, model, tokenizer, now))
        anew = "" if _is_same(tokenizer, policy_tokenizer) else "; its tokenizer differs from the policy's"
        ranks.log(
            f"reward model {name}: {type(model).__name__} of {one.path}, fingerprint {found}, {one.dtype} on "
            f"{model.device}{anew}"
        )
    return ScoringModels(settings, models, states, ranks)


def load_scoring_model(
    name: str, settings: ScoringModelSpec, device: torch.device, beat: Callable[[], None] = lambda: None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a reward model and its tokenizer.

    Args:
        beat: called after each tensor.

    Raises:
        BadConfig: the folder holds no sequence classifier with one output, or not all of its weights.
    """
    folder, setting = Path(settings.path), f"reward.models.{name}"
    if not folder.is_dir():
        raise BadConfig(f'found {setting}.path = "{folder}", which is not a folder; set it to the folder of a model')
    tokenizer = load_tokenizer(folder)
    try:
        config = dropout_free_config(folder)
        if config.num_labels != 1:
            raise BadConfig(
                f"{setting}: {folder} has {config.num_labels} outputs; expected a reward model with one output"
            )
        kind = AutoModelForSequenceClassification
        model = load_whole(kind, folder, config, settings.dtype, beat, setting=f"{setting}: ")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:400]
        raise BadConfig(f"{setting}: {folder} has no sequence classifier for transformers: {reason}") from error
    move(model, device if settings.device == "rank" else torch.device("cpu"), beat)
    return model, tokenizer


def _same_everywhere(name: str, settings: ScoringModelSpec, ranks: Ranks) -> str:
    """Fingerprint of a model's folder, checked to be the same on every rank."""
    found = ranks.gather(fingerprint(Path(settings.path)))
    if len(set(found)) > 1:
        files = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
        raise BadConfig(
            f"reward.models.{name}: the ranks found different files in {settings.path} ({files}); put the model where "
            "all nodes can read it, or the same copy on each"
        )
    return found[0]


def _is_same(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    vocabulary: dict[str, int] = one.get_vocab()
    return bool(vocabulary == other.get_vocab())
