"""Synthetic runs for the tests of the report, in the form in which the history returns them."""

import math
import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rlhf_core.config import loading as config
from rlhf_core.history.queries.rows import MetricValue
from rlhf_core.render.gather import ReportData
from rlhf_core.render.series import Curve
from rlhf_core.render.timeline import timeline_from_rows
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.evaluation import EvaluationSample
from rlhf_core.schemas.regression import regressions
from rlhf_core.schemas.reports import SampleLine

START = datetime(2026, 11, 20, 14, 3, 7, tzinfo=UTC)
RUN_ID = "quickstart-20261120-140307-a1b2c3"


SPEC = config.load("quickstart", ["seed=1", "loops.warm_start.num_steps=40", "loops.main.num_steps=80"])


def at(seconds: float) -> str:
    """A moment of the synthetic run, in the form in which the history returns it."""
    return (START + timedelta(seconds=seconds)).isoformat()


INCIDENTS: list[dict[str, Any]] = [
    {
        "incident_id": "1.0",
        "attempt": 1,
        "restart": 0,
        "failure_kind": "worker_killed",
        "phase": "train",
        "step": 77,
        "suspect_ranks": [1],
        "suspect_nodes": ["box"],
        "detected_after_s": 0.3,
        "seen_at": at(61),
        "evidence_dir": "attempts/1/restarts/0/incident",
        "message": "Rank 1 on box ended by SIGKILL; no cause was found in the job.",
    },
    {
        "incident_id": "control-812",
        "attempt": 1,
        "restart": 1,
        "failure_kind": "agent_killed",
        "phase": "",
        "step": None,
        "suspect_ranks": [],
        "suspect_nodes": [],
        "detected_after_s": None,
        "seen_at": at(90),
        "evidence_dir": "",
        "message": "The job is gone and left no outcome: <killed> from outside.",
    },
]

DECISIONS: list[dict[str, Any]] = [
    {
        "decision_id": "1.0",
        "attempt": 1,
        "restart": 0,
        "action": "restart_in_place",
        "reason": "first restart without progress of 3 allowed",
        "decided_by": "agent",
        "decided_at": at(62),
        "delay_s": 0.0,
        "excluded_nodes": [],
        "config_diff": {},
        "resume_checkpoint": "",
    }
]


def curves(num_steps: int = 120, warm_start: int = 40) -> dict[str, Curve]:
    """Metrics of a run that learns, with realistic noise."""
    chance = random.Random(7)
    found: dict[str, list[tuple[int, float]]] = {}

    def add(name: str, step: int, value: float) -> None:
        found.setdefault(name, []).append((step, value))

    for step in range(1, num_steps + 1):
        if step <= warm_start:
            add("train/loss", step, 2.4 * math.exp(-step / 14) + 0.3 + chance.gauss(0, 0.02))
            add("train/grad_norm", step, 1.4 * math.exp(-step / 20) + 0.3 + abs(chance.gauss(0, 0.05)))
            add("time/train_s", step, 0.21 + abs(chance.gauss(0, 0.01)))
        else:
            progress = 1 - math.exp(-(step - warm_start) / 28)
            reward = min(0.99, 0.30 + 0.52 * progress + chance.gauss(0, 0.035))
            add("reward/mean", step, reward)
            add("reward/std", step, math.sqrt(reward * (1 - reward)))
            add("train/loss", step, chance.gauss(0, 0.01))
            add("policy/kl", step, 0.12 * progress + abs(chance.gauss(0, 0.004)))
            add("rollout/entropy", step, 0.55 - 0.38 * progress + chance.gauss(0, 0.01))
            add("train/grad_norm", step, 0.5 + abs(chance.gauss(0, 0.1)))
            add("rollout/length_mean", step, 6.9 + chance.gauss(0, 0.03))
            add("time/rollout_s", step, 0.62 + abs(chance.gauss(0, 0.03)))
            add("time/reward_s", step, 0.02)
            add("time/train_s", step, 0.38 + abs(chance.gauss(0, 0.02)))
            add("rollout/distinct_share", step, 0.55 - 0.35 * progress + chance.gauss(0, 0.02))
            add("rollout/zero_std_groups", step, 0.1 + 0.4 * progress + abs(chance.gauss(0, 0.03)))
            add("rollout/truncated_share", step, 0.02 * (1 - progress))
        if step % 20 == 0:
            add("time/checkpoint_s", step, 0.31)
        parts = [found[name][-1] for name in ("time/rollout_s", "time/reward_s", "time/train_s") if name in found]
        add("time/step_s", step, 0.05 + sum(value for at_step, value in parts if at_step == step))
        add("speed/tokens_per_s", step, 6400 + chance.gauss(0, 250))
    found["eval/greedy"] = [(60, 0.83), (80, 0.89), (100, 0.921)]
    return dict(found)


