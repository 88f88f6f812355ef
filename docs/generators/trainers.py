"""``docs/trainers.md``: trainers that are other programs, with the tables of presets, placeholders and sources."""

from collections.abc import Iterator
from typing import get_args

from generators.shared import GENERATED, cell
from rlhf_core.config import loading as config
from rlhf_core.machine import environments
from rlhf_core.presets import PRESETS, preset_path
from rlhf_core.schemas.base import strings_under_names
from rlhf_core.schemas.command_trainer import PLACEHOLDERS, SIGHTS, CommandTrainer, ProgressSource

HEAD = """\
# Bring your own trainer

Keep the trainer you have: ms-swift, TRL, OpenRLHF, verl, or any script. With `trainer.kind = "command"`,
rlhf-flows runs it unmodified in its own Python environment, and adds preflight checks, supervision, retries, resume,
metrics and history. Nothing is installed into the trainer's environment.

## Two commands

Put `rlhf wrap` in front of the command that starts your training today, then run the config that it writes:

```console
$ rlhf wrap -o my.toml -- torchrun --nproc_per_node 2 train.py --max_steps 60 --output_dir out
$ rlhf run my.toml
```

`rlhf wrap` does not run anything. It reads your command, or a shell script (`rlhf wrap -o my.toml grpo.sh`), and writes
a config. Write the line as you start it today: with variables in front (`NGPU=4 ./train.sh`), the arguments of the
script, and the options of `sbatch` or `srun`. In scripts, it follows arrays, functions, loops over the arguments, and
other scripts and here-documents that they run or source; a branch counts if its condition is known. Two tables show the
result: the values it found, with their place in the config, and the ones it could not find, with the settings to fill
in.

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
                   │ starts at step 0
...
```

For programs of `transformers.Trainer` (TRL, ms-swift, LLaMA-Factory, axolotl), OpenRLHF and verl, it knows the
checkpoints, and adds the options for output folder and checkpoints that the line lacks; also the one for steps, except
to OpenRLHF. verl's steps and metrics are read from the lines of its console logger. verl itself has not been run.

It also knows the way to resume, with one exception: a script of your own with a `transformers.Trainer`. Its option
`--resume_from_checkpoint` does nothing unless the script passes it on, with
`trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)`; many examples call `trainer.train()`.
`rlhf wrap` and `rlhf check` look into the script, and tell you if it lacks this.

`rlhf check my.toml` shows all findings before anything starts; `rlhf run` makes the same checks. If your command sets a
number of epochs, or no length at all, add `--steps N`: a run needs to know after how many optimizer steps it is
complete.

The run is now supervised: if a rank dies or hangs, rlhf-flows detects it, saves the stacks and restarts the
program. Four more settings of the table `[trainer]` that `rlhf wrap` wrote add resume and metrics, where `resume`
replaces the one that is there. For the script below, they are

```toml
[trainer]
checkpoint_name = "step-{step}.pt"           # its checkpoints, in the output folder
resume = "argument"
resume_argv = ["--resume", "{checkpoint}"]   # added to the launch line after a failure
stdout_patterns = ['step (?P<step>\\d+) loss (?P<loss>\\S+)']
```

Kill one of its ranks, and the run prints

```text
vm: incident (worker_killed): Rank 1 (local rank 1 on vm) was ended by SIGKILL; no cause was found in the job.
vm: decision: restart in place 1 of 3 allowed for worker_killed without a new checkpoint
```

and training resumes from the newest complete checkpoint.

"""

SCRIPT = """\
This is the script, `train.py`. It knows nothing about rlhf-flows:

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

A preset is a config to start from. `rlhf init --preset NAME` writes it to a file, where you can change or add any
argument of the program.

"""

