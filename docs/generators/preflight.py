"""``docs/preflight.md``: every check, and the tables behind them."""

from collections.abc import Iterator

import rlhf_core.preflight.checks  # noqa: F401 - importing it registers the checks
from generators.shared import GENERATED, cell
from rlhf_core import config
from rlhf_core.diagnosis.node_checks import NODE_CHECKS
from rlhf_core.preflight.known_bad_versions import KNOWN_BAD
from rlhf_core.preflight.memory import GIB, GPU_MEMORY_GB
from rlhf_core.preflight.predictions import Predictions, predict
from rlhf_core.preflight.registry import CHECKS, PLUGINS
from rlhf_core.presets import PRESETS
from rlhf_core.schemas.resources import Inventory

PROBE = """
## On the nodes

Before the workers of an attempt start, its nodes are compared and measured (`preflight.probe`); `rlhf check CONFIG
--probe` does only that, and releases the allocation.

1. Every agent reports the facts of its node: environment, versions, hashes of config, code, data, model and tokenizer
   as this node reads them, GPUs, free space, clock. Agent 0 compares them, before there is any process group. The value
   of more than half of the nodes is expected; a finding names the node that has another one, and the key. Without such
   a majority all values are shown, and no node is blamed. The reports of the nodes are kept in `attempts/<n>/probe/`.
2. One process per rank measures matrix products, then bandwidth and latency in pairs (every node with two others, to
   distinguish a slow node from a slow link), then an all-reduce and an all-gather over all ranks, whose results are
   known beforehand. Everything has a deadline (`preflight.probe_s`). Slow nodes and links are measured a second time
   before they are reported. Slow is less than `preflight.min_relative_speed` of the median of all nodes; less than that
   of a node's own earlier readings is a warning (table `node_speeds`).

A blocked node gets a strike (`rlhf nodes`) and is excluded, and the run is placed again at once.
If no other node can take its place, or no single node is to blame, the run ends with exit code 2 and the
finding. Findings are rows of `checks`, parts of `rlhf show` and the report, and a table artifact in Prefect.
"""


PREFLIGHT = """\
# Preflight

Before a job is submitted, rlhf-flows checks everything that needs no allocation. All findings are shown at once; a
blocking one keeps the run from starting (exit code 2), and its message gives the actual and the expected value, and
advice. `rlhf check` does only this and starts nothing.

The checks are arithmetic on facts that are gathered once: the config, the data files, the scheduler's nodes, the
packages of the compute interpreter, the disk. The checks whose names begin with `content` share one reading of the
first {rows} rows of the data in the compute interpreter. It takes some seconds and is bounded in time and memory; each
reward function is called there with real rows in a process of its own, so that one that never returns is a finding.

A trainer that is another program (`trainer.kind = "command"`) has checks of its own, `command.*`; those of batches,
loops, memory and content are for the trainer of rlhf-flows. Arguments are read from the launch line and from the
program's config files (JSON and YAML); what cannot be read is not judged. Its interpreter is asked once for what is
installed; nothing of it is imported.

## The checks
"""


