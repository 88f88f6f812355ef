"""Evaluation: the same on one rank and on two, in prompt order, with the same noise before and after."""

import contextlib
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from core_models import char_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from rank_launcher import TINY_MODEL, launch, make_context, of_one_rank, tiny_spec, training_group, values
from test_preference_runs import spec_of
from transformers import PreTrainedModel

from rlhf_core.errors import BadConfig, BadData, RewardFailed, WorkerError
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import StepSums
from rlhf_core.training.data.examples import (
    make_batch,
    make_examples,
    mismatched,
    score_batch,
    step_sums,
)
from rlhf_core.training.distributed import Ranks, collective_timeout
from rlhf_core.training.evaluation import evaluator as evaluation
from rlhf_core.training.evaluation import report_files
from rlhf_core.training.evaluation.evaluator import Evaluator, load_evaluator
from rlhf_core.training.evaluation.held_out import scored_rows
from rlhf_core.training.evaluation.report_files import are_written, write_reports
from rlhf_core.training.evaluation.run import _evaluate_start, checkpoint_to_evaluate
from rlhf_core.training.models.causal_lm import PolicyModel, build_causal_lm
from rlhf_core.training.rewards.scoring import RewardScorer
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.rollouts.start import start_engine
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.rollouts.weight_ledger import RecordedEngine
from rlhf_core.training.types import Completion, NullReporter, WorkerContext

pytestmark = [pytest.mark.training]

HALF = "test_loop_evaluation:half_right"


