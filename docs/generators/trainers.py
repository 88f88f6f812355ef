"""``docs/trainers.md``: trainers that are other programs, with the tables of presets, placeholders and sources."""

from collections.abc import Iterator

from generators.shared import GENERATED, cell, strings_under_names
from rlhf_core import config, environments
from rlhf_core.presets import PRESETS, preset_path
from rlhf_core.schemas.command_trainer import (
    PLACEHOLDERS,
    SIGHTS,
    CommandTrainer,
    ProgressSource,
    default_sources,
)

FRAMEWORKS = ("script", "transformers", "swift", "trl", "openrlhf")
"""Values of ``trainer.framework`` in the order of the table."""

HEAD = """\
# Bring your own trainer

You have a trainer: ms-swift, TRL, OpenRLHF, or a script that torchrun starts. With `trainer.kind = "command"`
rlhf-flows runs it as it is, in its own Python environment, with preflight, supervision, retries, resume, metrics and
history. The trainer is not changed, and nothing is installed into its environment.

## Two commands

Put the line that starts your training today behind `rlhf wrap`, then run what it wrote:

```console
$ rlhf wrap -o my.toml -- torchrun --nproc_per_node 2 train.py --max_steps 60 --output_dir out
$ rlhf run my.toml
```

`rlhf wrap` runs nothing. It reads the line, or a shell script (`rlhf wrap -o my.toml grpo.sh`; launch scripts of
ms-swift and job scripts of Slurm are understood), and writes a config. Two tables say what it read, with its place in
the config, and what it could not read, with the setting to fill in:

```text
read                         ┃ found                   ┃ where it is now
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
ranks on every node          │ 2                       │ resources.ranks_per_node
meeting point and node ranks │ options of the launcher │ placeholders in trainer.argv
nodes                        │ not given: 1            │ resources.num_nodes
framework                    │ script                  │ trainer.framework
optimizer steps              │ 60                      │ trainer.num_steps
output folder                │ out                     │ trainer.output_dir, in the run directory
...
could not be read  ┃ what to do
━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
the way it resumes │ set trainer.checkpoint_name, checkpoint_complete, resume and resume_argv; until then a retry
                   │ begins at step 0
...
```

`rlhf check my.toml` shows all findings before anything is started; `rlhf run` makes the same checks. If the launch line
gives epochs or no length at all, add `--steps N`: a run needs to know how many optimizer steps make it complete.

As it is, this run is supervised: a rank that dies or hangs is found, its stacks are kept, and the program is started
again. Four settings add resume and metrics. For the script below they are

```toml
[trainer]
checkpoint_name = "step-{step}.pt"           # its checkpoints, in the output folder
resume = "argument"
resume_argv = ["--resume", "{checkpoint}"]   # added to the launch line after a failure
stdout_patterns = ['step (?P<step>\\d+) loss (?P<loss>\\S+)']
```

Kill one of its ranks, and the run says

```text
vm: incident (worker_killed): Rank 1 (local rank 1 on vm) was ended by SIGKILL; nothing in the job explains it.
vm: decision: restart in place 1 of 3 allowed for worker_killed without a new checkpoint
```

and training goes on from the newest complete checkpoint.

"""

SCRIPT = """\
The script, `train.py`; nothing in it knows of rlhf-flows:

```python
import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--max_steps", type=int)
parser.add_argument("--output_dir")
parser.add_argument("--resume")
args = parser.parse_args()

has_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if has_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 0
if args.resume:
    state = torch.load(args.resume, map_location=device)
    first = state["step"]
    model.load_state_dict(state["model"])
for step in range(first + 1, args.max_steps + 1):
    rows = torch.randn(8, 16, device=device)
    loss = (model(rows) - rows.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.2)
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}")
        if step % 10 == 0:
            torch.save({"step": step, "model": model.state_dict()}, f"{args.output_dir}/step-{step}.pt")
dist.destroy_process_group()
```
"""

PRESETS_HEAD = """
## Presets

A preset is a config to start from. `rlhf init --preset NAME` writes it to a file, in which any argument of the program
can be changed or added.

"""