OFF = '''
## Disabling checks

A check that does not apply is disabled by its name, with a reason, which is stored with the run:

```toml
[preflight.off]
"data.overlap" = "the held-out set repeats some prompts on purpose"
"content.rewards" = "the reward model is served on the compute nodes only"
```

On the command line: `--set 'preflight.off={{"data.overlap" = "on purpose"}}'`. It is then shown as skipped. An unknown
name or an empty reason blocks the run.

## Checks of your own

A site has rules of its own: quotas, accounts, a required mount. A package installed
beside the control plane adds a check by an entry point of the group `{group}`. The name of the entry point
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

The function judges the facts, which `rlhf_core/preflight/facts.py` describes. A plug-in that cannot be imported,
raises, yields anything but findings, or takes the name of another check, only gives a warning. It must return within a
second or so: it has no deadline.

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

`memory.trainer` and `memory.evaluator` add up what one rank holds (`rlhf_core/preflight/memory/` has every formula
with its source): weights, gradients in float32, AdamW's master weights and moments, each split over the ranks as the
stage of ZeRO splits it, the reference model when an algorithm asks for one (GRPO with a `kl_coefficient` or
`measure_kl`); on top of that the largest of activations and one chunk of logits in training, temporary tensors of an
update, or the KV cache in sampling, under ZeRO 3 with the whole weights. It reckons with the longest prompts and
completions that the config allows. What is offloaded has to fit into the main memory of a node (`memory.offload`).
The estimate is held against the memory of the GPU, by `slurm.gpu_type` or what the nodes say;
on CPU that of the node, divided by its ranks. One rank of a float32 model with 34 million parameters (8 layers, hidden
size 512, 32 sequences of 256 tokens at once) on CPU: 6.2 GiB by the estimate, 5.9 GiB at its peak in a run.
Weights, gradients and optimizer of 50 million parameters on two ranks, peak of an update and estimate in MiB
(`tests/benchmarks/bench_memory.py`, float32): ZeRO 0 1009 and 962, ZeRO 1 1035 and 1058, ZeRO 2 1009 and 1154, ZeRO 3
1273 and 1250; bfloat16: ZeRO 1 920 and 1058, ZeRO 2 923 and 962.

vLLM in the process of a rank takes `rollout.vllm.gpu_memory_share` of a GPU while it samples, weights included, and
gives it back for training; on CPU its copy of the weights, `rollout.vllm.cpu_cache_gb` and its libraries stay.
`memory.rollout` refuses a share that does not hold the weights, a step and one sequence of the full length, and says
how many sequences it holds at once; where pairs are ranked against a reference, `memory.evaluator` counts that model
too. The figures for CPU were held against measured peaks ([benchmarks.md](benchmarks.md)); those for GPUs were not.

With `[model.lora]` gradients and optimizer are those of the adapter, a reference takes no second model, and frozen
layers keep fewer activations ([adapters.md](adapters.md)).

## Predicted step time

`rlhf run CONFIG --dry-run` prints the memory of a rank and, for GPUs whose rates are known, the seconds of a step of
the main loop; `resources.duration` judges them until there are runs of the same shape to go by. The model
(`rlhf_core/preflight/step_time.py`) is a simple one, for `P` weights and `T` tokens of a rank in a step, every sequence
as long as the config allows:

- Training: `6PT` operations (`4PT` with an adapter), `2PT` more with gradient checkpointing, `2PT` for a reference, at
  0.4 of the GPU's dense bfloat16 rate.
- Sampling: `2P` operations for each token of a prompt at that rate; for each position of a batch its weights and cache
  at 0.6 of the memory's rate, or 0.8 ms a layer to launch the kernels, whichever is longer.
- Communication: gradients in float32, under ZeRO 3 also the weights for each pass, at 200 GB/s within a node and
  25 GB/s between nodes.

The rates are the vendors'; the shares are assumed, none was measured here. What was predicted and what a run took
should be compared before the next run is planned by it. Two presets are for such hardware, and were not run:

| preset | on | memory of a rank, GiB | step, s | of that sampling, training, communication |
|---|---|---|---|---|
{predicted}

## GPUs that are known

| type of GPU | memory in GB |
|---|---|
"""


VERSIONS = """
## Versions that go wrong together

`environment.versions` compares the packages of the interpreter that trains with this table. A row blocks the runs that
come upon it for certain; for others it is a warning.

| installed | what happens | instead | source |
|---|---|---|---|
"""


OTHERS = """
These rows concern runs with `trainer.kind = "command"`; the versions are those of the environment that trains.

| installed | what happens | instead | source |
|---|---|---|---|
"""


def preflight() -> str:
    """Every check and what it prevents; how one is turned off or added; the tables that they look things up in."""
    head = ["| check | prevents |", "|---|---|"]
    checks = [f"| `{one.id}` | {cell(one.prevents)} |" for one in CHECKS]
    parts = [GENERATED, PREFLIGHT.format(rows=2000), *head, *checks]
    parts += [PROBE, *head]
    parts += [f"| `{one.id}` | {cell(one.prevents)} |" for one in NODE_CHECKS]
    gpus = [f"| `{name}` | {' or '.join(map(str, sizes))} |" for name, sizes in sorted(GPU_MEMORY_GB.items())]
    text = (
        "\n".join(parts)
        + "\n"
        + OFF.format(group=PLUGINS)
        + MEMORY.format(predicted="\n".join(_predicted()))
        + "\n".join(gpus)
        + "\n"
    )
    text += VERSIONS + "\n".join(_known_bad(only_commands=False)) + "\n"
    return text + OTHERS + "\n".join(_known_bad(only_commands=True)) + "\n"


NO_NODES = Inventory(node_names=(), cpus_per_node=0, memory_gb=0, gpus_per_node=0)


def _predicted() -> Iterator[str]:
    """Rows of the presets for GPUs of a known kind."""
    for name in PRESETS:
        spec = config.load(name)
        found = predict(spec, NO_NODES, spec.model.config, None) if spec.slurm.gpu_type else Predictions()
        if found.memory is not None and found.step is not None:
            parts = ", ".join(f"{found.step.parts[part]:.0f}" for part in ("sampling", "training", "communication"))
            nodes, kind = spec.resources.num_nodes, f"{spec.resources.gpus_per_node} {spec.slurm.gpu_type.upper()}"
            place = f"{nodes} x {kind}" if nodes > 1 else kind
            yield f"| `{name}` | {place} | {found.memory.peak_bytes / GIB:.0f} | {found.step.seconds:.0f} | {parts} |"


def _known_bad(*, only_commands: bool) -> Iterator[str]:
    for row in KNOWN_BAD:
        if row.only_commands == only_commands:
            installed = " with ".join(f"`{name}{versions}`" for name, versions in row.packages.items())
            yield f"| {installed} | {cell(row.happens)} | `{row.instead}` | {row.source} |"