def half_right(*, completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Share of the answer's digits in the completion."""
    return [len(set(found) & set(right)) / len(right) for found, right in zip(completions, answer, strict=True)]


def broken(**columns: Any) -> list[float]:
    raise ZeroDivisionError("no luck")


def evaluator_of(
    spec: RunSpec, ranks: Ranks, engine: Any = None, tokenizer: Any = None, *, trains_on_samples: bool = False
) -> Evaluator:
    """The evaluator of a run, with an engine in this process if none is given."""
    tokenizer = tokenizer or char_tokenizer()
    start = functools.partial(TransformersEngine, tokenizer) if engine is None else lambda: engine
    return load_evaluator(spec, ranks, tokenizer, RewardScorer(spec), start, trains_on_samples=trains_on_samples)


def model_of(spec: RunSpec, seed: int = 0) -> PreTrainedModel:
    return build_causal_lm(spec.model.config, char_tokenizer(), seed)


def evaluate(ranks: Ranks, step: int = 6, seed: int = 0, **settings: Any) -> list[EvaluationReport]:
    spec = RunSpec.model_validate(tiny_spec(evaluate={"scorer": HALF, "keep_samples": 7, **settings}))
    return evaluator_of(spec, ranks).run(model_of(spec, seed), "after", step, lambda: None)


def on_ranks(rank: int, num_ranks: int, run_dir: str) -> list[Any]:
    from rlhf_core.training.distributed import init_process_group

    ranks = init_process_group(make_context(run_dir, tiny_spec(), rank, num_ranks))
    return [report.model_dump(mode="json") for report in evaluate(ranks)]


class LastPhase(NullReporter):
    """Knows the phase of the last beat."""

    phase: Phase | None = None

    def beat(self, phase: Phase, step: int) -> None:
        self.phase = phase


def awake_in_training(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """A supervised run that is evaluated before it and after each of its steps.

    Returns:
        Its result, the number of times that the engine was given weights, for each backward pass if it was awake, and
        the phase in which each optimizer was built.
    """
    from rlhf_core.training.trainers.engine import Engine

    calls, passes, is_awake, built_in = [], [], [False], []
    build, reporter = Engine.__init__, LastPhase()
    load, backward = TransformersEngine.load, Engine.backward

    def wake(engine: TransformersEngine, *arguments: Any) -> None:
        calls.append("load")
        is_awake[0] = True
        load(engine, *arguments)

    def sleep(engine: TransformersEngine) -> None:
        is_awake[0], engine.version = False, None

    def built(engine: Engine, *arguments: Any) -> None:
        built_in.append(reporter.phase)
        build(engine, *arguments)

    def train(engine: Engine, loss: Any) -> None:
        passes.append(is_awake[0])
        backward(engine, loss)

    spec = {key: value for key, value in tiny_spec().items() if key not in ("sft", "train", "grpo")}
    spec["loops"] = {"main": {"num_steps": 2, "algorithm": {"name": "sft"}, "optimizer": {"learning_rate": 1e-3}}}
    spec["evaluate"] = {**spec["evaluate"], "num_prompts": 2, "every_num_steps": 1}
    with (
        mock.patch.multiple(TransformersEngine, load=wake, sleep=sleep),
        mock.patch.multiple(Engine, __init__=built, backward=train),
        training_group(rank, num_ranks, folder, spec) as group,
    ):
        result = group.train("evaluated", spec, reporter=reporter)
        return {"result": result, "loads": len(calls), "passes": passes, "built in": built_in}


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    return of_one_rank(awake_in_training, folder)


@pytest.mark.end_to_end
def test_an_optimizer_is_built_in_set_up_after_an_evaluation(found: dict[str, Any]) -> None:
    """It takes longer than an evaluation may be silent: the floor of that phase would judge it hung."""
    assert found["built in"] == [Phase.SETUP]


@pytest.mark.end_to_end
def test_an_engine_sleeps_while_data_is_trained_on(found: dict[str, Any]) -> None:
    """vLLM takes a share of the GPU while it is awake; the memory model counts on its sleep."""
    assert (found["result"], found["loads"]) == ("done", 4), "greedy and sampled before, greedy after each step"
    assert found["passes"]
    assert not any(found["passes"])


def without_time(report: EvaluationReport | dict[str, Any]) -> dict[str, Any]:
    content = report.model_dump(mode="json") if isinstance(report, EvaluationReport) else dict(report)
    return {name: value for name, value in content.items() if name not in ("seconds", "time")}


@pytest.mark.end_to_end
def test_any_number_of_ranks_gives_the_same_report(ranks: Ranks, tmp_path: Path) -> None:
    """10 prompts on 3 ranks: parts of 3, 3 and 4."""
    expected = [without_time(report) for report in evaluate(ranks)]
    for reports in values(launch(on_ranks, 3, tmp_path / "launch", run_dir=str(tmp_path / "run"))):
        assert [without_time(report) for report in reports] == expected


def test_reports_hold_what_was_measured(ranks: Ranks) -> None:
    greedy, sampled, *passes = evaluate(ranks)
    assert [report.name for report in (greedy, sampled, *passes)] == ["greedy", "sampled", "pass@1", "pass@2"]
    assert (greedy.num_prompts, greedy.num_samples) == (10, 10)
    assert (sampled.num_prompts, sampled.num_samples) == (10, 20)
    assert greedy.metric == "half_right"
    assert greedy.checkpoint_step == 6
    for report in (greedy, sampled, *passes):
        assert len(report.samples) == (0 if report in passes else 7)
        assert report.ci_low <= report.value <= report.ci_high
    assert [sample.sample_index for sample in sampled.samples] == [0, 1, 0, 1, 0, 1, 0]
    assert len({sample.prompt for sample in greedy.samples}) == 7
    (more,) = [report for report in evaluate(ranks, keep_samples=99) if report.name == "sampled"]
    assert more.value == pytest.approx(sum(sample.score for sample in more.samples) / 20)
    right = [sample.score >= 0.5 for sample in more.samples]
    pairs = list(zip(right[::2], right[1::2], strict=True))
    assert [report.value for report in passes] == pytest.approx([sum(right) / 20, sum(map(any, pairs)) / 10])
    for report in passes:
        assert (report.num_prompts, report.num_samples, report.metric) == (10, 20, "half_right")
        assert EvaluationReport.model_validate_json(report.model_dump_json()) == report
    assert [sample.prompt for sample in more.samples[::2]][:7] == [sample.prompt for sample in greedy.samples]


@pytest.mark.parametrize(
    ("content", "trains_on_samples", "num_started"),
    [
        (spec_of({"name": "reward_model"}), False, 0),
        (spec_of({"name": "dpo"}), False, 0),
        (spec_of({"name": "dpo"}), True, 1),
        (spec_of({"name": "dpo"}, data={"generator": "rlhf_core.training.tasks:sorted_pairs"}), False, 1),
        (tiny_spec(), False, 1),
    ],
    ids=["reward model", "pairs", "pairs after a warm start on samples", "pairs with answers", "answers"],
)
def test_an_engine_is_started_where_something_is_sampled(
    ranks: Ranks,
    capsys: pytest.CaptureFixture[str],
    content: dict[str, Any],
    trains_on_samples: bool,
    num_started: int,
) -> None:
    """An engine of vLLM costs time, and the memory of a second model."""
    spec = RunSpec.model_validate({**content, "rollout": {"engine": "vllm", "max_new_tokens": 5}})
    tokenizer = char_tokenizer()
    started: list[TransformersEngine] = []

    def start() -> TransformersEngine:
        started.append(TransformersEngine(tokenizer))
        return started[-1]

    load_evaluator(spec, ranks, tokenizer, RewardScorer(spec), start, trains_on_samples=trains_on_samples)
    assert len(started) == num_started
    assert ("'vllm' is not started" in capsys.readouterr().out) is (num_started == 0)


def test_completions_of_conversations_end_as_their_turns_do(ranks: Ranks) -> None:
    tokenizer = char_tokenizer()
    turn_end = tokenizer.eos_token_id
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    spec = RunSpec.model_validate(
        tiny_spec(data={"generator": "rank_launcher:conversations", "generator_args": {}}, evaluate={"scorer": HALF})
    )
    engine = mock.Mock()
    engine.sample.side_effect = lambda prompts, *others: [[Completion([], "", True, [])]] * len(prompts)
    evaluator_of(spec, ranks, engine, tokenizer).greedy_scores(mock.Mock(), 1, lambda: None)
    assert engine.sample.call_args.args[2].end_ids == (turn_end,)


def test_an_evaluation_has_begun_before_its_first_pass(ranks: Ranks) -> None:
    """Out of memory in that pass would be taken for a failure of setup, where smaller batches are not tried."""
    spec, calls = RunSpec.model_validate(tiny_spec(evaluate={"scorer": HALF})), mock.Mock()
    calls.engine.sample.side_effect = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        evaluator_of(spec, ranks, calls.engine).run(model_of(spec), "after", 1, calls.beat)
    assert [call[0] for call in calls.mock_calls] == ["beat", "engine.load", "engine.sample"]


def test_evaluations_sample_as_their_own_settings_say(ranks: Ranks) -> None:
    cut = {"top_p": 0.95, "top_k": 20, "min_p": 0.05}
    evaluate = {"scorer": HALF, "temperature": 0.6, "max_new_tokens": 9, **cut}
    engine = mock.Mock()
    engine.sample.side_effect = lambda prompts, seeds, *others: [[Completion([], "", True, [])] * len(s) for s in seeds]
    for settings, length in ((evaluate, 9), ({"scorer": HALF}, 5)):
        spec = RunSpec.model_validate(tiny_spec(evaluate=settings, rollout={"stop_strings": ["9"]}))
        engine.sample.reset_mock()
        evaluator_of(spec, ranks, engine).run(model_of(spec), "after", 1, lambda: None)
        greedy, sampled = (call.args[2] for call in engine.sample.call_args_list)
        assert (greedy.max_new_tokens, sampled.max_new_tokens) == (length, length)
        assert greedy.stop == sampled.stop == ("9",)
        assert (greedy.temperature, greedy.is_cut, sampled.is_cut) == (0.0, False, settings is evaluate)
        assert spec.max_tokens == spec.data.max_prompt_tokens + length
        if settings is evaluate:
            assert {name: getattr(sampled, name) for name in ("temperature", *cut)} == {"temperature": 0.6, **cut}


class SumOfTokens(torch.nn.Module):
    """A reward model whose reward is the sum of the tokens of a sequence, to which padding (token 0) adds nothing."""

    packs = False

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[int, int]] = []

    def try_passes(self) -> None:
        """Do nothing: a sum needs no layers."""

    def forward(self, input_ids: Any) -> Any:
        self.passes.append((len(input_ids), input_ids.shape[1]))
        return input_ids.sum(1).float()


@pytest.mark.parametrize("rank", [0, 2])
def test_passes_that_rank_pairs_have_the_limits_of_training(ranks: Ranks, rank: int) -> None:
    """Two pairs on three ranks: rank 0 has none, and its passes are those of the ranks with the most."""
    content = spec_of({"name": "reward_model"}, data={"generator": "test_preference_runs:ragged"})
    content["trainer"] |= {"micro_batch_size": 128, "micro_batch_tokens": 40}
    spec = RunSpec.model_validate(content)
    tokenizer, whole = char_tokenizer(), evaluator_of(spec, ranks)
    policy = SumOfTokens()
    found = whole._scored_rows(policy, None, lambda: None)  # type: ignore[arg-type]
    assert [one.row for one in found] == whole.data.rows
    for one, prompt, row in zip(found, whole.data.token_ids, whole.data.rows, strict=True):
        ends = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in (row.chosen, row.rejected)]
        assert one.rewards == [sum([*prompt, *end]) for end in ends]
    assert max(count * width for count, width in policy.passes) <= 40
    assert max(count for count, _ in policy.passes) > 2, "short pairs share a pass"

    two = replace(whole.data, rows=whole.data.rows[:2], token_ids=whole.data.token_ids[:2])
    third = replace(whole, data=two, ranks=replace(ranks, rank=rank, num_ranks=3))
    policy = SumOfTokens()
    gathered = [[0.0, 0.0, 0.0, passes, 0.0] for passes in (0.0, 1.0, 3.0)]
    with mock.patch.object(Ranks, "gather_numbers", return_value=gathered):
        assert len(third._scored_rows(policy, None, lambda: None)) == (0 if rank == 0 else 1)  # type: ignore[arg-type]
    assert len(policy.passes) == 3


