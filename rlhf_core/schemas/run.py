"""What a user asks for: the ``RunSpec`` and its sections, one per TOML table.

The string under a field is its meaning; it reaches ``rlhf run --help``, docs/configuration.md and the Prefect form.
Cross-field arithmetic (batch against ranks and so on) is a preflight check, not a validator, so that ``rlhf check`` can
show all findings at once; validators here refuse only what has no meaning at all.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rlhf_core.schemas.base import (
    Int32,
    Label,
    Message,
    Moment,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Schema,
    Share,
)
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.loops import LoopSpec, LoopsSpec
from rlhf_core.schemas.migration import current_document, current_name
from rlhf_core.schemas.reports import EvaluationName
from rlhf_core.schemas.rollouts import RolloutSpec
from rlhf_core.schemas.scoring_models import ModelName, ScoringModelSpec
from rlhf_core.schemas.site import is_private
from rlhf_core.schemas.slurm_values import Lines, NodeName, OneLine, SbatchOption, VariableName
from rlhf_core.schemas.trainers import NativeTrainer, Trainer

SCHEMA_VERSION = 2
"""Version of ``spec.json``. A worker refuses a version it does not know."""
READABLE_VERSIONS = (1, SCHEMA_VERSION)
"""Versions of ``spec.json`` that are read. The settings of version 1, of rlhf-flows 0.1, are translated."""

MAX_TAGS = 100
"""Most tags of a run."""
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
OptionalImportPath = Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")]


DataKind = Literal["answer", "pair", "label"]
"""Part of a row besides its prompt: an answer, a chosen and a rejected completion, or a label of its completion."""

BUILT_TOKENIZERS = ("char", "byte", "bpe")
"""Values of `model.tokenizer` that are built from the data; others are folders."""


ALL_LINEAR = "all-linear"
"""Value of `model.lora.target_modules` for every linear layer but the output layer, as in peft."""


class LoraSpec(Schema):
    """A LoRA adapter (Hu et al. 2021, arXiv 2106.09685), trained through peft in place of the model's own weights."""

    rank: Positive = 16
    """Rank of the two matrices beside each layer, `r` in peft."""
    alpha: PositiveFloat = 32.0
    """Scale of what they add, `lora_alpha` in peft: their product times alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's input, `lora_dropout` in peft. Only with algorithms that do not sample: those take
    log-probabilities of the very distribution that was sampled from."""
    target_modules: tuple[OneLine, ...] = (ALL_LINEAR,)
    """Linear layers that get an adapter, by the last part of their names (`q_proj`); `all-linear` for all but the
    output layer. Embeddings and output layers get none: many models tie them to each other."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, `use_rslora` in peft (arXiv 2312.03732): a high rank then learns as fast as
    a low one."""

    @model_validator(mode="after")
    def _names_targets(self) -> Self:
        if not self.target_modules or (ALL_LINEAR in self.target_modules and len(self.target_modules) > 1):
            raise ValueError(
                f"found model.lora.target_modules = {list(self.target_modules)}, expected names of layers, or "
                f'"{ALL_LINEAR}" alone'
            )
        return self


_ONE_MODEL = "of model.path and model.config; give exactly one of them"


class ModelSpec(Schema):
    """Which model is trained, and with which tokenizer."""

    path: str = ""
    """Folder of a Hugging Face model to start from; empty to build one from `model.config` with random weights."""
    config: dict[str, JsonValue] = {}
    """Transformers configuration of a model built from scratch: `model_type` and its arguments, for instance
    `hidden_size`."""
    tokenizer: str = ""
    """`char`, `byte` or `bpe` to build one from the training data, or a folder to load; empty takes the one in
    `model.path`."""
    tokenizer_vocab_size: Positive = 2048
    """Vocabulary size of a `bpe` tokenizer built here; other tokenizers ignore it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights during training."""
    lora: LoraSpec | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path and self.config:
            raise ValueError(f"found both {_ONE_MODEL}")
        if self.config and "model_type" not in self.config:
            raise ValueError('model.config needs a model_type, for instance model_type = "qwen3"')
        if self.config and not self.tokenizer:
            raise ValueError('a model built from model.config needs model.tokenizer: "char", "byte", "bpe" or a folder')
        return self


