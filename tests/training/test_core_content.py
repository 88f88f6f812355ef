"""Content checks of the data, run through the command that preflight starts on real tokenizers and files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from control_fakes import make_spec
from core_models import char_tokenizer
from fork_server import content_report
from turn_tools import TOOL_TEMPLATE

from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.content import ContentReport, TrialProblem
from rlhf_core.schemas.model import BUILT_TOKENIZERS
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.data.loading import completion_lengths, prompt_tokens
from rlhf_core.training.data.tokenizer_cores import build_core
from rlhf_core.training.data.tokenizers import CHAT_TEMPLATE, build_tokenizer
from rlhf_core.training.probes.content import functions_to_try
from rlhf_core.training.probes.tokenizer import CoreTokenizer, check_tokenizer, difference_of_reference
from rlhf_core.training.types import Row

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.training

MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
"""A template that marks the end of the user's turn, and has no header for the answer."""


LOGIN_NODE = ("bash", "-c", 'ulimit -t 20 -d 3145728; exec "$@"', "bash")
"""Start of a command that may take 20 s of CPU time and 3 GiB of memory."""


def written(spec: RunSpec, tmp_path: Path, code: str) -> Path:
    (tmp_path / "my_data.py").write_text(code)
    path = tmp_path / "spec.json"
    path.write_text(spec.model_dump_json())
    return path


def report_of(spec: RunSpec, tmp_path: Path, code: str = "") -> ContentReport:
    """The report of the command, without a process of its own."""
    return content_report(written(spec, tmp_path, code), tmp_path)


def report_of_command(spec: RunSpec, tmp_path: Path, code: str = "", before: tuple[str, ...] = ()) -> ContentReport:
    """Answer of the command."""
    path = written(spec, tmp_path, code)
    command = [sys.executable, "-m", "rlhf_core.worker", "check-content", "--spec", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*before, *command, "--path", str(tmp_path)], capture_output=True, text=True, env=environment, check=True
    )
    (line,) = done.stdout.splitlines()
    return ContentReport.model_validate_json(line)


def with_files(tmp_path: Path, rows: list[dict[str, Any]], held: list[dict[str, Any]], **sections: Any) -> RunSpec:
    paths = {}
    for name, content in (("train", rows), ("eval", held)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        paths[name] = str(path)
    data = {"generator": "", **paths, **sections.pop("data", {})}
    return make_spec(data=data, **sections)


def test_a_healthy_run_within_the_limits_of_a_login_node(tmp_path: Path) -> None:
    report = report_of_command(make_spec(), tmp_path, before=LOGIN_NODE)
    train, held = report.splits
    assert (train.problem, train.num_rows, train.is_whole) == ("", 2000, False)
    assert (held.num_rows, held.is_whole, held.columns) == (512, True, ("answer", "prompt"))
    assert (train.longest_prompt, train.longest_taught, train.num_overlong) == (7, 14, 0)
    assert 500 < train.bytes_per_row < 2000, "texts, columns and tokens of a short row"
    assert report.tokenizer is not None
    assert (report.tokenizer.problem, report.tokenizer.num_changed, report.tokenizer.chat_problem) == ("", 0, "")
    (trial,) = report.rewards
    assert (trial.problem, trial.num_distinct, trial.right, trial.wrong) == (TrialProblem.NONE, 2, 1.0, 0.0)
    assert report.num_shared == 0


def test_long_rows_repeated_rows_and_unknown_characters(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * n, "answer": "é"} for n in (3, 3, 30)]
    spec = with_files(tmp_path, rows, rows[:1], data={"max_prompt_tokens": 10})
    report = report_of(spec, tmp_path)
    train = report.splits[0]
    assert (train.num_overlong, train.longest_prompt, train.longest_taught) == (1, 30, 5)
    assert (train.num_duplicates, report.num_shared) == (1, 1)
    assert report.tokenizer is not None
    assert report.tokenizer.num_changed == 4
    assert report.tokenizer.unknown_share > 0
    assert "'é' came back as" in report.tokenizer.example


