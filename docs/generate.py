"""Writes the pages of docs/ that are made from the code: ``python docs/generate.py`` (``make docs``).

``configuration.md`` from the schema, ``failures.md`` from the failure kinds and the retry policy, ``cli.md`` from the
commands, ``preflight.md`` from the checks. ``tests/docs`` fails when one of them is not up to date.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # also from a checkout that is not installed

import typer  # noqa: E402

import rlhf_core.preflight.checks  # noqa: E402, F401 - importing it registers the checks
from rlhf_core import config  # noqa: E402
from rlhf_core.cli.main import app  # noqa: E402
from rlhf_core.diagnosis import classify, code_places, exceptions, log_reading, policy, signatures  # noqa: E402
from rlhf_core.diagnosis.node_checks import NODE_CHECKS  # noqa: E402
from rlhf_core.diagnosis.parts import Part  # noqa: E402
from rlhf_core.preflight.known_bad import KNOWN_BAD  # noqa: E402
from rlhf_core.preflight.memory import GPU_MEMORY_GB  # noqa: E402
from rlhf_core.preflight.registry import CHECKS, PLUGINS  # noqa: E402
from rlhf_core.presets import PRESETS  # noqa: E402
from rlhf_core.schemas.failures import Action, FailureKind  # noqa: E402
from rlhf_core.schemas.run import SuperviseSpec  # noqa: E402

GENERATED = "<!-- Made by docs/generate.py (make docs). Change the code, not this page. -->\n"

CONFIGURATION = """\
# Configuration

A run is asked for with one TOML file. Only `name`, the model, the data and, of each loop, the steps, the algorithm and
the learning rate have no default; a file says what differs. Any setting can be overridden on the command line with
`--set section.field=value`, where the value is TOML and a bare word is taken as text. An unknown key is an error, and
the message names the nearest right one. The shipped presets, {presets}, are commented examples: `rlhf run quickstart`.

What ran is kept, with every default filled in, in `spec.json` of the run directory.

A run has one or two training loops: `[loops.warm_start]`, which may be left out, and `[loops.main]`. Each has an
algorithm and an optimizer of its own. The name of the algorithm decides which settings its section has; an override of
the name drops the settings of the algorithm before it.

Configs of rlhf-flows 0.1, with `[sft]`, `[train]` and `[grpo]`, are read by this version with a warning that names the
new settings, and refused by the next. `rlhf config migrate FILE` rewrites one and keeps its comments.
"""

SITE = """
## Site settings

Where things are on a machine does not belong into the config of a run. It comes from environment variables, or from
`rlhf.toml` in `RLHF_HOME` with the keys in the second column; the environment wins. Tables of that file follow below.
"""

FAILURES = """\
# Failures and what is done about them

When something ends that should not have, the evidence (exit codes, signals, what the workers said, the ends of
their logs, the state of the scheduler) is turned into one of the kinds below by `rlhf_core/diagnosis/classify.py`,
and what is done about it is decided by `rlhf_core/diagnosis/policy.py`. Both are pure functions; agent 0 uses them
inside an allocation, the controller between allocations.

## The ladder
"""

BUDGET = """
Retries are counted without checkpoint progress: a new checkpoint sets the count back. The columns below are what the
policy allows at most. Within that, the run has its own budget: `supervise.max_restarts` restarts in place (default
{max_restarts}) and `supervise.max_attempts` attempts in a row (default {max_attempts}) without a new checkpoint.
Before a new attempt without
progress the controller waits `supervise.backoff_s` (default {backoff_s} s), doubled each time up to
`supervise.max_backoff_s` (default {max_backoff_s} s), and spread at random over the upper half of that.

What all attempts together may use, whatever progress they make, has caps of its own, which are off by default:
`supervise.max_total_attempts`, `supervise.max_gpu_hours` and `supervise.max_node_hours`. They are looked at before a
new attempt, and the decision to stop says which was reached and how much was used. Those on hours also bound the time
limit of every attempt, so that a run that is training saves and ends in time. A person who resumes the run allows as
much again.