AFTER_PRESETS = """
Most of them need an environment, which is made from versions that were tested together and are kept in the project:

```console
$ rlhf env create trl
$ rlhf run trl-cpo --set model.path=models/Qwen3-0.6B --set data.train=pairs.jsonl
```

| environment | for |
|---|---|
{environments}

`rlhf env create` makes a virtual environment in `RLHF_HOME/environments` (`--folder` for another place; on a cluster it
must be one that the nodes see). Interrupted, it goes on the next time. `--torch torch==2.12.1` takes another torch, and
pip's own settings say where packages come from. `rlhf env list` shows the state of each, `rlhf env show NAME` its
versions. An environment of your own is named by its folder: `trainer.environment = "/shared/envs/mine"`. Without one,
the programs on the `PATH` of the job are used.

## The launch line

`trainer.argv` has one item for each argument. Words in braces are filled in for every start of the program, since
nodes, port and checkpoint may be other ones then. They may also stand in `trainer.resume_argv`, `trainer.variables`,
`trainer.setup`, `trainer.working_dir` and `trainer.output_dir`. No shell reads the line: `$NODE_RANK` stays as it is,
and `rlhf check` says so. Unknown words in braces stay too, because launch lines carry JSON and templates; `rlhf check`
blocks those that look like a slip.

| placeholder | is |
|---|---|
{placeholders}

Two ways to start the ranks, `trainer.launch`:

- `per_node` (the default): the line is started once on every node and starts the ranks itself: torchrun, accelerate,
  deepspeed, swift. It must be told of all nodes, by options such as `--nnodes {{num_nodes}} --node-rank {{node_rank}}`
  or by variables; without that, every node would train a model of its own, which `rlhf check` blocks.
- `per_rank`: it is started once for every rank, with `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`,
  `MASTER_ADDR` and `MASTER_PORT` set. No launcher is needed: `argv = ["python", "train.py", ...]`.

Either way `NNODES`, `NODE_RANK`, `NPROC_PER_NODE` and `PYTHONUNBUFFERED=1` are set, and with `per_node` `MASTER_ADDR`
and `MASTER_PORT` too. `trainer.variables` adds variables and wins over these.

The program is started in `trainer.working_dir`, by default the folder that `rlhf run` was started in. Files of your own
that it needs, such as reward functions, can be named in `code.paths`: they are copied into the run directory, and
`{{code}}` is the folder of the copies. Edits while the job is queued then change nothing.

Modules and containers:

- `trainer.setup` has shell lines that run in front of the program, in the same shell: `["module load cuda/12.8"]`. They
  apply to the program only. `slurm.setup` applies to the whole job, before its agents start.
- `slurm.container_kind` and `slurm.container_image` put the whole job into a container: the compute environment of
  rlhf-flows (`RLHF_COMPUTE_PYTHON`) must be visible inside as well. `rlhf check` cannot look into the image and says
  what it skipped; the probe of the nodes runs inside.

## Progress

A program that does not beat is watched from outside, by several sources. All of them are read without a change to the
program. Progress is what a *strong* source sees; activity and stacks show only that something happens, which a busy
loop does too, and count until a strong source has spoken.

| source | reads | sees | is blind to | strong |
|---|---|---|---|---|
{sources}

`rlhf check` prints this for the sources that your run has, and names those that will see nothing in it, for instance
TensorBoard with `--report_to none`. Without `trainer.progress`, a run has those of its framework:

| `trainer.framework` | sources |
|---|---|
{frameworks}

With `trainer_log` alone a hang is found, but not the rank that hangs: keep a source that tells the rank. A program that
tells no steps (no log, no checkpoint, no pattern) is supervised by its collectives, stacks and activity, and is
complete when it ends with exit code 0; the run shows no steps then.

`trainer.stdout_patterns` are regular expressions. `(?P<step>...)` is the step; every other named group is a metric.
Write them in single quotes in TOML, so that backslashes stay. Progress bars count: a carriage return ends a line.

### The flight recorder in your ranks

torch keeps a list of the newest collectives of each rank, its flight recorder. To read it, the launch puts a folder in
front of `PYTHONPATH`; Python loads the `sitecustomize.py` in it at the start of every process. In a rank, and nowhere
else, that starts one thread. Four times a second, and only once the program has made a process group itself, it notes
how many collectives the rank has entered and left; when a hang is examined, it also writes down which one. It is
what tells the rank that others wait for from those that wait, and ranks that disagree about a collective
(`collective_mismatch`), which no retry repairs. It calls nothing else of torch, never speaks for the rank, and hands on
to the `sitecustomize` of your environment if there is one. It needs nothing but the standard library, from Python 3.8
on. `TORCH_FR_BUFFER_SIZE` is set to 256 unless you have set it; without it torch records nothing.

`trainer.record_collectives = false` turns the thread and the source off.

Not seen by it: programs that are no Python, ranks that are no descendants of the launch line (actors of Ray), and
Python with `-S`, `-I` or `-E`.

### A callback, if you like

A trainer around `transformers.Trainer` can tell of its progress itself. It is the best source: every rank speaks for
itself, with its phase, and a save on request takes seconds. In the script of your training:

```python
try:
    from rlhf_core.callback import SupervisionCallback
except ModuleNotFoundError:  # started by hand, without rlhf-flows
    pass
else:
    trainer.add_callback(SupervisionCallback())
```

rlhf-flows need not be installed in the trainer's environment: a run makes this one module importable. Code of yours
that takes minutes, such as a reward function, may say that it is alive with `callback.beat("reward", step)`.

## Metrics and health

Metrics are read from the same sources and stored under the [names of this project](metrics.md), so that
`rlhf compare`, `rlhf sql` and the dashboards mean the same by `reward/mean` for every trainer. A metric that has no
name here is kept as `trainer/<name>`. `trainer.metrics` renames, and an empty name leaves out:

```toml
[trainer.metrics]
"train/my_reward" = "reward/mean"
"train/noise" = ""
```

`[health]` judges them while training goes on: a loss or gradients that are not finite, gradients of exactly 0, no
spread of rewards, completions that are all cut off, a KL divergence above `health.max_kl`. A finding is an incident
with the decision `continue`: `rlhf show`, the report and the messages name it, and the run goes on. Whether to end it
is left to you. A rule is turned off with a reason:
`health.off = {{ no_spread = "one completion per prompt" }}`.

## Checkpoints and resume

A folder or a file in `trainer.output_dir` whose path fits `trainer.checkpoint_name` is a checkpoint; `{{step}}` is its
step, and `*` any name. It is complete once it has a file for each pattern of `trainer.checkpoint_complete` and has not
changed for two seconds. Name the files that the program writes last. A checkpoint that is a single file needs no
patterns: `checkpoint_complete` is then not used.

Complete checkpoints are published in the run directory as *hard links*:

```text
checkpoints/step-000040/
    checkpoint-40/     your trainer's own folder
    model/             weights, config and tokenizer alone, where they are in the form of Hugging Face
    published.txt      the path of that folder below the output folder
    COMPLETE           sizes and checksums of all files, written last
```

They take no space while the trainer keeps its own (on another file system they are copies), and stay when the trainer
removes its own: `checkpoint.keep_last` and the retention of the site decide. A program that changes the files of an old
checkpoint in place changes the published one as well, which then fails its checksums and is not used; trainers write
new files.

After a failure the newest complete checkpoint is verified by its checksums, and the program is told to go on from it,
by `trainer.resume`:

| `trainer.resume` | what happens |
|---|---|
| `argument` | `trainer.resume_argv` is added to the launch line; `{{checkpoint}}` is the published folder (or file) |
| `in_place` | the checkpoint is put back into the output folder, where the program looks for it |
| `none` | the program starts at the beginning |

Checkpoints of later steps, torn ones among them, are moved out of the output folder first, so that no program takes one
of them by itself.

### Saving on request

`rlhf cancel --save`, a preemption and the end of the time limit (`slurm.save_lead_s`) ask for a checkpoint. With the
callback, all ranks save at a step that they agree on. Without it, `trainer.save_signal` is sent to every rank, for a
program that saves at a signal and goes on. A program that knows neither is waited for until its next own checkpoint, as
long as there is time. Neither TRL nor ms-swift saves at a signal.

## Evaluation and promotion

With `data.eval` and `evaluate.scorer`, the run measures the last checkpoint when training has ended, and `model.path`
as the model before it: on the same nodes, with the evaluator of rlhf-flows, in its own compute environment. Rows have
`data.prompt_column` and `data.answer_column`, as for the native trainer. It needs the `model/` folder, so a checkpoint
in the form of Hugging Face. Without `data.eval` there is no evaluation. Promotion (`[promote]`) takes the same folder,
and asks for an evaluation.

## What counts as a failure

All kinds of [failures.md](failures.md) apply: the worker beside each rank ends as the rank has ended, by the same exit
code or signal. One kind is special to other programs, `incomplete`, and it is not retried, because it would come back:

- the program ended with exit code 0 before `trainer.num_steps`. Tell it the number with `{{num_steps}}`, not by hand;
- it was told to go on from a checkpoint and began at an earlier step. The checkpoint is untouched; look at
  `trainer.resume_argv`.

`trainer.artifacts` names further files of the output folder that are kept with each attempt.
"""

