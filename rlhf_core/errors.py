"""Tree of all errors that users may see.

    RlhfError                       exit code 1 of the command line unless the class says otherwise
    ├── BadInput (2)                the user's input cannot work; nothing was started
    │   ├── BadConfig               a config file, an override or a site setting is wrong
    │   ├── BadData                 a data file is missing or malformed; names file and line
    │   │   └── UnrenderedChat      the chat template does not render a conversation; it may render others
    │   ├── PreflightBlocked        a blocking check failed
    │   └── UnknownRun              no run of that id or name in the history
    ├── HistoryError                the database cannot be used
    │   ├── DatabaseUnavailable     it does not answer, is full, locked, not writable, or no database at all
    │   ├── UnsafeDatabase (2)      SQLite on a network file system, or queries as a superuser
    │   ├── SchemaOutOfDate (2)     the database needs `rlhf db upgrade`
    │   ├── IllegalMove             a state change that the transition table does not allow
    │   └── LeaseLost               another controller owns the run; this one must exit
    ├── SchedulerError              the scheduler refused or did not answer
    │   ├── SchedulerUnavailable    it did not answer, or did not confirm a job; controllers ask again
    │   └── SubmissionFailed        the job was not accepted
    │       └── SubmissionDeferred  for now: a partition is drained, or a submission limit is reached
    ├── RunDirError                 the run directory is missing, belongs to something else, or is damaged
    │   ├── RunDirGone              it was removed or moved, while its file system is still there
    │   ├── CheckpointCorrupt       a checkpoint does not match its manifest, or has none
    │   └── JournalDamaged          a line of the controller's journal cannot be read
    ├── ServiceFailed               a service of the site did not start, or supervisord does not answer
    ├── PrefectUnavailable          no Prefect server can be used; no run depends on one
    ├── EnvironmentFailed           an environment of `rlhf env create` could not be created; the command can be retried
    ├── PromotionFailed             the model of a completed run could not be written; approval can be retried
    ├── RunNotBegun                 no worker starts a requested run; the request stays
    ├── RunFailed                   a run ended without a model; the diagnosis is the message
    ├── RunCancelled (130)          the user ended the run
    └── WorkerError                 raised on the nodes; crosses to the control plane as text in outcome.json
        ├── MetricsMismatch         ranks reduced different metrics, or are at different steps
        ├── RewardFailed            a reward function raised or returned something that is not a reward
        ├── ToolFailed              a tool or an environment failed in a way that the run does not go on from
        ├── SamplingProcessKilled   a signal ended a process of a vLLM engine over several GPUs while it started
        ├── DiskFull                no room for a checkpoint, an adapter or weights; what was there is untouched
        ├── FileSystemStalled       the file system accepts no more of a checkpoint saved in the background
        ├── NonFiniteLoss           loss, gradient norm or log-probability is NaN or infinite
        ├── DegenerateRl            training has stopped learning: no gradient, identical completions, or a lost reward
        ├── StaleWeights            a rollout engine has another version of the weights than the requested one
        ├── WeightSyncFailed        a version of the weights was not committed; the previous one stays active
        ├── SamplingFailed          a rollout engine failed many requests in a row and completed none
        ├── EnginesLost             no rollout engine serves requests, and none recovered in time
        ├── TrainerIncomplete       an external trainer ended too early, or started over
        └── ResumeMismatch          a checkpoint does not fit this run (model, spec)

A message says what was found, what was expected and what to do. Errors stay picklable: one message argument.

Exceptions for control flow within one package are in that package. Python's own exceptions are raised where its
conventions require them (validators, invalid numbers) and for bugs of this program, which ``rlhf`` then reports as
such.
"""


class RlhfError(Exception):
    """Base of every error raised on purpose. ``exit_code`` is the exit status of the ``rlhf`` command."""

    exit_code: int = 1


class BadInput(RlhfError):
    """Input that cannot work. Raised before anything is started, so nothing has to be undone."""

    exit_code = 2


class BadConfig(BadInput):
    """A config file, a ``--set`` override or a site setting is wrong."""


class BadData(BadInput):
    """A data file is missing, unreadable or malformed. The message names file and line."""


class UnrenderedChat(BadData):
    """The chat template does not render a conversation in a way that can be trained on; it may render others."""


class PreflightBlocked(BadInput):
    """At least one blocking preflight check failed."""


class UnknownRun(BadInput):
    """The history has no run of that id or name."""


class HistoryError(RlhfError):
    """The history database cannot be used."""


class DatabaseUnavailable(HistoryError):
    """The database does not answer, is full, locked or not writable, or the file is not one. It may be temporary."""


class UnsafeDatabase(HistoryError):
    """The database setup is not safe: SQLite on a network file system, where its locks do not hold, or PostgreSQL
    accessed as a superuser, whom no permission restricts."""

    exit_code = 2


