"""Checks of the data itself, based on one pass in the compute interpreter
(``rlhf_core/training/probes/content.py``)."""

from collections.abc import Iterator

from rlhf_core.files.data_rows import template_columns
from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, bad_rows, blocked, check, passed, skipped, warning
from rlhf_core.preflight.size_estimates import num_positions
from rlhf_core.preflight.templates import absent_columns, templates_of
from rlhf_core.schemas.content import RewardTrial, SplitReport, TrialProblem

MANY_OVERLONG = 0.1
"""Share of omitted prompts above which a finding is reported."""
LONG_START_S = 450
"""Time to read and tokenize the data, in seconds, above which a finding is reported."""
MANY_UNKNOWN = 0.001
"""Share of unknown tokens above which a finding is reported."""


@check("content.columns", trainer="native")
def columns(facts: Facts) -> Iterator[Finding]:
    """A column missing from a generator or Parquet file, or needed by a reward function, ends every rank at once."""
    report = facts.content
    if report is None:
        if facts.content_problem:
            yield skipped(f"the data was not read: {facts.content_problem}")
        return
    for split in report.splits:
        if split.problem:
            if not _is_judged_already(facts, split):
                yield blocked(
                    f"{_source(facts, split)} cannot be used: {split.problem}",
                    "rows with the columns named in [data]",
                    f"correct {_setting(facts, split)}, or the settings that name its columns",
                )
            continue
        yield passed(f"{_source(facts, split)}: columns {', '.join(split.columns)}")
    yield from _absent_tools(facts)
    yield from _unsuitable_functions(report.rewards)
    yield from _repeated_rows(facts)


@check("content.tokenizer", trainer="native")
def tokenizer(facts: Facts) -> Iterator[Finding]:
    """A tokenizer that loses characters makes right answers impossible: the reward stays at zero for days."""
    report = facts.content.tokenizer if facts.content else None
    if report is None:
        return
    if report.problem:
        folder = facts.model_folder
        has_no_folder = folder is not None and bool(folder.problem) and not facts.spec.model.tokenizer
        if not facts.tokenizer_problem and not has_no_folder:  # each is reported by its own check
            yield blocked(
                f"the tokenizer cannot be used: {report.problem}", "a tokenizer that loads", "correct model.tokenizer"
            )
        return
    if report.unknown_share > MANY_UNKNOWN:
        yield warning(
            f"{report.unknown_share:.1%} of the tokens stand for characters that the tokenizer lacks",
            "tokens for all characters in prompts and answers",
            'use another model.tokenizer ("byte" and "bpe" encode every text), or clean the data',
        )
    if report.num_changed:
        yield warning(
            f"{report.num_changed} of {report.num_texts} texts are changed by encoding and decoding: {report.example}",
            "the same text again",
            "if rewards need exact answers, remove these characters from the data or use another model.tokenizer",
        )
    else:
        yield passed(f"{report.num_texts} texts survive encoding and decoding unchanged")
    if report.chat_problem:
        yield warning(
            f"the chat template of the tokenizer {report.chat_problem}",
            "a template that renders a conversation and ends with the start of the model's turn",
            "correct chat_template in the folder of the tokenizer; it is saved with the model that is trained",
        )
    if report.turn_end:
        yield passed(f"a turn of the model ends with {report.turn_end}")
    elif report.turn_end == "":
        yield warning(
            "the chat template of the tokenizer writes no special token after a message of the model, so completions "
            "continue until they are cut off, unless the model's generation settings name a token that ends them",
            "a template whose turns end with the end token or another special one, such as <|im_end|>",
            "correct chat_template in the folder of the tokenizer, or make the token that ends a turn a special one",
        )


@check("content.chat_template", trainer="native")
def chat_template(facts: Facts) -> Iterator[Finding]:
    """A model that is trained without its chat template, its tools or its variables answers differently when used."""
    if facts.content is None:
        return
    for split in facts.content.splits:
        if split.num_unused_tools:
            yield warning(
                f"{split.num_unused_tools} of {split.num_rows} rows of {_source(facts, split)} have tools, which the "
                "model does not get",
                "the tools of a conversation in its prompt",
                'set data.tools_column="tools", or remove the column',
            )
    if facts.content.tokenizer is not None and facts.content.tokenizer.is_bypassed:
        yield warning(
            "the tokenizer has a chat template, and there are prompts of text, which the model gets without it",
            "prompts in the form that a chat model was trained on",
            "set data.chat=true, or use prompts of messages; for a base model, set preflight.off = "
            '{"content.chat_template" = "base model"}',
        )
    unread = facts.content.tokenizer.unread_arguments if facts.content.tokenizer is not None else ()
    if unread:
        yield warning(
            f"the chat template of the tokenizer does not use {', '.join(unread)}",
            "variables of the chat template in data.template_args, and tools only for one that shows them to the model",
            "correct their names, leave them out, or correct chat_template in the folder of the tokenizer",
        )


