"""``docs/preflight.md``: every check, and the tables behind them."""

from collections.abc import Iterator

import rlhf_core.preflight.checks  # noqa: F401 - importing it registers the checks
from generators.shared import GENERATED, cell
from rlhf_core.config import loading as config
from rlhf_core.diagnosis.nodes.checks import NodeCheck
from rlhf_core.preflight.gather_facts import gather_for_predictions
from rlhf_core.preflight.known_bad_versions import KNOWN_BAD
from rlhf_core.preflight.memory.gpus import GIB, GPU_MEMORY_GB
from rlhf_core.preflight.predictions import Predictions, predict
from rlhf_core.preflight.registry import CHECKS, PLUGINS
from rlhf_core.presets import PRESETS
from rlhf_core.schemas.base import strings_under_names
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import Inventory

PROBE = """
## On the nodes

Before the workers of an attempt start, its nodes are compared and measured (`preflight.probe`).
`rlhf check CONFIG --probe` does only that and then releases the allocation.

1. Every agent reports the facts of its node: environment, versions, GPUs, free space, clock, and hashes of the config,
   code, data, model and tokenizer as this node reads them. Agent 0 compares them before there is any process group. It
   expects the value that more than half of the nodes have; a finding names a node with a different value, and the key.
   Without such a majority, it shows all values and blames no node. The reports are kept in `attempts/<n>/probe/`.
2. One process per rank measures matrix products, then bandwidth and latency in pairs. Every node is paired with two
   others, to tell a slow node from a slow link. An all-reduce and an all-gather over all ranks follow, whose correct
   results are known. Everything has a deadline (`preflight.probe_s`, and a second for every further node). Slow nodes
   and links are measured a second time before they are reported. Slow means below `preflight.min_relative_speed` of the
   median of all nodes. Being that much slower than its own earlier readings gives a node a warning (table
   `node_speeds`).

A blocked node gets a strike (`rlhf nodes`) and is excluded, and the run is placed again at once. If no other node can
take its place, or no single node is to blame, the run ends with exit code 2 and the finding. If all nodes were late in
the same step and none reports an error (`probe.late`), new attempts follow as for `rendezvous`. Findings are rows of
`checks`. They appear in `rlhf show`, in the report, and as a table artifact in Prefect.
"""


PREFLIGHT = """\
# Preflight

Before a job is submitted, rlhf-flows checks everything that it can without an allocation. It shows all findings at
once. A blocking finding keeps the run from starting (exit code 2), and its message gives the actual value, the expected
value, and advice. `rlhf check` does only this and starts nothing.

The checks work on facts that are gathered once: the config, the data files, the scheduler's nodes, the packages of the
compute interpreter, and the disk. Checks whose names begin with `content` share one reading of the first {rows} rows of
the data in the compute interpreter. This takes some seconds, with limits on time and memory. It calls each reward
function with real rows in a separate process, so a function that never returns becomes a finding.

A trainer that is another program (`trainer.kind = "command"`) has its own checks, `command.*`; the checks of batches,
loops, memory and content are for the trainer of rlhf-flows. Arguments are read from the launch line and from the
program's config files (JSON and YAML); arguments that cannot be read are not judged. The program's interpreter is asked
once which packages are installed; none of them is imported.

## The checks
"""