def _restart(attempt: int, restart: int, seconds: tuple[int, int], steps: tuple[int, int]) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "restart": restart,
        "started_at": at(seconds[0]),
        "ended_at": at(seconds[1]),
        "first_step": steps[0],
        "last_step": steps[1],
        "first_step_at": None,
    }


def _evaluation(name: str, when: str, value: float, step: int) -> dict[str, Any]:
    half = 1.96 * math.sqrt(value * (1 - value) / 512)
    return {
        "name": name,
        "when": when,
        "metric": "exact_match",
        "value": value,
        "ci_low": value - half,
        "ci_high": value + half,
        "num_prompts": 512,
        "num_samples": 512,
        "checkpoint_step": step,
    }


def _table(wrong: int) -> list[EvaluationSample]:
    chance = random.Random(3)
    samples = []
    for index in range(24):
        digits = [str(chance.randrange(10)) for _ in range(6)]
        answer = "".join(sorted(digits))
        completion = "".join(digits) if index < wrong else answer
        samples.append(
            EvaluationSample(
                prompt_uid=f"p{index}",
                sample_index=0,
                prompt="".join(digits) + ">",
                completion=completion,
                answer=answer,
                score=float(completion == answer),
            )
        )
    return samples


def _samples() -> list[SampleLine]:
    return [
        SampleLine(
            step=step,
            prompt_uid="p0",
            sample_index=index,
            seed=index,
            weight_version=step - 1,
            prompt="527301>",
            completion="012357" if index < right else f"0123{index:02d}",
            answer="012357",
            reward=float(index < right),
            advantage=1.1 if index < right else -0.8,
        )
        for step, right in ((41, 4), (81, 10), (120, 14))
        for index in range(16)
    ]


def learned(**changes: Any) -> ReportData:
    """A run that lost a rank at step 77, was restarted in place, was resumed once, and learned."""
    known: dict[str, Any] = {
        "run": {
            "run_id": RUN_ID,
            "name": "quickstart",
            "state": "completed",
            "message": "evaluated",
            "owner": "ada",
            "owner_account": "ada, uid 1000",
            "created_at": at(0),
            "progress_at": at(192),
            "ended_at": at(192),
            "undriven_s": 0.0,
            "config_source": "quickstart",
            "overrides": ["seed=1"],
            "package_version": "0.1.0",
            "code_revision": "3f1c9e2-dirty",
        },
        "stages": [
            {"name": "preflight", "state": "completed", "started_at": at(0.4), "seconds": 1.1},
            {"name": "allocate", "state": "completed", "started_at": at(1.6), "seconds": 0.8},
            {"name": "train", "state": "failed", "started_at": at(2.4), "seconds": 88.0},
            {"name": "preflight", "state": "completed", "started_at": at(110), "seconds": 1.0},
            {"name": "allocate", "state": "completed", "started_at": at(111), "seconds": 0.8},
            {"name": "train", "state": "completed", "started_at": at(112), "seconds": 66.0},
            {"name": "evaluate", "state": "completed", "started_at": at(178), "seconds": 14.0},
        ],
        "checks": [
            {"id": "batch.divides_ranks", "status": "passed", "found": "32 prompts over 2 ranks", "advice": ""},
            {
                "id": "environment.packages",
                "status": "passed",
                "found": "deepspeed 0.19.8, safetensors 0.8.0, torch 2.13.0+cpu, transformers 5.19.0",
                "advice": "",
            },
            {"id": "disk.free", "status": "warning", "found": "3.1 GB free", "advice": "free some space"},
        ],
        "attempts": [
            {
                "number": 1,
                "state": "lost",
                "scheduler_job_id": "4711",
                "nodes": ["box"],
                "outcome": None,
                "resumed_from_step": 0,
                "message": "the job is gone and left no outcome",
                "outcome_message": None,
            },
            {
                "number": 2,
                "state": "completed",
                "scheduler_job_id": "4802",
                "nodes": ["box"],
                "outcome": "completed",
                "resumed_from_step": 80,
                "message": "every role succeeded",
                "outcome_message": None,
            },
        ],
        "restarts": [
            _restart(1, 0, (3, 61), (1, 77)),
            _restart(1, 1, (64, 90), (61, 86)),
            _restart(2, 0, (113, 191), (81, 120)),
        ],
        "incidents": INCIDENTS,
        "decisions": DECISIONS,
        "checkpoints": [
            {
                "step": step,
                "loop": "sft" if step <= 40 else "grpo",
                "bytes": 9_600_000,
                "completed_at": at(seconds),
                "removed_at": at(180) if step in (20, 60, 80) else None,
            }
            for step, seconds in ((20, 12), (40, 18), (60, 45), (80, 80), (100, 145), (120, 176))
        ],
        "evaluations": [
            _evaluation("greedy", "before", 0.762, 40),
            _evaluation("sampled", "before", 0.303, 40),
            _evaluation("greedy", "after", 0.941, 120),
            _evaluation("sampled", "after", 0.797, 120),
        ],
        "goodput": {
            "wall_s": 172.0,
            "queue_s": 1.2,
            "productive_s": 98.0,
            "repeated_s": 22.5,
            "lost_s": 31.0,
            "ettr": 0.574,
        },
        "lost_time": [
            {"failure_kind": "worker_killed", "num_incidents": 1, "downtime_s": 8.5, "repeated_s": 22.5, "lost_s": 31.0}
        ],
        "weight_syncs": {
            "num_syncs": 81,
            "num_versions": 80,
            "engines": 2,
            "transports": ["in_process"],
            "seconds": 0.04,
            "wire_s": 0.0,
            "apply_s": 0.04,
            "gb_per_s": 0.08,
            "bytes": 6_441_984,
            "unacknowledged": [],
        },
        "curves": curves(),
        "spec": SPEC,
        "promotion": {
            "state": "promoted",
            "checkpoint_step": 120,
            "decided_by": "ada",
            "reason": "the best of the week",
            "path": f"/models/{RUN_ID}",
            "requested_at": at(193),
            "state_changed_at": at(420),
        },
        "num_parameters": 805_248,
        "tables": {("before", "greedy"): _table(wrong=7), ("after", "greedy"): _table(wrong=2)},
        "samples": _samples(),
        "notes": [],
    }
    known |= changes
    last_steps = {key: curve[-1][0] for key, curve in known["curves"].items() if curve}
    return ReportData(
        controllers=[],
        regressed=regressions(known["evaluations"]),
        metrics={key: _metric(step) for key, step in last_steps.items()},
        metric_keys=sorted(last_steps),
        timeline=timeline_from_rows(
            RunDir(Path("/runs") / RUN_ID), known["run"], known["incidents"], known["decisions"], known["restarts"]
        ),
        **known,
    )


