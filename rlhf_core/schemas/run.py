"""Request for a run: the ``RunSpec`` and its sections, one per TOML table.

The string under a field is its description in ``rlhf config show --help``, docs/configuration.md and the Prefect form.
Cross-field arithmetic (batch against ranks and so on) is a preflight check, not a validator, so that ``rlhf check`` can
show all findings at once; validators here reject only meaningless settings.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.checkpoints import CheckpointSpec
from rlhf_core.schemas.cluster import ResourceSpec, SlurmSpec
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.data import DataKind, DataSpec
from rlhf_core.schemas.evaluation import EvaluateSpec, EvaluationName, PromoteSpec
from rlhf_core.schemas.health import HealthSpec
from rlhf_core.schemas.loops import LoopSpec, LoopsSpec
from rlhf_core.schemas.migration import current_document
from rlhf_core.schemas.model import BUILT_TOKENIZERS, ONE_MODEL_SOURCE, ModelSpec
from rlhf_core.schemas.preflight import PreflightSpec
from rlhf_core.schemas.rewards import COMPARE_ANSWERS, RewardSpec
from rlhf_core.schemas.rollouts import RolloutSpec
from rlhf_core.schemas.scoring_models import ScoringModelSpec
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.schemas.trainers import NativeTrainer, Trainer

NEWEST_RUN = "last"
"""Word for the newest run where commands take the name of one."""


class CodeSpec(Schema):
    """User code that the run needs."""

    paths: tuple[str, ...] = ()
    """Python files, packages and other files to copy into the run directory, importable on the nodes. Modules of reward
    functions, tools and environments in the current folder are added automatically. Code does not start in that folder:
    it opens files of its own by absolute paths, or beside its own copy (`Path(__file__).parent`) if they are listed
    here."""


class RunSpec(Schema):
    """Settings of a run. Each field except the name and the seed is one TOML table."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    """Short name of lower-case letters, digits, `-` and `_`, but not `last`. Runs with the same name are compared
    with each other."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random numbers."""
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
                raise ValueError(f'found {given} and trainer.kind = "command", which has its loop in its own arguments')
            if self.data.sources:
                raise ValueError('found data.sources and trainer.kind = "command", which mixes its data itself')
            if self.model.lora is not None:
                raise ValueError(
                    'found model.lora and trainer.kind = "command", which has its adapter in its own arguments'
                )
            return self
        lacks = []
        if not self.model.path and not self.model.config:
            lacks.append(f"found neither {ONE_MODEL_SOURCE}")
        if not (self.data.generator or self.data.train or self.data.sources):
            lacks.append("no training data: give data.train (a file), data.sources or data.generator (module:function)")
        if self.loops.main is None:
            lacks.append("found no [loops.main], expected the algorithm, length and optimizer of the training")
        if lacks:
            raise ValueError("; ".join(lacks))
        return self

    @model_validator(mode="after")
    def _has_pairs_in_columns_of_their_own(self) -> Self:
        for name, loop in self.loops.named.items():
            sources = (self.data, *self.data.sources.values())
            if any(one.messages_column for one in sources) and loop.algorithm.pairs:
                raise ValueError(
                    f"found data.messages_column and loops.{name} with {loop.algorithm.name}, which learns from pairs; "
                    "name the columns of whole conversations in data.chosen_column and data.rejected_column instead"
                )
        return self

    @model_validator(mode="after")
    def _samples_what_it_trains(self) -> Self:
        if self.model.lora is not None and self.model.lora.dropout:
            for name, loop in self.loops.named.items():
                if loop.algorithm.samples:
                    raise ValueError(
                        f"found model.lora.dropout = {self.model.lora.dropout:g} and loops.{name} with "
                        f"{loop.algorithm.name}, which samples; expected 0: with dropout, training would compute "
                        "log-probabilities of a different distribution than that used in sampling"
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
                "found supervise.max_gpu_hours and resources.gpus_per_node = 0: there are no GPU-hours to count; set "
                "supervise.max_node_hours"
            )
        return self

    @model_validator(mode="after")
    def _has_nodes_that_train(self) -> Self:
        if self.num_trainer_nodes < 1:
            raise ValueError(
                f"found rollout.nodes = {self.rollout.nodes} and resources.num_nodes = {self.resources.num_nodes}, "
                "which includes them: no node would train; expected at least resources.num_nodes = "
                f"{self.rollout.nodes + 1}, or fewer in rollout.nodes"
            )
        return self

    @model_validator(mode="after")
    def _has_the_answers_that_it_needs(self) -> Self:
        algorithms = [loop.algorithm for loop in self.loops.named.values()]
        only_pairs = bool(algorithms) and all(algorithm.pairs for algorithm in algorithms)  # then not completed
        used = set(self.reward.functions if self.any_loop_samples else ())
        if self.is_evaluated and self.evaluate.completions and not only_pairs:
            used.add(self.evaluate.scorer)
        needs = sorted(used & COMPARE_ANSWERS)
        needs += [algorithm.name for algorithm in algorithms if not (algorithm.samples or algorithm.pairs)]
        if needs and not self.data.answer_column:
            raise ValueError(
                f'found data.answer_column = "", but answers are needed by {", ".join(needs)}; set the column, or use '
                "other reward.functions and another evaluate.scorer"
            )
        return self

    @model_validator(mode="after")
    def _has_its_scorer(self) -> Self:
        name = self.evaluate.scorer_model
        if name and name not in self.reward.models:
            raise ValueError(
                f"found evaluate.scorer = {self.evaluate.scorer}, and no table [reward.models.{name}]; add it, or name "
                f"one of: {', '.join(self.reward.models) or 'none'}"
            )
        if name and self.makes_reward_model:
            raise ValueError(
                f"found evaluate.scorer = {self.evaluate.scorer}, and a main loop that trains a reward model, which "
                "writes no completions to score; leave evaluate.scorer out"
            )
        return self

    @model_validator(mode="after")
    def _has_one_source_of_tools(self) -> Self:
        turns, longest = self.rollout.turns, self.evaluate.max_new_tokens
        if not turns.are_used:
            return self
        for table, source in self.data.tables.items():
            if source.tools_column:
                raise ValueError(
                    f"found {table}.tools_column = {source.tools_column!r} and rollout.turns, whose functions the "
                    "model is told of; expected one of them: the tools of a column are descriptions alone, which "
                    "nothing can call"
                )
        if 0 < longest < turns.max_turn_tokens:
            raise ValueError(
                f"found evaluate.max_new_tokens = {longest} and rollout.turns.max_turn_tokens = "
                f"{turns.max_turn_tokens}; expected room for a turn in an evaluation"
            )
        return self

    @property
    def scoring_models(self) -> Mapping[str, ScoringModelSpec]:
        """Reward models in use: all of them if completions are sampled in training, otherwise only the one that scores
        evaluations."""
        used: Collection[str] = self.reward.models if self.any_loop_samples else {self.evaluate.scorer_model}
        return {name: model for name, model in self.reward.models.items() if name in used}

    @property
    def references(self) -> Mapping[str, str]:
        """Folders of reference models of their own, by the setting that names them."""
        named = self.loops.named.items()
        return {f"loops.{name}.reference": loop.reference for name, loop in named if loop.reference}

    @property
    def paths(self) -> Mapping[str, str]:
        """Files and folders of data and models that the run reads, by the setting that names each. Before it is
        created, that of a model may be the name of promoted ones."""
        tokenizer = "" if self.model.tokenizer in BUILT_TOKENIZERS else self.model.tokenizer
        given = {
            "model.path": self.model.path,
            "model.tokenizer": tokenizer,
            **self.data.files,
            **{f"reward.models.{name}.path": one.path for name, one in self.reward.models.items()},
            **self.references,
        }
        return {setting: path for setting, path in given.items() if path}

    @property
    def num_trainer_nodes(self) -> int:
        """Number of nodes with trainer ranks, the first of the allocation, without ``rollout.nodes``."""
        return self.resources.num_nodes - self.rollout.nodes

    @property
    def num_ranks(self) -> int:
        """Trainer ranks over all nodes."""
        return self.num_trainer_nodes * self.resources.ranks_per_node

    @property
    def ranks_per_row(self) -> int:
        """Number of trainer ranks that share the tokens of a sequence (``trainer.sequence_parallel``); 1 for an
        external trainer, whose arguments say how it divides sequences."""
        return self.trainer.sequence_parallel if isinstance(self.trainer, NativeTrainer) else 1

    @property
    def num_replicas(self) -> int:
        """Number of parts into which the sequences of a step are dealt for forward and backward passes."""
        return max(1, self.num_ranks // self.ranks_per_row)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a prompt with its completion, in training or in an evaluation."""
        return max(self.max_trained_tokens, self.max_evaluated_tokens)

    @property
    def max_trained_tokens(self) -> int:
        """Maximum number of tokens of a prompt with a completion that is sampled in training."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def max_evaluated_tokens(self) -> int:
        """Maximum number of tokens of a prompt with a completion that is sampled in an evaluation."""
        return self.data.max_prompt_tokens + (self.evaluate.max_new_tokens or self.rollout.max_new_tokens)

    @property
    def possible_nodes(self) -> tuple[int, ...]:
        """Possible numbers of nodes of an attempt, in descending order: from ``resources.min_nodes`` up, those whose
        ranks divide the rows of a step in every loop, and whose GPUs suffice for the rollout engines. ``rollout.nodes``
        is unchanged, and fewer nodes train. External trainers, which divide their batch by their own arguments, always
        have all nodes."""
        most, least = self.resources.num_nodes, self.resources.min_nodes
        if not least or isinstance(self.trainer, CommandTrainer):
            return (most,)
        beside, per_node = self.rollout.nodes, self.resources.ranks_per_node
        fewer = range(most - 1, max(least, beside + 1) - 1, -1)
        divides = (n for n in fewer if self._divides_over((n - beside) * per_node))
        gpus = self.resources.gpus_per_node
        spread = (n for n in divides if self.rollout.layout(n) is not None)
        return (most, *(n for n in spread if not gpus or self.processes_on_each_of(n) <= gpus))

    def _divides_over(self, num_ranks: int) -> bool:
        """True if as many ranks get equal parts of the rows of every loop."""
        algorithms = [loop.algorithm for loop in self.loops.named.values()]
        return num_ranks % self.ranks_per_row == 0 and not any(
            one.rows_per_step % (num_ranks if one.samples else num_ranks // self.ranks_per_row) for one in algorithms
        )

    @property
    def processes_per_node(self) -> int:
        """Maximum number of computing processes on a node, each on its own GPU if there are any: trainer ranks, and
        those of rollout engines unless these have separate nodes."""
        return self.processes_on_each_of(self.resources.num_nodes)

    def processes_on_each_of(self, num_nodes: int) -> int:
        """:attr:`processes_per_node` of an attempt with that number of nodes."""
        layout = self.rollout.layout(num_nodes)
        ranks = self.resources.ranks_per_node
        of_engines = layout.per_node * self.rollout.gpus_per_engine if layout is not None else 0
        return max(ranks, of_engines) if self.rollout.nodes else ranks + of_engines

    @property
    def engines_per_node(self) -> int:
        """Maximum number of separate rollout engines on a node."""
        layout = self.rollout.layout(self.resources.num_nodes)
        return layout.per_node if layout is not None else 0

    @property
    def engines_beside_trainers(self) -> int:
        """Maximum number of separate rollout engines on a node with trainer ranks."""
        return 0 if self.rollout.nodes else self.engines_per_node

    @property
    def why_not_nccl(self) -> str:
        """Reason why weights cannot be sent to rollout engines from GPU to GPU; empty if they can."""
        gpus = self.resources.gpus_per_node
        if not gpus:
            return "the nodes have no GPUs"
        if self.processes_per_node > gpus:
            return "two processes would share a GPU, which NCCL rejects"
        if self.rollout.gpus_per_engine > 1:
            return "an engine of several GPUs receives in a process without a GPU"
        if self.rollout.engine == "sglang":
            return "an engine of SGLang receives in a process beside the server with the GPU"
        return ""

    @property
    def evaluates_with_engines(self) -> bool:
        """True if separate rollout engines also sample for the evaluators. Otherwise these sample with their own
        weights, because the adapter is merged by then, which engines do not support."""
        return bool(self.rollout.engines) and self.rollout.engine != "transformers" and self.model.lora is None

    @property
    def starts_vllm_in_evaluators(self) -> bool:
        """True if each evaluator has its own vLLM engine. An engine that is split over GPUs does not fit on a single
        one."""
        return self.rollout.engine == "vllm" and not self.evaluates_with_engines and self.rollout.gpus_per_engine == 1

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
    def command_trainer(self) -> CommandTrainer:
        """Settings of the external trainer.

        Raises:
            ValueError: rlhf-flows trains itself.
        """
        if not isinstance(self.trainer, CommandTrainer):
            raise ValueError(f"a run with trainer.kind = {self.trainer.kind} has no launch line")
        return self.trainer

    @property
    def algorithm(self) -> str:
        """Name of the algorithm of the main loop."""
        return self.trainer.algorithm if isinstance(self.trainer, CommandTrainer) else self.main_loop.algorithm.name

    @property
    def samples(self) -> bool | None:
        """True if the main loop samples completions; None for external trainers, where it is unknown."""
        return None if isinstance(self.trainer, CommandTrainer) else self.main_loop.algorithm.samples

    @property
    def any_loop_samples(self) -> bool:
        """True if any loop of the native trainer samples completions, so that rewards are needed."""
        return any(loop.algorithm.samples for loop in self.loops.named.values())

    @property
    def makes_reward_model(self) -> bool:
        """True if the main loop of the native trainer trains a reward model."""
        return self.loops.main is not None and self.loops.main.algorithm.ranks_completions

    @property
    def data_kinds(self) -> frozenset[DataKind]:
        """Parts of each row, besides its prompt, that the loops need; for external trainers, those that the evaluation
        needs."""
        algorithms = [loop.algorithm for loop in self.loops.named.values()]
        kinds: set[DataKind] = {"pair" if algorithm.pairs else "answer" for algorithm in algorithms} or {"answer"}
        if any(algorithm.labelled for algorithm in algorithms):
            kinds.add("label")
        return frozenset(kinds if self.data.answer_column else kinds - {"answer"})

    @property
    def evaluations(self) -> tuple[EvaluationName, ...]:
        """Evaluations that are always made; completions of held-out pairs are also scored if they have answers."""
        completes = self.completes_held_out(pairs_have_answers=False)
        made: tuple[EvaluationName, ...] = ("greedy", "sampled") if completes else ()
        return (*made, *self.row_evaluations)

    @property
    def row_evaluations(self) -> tuple[EvaluationName, ...]:
        """Evaluations of held-out rows that need no sampling: the loss of a main loop that learns from rows, and their
        ranking."""
        if self.loops.main is None or self.loops.main.algorithm.samples:
            return ()
        return ("preference", "loss") if self.ranks_held_out else ("loss",)

    @property
    def ranks_held_out(self) -> bool:
        """True if the main loop learns from preferences: the rewards that it assigns to held-out completions then rank
        them."""
        main = self.loops.main
        return main is not None and (main.algorithm.pairs or main.algorithm.labelled)

    def completes_held_out(self, *, pairs_have_answers: bool) -> bool:
        """True if completions of held-out prompts are sampled and scored.

        Args:
            pairs_have_answers: all held-out rows have ``data.answer_column``, which only the data tells; counts if they
                are needed as pairs only.
        """
        answered = pairs_have_answers if self.data_kinds == {"pair"} else self.has_references
        if not self.data.answer_column:
            answered = self.evaluate.scorer not in COMPARE_ANSWERS
        can_be_scored = answered or bool(self.evaluate.scorer_model)
        return self.evaluate.completions and not self.makes_reward_model and can_be_scored

    @property
    def has_references(self) -> bool:
        """True if every row has a right answer; in labelled rows, an answer that is the completion may be wrong."""
        return "answer" in self.data_kinds and not (
            "label" in self.data_kinds and "{answer}" in self.data.completion_template
        )

    @property
    def is_evaluated(self) -> bool:
        """True if the model is measured on held-out data."""
        return not isinstance(self.trainer, CommandTrainer) or self.data.has_eval

    @property
    def warm_start_steps(self) -> int:
        """Optimizer steps before the main loop; 0 without a warm start."""
        return self.loops.warm_start.num_steps if self.loops.warm_start else 0