AFTER_PRESETS = """
Most presets need an environment. rlhf-flows builds it from pinned versions that were tested together:

```console
$ rlhf env create trl
$ rlhf run trl-cpo --set model.path=models/Qwen3-0.6B --set data.train=pairs.jsonl
```

| environment | for |
|---|---|
{environments}

`rlhf env create` builds a virtual environment in `RLHF_HOME/environments`. Use `--folder` to put it elsewhere; on a
cluster, the nodes must be able to see it. If the command is interrupted, run it again and it continues.
`--torch torch==2.12.1` installs another version of torch, and pip's own settings decide where packages come from.
`rlhf env list` shows the state of each environment, and `rlhf env show NAME` its versions. To use an environment of
your own, name its folder: `trainer.environment = "/shared/envs/mine"`. Without `trainer.environment`, the job uses the
programs on its `PATH`.

## The launch line

`trainer.argv` is the launch line: the command that starts your trainer, with one list item per argument. rlhf-flows
fills in the placeholders, words in braces, each time it starts the program, because the nodes, the port and the
checkpoint can change between starts. You can also use them in `trainer.resume_argv`, `trainer.variables`,
`trainer.setup`, `trainer.working_dir` and `trainer.output_dir`.

No shell expands the line: `$NODE_RANK` stays as it is, and `rlhf check` tells you so. Unknown words in braces also
stay, because launch lines may contain JSON and templates; `rlhf check` blocks the ones that look like typos.

| placeholder | is |
|---|---|
{placeholders}

`trainer.launch` sets how the ranks are started:

- `per_node` (the default): the line runs once on every node and starts the ranks itself, as torchrun, accelerate,
  deepspeed and swift do. It must be told about all the nodes, with options such as
  `--nnodes {{num_nodes}} --node-rank {{node_rank}}` or with variables. Otherwise every node would train a model of its
  own, which `rlhf check` blocks.
- `per_rank`: the line runs once for every rank, with `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`,
  `MASTER_ADDR` and `MASTER_PORT` set. You need no launcher: `argv = ["python", "train.py", ...]`. In a Slurm job, each
  rank also has the numbers that srun would have given it (`SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_NTASKS` and others).

Both set `NNODES`, `NODE_RANK`, `NPROC_PER_NODE` and `PYTHONUNBUFFERED=1`; `per_node` also sets `MASTER_ADDR` and
`MASTER_PORT`. Variables in `trainer.variables` are added to these and override them.

The program starts in `trainer.working_dir`, by default the folder where you called `rlhf run`. If it needs files of
your own, such as reward functions, list them in `code.paths`: they are copied into the run directory, and `{{code}}` is
the folder with the copies. Edits that you make while the job is queued then have no effect on it.

For environment modules and containers:

- `trainer.setup` holds shell lines that run before the program, in the same shell: `["module load cuda/12.8"]`. They
  affect the program only, and the programs of `trainer.environment` precede those of these lines. `slurm.setup` applies
  to the whole job, before its agents start. `rlhf check` looks for the program after it has run these lines here, if
  they only prepare a shell (`module load`, `source`, `conda activate`, `export`); others run on the nodes only. If they
  fail on this machine, it warns you, and the probe of the nodes decides.
- If the launch line starts the program in a container (`apptainer exec image.sif torchrun ...`), the image needs the
  folders of the run under the same paths. For Apptainer and Singularity they are bound by the run, with
  `APPTAINER_BIND` and `SINGULARITY_BIND`, after the folders that you bind there; those of your model, data and code are
  yours to bind. In `trainer.setup`, add to the value: `export APPTAINER_BIND=/data,$APPTAINER_BIND`. For enroot,
  docker and podman, mount `{{run_dir}}`, and `{{drivers}}` if the line names it; `rlhf check` warns you if the run
  directory is not mounted.
- `slurm.container_kind` and `slurm.container_image` put the whole job into a container. The compute environment of
  rlhf-flows (`RLHF_COMPUTE_PYTHON`) must be visible inside it as well. `rlhf check` cannot look into the image and
  tells you what it skipped; the probe of the nodes runs inside the container.

## Progress

rlhf-flows watches an unmodified program from outside, through several sources. Only a *strong* source shows actual
progress. Activity and stacks show merely that something is happening, which is also true of a busy loop; they count
only until a strong source has reported, and before the first step, while the rank is in no collective. A `script`
without a pattern for steps may report none: it counts as training after 8 seconds with progress. If it has a long
set-up and its steps are in TensorBoard alone, name the sources in `trainer.progress`.

One rank may print the steps for all: the first one or, with Megatron, the last. All ranks are told the newest step of
any. A rank that sees no steps itself counts as training once it has made progress after the first step of the job;
until then it has the limits of the set-up, so one that still loads or compiles is not taken for hung because another
one is ahead. If rank 0 prints no steps, steps and metrics are read in the log of one other rank that does; each is
recorded once, however many ranks print it. Metrics that rank 0 and another rank share between them are read from rank 0
only.

The actors of Ray (OpenRLHF, verl) are not found: before the first step, any process of the launch line counts, and then
only steps and checkpoints of the job. `rlhf wrap` therefore sets `supervise.floor_s` to half an hour for them. On
several nodes, `ray_node.sh` waits 15 minutes for all of them to join Ray (`RLHF_RAY_TIMEOUT_S`), then ends with the
last error of `ray`.

| source | reads | detects | misses | strong |
|---|---|---|---|---|
{sources}

`rlhf check` prints this table for the sources of your run, and names those that will see nothing in it, such as
TensorBoard with `--report_to none`. If you do not set `trainer.progress`, the sources depend on the framework:

| `trainer.framework` | sources |
|---|---|
{frameworks}

With `trainer_log` alone, rlhf-flows detects a hang but not which rank hangs, so keep a source that identifies the rank.
A program that reports no steps (no log, no checkpoint, no pattern) is supervised through its collectives, stacks and
activity, and counts as complete when it exits with code 0. The run then shows no steps.

`trainer.stdout_patterns` holds regular expressions. `(?P<step>...)` is the step; every other named group is a metric.
Write them in single quotes in TOML to preserve the backslashes. Progress bars work too: a carriage return ends a line.
Colours are ignored, and a number may have separators (`1,024`) or end in a punctuation mark (`0.5,`).

### The flight recorder in your ranks

torch keeps a list of each rank's latest collectives, its flight recorder. To read it, the launch adds a folder to the
front of `PYTHONPATH`; Python loads the `sitecustomize.py` in it at the start of every process. That module starts one
thread in each rank, and in no other process.

Once the program has created a process group, the thread notes four times a second how many collectives the rank has
entered and left, in all its process groups. When a hang is examined, it also writes down the latest collectives,
sends and receives with the members of their groups. In a job with tensor, pipeline and data parallel groups, a rank
that hangs keeps some ranks waiting directly and others through them; the incident names the one that waits for no
other, and the collective that it has not entered. Ranks that disagree about a collective of any group
(`collective_mismatch`), which no retry can fix, are found as well. Ranks that wait for each other in a circle
probably disagree about the order of collectives: they are restarted once. Sends and receives are recorded by NCCL
only, and were tried with recorded examples.

The thread calls nothing else in torch and never reports progress on behalf of the rank. It passes control on to the
`sitecustomize` of your environment if there is one. It needs only the standard library and Python 3.8 or later.
`TORCH_FR_BUFFER_SIZE` (`TORCH_NCCL_TRACE_BUFFER_SIZE` before torch 2.6) is set to 256 unless you set it; without it,
torch records nothing.

`trainer.record_collectives = false` turns off both the thread and the source.

It cannot see programs that are not Python, actors of Ray, or Python started with `-S`, `-I` or `-E`.

### An optional callback

A trainer built on `transformers.Trainer` can report its own progress. This is the best source: every rank reports for
itself, with its phase, and a checkpoint on request takes seconds. Add this to your training script:

```python
try:
    from rlhf_core.callback import SupervisionCallback
except ModuleNotFoundError:  # started by hand, without rlhf-flows
    pass
else:
    trainer.add_callback(SupervisionCallback())
```

You do not need to install rlhf-flows in the trainer's environment: a run makes this one module importable. Code
that takes minutes, such as a reward function, can signal that it is alive with `callback.beat("reward", step)`.

## Metrics and health

Metrics come from the same sources and are stored under the [names of this project](metrics.md), so `reward/mean` means
the same for every trainer in `rlhf compare`, `rlhf sql` and the dashboards. A metric without a name here is stored as
`trainer/<name>`. Use `trainer.metrics` to rename metrics; an empty name drops one:

```toml
[trainer.metrics]
"train/my_reward" = "reward/mean"
"train/noise" = ""
```

Goodput and the time lost to incidents are computed from the seconds of a step, `time/step_s`; steps between two logged
ones count as much as these. For a program that reports none, such as the script above, the time from the first to the
last metric of each start of the workers counts, including its pauses. If yours prints them, name the group `step_time`:
`(?P<step_time>\\S+)`.

`[health]` checks the metrics during training. It reports a loss or gradients that are not finite, gradients of exactly
0, rewards that do not vary, a batch in which every completion is truncated, and a KL divergence above `health.max_kl`.
A finding is an incident with the decision `continue`: `rlhf show` and the report mention it, as does a notification if
`notify.on` contains `incident`, and the run continues. You decide whether to end it. To turn a rule off, give a reason:
`health.off = {{ no_spread = "one completion per prompt" }}`.

## Checkpoints and resume

Any folder or file in `trainer.output_dir` whose path matches `trainer.checkpoint_name` is a checkpoint; `{{step}}`
matches its step, and `*` any name. It is complete once it has a file for each pattern in `trainer.checkpoint_complete`
and has not changed for two seconds, or ten in a job of several nodes. List the files that the program writes last. A
pattern that begins with `../` is a file beside the checkpoint, which must name its step or a later one: `../latest` of
DeepSpeed, `../latest_checkpointed_iteration.txt` of Megatron. A checkpoint that is a single file needs no patterns, and
`checkpoint_complete` is ignored.

Complete checkpoints are published in the run directory as *hard links*:

```text
checkpoints/step-000040/
    checkpoint-40/     your trainer's own folder
    model/             weights, config and tokenizer alone, if all are there in the form of Hugging Face
    published.txt      the path of that folder below the output folder
    COMPLETE           sizes and checksums of all files, written last
```

They take no space as long as the trainer keeps its own copy (on another file system, they are real copies). When the
trainer deletes its copy, they stay: `checkpoint.keep_last` and the site's retention decide when they go. A program that
changes the files of a checkpoint in place also changes the published one. Until it is published again with new
checksums, which happens once it has not changed for as long, it is not used.

Have the program delete its own old checkpoints, with `--save_total_limit {{keep_last}}` or the like: retention removes
only the links of the run, so those that the program keeps fill the disk. Most keep all by default. For verl,
`rlhf wrap` adds `trainer.max_actor_ckpt_to_keep={{keep_last}}` and the same for the critic. Megatron keeps all
unless you give it `--save-retain-interval`, with which only those of multiples of this number of steps remain.

After a failure, rlhf-flows verifies the checksums of the newest complete checkpoint and tells the program to resume
from it, as `trainer.resume` says:

| `trainer.resume` | what happens |
|---|---|
| `argument` | `trainer.resume_argv` is added to the launch line; `{{checkpoint}}` is the published folder (or file) |
| `in_place` | the checkpoint is put back into the output folder, where the program looks for it |
| `none` | the program starts from the beginning |

Checkpoints of later steps, including incomplete ones, are first moved out of the output folder, so that the program
cannot pick one of them up. Files that name the newest checkpoint (`latest` of DeepSpeed,
`latest_checkpointed_iteration.txt` of Megatron and verl, symbolic links) are corrected: they name the checkpoint that
is put back, or are removed with the one that they name. The critic of OpenRLHF belongs to its actor's checkpoint:
`_critic/global_step40` is complete, published and put back together with `_actor/global_step40`, each once its `latest`
names it (for the actor, with `trainer.framework = "openrlhf"`).

### Saving on request

`rlhf cancel --save`, a preemption and an approaching time limit (`slurm.save_lead_s`) request a checkpoint. With the
callback, all ranks save at a step that they agree on. Without it, every rank gets the signal `trainer.save_signal`, for
programs that save on a signal; if no rank is found (Ray, `mp.spawn`), the program of the launch line gets it, provided
that it handles it and is no launcher: torchrun would end its ranks. If a program supports neither, rlhf-flows waits for
its next regular checkpoint for as long as there is time. Neither TRL nor ms-swift saves on a signal. A program that was
asked to save and stop may exit by itself once it has saved, with code 0; the run then resumes from that checkpoint.

## Evaluation and promotion

If you set `data.eval` and `evaluate.scorer`, the run evaluates the last checkpoint once training has ended, and
compares it with `model.path`, the model before training. The evaluation runs on the same nodes, with the evaluator of
rlhf-flows in its own compute environment. Rows have `data.prompt_column` and `data.answer_column`, as for the native
trainer. Without `data.eval` there is no evaluation. The evaluator needs the `model/` folder, and so a checkpoint in
Hugging Face format. Those of verl and OpenRLHF are not, nor are those of ZeRO-3 unless DeepSpeed's config sets
`stage3_gather_16bit_weights_on_model_save`. `rlhf check` warns you of that, and the first checkpoint without a model is
an incident, long before the evaluation fails. Promotion (`[promote]`) uses the same folder and requires an evaluation.

## What counts as a failure

All kinds in [failures.md](failures.md) apply: the worker beside each rank ends the way the rank did, with the same exit
code or signal. One kind, `incomplete`, applies only to trainers started by `kind = "command"`. It is not retried,
because it would fail again in the same way:

- The program exited with code 0 before it reached `trainer.num_steps`. Pass it the number as `{{num_steps}}` rather
  than hard-coding it.
- The program exited with code 0 and left its last checkpoint without the files of `trainer.checkpoint_complete`. An
  older model would be evaluated and promoted instead.
- The program was told to resume from a checkpoint but began at an earlier step. The checkpoint is untouched; check
  `trainer.resume_argv`.

`trainer.artifacts` lists more files of the output folder to keep with each attempt.
"""