OFF = '''
## Disabling checks

To disable a check that does not apply, give its name and a reason, which is stored with the run:

```toml
[preflight.off]
"data.overlap" = "the held-out set repeats some prompts on purpose"
"content.rewards" = "the reward model is served on the compute nodes only"
```

On the command line: `--set 'preflight.off={{"data.overlap" = "on purpose"}}'`. The check is then shown as skipped. An
unknown name or an empty reason blocks the run.

## Checks of your own

Your site may have its own rules: quotas, accounts, a required mount. A package installed next to the control plane can
add a check through an entry point of the group `{group}`. The name of the entry point is the name of the check; the
docstring of the function says what it prevents.

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

The function judges the facts, which `rlhf_core/preflight/facts.py` describes. A plug-in that cannot be imported, raises
an error, yields anything but findings, or takes the name of another check only causes a warning. There is no deadline,
so the function should return within a second or so.

To add a check on the nodes, a package in the compute environment uses the group `rlhf_flows.node_checks`. Its function
takes no arguments and returns a list of findings, each a dictionary. A finding with status `blocked` gets its node
replaced. The names of such checks begin with `site.`:

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
with its source):

- weights, gradients in float32, and AdamW's master weights and moments, each split over the ranks as the stage of ZeRO
  splits it;
- the reference model, if the algorithm needs one (GRPO with a `kl_coefficient` or `measure_kl`), in its own size if
  `loops.main.reference` names it;
- the largest of these: activations and one chunk of logits in training; temporary tensors of an update; the KV
  cache in sampling, under ZeRO 3 together with the whole weights; and under ZeRO 3 the whole weights while they are
  evaluated before the main loop or gathered between two loops, when there are no gradients and no optimizer yet. On
  CPUs, a reference or value model is also loaded whole, beside what trains.

The model assumes the longest prompts and completions that the config allows. Offloaded parts, and the weights that
separate engines receive, must fit into the main memory of a node (`memory.offload`). The estimate is compared with the
memory of the GPU, from `slurm.gpu_type` or the smallest of the nodes that the job may get (by partition, features,
reservation, `slurm.exclude` and number of GPUs); on CPU, with the memory of the node divided by its ranks. If the name
of a type leaves open which of several sizes it is (`a100`), a run that fits only into the largest gets a warning, as
does one whose nodes Slurm selects by `slurm.gres`, for instance, and that fits only into the largest type among them.

For the weights, gradients and optimizer of 50 million parameters on two ranks, we measured the peak of an update
(`tests/benchmarks/bench_memory.py`), in MiB:

| | float32, measured | float32, estimated | bfloat16, measured | bfloat16, estimated |
|---|---|---|---|---|
| ZeRO 0 | 1009 | 962 | | |
| ZeRO 1 | 1035 | 1058 | 920 | 1058 |
| ZeRO 2 | 1009 | 1154 | 923 | 962 |
| ZeRO 3 | 1273 | 1250 | | |

vLLM in the process of a rank takes `rollout.vllm.gpu_memory_share` of a GPU while it samples, including weights, and
releases it for training. On CPU, its copy of the weights, `rollout.vllm.cpu_cache_gb` and its libraries stay in memory.
`memory.rollout` refuses a share that cannot hold the weights, a step and one sequence of the full length, and says how
many sequences fit at once. If pairs are ranked against a reference, `memory.evaluator` counts that model too. It also
judges the evaluation of other trainers, which has one model in memory at a time. The figures for CPU were checked
against measured peaks ([benchmarks.md](benchmarks.md)); those for GPUs were not.

With `[model.lora]`, gradients and optimizer cover only the adapter, a reference needs no second model, and frozen
layers keep fewer activations ([adapters.md](adapters.md)).

## Predicted step time

`rlhf run CONFIG --dry-run` prints the memory of a rank and, for GPUs with known rates, the seconds per step of the main
loop. `resources.duration` relies on this prediction until there are earlier runs of the same shape. The model
(`rlhf_core/preflight/step_time.py`) is simple. For `P` weights that a token passes through (of a mixture of experts,
only those of the experts in use) and `T` tokens of a rank in a step, with every sequence as long as the config allows,
it assumes:

- Training: `6PT` operations (`4PT` with an adapter), `2PT` more with gradient checkpointing, and `2PT` for a reference,
  at 0.4 of the GPU's dense bfloat16 rate. Attention to `n` tokens counts as `layers x query width x n` more weights,
  which an adapter does not spare.
- Sampling: `2P` operations for each prompt token at that rate, and those of attention. For each position of a batch,
  reading all weights and the cache at 0.6 of the memory's rate, or 0.8 ms per layer to launch the kernels, whichever
  takes longer.
- Communication: gradients in float32, and under ZeRO 3 also the weights for each pass, at 200 GB/s within a node and
  25 GB/s between nodes.

The rates are the vendors'. The shares are assumptions, none of which was measured here. Compare the prediction with
your first run before you plan the next one with it. Two presets are meant for such hardware and have not been run:

| preset | hardware | memory per rank, GiB | step, s | of which sampling, training, communication |
|---|---|---|---|---|
{predicted}

## Known GPUs

| type of GPU | memory in GB |
|---|---|
"""


VERSIONS = """
## Known bad versions

`environment.versions` compares the packages of the training interpreter with this table. A row blocks runs that are
certain to be affected; for others, it is a warning.

| installed | what happens | instead | source |
|---|---|---|---|
"""


OTHERS = """
These rows apply to runs with `trainer.kind = "command"`; the versions are those of the training environment.

| installed | what happens | instead | source |
|---|---|---|---|
"""


def preflight() -> str:
    """Every check and what it prevents; how one is turned off or added; the tables that they look things up in."""
    head = ["| check | prevents |", "|---|---|"]
    checks = [f"| `{one.id}` | {cell(one.prevents)} |" for one in CHECKS]
    parts = [GENERATED, PREFLIGHT.format(rows=2000), *head, *checks]
    parts += [PROBE, *head]
    of_nodes = strings_under_names(NodeCheck)
    parts += [f"| `{one}` | {cell(of_nodes[one.name])} |" for one in NodeCheck]
    gpus = [f"| `{name}` | {' or '.join(map(str, sizes))} |" for name, sizes in sorted(GPU_MEMORY_GB.items())]
    parts.append(OFF.format(group=PLUGINS) + MEMORY.format(predicted="\n".join(_predicted())) + "\n".join(gpus))
    parts.append(VERSIONS + "\n".join(_known_bad(only_commands=False)))
    parts.append(OTHERS + "\n".join(_known_bad(only_commands=True)))
    return "\n".join(parts) + "\n"


NO_NODES = Inventory(node_names=(), cpus_per_node=0, memory_gb=0, gpus_per_node=0)


def _predicted() -> Iterator[str]:
    """Rows of the presets for GPUs of a known kind."""
    for name in PRESETS:
        spec = config.load(name)
        facts = gather_for_predictions(spec, NO_NODES, SlurmSpec())
        found = predict(facts) if spec.slurm.gpu_type else Predictions()
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
