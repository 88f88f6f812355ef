"""Reward models that score completions: each score equals that of the sequence alone, in any batch, padding or
ending."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from core_models import QWEN, char_tokenizer, tiny_model
from pydantic import ValidationError
from rank_launcher import (
    TrainingGroup,
    ended,
    every_scenario,
    flip_last_bit,
    launch,
    make_context,
    tiny_spec,
    values,
)
from test_loop_runs import assert_resumed_bitwise, metrics_of
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.errors import BadConfig, ResumeMismatch, RewardFailed
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.algorithms.preference import RewardModelSpec
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.scoring_models import ScoringModelSpec, ScoringModelState
from rlhf_core.training.data.chat import rendered
from rlhf_core.training.data.examples import make_examples
from rlhf_core.training.data.loading import prompt_tokens
from rlhf_core.training.data.tokenizers import build_tokenizer
from rlhf_core.training.models.reward_model import RewardModel
from rlhf_core.training.rewards.scoring import RewardScorer, Scores
from rlhf_core.training.rewards.scoring_models import (
    ModelScores,
    ScoringModel,
    ScoringModels,
    load_scoring_models,
)
from rlhf_core.training.types import Completion, Conversation, Row

pytestmark = pytest.mark.training

RATE = {"learning_rate": 3e-3}
GRPO = {"algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 4}, "optimizer": RATE}
SFT = {"algorithm": {"name": "sft", "batch_size": 8}, "optimizer": RATE}

PADS = ("own", "end", "none")
"""Padding token of a reward model: one of its own, the end token, or none."""


def make_reward_model(
    folder: Path, pad: str = "own", num_labels: int = 1, tokenizer: PreTrainedTokenizerBase | None = None
) -> Path:
    """A reward model with random weights, as Hugging Face saves it."""
    tokenizer = tokenizer or char_tokenizer()
    if pad == "end":
        tokenizer.pad_token = tokenizer.eos_token
    arguments: dict[str, Any] = {name: value for name, value in QWEN.items() if name != "model_type"}
    arguments |= {"vocab_size": len(tokenizer), "num_labels": num_labels}
    arguments["pad_token_id"] = None if pad == "none" else tokenizer.pad_token_id
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("qwen3", **arguments))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ranks(num_ranks: int = 1, log: list[str] | None = None) -> Any:
    """One of several ranks that all find the same."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        log=(log if log is not None else []).append,
        gather=lambda value: [value] * num_ranks,
        gather_numbers=lambda numbers: [numbers] * num_ranks,
    )


def load(
    folder: Path, before: ScoringModelState | None = None, log: list[str] | None = None, **settings: Any
) -> ScoringModels:
    spec = ScoringModelSpec(path=str(folder), batch_size=3, **settings)
    known = {"good": before} if before is not None else {}
    return load_scoring_models({"good": spec}, ranks(log=log), char_tokenizer(), known, lambda: None)


def only(models: ScoringModels) -> ScoringModel:
    (model,) = models.models
    return model


def row(prompt: str, chat: Conversation | None = None) -> Row:
    return Row("u-0", prompt, "", "", {}, chat=chat)


def sampled(row: Row, text: str, finished: bool) -> tuple[Row, Completion]:
    return row, Completion([], text, finished, [])


MADE = [
    sampled(row(prompt), text, finished)
    for prompt, text, finished in (("12>", "3", True), ("7>", "4455", False), ("9>", "", True), ("123456>", "78", True))
]


