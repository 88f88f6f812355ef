"""``rlhf plan``: presets for real hardware, refused layouts, and predictions compared with a history."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeScheduler
from history_tools import RunFiles, ingested
from process_tools import Rlhf
from site_files import options

from rlhf_core.cli.main import execute
from rlhf_core.config import loading as config
from rlhf_core.config.site import load_site
from rlhf_core.control.new_run import resolve
from rlhf_core.files.whole import write_model
from rlhf_core.history.run_shape import shape_key
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.stored_spec import StoredSpec

GIB = 2**30
Plan = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Plan a config: exit code and JSON."""

    def run(name: str, *settings: str) -> tuple[int, dict[str, Any]]:
        code = execute(["plan", name, "--json", *options(*settings)])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_folder_with_nothing_but_the_config_of_a_model_is_enough(plan: Plan, tmp_path: Path) -> None:
    """A plan can be made before many gigabytes of weights are downloaded."""
    _, built = plan("qwen2.5-7b-gsm8k")
    dense = dict(config.load("qwen2.5-7b-gsm8k").model.config)
    estimates = []
    for stored in (dense, dense | {"num_experts": 64}):
        (tmp_path / "config.json").write_text(json.dumps(stored))
        _, given = plan("qwen2.5-7b-gsm8k", f"model.path={tmp_path}", "model.config={}", 'model.tokenizer=""')
        estimates.append(given.get("memory"))
    assert estimates[0] == built["memory"]
    assert built["memory"]
    assert not estimates[1], "its experts are not counted, so a number would be far too low"


def test_held_out_pairs_without_answers_are_not_completed(plan: Plan, tmp_path: Path, rlhf: Rlhf) -> None:
    """As in the evaluation, which has nothing to compare completions with."""
    peaks = {}
    for answer in ({"answer": "right"}, {}):
        row = {"prompt": "a question", "chosen": "right", "rejected": "wrong", **answer}
        (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
        files = [f'data.{name}="{tmp_path}/pairs.jsonl"' for name in ("train", "eval")]
        # With small micro-batches, sampling would take the most memory.
        settings = ["data.generator=''", "data.generator_args={}", "loops.warm_start.num_steps=0", *files]
        settings.append("trainer.micro_batch_size=1")
        _, found = plan("dpo", *settings)
        assert ("KV cache" in found["memory"]["evaluator"]["parts"]) is bool(answer)
        dry_run = rlhf("run", "dpo", "--dry-run", "--json", *(f"--set={one}" for one in settings))
        in_dry_run = dry_run.json()["predictions"]["memory_bytes"]
        assert in_dry_run == found["memory"]["trainer"]["peak_bytes"]
        peaks[bool(answer)] = in_dry_run
    assert peaks[False] < peaks[True]


def run_of(
    preset: str,
    times: Mapping[str, float],
    end: RunState = RunState.COMPLETED,
    overrides: Sequence[str] = (),
    **figures: Any,
) -> str:
    """A run of a preset with the given step times, ingested into the history from its files.

    Its second node has twice the figures.
    """
    spec = resolve(preset, overrides)
    run = RunFiles(load_site().runs_dir, name=spec.name)
    stored = StoredSpec.model_validate_json(run.dir.spec.read_bytes())
    write_model(run.dir.spec, stored.model_copy(update={"spec": spec}))
    run.created()
    for state in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING):
        run.moved(state, 1)
    run.planned(1, 2, num_nodes=spec.resources.num_nodes)
    first = spec.warm_start_steps
    for step in range(1, min(first, 3) + 1):
        run.metrics(1, 0, step, 10.0 * step, **{"time/step_s": 1000.0})
    for index, slow in enumerate((50.0, 1.0, 1.0), start=1):  # the first step compiles: the median excludes it
        values = {name: slow * value for name, value in times.items()}
        run.metrics(1, 0, first + index, 100.0 * index, **values)
    run.telemetry(1, 0, 20, **figures)
    run.telemetry(1, 0, 30, **{name: value / 2 for name, value in figures.items()})
    for node in ("n1", "n2")[: spec.resources.num_nodes] if overrides else ():
        run.status(1, 0, 1, node)
        run.telemetry(1, 0, 30, node, **{name: value * int(node[1:]) for name, value in figures.items()})
    run.moved(RunState.EVALUATING, 900)
    run.moved(end, 1000)
    return ingested(run).run_id