class DataSpec(Schema):
    """Where prompts and answers come from."""

    train: str = ""
    """Training data: a `.jsonl`, `.parquet` or `.csv` file with one row per prompt; empty when `data.generator` makes
    it."""
    eval: str = ""
    """Held-out data in the same format, never trained on."""
    generator: OptionalImportPath = ""
    """`module:function` that makes both splits instead of files; called as `function(split, seed,
    **data.generator_args)`."""
    generator_args: dict[str, JsonValue] = {}
    """Arguments of the generator."""
    prompt_column: str = "prompt"
    """Column that holds the prompt."""
    answer_column: str = "answer"
    """Column that holds the reference answer. An algorithm that learns from pairs alone does without."""
    chosen_column: str = "chosen"
    """Column that holds the better completion of a pair, for an algorithm that learns from pairs."""
    rejected_column: str = "rejected"
    """Column that holds the worse completion of a pair."""
    label_column: str = "label"
    """Column that says whether the completion (`data.completion_template`) is desirable, for an algorithm that learns
    from labelled completions: true or false, 1 or 0."""
    margin_column: str = ""
    """Column that holds by how much the better completion of a pair is better, for a reward model; empty for none."""
    prompt_template: str = "{prompt}"
    """Text given to the model; `{column}` is replaced by that column of the row."""
    completion_template: str = "{answer}"
    """Text that supervised training teaches after the prompt; `{column}` is replaced likewise."""
    chosen_template: str = "{chosen}"
    """Text of the better completion of a pair; `{column}` is replaced likewise."""
    rejected_template: str = "{rejected}"
    """Text of the worse completion of a pair; `{column}` is replaced likewise."""
    max_prompt_tokens: Positive = 512
    """Longest prompt in tokens."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What to do with longer prompts: leave the row out (counted and shown), or stop."""
    max_completion_tokens: NonNegative = 0
    """Longest completion that is learned from, in tokens; 0 for no limit. Both of a pair have to fit."""
    overlong_completions: Literal["drop", "error"] = "drop"
    """Policy for rows whose completions are longer: leave the row out (counted and shown), or stop."""
    malformed_rows: Literal["error", "drop"] = "error"
    """What to do with lines that are not valid: stop with file and line number, or leave them out (counted and
    shown)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.generator and (self.train or self.eval):
            raise ValueError("found data.generator and data.train/data.eval; give either the generator or the files")
        return self


_REWARD_METRICS = frozenset(
    {"mean", "std", "max", "min", "failed_share", "cut_share", "length_correlation", "length_slope"}
)
"""Metrics of all rewards together."""


class RewardSpec(Schema):
    """What a completion is worth."""

    functions: tuple[ImportPath, ...] = ("rlhf_core.training.rewards:exact_match",)
    """Reward functions as `module:function`; called as `function(prompts=, completions=, **columns)`, each returning
    one number per completion. They count beside `reward.models`; give an empty list for reward models alone."""
    weights: tuple[float, ...] = ()
    """Weight of each function in the sum; empty for 1 each. One with weight 0 is only measured."""
    models: dict[ModelName, ScoringModelSpec] = {}
    """Reward models by name, each a table `[reward.models.<name>]` with the settings below."""
    timeout_s: NonNegativeFloat = 180.0
    """Longest call of one function, for all completions of a rank in one step, in seconds. Functions run in a process
    beside each rank; one that takes longer is killed there with all that it has started. 0 calls them in the trainer's
    own process, without a limit: one that hangs or crashes takes the rank along."""
    on_failure: Literal["stop", "zero"] = "stop"
    """Consequence of a function that raises, crashes, takes too long or returns no number for a completion: `stop` the
    run with an error that names the completion, or count the completion as `zero`, warn and go on."""
    max_failed_share: Share = 0.1
    """Share of a rank's completions of one step that may be counted as zero; more of them stop the run. One always
    may."""

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if not self.functions and not self.models:
            raise ValueError(
                "found neither reward.functions nor reward.models; give at least one module:function, or a "
                "reward model as [reward.models.<name>]"
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"found {len(self.weights)} reward.weights for {len(self.functions)} reward.functions; "
                f"give one each, or none"
            )
        return self

    @model_validator(mode="after")
    def _metrics_have_one_meaning(self) -> Self:
        taken = _REWARD_METRICS | {function.partition(":")[2] for function in self.functions}
        for name in self.models:
            if name in taken:
                raise ValueError(
                    f"found reward.models.{name}, but reward/{name} is another metric; choose another name"
                )
        return self


class EvaluateSpec(Schema):
    """How the model is measured on held-out data, before and after training."""

    scorer: ImportPath = "rlhf_core.training.rewards:exact_match"
    """Reward function whose mean is reported."""
    num_prompts: NonNegative = 512
    """Held-out prompts used, the first of the split; 0 for all."""
    samples_per_prompt: Positive = 1
    """Completions per prompt in the sampled evaluation."""
    temperature: PositiveFloat = 1.0
    """Temperature of the sampled evaluation; the greedy one always takes the likeliest token."""
    every_num_steps: NonNegative = 0
    """Also evaluate greedily every so many steps during training, as metric `eval/greedy`; 0 for never."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Level of the reported confidence interval."""
    keep_samples: NonNegative = 64
    """Scored completions kept in the sample table of each evaluation."""


