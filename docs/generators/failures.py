"""``docs/failures.md``: every kind of failure, its signs, and the reaction to it."""

from collections.abc import Iterator, Mapping

from generators.shared import GENERATED, cell, code
from rlhf_core.diagnosis import classify, policy
from rlhf_core.diagnosis.logs import code_locations, exceptions
from rlhf_core.diagnosis.logs import search as log_diagnosis
from rlhf_core.diagnosis.logs.events import EvidencePart
from rlhf_core.diagnosis.logs.signatures import table as signatures
from rlhf_core.schemas.base import strings_under_names
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.supervision import SuperviseSpec

FAILURES = """\
# Failures and recovery

When something ends unexpectedly, `rlhf_core/diagnosis/classify.py` assigns one of the kinds below, based on the
evidence: exit codes, signals, the workers' outcomes, the ends of their logs and the state of the scheduler. Then
`rlhf_core/diagnosis/policy.py` decides the next action. Both are pure functions. Agent 0 uses them within an
allocation, the controller between allocations.

## The ladder
"""


KINDS = """
## The kinds

The columns in the middle show how often each kind is retried; [the next section](#limits-and-remedies) explains *the
budget*, *uncounted* and *with a remedy*.

| kind | what it is | restarts in place | new attempts | no more, because |
|---|---|---|---|---|
"""