def test_a_preset_of_7b_is_planned_on_one_node(plan: Plan) -> None:
    code, found = plan("qwen2.5-7b-gsm8k")
    assert (code, found["problems"]) == (0, [])
    parameters = 7_615_616_512
    trainer = found["memory"]["trainer"]
    assert trainer["parts"]["weights"] == pytest.approx(2 * parameters, rel=1e-3)
    assert trainer["parts"]["optimizer (ZeRO 2 over 8 ranks)"] == pytest.approx(12 * parameters / 8, rel=1e-3)
    assert trainer["peak_bytes"] < found["limit_bytes"] == int(80 * GIB * 0.93)
    assert set(found["step_s"]) == {"sampling", "training", "communication"}
    assert found["layout"] == {"trainers": 8, "engines": 0, "tensor_parallel": 1, "engine_nodes": 0}
    best, *_ = found["proposals"]
    assert (best["trainers"], best["engines"], best["engine"]) == (8, 0, "vllm"), "no launches one by one"
    seconds = [sum(one["step_s"].values()) for one in found["proposals"]]
    assert seconds == sorted(seconds)
    own = next(one for one in found["proposals"] if one["engines"])
    assert own["step_s"]["weight sync"] == pytest.approx(2 * parameters / 200e9, rel=1e-3)
    assert own["engine_bytes"] <= found["limit_bytes"]
    _, adapted = plan("qwen2.5-7b-gsm8k", "model.lora.rank=16")
    own = next(one for one in adapted["proposals"] if one["engines"])
    assert own["step_s"]["weight sync"] == pytest.approx(2 * 40_370_176 / 200e9, rel=1e-3), "the adapter alone"


def test_a_model_too_large_for_a_share_of_a_gpu_is_not_proposed_with_it(plan: Plan) -> None:
    """Qwen2.5-32B has 61 GiB of weights: they do not fit into 0.4 of an H200, but into a GPU of their own."""
    code, found = plan("qwen2.5-32b")
    assert code == 0
    assert not any(one["engine"] == "vllm" and not one["engines"] for one in found["proposals"])
    assert any(one["engines"] for one in found["proposals"])
    assert all(one["trainer_bytes"] <= found["limit_bytes"] for one in found["proposals"])
    _, half = plan("qwen2.5-32b", "rollout.vllm.gpu_memory_share=0.6", "rollout.engine=vllm")
    assert "vLLM (60% of the GPU)" in half["memory"]["trainer"]["parts"]


def test_engines_of_several_gpus_are_planned(plan: Plan) -> None:
    """Four nodes with 8 H100 each, half of them for engines: 61 GiB of weights are 16 GiB on each of four GPUs."""
    split = ("rollout.engine=vllm", "rollout.engines=4", "rollout.vllm.tensor_parallel=4", "resources.ranks_per_node=4")
    code, found = plan("qwen2.5-32b", "rollout.vllm.gpu_memory_share=0.85", "slurm.gpu_type=h100", *split)
    assert (code, found["problems"]) == (0, [])
    assert found["layout"] == {"trainers": 16, "engines": 4, "tensor_parallel": 4, "engine_nodes": 0}
    assert all(role["peak_bytes"] <= found["limit_bytes"] for role in found["memory"].values())
    _, whole = plan("qwen2.5-32b", "slurm.gpu_type=h100", *split[:2], split[3])
    assert found["step_s"]["sampling"] < whole["step_s"]["sampling"]
    assert found["step_s"]["weight sync"] == whole["step_s"]["weight sync"], "a host is given the weights once"
    code, uneven = plan("qwen2.5-32b", *split[:2], "rollout.vllm.tensor_parallel=3", split[3])
    assert code == 2
    assert "rollout.vllm.tensor_parallel = 3 for 40 attention heads" in str(uneven["problems"])