@check("content.conversations", trainer="native")
def conversations(facts: Facts) -> Iterator[Finding]:
    """A conversation that the chat template refuses, with two user turns in a row for example, ends every rank."""
    for report in facts.content.splits if facts.content else ():
        if not report.num_unrendered:
            continue
        source, expected = _source(facts, report), "conversations that the chat template renders"
        found = f"{report.num_unrendered} of {report.num_rows} rows of {source} cannot be rendered: {report.unrendered}"
        if report.num_unrendered == report.num_rows:
            yield blocked(found, expected, "use another chat template, or correct the data")
        else:
            yield bad_rows(found, expected, "correct them", dropped=facts.spec.data.malformed_rows == "drop")


@check("content.lengths", trainer="native")
def lengths(facts: Facts) -> Iterator[Finding]:
    """Silently dropped prompts change the task; texts beyond the model's positions crash it mid-run."""
    if facts.content is None:
        return
    data, limit = facts.spec.data, num_positions(facts.model_config)
    for report in facts.content.splits:
        if report.problem or not report.longest_prompt:
            continue
        source, share = _source(facts, report), report.num_overlong / report.num_rows
        found = (
            f"{report.num_overlong} of {report.num_rows} prompts of {source} are longer than data.max_prompt_tokens = "
            f"{data.max_prompt_tokens} (the longest has {report.longest_prompt} tokens)"
        )
        raising = f"set data.max_prompt_tokens={report.longest_prompt}, if the model has that many positions"
        if share == 1 or (share and data.overlong_prompts == "error"):
            yield blocked(found, "prompts that fit", f'{raising}, or data.overlong_prompts="drop" if some fit')
        elif share > MANY_OVERLONG:
            yield warning(found, f"at most {MANY_OVERLONG:.0%} dropped", raising)
        else:
            yield passed(f"{source}: the longest prompt has {report.longest_prompt} tokens, {share:.1%} are dropped")
        if report.num_long_completions:
            yield _long_completions(facts, report)
        if report.num_empty:
            yield blocked(
                f"{report.num_empty} prompts of {source} have no token", "a token in every prompt", "remove these rows"
            )
        # Held-out rows are read like the training rows if the main loop learns from rows.
        trains = any(not loop.algorithm.samples for loop in facts.spec.loops.named.values())
        is_read = trains if report.split == "train" else bool(facts.spec.row_evaluations)
        if is_read and limit is not None and report.longest_taught > limit:
            yield blocked(
                f"a row of {source} has {report.longest_taught} tokens with its answer, the model has {limit} "
                "positions",
                f"at most {limit} tokens in prompt and answer together",
                "remove long answers, or lower data.max_prompt_tokens or data.max_completion_tokens",
            )


@check("content.labels", trainer="native")
def labels(facts: Facts) -> Iterator[Finding]:
    """With completions of one label only, there is nothing to rank, and training pulls all of them the same way."""
    splits = facts.content.splits if facts.content else ()
    for split in ("train", "eval"):
        reports = [one for one in splits if one.split == split]
        if not reports or not all(one.labels for one in reports):
            continue
        label, *other = {label for one in reports for label in one.labels}
        rows = f"data.label_column = {facts.spec.data.label_column} of data.{split}"
        only = f"{rows}: found only {'desirable' if label else 'undesirable'} completions"
        if other:
            yield passed(f"{rows}: desirable and undesirable completions")
        elif split == "train":
            yield warning(only, "desirable and undesirable completions", "add rows of the other label")
        elif facts.spec.ranks_held_out:
            yield blocked(
                f"{only} in the rows that are evaluated",
                "desirable and undesirable completions, whose ranking is measured",
                "mix the rows of the file, or raise evaluate.num_prompts",
            )


@check("content.pipeline", trainer="native")
def pipeline(facts: Facts) -> Iterator[Finding]:
    """Data that takes long to read delays every start and restart; a generator that does looks like a hang as well."""
    if facts.content is None:
        return
    spec = facts.spec
    seconds = silent_s = rows = 0.0
    unseen = False
    for report in facts.content.splits:
        if not report.problem and report.num_rows:
            total = facts.num_rows(report)
            unseen |= total == report.num_rows and not report.is_whole
            rows += total
            seconds += (report.read_s + report.encode_s) / report.num_rows * total
            silent_s = max(silent_s, report.read_s / report.num_rows * total if spec.data.generator else 0)
    if not rows:
        return
    consumed = spec.main_loop.algorithm.rows_per_step
    rate = rows / max(seconds, 1e-6)
    # Of a generator or a Parquet file, only the first rows are read here, and not all are counted.
    duration = f"at least {seconds:.0f} s" if unseen else f"about {seconds:.0f} s"
    more = f" (there are more rows than the {rows:.0f} read here)" if unseen else ""
    found = f"{rate:.0f} rows/s are read and tokenized, {duration} at every start{more}; a step uses {consumed} rows"
    if silent_s > spec.supervise.setup_floor_s / 2:
        yield warning(
            found,
            f"well below supervise.setup_floor_s = {spec.supervise.setup_floor_s:g} s",
            f"raise supervise.setup_floor_s to {silent_s * 4:.0f} or use fewer rows",
        )
    elif seconds > LONG_START_S:
        yield warning(
            found, f"at most {LONG_START_S:g} s", "use fewer rows, or shorter ones: every rank reads all of them"
        )
    else:
        yield passed(found)