TROUBLE = {
    "on processors, the loss is the same for any number of ranks": "accelerate trains every rank alone unless it is "
    'told to use the CPU, and says nothing about it: `ACCELERATE_USE_CPU = "{use_cpu}"` in `trainer.variables`, or '
    "`--use_cpu`. The presets of ms-swift have it, and `trl_train.py` sees to it",
    "no checkpoint is found with ms-swift": "it puts them into a folder `v0-<time>` of each start. Add `--add_version "
    'false`, or use `checkpoint_name = "*/checkpoint-{step}"`',
    "no metrics with TRL until the first checkpoint": "TRL writes no log of its own. Add `--report_to tensorboard` and "
    '`TENSORBOARD_LOGGING_DIR = "{output_dir}/runs"`, as the presets do',
    "`incomplete`, although all was trained": "the program counts other steps than `trainer.num_steps`: micro-batches, "
    "or epochs. OpenRLHF counts none: its number is `data.max_samples / rollout.batch_size`",
    "GRPO stops in its first step over a batch": "the batch of all ranks must be a multiple of `num_generations`; "
    "`rlhf check` does the arithmetic",
    "the program has trained, and does not end": "with gloo, torch can wait for ever while it is taken down (pytorch "
    "#56297). `trl_train.py`, which the presets start, ends with `os._exit(0)` once all is saved",
    "a hang is reported that is none": "a phase without any sign, such as a long rollout: add the callback or a "
    "pattern of output, or raise the floor of its phase (`supervise.floor_s`)",
    "all output is in the log of the first rank": "ranks of torchrun and of what is made of it have logs of their own "
    "(`rlhf logs RUN --rank 1`); other launchers mix theirs",
    "CPO hangs on two ranks": "TRL before 0.17; `rlhf check` warns of versions that are "
    "[known to go wrong](preflight.md#versions-that-go-wrong-together)",
}
"""Signs of trouble, and their causes with a remedy."""