class SchemaOutOfDate(HistoryError):
    """The database schema is older or newer than this program."""

    exit_code = 2


class IllegalMove(HistoryError):
    """A state change that the table in ``schemas/attempts.py`` does not allow."""


class LeaseLost(HistoryError):
    """Another controller has taken over the run. The loser stops at once and changes nothing more."""


class SchedulerError(RlhfError):
    """The scheduler refused a request or did not answer."""


class SchedulerUnavailable(SchedulerError):
    """The scheduler did not answer, or did not confirm a job that it may have accepted. It may be temporary."""


class SubmissionFailed(SchedulerError):
    """The scheduler did not accept the job."""


class SubmissionDeferred(SubmissionFailed):
    """The scheduler does not accept the job for now; it may do so later, unchanged."""


class RunDirError(RlhfError):
    """The run directory is missing, belongs to something else, or is damaged."""


class RunDirGone(RunDirError):
    """A run directory was removed or moved away while its run was active."""


class CheckpointCorrupt(RunDirError):
    """A checkpoint's files do not match the checksums in its ``COMPLETE`` file, or that file cannot be read.

    Attributes:
        checkpoint: name of its folder, if the previous checkpoint can take its place; otherwise empty.
    """

    def __init__(self, message: str, checkpoint: str = "") -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class JournalDamaged(RunDirError):
    """A complete line of ``control.jsonl`` cannot be read. The message names file and line."""


class ServiceFailed(RlhfError):
    """A service of the site did not start, or its supervisord does not answer."""


class PrefectUnavailable(RlhfError):
    """No Prefect server can be used. No run depends on one: ``--no-prefect`` runs without."""


class EnvironmentFailed(RlhfError):
    """An environment of a trainer could not be created. The command can be retried."""


class PromotionFailed(RlhfError):
    """The model directory of a completed run could not be written. The run is untouched; `rlhf approve` retries."""


class RunNotBegun(RlhfError):
    """No worker starts a requested run. The request stays: another one would make a second run."""


class RunFailed(RlhfError):
    """A run ended without a model. The message is the diagnosis."""


class RunCancelled(RlhfError):
    """The user ended the run."""

    exit_code = 130


class WorkerError(RlhfError):
    """Base of errors that are raised on the nodes. They reach the control plane as text, never as objects."""


class MetricsMismatch(WorkerError):
    """Ranks reduced different metrics or were at different steps: their collectives no longer match."""


class RewardFailed(WorkerError):
    """A reward function raised, or returned something that is not one finite number per completion."""


class ToolFailed(WorkerError):
    """A tool or an environment failed in a way that the run does not go on from: the beginning or the reward of a
    rollout, or, if ``rollout.turns.on_failure`` says so, a call that took too long or ended its process."""


class SamplingProcessKilled(WorkerError):
    """A signal ended a process of an engine that was starting."""

    def __init__(self, exit_code: int) -> None:
        """Args:
        exit_code: the signal, negative.
        """
        super().__init__(f"a sampling process of this engine was ended by signal {-exit_code} while it started")
        self.exit_code = exit_code


class DiskFull(WorkerError):
    """There is no room for a checkpoint, or for the weights or the adapter of an engine. What was there before is
    untouched."""


class FileSystemStalled(WorkerError):
    """A checkpoint is being saved in the background, and the file system no longer accepts its data."""


class NonFiniteLoss(WorkerError):
    """The loss, the gradient norm or a log-probability of the policy is NaN or infinite."""


class DegenerateRl(WorkerError):
    """Training has stopped learning. The message is the finding of ``rlhf_core/diagnosis/health/judge.py``.

    Attributes:
        rule: the rule of ``[health]`` that found it.
    """

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule


class StaleWeights(WorkerError):
    """The active weights of a rollout engine are of another version than the completions are to be generated with, or
    differ from the trainer's weights of that version."""


class WeightSyncFailed(WorkerError):
    """A version of the weights was not committed. The previous one stays active on every engine.

    Attributes:
        peer: name of the process that is to blame; empty if there is none.
        others: names of further engines that failed by themselves in the same sync.
    """

    def __init__(self, message: str, peer: str = "", others: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.peer = peer
        self.others = others


class SamplingFailed(WorkerError):
    """A rollout engine failed many requests in a row and completed none. The message has the last error."""


class EnginesLost(WorkerError):
    """No rollout engine of the group serves requests, and none recovered in time; or the same request fails on all."""


class TrainerIncomplete(WorkerError):
    """An external trainer ended without an error before its last step, or began at another step than the requested
    one."""


class ResumeMismatch(WorkerError):
    """A checkpoint does not fit this run: other model, other spec."""