TROUBLE = {
    "on CPUs, the loss is the same for any number of ranks": "accelerate silently trains every rank on its own unless "
    'you tell it to use the CPU. Set `ACCELERATE_USE_CPU = "{use_cpu}"` in `trainer.variables`, or pass `--use_cpu`. '
    "The ms-swift presets do this, and so does `trl_train.py`",
    "no checkpoint is found with ms-swift": "each start writes checkpoints into a new folder `v0-<time>`. Add "
    '`--add_version false`, or set `checkpoint_name = "*/checkpoint-{step}"`',
    "no metrics with TRL until the first checkpoint": "TRL writes no log of its own. Add `--report_to tensorboard` and "
    '`TENSORBOARD_LOGGING_DIR = "{output_dir}/runs"`, as the presets do',
    "`incomplete`, although training finished": "the program counts something other than the steps of "
    "`trainer.num_steps`: micro-batches or epochs. OpenRLHF does not count steps: use "
    "`data.max_samples / rollout.batch_size`",
    "GRPO stops in its first step because of the batch size": "the batch of all ranks must be a multiple of "
    "`num_generations`; `rlhf check` does the arithmetic",
    "the program has trained but does not exit": "with gloo, torch can hang during shutdown (pytorch #56297). "
    "`trl_train.py`, which the presets start, exits with `os._exit(0)` once everything is saved",
    "a false hang is reported": "a phase shows no sign of life, such as a long rollout. Add the callback or an output "
    "pattern, or raise the floor of that phase (`supervise.floor_s`; after the last step, "
    "`supervise.checkpoint_floor_s`)",
    "the log of the first rank holds all the output": "ranks of torchrun, and of launchers built on it, have their own "
    "logs (`rlhf logs RUN --rank 1`); other launchers mix the output",
    "the logs of the ranks are empty": "the launch line has `--log_dir` without `--tee 3`, which hides their output "
    "from the run. Remove it; `rlhf check` warns you of it, and `rlhf wrap` leaves it out",
    "training is slow, and GPUs wait": "a job gets the cores that it requests: `resources.cpus_per_rank` for every "
    "rank, 1 by default. For Ray, one rank stands for all of a node. `rlhf check` warns below 4 cores per GPU",
    "every restart is a new run in W&B": 'set `WANDB_RUN_ID = "{run_id}"` and `WANDB_RESUME = "allow"` in '
    "`trainer.variables`, as `rlhf wrap` does if the launch line uses W&B",
    "CPO hangs on two ranks": "TRL is older than 0.17; `rlhf check` warns of "
    "[known bad versions](preflight.md#known-bad-versions)",
}
"""Signs of trouble, and their causes with a remedy."""

END = """
All settings are listed under [`[trainer]`](configuration.md#trainer). [Decision
0029](decisions/0029-a-worker-follows-each-foreign-rank.md) explains the design.
"""


def trainers() -> str:
    """Trainers that are other programs, from the launch line to its evaluation."""
    after = AFTER_PRESETS.format(
        environments="\n".join(_environments()),
        placeholders="\n".join(f"| `{{{name}}}` | {cell(meaning)} |" for name, meaning in PLACEHOLDERS.items()),
        sources="\n".join(_sources()),
        frameworks="\n".join(_frameworks()),
    )
    presets = HEAD + SCRIPT + PRESETS_HEAD + "\n".join(_presets())
    return "\n".join([GENERATED, presets, after + "\n".join(_trouble()), END])


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
    yield "| you see | cause and fix |"
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
    for name in get_args(CommandTrainer.model_fields["framework"].annotation):
        trainer = CommandTrainer.model_validate({"argv": ["x"], "num_steps": 1, "framework": name})
        yield f"| `{name}` | {', '.join(f'`{source}`' for source in trainer.sources)} |"
