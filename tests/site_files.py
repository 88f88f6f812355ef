"""Files for test sites: a config of a tiny run, graders, and a stand-in for an agent."""

import json
import stat
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

TINY: Mapping[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "model.tokenizer": "char",
    "model.config.model_type": "qwen3",
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 1,
    "model.config.head_dim": 16,
    "model.config.max_position_embeddings": 64,
    "data.generator": "rlhf_core.training.tasks:sort_digits",
    "data.generator_args.num_digits": 3,
    "data.generator_args.num_train": 400,
    "data.generator_args.num_eval": 32,
    "data.max_prompt_tokens": 8,
    "loops.warm_start.num_steps": 12,
    "loops.warm_start.algorithm.name": "sft",
    "loops.warm_start.algorithm.batch_size": 32,
    "loops.warm_start.optimizer.learning_rate": 3e-3,
    "loops.main.algorithm.name": "grpo",
    "loops.main.num_steps": 30,
    "loops.main.optimizer.learning_rate": 1e-4,
    "trainer.micro_batch_size": 16,
    "trainer.log_samples_every": 1,
    "loops.main.algorithm.prompts_per_step": 8,
    "loops.main.algorithm.samples_per_prompt": 4,
    "loops.main.algorithm.measure_kl": True,
    "rollout.max_new_tokens": 4,
    "evaluate.num_prompts": 32,
    "evaluate.every_num_steps": 10,
    "checkpoint.every_num_steps": 5,
    "resources.ranks_per_node": 2,
    "supervise.backoff_s": 0,
}
"""A run of a minute on two ranks."""

GRADED: Mapping[str, Any] = {
    "name": "sorting",
    "seed": 5,
    "loops.warm_start.num_steps": 20,
    "loops.main.num_steps": 8,
    "trainer.log_samples_every": None,
    "reward.functions": ["grader:exact"],
    "evaluate.every_num_steps": None,
    "resources.time_limit_s": 1800,
    **{f"supervise.{name}_s": 25 for name in ("floor", "rollout_floor", "reward_floor", "checkpoint_floor")},
    "supervise.evaluate_floor_s": 25,
}
"""Changes for a run with the graders of :data:`GRADER`, on a machine that is busy with others."""

QUICK = "reconcile_s = 1.0\ningest_s = 0.5"
"""Settings of a daemon that has not to be waited for."""

SMALL = (
    "model.config.num_hidden_layers=1", "data.generator_args.num_train=64", "preflight.probe=false",
    "resources.num_nodes=1", "resources.ranks_per_node=1", "supervise.backoff_s=0",
)  # fmt: skip
"""Overrides of a preset that make a run as small as it can be."""

GRADER = '''\
"""Graders of the team: what its configs name as reward functions."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVICE_IS_UP = Path({service!r})
_calls = 0


def exact(*, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 for the right answer."""
    return [float(found.strip() == right) for found, right in zip(completions, answer, strict=True)]


def slow(**columns: Any) -> list[float]:
    """A grader that takes its time, so that there is some to watch."""
    time.sleep(0.1)
    return exact(**columns)


def patient(**columns: Any) -> list[float]:
    """A grader of a run that is there until it is ended, and sleeps meanwhile."""
    time.sleep(1.0)
    return exact(**columns)


def by_service(**columns: Any) -> list[float]:
    """A grader whose service is away after some calls, until it is started again."""
    global _calls
    _calls += 1
    if _calls > 8 and not SERVICE_IS_UP.exists():
        raise ValueError("the grading service answered 503: it is down for maintenance")
    return exact(**columns)
'''

PRETENDED_AGENT = """\
    #!{python}
    # Python, but for the agent of a job: that writes what a real one writes, and ends well once the test says so.
    import os, sys, time
    from pathlib import Path
    if "agent" not in sys.argv:
        os.execv({python!r}, [{python!r}, *sys.argv[1:]])
    sys.path[:0] = [{root!r}, {tests!r}]
    from control_fakes import FakeAgent
    from rlhf_core.run_dir.run import RunDir
    from rlhf_core.schemas.attempts import Role
    run = RunDir(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
    agent = FakeAgent(run, attempt=int(sys.argv[sys.argv.index("--attempt") + 1]))
    with (run.root / "starts").open("a") as starts:
        starts.write(f"{{agent.attempt}}\\n")
    agent.start()
    sequence = 1
    while not (run.root / "go").exists():
        sequence += 1
        agent.status(sequence=sequence)
        time.sleep(0.2)
    agent.whole_run()
"""


def tiny_config(changes: Mapping[str, Any] | None = None) -> str:
    """TOML of a tiny run with changed settings; settings that are None are omitted."""
    settings = {**TINY, **(changes or {})}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items() if value is not None)


def options(*overrides: str) -> list[str]:
    """Command-line options for overrides."""
    return [word for override in overrides for word in ("--set", override)]


def small(*overrides: str) -> list[str]:
    """Options that make a run small, followed by more overrides."""
    return options(*SMALL, *overrides)


def write_pretended_agent(path: Path) -> None:
    """Write a compute interpreter that runs a stand-in for each agent."""
    values = {"python": sys.executable, "root": str(ROOT), "tests": str(ROOT / "tests")}
    path.write_text(textwrap.dedent(PRETENDED_AGENT).format(**values))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