def test_a_model_larger_than_all_gpus_is_said_to_fit_in_no_layout(capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--set", "resources.ranks_per_node=1", "--set", "resources.gpus_per_node=1")
    shown = []
    for settings in (one, ()):
        execute(["plan", "qwen2.5-7b-gsm8k", *settings])
        shown.append("No layout uses every GPU of these nodes, divides evenly and fits" in capsys.readouterr().out)
    assert shown == [True, False]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (("slurm.gpu_type=h100",), 0),
        (("slurm.gpu_type=l4",), 2),
        (("slurm.gpu_type=a100", "loops.main.algorithm.measure_kl=true"), 0),
        (("slurm.gpu_type=l4", 'preflight.off={"memory.trainer"="tried", "memory.rollout"="tried"}'), 0),
        (("slurm.gpu_type=h100", "rollout.engine=vllm", "rollout.engines=4", "resources.ranks_per_node=4",
          "resources.memory_gb=64"), 2),
    ],
    ids=["fits", "too small", "may be the larger type", "checks turned off", "main memory of engines"],
)  # fmt: skip
def test_a_run_that_preflight_blocks_for_its_memory_is_refused(
    plan: Plan, settings: tuple[str, ...], code: int, rlhf: Rlhf
) -> None:
    """Scripts go by the exit code: a plan of what cannot run is none."""
    found_code, found = plan("qwen2.5-7b-gsm8k", *settings)
    assert (found_code, bool(found["problems"])) == (code, code == 2)
    shown = " ".join(rlhf("plan", "qwen2.5-7b-gsm8k", *options(*settings), code=code).stdout.split())
    assert ("Accepted: " in shown) == (code == 0)
    assert not found["nearest"], "another layout is not the remedy that is named"


def test_layouts_that_preflight_would_block_are_not_proposed(plan: Plan) -> None:
    """Engines without a loop that samples, and sampling a step ahead without engines."""
    kinds = {}
    for name, *settings in (
        ("as it is",),
        ("pairs", 'loops.main.algorithm.name="dpo"'),
        ("ahead", "rollout.engines=4", "resources.ranks_per_node=4", "rollout.max_staleness=1",
         "loops.main.algorithm.correction=token_truncate", "rollout.engine=vllm"),
    ):  # fmt: skip
        _, found = plan("qwen2.5-7b-gsm8k", "slurm.gpu_type=h100", *settings)
        kinds[name] = {bool(one["engines"]) for one in found["proposals"]}
    assert kinds == {"as it is": {False, True}, "pairs": {False}, "ahead": {True}}


def test_a_run_on_cpu_has_predicted_memory_and_no_predicted_step(plan: Plan) -> None:
    code, found = plan("quickstart")
    assert (code, found["step_s"], found["proposals"]) == (0, None, [])
    assert found["memory"]["trainer"]["peak_bytes"] < found["limit_bytes"]
    assert found["measured"]["runs"] == []


def test_seven_trainers_are_refused_with_the_nearest_valid_numbers(plan: Plan, rlhf: Rlhf) -> None:
    code, found = plan("qwen2.5-7b-gsm8k", "resources.ranks_per_node=7")
    assert code == 2
    assert found["problems"][0]["found"] == "loops.main.algorithm.prompts_per_step = 64 with 7 ranks"
    assert found["nearest"][0] == {"trainers": 8, "engines": 0, "tensor_parallel": 1, "engine_nodes": 0}
    shown = " ".join(rlhf("plan", "qwen2.5-7b-gsm8k", "--set", "resources.ranks_per_node=7", code=2).stdout.split())
    assert "Refused: 7 trainers with in-process sampling." in shown
    assert "Nearest that divide: 8 trainers with in-process sampling" in shown


@pytest.mark.parametrize(
    ("prompts", "ranks", "engines", "check", "divides"),
    [(40, 5, 3, "", True), (56, 7, 0, "resources.gpus", True), (6, 2, 4, "rollout.engines", False)],
    ids=["neither divides the other", "an idle GPU", "idle engines"],
)
def test_a_plan_refuses_only_what_preflight_blocks(
    plan: Plan, rlhf: Rlhf, prompts: int, ranks: int, engines: int, check: str, divides: bool
) -> None:
    settings = [f"resources.ranks_per_node={ranks}", f"rollout.engines={engines}", "slurm.gpu_type=h200"]
    settings += [f"loops.main.algorithm.prompts_per_step={prompts}", "trainer.micro_batch_size=1"]
    code, found = plan("qwen2.5-7b-gsm8k", *settings)
    of_layout = [one["check"] for one in found["warnings"] if not one["check"].startswith("memory.")]
    assert (code, found["problems"]) == (0, [])
    assert check in of_layout or not (check or of_layout)
    assert (found["nearest"] == []) is divides
    shown = " ".join(rlhf("plan", "qwen2.5-7b-gsm8k", *options(*settings)).stdout.split())
    assert "Accepted: " in shown
    assert ("Nearest that divide" in shown) is not divides
    assert ("warning: found" in shown) is bool(found["warnings"])


