"""The config in the README can be run: it is checked here with a small model of the same kind."""

import json
import re
from pathlib import Path

import pytest
from process_tools import run_rlhf
from site_files import options

README = Path(__file__).parents[2] / "README.md"
ROWS = [{"question": f"What is {n} and {n}?", "answer": f"They are {2 * n}.\n#### {2 * n}"} for n in range(40)]
HERE = options("resources.num_nodes=1", "resources.ranks_per_node=1", "resources.gpus_per_node=0")
"""Resources of this machine."""


def model_folder(folder: Path) -> None:
    """A Hugging Face folder with random weights."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlhf_core.training.data.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("byte", (), 0)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.mark.training
def test_the_config_of_the_readme_passes_its_checks(tmp_path: Path) -> None:
    (config,) = re.findall(r"^```toml\n(# my\.toml\n.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "my.toml").write_text(config)
    model_folder(tmp_path / "models" / "Qwen3-0.6B")
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = run_rlhf(tmp_path, "check", "my.toml", *HERE)
    assert done.returncode == 0, done.stdout + done.stderr