*With a remedy*: only when the next attempt does something differently. CUDA out of memory: half
`trainer.micro_batch_size` until it is 1, then `trainer.gradient_checkpointing`, then half `rollout.batch_size`; the
global batch, and so the gradient, stays (`supervise.oom_remediation`). A loss that is not finite: once from the
checkpoint before the newest. Training that learns nothing any more (`[health]`): once from the newest checkpoint that
is older than the window of steps it was judged by. Newer ones are put aside (`supervise.rollback_on_non_finite`).

Ranks that disagree about a collective (`collective_mismatch`) end the run at once where that is proven: by their flight
recorders, or by an error of our own that compared them. Where nothing but the words of a log or of an error say so, the
workers are started once more, in place where that is allowed; if it comes back without a new checkpoint, the run ends.

A damaged checkpoint, of which a checksum does not hold, a file is missing, empty
or unreadable, or the manifest is none: the workers are started again in place from the complete one before it, whatever
the budget of restarts says, and the damaged one is kept for inspection in `checkpoints/damaged-<attempt>.<restart>/`.
Where the evaluator finds it, the steps after the older one are trained again in a new attempt. The run ends when there
is none before; that last one stays where it is, and the message says what to do. A checkpoint that does not fit the run
(other settings, another number of ranks) has no remedy.

A new attempt goes without the nodes to blame: at once when a node was lost or a GPU failed, otherwise at a node's
second strike in the run; at most `supervise.max_excluded_nodes`, and never so many that it could not be placed.

## How soon a hang is found

A worker hangs for sure when it has been silent for longer than the floor of its phase (`supervise.floor_s` and its kin,
two minutes and more by default), or for `supervise.gap_factor` times the longest silence that ended well, where that is
more. It is looked at long before, after `supervise.suspect_s` (default {suspect_s} s) or the longest silence that ended
well in its phase, and is ended at once where several looks prove that it stands still:

- *Stopped*: the process was stopped in all of them (SIGSTOP, state T). This holds in any phase.
- *Blocked for good*: it waits for a lock of its own process without a time-out, and so do all its other threads;
  nothing of it and its children used processor, GPU or disk; no data is on its way between the ranks; and peers wait in
  a collective that it has not entered. Waiting for a connection to another rank counts too, where no rank can send.
- *Disagreement*: all ranks wait inside a collective, and their flight recorders name different operations or shapes at
  the same number. That is a bug in the code (`collective_mismatch`).

Anything else is left to the floor: whatever moves, a sleep or a time-out, a reward service, a file, a pipe, a child
process, the kernel (state D), a debugger, a look that is not permitted, data on its way, ranks that all wait in the
same collective; and, unless the process is stopped, set-up and the first pass through a phase.

## The kinds
"""

LOGS = """
## How a log is read

Where a worker could not say itself what happened, its log is read (`rlhf_core/diagnosis/log_reading.py`), for kinds
of evidence rather than for known lines
([decision {decision}](decisions/{decision}-logs-are-read-for-kinds-of-evidence.md)):

1. **Lines.** What launchers, Ray, engines, containers, the kernel and quotations put before a line is taken off; who
   printed it stays known. What was logged as a warning or below says nothing, except where the scheduler says it.
2. **Errors.** The lines of a traceback are put together, for each process by itself, with its frames. What an error
   says is asked in this order: its words, where they name a cause; its class; its error number; the place in the code
   that it came from. An error of a service outside the job (a hub, a tracker) is `unknown`, unless its status says that
   it refuses for good. Classes that only wrap another error say nothing where that one was printed. The boxes of Rich
   and the frames of IPython and pytest are read too.
3. **Phrases.** Of all other lines, the tables of phrases know some.
4. **Parts.** Each piece of evidence is the root of a failure, a symptom of one that shows itself elsewhere, or a
   cascade, as the broken connections to a rank that died, or an engine that is gone. Roots decide before symptoms and
   symptoms before cascades, wherever they stand; among equals the earlier decides.
