"""Words that the parts of training share. Imports no torch.

Shapes in docstrings: ``P`` prompts, ``G`` samples of each prompt, ``B`` sequences of a batch (often P*G), ``T`` tokens
of the longest sequence of the batch, ``V`` entries of the vocabulary, ``H`` hidden size. ``[B, T]`` is a tensor of
that shape.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

from pydantic import JsonValue

from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.resources import Placement, Role
from rlhf_core.schemas.run import RunSpec, with_changes
from rlhf_core.schemas.stored_spec import StoredSpec


class Reporter(Protocol):
    """Channel from a worker to its agent: signs of life, and what the agent asks. The worker implements it."""

    def beat(self, phase: Phase, step: int) -> None:
        """Sign of life. Main thread only; costs less than a microsecond, so call it often."""

    def collective(self) -> AbstractContextManager[None]:
        """Wraps every collective call: counts it as entered and marks the rank as inside."""

    def speak_for(self, pids: Sequence[int]) -> None:
        """Say which other processes of the node the beats speak for: one that stands still stands for this worker."""

    def request(self) -> Literal["", "save", "stop"]:
        """Request of the agent to this worker: nothing, save and go on, or save and end."""


class NullReporter:
    """A reporter for tests and scripts, where nobody listens."""

    def beat(self, phase: Phase, step: int) -> None:
        """Does nothing."""

    def collective(self) -> AbstractContextManager[None]:
        """Wraps nothing."""
        return nullcontext()

    def speak_for(self, pids: Sequence[int]) -> None:
        """Does nothing."""

    def request(self) -> Literal["", "save", "stop"]:
        """Nobody asks for anything."""
        return ""


@dataclass(frozen=True)
class WorkerContext:
    """Everything a role's entry function is given."""

    run_dir: RunDir
    attempt: int
    """From 1."""
    restart: int
    """From 0."""
    stored: StoredSpec
    placement: Placement
    role: Role
    rank: int
    """Rank in the role's process group. Dealt anew at every restart: nothing may be tied to it across restarts."""
    local_rank: int
    """Index on this node."""
    num_ranks: int
    """Ranks of the role over all nodes."""
    node: str
    """Name of this node."""
    reporter: Reporter
    generation: int | None = None
    """Start of its group, where the workers run beside those whose restarts are counted; None for these."""
    damaged: frozenset[str] = frozenset()
    """Checkpoints that this attempt has found damaged: not to be used, whatever a file system still shows of them."""
    address: str = "127.0.0.1"
    """Address under which other nodes of the allocation reach this one."""
    listening_address: str = "127.0.0.1"
    """Address of an interface of this node to listen on for them; empty for all interfaces."""
    store: Path | None = None
    """File in which the ranks meet when all are on one node; without it they meet at MASTER_ADDR and MASTER_PORT."""
    memory: Path | None = None
    """Folder of this node for copies of checkpoints in main memory, which outlives the workers; None without an
    agent."""

    @property
    def spec(self) -> RunSpec:
        """The run as the user asked for it, with what this attempt changes."""
        return with_changes(self.stored.spec, self.placement.config_diff)

    @property
    def restart_dir(self) -> RestartDir:
        """Folder in which this start of the workers leaves its files."""
        attempt = self.run_dir.attempt(self.attempt)
        return attempt.restart(self.restart) if self.generation is None else attempt.group(self.role, self.generation)


class RoleResult(StrEnum):
    """Ways in which a role's entry function returns; everything else is an exception."""

    DONE = "done"
    """All that was asked for is done."""
    STOPPED_EARLY = "stopped_early"
    """The agent asked to stop; the state was saved and the rest is left to a later attempt."""


@dataclass(frozen=True)
class Row:
    """One row of data, ready for use."""

    uid: str
    """Identity of the prompt: a hash of its content and of how often that content came before in the data."""
    prompt: str
    """Text given to the model: the prompt template, filled."""
    answer: str
    """The reference answer."""
    target: str
    """Text that supervised training teaches after the prompt, without the end token: the template, filled."""
    columns: Mapping[str, JsonValue]
    """All columns of the row as they stood in the data."""
    chosen: str = ""
    """The better completion of a pair, of data that has pairs."""
    rejected: str = ""
    """The worse one."""
    margin: float = 0.0
    """By how much the better one is better, where the data says so."""
    desirable: bool = True
    """Label of the completion, of data that has labels."""
    chat: "Conversation | None" = None
    """The same as messages, of a row that is a conversation: its texts are what the chat template of a tokenizer makes
    of them (``data/chat.py``)."""


Messages = Sequence[Mapping[str, JsonValue]]
"""Turns of a conversation, each with its ``role`` and ``content``."""


@dataclass(frozen=True)
class Conversation:
    """A row in messages. A completion is what comes after the prompt: most often one turn of the model."""

    prompt: Messages
    """Turns that the model answers."""
    target: Messages = ()
    """Completion that supervised training teaches."""
    chosen: Messages = ()
    """The better completion of a pair."""
    rejected: Messages = ()
    """The worse one."""


@dataclass(frozen=True)
class Completion:
    """Answer of the model to one prompt."""

    token_ids: list[int]
    """Sampled tokens, with the end token if it was sampled."""
    text: str
    """The same as text, without the end token."""
    finished: bool
    """True if the end token was sampled; otherwise the completion was cut at the longest length."""
    logprobs: list[float]
    """Log-probability of each token at the sampling temperature (at temperature 1 for greedy completions)."""
    weight_version: int = 0
    """Optimizer steps of the run that the weights had behind them which it was sampled with."""