def _metric(step: int) -> MetricValue:
    return {"value": 0.0, "step": step, "attempt": 2, "restart": 0, "time": at(192)}


def failed(**changes: Any) -> ReportData:
    """A run that failed in the warm start, before any evaluation of training."""
    message = (
        "Rank 0 ran out of disk while writing a checkpoint: 12 MiB free on /scratch, 31 MiB needed. Free some space."
    )
    base = learned()
    known: dict[str, Any] = {
        "run": {**base.run, "state": "failed", "message": message, "ended_at": at(40)},
        "stages": [*base.stages[:2], {"name": "train", "state": "failed", "started_at": at(2.4), "seconds": 36.0}],
        "attempts": [{**base.attempts[0], "state": "failed", "outcome": "failed", "message": message}],
        "restarts": [{**base.restarts[0], "last_step": 20, "ended_at": at(38)}],
        "incidents": [{**INCIDENTS[0], "failure_kind": "disk_full", "step": 20, "message": message, "seen_at": at(38)}],
        "decisions": [{**DECISIONS[0], "action": "stop", "decided_by": "controller", "reason": "it would fail again"}],
        "checkpoints": [],
        "evaluations": [],
        "goodput": {**base.goodput, "wall_s": 40.0, "repeated_s": 0.0},
        "lost_time": [],
        "curves": {
            key: [point for point in curve if point[0] <= 20] for key, curve in curves(20).items() if curve[0][0] <= 20
        },
        "tables": {},
        "samples": [],
        "promotion": None,
    }
    return learned(**{**known, **changes})


def blocked() -> ReportData:
    """A run that preflight blocked: without attempts or metrics."""
    nothing: Mapping[str, Any] = {
        name: [] for name in ("attempts", "restarts", "incidents", "decisions", "checkpoints", "evaluations", "samples")
    }
    base = learned()
    return learned(
        **nothing,
        run={
            **base.run,
            "state": "failed",
            "message": "preflight: 33 prompts cannot be shared by 2 ranks",
            "ended_at": at(1),
        },
        stages=[{"name": "preflight", "state": "failed", "started_at": at(0.4), "seconds": 0.6}],
        checks=[
            {
                "id": "batch.divides_ranks",
                "status": "blocked",
                "found": "33 prompts per step for 2 ranks",
                "advice": "set grpo.prompts_per_step to a multiple of 2",
            },
            base.checks[-1],
        ],
        goodput={"wall_s": 1.2, "queue_s": 0.0, "productive_s": 0.0, "repeated_s": 0.0, "lost_s": 0.0, "ettr": 0.0},
        lost_time=[],
        curves={},
        tables={},
        promotion=None,
        num_parameters=None,
    )
