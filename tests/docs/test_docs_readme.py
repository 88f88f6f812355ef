"""Configs in the docs can be run: that of the README is checked here with a small model of the same kind."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from process_tools import run_rlhf
from site_files import options

from rlhf_core.config import loading as config
from rlhf_core.errors import BadConfig
from rlhf_core.schemas.algorithms import GrpoSpec

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"What is {n} and {n}?", "answer": f"They are {2 * n}.\n#### {2 * n}"} for n in range(40)]
HERE = options(
    *("resources.num_nodes=1", "resources.ranks_per_node=1", "resources.gpus_per_node=0"),
    *("resources.cpus_per_rank=1", "resources.memory_gb=0"),
)
"""Resources of this machine."""


def toml_blocks(page: Path) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def overrides(table: Mapping[str, object], section: str = "") -> Iterator[str]:
    """Each value of a parsed TOML file as ``section.field=value``."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{section}{name}.")
        else:
            yield f"{section}{name}={json.dumps(value)}"


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
    (written,) = [block for block in toml_blocks(ROOT / "README.md") if block.startswith("# my.toml\n")]
    (tmp_path / "my.toml").write_text(written)
    model_folder(tmp_path / "models" / "Qwen3-0.6B")
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = run_rlhf(tmp_path, "check", "my.toml", *HERE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_changes_of_the_first_run_fit_its_preset() -> None:
    page = ROOT / "docs" / "first_run.md"
    (preset,) = re.findall(r"rlhf init my.toml --preset (\S+)", page.read_text())
    (changed,) = toml_blocks(page)
    spec = config.load(preset, list(overrides(tomllib.loads(changed))))
    assert spec.loops.main is not None
    assert isinstance(spec.loops.main.algorithm, GrpoSpec)
    assert spec.loops.main.algorithm.prompts_per_step % spec.num_ranks == 0
    with pytest.raises(BadConfig):
        config.load(preset, list(overrides(tomllib.loads(changed.replace("num_nodes", "nodes")))))
