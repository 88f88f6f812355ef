"""Types shared by all parts of training. Does not import torch.

Shapes in docstrings: ``P`` prompts, ``G`` samples of each prompt, ``B`` sequences of a batch (often P*G), ``T`` tokens
of the longest sequence in the batch, ``V`` entries of the vocabulary, ``H`` hidden size. ``[B, T]`` is a tensor of that
shape.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress
from pathlib import Path
from typing import Literal, Protocol

from pydantic import JsonValue

from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.resources import Placement
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import StoredSpec


class Reporter(Protocol):
    """Channel between a worker and its agent: heartbeats and the agent's requests. The worker implements it."""

    def beat(self, phase: Phase, step: int) -> None:
        """Send a heartbeat. Main thread only; costs less than a microsecond, so call it often."""

    def collective(self) -> AbstractContextManager[None]:
        """Wrap a collective call: count it as entered and mark the rank as inside it."""

    def represent(self, pids: Sequence[int]) -> None:
        """Declare the other processes of the node that the heartbeats cover: if one of them stalls, so does this
        worker."""

    def request(self) -> Literal["", "stop"]:
        """The agent's request to this worker: none, or save and stop."""


class NullReporter:
    """A reporter for tests and scripts, which have no agent."""

    def beat(self, phase: Phase, step: int) -> None:
        """Do nothing."""

    def collective(self) -> AbstractContextManager[None]:
        """Wrap nothing."""
        return nullcontext()

    def represent(self, pids: Sequence[int]) -> None:
        """Do nothing."""

    def request(self) -> Literal["", "stop"]:
        """Return no request."""
        return ""


@dataclass(frozen=True)
class WorkerContext:
    """Arguments of a role's entry function."""

    run_dir: RunDir
    attempt: int
    """From 1."""
    restart: int
    """From 0."""
    stored: StoredSpec
    placement: Placement
    role: Role
    rank: int
    """Rank in the role's process group. Reassigned at every restart: nothing that outlives a restart may depend on
    it."""
    local_rank: int
    """Index on this node."""
    num_ranks: int
    """Number of ranks of the role, over all nodes."""
    node: str
    """Name of this node."""
    reporter: Reporter
    generation: int | None = None
    """Start number of its group, for workers outside the group whose restarts are counted; None for that group."""
    damaged: frozenset[str] = frozenset()
    """Checkpoints that this attempt has found damaged: never used, whatever the file system still shows of them."""
    address: str = "127.0.0.1"
    """Address at which other nodes of the allocation reach this one."""
    listening_address: str = "127.0.0.1"
    """Address of the interface of this node on which to listen for other nodes; empty for all interfaces."""
    store: Path | None = None
    """File for the rendezvous of ranks that share one node; without it they use MASTER_ADDR and MASTER_PORT."""
    memory: Path | None = None
    """Directory on this node for in-memory copies of checkpoints, which outlives the workers; None without an agent."""

    @property
    def spec(self) -> RunSpec:
        """The run as the user specified it, with the changes of this attempt."""
        return with_changes(self.stored.spec, self.placement.config_diff)

    @property
    def restart_dir(self) -> RestartDir:
        """Directory for the files of this start of the workers."""
        attempt = self.run_dir.attempt(self.attempt)
        return attempt.restart(self.restart) if self.generation is None else attempt.group(self.role, self.generation)


class RoleResult(StrEnum):
    """Normal outcomes of a role's entry function; every other outcome is an exception."""

    DONE = "done"
    """All work is done."""
    STOPPED_EARLY = "stopped_early"
    """The agent asked to stop; the state is saved and a later attempt does the rest."""


@dataclass(frozen=True)
class Row:
    """One row of data, ready for use."""

    uid: str
    """Identity of the prompt: a hash of its content, the number of earlier rows with the same content and, for a row
    that a step takes again, the number of the repetition."""
    prompt: str
    """Text given to the model: the filled prompt template."""
    answer: str
    """The reference answer."""
    target: str
    """Target text of supervised training after the prompt, without the end token: the filled template."""
    columns: Mapping[str, JsonValue]
    """All columns of the row, as in the data."""
    chosen: str = ""
    """The better completion, for data with pairs."""
    rejected: str = ""
    """The worse one."""
    margin: float = 0.0
    """Margin of the better completion, if the data has one."""
    desirable: bool = True
    """Label of the completion, for labelled data."""
    source: str = ""
    """Name of its source in a mixture (``data.sources``); empty for the only one."""
    chat: "Conversation | None" = None
    """The row as messages, if it is a conversation; its texts are rendered by a tokenizer's chat template
    (``data/chat.py``)."""