LIMITS = """
## Limits and remedies

Only retries without checkpoint progress count: each new checkpoint resets the counter. Within the limits of the table,
the run has its own budget: `supervise.max_restarts` restarts in place (default {max_restarts}) and
`supervise.max_attempts` attempts in a row (default {max_attempts}) without a new checkpoint. Before a new attempt
without progress, the controller waits `supervise.backoff_s` (default {backoff_s} s). The wait doubles each time up to
`supervise.max_backoff_s` (default {max_backoff_s} s), and the actual wait is drawn at random from its upper half.
Workers are not restarted in place beside processes that do not end when they are killed (blocked in the kernel or the
GPU driver), because these may hold GPU memory: a new attempt follows, and their node is suspected.

You can also cap all attempts together, whatever progress they make: `supervise.max_total_attempts`,
`supervise.max_gpu_hours` and `supervise.max_node_hours`. These caps are off by default. They are checked before each
new attempt; if one is reached, the decision to stop names the cap and the usage. The caps on hours also shorten the
time limit of every attempt, so that training saves a checkpoint and ends in time. If you resume the run, it gets the
same amount again.

*Uncounted* attempts only wait for nodes, like a pending job: only `supervise.max_total_attempts` limits them, and the
wait between them grows as above.

*With a remedy* means that the failure is retried only if the next attempt changes something:

- **CUDA out of memory**: halve `trainer.micro_batch_size` down to 1; then turn on `trainer.gradient_checkpointing`;
  then use the next `trainer.zero_stage` (with several ranks); then let more ranks of a node share each sequence
  (`trainer.sequence_parallel`), if the model's heads divide and full attention alone mixes its tokens; then
  `trainer.offload` (on GPUs); then halve `rollout.batch_size`. In a trainer that samples itself with `transformers`, a
  rollout or evaluation that ran out of memory first halves `rollout.batch_size` down to {few_completions} (if the
  evaluation also scores rows, together with the micro-batch), then continues with `trainer.zero_stage`. With `vllm` in
  the trainer, sampling begins with `trainer.zero_stage`. For a rollout engine, only `rollout.batch_size` is halved; for
  an evaluator, both that and the micro-batch. Where nothing is sampled, as with `evaluate.completions = false`,
  `rollout.batch_size` stays. If `trainer.micro_batch_tokens` is set, it is halved instead of
  `trainer.micro_batch_size`, down to the longest sequence. During setup, where none of these sizes matters yet, only
  `trainer.zero_stage` and `trainer.offload` change, so that an engine or evaluator is not started again. The global
  batch stays the same, and so does the gradient (`supervise.oom_remediation`). If nothing is left to change, the
  decision says what you can do. The run ends after {most_remedies} attempts in a row without a new checkpoint, or
  `supervise.max_attempts` if that is more.
- **A loss that is not finite**: go back once to the checkpoint before the newest.
- **Training that no longer learns** (`[health]`): go back once to the newest checkpoint that is older than the window
  of steps that was judged.

Newer checkpoints are set aside (`supervise.rollback_on_non_finite`). `health.actions` sets the response for each rule:
`roll_back` does the above, `stop` ends the run at once, and `warn` records an incident with the decision `continue`.
The warning is repeated only after a whole window of steps without it.

**Collective mismatch.** Ranks that disagree about a collective (`collective_mismatch`) end the run at once if there
is proof: their flight recorders, or one of our own errors that compared them. If the only evidence is the text of a
log or an error, a rank that ended with exit code 0 while all others wait in a collective (its data may have fewer
batches), or ranks that wait for each other in a circle, in collectives of different process groups, the workers are
restarted once, in place if that is allowed. If the failure recurs without a new checkpoint, the run ends.

**Damaged checkpoints.** If a checkpoint is damaged (a wrong checksum, a missing, empty or unreadable file, an invalid
manifest), the workers restart in place from the previous complete one, whatever is left of the restart budget. The
damaged one is kept for inspection in `checkpoints/damaged-<attempt>.<restart>/`. All ranks share the reading; a file
that only one of them finds faulty is read again by rank 0, which decides. If it is sound, and that rank reads it
wrongly once more, the rank fails with `file_system`: its node is at fault. The evaluator, and a loop whose reference is
an earlier checkpoint, verify the model only. If the evaluator finds damage there, a new attempt trains the steps after
the older checkpoint again. If there is no previous checkpoint, the run ends; the damaged one stays in place, and the
message gives advice. There is no remedy for a checkpoint that does not fit the run because of different settings. A
different number of ranks is fine.

An external trainer (`trainer.kind = "command"`) gets checkpoints whose checksums are right. If its log shows that it
could not load one, before any step after it, the previous one replaces it in the same way, but only once: if the
trainer cannot load that one either, the cause is probably elsewhere, and the run ends. It also ends, and the message
says so, if the log shows other settings than those of the checkpoint, such as another number of ranks for DeepSpeed. A
missing file of one rank means damage only if as many ranks as now have saved the checkpoint.

**Reward functions.** A reward function runs in a separate process beside each rank, without torch. If it takes longer
than `reward.timeout_s` for the completions of a step, or its process exits, the rank survives: the process and
everything it started are killed, and a new one is started. A call that fails otherwise, for instance because a service
did not answer, is repeated once; if it succeeds then, an incident records the failure, and nothing else changes,
because it has the same seed (not in the trainer's own process, with `reward.timeout_s = 0`). If not, the completions
are halved repeatedly to find the one that makes it fail. With `reward.on_failure = "stop"`, the run ends with an error
that names the function, completion and prompt. With `"zero"`, the completion scores 0, the first failure of each
function on a rank is recorded as an incident, and the run continues; it ends if more than `reward.max_failed_share` of
a step fail. A failing scorer of evaluations always ends the run.

**Late nodes.** The agents of all nodes wait for each other for `supervise.join_s` (default {join_s} s) when an attempt
starts, because nodes that pull a container image or read a cold file system start minutes apart. After that, the
attempt ends with `rendezvous`. The message says which nodes arrived and which did not, and only the latter are blamed:
by agent 0, or by the controller if agent 0 itself is missing. If all arrived but some did not connect to agent 0, those
are blamed; if no node did, agent 0's; of two nodes, neither. If no agent has started an hour after
`supervise.join_s`, for instance because `srun` hangs, the controller gives the job up and blames no node.

**Excluded nodes.** A new attempt excludes the nodes at fault: at once if a node was lost, did not arrive or did not
pass its checks, or if a GPU failed, otherwise after a node's second strike in the run. It excludes at most
`supervise.max_excluded_nodes`, and never so many that too few others are left for the job: those of its partition and
reservation, with as many GPUs and its features. Nodes that the cluster does not list are not excluded: Slurm refuses a
job that names one.

**Fewer nodes.** With `resources.min_nodes`, an attempt can run on fewer nodes when the cluster cannot provide
`resources.num_nodes` because some are down, drained or excluded. It requests the largest available number that divides
the rows of a step evenly and, beside its ranks, has GPUs for all rollout engines. The global batch stays the same, each
rank processes more of it, and the decision names the missing nodes. A node is left out of at least one attempt and can
then be used again, so attempts grow back as nodes return. A running job is never ended for this, and nodes that are
merely busy are waited for. Without `min_nodes`, or if fewer than that are available, the attempt waits for all nodes.
With `rollout.nodes`, both settings count all nodes: the number of engine nodes stays, and fewer nodes train.

## Detection of hangs

A worker counts as hung once it has been silent for longer than the floor of its phase (`supervise.floor_s` and the
other floors, two minutes or more by default), or for longer than `supervise.gap_factor` times the longest silence it
has recovered from, whichever is more. It is examined much earlier: after `supervise.suspect_s` (default {suspect_s} s),
or after the longest silence it has recovered from in the same phase. If several observations prove that it cannot
continue, it is ended at once. There are three such proofs:

- *Stopped*: the process was stopped in every observation (SIGSTOP, state T). This holds in any phase.
- *Blocked for good*: it waits without a timeout for a lock of its own process, and so do all its other threads; neither
  it nor its children use CPU, GPU or disk; no data is in transit between the ranks; and its peers wait in a collective
  that it has not entered. Waiting for a connection to another rank also counts if no rank can send.
- *Disagreement*: all ranks wait inside collectives, and the flight recorders of all members of a process group show
  different operations or shapes under the same number. That is a bug in the code (`collective_mismatch`).

Every other silence is judged by the floor alone. This covers any activity, a sleep or a timeout, a reward service, a
file, a pipe, a child process, the kernel (state D), a debugger, an observation that is not permitted, data in transit,
and ranks that all wait in the same collective. It also covers set-up and the first pass through a phase, unless the
process is stopped.
"""