def uneven(split: str, seed: int) -> list[dict[str, str]]:
    """Answers of very different lengths."""
    return [{"prompt": f"{digit}>", "answer": "12" * (1 + digit % 4)} for digit in range(9)]


LOSSES: list[dict[str, Any]] = [
    {"name": "sft"},
    {"name": "dpo", "loss": "ipo"},
    {"name": "cpo"},
    {"name": "simpo"},
    {"name": "orpo"},
    {"name": "kto"},
    {"name": "reward_model", "centring_coefficient": 0.01},
]


@pytest.mark.parametrize("algorithm", LOSSES, ids=[str(algorithm["name"]) for algorithm in LOSSES])
def test_the_held_out_loss_is_that_of_a_step_with_all_held_out_rows(ranks: Ranks, algorithm: dict[str, Any]) -> None:
    """In passes of a few rows, and with an interval from the losses of the single rows."""
    kind = {"kto": "sorted_or_not"}.get(algorithm["name"], "sorted_pairs")
    arguments = {"num_digits": 3, "num_train": 1, "num_eval": 11}
    data: dict[str, Any] = {"generator": f"rlhf_core.training.tasks:{kind}", "generator_args": arguments}
    if algorithm["name"] == "sft":
        data = {"generator": "test_loop_evaluation:uneven", "generator_args": {}}
    content = spec_of(algorithm, data=data)
    content["data"] |= {"completion_template": "{completion}"} if kind == "sorted_or_not" else {}
    content["evaluate"] |= {"completions": False, "num_prompts": 7}
    spec = RunSpec.model_validate(content)
    main, tokenizer = spec.main_loop.algorithm, char_tokenizer()
    model, reference = (model_of(spec, seed) for seed in (1, 2))
    policy: Any = PolicyModel(model)
    if spec.makes_reward_model:
        model = policy = SumOfTokens()
    evaluator = evaluator_of(spec, ranks)
    rows, prompts = evaluator.data.rows, evaluator.data.token_ids
    with torch.no_grad():
        scorer = PolicyModel(reference) if main.reference else None
        examples, sums = make_examples(rows, prompts, tokenizer, main), StepSums(0, len(rows))
        if main.mismatches:
            others = mismatched(examples, [rows[-1], *rows[:-1]], tokenizer)
            batch, sequences = make_batch(others, main, tokenizer.pad_token_id)
            output = score_batch(policy, scorer, batch, sequences, main)
            measured = ALGORITHMS[main.name].measure(output, sequences, main)
            sums = replace(sums, measured={name: float(value) for name, value in measured.items()})
        tokens, count, chosen = step_sums(examples, main)
        sums = replace(sums, num_tokens=tokens, num_sequences=count, num_chosen_tokens=chosen)
        batch, sequences = make_batch(examples, main, tokenizer.pad_token_id)
        output = score_batch(policy, scorer, batch, sequences, main)
        expected, _ = ALGORITHMS[main.name].loss(output, sequences, sums, main)

    with (
        mock.patch.object(evaluation, "RewardModel", lambda made, _: made),
        mock.patch.object(evaluation, "require_embeddings"),
    ):
        reports = {report.name: report for report in evaluator.run(model, "after", 6, lambda: None, reference)}
    found = reports["loss"]
    assert found.value == pytest.approx(float(expected), rel=1e-5)
    assert found.ci_low < found.value < found.ci_high
    assert (found.num_prompts, found.num_samples, found.metric) == (
        7, 7, "cross_entropy" if main.name == "sft" else f"{main.name}_loss",
    )  # fmt: skip
    assert set(reports) == {"loss", *(["preference"] if main.name != "sft" else [])}, "no completions"
    assert [sample.completion for sample in found.samples] == [row.chosen or row.target for row in rows[:3]]
    if main.name == "sft":
        per_token = -torch.where(sequences.mask, output.logprobs, 0.0).sum(1) / sequences.mask.sum(1)
        assert [sample.score for sample in found.samples] == pytest.approx(per_token[:3].tolist(), rel=1e-5)
    total, weight = evaluator.row_scores(policy, scorer, lambda: None)["loss"]
    assert total / weight == pytest.approx(found.value)