@torch.no_grad()
def alone(folder: Path, row: Row, made: Completion) -> float:
    """Score of one sequence from the class of transformers itself, without padding."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = char_tokenizer()
    ids = tokenizer.encode(row.prompt + made.text) + ([tokenizer.eos_token_id] if made.finished else [])
    return float(model(input_ids=torch.tensor([ids])).logits)


@pytest.mark.parametrize("pad", PADS)
def test_every_score_is_that_of_the_sequence_alone(pad: str, tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", pad)
    found = only(load(folder)).scores(MADE, lambda: None)
    assert found.raw == pytest.approx([alone(folder, *made) for made in MADE], abs=1e-5)
    assert found.num_cut == 0


def test_scores_at_the_last_place_of_a_padded_batch_are_caught(tmp_path: Path) -> None:
    """Negative control of the test above: the score at a padding token differs."""
    folder = make_reward_model(tmp_path / "model")
    with mock.patch("rlhf_core.training.models.reward_model._last_places", lambda ids, *_: torch.full((len(ids),), -1)):
        found = only(load(folder)).scores(MADE, lambda: None)
    expected = [alone(folder, *made) for made in MADE]
    assert max(abs(a - b) for a, b in zip(found.raw, expected, strict=True)) > 1e-3


def test_an_end_token_that_is_padding_is_scored_before_it(tmp_path: Path) -> None:
    """As in training and in transformers, such a model gives the same score whether or not a completion has ended."""
    made = [sampled(row("1>"), "23", finished) for finished in (True, False)]
    ended, cut = only(load(make_reward_model(tmp_path / "end", "end"))).scores(made, lambda: None).raw
    assert ended == pytest.approx(cut, abs=1e-6)
    ended, cut = only(load(make_reward_model(tmp_path / "own", "own"))).scores(made, lambda: None).raw
    assert abs(ended - cut) > 1e-3


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def make_encoder(folder: Path, kind: str = "bert", positions: int = 64) -> PreTrainedTokenizerBase:
    """An encoder with one output, and a tokenizer that puts special tokens around both texts of a pair."""
    tokenizer = char_tokenizer()
    start, pad = tokenizer.convert_tokens_to_ids("<|im_start|>"), tokenizer.pad_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|>:0 $A:0 <|im_end|>:0",
        pair="<|im_start|>:0 $A:0 <|im_end|>:0 $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", start), ("<|im_end|>", tokenizer.eos_token_id)],
    )
    # RoBERTa has a single segment type, and its positions begin after that of the padding.
    arguments = {"type_vocab_size": 1, "max_position_embeddings": positions + pad + 1}
    if kind == "bert":
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
        arguments = {"type_vocab_size": 2, "max_position_embeddings": positions}
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), pad_token_id=pad, num_labels=1, initializer_range=0.5, **SIZES, **arguments
    )
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@torch.no_grad()
def encoded_score(folder: Path, tokenizer: PreTrainedTokenizerBase, *texts: str) -> float:
    """Score of a pair of texts as encoded by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return float(model(**tokenizer(*texts, return_tensors="pt")).logits)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_is_scored_as_it_does_it_itself(kind: str, tmp_path: Path) -> None:
    tokenizer = make_encoder(tmp_path, kind)
    found = only(load(tmp_path)).scores(MADE, lambda: None)
    expected = [encoded_score(tmp_path, tokenizer, asked.prompt, made.text) for asked, made in MADE]
    assert found.raw == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == len(MADE)


def test_negative_control_the_segments_of_an_encoder_matter(tmp_path: Path) -> None:
    make_encoder(tmp_path)
    model = only(load(tmp_path))
    right = model.scores(MADE, lambda: None).raw
    model._arguments = {}  # type: ignore[assignment]
    assert model.scores(MADE, lambda: None).raw != pytest.approx(right, abs=1e-3)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize(
    ("prompt", "text", "kept"),
    [("123456>", "78", ("6>", "78")), ("123456>", "23456789", ("", "56789")), ("12>", "3456", ("12>", "3456"))],
)
def test_an_encoder_loses_the_beginning_between_its_special_tokens(
    kind: str, prompt: str, text: str, kept: tuple[str, str], tmp_path: Path
) -> None:
    """Models with 7 or 10 positions, 3 of them for special tokens; RoBERTa's table is longer, which does not help."""
    positions = 10 if kept[0] == "12>" else 8 if not kept[0] else 7
    tokenizer = make_encoder(tmp_path, kind, positions)
    found = only(load(tmp_path)).scores([sampled(row(prompt), text, True)], lambda: None)
    assert found.num_cut == ((prompt, text) != kept)
    assert found.raw == pytest.approx([encoded_score(tmp_path, tokenizer, *kept)], abs=1e-5)


def test_more_tokens_than_a_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path, "roberta", 64)
    assert load(tmp_path, max_tokens=64).models
    with pytest.raises(BadConfig, match="max_tokens = 65, and a model with positions for 64 tokens"):
        load(tmp_path, max_tokens=65)


def test_a_conversation_is_read_as_it_was_in_training(tmp_path: Path) -> None:
    model = only(load(make_reward_model(tmp_path / "model")))
    turns = ({"role": "user", "content": "1+1"},)
    answer = ({"role": "assistant", "content": "2"},)
    chat = Conversation(turns, chosen=answer, rejected=answer)
    pair = rendered(row("", chat), char_tokenizer())
    (example,) = make_examples(
        [pair], prompt_tokens([pair], char_tokenizer()), char_tokenizer(), RewardModelSpec(name="reward_model")
    )
    asked = row("whatever the policy has read", Conversation(turns))
    trained = [*example.prompt, *example.completions[0]]
    assert model._input(*sampled(asked, "2", True)).ids == trained
    cut = model._input(*sampled(asked, "2", False)).ids
    assert trained[: len(cut)] == cut
    assert char_tokenizer().decode(trained[len(cut) :]) == "<|im_end|>\n", "a completion that was cut off has not ended"