LOGS = """
## Classification of logs

If a worker could not record its own failure, its log is read (`rlhf_core/diagnosis/logs/search.py`). The reader looks
for kinds of evidence rather than for known lines ([decision
{decision}](decisions/{decision}-logs-are-read-for-kinds-of-evidence.md)):

1. **Lines.** Prefixes added by launchers, Ray, engines, containers, the kernel and quotations are removed; the process
   that printed the line is remembered. Lines logged at warning level or below are not evidence, except for those of the
   scheduler. The rows of a table of completions, as TRL prints it, are skipped.
2. **Errors.** The lines of a traceback are joined per process, with its frames. An error is classified by its message,
   if that names a cause; otherwise by its class, its error number, or its location in the code, in this order. An error
   of a service outside the job (a hub, a tracker) is `unknown`, unless its status is a permanent refusal; it is the
   engine's if a trainer's client of an engine made the request. A `TypeError` in a reward function is that function's,
   not one of versions. A class that only wraps another error is ignored if that error was printed too. Rich's boxes and
   the frames of IPython and pytest are understood.
3. **Phrases.** All other lines are matched against the tables of phrases.
4. **Parts.** Each piece of evidence is either the root of a failure, a symptom of a failure elsewhere, or a cascade,
   such as a broken connection to a rank that died, or an engine that is gone. Roots take precedence over symptoms, and
   symptoms over cascades, wherever they appear; among equals, the earlier one decides.
5. **Time.** Evidence that is followed by {going_on} more steps, or by the end of training, did not cause the failure.
   For a symptom or a failed rendezvous, a single step is enough. A job that says it requeued itself has not failed by
   being requeued. After the user cancels, everything that follows is a consequence; a cancellation after a failure does
   not count. A log may therefore show no failure at all.

A kind that stops a run requires an unambiguous phrase, class or location. Everything else is `unknown`, gets a
fingerprint, and is tried once more. If a log is longer than {most:.0f} MB, only its beginning and end are read.

### Classes of errors

{classes}

Error numbers: {numbers}.

Status codes that count as a permanent refusal by a service: {statuses}.

### Locations in the code

An error of a general class (`KeyError`, `ValueError`, `RuntimeError` ...) is classified by where it was raised. The
innermost known location decides.

{places}

### Phrases

Each row has one example line. The first row that matches a line decides.

| kind | part | example |
|---|---|---|
"""


READING = "0015"
"""Number of the decision on how logs are read."""


STATES = """
## State of the scheduler

The final state of a job takes precedence over any log. The exception is a cancellation, which also ends steps that have
already failed. `CANCELLED by 0`, or by another user, means an administrator, an operator or the scheduler, not the
user. Only accounting (`sacct`) knows; without it, every cancellation counts as the user's. A job that Slurm cancelled
because the Prolog failed on a node, which it drained for that reason, counts as `LAUNCH_FAILED`, and one that failed
with nodes that Slurm switches on and off (`down~`) as `POWERED_OFF`; if no agent had started, its kind is `no_nodes`.
States that are not listed, such as FAILED, prove nothing by themselves; the agents' outcomes and the lines of srun do.

| state | kind |
|---|---|
"""


def failures_page() -> str:
    """Every failure kind: what it means, how often it is retried, and why not more often; and what it is known by."""
    ladder = [f"{number}. **{action}**: {text}" for number, (action, text) in enumerate(_actions(), start=1)]
    parts = [GENERATED, FAILURES, *ladder, KINDS.rstrip("\n")]
    meanings = strings_under_names(FailureKind)
    for kind in FailureKind:
        rule = policy.RULES[kind]
        allowed = f"{_allowed(rule.in_place)} | {_allowed(rule.attempts)}"
        parts.append(f"| `{kind.value}` | {cell(meanings[kind.name])} | {allowed} | {cell(rule.why)} |")
    settings = {name: f"{value:g}" for name, value in SuperviseSpec()}
    counts = {"most_remedies": policy.MOST_REMEDIES, "few_completions": policy.FEW_COMPLETIONS}
    parts.append(LIMITS.format(**settings, **counts).rstrip("\n"))
    states = [f"| `{state}` | `{kind.value}` |" for state, kind in classify.SCHEDULER_STATES.items()]
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
    if times == policy.UNCOUNTED:
        return "uncounted"
    return "the budget" if times >= policy.ALLOWED_BY_SPEC else str(times)