def test_an_engine_in_process_sleeps_while_held_out_rows_are_scored(ranks: Ranks) -> None:
    """Sampling has woken it, and the passes need its memory."""
    engine = mock.Mock()
    engine.sample.side_effect = lambda prompts, seeds, *others: [[Completion([], "", True, [])] * len(s) for s in seeds]
    spec = RunSpec.model_validate(tiny_spec(train={"algorithm": "sft"}, evaluate={"scorer": HALF}))

    def score(*given: Any) -> Any:
        engine.scored()
        return scored_rows(*given)

    with mock.patch.object(evaluation, "scored_rows", score):
        evaluator_of(spec, ranks, engine).run(model_of(spec), "after", 1, lambda: None)
    assert [name for name, *_ in engine.method_calls] == ["load", "sample", "load", "sample", "sleep", "scored"]


def desirable_only(split: str, seed: int, **arguments: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{digit}>", "answer": "1", "completion": "1", "label": True} for digit in range(4)]


def test_the_main_loop_decides_whether_held_out_completions_are_ranked(ranks: Ranks) -> None:
    """A warm start with labelled completions ranks nothing, so held-out rows of one label fit."""
    content = spec_of({"name": "kto"}, data={"generator": "test_loop_evaluation:desirable_only"})
    content["data"] |= {"generator_args": {}, "completion_template": "{completion}"}
    kto = RunSpec.model_validate(content)
    main = {**content["loops"]["main"], "algorithm": {"name": "grpo"}}
    before = RunSpec.model_validate({**content, "loops": {"warm_start": content["loops"]["main"], "main": main}})
    evaluator = evaluator_of(before, ranks, trains_on_samples=True)
    assert evaluator.names == before.evaluations == ("greedy", "sampled")
    assert kto.evaluations[-2:] == ("preference", "loss")
    with pytest.raises(BadData, match="found held-out rows of one label only"):
        evaluator_of(kto, ranks)


@pytest.mark.parametrize(
    ("lora", "kind"), [(None, RemoteEngines), ({}, TransformersEngine)], ids=["whole weights", "an adapter"]
)
def test_evaluators_use_the_engines_of_the_run(
    ranks: Ranks, tmp_path: Path, lora: dict[str, Any] | None, kind: type
) -> None:
    """An adapter is merged by then; a vLLM engine that is split over GPUs is not started in an evaluator."""
    split = {"engine": "vllm", "engines": 1, "vllm": {"tensor_parallel": 2}}
    spec = tiny_spec(rollout=split, model={"config": TINY_MODEL, "lora": lora})
    context = replace(make_context(str(tmp_path), spec, 0, 1), role=Role.EVALUATOR)
    engine = start_engine(context, ranks, char_tokenizer(), tmp_path)
    assert isinstance(engine._engine if isinstance(engine, RecordedEngine) else engine, kind)
    engine.close()


def test_samples_of_a_prompt_differ_and_noise_does_not_depend_on_the_step(ranks: Ranks) -> None:
    early, late = evaluate(ranks, step=2)[1], evaluate(ranks, step=6)[1]
    assert early.samples == late.samples
    pairs = list(zip(early.samples[::2], early.samples[1::2], strict=False))
    assert all(a.prompt_uid == b.prompt_uid for a, b in pairs)
    assert any(a.completion != b.completion for a, b in pairs)
    assert evaluate(ranks, seed=1)[1].samples != early.samples


def test_the_number_of_prompts_is_a_limit(ranks: Ranks) -> None:
    assert {report.num_prompts for report in evaluate(ranks, num_prompts=4)} == {4}
    assert {report.num_prompts for report in evaluate(ranks, num_prompts=400)} == {10}


def test_pass_at_k_takes_no_collective_of_its_own(ranks: Ranks) -> None:
    """Control: one completion per prompt has no pass@k."""
    num_gathered = []
    for samples_per_prompt, names in ((1, []), (2, ["pass@1", "pass@2"])):
        with mock.patch.object(Ranks, "gather", autospec=True, side_effect=Ranks.gather) as gather:
            reports = evaluate(ranks, samples_per_prompt=samples_per_prompt)
        assert [report.name for report in reports[2:]] == names
        num_gathered.append(gather.call_count)
    assert num_gathered[0] == num_gathered[1] > 0


def test_a_scorer_that_fails_is_named(ranks: Ranks) -> None:
    with pytest.raises(RewardFailed, match=r"broken raised ZeroDivisionError: no luck.*but not in evaluations"):
        evaluate(ranks, scorer="test_loop_evaluation:broken")


def test_reports_are_whole_files(ranks: Ranks, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    reports = evaluate(ranks)
    assert not are_written(run_dir, "after")
    write_reports(run_dir, reports[:1], ranks)
    assert not are_written(run_dir, "after")
    write_reports(run_dir, reports, ranks)
    assert are_written(run_dir, "after")
    assert not are_written(run_dir, "before")
    stored = EvaluationReport.model_validate_json(run_dir.evaluation("after", "greedy").read_bytes())
    assert stored == reports[0]


def test_an_evaluation_that_is_written_has_its_pass_at_k(ranks: Ranks, tmp_path: Path) -> None:
    """A kill between two files has the evaluation repeated."""
    reports = evaluate(ranks)
    for num_written in range(len(reports) + 1):
        run_dir = RunDir(tmp_path / str(num_written))
        write = mock.Mock(
            side_effect=[*[mock.DEFAULT] * num_written, KeyboardInterrupt], wraps=report_files.write_model
        )
        with mock.patch.object(report_files, "write_model", write), contextlib.suppress(KeyboardInterrupt):
            write_reports(run_dir, reports, ranks)
        assert len(run_dir.evaluations()) == num_written
        assert are_written(run_dir, "after") == (num_written == len(reports))


def start_of_an_external_trainer(
    folder: Path, ranks: Ranks, evaluator: mock.Mock, embeddings: mock.Mock
) -> tuple[WorkerContext, torch.nn.Module]:
    """Evaluate the model before training."""
    trainer = {"kind": "command", "argv": ["python", "train.py"], "num_steps": 2}
    spec = {"name": "other", "model": {"path": str(folder)}, "trainer": trainer}
    context, model = make_context(str(folder / "run"), spec, 0, 1), torch.nn.Linear(2, 2)
    evaluator.run.return_value = []
    module = "rlhf_core.training.evaluation.run"
    loaded = mock.patch(f"{module}.load_causal_lm", return_value=model)
    with loaded, mock.patch(f"{module}.require_embeddings", embeddings):
        _evaluate_start(context, ranks, evaluator)
    return context, model


def test_the_model_before_training_leaves_room_for_the_trained_one(ranks: Ranks, tmp_path: Path) -> None:
    """The engine still refers to it then."""
    evaluator = mock.Mock()
    _, model = start_of_an_external_trainer(tmp_path, ranks, evaluator, mock.Mock())
    assert evaluator.run.call_args.args[:3] == (model, "before", 0)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_without_the_tokens_that_training_added_is_not_evaluated(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trained one is: the program has resized it. Control: any other wrong setting ends the role."""
    evaluator, lacks = mock.Mock(), mock.Mock(side_effect=BadConfig("found token 128 of the tokenizer"))
    context, _ = start_of_an_external_trainer(tmp_path, ranks, evaluator, lacks)
    assert "the model before training is not evaluated: found token 128" in capsys.readouterr().out
    assert not evaluator.run.called
    assert not are_written(context.run_dir, "before")
    evaluator.run.side_effect = BadConfig("no such scorer")
    with pytest.raises(BadConfig, match="no such scorer"):
        start_of_an_external_trainer(tmp_path, ranks, evaluator, mock.Mock())


def test_without_a_checkpoint_there_is_nothing_to_evaluate(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="found no complete checkpoint in "):
        checkpoint_to_evaluate(make_context(str(tmp_path), tiny_spec(), 0, 1), ranks, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_make_up_the_batch_in_order(count: int, num_ranks: int) -> None:
    items = list(range(count))
    store = torch.distributed.HashStore()
    ranks = [Ranks(rank, num_ranks, torch.device("cpu"), NullReporter(), store) for rank in range(num_ranks)]
    parts = [rank.deal(items) for rank in ranks]
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_collective_waits_longer_than_hangs_are_looked_for() -> None:
    for phase in ("", "setup_", "rollout_", "reward_", "weight_sync_", "checkpoint_", "evaluate_"):
        supervise = SuperviseSpec.model_validate({f"{phase}floor_s": 20_000, "gap_factor": 3})
        assert collective_timeout(supervise).total_seconds() > 3 * 20_000, phase
    assert json.loads(SuperviseSpec().model_dump_json())["setup_floor_s"] < collective_timeout(SuperviseSpec()).seconds
    # torch adds it to a clock that counts nanoseconds in 64 bits
    assert collective_timeout(SuperviseSpec(floor_s=2**31 - 1, gap_factor=1e300)).total_seconds() == 2**31 - 1