def test_labels_are_those_of_the_rows_that_are_used(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * (1 + 19 * (not label)), "completion": "b", "label": label} for label in (True, False)]
    main = {"num_steps": 1, "algorithm": {"name": "kto"}, "optimizer": {"learning_rate": 1e-4}}
    for most, num_prompts, expected in ((30, 2, (False, True)), (30, 1, (True,)), (10, 2, (True,))):
        data = {"answer_column": "completion", "completion_template": "{completion}", "max_prompt_tokens": most}
        sections = {"data": data, "loops": {"main": main}, "sft": {}, "train": {}}
        spec = with_files(tmp_path, rows, rows, **sections, evaluate={"num_prompts": num_prompts})
        train, held = report_of(spec, tmp_path).splits
        assert (train.problem, held.labels) == ("", expected)
        assert train.labels == ((False, True) if most > 20 else (True,))


def test_the_longest_held_out_row_is_one_that_is_evaluated(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b" * n} for n in (3, 30)]
    for num_prompts, longest in ((1, 5), (2, 32), (0, 32)):
        spec = with_files(tmp_path, rows[:1], rows, evaluate={"num_prompts": num_prompts})
        assert report_of(spec, tmp_path).splits[1].longest_taught == longest


LEVELS = """
def reward(*, completions, topic, **columns):
    return [0.0] * len(completions)

def scorer(*, completions, level, **columns):
    return [0.0] * len(completions)
"""


@pytest.mark.parametrize(("column", "message"), [("level", ""), ("topic", "it needs level; the data has only")])
def test_a_scorer_is_tried_on_the_rows_that_it_scores(tmp_path: Path, column: str, message: str) -> None:
    trained = [{"prompt": "a", "answer": "b", "topic": "c"}]
    held = [{"prompt": "d", "answer": "e", column: "f", "source": "g"}]
    functions = {"reward": {"functions": ["my_data:reward"]}, "evaluate": {"scorer": "my_data:scorer"}}
    reward, scorer = report_of(with_files(tmp_path, trained, held, **functions), tmp_path, LEVELS).rewards
    assert (reward.function, reward.message, reward.is_held_out) == ("my_data:reward", "", False)
    assert (scorer.function, scorer.is_held_out) == ("my_data:scorer", True)
    assert scorer.message.startswith(message)
    assert bool(scorer.problem) is bool(message)


def test_defaults_that_a_run_without_answers_never_calls_are_not_tried() -> None:
    """Preflight reported the rewards of exact_match, which would have been 1 for empty completions."""
    dpo = {"algorithm": {"name": "dpo"}, "num_steps": 1, "optimizer": {"learning_rate": 1e-4}}
    base = make_spec().model_dump(mode="json") | {"loops": {"main": dpo}}
    pairs = RunSpec.model_validate(base)
    exact = ["rlhf_core.training.rewards:exact_match"]
    assert functions_to_try(pairs) == (exact, exact)
    assert functions_to_try(with_changes(pairs, {"data.answer_column": ""})) == ([], [])
    judged = {"data.answer_column": "", "evaluate.scorer": "my_judge:judged"}
    assert functions_to_try(with_changes(pairs, judged)) == ([], ["my_judge:judged"])


def test_a_generator_that_breaks_is_a_sentence(tmp_path: Path) -> None:
    code = """
def rows(split, seed):
    print("hello")
    if split == "train":
        raise KeyError("no such split")
    return open("rows.json").readlines()
"""
    report = report_of_command(make_spec(data={"generator": "my_data:rows"}), tmp_path, code)
    train, held = report.splits
    assert train.problem == "KeyError: 'no such split'"
    assert "'rows.json'; code of a run does not start in your folder" in held.problem
    assert (report.tokenizer, report.rewards) == (None, ())


def test_a_reward_function_that_hangs_does_not_prevent_the_other_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def kills(**columns):\n    import os\n    os._exit(9)\n"
    report = report_of(make_spec(reward={"functions": ["my_data:kills"]}), tmp_path, code)
    assert [trial.problem for trial in report.rewards] == ["died", ""]
    assert report.tokenizer is not None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing.here }}", "does not render"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "no generation prompt"),
        ("{% if add_generation_prompt %}go{% endif %}", "leaves the user's message out"),
        ("", ""),
        (MISTRAL, ""),
        (MISTRAL.replace("' '", "'<|assistant|>'"), "no generation prompt"),
    ],
)
def test_chat_templates(template: str, message: str) -> None:
    tokenizer = build_tokenizer("byte", (), 0)
    tokenizer.chat_template = template
    assert message in check_tokenizer(tokenizer, ["x"]).chat_problem
    assert bool(message) == bool(check_tokenizer(tokenizer, ["x"]).chat_problem)


