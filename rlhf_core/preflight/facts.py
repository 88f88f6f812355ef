"""Input of the checks. Gathered by ``gather_facts.py``; written by hand in tests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.content import ContentReport, SplitReport
from rlhf_core.schemas.resources import Inventory
from rlhf_core.schemas.run import RunSpec


@dataclass(frozen=True)
class LineProblem:
    """One bad row of a data file."""

    line: int
    """Line number, from 1."""
    message: str = ""
    """Problem of the row; empty if its kind says everything."""


@dataclass(frozen=True)
class BadRows:
    """Rows of a data file with a problem of one kind."""

    count: int = 0
    first: tuple[LineProblem, ...] = ()
    """The first few of them."""


@dataclass(frozen=True)
class DataFile:
    """A data file as the control plane reads it, without any of the training libraries."""

    path: Path
    problem: str = ""
    """Reason why it cannot be read at all; empty if it can."""
    scanned: bool = True
    """True if its rows were read; Parquet files are left to the nodes."""
    num_rows: int = 0
    """Rows that could be read."""
    columns: frozenset[str] = frozenset()
    """Columns that some row has."""
    malformed: BadRows = BadRows()
    """Rows that are not valid, or lack a column that other rows have."""
    empty_prompts: BadRows = BadRows()
    empty_answers: BadRows = BadRows()
    blank_prompts: BadRows = BadRows()
    """Rows whose prompt is white space only."""
    duplicates: BadRows = BadRows()
    """Rows that repeat the prompt and answer of an earlier row."""
    contradictions: BadRows = BadRows()
    """Rows that repeat the prompt of an earlier row with a different answer."""
    prompt_hashes: frozenset[bytes] = frozenset()
    """Short hashes of the prompts, to find the same prompt in another file."""


@dataclass(frozen=True)
class ComputeSide:
    """The interpreter that the nodes start."""

    python: str
    """Its path."""
    problem: str = ""
    """Reason why it could not be queried; empty if it could."""
    version: tuple[int, ...] = ()
    """Its Python version."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution name (normalised) to version."""
    rlhf_flows: str = ""
    """Version of rlhf-flows there; empty when it cannot be imported."""
    transformers: str = ""
    """Folder of transformers there; empty when it is not installed."""


@dataclass(frozen=True)
class TrainerSide:
    """The environment that another program trains in, as seen from here. Nothing of it was imported."""

    folder: str = ""
    """Folder of its virtual environment; empty for the programs of the job's PATH."""
    problem: str = ""
    """Reason why ``trainer.environment`` is not an environment; empty if it is one."""
    unseen: str = ""
    """Reason why it can be inspected only on the nodes; empty if it was inspected here."""
    setup_problem: str = ""
    """Reason why the shell lines before the program fail here; empty if they do not, or were not run."""
    program: str = ""
    """Path of the program that the launch line begins with; empty if it was not found."""
    python: str = ""
    """Its interpreter; empty if it has none or it was not found."""
    python_problem: str = ""
    """Reason why the interpreter could not be queried; empty if it could."""
    version: tuple[int, ...] = ()
    """Its Python version."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution name (normalised) to version."""
    missing_modules: tuple[str, ...] = ()
    """Modules of the launch line that its interpreter does not find."""
    missing_files: tuple[str, ...] = ()
    """Scripts and configs of the launch line that do not exist."""
    has_callback: bool = False
    """True if the script of the launch line names ``rlhf_core.callback``; False if it does not or cannot be read."""
    never_resumes: str = ""
    """Script of the launch line that calls ``train`` of a Trainer and never tells it to resume; empty if it does or
    cannot be read."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the program's own config files, names normalised as in a launch line."""
    launcher_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the launcher's own config file, likewise."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """Content of DeepSpeed's config file."""
    unread: tuple[str, ...] = ()
    """Config files that could not be read."""


@dataclass(frozen=True)
class Requirement:
    """One package that training needs."""

    name: str
    """Normalised distribution name."""
    accepts: str
    """Version range, for instance ``>=2.6``."""


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a model, as found. None of its libraries were imported."""

    path: Path
    problem: str = ""
    """Reason why it is not a model folder; empty if it is one."""
    weight_bytes: int = 0
    """Size of its weight files."""
    matrices: frozenset[str] = frozenset()
    """Layers with a matrix, by the last part of their names, from the headers of its safetensors files; empty where
    there are none."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of its ``config.json``; empty if it cannot be read."""


@dataclass(frozen=True)
class ModelTypes:
    """Models that the transformers of the compute interpreter can build, according to its files."""

    names: frozenset[str] = frozenset()
    """Values of ``model_type``; empty if they could not be read."""
    config_class: str = ""
    """Configuration class of the run's model type."""
    arguments: frozenset[str] = frozenset()
    """Its arguments; empty if they could not be read."""


@dataclass(frozen=True)
class RewardModelFolder(ModelFolder):
    """The folder of a reward model that scores completions, as found."""

    has_chat_template: bool = False
    """True if its tokenizer has a chat template."""
    fingerprint: str = ""
    """Fingerprint of all its files."""


@dataclass(frozen=True)
class Disk:
    """Disk that holds the run directories."""

    runs_dir: Path
    problem: str = ""
    """Reason why it cannot be written; empty if it can."""
    free_bytes: int = 0
    total_bytes: int = 0
    free_files: int | None = None
    """Files that can still be created; None if the file system sets no limit."""
    total_files: int | None = None