@pytest.mark.parametrize("text", ["i", "<", "m_end", " 2 ", ""])
def test_a_truncated_completion_in_a_chat_template_has_no_end(text: str, tmp_path: Path) -> None:
    """Also a truncation within the text of the end token, or in text that the template would strip."""
    model = only(load(make_reward_model(tmp_path / "model"), template="chat"))
    cut = char_tokenizer().decode(model._input(*sampled(row("1+1>"), text, False)).ids)
    assert str(cut).endswith(f"<|im_start|>assistant\n{text}")


@pytest.mark.parametrize(
    ("template", "expected"),
    [("data", "1+1>2<|im_end|>"), ("text", "1+1>2<|im_end|>"), ("chat", "<|im_start|>user\n1+1><|im_end|>\n")],
)
def test_text_goes_through_the_chat_template_only_where_that_is_asked_for(
    template: str, expected: str, tmp_path: Path
) -> None:
    model = only(load(make_reward_model(tmp_path / "model"), template=template))
    text = char_tokenizer().decode(model._input(*sampled(row("1+1>"), "2", True)).ids)
    assert str(text).startswith(expected)


def test_a_longer_sequence_loses_its_beginning(tmp_path: Path) -> None:
    model = only(load(make_reward_model(tmp_path / "model"), max_tokens=4))
    found = model.scores([sampled(row("123456>"), "78", True), sampled(row("56>"), "78", False)], lambda: None)
    assert found.num_cut == 2
    short = model.scores([sampled(row(">"), "78", True)], lambda: None)
    assert found.raw[0] == pytest.approx(short.raw[0], abs=1e-5)


def test_another_tokenizer_is_reported(tmp_path: Path) -> None:
    log: list[str] = []
    load(make_reward_model(tmp_path / "same"), log=log)
    load(make_reward_model(tmp_path / "other", tokenizer=build_tokenizer("byte", [], 0)), log=log)
    assert "fingerprint" in log[0]
    assert "its tokenizer" not in log[0]
    assert log[1].endswith("its tokenizer differs from the policy's")


def language_model(folder: Path) -> None:
    tiny_model().save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)


def headless(folder: Path) -> None:
    """A language model whose config claims that it is a reward model: transformers initializes its head at random."""
    language_model(folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{"id2label": {"0": "LABEL_0"},', 1))


def of_another_width(folder: Path) -> None:
    """A reward model whose config gives its weights another shape."""
    make_reward_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "which is not a folder"),
        (language_model, "has 2 outputs"),
        (headless, r"reward.models.good: .*/model does not hold all weights of .* found no score.weight"),
        (of_another_width, r"reward.models.good: .*/model does not hold .* of shape \[.*\] instead of \["),
        (lambda folder: make_reward_model(folder, num_labels=2), "has 2 outputs; expected a reward model"),
    ],
    ids=["nothing", "language model", "headless", "another width", "two outputs"],
)
def test_what_is_no_reward_model_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path / "model")
    with pytest.raises(BadConfig, match=words):
        load(tmp_path / "model")