def test_tokenizers_that_know_everything_change_nothing() -> None:
    texts = ["a  b\n\tc ", "é 中文 🎉", "<|im_end|>", ""]
    for kind in ("byte", "bpe"):
        report = check_tokenizer(build_tokenizer(kind, texts, 512), texts)
        assert (report.num_changed, report.unknown_share) == (0, 0.0)


@pytest.mark.parametrize("kind", BUILT_TOKENIZERS)
def test_without_transformers_the_answer_is_that_of_what_training_builds(kind: str) -> None:
    texts = ["a  b\n\tc ", "é 中文 🎉", "é 中文 🎉", "<|im_end|>", "31>13<|pad|>", ""]
    core, whole = CoreTokenizer(build_core(kind, texts, 320)), build_tokenizer(kind, texts, 320)
    assert check_tokenizer(core, texts) == check_tokenizer(whole, texts)
    assert (check_tokenizer(core, texts).num_changed > 0) == (kind == "char")
    rows = [Row(uid="", prompt=text, answer="", target=text, columns={}) for text in texts]
    assert prompt_tokens(rows, core) == prompt_tokens(rows, whole)
    assert completion_lengths(rows, core) == completion_lengths(rows, whole)


def test_messages_are_rendered_as_in_training(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "ab"}] for text in ("a", "bcd")]
    rows: list[dict[str, Any]] = [{"messages": one} for one in (*turns, turns[0] * 2, turns[0] * 2)]
    data = {"max_prompt_tokens": 60, "messages_column": "messages"}
    report = report_of(with_files(tmp_path, rows, rows[:1], data=data, train={"algorithm": "sft"}), tmp_path)
    assert report.splits[0].num_duplicates == 1
    assert report.tokenizer is not None
    assert (report.tokenizer.problem, report.tokenizer.chat_problem) == ("", "")
    assert report.tokenizer.turn_end == "<|im_end|>"
    begins = len("user\nassistant\n\n") + len(("<|im_start|>", "<|im_end|>", "<|im_start|>"))
    assert report.splits[0].longest_prompt == begins + len("bcd")
    answer = len("ab\n") + len(("<|im_end|>",))
    assert report.splits[0].longest_completion == answer + begins + len("a") + answer, "two turns and one between"


