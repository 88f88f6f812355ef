"""Reports on the data itself, created by the compute interpreter before a run."""

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from rlhf_core.schemas.base import Schema


class TrialProblem(StrEnum):
    """Problem found in the trial of a reward function."""

    NONE = ""
    COLUMNS = "columns"
    """It requires columns that the data lacks, or does not accept those of the data."""
    FAILED = "failed"
    """It raised an error, or did not return a finite number or None for each completion."""
    TIMEOUT = "timeout"
    """It did not return in time."""
    MEMORY = "memory"
    """It exceeded the memory limit of a trial."""
    DIED = "died"
    """Its process died without a message."""
    NOT_TRIED = "not_tried"
    """There was no time left for it."""


class RewardTrial(Schema):
    """One reward function, called with real rows."""

    function: str
    """``module:function``."""
    is_held_out: bool = False
    """True if the rows are held-out ones, which have other columns than those of training."""
    problem: TrialProblem = TrialProblem.NONE
    """Kind of the problem."""
    message: str = ""
    """Description of the problem."""
    num_completions: int = 0
    """Number of tested completions: right answers, those of other rows, and nonsense."""
    num_unjudged: int = 0
    """Number of those for which it returned None: it does not judge them."""
    num_distinct: int = 0
    """Number of distinct rewards."""
    right: float = 0.0
    """Mean reward of the reference answers that it judges."""
    wrong: float = 0.0
    """Mean reward of all others that it judges."""
    seconds: float = 0.0
    """Time of the second call, because the first may load data."""


class SplitReport(Schema):
    """The first rows of one split, in a mixture of one source."""

    split: str
    """``train`` or ``eval``."""
    source: str = ""
    """Source in a mixture; empty for the only one."""
    problem: str = ""
    """Reason why it cannot be read; empty if it can."""
    num_rows: int = 0
    """Number of rows read."""
    is_whole: bool = True
    """True if these are all rows."""
    columns: tuple[str, ...] = ()
    """Columns of the rows."""
    num_duplicates: int = 0
    """Rows that repeat the prompt and answer of an earlier row."""
    read_s: float = 0.0
    """Time to read them and fill their templates."""
    encode_s: float = 0.0
    """Time to render them and to tokenize their prompts."""
    num_overlong: int = 0
    """Rows whose prompt is longer than ``data.max_prompt_tokens``."""
    num_unrendered: int = 0
    """Conversations that the chat template does not render."""
    unrendered: str = ""
    """Problem of the first of them, with file and line."""
    num_empty: int = 0
    """Rows whose prompt has no token."""
    num_unused_tools: int = 0
    """Conversations with a column ``tools`` that is not empty, of which they get none."""
    longest_prompt: int = 0
    """Tokens of the longest prompt."""
    num_long_completions: int = 0
    """Rows with a completion that is longer than ``data.max_completion_tokens``."""
    longest_completion: int = 0
    """Tokens of the longest completion of a prompt that is not dropped."""
    bytes_per_row: int = 0
    """Main memory that a row takes in every rank, with the tokens of its prompt."""
    longest_taught: int = 0
    """Tokens of the longest prompt with a completion to learn from, in rows that are not dropped; of held-out rows, in
    those that are evaluated."""
    labels: tuple[bool, ...] = ()
    """Labels that occur in the same rows; empty if rows have none, or if not all of these rows were read."""

    @property
    def setting(self) -> str:
        """Setting that names its file."""
        return f"data.sources.{self.source}.{self.split}" if self.source else f"data.{self.split}"


class TokenizerReport(Schema):
    """Report on the tokenizer with real texts."""

    problem: str = ""
    """Reason why it cannot be loaded or built; empty if it can."""
    num_texts: int = 0
    """Number of tested prompts and answers."""
    num_changed: int = 0
    """Number of texts changed by encoding and decoding."""
    example: str = ""
    """One of them, and its changed text."""
    unknown_share: float = 0.0
    """Share of tokens for characters that the tokenizer lacks."""
    chat_problem: str = ""
    """Problem of its chat template; empty if it has none or it renders."""
    is_bypassed: bool = False
    """True if it has a chat template, not one of a built-in tokenizer, and there are prompts of text that go past it
    and are not in its form: they have no special token."""
    references: Mapping[str, str] = Field(default_factory=dict)
    """Differences of the tokenizers of reference models, by the setting that names the model."""
    unread_arguments: tuple[str, ...] = ()
    """Variables set by ``data.template_args`` and ``data.tools_column`` that do not occur in its chat template."""
    turn_end: str | None = None
    """Token that ends a turn of the model in its chat template, empty without one; None if no row is a conversation or
    the template has a problem."""


class TurnsReport(Schema):
    """Trial of the tools and the environment (``rollout.turns``) with real rows."""

    problem: str = ""
    """Reason why they cannot be used; empty if they can."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the model is told of."""
    has_reward: bool = False
    """True if the environment returns the reward of a rollout."""


class ContentReport(Schema):
    """Answer of ``python -m rlhf_core.worker check-content``."""

    splits: tuple[SplitReport, ...] = ()
    """Training data and held-out data."""
    num_shared: int = 0
    """Prompts among these rows that are in both splits."""
    tokenizer: TokenizerReport | None = None
    """None if no row could be read."""
    rewards: tuple[RewardTrial, ...] = ()
    """Every reward function and the scorer."""
    turns: TurnsReport | None = None
    """None if the run has neither tools nor an environment, or no row could be read."""


class RowCount(Schema):
    """Answer of ``python -m rlhf_core.worker count-rows``."""

    num_rows: int = 0
    """Number of training rows that are left after dropping."""
    problem: str = ""
    """Reason why they cannot be loaded; empty if they can."""
