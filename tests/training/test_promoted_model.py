"""Promoted models work with the libraries of others: they load, give the same answers, and have a readable card."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from made_reports import evaluation_report, model_provenance
from rank_launcher import tiny_spec
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlhf_core.launch.model_card import model_card
from rlhf_core.launch.promote import damage, write_model_directory
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.promotion import ModelProvenance
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoints.state import Progress
from rlhf_core.training.checkpoints.writer import CheckpointWriter
from rlhf_core.training.data.tokenizers import build_tokenizer
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.causal_lm import build_causal_lm

pytestmark = pytest.mark.training


def origin(run_id: str, spec: RunSpec) -> ModelProvenance:
    return model_provenance(
        run_id,
        name=spec.name,
        tags=("quote \" and 'tick': yes",),
        reason="it | sorts",
        base_model=spec.model.path,
        evaluations=(evaluation_report("before", "greedy", 0.25), evaluation_report("after", "greedy", 0.75)),
    )


def promoted(run_dir: RunDir, ranks: Ranks, target: Path) -> Any:
    """Save a checkpoint as training does, and promote it; return the saved model."""
    spec = RunSpec.model_validate(tiny_spec())
    tokenizer = build_tokenizer("char", [], 0)
    model = build_causal_lm(tiny_spec()["model"]["config"], tokenizer, 0)
    writer = CheckpointWriter(run_dir, spec, tokenizer, ranks, lambda: None, 1)
    saved = writer.begin(Progress(step=4, loop="grpo", loop_finished=True, position=32), model, {})
    writer.finish()
    provenance = origin(run_dir.run_id, spec)
    write_model_directory(saved, target, model_card(provenance, spec), provenance, lambda: None)
    return model


def test_a_promoted_model_loads_and_answers_like_the_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    run_dir, target = RunDir(tmp_path / "run"), tmp_path / "models" / "run"
    run_dir.root.mkdir()
    trained = promoted(run_dir, ranks, target)
    assert damage(target) == []
    loaded = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompt = tokenizer("31420>", return_tensors="pt")
    with torch.no_grad():
        expected = trained.eval()(prompt["input_ids"]).logits
        found = loaded.eval()(prompt["input_ids"]).logits
    assert torch.equal(found, expected)
    assert GenerationConfig.from_pretrained(target).eos_token_id is not None
    answer = loaded.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]


def test_the_card_is_one_that_the_hub_reads(tmp_path: Path, ranks: Ranks) -> None:
    run_dir, target = RunDir(tmp_path / "run"), tmp_path / "models" / "run"
    run_dir.root.mkdir()
    promoted(run_dir, ranks, target)
    card = ModelCard.load(target / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["rlhf", "grpo", "quote \" and 'tick': yes"]
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("exact_match", 0.75)
    assert result.metric_args == {"ci_low": 0.65, "ci_high": 0.85, "confidence": 0.95, "num_samples": 8}
    assert card.data.pipeline_tag == "text-generation"
    assert "by bea: it \\| sorts" in card.text


def test_the_card_of_a_reward_model_names_its_task() -> None:
    spec = {key: value for key, value in tiny_spec().items() if key not in ("sft", "train", "grpo")}
    main = {"num_steps": 1, "algorithm": {"name": "reward_model", "batch_size": 2}, "optimizer": {"learning_rate": 1}}
    trained = RunSpec.model_validate({**spec, "loops": {"main": main}})
    card = model_card(origin("run", trained), trained)
    assert "pipeline_tag: text-classification" in card
    assert "with the reward" not in card, "nothing was sampled"