class CheckpointSpec(Schema):
    """When training state is saved."""

    every_num_steps: Positive = 10
    """Steps between checkpoints; the end of the warm start and the last step are saved as well."""
    keep_last: Positive = 2
    """Newest checkpoints kept; the one at the end of the warm start, the last one of training, and up to two that are
    older (to go back to before the last `health.window_steps` steps) are kept as well."""
    background: bool = True
    """Write from a snapshot in main memory while training goes on: the step waits for the copy only. Without room for
    it, or with weights that are converted for the disk, the step waits until all is written. Only for `native`."""
    memory: Literal["off", "own"] = "own"
    """Copy of the newest checkpoint that outlives the workers in main memory, from which a restart in place goes on
    without the file system: none, or the snapshot of each node on that node (in `/dev/shm`). Only for `native`."""


class ResourceSpec(Schema):
    """What the run needs of the cluster."""

    num_nodes: Positive = 1
    """Nodes."""
    min_nodes: NonNegative = 0
    """Fewest nodes that an attempt goes on with where the cluster cannot give `num_nodes` (nodes are down, drained or
    excluded). It asks for as many as there are and the batch divides by; the global batch stays, and a later attempt
    asks for all nodes again when they are back. 0 always waits for all of them."""
    ranks_per_node: Positive = 1
    """Trainer ranks on every node: one per GPU, or per group of cores on CPU."""
    gpus_per_node: NonNegative = 0
    """GPUs on every node; 0 trains on CPU with gloo."""
    cpus_per_rank: Positive = 1
    """Processor cores per rank."""
    memory_gb: NonNegativeFloat = 0.0
    """Main memory per node in GiB; 0 leaves it to the scheduler."""
    time_limit_s: Positive = 86_400
    """Longest life of one attempt in seconds."""

    @model_validator(mode="after")
    def _least_is_least(self) -> Self:
        if self.min_nodes > self.num_nodes:
            raise ValueError(
                f"found resources.min_nodes = {self.min_nodes} and resources.num_nodes = {self.num_nodes}; expected no "
                f"more than these"
            )
        return self