5. **Time.** What {going_on} further steps, or the good end of the training, came after has not ended it; a symptom is
   survived with a single step, and so is what keeps ranks from finding each other. A job that says that it has put
   itself into the queue again has not failed by being put there. After a cancellation by the user, everything else is
   its consequence, but a cancellation that comes after a failure says nothing. So a log may also show no failure at
   all.

A kind that stops a run needs words, a class or a place that say so; everything else is `unknown`, with a fingerprint,
and is tried once more. Of a log that is longer than {most:.0f} MB, its begin and its end are read.

### Classes of errors

{classes}

Error numbers: {numbers}.

Statuses by which a service refuses a request for good: {statuses}.

### Places in the code

What an error of a general class (`KeyError`, `ValueError`, `RuntimeError` ...) means where it came up: the innermost
place decides.

{places}

### Phrases

One line for each row; the first row that knows a line decides about it.

| kind | part | a line that is known |
|---|---|---|
"""

READING = "0015"
"""Number of the decision on how logs are read."""

STATES = """
## What the scheduler says

The final state of a job decides before any log, except for a cancellation, which also ends steps that failed.
`CANCELLED by 0` was the administrator or the scheduler, not the user. States that are not listed, as FAILED, say
nothing by themselves: the agents' outcomes and the lines of srun do.

| state | kind |
|---|---|
"""

PROBE = """
## On the nodes

Before the workers of an attempt start, its nodes are compared and measured (`preflight.probe`); `rlhf check CONFIG
--probe` does that alone, and gives the allocation back.

1. Every agent says what its node has: environment, versions, hashes of config, code, data, model and tokenizer as
   this node reads them, GPUs, room, clock. Agent 0 compares, before there is any process group. The value that
   more than half of the nodes have is what is expected; a finding names the node that has another one, and the
   key. Without such a majority all values are shown, and no node is blamed. What each node said is kept in
   `attempts/<n>/probe/`.
2. One process per rank measures matrix products, then bandwidth and latency in pairs (every node with two others,
   so that a slow node and a slow link are told apart), then an all-reduce and an all-gather over all ranks, whose
   results are known beforehand. Everything has a deadline (`preflight.probe_s`). What was found slow is measured a
   second time before it is said. Slow is less than `preflight.min_relative_speed` of the median of all nodes; less
   than that of a node's own earlier readings is a warning (table `node_speeds`).

A node that is blocked is struck in the ledger (`rlhf nodes`) and left out, and the run is placed anew at once.
Where no other node can take its place, or where no single node is to blame, the run ends with exit code 2 and the
finding. Findings are rows of `checks`, stand in `rlhf show` and the report, and are a table artifact in Prefect.
"""

PREFLIGHT = """\
# Preflight

Before a job is submitted, everything is looked at that can be known without it. All findings are shown at once; one
that blocks keeps the run from starting (exit code 2), and its message says what was found, what was expected and what
to do. `rlhf check` does this alone and starts nothing.

The checks are arithmetic on facts that are gathered once: the config, the data files, the scheduler's nodes, the
packages of the compute interpreter, the disk. The checks whose names begin with `content` are made of one look at the
first {rows} rows of the data in the compute interpreter. It takes some seconds and is bounded in time and memory; each
reward function is called there with real rows in a process of its own, so that one that never returns is a finding.