def test_conversations_need_a_chat_template(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    folder = make_reward_model(tmp_path / "model", tokenizer=tokenizer)
    settings = {"good": ScoringModelSpec(path=str(folder))}
    with pytest.raises(BadConfig, match="found conversations to score, but no chat template"):
        load_scoring_models(settings, ranks(), char_tokenizer(), {}, lambda: None, has_conversations=True)
    assert load_scoring_models(settings, ranks(), char_tokenizer(), {}, lambda: None).models


def test_other_weights_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model")
    before = load(folder).states["good"]
    assert load(folder, before).states["good"] == before, "negative control: the same files are accepted"
    flip_last_bit(folder / "model.safetensors")
    with pytest.raises(ResumeMismatch, match=r"reward.models.good: .* contains other files than those used"):
        load(folder, before)


def test_copies_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model")
    odd: Any = SimpleNamespace(**{**vars(ranks()), "gather": lambda value: [value, "not there"]})
    with pytest.raises(BadConfig, match=r"found different files .* rank 1: not there"):
        load_scoring_models({"good": ScoringModelSpec(path=str(folder))}, odd, char_tokenizer(), {}, lambda: None)


# ---------------------------------------------------------------------------------------------------------------------
# The sum of rewards


EXACT = "rlhf_core.training.rewards:exact_match"


class Given:
    """A model that returns the given scores."""

    def __init__(self, *scores: list[float]) -> None:
        self.name = "good"
        self.left = list(scores)

    def scores(self, made: Any, beat: Any) -> ModelScores:
        return ModelScores(self.left.pop(0), 0)


def scored(
    settings: dict[str, Any], *scores: list[float], num_ranks: int = 1, scorer: str = EXACT, **reward: Any
) -> Any:
    """Scorer of a run with one reward model."""
    sections = {"functions": [], "timeout_s": 0, **reward, "models": {"good": settings}}
    spec = RunSpec.model_validate(tiny_spec(reward=sections, evaluate={"scorer": scorer}))
    made = RewardScorer(spec)
    given: Any = Given(*scores)
    states = {"good": ScoringModelState(fingerprint="x")}
    made.use(ScoringModels(spec.reward.models, [given], states, ranks(num_ranks)))
    return made


def totals(scorer: Any, count: int) -> Any:
    return scorer.score([row("1>")] * count, ended(["1"] * count), 1, lambda: None)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_running_moments_span_steps_and_ranks(num_ranks: int) -> None:
    scorer = scored({"path": "m", "normalise": "standardise", "weight": 2.0}, [1.0, 3.0], [5.0], num_ranks=num_ranks)
    first = totals(scorer, 2)
    assert first.total == pytest.approx([-2.0, 2.0])
    assert first.by_function == {"good": [1.0, 3.0]}, "the metric equals the score"
    second = totals(scorer, 1)
    everything = torch.tensor([1.0, 3.0, 5.0] * num_ranks, dtype=torch.float64)
    expected = 2.0 * (5.0 - everything.mean()) / everything.std(correction=0)
    assert second.total == pytest.approx([float(expected)])
    assert scorer.model_states["good"].count == 3 * num_ranks


def test_centring_keeps_the_scale_and_without_it_scores_stay_as_they_are() -> None:
    assert totals(scored({"path": "m", "normalise": "centre"}, [10.0, 30.0]), 2).total == [-10.0, 10.0]
    assert totals(scored({"path": "m"}, [10.0, 30.0]), 2).total == [10.0, 30.0]


def test_a_score_that_is_no_number_is_an_error_or_counts_as_zero() -> None:
    bad = [1.0, math.nan, 3.0]
    with pytest.raises(RewardFailed, match="reward model good gives nan for completion 1"):
        totals(scored({"path": "m"}, bad), 3)
    scorer = scored({"path": "m", "normalise": "centre"}, bad, on_failure="zero")
    found = totals(scorer, 3)
    assert (found.total, found.num_failed) == ([-1.0, 0.0, 1.0], 1)
    assert "counts as 0" in found.warnings[0]


def test_a_conversation_that_the_template_refuses_fails_for_itself(tmp_path: Path) -> None:
    """Gemma's template refuses a system message; the other completions of the rank are scored as they are alone."""
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        f"{tokenizer.chat_template}"
    )
    models = load(make_reward_model(tmp_path, tokenizer=tokenizer))
    user = {"role": "user", "content": "1+1"}
    rows = [row("a", Conversation((user,))), row("b", Conversation(({"role": "system", "content": "be good"}, user)))]
    (expected,) = only(models).scores([sampled(rows[0], "2", True)], lambda: None).raw

    def score(on_failure: str) -> Scores:
        reward = {"functions": [], "models": {"good": {"path": "m"}}, "timeout_s": 0.0, "on_failure": on_failure}
        scorer = RewardScorer(RunSpec.model_validate({**tiny_spec(), "reward": reward}))
        scorer.use(models)
        return scorer.score(rows, ended(["2", "2"]), 1, lambda: None)

    found = score("zero")
    assert (found.total, found.num_failed) == ([pytest.approx(expected), 0.0], 1)
    assert "reward model good gives no score" in found.warnings[0]
    assert "no system messages" in found.warnings[0]
    with pytest.raises(RewardFailed, match=r"reward model good gives no score .*no system messages.* completion 1"):
        score("stop")