class SlurmSpec(Schema):
    """What a Slurm job asks for besides nodes, GPUs, cores, memory and time. The site's own values come first."""

    partition: OneLine = ""
    """Partition; empty for the cluster's default."""
    account: OneLine = ""
    """Account that pays."""
    qos: OneLine = ""
    """Quality of service."""
    constraint: OneLine = ""
    """Features that nodes must have, as `sbatch --constraint` takes them."""
    gpu_type: OneLine = ""
    """Type of GPU, as in `gpu:h100:8`; empty for any."""
    gres: OneLine = ""
    """Further generic resources, as `sbatch --gres` takes them."""
    reservation: OneLine = ""
    """Reservation to run in."""
    exclude: tuple[NodeName, ...] = ()
    """Nodes never to be used; suspects of failures are added by themselves."""
    setup: tuple[Lines, ...] = ()
    """Shell lines run on every job before its agents, for instance `module load cuda`."""
    container_kind: Literal["", "pyxis", "apptainer"] = ""
    """Run the agents in a container: through `srun --container-image` (pyxis) or `apptainer exec`."""
    container_image: OneLine = ""
    """Image of that container."""
    container_mounts: tuple[OneLine, ...] = ()
    """Mounts, each `from:to`; the run directory is mounted by itself."""
    environment: dict[VariableName, Lines] = {}
    """Variables set for the agents and workers; they are stored and shown like any setting."""
    pass_environment: tuple[VariableName, ...] = ()
    """Names of variables whose values are secret: taken at submission from the environment of whoever submits, or from
    the file `RLHF_JOB_SECRETS`, and handed to the job with any scheduler; nothing stores or shows them."""
    save_lead_s: Positive = 120
    """How long before the time limit Slurm asks to save, in seconds; Slurm counts in minutes and may come early."""
    extra: tuple[SbatchOption, ...] = ()
    """Further `sbatch` options, each as `--option=value`."""

    def over(self, site: "SlurmSpec") -> "SlurmSpec":
        """These settings, and the site's where nothing else is said here; of lists and variables, both."""
        changed = {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        }
        both = {
            "exclude": (*site.exclude, *self.exclude),
            "setup": (*site.setup, *self.setup),
            "container_mounts": (*site.container_mounts, *self.container_mounts),
            "extra": (*site.extra, *self.extra),
            # Where one of them says that a variable is a secret, and the other gives it openly, the run decides.
            "environment": {
                **{name: value for name, value in site.environment.items() if name not in self.pass_environment},
                **self.environment,
            },
            "pass_environment": tuple(
                name
                for name in dict.fromkeys((*site.pass_environment, *self.pass_environment))
                if name not in self.environment
            ),
        }
        return site.model_copy(update={**changed, **both})

    @model_validator(mode="after")
    def _is_passed_one_way(self) -> Self:
        for name in self.pass_environment:
            if name in self.environment:
                raise ValueError(
                    f"found {name} in slurm.environment and slurm.pass_environment; give it in one of them"
                )
            if is_private(name):
                raise ValueError(f"slurm.pass_environment names {name}, which no job may have: it is the site's own")
        return self

    @model_validator(mode="after")
    def _whole_container(self) -> Self:
        if bool(self.container_kind) != bool(self.container_image):
            raise ValueError("found one of slurm.container_kind and slurm.container_image; give both or neither")
        return self


class SuperviseSpec(Schema):
    """How failures are found and how often they are retried."""

    max_restarts: NonNegative = 3
    """Restarts in place without checkpoint progress before the allocation is given up."""
    max_attempts: Positive = 3
    """Attempts in a row without checkpoint progress before the run is stopped; a new checkpoint sets the count back."""
    max_total_attempts: NonNegative = 0
    """Attempts in all, whatever progress they make, since a person last started or resumed the run; 0 for no cap."""
    max_gpu_hours: NonNegativeFloat = 0.0
    """GPU-hours of all attempts together, counted likewise; 0 for no cap. The time limit of an attempt is at most what
    is left, so that it saves and ends in time; on Slurm, which counts in minutes, it may be up to a minute longer."""
    max_node_hours: NonNegativeFloat = 0.0
    """The same in node-hours, for runs on processors."""
    backoff_s: NonNegativeFloat = 30.0
    """Wait before the second attempt; doubles with each further one, up to `supervise.max_backoff_s`."""
    max_backoff_s: NonNegativeFloat = 600.0
    """Longest wait before a new attempt."""
    gap_factor: Annotated[float, Field(ge=1)] = 5.0
    """A worker hangs when it has not beaten for this many times the longest gap seen in the same phase, or for the
    floor, whichever is longer."""
    suspect_s: PositiveFloat = 10.0
    """Silence after which a worker that has been through its phase before is looked at, in seconds; what provably
    stands still is ended then, all else has until its floor."""
    floor_s: PositiveFloat = 120.0
    """Silence that is never taken for a hang in any phase without a floor of its own, in seconds."""
    rollout_floor_s: PositiveFloat = 180.0
    """The same while completions are generated."""
    reward_floor_s: PositiveFloat = 180.0
    """The same while reward functions run."""
    weight_sync_floor_s: PositiveFloat = 120.0
    """The same while weights go to rollout engines."""
    checkpoint_floor_s: PositiveFloat = 600.0
    """The same while a checkpoint is written."""
    evaluate_floor_s: PositiveFloat = 180.0
    """The same while the model is evaluated."""
    setup_floor_s: PositiveFloat = 900.0
    """The same while a worker imports, compiles and loads."""
    evidence_s: PositiveFloat = 10.0
    """Longest time for collecting evidence on all nodes before the workers of a hung job are ended, in seconds."""
    agent_floor_s: PositiveFloat = 20.0
    """Silence of a node's agent on the network after which the attempt is given up, in seconds."""
    max_excluded_nodes: NonNegative = 4
    """Most nodes that suspicion may keep out of a new attempt; never so many that it could not be placed."""
    warm_workers: bool = True
    """Keep processes ready on every node that have imported torch, transformers and DeepSpeed, one for each worker: a
    restart in place takes them over. None are kept where memory is short."""
    learn_from_history: bool = True
    """Begin with the longest gaps of earlier runs of the same shape, instead of learning them anew."""
    oom_remediation: bool = True
    """After CUDA ran out of memory, go on with half the micro-batch and the same global batch, then with activation
    checkpointing, and so on; each change is recorded with the decision."""
    rollback_on_non_finite: bool = True
    """After a NaN or infinite loss, or training that no longer learns, go on once from an older checkpoint than the
    newest."""