# ---------------------------------------------------------------------------------------------------------------------


def _absent_tools(facts: Facts) -> Iterator[Finding]:
    """Finding on a column of tools that occurs nowhere. Rows may lack it, even all of one split."""
    assert facts.content is not None
    for table, source in facts.spec.data.tables.items():
        tools, settings = source.tools_column, (f"{table}.train", f"{table}.eval")
        splits = [split for split in facts.content.splits if not split.problem and split.setting in settings]
        files = [file for name, file in facts.files.items() if name in settings and file.scanned]
        columns = {name for split in splits for name in split.columns}.union(*(file.columns for file in files))
        if not tools or not splits or tools in columns:
            continue
        is_certain = all(split.is_whole or _is_scanned(facts, split) for split in splits)
        yield (blocked if is_certain else warning)(
            f"{table}.tools_column names {tools!r}, which no row {'' if is_certain else 'that was read '}has",
            f"one of the columns: {', '.join(sorted(columns))}",
            f"correct {table}.tools_column, or leave it out",
        )


def _unsuitable_functions(trials: tuple[RewardTrial, ...]) -> Iterator[Finding]:
    for trial in trials:
        if trial.problem is TrialProblem.COLUMNS:
            where = " (held-out rows)" if trial.is_held_out else ""
            yield blocked(
                f"{trial.function}: {trial.message}{where}",
                "function(*, prompts, completions, answer, **columns) with columns of the data",
                f"correct {trial.function}, or add the columns to the data",
            )


def _long_completions(facts: Facts, split: SplitReport) -> Finding:
    data = facts.spec.data
    found = (
        f"{split.num_long_completions} of {split.num_rows} rows of {_source(facts, split)} have a completion longer "
        f"than data.max_completion_tokens = {data.max_completion_tokens} (the longest has {split.longest_completion} "
        "tokens)"
    )
    raising = f"set data.max_completion_tokens={split.longest_completion}, if the memory allows it"
    if data.overlong_completions == "error" or split.num_long_completions + split.num_overlong == split.num_rows:
        return blocked(found, "completions that fit", f'{raising}, or data.overlong_completions="drop" if some fit')
    return warning(found, "few dropped rows", raising)


def _repeated_rows(facts: Facts) -> Iterator[Finding]:
    """Findings that the static checks report for files that they read themselves."""
    assert facts.content is not None
    for split in facts.content.splits:
        if split.num_duplicates and not _is_scanned(facts, split):
            yield warning(
                f"{split.num_duplicates} of {split.num_rows} rows of {_source(facts, split)} repeat an earlier row",
                "every row once",
                "remove them, unless the extra weight is intended",
            )
    unseen = any(not _is_scanned(facts, split) for split in facts.content.splits)
    if facts.content.num_shared and unseen:
        yield warning(
            f"{facts.content.num_shared} held-out prompts are also in the training data",
            "no prompt in both",
            "remove them from one of the two; otherwise the evaluation measures memorization",
        )


def _is_scanned(facts: Facts, split: SplitReport) -> bool:
    file = facts.files.get(split.setting)
    return file is not None and file.scanned


def _is_judged_already(facts: Facts, split: SplitReport) -> bool:
    """Return True if the control plane has read the file itself and reports a problem of it."""
    file, kinds = facts.files.get(split.setting), facts.spec.data_kinds
    data = facts.spec.data.source(split.source)
    if file is None or not file.scanned:
        return file is not None and bool(file.problem)
    rows = not file.num_rows or file.malformed.count or file.empty_prompts.count
    wrong_templates = any(template_columns(template)[1] for template in templates_of(data, kinds | {"answer"}).values())
    return bool(file.problem or rows or wrong_templates or any(absent_columns(data, kinds, file.columns).values()))


def _setting(facts: Facts, split: SplitReport) -> str:
    return "data.generator" if facts.spec.data.generator else split.setting


def _source(facts: Facts, split: SplitReport) -> str:
    return f"{split.split} of {facts.spec.data.generator}" if facts.spec.data.generator else split.setting