## The checks
"""

OFF = '''
## Turning checks off

A check that does not apply is turned off by its name, with the reason, which is kept with the run:

```toml
[preflight.off]
"data.overlap" = "the held-out set repeats some prompts on purpose"
"content.rewards" = "the reward model is served on the compute nodes only"
```

On the command line: `--set 'preflight.off={{"data.overlap" = "on purpose"}}'`. It is then shown as skipped. A name that
is none, and an empty reason, block.

## Checks of your own

A site knows things that this program does not: quotas, accounts, a mount that must be there. A package that is
installed beside the control plane adds a check by an entry point of the group `{group}`. The name of the entry point
is the check's name; the docstring of the function says what it prevents.

```toml
# pyproject.toml of the package
[project.entry-points."{group}"]
"site.scratch" = "our_checks:scratch"
```

```python
# our_checks.py
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, passed


def scratch(facts: Facts) -> Iterator[Finding]:
    """Without the scratch file system every run writes to the home directories, and fills them."""
    if Path("/scratch").is_mount():
        yield passed("/scratch is mounted")
    else:
        yield blocked("/scratch is not mounted", "the scratch file system", "ask the administrators")
```

Facts are what the function should look at; they are described in `rlhf_core/preflight/facts.py`. A plug-in that does
not import, raises, yields something else than findings, or takes the name of another check, is a warning and nothing
more. It must return within a second or so: nobody waits for it with a deadline.

On the nodes, a package in the compute environment does the same with the group `rlhf_flows.node_checks`. Its
function takes nothing and returns a list of findings, each a dictionary; with status `blocked` its node is replaced.
The names of such checks begin with `site.`:

```python
def licence() -> list[dict[str, str]]:
    if server_answers():
        return []
    return [dict(id="site.licence", status="blocked", found="no licence", expected="one", advice="ask for one")]
```
'''

MEMORY = """
## The memory model

`memory.trainer` and `memory.evaluator` add up what one rank holds (`rlhf_core/preflight/memory.py` has every formula
with its source): weights, gradients in float32, AdamW's master weights and moments split over the ranks by ZeRO 1, the
reference model when an algorithm asks for one (GRPO with a `kl_coefficient` or `measure_kl`); on top of that the larger
of activations and one chunk of logits in training, or the KV cache in sampling. It reckons with the longest prompts and
completions that the config allows. Against it stands the memory of the GPU, by `slurm.gpu_type` or what the nodes say;
on CPU that of the node, divided by its ranks. One rank of a float32 model with 34 million parameters (8 layers, hidden
size 512, 32 sequences of 256 tokens at once) on CPU: 6.2 GiB by the estimate, 5.9 GiB at its peak in a run.

| type of GPU | memory in GB |
|---|---|
"""

VERSIONS = """
## Versions that go wrong together

`environment.versions` compares the packages of the compute interpreter with this table. A row blocks the runs that
come upon it for certain; for others it is a warning.

| installed | what happens | instead | source |
|---|---|---|---|
"""

WAITING = """
These rows wait for a part of rlhf-flows that no config can ask for yet. They are not acted upon before it is there.

| installed | what happens | instead | waits for | source |
|---|---|---|---|---|
"""

CLI = """\
# The command line