HealthRule = Literal[
    "identical",
    "frozen",
    "reward_collapse",
    "no_spread",
    "truncated",
    "entropy_collapse",
    "clipped",
    "train_gap",
    "kl",
    "length",
]
"""Rules that judge training while it runs (``rlhf_core/training/health.py``), the most telling first. Of another
program ``frozen``, ``no_spread``, ``truncated`` and ``kl`` are judged (``rlhf_core/worker/command/health.py``)."""
HealthAction = Literal["warn", "stop", "roll_back"]
"""Consequence of a finding."""
_WARNINGS: frozenset[HealthRule] = frozenset({"clipped", "train_gap", "kl", "length"})


class HealthSpec(Schema):
    """Judgement of training: one that learns nothing goes back once to an older checkpoint, then the run stops; one
    that merely looks wrong gets a warning."""

    off: dict[HealthRule, str] = {}
    """Rules that are not applied: `identical`, `frozen`, `reward_collapse`, `no_spread`, `truncated`,
    `entropy_collapse`, `clipped`, `train_gap`, `kl` or `length` to the reason, which is kept with the run."""
    actions: dict[HealthRule, HealthAction] = {}
    """Consequences of rules: `warn` (an incident that leaves the run going), `stop` the run, or `roll_back` (go on
    once from an older checkpoint, then stop). Without an entry `clipped`, `train_gap`, `kl` and `length` warn and the
    others roll back. Training by another program is only warned of."""
    window_steps: Positive = 20
    """Steps over which reward, spread, entropy and truncation are judged: healthy runs have dips of some steps, and
    what is still gone after twenty does not come back."""
    frozen_steps: Positive = 5
    """Steps in a row without a gradient although rewards differ, or without any change of the weights, after which
    training is ended: one may be rounding, in five nothing has been learned."""
    min_completions: Positive = 4096
    """Completions without any difference in reward before that counts: a task that is solved once in a thousand times
    has shown it by then (the chance that it has not is under 2 %)."""
    identical_chance: Annotated[float, Field(gt=0, lt=1)] = 1e-9
    """Chance, judged by the policy's entropy, below which identical completions are no accident: no run has a thousand
    million steps, and a policy that is certain of its answers may repeat them."""
    collapsed_share: Share = 0.2
    """A reward that has kept no more than this share of its own best, above the lowest reward seen, has collapsed:
    healthy runs lose a half at times and win it back."""
    entropy_share: Share = 0.01
    """An entropy below this share of what it began with, without a gain in reward, is the end of exploration: a policy
    that learns gives up entropy too, but for reward."""
    truncated_share: Share = 0.99
    """Share of completions cut off at `rollout.max_new_tokens` from which on, without any reward, nothing is ever
    finished: a few that end are enough to learn from."""
    max_kl: PositiveFloat = 10.0
    """Divergence from the reference model, in nats per token, above which a model is far from anything that it was:
    healthy runs stay below 1, and 10 leaves the likely tokens a chance of 1 in 20,000."""
    max_train_gap: PositiveFloat = 0.1
    """Mean difference between the log-probabilities of tokens at sampling and in training, in nats, above which the two
    do not have the same model: bfloat16 makes 0.01, and at 0.1 every token's gradient is a tenth off."""
    clipped_share: Share = 0.9
    """Share of tokens whose gradient the clip has taken away, from which on nothing is left to learn from: healthy runs
    stay below a third."""
    length_correlation: Share = 0.8
    """Correlation of reward and length among the completions of a prompt, from which on the reward is little else than
    length: of a reward for right answers it is under 0.5 either way."""
    length_rise: PositiveFloat = 0.25
    """Rise of the mean length, as a share of what it was, that is more than chance and the form of the answer."""

    def action(self, rule: HealthRule) -> HealthAction:
        """Consequence of a finding of this rule."""
        return self.actions.get(rule, "warn" if rule in _WARNINGS else "roll_back")