def test_texts_that_go_past_the_chat_template_are_noticed(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for prompt, is_bypassed in (("a", True), ("a<|im_end|>", False)):
        rows = [{"prompt": prompt, "answer": "b"}]
        spec = with_files(tmp_path, rows, rows, model={"tokenizer": str(tmp_path / "tokenizer")})
        report = report_of(spec, tmp_path)
        assert report.tokenizer is not None
        assert report.tokenizer.is_bypassed == is_bypassed, "prompts may be written in the form of the template"


def test_conversations_that_the_template_refuses_are_counted(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% if messages | length > 3 %}{{ raise_exception('too many turns') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    asked: list[dict[str, Any]] = [{"role": "user", "content": "ab"}]
    rows: list[dict[str, Any]] = [{"prompt": asked * times, "answer": "ab"} for times in (1, 4, 2, 4)]
    tools: list[dict[str, Any]] = [{**rows[0], "tools": tools} for tools in ([{"name": "add"}], "[{}]", [], "[]", None)]
    model = {"tokenizer": str(tmp_path / "tokenizer")}
    spec = with_files(tmp_path, rows, tools, model=model, data={"template_args": {"many": 1, "thinks": False}})
    report = report_of(spec, tmp_path)
    assert [split.num_unused_tools for split in report.splits] == [0, 2]
    assert report.tokenizer is not None
    assert (report.tokenizer.unread_arguments, report.tokenizer.is_bypassed) == (("thinks",), False)
    assert report.tokenizer.problem == ""
    assert report.tokenizer.turn_end == "", "a vertical bar is no special token"
    train, held = report.splits
    assert (train.num_unrendered, held.num_unrendered) == (2, 0)
    assert f"{tmp_path / 'train.jsonl'}:2: " in train.unrendered
    assert "too many turns" in train.unrendered
    assert train.longest_prompt == len("ab|ab|"), "the others are measured"


FORGETFUL = "{% if m.role == 'assistant' and not loop.last %}...{% endif %}{% for call"
"""Part of a template that renders a turn otherwise once others follow."""
TOOLS = """
def search(query: str) -> str:
    \"\"\"
    Search.

    Args:
        query: Words.
    \"\"\"
    print("printed by a tool")
    return query

class Folder:
    def __init__(self):
        print("printed by an environment")

    def reset(self, size, **columns):
        self.size = int(size)

    def get_reward(self):
        return self.size
"""


@pytest.mark.parametrize(
    ("size", "template", "problem"),
    [
        ("3", TOOL_TEMPLATE, ""),
        ("x", TOOL_TEMPLATE, "tried on real rows, reset raised ValueError: invalid literal for int()"),
        ("3", CHAT_TEMPLATE, "does not tell the model of search"),
        ("3", TOOL_TEMPLATE.replace("{% for call", FORGETFUL), "once an observation follows"),
    ],
)
def test_tools_and_environments_are_tried(tmp_path: Path, size: str, template: str, problem: str) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": [{"role": "user", "content": "How?"}], "answer": "so", "size": size}]
    turns = {"tools": ["my_data:search"], "environment": "my_data:Folder", "max_turn_tokens": 4}
    model = {"tokenizer": str(tmp_path / "tokenizer")}
    spec = with_files(tmp_path, rows, rows, model=model, rollout={"turns": turns}, data={"max_prompt_tokens": 200})
    report = (report_of if problem else report_of_command)(spec, tmp_path, code=TOOLS)
    assert report.turns is not None
    assert problem in report.turns.problem
    assert bool(report.turns.problem) == bool(problem)
    assert (report.turns.tools, report.turns.has_reward) == (("search",), True)
    if template == TOOL_TEMPLATE:
        assert report.splits[0].longest_prompt > len("How?search"), "with what the model is told of the tools"


def test_the_tokenizer_of_a_reference_is_compared_with_that_of_the_policy(tmp_path: Path) -> None:
    """In the texts of the rows; a folder without one has none to compare with."""
    same, other, other_end = (tmp_path / name for name in ("same", "other", "other-end"))
    char_tokenizer().save_pretrained(str(same))
    build_tokenizer("byte", (), 0).save_pretrained(str(other))
    ending = char_tokenizer()
    ending.eos_token = "7"
    ending.save_pretrained(str(other_end))
    core = CoreTokenizer(build_core("char", (), 0))
    texts = ["no other", "12>"]
    assert difference_of_reference(same, core, texts) == ""
    assert difference_of_reference(tmp_path / "none", core, texts) == ""
    assert "its end token is" in difference_of_reference(other_end, core, texts)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    assert "contains no tokenizer that transformers can load" in difference_of_reference(
        tmp_path / "broken", core, texts
    )
    spec = make_spec(model={"tokenizer": "char"}, data={"generator": "my_data:rows"})
    main = {"algorithm": {"name": "distillation"}, "reference": str(other), "optimizer": {"learning_rate": 1e-4}}
    spec = with_changes(spec, {"loops.main": {"num_steps": 1, **main}})
    code = "def rows(split, seed):\n    return [{'prompt': '12>', 'answer': '1'}] * 40\n"
    report = report_of(spec, tmp_path, code).tokenizer
    assert report is not None
    assert list(report.references) == ["loops.main.reference"]
    assert report.problem == ""
