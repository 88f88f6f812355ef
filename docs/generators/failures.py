"""``docs/failures.md``: every kind of failure, its signs, and the reaction to it."""

from collections.abc import Iterator, Mapping

from generators.shared import GENERATED, cell, code, strings_under_names
from rlhf_core.diagnosis import classify, code_locations, exceptions, log_diagnosis, policy, signatures
from rlhf_core.diagnosis.evidence_parts import EvidencePart
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.supervision import SuperviseSpec

FAILURES = """\
# Failures and recovery

After an unexpected end, `rlhf_core/diagnosis/classify.py` turns the evidence (exit codes, signals, the workers'
outcomes, the ends of their logs, the state of the scheduler) into one of the kinds below, and
`rlhf_core/diagnosis/policy.py` decides the next action. Both are pure functions; agent 0 uses them inside an
allocation, the controller between allocations.

## The ladder
"""


BUDGET = """
Only retries without checkpoint progress count: a new checkpoint resets the count. The columns below are the limits of
the policy. Within them, the run has its own budget: `supervise.max_restarts` restarts in place (default {max_restarts})
and `supervise.max_attempts` attempts in a row (default {max_attempts}) without a new checkpoint. Before a new attempt
without progress the controller waits `supervise.backoff_s` (default {backoff_s} s), doubled each time up to
`supervise.max_backoff_s` (default {max_backoff_s} s), and spread at random over the upper half of that.

The total of all attempts, whatever progress they make, has caps of its own, which are off by default:
`supervise.max_total_attempts`, `supervise.max_gpu_hours` and `supervise.max_node_hours`. They are checked before a new
attempt, and the decision to stop names the cap and the use. Those on hours also bound the time limit of every attempt,
so that a training run saves and ends in time. Resuming the run allows as much again.

*With a remedy*: only if the next attempt changes something. CUDA out of memory: half
`trainer.micro_batch_size` until it is 1, then `trainer.gradient_checkpointing`, then the next `trainer.zero_stage`
(with several ranks), then `trainer.offload` (on GPUs), then half `rollout.batch_size`; the global batch, and so the
gradient, stays (`supervise.oom_remediation`). A loss that is not finite: once from the checkpoint before the newest.
Training that no longer learns (`[health]`): once from the newest checkpoint that is older
than the window of steps it was judged by. Newer ones are put aside (`supervise.rollback_on_non_finite`).
`health.actions` decides rule by rule: `roll_back` is that, `stop` ends the run at once, and `warn` is an incident with
the decision `continue`, told once until a window of steps went by without it.

Ranks that disagree about a collective (`collective_mismatch`) end the run at once if that is proven: by their flight
recorders, or by one of our own errors that compared them. If only the text of a log or of an error says so, the workers
are started once more, in place where that is allowed; if it recurs without a new checkpoint, the run ends.

After a damaged checkpoint (a wrong checksum, a missing, empty or unreadable file, an invalid manifest) the workers are
started again in place from the complete one before it, whatever the budget of restarts says, and the damaged one is
kept for inspection in `checkpoints/damaged-<attempt>.<restart>/`. If the evaluator finds it, the steps after the older
one are trained again in a new attempt. The run ends if there is none before; that last one stays in place, and the
message gives advice. A checkpoint that does not fit the run (other settings) has no remedy; another number of ranks
may go on from it.

A reward function runs in a process beside each rank, which has imported no torch. One that takes longer than
`reward.timeout_s` for the completions of a step, or ends its process, costs one answer and not the rank: the process is
killed with everything it has started, and started again. The completions are halved until the one is found that it
fails for. With `reward.on_failure = "stop"` the run ends with an error that names function, completion and prompt; with
`"zero"` the completion counts as 0, the first failure of each function on a rank is an incident that leaves the run
going, and more than `reward.max_failed_share` of a step end it. A scorer of evaluations always ends it.

A new attempt excludes the nodes to blame: at once if a node was lost or a GPU failed, otherwise at a node's second
strike in the run; at most `supervise.max_excluded_nodes`, and never so many that it could not be placed.

With `resources.min_nodes` an attempt goes on with fewer nodes where the cluster cannot give
`resources.num_nodes`, because some are down, drained or excluded: it asks for the largest number that is there
and that the rows of a step divide by. The global batch stays, each rank has more of it, and the decision says
which nodes are lacking. A node is left out of one attempt at least; after that it is taken again, and attempts
grow back when nodes do. A job at work is never ended for it, and nodes that are merely busy are waited for.
Without it, or with fewer than `min_nodes`, the attempt waits for all nodes. With `rollout.nodes` both count all
nodes; those of engines stay as many, and fewer train.

## Detection of hangs

A worker counts as hung after a silence longer than the floor of its phase (`supervise.floor_s` and the other floors,
two minutes and more by default), or than `supervise.gap_factor` times the longest silence that ended well, if that is
more. It is examined long before, after `supervise.suspect_s` (default {suspect_s} s) or the longest silence that ended
well in its phase, and is ended at once if several observations prove that it stands still:

- *Stopped*: the process was stopped in all observations (SIGSTOP, state T). This holds in any phase.
- *Blocked for good*: it waits for a lock of its own process without a time-out, and so do all its other threads;
  neither it nor its children used processor, GPU or disk; no data is in transit between the ranks; and peers wait in
  a collective that it has not entered. Waiting for a connection to another rank counts too, if no rank can send.
- *Disagreement*: all ranks wait inside a collective, and their flight recorders name different operations or shapes at
  the same number. That is a bug in the code (`collective_mismatch`).

Everything else is left to the floor: any activity, a sleep or a time-out, a reward service, a file, a pipe, a child
process, the kernel (state D), a debugger, an observation that is not permitted, data in transit, ranks that all wait in
the same collective; and, unless the process is stopped, set-up and the first pass through a phase.

## The kinds
"""


