"""``docs/failures.md``: every kind of failure, its signs, and the reaction to it."""

from collections.abc import Iterator, Mapping

from generators.shared import GENERATED, cell, code, strings_under_names
from rlhf_core.diagnosis import classify, code_places, exceptions, log_reading, policy, signatures
from rlhf_core.diagnosis.parts import Part
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.run import SuperviseSpec

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
`train.micro_batch_size` until it is 1, then `train.gradient_checkpointing`, then half `rollout.batch_size`; the global
batch, and so the gradient, stays (`supervise.oom_remediation`). A loss that is not finite: once from the checkpoint
before the newest. Training that learns nothing any more (`[health]`): once from the newest checkpoint that is older
than the window of steps it was judged by. Newer ones are put aside (`supervise.rollback_on_non_finite`).

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
    meanings = strings_under_names(FailureKind)
    for kind in FailureKind:
        rule = policy.RULES[kind]
        allowed = f"{_allowed(rule.in_place)} | {_allowed(rule.attempts)}"
        parts.append(f"| `{kind.value}` | {cell(meanings[kind.name])} | {allowed} | {cell(rule.why)} |")
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
                yield f"| {shown} | {'says nothing' if says_nothing else row.part.name.lower()} | {code(example)} |"


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
        yield f"| `{place.kind.value}` | {code(place.example)} |"


def _actions() -> Iterator[tuple[str, str]]:
    for name, text in strings_under_names(Action).items():
        yield Action[name].value.replace("_", " "), text


def _allowed(times: int) -> str:
    if times == policy.REMEDY:
        return "with a remedy"
    return "the budget" if times >= policy.ALLOWED_BY_SPEC else str(times)
