"""The documentation against the code: generated pages are up to date, tables are complete, links are valid."""

import importlib.util
import inspect
import json
import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from http_stand_in import QuietHandler, serving

import rlhf_core.preflight.checks  # noqa: F401 - importing it registers the checks
from rlhf_core.config import fields as config_fields
from rlhf_core.preflight.registry import CHECKS
from rlhf_core.run_dir.attempt import AttemptDir, RestartDir
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checks import CheckResult
from rlhf_core.schemas.evaluation import EvaluateSpec
from rlhf_core.schemas.loops import LoopSpec
from rlhf_core.schemas.rewards import RewardSpec
from rlhf_core.training.rewards.functions import rewards_of
from rlhf_core.training.types import Completion, Row

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = [
    "configuration.md",
    "failures.md",
    "cli.md",
    "preflight.md",
    "database.md",
    "trainers.md",
    "images/database.svg",
]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_page_is_up_to_date(generate: ModuleType, name: str) -> None:
    written = (ROOT / "docs" / name).read_text()
    assert written == generate.PAGES[name](), "run `make docs`"


def test_every_generated_page_is_checked(generate: ModuleType) -> None:
    assert set(generate.PAGES) == set(GENERATED)


def test_every_setting_says_what_it_means() -> None:
    assert [field.name for field in config_fields.describe_fields() if not field.meaning.endswith(".")] == []


def test_the_examples_of_checks_in_the_docs_are_some() -> None:
    page = (ROOT / "docs" / "preflight.md").read_text()
    code, of_nodes = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "our_checks.py", "exec"), names)
    assert [type(finding).__name__ for finding in names["scratch"](None)] == ["Finding"]
    names = {"server_answers": lambda: False}
    exec(compile(of_nodes, "our_checks.py", "exec"), names)
    assert [CheckResult.model_validate(finding).status for finding in names["licence"]()] == ["blocked"]
    tables = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)]
    assert {key for table in tables for key in table} == {"preflight", "project"}
    ids = {one.id for one in CHECKS}
    assert set(tables[0]["preflight"]["off"]) <= ids


class _Judge(QuietHandler):
    """A judge that is not there for a moment, then likes numbers, and says nothing about an empty answer."""

    failures = 2

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if _Judge.failures:
            _Judge.failures -= 1
            self.send_error(502)
            return
        answer = body["messages"][0]["content"].partition("Answer: ")[2]
        reply = "A rating is impossible." if not answer else f"Rating: {9 if answer.isdigit() else 2}"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": reply}}]}).encode())


def test_the_examples_of_reward_functions_in_the_docs_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    boxed, judge = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(boxed, "my_rewards.py", "exec"), names)
    rows = [Row(f"{number}-0", "1+1?", "2", "", {"answer": "2"}) for number in range(4)]
    texts = [r"so \boxed{1} \boxed{ 2 }", r"\boxed{3}", "2", ""]
    completions = [Completion([], text, True, []) for text in texts]
    assert rewards_of("boxed", names["boxed"], rows, completions) == [1.0, 0.0, 0.0, 0.0]
    tables = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)]
    rewarded = next(table for table in tables if "reward" in table)
    assert RewardSpec.model_validate(rewarded["reward"]).functions == ("my_rewards:boxed",)
    assert EvaluateSpec.model_validate(rewarded["evaluate"]).scorer == "my_rewards:boxed"
    assert [LoopSpec.model_validate(table["loops"]["main"]).reference for table in tables if "loops" in table] == [
        "models/Qwen3-8B"
    ]
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with serving(_Judge) as port:
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{port}")
        exec(compile(judge, "my_judge.py", "exec"), names)
        assert rewards_of("judged", names["judged"], rows, completions) == [0.2, 0.2, 0.9, None]
    assert _Judge.failures == 0, "control: some requests had to be repeated"


# ---------------------------------------------------------------------------------------------------------------------
# docs/run_directory.md


def _paths(of: object) -> Iterator[Path]:
    """All paths of the classes in run_dir.py, with argument names in angle brackets."""
    for name, member in inspect.getmembers(type(of)):
        if name.startswith("_"):
            continue
        if isinstance(member, property) and member.fget and inspect.signature(member.fget).return_annotation is Path:
            yield getattr(of, name)
        elif inspect.isfunction(member) and inspect.signature(member).return_annotation is Path:
            arguments = [argument for argument in inspect.signature(member).parameters if argument != "self"]
            yield getattr(of, name)(*(f"<{argument.removesuffix('_rank')}>" for argument in arguments))


def _known_paths() -> set[str]:
    trees = (
        RunDir(Path()),
        AttemptDir(Path("attempts/<n>"), 1),
        RestartDir(Path("attempts/<n>/restarts/<r>"), 1, 0),
        CheckpointDir(Path("checkpoints/step-<step>"), 1),
    )
    return {str(path) for tree in trees for path in _paths(tree)}


def _documented_paths(page: str) -> set[str]:
    return {path.rstrip("/") for path in re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)}


def test_the_table_of_the_run_directory_has_every_path_and_no_other() -> None:
    page = (ROOT / "docs" / "run_directory.md").read_text()
    assert _documented_paths(page) == _known_paths()


def test_a_path_without_a_row_is_seen() -> None:
    page = (ROOT / "docs" / "run_directory.md").read_text()
    without = "\n".join(line for line in page.splitlines() if "`control.jsonl` |" not in line)
    assert _known_paths() - _documented_paths(without) == {"control.jsonl"}


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def test_every_command_has_help_and_stands_in_the_readme(generate: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    commands = dict(generate.commands())
    assert len(commands) > 10
    assert [path for path, command in commands.items() if not (command.help or "").strip()] == []
    assert [path for path in commands if f"`{path}" not in readme] == []


def test_every_option_has_help(generate: ModuleType) -> None:
    silent = [
        f"{path} {parameter.name}"
        for path, command in generate.commands()
        for parameter in command.params
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False) and not parameter.help
    ]
    assert silent == []


# ---------------------------------------------------------------------------------------------------------------------
# Links


def _links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            yield target


def _anchor(heading: str) -> str:
    """Anchor of a heading: lower case, hyphens for spaces, without other punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _leads_nowhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    found = page.parent / name if name else page
    if not found.exists():
        return True
    if not anchor:
        return False
    headings = re.findall(r"^#+ (.+)$", found.read_text(), flags=re.MULTILINE)
    return anchor not in {_anchor(heading) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in _links(page) if _leads_nowhere(page, target)] == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](#here) [b](#there) [c](page.md) [d](gone.md)")
    assert [target for target in _links(page) if _leads_nowhere(page, target)] == ["#there", "gone.md"]


def test_files_named_in_the_docs_exist() -> None:
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`((?:rlhf_core|flows|migrations|tests|infra|docs)/[\w./-]+)`", page.read_text())
    }
    assert named
    assert [(page, name) for page, name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_decision_is_listed() -> None:
    listed = set(_links(ROOT / "docs" / "decisions" / "README.md"))
    assert listed == {path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