class PreflightSpec(Schema):
    """What is looked at before training, and how strictly."""

    off: dict[str, str] = {}
    """Checks that are not made: id of the check to the reason, which is kept with the run."""
    probe: bool = True
    """Compare the nodes of every attempt and measure them, before its workers start."""
    trial: Literal["off", "propose", "run"] = "propose"
    """When data, algorithm, versions or scale have changed since the last good run of this name: `propose` a short
    trial, `run` one by itself (one node, then all nodes, a few steps each), or neither."""
    trial_steps: Positive = 3
    """Steps of a trial."""
    per_node_variables: tuple[str, ...] = ()
    """Environment variables that may differ between nodes, besides those that always do; `*` stands for any text."""
    max_clock_offset_s: PositiveFloat = 5.0
    """Largest difference between the clocks of two nodes, in seconds."""
    min_free_disk_gb: NonNegativeFloat = 1.0
    """Least room in the temporary folder and the shared memory of every node, in GiB."""
    min_relative_speed: Share = 0.5
    """A node slower than this share of the median of all nodes, or of its own earlier readings, is not trained on; 0
    to only measure."""
    min_bandwidth_gb_s: NonNegativeFloat = 0.0
    """Least bandwidth between two nodes, in GB/s; 0 for no floor of its own."""
    max_latency_ms: NonNegativeFloat = 0.0
    """Largest time of a small message to another node and back, in milliseconds; 0 for no limit of its own."""
    min_matmul_tflops: NonNegativeFloat = 0.0
    """Least speed of matrix products per rank, in TFLOP/s; 0 for no floor of its own."""
    meet_s: PositiveFloat = 60.0
    """How long the first node waits for the others, in seconds; then it names who has not come."""
    probe_s: PositiveFloat = 60.0
    """Longest time for all measurements together, in seconds; what does not answer until then is named."""