def test_another_program_has_its_own_layout(rlhf: Rlhf) -> None:
    assert "expected the native trainer" in " ".join(rlhf("plan", "torchrun", code=2).stderr.split())


def test_predictions_are_compared_with_completed_runs_of_the_same_shape(plan: Plan, rlhf: Rlhf) -> None:
    _, before = plan("qwen2.5-7b-gsm8k")
    predicted = before["step_s"]
    training = predicted["training"] + predicted["communication"]
    times = {"time/rollout_s": 2 * predicted["sampling"], "time/train_s": 3 * training}
    times["time/step_s"] = sum(times.values())
    run_id = run_of("qwen2.5-7b-gsm8k", times, gpu0_memory_used_gb=41.0, gpu1_memory_used_gb=40.0)
    _, after = plan("qwen2.5-7b-gsm8k")
    assert after["measured"]["runs"] == [run_id]
    assert after["measured"]["gpu_gb"] == 41.0
    ratios = after["measured_over_predicted"]
    assert (ratios["sampling"], ratios["training"]) == (pytest.approx(2, rel=0.01), pytest.approx(3, rel=0.01))
    own = next(one for one in after["proposals"] if one["engine"] == "transformers")
    assert own["step_s"]["training"] == pytest.approx(3 * predicted["training"], rel=0.01), "by the measured rates"
    shown = " ".join(rlhf("plan", "qwen2.5-7b-gsm8k").stdout.split())
    assert "against the median of 1 earlier run" in shown
    assert "Measured peak of a GPU: 41.0 GiB" in shown
    # Another shape has no history.
    _, other = plan("qwen2.5-7b-gsm8k", "rollout.max_new_tokens=2048")
    assert other["measured"]["runs"] == []


def test_a_run_of_a_relative_path_is_found_again(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(dict(config.load("qwen2.5-7b-gsm8k").model.config)))
    monkeypatch.chdir(tmp_path)
    settings = ("model.path=model", "model.config={}", 'model.tokenizer=""')
    run_id = run_of("qwen2.5-7b-gsm8k", {"time/step_s": 0.9}, overrides=settings)
    _, found = plan("qwen2.5-7b-gsm8k", *settings)
    assert found["measured"]["runs"] == [run_id]


@pytest.mark.parametrize(
    "setting",
    [
        "data.max_prompt_tokens=8192",
        "data.max_completion_tokens=100",
        "loops.main.algorithm.num_epochs=8",
        "loops.main.algorithm.num_minibatches=2",
        "loops.main.algorithm.measure_kl=false",
        "trainer.deterministic=true",
        "slurm.gpu_type=l4",
    ],
)
def test_settings_that_multiply_the_time_of_a_step_belong_to_the_shape(setting: str) -> None:
    of = [shape_key(config.load("gsm8k", given)) for given in ((), (setting,), ("loops.main.num_steps=7", "seed=3"))]
    assert of[0] == of[2] != of[1]


def test_failed_runs_are_not_used_for_comparison(plan: Plan) -> None:
    run_of("quickstart", {"time/step_s": 0.9}, RunState.FAILED)
    _, found = plan("quickstart")
    assert (found["measured"]["runs"], found["measured"]["seconds"]) == ([], {})


@pytest.mark.parametrize(("alone", "peak"), [(1, 3.0), (0, 6.0)])
def test_memory_of_engine_nodes_is_not_counted_for_trainers(plan: Plan, alone: int, peak: float) -> None:
    """With the control: engines beside the trainers."""
    overrides = ("resources.num_nodes=2", "rollout.engines=1", f"rollout.nodes={alone}")
    run_of("quickstart", {"time/step_s": 0.9}, overrides=overrides, workers_rss_gb=3.0)
    code, found = plan("quickstart", *overrides)
    assert (code, found["measured"]["workers_gb"]) == (0, peak)
    assert found["layout"]["engine_nodes"] == alone


def test_steps_of_the_warm_start_are_not_counted_for_the_main_loop(plan: Plan) -> None:
    run_of("quickstart", {"time/step_s": 0.9}, workers_rss_gb=3.0)
    _, found = plan("quickstart")
    assert found["measured"]["seconds"] == {"time/step_s": 0.9}
    assert found["measured"]["workers_gb"] == 3.0


@pytest.fixture(autouse=True)
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site with a wide terminal on a 16 GiB machine that is its own scheduler."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rlhf_core.scheduler.get_scheduler", lambda name: FakeScheduler(memory_gb=16))
