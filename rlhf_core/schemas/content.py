"""Report on the data itself, made by the compute interpreter and judged by preflight."""

from enum import StrEnum

from rlhf_core.schemas.base import Schema


class TrialProblem(StrEnum):
    """Problem that the trial of a reward function found."""

    NONE = ""
    COLUMNS = "columns"
    """It asks for columns that the data does not have, or does not take those it has."""
    FAILED = "failed"
    """It raised, or returned something else than one finite number per completion."""
    TIMEOUT = "timeout"
    """It did not return in time."""
    MEMORY = "memory"
    """It wanted more memory than a trial may have."""
    DIED = "died"
    """Its process ended without a word."""
    NOT_TRIED = "not_tried"
    """No time was left for it."""


class RewardTrial(Schema):
    """One reward function, called with real rows."""

    function: str
    """``module:function``."""
    problem: TrialProblem = TrialProblem.NONE
    """Kind of the problem."""
    message: str = ""
    """In words."""
    num_completions: int = 0
    """Completions it was given: right answers, those of other rows, and nonsense."""
    num_distinct: int = 0
    """Different rewards among them."""
    right: float = 0.0
    """Mean reward of the reference answers."""
    wrong: float = 0.0
    """Mean reward of all others."""
    seconds: float = 0.0
    """Time of one call, the second one: the first may load what it needs."""


class SplitReport(Schema):
    """The first rows of one split."""

    split: str
    """``train`` or ``eval``."""
    problem: str = ""
    """Reason why it cannot be read; empty if it can."""
    num_rows: int = 0
    """Number of rows read."""
    is_whole: bool = True
    """True if these are all rows."""
    columns: tuple[str, ...] = ()
    """Columns of the rows."""
    num_duplicates: int = 0
    """Rows that hold prompt and answer of an earlier one."""
    read_s: float = 0.0
    """Time for reading them and filling their templates."""
    encode_s: float = 0.0
    """Time for turning their prompts into tokens."""
    num_overlong: int = 0
    """Rows whose prompt is longer than ``data.max_prompt_tokens``."""
    num_empty: int = 0
    """Rows whose prompt has no token."""
    longest_prompt: int = 0
    """Tokens of the longest prompt."""
    longest_kept: int = 0
    """Tokens of the longest prompt that is not left out."""
    num_long_completions: int = 0
    """Rows with a completion that is longer than ``data.max_completion_tokens``."""
    longest_completion: int = 0
    """Tokens of the longest completion of a prompt that is not left out."""
    longest_taught: int = 0
    """Tokens of the longest prompt with a completion that is learned from, of rows that are not left out."""


class TokenizerReport(Schema):
    """The tokenizer on real texts."""

    problem: str = ""
    """Reason why it cannot be loaded or built; empty if it can."""
    num_texts: int = 0
    """Prompts and answers that went through it."""
    num_changed: int = 0
    """Texts that are another text after encoding and decoding."""
    example: str = ""
    """One of them, and what became of it."""
    unknown_share: float = 0.0
    """Share of the tokens that stand for something the tokenizer does not know."""
    chat_problem: str = ""
    """Problem of its chat template; empty if it has none or it renders."""


class ContentReport(Schema):
    """Answer of ``python -m rlhf_core.worker check-content``."""

    splits: tuple[SplitReport, ...] = ()
    """Training data and held-out data."""
    num_shared: int = 0
    """Prompts among these rows that are in both splits."""
    tokenizer: TokenizerReport | None = None
    """None where no row could be read."""
    rewards: tuple[RewardTrial, ...] = ()
    """Every reward function and the scorer."""
