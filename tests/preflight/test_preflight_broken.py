"""Broken configs, one mistake each: found before any allocation, with a message that names the setting and the remedy.
The first lines of each file in ``broken/`` name its mistake, the check that finds it (or ``config`` if it cannot be
loaded), and the expected message.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeScheduler
from fork_server import content_report
from test_preflight_checks import healthy
from test_preflight_command import SIDE, command

from rlhf_core.config import loading as config
from rlhf_core.config.site import load_site
from rlhf_core.errors import BadConfig
from rlhf_core.launch.config_paths import absolute_paths
from rlhf_core.preflight import gather_facts, program_queries
from rlhf_core.preflight.data_file import scan_files
from rlhf_core.preflight.facts import Disk, Facts
from rlhf_core.preflight.gather_facts import Surroundings
from rlhf_core.preflight.model_types import read_model_types
from rlhf_core.preflight.program_queries import query_program
from rlhf_core.preflight.registry import run_checks
from rlhf_core.presets import PRESETS
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.content import ContentReport
from rlhf_core.schemas.run import RunSpec

FOLDER = Path(__file__).parent / "broken"
CASES = sorted(FOLDER.glob("*.toml"))
TRANSFORMERS = Path(str(util.find_spec("transformers").origin)).parent  # type: ignore[union-attr]  # it is installed
UNWANTED = {CheckStatus.BLOCKED, CheckStatus.WARNING}


def header(path: Path) -> dict[str, list[str]]:
    """Parse the comments at the top into keywords and values."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("# "):
            break
        word, _, text = line.removeprefix("# ").partition(": ")
        found.setdefault(word, []).append(text)
    return found


def surroundings(path: Path) -> dict[str, Any]:
    around: dict[str, Any] = json.loads(header(path).get("Around", ["{}"])[0])
    return around


def facts_of(path: Path, spec: RunSpec) -> Facts:
    """Gather the facts from the files and from the cluster described by the case."""
    around = surroundings(path)
    scheduler, packages = around.pop("scheduler", "local"), around.pop("packages", {})
    if spec.trainer.kind == "command":
        side = replace(SIDE, packages={**SIDE.packages, **packages}, **around.pop("side", {}))
        inventory = FakeScheduler(**around).inventory()
        return replace(command(), spec=spec, scheduler=scheduler, inventory=inventory, trainer=side)
    base = healthy()
    return replace(
        base,
        spec=spec,
        scheduler=scheduler,
        inventory=FakeScheduler(**around).inventory(),
        compute=replace(base.compute, packages={**base.compute.packages, **packages}),
        disk=Disk(Path("/runs"), free_bytes=10 * 2**40),
        files=scan_files(spec, spec.data.files),
        model_config=spec.model.config,
        model_types=read_model_types(TRANSFORMERS, spec.model.config),
    )


def messages(path: Path, tmp_path: Path) -> tuple[set[str], str]:
    """List the findings about a config, with their wording."""
    try:
        spec = absolute_paths(config.load(path), FOLDER)
    except BadConfig as error:
        return {"config"}, str(error)
    facts = facts_of(path, spec)
    if any(found.startswith("content.") for found in header(path)["Found by"]):
        site = load_site({"RLHF_HOME": str(tmp_path)})
        around = Surroundings(site, facts.inventory, "local", code_path=FOLDER / "files")
        content = gather_facts.inspect_content(spec, around)
        assert isinstance(content, ContentReport), content
        facts = replace(facts, content=content)
    found = [one for one in run_checks(facts) if one.status in UNWANTED]
    return {one.id for one in found}, "\n".join(f"{one.found}; {one.expected}; {one.advice}" for one in found)


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_a_broken_config_is_found_and_explained(path: Path, tmp_path: Path) -> None:
    keywords = header(path)
    by, text = messages(path, tmp_path)
    assert keywords["Found by"] == sorted(by), text
    assert len(keywords["Says"]) >= 2
    assert [words for words in keywords["Says"] if words not in text] == [], text


def test_there_are_twenty_and_each_says_what_is_wrong() -> None:
    assert len(CASES) >= 20
    assert [path.name for path in CASES if not header(path)["Wrong"][0].endswith(".")] == []


def gsm8k_files(folder: Path) -> list[str]:
    settings = []
    for split, first in (("train", 0), ("eval", 500)):
        rows = [
            {"question": f"What is {n} + {n}?", "answer": f"It is {n + n}.\n#### {n + n}"}
            for n in range(first, first + 100)
        ]
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings.append(f"data.{split}={path}")
    return settings


NEEDS_MORE = {
    "quickstart-distillation": ["model.reference"],  # a promoted teacher
    "quickstart-reward-model-grpo": ["reward.models"],  # a promoted reward model
}
"""Presets with prerequisites, and the checks that report them. Presets for GPUs are predicted elsewhere."""


@functools.cache
def answer_for_all(*command: str) -> dict[str, Any] | str:
    return query_program(command, lambda: None)


def ask(command: Sequence[str], *_: Any, **limits: Any) -> dict[str, Any] | str:
    """Ask about the content of each preset, and only once about the interpreter and the functions of all presets."""
    if "check-content" not in command:
        return answer_for_all(*command)
    return content_report(Path(command[command.index("--spec") + 1]), FOLDER / "files").model_dump()


@pytest.mark.training
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in PRESETS
        if config.load(name).trainer.kind == "native" and not config.load(name).resources.gpus_per_node
    ],
)
def test_no_preset_is_blocked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gather_facts, program_queries):
        monkeypatch.setattr(module, "query_program", ask)
    spec = config.load(name, gsm8k_files(tmp_path) if name == "gsm8k" else ())
    scheduler = FakeScheduler(nodes=tuple("abcd")[: spec.resources.num_nodes])
    kind, site = "slurm" if spec.resources.num_nodes > 1 else "local", load_site({"RLHF_HOME": str(tmp_path)})
    around = Surroundings(site, scheduler.inventory(), kind, code_path=FOLDER / "files")
    facts = gather_facts.gather(spec, around)
    assert facts.content is not None
    findings = run_checks(facts)
    assert [one.id for one in findings if one.status is CheckStatus.BLOCKED] == NEEDS_MORE.get(name, [])
    warnings = [one.id for one in findings if one.status is CheckStatus.WARNING]
    assert not [one for one in warnings if one.startswith("batch.")], "a user can do nothing about those of a preset"
