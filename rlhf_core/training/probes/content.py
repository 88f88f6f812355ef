"""Check of the data before any node is allocated: rows, tokenizer, lengths, rewards. Bounded in time and memory.

Runs in the compute interpreter, where tokenizers and reward functions can be imported, on the machine that starts the
run. It returns a :class:`ContentReport`, which preflight judges.
"""

import dataclasses
import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import RlhfError
from rlhf_core.schemas.content import ContentReport, RewardTrial, SplitReport, TokenizerReport, TurnsReport
from rlhf_core.schemas.model import BUILT_TOKENIZERS
from rlhf_core.schemas.rewards import ENVIRONMENT_REWARD
from rlhf_core.schemas.run import RunSpec
from rlhf_core.survival import Survived, relative_path_advice
from rlhf_core.training.data.chat import render_rows, template_arguments, turn_end, with_tools
from rlhf_core.training.data.generated_rows import Split
from rlhf_core.training.data.loading import completion_lengths, completions_of, load_source, prompt_tokens
from rlhf_core.training.probes.reward_functions import set_limit, try_rewards
from rlhf_core.training.probes.tokenizer import CoreTokenizer, built_tokenizer, check_tokenizer, difference_of_reference
from rlhf_core.training.probes.turns import template_problem, try_turns
from rlhf_core.training.types import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_ROWS = 2000
"""Rows of each split that are checked: enough to detect a share of one per cent, few enough to take a second."""
MEMORY_BYTES = 16 << 30
"""Memory limit of the whole check, in bytes."""

AROUND_CORE = 2.0
"""Time that transformers takes for short texts, relative to the time of its tokenizer's core."""


def check_content(spec_path: Path) -> ContentReport:
    """Check the rows of a spec, its tokenizer and its reward functions.

    Args:
        spec_path: a ``RunSpec`` as JSON, with absolute paths.
    """
    set_limit(resource.RLIMIT_DATA, MEMORY_BYTES)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    spec = RunSpec.model_validate_json(spec_path.read_bytes())
    split_reports, rows = _read(spec)
    report = ContentReport(splits=tuple(split_reports.values()))
    trained, held = _of_split(rows, "train"), _of_split(rows, "eval")
    if not trained:
        return report
    # Before anything heavy is imported: the functions run in forks of this process, which must have no threads.
    rewards = _trials(spec, trained, held)
    shared = len({row.prompt for row in trained} & {row.prompt for row in held})
    turns = None
    if spec.rollout.turns.are_used:
        turns, tools = try_turns(spec.rollout.turns, trained)
        rows = {part: with_tools(of_part, tools) for part, of_part in rows.items()}
    tokenizer, tokenizer_report = _tokenizer(spec, rows)
    if tokenizer is not None and not tokenizer_report.problem:
        split_reports, rows, problem = _rendered(split_reports, rows, tokenizer, spec)
        tokenizer_report = tokenizer_report.model_copy(update={"problem": problem})
        rendered = _of_split(rows, "train")
        if turns is not None and rendered:
            turns = _with_template(turns, spec, rendered[0], tokenizer)
    if tokenizer is not None and not tokenizer_report.problem:
        split_reports = {
            part: _with_lengths(one, rows.get(part, []), tokenizer, spec) for part, one in split_reports.items()
        }
    return report.model_copy(
        update={
            "splits": tuple(split_reports.values()),
            "num_shared": shared,
            "tokenizer": tokenizer_report,
            "rewards": tuple(rewards),
            "turns": turns,
        }
    )


def _with_template(
    report: TurnsReport, spec: RunSpec, row: Row, tokenizer: "CoreTokenizer | PreTrainedTokenizerBase"
) -> TurnsReport:
    if row.chat is None or isinstance(tokenizer, CoreTokenizer) or report.problem:
        return report
    problem = template_problem(spec.rollout.turns, row, tokenizer, template_arguments(spec.data.template_args))
    return report.model_copy(update={"problem": problem})


def _trials(spec: RunSpec, trained: Sequence[Row], held: Sequence[Row]) -> list[RewardTrial]:
    """Trials of the reward functions on rows of the training data, and of the scorer on those that it scores.

    Held-out rows with the same columns need no trial of their own.
    """
    functions, scorer = functions_to_try(spec)
    if not held or _columns(held) == _columns(trained):
        return _trials_on(spec, [*functions, *scorer], trained)
    of_held = [trial.model_copy(update={"is_held_out": True}) for trial in _trials_on(spec, scorer, held)]
    return [*_trials_on(spec, functions, trained), *of_held]


