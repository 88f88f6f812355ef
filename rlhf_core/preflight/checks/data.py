"""Data files and the functions that the config names."""

from collections.abc import Iterator

from rlhf_core.files.data_rows import template_columns
from rlhf_core.preflight.data_file import is_read_elsewhere
from rlhf_core.preflight.facts import BadRows, DataFile, Facts
from rlhf_core.preflight.registry import Finding, bad_rows, blocked, check, passed, skipped, warning
from rlhf_core.preflight.templates import absent_columns, templates_of


@check("data.readable")
def readable(facts: Facts) -> Iterator[Finding]:
    """A wrong path would otherwise be found only on the nodes, after minutes in the queue."""
    for name, file in facts.files.items():
        if file.problem:
            yield blocked(f"{name} = {file.path}: {file.problem}", "a readable file", f"correct {name}")
        elif file.scanned:
            yield passed(f"{name}: {file.num_rows} rows in {file.path}")
        elif is_read_elsewhere(facts.spec, name):
            yield passed(f"{name}: {file.path} exists; the trainer reads it")
        else:
            yield skipped(f"{name}: the rows of {file.path.suffix} files are read only on the nodes")


@check("data.held_out", trainer="native")
def held_out(facts: Facts) -> Iterator[Finding]:
    """Without held-out data, there is nothing to measure before and after training."""
    if not facts.spec.data.has_eval:
        setting = "data.sources.NAME.eval" if facts.spec.data.sources else "data.eval"
        yield blocked(
            f"{setting} is not set", "a file of held-out rows", f"set {setting} to a file that is not trained on"
        )


@check("data.lines")
def lines(facts: Facts) -> Iterator[Finding]:
    """One malformed line in a million stops a run hours later, when it is read."""
    for name, file in _read(facts):
        if not file.malformed.count:
            yield passed(f"{name}: every row is well-formed")
            continue
        shown = "; ".join(f"{file.path}:{problem.line}: {problem.message}" for problem in file.malformed.first)
        more = file.malformed.count - len(file.malformed.first)
        found = f"{file.malformed.count} malformed: {shown}" + (f"; and {more} more" if more else "")
        if is_read_elsewhere(facts.spec, name):
            yield blocked(found, "well-formed rows", "correct them: data.malformed_rows has no effect on this trainer")
        else:
            dropped = facts.spec.data.malformed_rows == "drop"
            yield bad_rows(found, "well-formed rows", "correct them", dropped=dropped, leave_others=file.num_rows > 0)


@check("data.rows")
def rows(facts: Facts) -> Iterator[Finding]:
    """A file without rows stops every rank when it is read, after the queue and the start of the nodes."""
    for name, file in _read(facts):
        if not file.num_rows:
            yield blocked(f"{name} has no rows: {file.path}", "at least one row", f"correct {name}")


@check("data.templates")
def templates(facts: Facts) -> Iterator[Finding]:
    """A template that cannot be filled stops every rank at the first row; one without a column is one text for all."""
    if not facts.spec.is_evaluated:
        return  # another program trains and builds its prompts itself
    used: dict[str, str] = {}
    for table, source in facts.spec.data.tables.items():
        used |= templates_of(source, facts.spec.data_kinds | {"answer"}, table)
    for setting, template in used.items():
        named, problem = template_columns(template)
        if problem:
            yield blocked(f"{setting} = {template!r}: {problem}", "text with {column} in it", f"correct {setting}")
        elif not named:
            doubled = "{{" in template
            # A run that trained with it goes on: it cannot change its settings when it is resumed.
            yield (blocked if doubled and facts.resume is None else warning)(
                f"{setting} = {template!r} names no column: the text of every row would be the same",
                "text with {column} in it",
                "write the name of the column with single braces: {{ and }} stand for braces in the text"
                if doubled
                else "write the name of the column in braces, unless one text for all rows is intended",
            )


@check("data.columns")
def columns(facts: Facts) -> Iterator[Finding]:
    """A setting that names a column missing from the data stops every rank at the first row."""
    for name, file in _read(facts):
        if not file.num_rows or is_read_elsewhere(facts.spec, name):
            continue
        table = name.rpartition(".")[0]
        absent = absent_columns(facts.spec.data.tables[table], facts.spec.data_kinds, file.columns, table)
        for setting, missing in absent.items():
            if missing:
                unneeded = ', or set data.answer_column="" if no reward needs answers'
                yield blocked(
                    f"{setting} names {', '.join(map(repr, missing))}, which {name} does not have",
                    f"columns of {file.path.name}: {', '.join(sorted(file.columns)) or 'none'}",
                    f"correct {setting}, or the data{unneeded if setting == 'data.answer_column' else ''}",
                )
        if not any(absent.values()):
            yield passed(f"{name}: columns {', '.join(sorted(file.columns))}")


@check("data.empty_prompts")
def empty_prompts(facts: Facts) -> Iterator[Finding]:
    """A prompt without a token gives the model nothing to continue."""
    for name, file in _read(facts):
        if not file.empty_prompts.count:
            continue
        found = f"{file.empty_prompts.count} rows of {name} have an empty prompt: {_places(file, file.empty_prompts)}"
        data = facts.spec.data
        if data.tables[name.rpartition(".")[0]].prompt_template != "{prompt}":
            yield warning(
                found, "text in every prompt", "remove these rows: their prompts are only the text of the template"
            )
        else:
            yield bad_rows(
                found,
                "text in every prompt",
                "remove these rows",
                dropped=data.malformed_rows == "drop",
                leave_others=file.num_rows > file.empty_prompts.count,
            )