@dataclass(frozen=True)
class CheckpointFacts:
    """The checkpoint that a run would resume from."""

    name: str
    step: int
    num_ranks: int
    problems: tuple[str, ...] = ()
    """Files that are missing or have another size than ``COMPLETE`` says."""


@dataclass(frozen=True)
class Plugin:
    """A check of the site, found by its entry point."""

    id: str
    """Name of the entry point."""
    function: Callable[..., Any] | None = None
    """Takes the facts and yields findings, as our own checks do; None when it could not be imported."""
    problem: str = ""
    """Reason why it could not be imported, in one line."""


@dataclass(frozen=True)
class GoodRun:
    """The newest completed run of the same name."""

    run_id: str
    spec: Mapping[str, Any]
    """Its resolved spec, as JSON: another version of this program may have written it."""
    basis: Mapping[str, str] = field(default_factory=dict)
    """Versions, data and code of that run: see ``trial.basis_of``."""


@dataclass(frozen=True)
class Baseline:
    """Earlier runs like this one, from the history; empty if there are none or the history does not respond."""

    seconds_per_step: float | None = None
    """Median over the last completed runs of the same shape."""
    last_good: GoodRun | None = None
    known: bool = False
    """True if the history responded; otherwise a missing good run is not evidence of anything."""


@dataclass(frozen=True)
class Facts:
    """Input of the static checks."""

    spec: RunSpec
    inventory: Inventory
    scheduler: str
    """``local`` or ``slurm``."""
    control_version: str
    """Version of rlhf-flows here."""
    compute: ComputeSide
    requirements: tuple[Requirement, ...]
    """Requirements of rlhf-flows' training extra, from its metadata."""
    disk: Disk
    imports: Mapping[str, str] = field(default_factory=dict)
    """Import error of each ``module:function``; empty if it imports."""
    missing_code: tuple[str, ...] = ()
    """Entries of ``code.paths`` that do not exist or may not be read."""
    code_hash: str = ""
    """Hash of the user's code as the nodes will see it; empty when there is none."""
    files: Mapping[str, DataFile] = field(default_factory=dict)
    """Files of rows by the setting that names them: ``data.train``, or for instance ``data.sources.math.train``."""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    """Content of the model's ``config.json``, or ``model.config``."""
    model_types: ModelTypes = ModelTypes()
    """Permitted content of ``model.config``; empty if it was not read."""
    causal_types: frozenset[str] = frozenset()
    """Types of models that can be trained from a folder; empty if they were not read."""
    model_folder: ModelFolder | None = None
    """Set when ``model.path`` is."""
    reward_models: Mapping[str, RewardModelFolder] = field(default_factory=dict)
    """Reward models that score completions, by name; empty where nothing samples."""
    references: Mapping[str, ModelFolder] = field(default_factory=dict)
    """Reference models with folders of their own, by the setting that names them."""
    tokenizer_problem: str = ""
    """Reason why ``model.tokenizer`` is not a tokenizer folder; empty if it is one or names a kind that is built."""
    promote_folder: str = ""
    """Folder of promoted models; empty when nothing is to be promoted."""
    promote_problem: str = ""
    """Reason why it cannot be written; empty if it can."""
    resume: CheckpointFacts | None = None
    """Set when a run resumes from a checkpoint."""
    stored_version: str = ""
    """Version of rlhf-flows that created the run; empty for a new one."""
    plugins: tuple[Plugin, ...] = ()
    """Checks of the site."""
    site_slurm: SlurmSpec = field(default_factory=SlurmSpec)
    """Options of Slurm for all jobs of the site."""
    job_secrets: Path | None = None
    """File with values for ``slurm.pass_environment``."""
    passed_problem: str = ""
    """Reason why the job cannot get the secrets that it requests; empty if it can."""
    content: ContentReport | None = None
    """Report on the data itself; None if the data was not read."""
    content_problem: str = ""
    """Reason why the data was not read; empty if that was not asked for or another check reports it."""
    baseline: Baseline = Baseline()
    trainer: TrainerSide | None = None
    """Environment of an external trainer; None for the native trainer."""

    @property
    def slurm(self) -> SlurmSpec:
        """Options of the job, those of the site included."""
        return self.spec.slurm.over(self.site_slurm)

    @property
    def pairs_have_answers(self) -> bool:
        """False if the held-out rows are known to have no column of answers."""
        data, splits = self.spec.data, self.content.splits if self.content is not None else ()
        found = {one.setting: frozenset(one.columns) for one in splits if one.split == "eval" and not one.problem}
        for setting, file in self.files_of("eval").items():
            if file.scanned and not file.problem:
                found[setting] = file.columns
        return all(
            source.answer_column in found[f"{table}.eval"]
            for table, source in data.tables.items()
            if f"{table}.eval" in found
        )

    def files_of(self, split: Literal["train", "eval"]) -> dict[str, DataFile]:
        """Files of rows of one split, by setting."""
        return {name: file for name, file in self.files.items() if name.endswith(f".{split}")}

    def num_rows(self, split: SplitReport) -> int:
        """Rows of a split: all of a file that was scanned, otherwise those that were read."""
        file = self.files.get(split.setting)
        return max(split.num_rows, 0 if file is None else file.num_rows)

    @property
    def training_python(self) -> str:
        """The interpreter that trains."""
        return self.compute.python if self.trainer is None else self.trainer.python

    @property
    def training_packages(self) -> Mapping[str, str]:
        """Packages of the interpreter that trains: distribution name (normalised) to version."""
        return self.compute.packages if self.trainer is None else self.trainer.packages
