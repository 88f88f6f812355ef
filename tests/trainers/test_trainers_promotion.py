"""A checkpoint of another trainer becomes a model directory as one of the native trainer does."""

import json
from pathlib import Path

import pytest
from trainer_runs import Tiny, TrainerSite, merged, preset_run

pytestmark = [pytest.mark.trainers, pytest.mark.end_to_end, pytest.mark.timeout(900)]

LOADED = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.num_parameters(), AutoTokenizer.from_pretrained(sys.argv[1]).decode([20, 21]))
"""


def test_a_checkpoint_of_trl_is_promoted(site: TrainerSite, tiny: Tiny) -> None:
    config = merged(preset_run("trl-cpo", tiny, num_steps=8, every=4), {"promote": {"when": "always"}})
    run = site.begin(site.write(config))
    assert site.finish() == "completed", site.described()
    ((state, step, path),) = site.rows("SELECT state, checkpoint_step, path FROM promotions")
    assert (state, step) == ("promoted", 8)
    promoted = Path(path)
    assert promoted.name == run.run_id
    names = {one.name for one in promoted.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not names & {"trainer_state.json", "optimizer.pt", "training_args.bin"}
    assert json.loads((promoted / "config.json").read_text())["model_type"] == "qwen3"
    assert site.python(f"import sys\nsys.argv = ['', {path!r}]\n{LOADED}").startswith("6")