class PromoteSpec(Schema):
    """Whether the best checkpoint becomes a model directory that others may use."""

    when: Literal["never", "approved", "always"] = "never"
    """`never`; `approved`: after the evaluation the run waits for a person (Prefect, or `rlhf approve`); `always`:
    nobody is asked."""
    folder: str = ""
    """Folder of promoted models; each becomes `<folder>/<run id>`. Empty: `promoted` beside the run directories."""
    metric: EvaluationName = "greedy"
    """Evaluation that decides which checkpoint is the best; `preference` ranks held-out pairs."""
    min_gain: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Least gain over the evaluation before training; with less nobody is asked and nothing is promoted."""
    timeout_h: PositiveFloat = 72.0
    """How long a person may take, in hours; after that nothing is promoted, but `rlhf approve` still can."""


class CodeSpec(Schema):
    """User code that the run needs."""

    paths: tuple[str, ...] = ()
    """Python files and packages copied into the run directory and importable on the nodes; modules of reward functions
    that lie in the current folder are added by themselves."""


class RunSpec(Schema):
    """A whole run. Each field is one TOML table, but for the name and the seed."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    """Short name: lower-case letters, digits, `-` and `_`; runs of the same name are compared with each other."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Everything random follows from it."""
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    loops: LoopsSpec = LoopsSpec()
    rollout: RolloutSpec = RolloutSpec()
    reward: RewardSpec = RewardSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    trainer: Trainer = NativeTrainer()
    resources: ResourceSpec = ResourceSpec()
    slurm: SlurmSpec = SlurmSpec()
    preflight: PreflightSpec = PreflightSpec()
    supervise: SuperviseSpec = SuperviseSpec()
    health: HealthSpec = HealthSpec()
    promote: PromoteSpec = PromoteSpec()
    code: CodeSpec = CodeSpec()

    @model_validator(mode="before")
    @classmethod
    def _translated(cls, content: Any) -> Any:
        if not isinstance(content, Mapping):
            return content
        content = current_document(content)
        trainer = content.get("trainer")
        if isinstance(trainer, Mapping) and "kind" not in trainer:
            return {**content, "trainer": {"kind": "native", **trainer}}
        return content

    @model_validator(mode="after")
    def _has_what_its_trainer_needs(self) -> Self:
        if isinstance(self.trainer, CommandTrainer):
            given = ", ".join(f"loops.{name}" for name in self.loops.named)
            if given:
                raise ValueError(f'found {given} and trainer.kind = "command", whose loop is in its own arguments')
            if self.model.lora is not None:
                raise ValueError('found model.lora and trainer.kind = "command", whose adapter is in its own arguments')
            return self
        lacks = []
        if not self.model.path and not self.model.config:
            lacks.append(f"found neither {_ONE_MODEL}")
        if not self.data.generator and not self.data.train:
            lacks.append("no training data: give data.train (a file) or data.generator (module:function)")
        if self.loops.main is None:
            lacks.append("found no [loops.main], expected the algorithm, num_steps and optimizer of the training")
        if lacks:
            raise ValueError("; ".join(lacks))
        return self

    @model_validator(mode="after")
    def _samples_what_it_trains(self) -> Self:
        if self.model.lora is not None and self.model.lora.dropout:
            for name, loop in self.loops.named.items():
                if loop.algorithm.samples:
                    raise ValueError(
                        f"found model.lora.dropout = {self.model.lora.dropout:g} and loops.{name} with "
                        f"{loop.algorithm.name}, which samples; expected 0: with dropout, training would take "
                        f"log-probabilities of another distribution than was sampled from"
                    )
        return self

    @model_validator(mode="after")
    def _sums_gradients_in_float32(self) -> Self:
        if isinstance(self.trainer, NativeTrainer) and self.trainer.zero_stage == 0 and self.model.dtype != "float32":
            raise ValueError(
                f'found trainer.zero_stage = 0 with model.dtype = "{self.model.dtype}", for which DeepSpeed sums '
                f"gradients in that format; expected zero_stage = 1 or more, which sums them in float32"
            )
        return self

    @model_validator(mode="after")
    def _cap_counts_something(self) -> Self:
        if self.supervise.max_gpu_hours and not self.resources.gpus_per_node:
            raise ValueError(
                "found supervise.max_gpu_hours and resources.gpus_per_node = 0: there are no GPU-hours to count; give "
                "supervise.max_node_hours"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Trainer ranks over all nodes."""
        return self.resources.num_nodes * self.resources.ranks_per_node

    @property
    def possible_nodes(self) -> tuple[int, ...]:
        """Numbers of nodes that an attempt may have, most first: from ``resources.min_nodes`` on those that the rows of
        a step divide by in every loop. Another program cuts its batch by its own arguments: it has all of them."""
        most, least = self.resources.num_nodes, self.resources.min_nodes
        if not least or isinstance(self.trainer, CommandTrainer):
            return (most,)
        rows = [loop.algorithm.rows_per_step for loop in self.loops.named.values()]
        fewer = range(most - 1, least - 1, -1)
        divides = (n for n in fewer if not any(count % (n * self.resources.ranks_per_node) for count in rows))
        return (most, *(n for n in divides if self.rollout.layout(n) is not None))

    @property
    def processes_per_node(self) -> int:
        """Trainer ranks and rollout engines that a node has at most."""
        layout = self.rollout.layout(self.resources.num_nodes)
        return self.resources.ranks_per_node + (layout.per_node if layout is not None else 0)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run: warm start and main loop."""
        if isinstance(self.trainer, CommandTrainer):
            return self.trainer.num_steps
        return self.warm_start_steps + self.main_loop.num_steps

    @property
    def main_loop(self) -> LoopSpec:
        """The main loop of the native trainer.

        Raises:
            ValueError: the trainer is another program.
        """
        if self.loops.main is None:
            raise ValueError(f"a run with trainer.kind = {self.trainer.kind} has no loops of its own")
        return self.loops.main

    @property
    def native_trainer(self) -> NativeTrainer:
        """Settings of the native trainer.

        Raises:
            ValueError: the trainer is another program.
        """
        if not isinstance(self.trainer, NativeTrainer):
            raise ValueError(f"a run with trainer.kind = {self.trainer.kind} has no settings of the native trainer")
        return self.trainer

    @property
    def algorithm(self) -> str:
        """Name of the algorithm of the main loop."""
        return self.trainer.algorithm if isinstance(self.trainer, CommandTrainer) else self.main_loop.algorithm.name

    @property
    def samples(self) -> bool | None:
        """True if the main loop samples completions; None where only the program that trains knows."""
        return None if isinstance(self.trainer, CommandTrainer) else self.main_loop.algorithm.samples

    @property
    def data_kinds(self) -> frozenset[DataKind]:
        """Parts of each row, besides its prompt, that the loops need; of another program, what its evaluation needs."""
        if isinstance(self.trainer, CommandTrainer):
            return frozenset({"answer"})
        algorithms = [loop.algorithm for loop in self.loops.named.values()]
        kinds: set[DataKind] = {"pair" if algorithm.pairs else "answer" for algorithm in algorithms}
        return frozenset(kinds | ({"label"} if any(algorithm.labelled for algorithm in algorithms) else set()))

    @property
    def evaluations(self) -> tuple[EvaluationName, ...]:
        """Evaluations that are certain to be made: completions are also scored where held-out pairs have answers."""
        kinds, ranks = self.data_kinds, self.loops.main is not None and self.loops.main.algorithm.ranks_completions
        made: tuple[EvaluationName, ...] = ("greedy", "sampled") if self.has_references and not ranks else ()
        return (*made, "preference") if kinds & {"pair", "label"} else made

    @property
    def has_references(self) -> bool:
        """True if every row has an answer that is right: a labelled one need not be, where it is the completion."""
        return "answer" in self.data_kinds and not (
            "label" in self.data_kinds and "{answer}" in self.data.completion_template
        )

    @property
    def is_evaluated(self) -> bool:
        """True if the model is measured on held-out data."""
        return not isinstance(self.trainer, CommandTrainer) or bool(self.data.eval or self.data.generator)

    @property
    def warm_start_steps(self) -> int:
        """Optimizer steps before the main loop; 0 without a warm start."""
        return self.loops.warm_start.num_steps if self.loops.warm_start else 0


_SHAPING = {
    *("kind", "micro_batch_size", "micro_batch_tokens", "gradient_checkpointing", "zero_stage", "offload"),
    *("framework", "argv"),
}
"""Settings of trainers that decide how a step is cut up."""


def shape_key(spec: RunSpec) -> str:
    """Hash of what decides how long a run is silent in each phase: model, generation, how a batch is cut up, nodes.

    Runs of the same shape learn from each other how long a silence may be.
    """
    part: dict[str, Any] = spec.model_dump(
        mode="json",
        include={
            "model": True,
            "rollout": True,
            "reward": {"functions", "weights"},
            "trainer": _SHAPING,
            "resources": {"num_nodes", "ranks_per_node", "gpus_per_node"},
        },
    )
    part["algorithm"] = [spec.algorithm]
    if spec.loops.main is not None:
        algorithm = spec.loops.main.algorithm
        part["algorithm"] += [algorithm.rows_per_step, algorithm.group]
    return hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=8).hexdigest()