def test_a_reward_model_measures_by_its_raw_scores_and_without_counting_them() -> None:
    settings = {"path": "m", "normalise": "standardise", "weight": 2.0}
    scorer = scored(settings, [10.0, 30.0], [10.0, math.nan], scorer="reward.models.good")
    assert scorer.evaluate([row("1>")] * 2, ended(["1", "2"]), lambda: None) == [10.0, 30.0]
    assert scorer.model_states["good"].count == 0
    with pytest.raises(RewardFailed, match="reward model good gives nan for completion 1"):
        scorer.evaluate([row("1>")] * 2, ended(["1", "2"]), lambda: None)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"evaluate": {"scorer": "reward.models.bad"}},
            r"no table \[reward.models.bad\]; add it, or name one of: good",
        ),
        (
            {"loops": {"main": {**SFT, "algorithm": {"name": "reward_model"}, "num_steps": 1}}},
            "writes no completions to score",
        ),
        ({"evaluate": {"scorer": "reward.models.good", "completions": False}}, "there are no completions to score"),
    ],
)
def test_a_model_that_can_score_no_evaluation_is_refused(sections: dict[str, Any], words: str) -> None:
    base = {name: value for name, value in tiny_spec().items() if name not in ("sft", "train", "grpo")}
    base |= {"reward": {"models": {"good": {"path": "m"}}}, "evaluate": {"scorer": "reward.models.good"}}
    with pytest.raises(ValidationError, match=words):
        RunSpec.model_validate({**base, "loops": {"main": {**GRPO, "num_steps": 2}}, **sections})


def test_only_models_in_use_are_loaded_and_they_need_no_answers() -> None:
    models = {name: {"path": name} for name in ("good", "other")}
    dpo = {"main": {"algorithm": {"name": "dpo"}, "num_steps": 1, "optimizer": RATE}}
    base = {name: value for name, value in tiny_spec().items() if name not in ("sft", "train", "grpo")}
    given = {**base, "loops": dpo, "reward": {"models": models}}
    unused = RunSpec.model_validate(given)
    used = RunSpec.model_validate({**given, "evaluate": {"scorer": "reward.models.good"}})
    assert (list(unused.scoring_models), list(used.scoring_models)) == ([], ["good"])
    assert [spec.completes_held_out(pairs_have_answers=False) for spec in (unused, used)] == [False, True]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"functions": []}, "found neither reward.functions nor reward.models"),
        ({"models": {"mean": {"path": "m"}}}, "reward/mean is another metric"),
        ({"models": {"exact_match": {"path": "m"}}}, "reward/exact_match is another metric"),
        ({"models": {"A b": {"path": "m"}}}, "pattern"),
        ({"models": {"good": {"path": ""}}}, "at least 1 character"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(reward: dict[str, Any], words: str) -> None:
    sections = {"functions": ["rlhf_core.training.rewards:exact_match"], **reward}
    with pytest.raises(ValidationError, match=words):
        RunSpec.model_validate({**tiny_spec(), "reward": sections})


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def run_sections(folder: str, **settings: Any) -> dict[str, Any]:
    good = {"path": f"{folder}/good", "batch_size": 3, **settings}
    return {"reward": {"models": {"good": {**good, "normalise": "standardise"}, "other": {**good, "weight": -0.5}}}}


def runs_of(group: TrainingGroup) -> dict[str, Any]:
    from rlhf_core.training.evaluation import run as evaluation_run
    from rlhf_core.training.trainers import run as run_module

    folder, train = group.folder, group.train
    results: dict[str, Any] = {}
    spec = tiny_spec(**run_sections(folder))
    results["straight"] = train("straight", spec)
    for name in ("straight-again", "forgetful", "changed"):
        group.rewind("straight", name, 6)
    results["resumed"] = train("straight-again", spec, 1)
    real = run_module.load_trainer_state

    def without_scores(*arguments: Any) -> Any:
        state = real(*arguments)
        known = {
            name: ScoringModelState(fingerprint=one.fingerprint) for name, one in state.progress.reward_models.items()
        }
        return dataclasses.replace(state, progress=state.progress.model_copy(update={"reward_models": known}))

    with mock.patch.object(run_module, "load_trainer_state", without_scores):
        results["forgetful"] = train("forgetful", spec, 1)
    two_loops = {key: value for key, value in spec.items() if key not in ("sft", "train", "grpo")}
    for name, main in (("warm", SFT), ("twice", GRPO)):
        two_loops["loops"] = {"warm_start": {**GRPO, "num_steps": 2}, "main": {**main, "num_steps": 2}}
        results[name] = train(name, two_loops)
    group.rewind("twice", "twice-again", 4)
    results["twice again"] = train("twice-again", two_loops, 1)
    split = {**tiny_spec(**run_sections(folder)), "trainer": {"micro_batch_size": 5, "zero_stage": 3}}
    split["train"] = {name: value for name, value in split["train"].items() if name == "num_steps"}
    split["evaluate"] |= {"scorer": "reward.models.good", "every_num_steps": 3}
    results["stage 3"] = train("stage-3", split)
    with mock.patch.multiple(
        evaluation_run, init_process_group=lambda context: group.ranks, leave_process_group=mock.Mock()
    ):
        context = make_context(f"{folder}/stage-3", split, group.ranks.rank, group.ranks.num_ranks)
        results["evaluated"] = str(evaluation_run.run_evaluator(context))
    if group.ranks.is_first:
        make_reward_model(Path(folder) / "new")
        shutil.copy(f"{folder}/zero.safetensors", f"{folder}/good/model.safetensors")
    group.ranks.barrier()
    results["changed"] = train("changed", spec, 1)
    return results


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    make_reward_model(folder / "good")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "good")
    RewardModel(model).requires_grad_(False).classifier.score.weight.zero_()  # type: ignore[union-attr, operator]
    model.save_pretrained(folder / "zero")
    shutil.copy(folder / "zero" / "model.safetensors", folder / "zero.safetensors")
    return values(launch(every_scenario, 2, folder / "launch", folder=str(folder), module=__name__))