LOGS = """
## Classification of logs

If a worker could not record its own failure, its log is read (`rlhf_core/diagnosis/log_diagnosis.py`), for kinds of
evidence rather than for known lines
([decision {decision}](decisions/{decision}-logs-are-read-for-kinds-of-evidence.md)):

1. **Lines.** Prefixes of launchers, Ray, engines, containers, the kernel and quotations are removed; the process that
   printed the line stays known. Lines logged as a warning or below are no evidence, except those of the scheduler.
2. **Errors.** The lines of a traceback are joined per process, with its frames. An error is classified in this order:
   by its message, if that names a cause; its class; its error number; its location in the code. An error of a service
   outside the job (a hub, a tracker) is `unknown`, unless its status is a permanent refusal. Classes that only wrap
   another error do not count if that one was printed. The boxes of Rich and the frames of IPython and pytest are read
   too.
3. **Phrases.** All other lines are matched against the tables of phrases.
4. **Parts.** Each piece of evidence is the root of a failure, a symptom of a failure elsewhere, or a
   cascade, such as broken connections to a rank that died, or an engine that is gone. Roots decide before symptoms and
   symptoms before cascades, wherever they stand; among equals the earlier decides.
5. **Time.** Evidence followed by {going_on} further steps, or by the completion of the training, has not ended it; a
   symptom is survived with a single step, and so is a failed rendezvous. A job that says that it has requeued itself
   has not failed by being requeued. After a cancellation by the user, everything else is its consequence, but a
   cancellation after a failure does not count. So a log may also show no failure at all.

A kind that stops a run needs an unambiguous phrase, class or location; everything else is `unknown`, with a
fingerprint, and is tried once more. Of a log that is longer than {most:.0f} MB, the beginning and the end are read.

### Classes of errors

{classes}

Error numbers: {numbers}.

Statuses by which a service permanently refuses a request: {statuses}.

### Locations in the code

Kinds of an error of a general class (`KeyError`, `ValueError`, `RuntimeError` ...) by its location: the innermost known
location decides.

{places}

### Phrases

One line for each row; the first row that matches a line decides.

| kind | part | example |
|---|---|---|
"""


READING = "0015"
"""Number of the decision on how logs are read."""


STATES = """
## State of the scheduler

The final state of a job decides before any log, except for a cancellation, which also ends steps that failed.
`CANCELLED by 0` was the administrator or the scheduler, not the user. States that are not listed, such as FAILED, are
no evidence by themselves: the agents' outcomes and the lines of srun are.

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
        going_on=log_diagnosis.GOING_ON,
        most=(log_diagnosis.HEAD + log_diagnosis.TAIL) / 1e6,
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
                is_teardown = row.part is EvidencePart.TEARDOWN
                shown = "" if is_teardown else f"`{kind.value}`"
                example = row.example.strip().replace("`", "'")
                yield f"| {shown} | {'no evidence' if is_teardown else row.part.name.lower()} | {code(example)} |"


def _known_classes() -> Iterator[str]:
    yield from ("| kind | part | classes |", "|---|---|---|")
    by_meaning: dict[exceptions.Meaning, list[str]] = {}
    for name, meaning in exceptions.CLASSES.items():
        by_meaning.setdefault(meaning, []).append(f"`{name}`")
    for meaning, names in by_meaning.items():
        yield f"| `{meaning.kind.value}` | {meaning.part.name.lower()} | {', '.join(names)} |"
    yield f"| | ignored beside another | {', '.join(f'`{name}`' for name in sorted(exceptions.WRAPPERS))} |"


def _by_meaning(known: Mapping[int, exceptions.Meaning]) -> Iterator[str]:
    by_meaning: dict[exceptions.Meaning, list[str]] = {}
    for number, meaning in known.items():
        by_meaning.setdefault(meaning, []).append(str(number))
    for meaning, numbers in by_meaning.items():
        yield f"{', '.join(numbers)}: `{meaning.kind.value}` ({meaning.part.name.lower()})"


def _known_places() -> Iterator[str]:
    yield from ("| kind | frame, or line of code |", "|---|---|")
    for place in code_locations.CODE_LOCATIONS:
        yield f"| `{place.kind.value}` | {code(place.example)} |"


def _actions() -> Iterator[tuple[str, str]]:
    for name, text in strings_under_names(Action).items():
        yield Action[name].value.replace("_", " "), text


def _allowed(times: int) -> str:
    if times == policy.REMEDY:
        return "with a remedy"
    return "the budget" if times >= policy.ALLOWED_BY_SPEC else str(times)