def functions_to_try(spec: RunSpec) -> tuple[list[str], list[str]]:
    """Reward functions, and the scorer if it is a function. Without answers, only those in use: the defaults, which
    runs on pairs never call, need answers."""
    has_answers = bool(spec.data.answer_column)
    functions = spec.reward.functions if has_answers or spec.any_loop_samples else ()
    is_scored = has_answers or spec.completes_held_out(pairs_have_answers=False)
    scorer = spec.evaluate.scorer_function if is_scored else ""
    # Without a rollout, there is no reward by its environment.
    return [one for one in functions if one != ENVIRONMENT_REWARD], [scorer] if scorer not in (
        "",
        ENVIRONMENT_REWARD,
    ) else []


def _trials_on(spec: RunSpec, functions: Sequence[str], rows: Sequence[Row]) -> list[RewardTrial]:
    """Trials of functions; none if pairs lack the reference answers that the functions may need."""
    column = spec.data.answer_column
    can_be_tried = not column or "answer" in spec.data_kinds or all(column in row.columns for row in rows)
    return try_rewards(list(dict.fromkeys(functions)), rows, spec.reward.conversations) if can_be_tried else []


def _columns(rows: Sequence[Row]) -> set[str]:
    return {name for row in rows for name in row.columns}


# ---------------------------------------------------------------------------------------------------------------------
# Rows


Part = tuple[Split, str]
"""A split of a source, by the name of the source."""


def _of_split(rows: Mapping[Part, Sequence[Row]], split: Split) -> list[Row]:
    return [row for (of_split, _), of_part in rows.items() if of_split == split for row in of_part]


def _read(spec: RunSpec) -> tuple[dict[Part, SplitReport], dict[Part, list[Row]]]:
    split_reports: dict[Part, SplitReport] = {}
    rows: dict[Part, list[Row]] = {}
    splits: tuple[Split, ...] = ("train", "eval") if spec.data.has_eval else ("train",)
    parts: list[Part] = [(split, name) for split in splits for name in spec.data.of_split(split)]
    for part in parts:
        split, name = part
        started = time.monotonic()
        found: list[Row] = []
        with Survived() as failed:  # a generator is user code and may raise anything
            found = load_source(spec, split, name, limit=NUM_ROWS + 1)
        if failed.error is not None:
            problem = " ".join(failed.message.split()) + relative_path_advice(failed.error)
            split_reports[part] = SplitReport(split=split, source=name, problem=problem)
            continue
        seconds = time.monotonic() - started
        rows[part] = found[:NUM_ROWS]
        split_reports[part] = SplitReport(
            split=split,
            source=name,
            num_rows=len(rows[part]),
            is_whole=len(found) <= NUM_ROWS,
            columns=tuple(sorted(_columns(rows[part]))),
            num_duplicates=len(rows[part]) - len(set(map(_content, rows[part]))),
            num_unused_tools=sum(map(_lacks_its_tools, rows[part])),
            read_s=seconds,
        )
    return split_reports, rows


def _content(row: Row) -> tuple[str, ...]:
    rest = repr(row.chat.target) if row.chat is not None and row.chat.is_whole else ""  # after its first answer
    tools = repr(row.chat.tools) if row.chat is not None else ""
    return row.prompt, row.answer, row.chosen, row.rejected, rest, tools