@pytest.mark.end_to_end
def test_a_run_that_learns_from_reward_models_is_resumed_bitwise(results: list[dict[str, Any]], folder: Path) -> None:
    for result in results:
        assert (result["straight"], result["resumed"]) == ("done", "done")
    straight = metrics_of(folder, "straight")
    assert {"reward/good", "reward/other", "reward/noisy_reward"} <= straight[6].keys()
    assert straight[6]["reward/good"] == straight[6]["reward/other"]
    assert_resumed_bitwise(folder, "straight")


@pytest.mark.end_to_end
def test_a_resume_that_forgets_the_running_moments_is_caught(results: list[dict[str, Any]], folder: Path) -> None:
    """Negative control of the test above."""
    assert [result["forgetful"] for result in results] == ["done", "done"]
    again, straight = metrics_of(folder, "forgetful", restart=1), metrics_of(folder, "straight")
    assert any(again[number] != straight[number] for number in again)


@pytest.mark.end_to_end
def test_running_moments_continue_from_one_loop_to_the_next(results: list[dict[str, Any]], folder: Path) -> None:
    """A run resumed between its loops reads them from the checkpoint; an uninterrupted run keeps them."""
    assert [(result["twice"], result["twice again"]) for result in results] == [("done", "done")] * 2
    assert_resumed_bitwise(folder, "twice", 4)


@pytest.mark.end_to_end
def test_a_warm_start_that_samples_has_rewards_whatever_follows(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["warm"] for result in results] == ["done", "done"]
    warm, twice = metrics_of(folder, "warm"), metrics_of(folder, "twice")
    rewards = [key for key in twice[1] if key.startswith("reward/")]
    assert {"reward/good", "reward/noisy_reward", "reward/std"} <= set(rewards)
    assert [warm[step][key] for step in (1, 2) for key in rewards] == [
        twice[step][key] for step in (1, 2) for key in rewards
    ]


@pytest.mark.end_to_end
def test_reward_models_that_were_changed_are_refused_by_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["changed"].startswith("ResumeMismatch: reward.models.good: ")


@pytest.mark.end_to_end
def test_split_weights_of_the_policy_leave_the_scores_as_they_are(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["stage 3"] for result in results] == ["done", "done"]
    first, straight = metrics_of(folder, "stage-3")[3], metrics_of(folder, "straight")[3]
    assert first["reward/good"] == pytest.approx(straight["reward/good"], abs=1e-4)


@pytest.mark.end_to_end
def test_evaluations_are_scored_by_a_reward_model(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["evaluated"] for result in results] == ["done", "done"]
    run_dir = RunDir(folder / "stage-3")
    for when in ("before", "after"):
        report = EvaluationReport.model_validate_json(run_dir.evaluation(when, "greedy").read_bytes())
        assert (report.metric, report.num_prompts, math.isfinite(report.value)) == ("good", 10, True)
        assert len({sample.score for sample in report.samples}) > 1
    assert math.isfinite(metrics_of(folder, "stage-3")[3]["eval/greedy"])