@check("data.empty_answers")
def empty_answers(facts: Facts) -> Iterator[Finding]:
    """A row without an answer teaches the model to say nothing, or can never be rewarded."""
    for name, file in _read(facts):
        if file.empty_answers.count:
            yield warning(
                f"{file.empty_answers.count} rows of {name} have an empty answer: {_places(file, file.empty_answers)}",
                "an answer in every row",
                "remove these rows unless they are intended",
            )


@check("data.blank_prompts")
def blank_prompts(facts: Facts) -> Iterator[Finding]:
    """A prompt of only white space asks nothing: its reward is noise, and its share of every batch is wasted."""
    for name, file in _read(facts):
        if file.blank_prompts.count:
            yield warning(
                f"{file.blank_prompts.count} rows of {name} have a prompt of white space only: "
                f"{_places(file, file.blank_prompts)}",
                "text in every prompt",
                "remove these rows",
            )


@check("data.duplicates")
def duplicates(facts: Facts) -> Iterator[Finding]:
    """Repeated rows are trained on twice as often; the same prompt with two answers cannot be learned at all."""
    for name, file in _read(facts):
        if file.duplicates.count:
            yield warning(
                f"{file.duplicates.count} of {file.num_rows} rows of {name} repeat an earlier row: "
                f"{_places(file, file.duplicates)}",
                "every row once",
                "remove them, unless the extra weight is intended",
            )
        if file.contradictions.count:
            yield warning(
                f"{file.contradictions.count} rows of {name} have the prompt of an earlier row but a different answer: "
                f"{_places(file, file.contradictions)}",
                "one answer for each prompt",
                "keep one of them, unless several answers are right and the reward functions accept them",
            )


@check("data.overlap")
def overlap(facts: Facts) -> Iterator[Finding]:
    """Held-out prompts that were trained on make the evaluation look better than the model is."""
    both = facts.files_of("train"), facts.files_of("eval")
    train, held = ({name: one for name, one in files.items() if one.prompt_hashes} for files in both)
    if not train or not held:
        return
    trained = frozenset[bytes]().union(*(file.prompt_hashes for file in train.values()))
    overlapping = {name: file for name, file in held.items() if trained & file.prompt_hashes}
    for name, file in overlapping.items():
        of_name = f" of {name}" if facts.spec.data.sources else ""
        others = [one for one, other in train.items() if other.prompt_hashes & file.prompt_hashes]
        yield warning(
            f"{len(trained & file.prompt_hashes)} of {len(file.prompt_hashes)} held-out prompts{of_name} are also in "
            f"{', '.join(others) if of_name else 'the training data'}",
            "no prompt in both",
            "remove them from one of the two files; otherwise the evaluation measures memorization",
        )
    if not overlapping:
        yield passed("no prompt is in both files")


@check("data.enough_prompts")
def enough_prompts(facts: Facts) -> Iterator[Finding]:
    """With fewer rows than requested, prompts repeat within a step, or less is evaluated than intended."""
    spec = facts.spec
    both = facts.files_of("train"), facts.files_of("eval")
    rows, held = (sum(file.num_rows for file in files.values()) for files in both)
    for loop, found in spec.loops.named.items():
        algorithm = found.algorithm
        if algorithm.samples and rows and rows < algorithm.rows_per_step:
            setting = f"loops.{loop}.algorithm.{algorithm.rows_setting}"
            yield warning(
                f"{rows} training rows, {setting} = {algorithm.rows_per_step}",
                "at least as many rows as prompts per step",
                f"prompts repeat within a step; lower {setting} or add rows",
            )
    if held and held < spec.evaluate.num_prompts:
        yield warning(
            f"{held} held-out rows, evaluate.num_prompts = {spec.evaluate.num_prompts}",
            "at least as many rows as prompts to evaluate",
            f"all {held} are used; set evaluate.num_prompts=0 if that is intended",
        )


@check("functions.import")
def functions_import(facts: Facts) -> Iterator[Finding]:
    """A reward function that cannot be imported ends the run only after loading the model and the first batch."""
    for path, problem in facts.imports.items():
        if problem:
            yield blocked(
                f"{path} does not import: {problem}",
                "module:function that the compute interpreter can import",
                "correct the path; for a module outside the current folder add it to code.paths",
            )
        else:
            yield passed(f"{path} imports")


@check("code.paths")
def code_paths(facts: Facts) -> Iterator[Finding]:
    """Code that does not exist cannot be copied for the nodes."""
    for path in facts.missing_code:
        yield blocked(
            f"code.paths names {path}, which does not exist or may not be read",
            "readable files and folders",
            "correct code.paths, or its permissions",
        )


def _read(facts: Facts) -> Iterator[tuple[str, DataFile]]:
    """The files whose rows were read."""
    return ((name, file) for name, file in facts.files.items() if not file.problem and file.scanned)


def _places(file: DataFile, rows: BadRows) -> str:
    return ", ".join(f"{file.path.name}:{row.line}" for row in rows.first)