def _lacks_its_tools(row: Row) -> bool:
    tools = row.columns.get("tools")  # TRL's name for them
    is_given = isinstance(tools, list | str) and tools not in ([], "", "[]", "null")
    return row.chat is not None and not row.chat.tools and is_given


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def _tokenizer(
    spec: RunSpec, rows: Mapping[Part, Sequence[Row]]
) -> "tuple[PreTrainedTokenizerBase | None, TokenizerReport]":
    kind = spec.model.tokenizer
    tokenizer: PreTrainedTokenizerBase
    special: list[str] = []
    is_for_chat = False
    every = [row for of in rows.values() for row in of]
    try:
        if kind in BUILT_TOKENIZERS:
            tokenizer = built_tokenizer(spec, _of_split(rows, "train"), every)
        else:
            from rlhf_core.training.data.tokenizers import CHAT_TEMPLATE, load_tokenizer

            tokenizer = load_tokenizer(Path(kind or spec.model.path))
            special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
            is_for_chat = tokenizer.chat_template not in (None, "", CHAT_TEMPLATE)
    except RlhfError as error:
        return None, TokenizerReport(problem=" ".join(str(error).split()))
    texts = [text for row in every for text in _texts(row)]
    report = check_tokenizer(tokenizer, texts)
    compared = {name: difference_of_reference(Path(path), tokenizer, texts) for name, path in spec.references.items()}
    of_references = {name: difference for name, difference in compared.items() if difference}
    # A text with special tokens of its own has been written in the form of a template.
    is_bare = any(row.chat is None and not any(token in row.prompt for token in special) for row in every)
    report = report.model_copy(update={"is_bypassed": is_for_chat and is_bare, "references": of_references})
    if tokenizer.chat_template and not report.chat_problem and any(row.chat is not None for row in every):
        end = turn_end(tokenizer, template_arguments(spec.data.template_args))
        turn_ends = "" if end is None else str(tokenizer.convert_ids_to_tokens(end))
        given = [*spec.data.template_args, *(["tools"] if spec.data.tools_column else [])]
        unread = tuple(name for name in given if name not in str(tokenizer.chat_template))
        report = report.model_copy(update={"turn_end": turn_ends, "unread_arguments": unread})
    return tokenizer, report


def _rendered(
    split_reports: Mapping[Part, SplitReport],
    rows: Mapping[Part, Sequence[Row]],
    tokenizer: "PreTrainedTokenizerBase",
    spec: RunSpec,
) -> tuple[dict[Part, SplitReport], dict[Part, list[Row]], str]:
    """Rows of messages rendered to text by the tokenizer, or the reason why it renders none."""
    reports, texts = dict(split_reports), {}
    for split, of in rows.items():
        started = time.monotonic()
        try:
            texts[split], problems = render_rows(of, tokenizer, template_arguments(spec.data.template_args))
        except RlhfError as error:
            return dict(split_reports), {}, " ".join(str(error).split())
        reports[split] = reports[split].model_copy(update={"encode_s": time.monotonic() - started})
        if problems:
            update = {"num_unrendered": len(problems), "unrendered": " ".join(problems[0].split())}
            reports[split] = reports[split].model_copy(update=update)
    return reports, texts, ""


def _texts(row: Row) -> list[str]:
    return [row.prompt, *completions_of(row)]


def _with_lengths(
    split_report: SplitReport, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", spec: RunSpec
) -> SplitReport:
    if not rows:
        return split_report
    started = time.monotonic()
    tokens = prompt_tokens(rows, tokenizer)
    prompts = [len(one) for one in tokens]
    seconds = (time.monotonic() - started) * (AROUND_CORE if isinstance(tokenizer, CoreTokenizer) else 1)
    limit = spec.data.max_prompt_tokens
    kept = [(length, row) for length, row in zip(prompts, rows, strict=True) if length <= limit]
    of_completions = completion_lengths([row for _, row in kept], tokenizer)
    longest = spec.data.max_completion_tokens or math.inf
    fits = [max(made, default=0) <= longest for made in of_completions]
    used = list(compress(zip(kept, of_completions, strict=True), fits))
    are_all = split_report.is_whole
    if split_report.split == "eval" and spec.evaluate.num_prompts:
        are_all |= len(used) >= spec.evaluate.num_prompts
        used = used[: spec.evaluate.num_prompts]
    taught = [length + max(made) for (length, _), made in used if made]
    labels = {row.desirable for (_, row), _ in used} if are_all and "label" in spec.data_kinds else ()
    return split_report.model_copy(
        update={
            "encode_s": split_report.encode_s + seconds,
            "num_overlong": len(rows) - len(kept),
            "num_long_completions": fits.count(False),
            "longest_completion": max((max(made) for made in of_completions if made), default=0),
            "bytes_per_row": main_memory([rows, tokens]) // len(rows),
            "num_empty": prompts.count(0),
            "longest_prompt": max(prompts),
            "longest_taught": max(taught, default=0),
            "labels": tuple(sorted(labels)),
        }
    )


def main_memory(value: object) -> int:
    """Main memory of a value and of all that it refers to, in bytes; an object that occurs several times counts once.

    Rows consist of dataclasses, mappings, lists and plain values.
    """
    seen: dict[int, object] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        elif dataclasses.is_dataclass(one):
            waiting.append(vars(one))
    return sum(map(sys.getsizeof, seen.values()))