def with_changes(spec: RunSpec, changes: Mapping[str, JsonValue]) -> RunSpec:
    """A spec with some settings changed.

    Args:
        spec: What was asked for.
        changes: Dotted name to new value, for instance ``trainer.micro_batch_size`` to 4. Names of rlhf-flows 0.1 are
            translated.

    Raises:
        ValueError: a changed setting has no meaning (pydantic's ``ValidationError`` is one).
    """
    if not changes:
        return spec
    content = spec.model_dump(mode="json")
    for name, value in changes.items():
        *sections, field = current_name(name).split(".")
        table = content
        for section in sections:
            table = table[section]
        table[field] = value
    return RunSpec.model_validate(content)


class StoredSpec(Schema):
    """Content of ``spec.json``: the resolved spec and where it came from. Written once."""

    schema_version: Int32 = SCHEMA_VERSION
    """Version of this file's form."""
    run_id: Label
    """Identity of the run."""
    created_at: Moment
    """When it was asked for (UTC)."""
    owner: Label
    """Name of the person who asked, as was said."""
    owner_account: Label = ""
    """The operating system's user that said so, or that it came through Prefect, where anybody can say any name. Empty
    in files of rlhf-flows 0.1."""
    config_source: Message
    """The config file it came from, as given."""
    overrides: tuple[Message, ...] = ()
    """The ``--set`` overrides, as given."""
    package_version: Label
    """Version of rlhf-flows."""
    code_revision: Label = ""
    """Git revision of the folder it was started from, with ``-dirty`` if it had changes; of a preset that was started
    outside a repository, that of the program's own checkout. Empty without either."""
    trial_of: Label = ""
    """Run that this one tries out first; empty for a run of its own."""
    tags: tuple[Label, ...] = ()
    """Words to find it by."""
    flow_run_id: Label = ""
    """Prefect flow run that made it; one that is tried again finds its run by this. Empty without Prefect."""
    spec: RunSpec
    """The resolved spec."""