Results go to standard output, notes and progress to standard error; every reading command takes `--json`. A RUN is
a run id, the beginning of one, a name (the newest run of it), or `last`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed (its diagnosis is printed), or an error that nobody foresaw |
| 2 | bad input: config, data, a blocking check, an unknown run, a database that cannot be used as it is |
| 130 | interrupted or cancelled |
"""


def main() -> None:
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make(), encoding="utf-8")
        print(f"wrote docs/{name}")


# ---------------------------------------------------------------------------------------------------------------------
# configuration.md


def configuration() -> str:
    """Every setting of a run, and the settings of a site."""
    named = ", ".join(f"`{name}`" for name in PRESETS)
    parts = [GENERATED, CONFIGURATION.format(presets=named), "## Top level\n", *_settings("")]
    for section, about in config.describe_sections().items():
        parts += [f"\n## `[{section}]`\n", f"{about}\n", *_settings(section)]
    parts += [SITE, "| variable | key | meaning |", "|---|---|---|"]
    keys = {variable: key for key, variable in config._SITE_KEYS.items()}
    for variable, meaning in _site_settings():
        if variable.startswith("["):
            parts.append(f"| | `{variable}` | {_cell(meaning)} |")
            continue
        parts.append(f"| `{variable}` | {_code(keys[variable]) if variable in keys else ''} | {_cell(meaning)} |")
    for name, (about, fields) in config.describe_site_tables().items():
        parts += [f"\n### `[{name}]` of `rlhf.toml`\n", f"{about[:1].upper()}{about[1:]}\n", *_table(fields)]
    return "\n".join(parts) + "\n"


def _settings(section: str) -> Iterator[str]:
    return _table(field for field in config.describe_fields() if field.name.rpartition(".")[0] == section)


def _table(fields: Iterable[config.FieldHelp]) -> Iterator[str]:
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in fields:
        default = "required" if field.required else _code(field.default)
        yield f"| `{field.name}` | {_code(field.type)} | {default} | {_cell(field.meaning)} |"


def _site_settings() -> Iterator[tuple[str, str]]:
    """Variable and meaning, from the strings under the fields of ``Site``."""
    for text in _strings_under_names(config.Site).values():
        variable, _, meaning = text.partition(": ")
        yield variable.strip("`"), meaning


# ---------------------------------------------------------------------------------------------------------------------
# failures.md


def failures_page() -> str:
    """Every failure kind: what it means, how often it is retried, and why not more often; and what it is known by."""
    spec = SuperviseSpec()
    ladder = [f"{number}. **{action}**: {text}" for number, (action, text) in enumerate(_actions(), start=1)]
    budget = BUDGET.format(
        max_restarts=spec.max_restarts,
        max_attempts=spec.max_attempts,
        backoff_s=f"{spec.backoff_s:g}",
        max_backoff_s=f"{spec.max_backoff_s:g}",
        suspect_s=f"{spec.suspect_s:g}",
    )
    head = ["| kind | what it is | restarts in place | further attempts | not more, because |", "|---|---|---|---|---|"]
    parts = [GENERATED, FAILURES, *ladder, budget, *head]
    meanings = _strings_under_names(FailureKind)
    for kind in FailureKind:
        rule = policy.RULES[kind]
        allowed = f"{_allowed(rule.in_place)} | {_allowed(rule.attempts)}"
        parts.append(f"| `{kind.value}` | {_cell(meanings[kind.name])} | {allowed} | {_cell(rule.why)} |")
    states = [f"| `{state}` | `{kind.value}` |" for state, (kind, _) in classify.SCHEDULER_STATES.items()]
    logs = LOGS.format(
        decision=READING,
        going_on=log_reading.GOING_ON,
        most=(log_reading.HEAD + log_reading.TAIL) / 1e6,
        classes="\n".join(_known_classes()),
        numbers="; ".join(_by_meaning(exceptions.NUMBERS)),
        statuses="; ".join(_by_meaning(exceptions.STATUSES)),
        places="\n".join(_known_places()),
    )
    return "\n".join(parts) + "\n" + logs + "\n".join(_known_lines()) + "\n" + STATES + "\n".join(states) + "\n"


def _known_lines() -> Iterator[str]:
    for kind in FailureKind:
        for row in signatures.SIGNATURES:
            if row.kind is kind:
                says_nothing = row.part is Part.TEARDOWN
                shown = "" if says_nothing else f"`{kind.value}`"
                example = row.example.strip().replace("`", "'")
                yield f"| {shown} | {'says nothing' if says_nothing else row.part.name.lower()} | {_code(example)} |"


def _known_classes() -> Iterator[str]:
    yield from ("| kind | part | classes |", "|---|---|---|")
    by_meaning: dict[exceptions.Meaning, list[str]] = {}
    for name, meaning in exceptions.CLASSES.items():
        by_meaning.setdefault(meaning, []).append(f"`{name}`")
    for meaning, names in by_meaning.items():
        yield f"| `{meaning.kind.value}` | {meaning.part.name.lower()} | {', '.join(names)} |"
    yield f"| | says nothing beside another | {', '.join(f'`{name}`' for name in sorted(exceptions.WRAPPERS))} |"


def _by_meaning(known: Mapping[int, exceptions.Meaning]) -> Iterator[str]:
    by_meaning: dict[exceptions.Meaning, list[str]] = {}
    for number, meaning in known.items():
        by_meaning.setdefault(meaning, []).append(str(number))
    for meaning, numbers in by_meaning.items():
        yield f"{', '.join(numbers)}: `{meaning.kind.value}` ({meaning.part.name.lower()})"


def _known_places() -> Iterator[str]:
    yield from ("| kind | a frame, or the code at it |", "|---|---|")
    for place in code_places.PLACES:
        yield f"| `{place.kind.value}` | {_code(place.example)} |"


def _actions() -> Iterator[tuple[str, str]]:
    for name, text in _strings_under_names(Action).items():
        yield Action[name].value.replace("_", " "), text


def _allowed(times: int) -> str:
    if times == policy.REMEDY:
        return "with a remedy"
    return "the budget" if times >= policy.ALLOWED_BY_SPEC else str(times)


# ---------------------------------------------------------------------------------------------------------------------
# preflight.md


def preflight() -> str:
    """Every check and what it prevents; how one is turned off or added; the tables that they look things up in."""
    head = ["| check | prevents |", "|---|---|"]
    checks = [f"| `{one.id}` | {_cell(one.prevents)} |" for one in CHECKS]
    parts = [GENERATED, PREFLIGHT.format(rows=2000), *head, *checks]
    parts += [PROBE, *head]
    parts += [f"| `{one.id}` | {_cell(one.prevents)} |" for one in NODE_CHECKS]
    gpus = [f"| `{name}` | {' or '.join(map(str, sizes))} |" for name, sizes in sorted(GPU_MEMORY_GB.items())]
    text = "\n".join(parts) + "\n" + OFF.format(group=PLUGINS) + MEMORY + "\n".join(gpus) + "\n"
    text += VERSIONS + "\n".join(_known_bad(waiting=False)) + "\n"
    return text + WAITING + "\n".join(_known_bad(waiting=True)) + "\n"


def _known_bad(*, waiting: bool) -> Iterator[str]:
    for row in KNOWN_BAD:
        if bool(row.waits_for) == waiting:
            installed = " with ".join(f"`{name}{versions}`" for name, versions in row.packages.items())
            for_what = f" | {row.waits_for}" if waiting else ""
            yield f"| {installed} | {_cell(row.happens)} | `{row.instead}`{for_what} | {row.source} |"


# ---------------------------------------------------------------------------------------------------------------------
# cli.md


def cli() -> str:
    """Every command with its arguments and options."""

    parts = [GENERATED, CLI]
    for path, command in commands():
        parts += ["", f"## `{path}`\n", _prose(command.help or ""), ""]
        parts += _parameters(path, command)
    return "\n".join(parts) + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that is not hidden, with what is typed to call it."""
    return _commands(typer.main.get_command(app), "rlhf")


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    # Told apart by what they have, not by their classes: some versions of typer bring click along, others import it.
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _parameters(path: str, command: Any) -> list[str]:
    usage, rows = [path], []
    for parameter in command.params:
        if parameter.hidden:
            continue
        if parameter.param_type_name == "argument":
            usage.append(parameter.metavar if parameter.required else f"[{parameter.metavar}]")
            rows.append(f"| `{parameter.metavar}` | {_cell(parameter.help or '')} |")
        else:
            names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
            repeated = (
                " May be given several times." if parameter.multiple and "several times" not in parameter.help else ""
            )
            rows.append(f"| {names} | {_cell(parameter.help or '')}{repeated} |")
    table = ["", "| argument | meaning |", "|---|---|", *rows] if rows else []
    return [f"    {' '.join(usage)} [OPTIONS]", *table]


# ---------------------------------------------------------------------------------------------------------------------
# Shared


def _strings_under_names(described: type) -> dict[str, str]:
    """Names in the body of a class with the string that stands under each."""
    (tree,) = ast.parse(inspect.getsource(described)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, text in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            continue
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = " ".join(str(text.value.value).split())
    return found


def _prose(text: str) -> str:
    """Paragraphs of a docstring, wrapped."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(paragraph.split()), 118) for paragraph in paragraphs)


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "failures.md": failures_page,
    "cli.md": cli,
    "preflight.md": preflight,
}

if __name__ == "__main__":
    main()