END = """
All settings: [`[trainer]`](configuration.md#trainer). Why it is done this way: [decision
0029](decisions/0029-a-worker-follows-each-foreign-rank.md).
"""


def trainers() -> str:
    """Trainers that are other programs, from the launch line to its evaluation."""
    after = AFTER_PRESETS.format(
        environments="\n".join(_environments()),
        placeholders="\n".join(f"| `{{{name}}}` | {cell(meaning)} |" for name, meaning in PLACEHOLDERS.items()),
        sources="\n".join(_sources()),
        frameworks="\n".join(_frameworks()),
    )
    return (
        "\n".join([GENERATED, HEAD + SCRIPT + PRESETS_HEAD + "\n".join(_presets())])
        + "\n"
        + after
        + "\n".join(_trouble())
        + "\n"
        + END
    )


def _presets() -> Iterator[str]:
    yield "| preset | is | environment | tested |"
    yield "|---|---|---|---|"
    for name in PRESETS:
        trainer = config.load(name).trainer
        if not isinstance(trainer, CommandTrainer):
            continue
        text = preset_path(name).read_text(encoding="utf-8")
        about = text.partition("\n")[0].partition(": ")[2]
        state = "dry run" if "# Not run yet" in text else "run"
        yield f"| `{name}` | {cell(about)} | {f'`{trainer.environment}`' if trainer.environment else '-'} | {state} |"


def _trouble() -> Iterator[str]:
    yield "\n## When something is wrong\n"
    yield "| you see | it is |"
    yield "|---|---|"
    for seen, cause in TROUBLE.items():
        yield f"| {cell(seen)} | {cell(cause)} |"


def _environments() -> Iterator[str]:
    for name in environments.names():
        yield f"| `{name}` | {cell(environments.definition(name).summary)} |"


def _sources() -> Iterator[str]:
    reads = strings_under_names(ProgressSource)
    for source, sight in SIGHTS.items():
        meaning = reads[source.name].rstrip(".")
        strong = "yes" if sight.is_strong else "no"
        yield f"| `{source}` | {cell(meaning)} | {cell(sight.sees)} | {cell(sight.blind)} | {strong} |"


def _frameworks() -> Iterator[str]:
    for name in FRAMEWORKS:
        trainer = CommandTrainer.model_validate({"argv": ["x"], "num_steps": 1, "framework": name})
        yield f"| `{name}` | {', '.join(f'`{source}`' for source in default_sources(trainer))} |"