Messages = Sequence[Mapping[str, JsonValue]]
"""Turns of a conversation, each with its ``role`` and ``content``."""


@dataclass(frozen=True)
class Conversation:
    """A row as messages. A completion is everything after the prompt: usually one turn of the model."""

    prompt: Messages
    """Turns that the model answers."""
    target: Messages = ()
    """Target completion of supervised training."""
    chosen: Messages = ()
    """The better completion of a pair."""
    rejected: Messages = ()
    """The worse one."""
    is_whole: bool = False
    """True if the target has messages of others as well, of which nothing is learned (``data.messages_column``)."""
    learned: tuple[tuple[int, int], ...] = ()
    """Beginning and end of each part of the rendered target that is learned; empty if all of it is."""
    tools: Sequence[Mapping[str, JsonValue]] = ()
    """Descriptions of the functions that the model may call."""
    place: str = ""
    """File and line of the row, for error messages."""


@dataclass(frozen=True)
class ModelTurn:
    """One turn of the model in a rollout of several turns."""

    text: str
    """Text of its tokens, without the end token."""
    observation: str = ""
    """Text of the observation that follows it; empty after the last turn."""


@dataclass(frozen=True)
class Episode:
    """Record of a rollout with tools or an environment, beside its tokens."""

    turns: Sequence[ModelTurn]
    """The turns of the model, at least one."""
    sampled: Sequence[bool]
    """False for each token of the completion that belongs to an observation."""
    prompt_ids: Sequence[int]
    """Tokens of the prompt, with the text that the environment added to it."""
    messages: Messages = ()
    """Turns and observations as messages, for a row that is a conversation."""
    end: Literal["answer", "turns", "tokens", "failure"] = "answer"
    """Reason for its end: the model's answer, ``max_turns``, no room for another turn, or a lost environment."""
    num_calls: int = 0
    """Number of calls of tools, or of answers of the environment."""
    num_failed: int = 0
    """Number of those that raised an error, took too long or ended their process."""
    reward: float | None = None
    """Reward by the environment, if it gives one."""


@dataclass(frozen=True)
class Completion:
    """The model's answer to one prompt: one turn, or several with observations in between."""

    token_ids: list[int]
    """Sampled tokens, with the end token or stop string if it was sampled. Of several turns, with the tokens of the
    observations between them; the last token is always a sampled one."""
    text: str
    """Text of the tokens, without the end token; it ends with the stop string if one was sampled."""
    finished: bool
    """True if the end token or a stop string was sampled; otherwise the completion was truncated at the maximum
    length. Of several turns, True if the model ended the last one and called nothing in it."""
    logprobs: list[float]
    """Log-probability of each sampled token at the sampling temperature (at temperature 1 for greedy completions)."""
    weight_version: int = 0
    """Number of optimizer steps of the run behind the weights that sampled it."""
    episode: Episode | None = None
    """Record of its turns, in a run with tools or an environment."""

    @property
    def sampled(self) -> Sequence[bool]:
        """False for each token of an observation; empty if all tokens were sampled."""
        return () if self.episode is None or all(self.episode.sampled) else self.episode.sampled

    @property
    def sampled_ids(self) -> list[int]:
        """Tokens that the model sampled, without those of observations."""
        return list(compress(self.token_ids, self.sampled)) if self.sampled else self.token_ids

    @property
    def last_text(self) -> str:
        """Text of the last turn: what is compared with reference answers."""
        return self.text if self.episode is None else self.episode.turns[-1].text

    @property
    def shown(self) -> str:
        """Text for display, with observations marked."""
        if self.episode is None:
            return self.text
        parts = ((one.text, f"<observation>{one.observation}</observation>") for one in self.episode.turns[:-1])
        return "".join([text for part in parts for text in part] + [self.last_text])
