"""Checks of runs with an external trainer: findings in a good run and in broken ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeScheduler
from test_preflight_checks import GIB, found, healthy

from rlhf_core.preflight.facts import BadRows, Baseline, CheckpointFacts, DataFile, Facts, ModelFolder, TrainerSide
from rlhf_core.preflight.registry import CHECKS, run_checks
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.command_trainer import SIGHTS, CommandTrainer, ProgressSource
from rlhf_core.schemas.run import RunSpec

BLOCKED, WARNING, SKIPPED, PASSED = CheckStatus.BLOCKED, CheckStatus.WARNING, CheckStatus.SKIPPED, CheckStatus.PASSED
NODES = "--nnodes {num_nodes} --nproc_per_node {ranks_per_node} --node_rank {node_rank} --master_addr {master_addr}"
STEPS = "--max_steps {num_steps} --save_steps {checkpoint_every} --output_dir {output_dir} --report_to tensorboard"
STEPS += " --use_cpu true"
BATCH = "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --num_generations 4"
TORCHRUN = f"torchrun {NODES} --master_port {{master_port}} /d/train.py {STEPS} {BATCH}"
SWIFT = f"swift rlhf --rlhf_type grpo {STEPS} --add_version false {BATCH}"
PACKAGES = {"torch": "2.13.0", "transformers": "5.19.0", "trl": "1.16.0", "ms-swift": "4.6.0", "tensorboard": "2.20"}
SIDE = TrainerSide(
    folder="/envs/trl",
    program="/envs/trl/bin/torchrun",
    python="/envs/trl/bin/python",
    version=(3, 11, 7),
    packages=PACKAGES,
    has_callback=True,
)


def command(
    line: str = TORCHRUN,
    *,
    side: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Facts:
    """Facts of a run with a launch line, by default TRL on two nodes with two ranks each."""
    content: dict[str, Any] = {
        "name": "theirs",
        "trainer": {
            "kind": "command",
            "argv": line.split(),
            "num_steps": 100,
            "framework": "trl",
            "algorithm": "grpo",
            "environment": "trl",
            **trainer,
        },
        "resources": {"num_nodes": 2, "ranks_per_node": 2},
        "checkpoint": {"every_num_steps": 20},
    }
    for name, section in (sections or {}).items():
        content[name] = {**content.get(name, {}), **section}
    return replace(
        healthy(),
        spec=RunSpec.model_validate(content),
        inventory=FakeScheduler(
            nodes=("a", "b"), gpus_per_node=content["resources"].get("gpus_per_node", 0)
        ).inventory(),
        scheduler="slurm",
        model_config={},
        files={},
        imports={},
        trainer=replace(SIDE, **(side or {})),
    )


ACCELERATE = "--num_processes {num_ranks} --machine_rank {node_rank} --main_process_ip {master_addr} "
ACCELERATE += "--main_process_port {master_port}"


def without(text: str, line: str = TORCHRUN) -> str:
    assert text in line
    return line.replace(text, "")


def swift(line: str = SWIFT, **changes: Any) -> Facts:
    return command(line, framework="swift", **{"environment": "swift", **changes})


def on_gpus(line: str, weight_bytes: int = 0, **changes: Any) -> Facts:
    resources = {"gpus_per_node": 2, "cpus_per_rank": 4}
    facts = command(without(" --use_cpu true", line), sections={"resources": resources}, **changes)
    nodes = ("a", "b")
    inventory = FakeScheduler(
        nodes=nodes,
        gpus_per_node=2,
        node_gpus=dict.fromkeys(nodes, 2),
        node_gpu_types=dict.fromkeys(nodes, "NVIDIA L4"),
    ).inventory()
    model = ModelFolder(Path("/m"), weight_bytes=weight_bytes)
    return replace(facts, inventory=inventory, model_folder=model if weight_bytes else None)


def unwanted(facts: Facts) -> list[CheckResult]:
    return [result for result in run_checks(facts) if result.status in (BLOCKED, WARNING)]


GOOD = {
    "torchrun": command(),
    "per rank": command(f"python /d/train.py {STEPS} {BATCH}", launch="per_rank"),
    "accelerate": command(
        "accelerate launch --num_machines {num_nodes} --num_processes {num_ranks} --machine_rank {node_rank} "
        f"--main_process_ip {{master_addr}} --main_process_port {{master_port}} /d/train.py {STEPS} {BATCH}"
    ),
    "accelerate with DeepSpeed": command(
        f"accelerate launch --num_machines {{num_nodes}} {ACCELERATE} --use_deepspeed "
        f"--deepspeed_multinode_launcher standard /d/train.py {STEPS} {BATCH}"
    ),
    "deepspeed": command(
        "deepspeed --no_ssh --num_nodes {num_nodes} --num_gpus {ranks_per_node} --node_rank {node_rank} "
        f"--master_addr {{master_addr}} --master_port {{master_port}} /d/train.py {STEPS} {BATCH}"
    ),
    "torchrun that meets": command(
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint {master_addr}:{master_port} "
        f"/d/train.py {STEPS} {BATCH}"
    ),
    "the best checkpoint": command(
        f"{TORCHRUN} --load_best_model_at_end true --eval_strategy steps --eval_steps 10 --save_strategy steps"
    ),
    "a share of the steps": command(TORCHRUN.replace("{checkpoint_every}", "0.2")),
    "swift": swift(),
    "swift with folders of versions": swift(
        SWIFT.replace("--add_version false", ""), checkpoint_name="*/checkpoint-{step}"
    ),
    "told by a variable": command(without("--use_cpu true"), variables={"ACCELERATE_USE_CPU": "{use_cpu}"}),
    "a script of rlhf-flows": command(without("--use_cpu true").replace("/d/train.py", "{drivers}/trl_train.py")),
    "a script": command(
        f"torchrun {NODES} --master_port {{master_port}} /d/train.py --steps {{num_steps}} --out {{output_dir}}",
        framework="script",
        algorithm="other",
    ),
    "resumed": replace(command(), resume=CheckpointFacts("step-000020", 20, num_ranks=4), stored_version="0.1.0"),
    "vLLM": on_gpus(f"{TORCHRUN} --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.3", GIB),
    "vLLM beside an optimizer in 8 bit": on_gpus(
        f"{TORCHRUN} --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.3 --optim adamw_8bit", 4 * GIB
    ),
    "vLLM beside float32 weights that are loaded in bfloat16": on_gpus(
        f"{TORCHRUN} --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.3 --dtype bfloat16", 4 * GIB
    ),
}


@pytest.mark.parametrize("facts", GOOD.values(), ids=GOOD)
def test_a_good_run_of_another_program_has_no_warning(facts: Facts) -> None:
    assert unwanted(facts) == []


def test_a_program_that_places_its_ranks_itself_may_use_all_gpus_of_a_node() -> None:
    sections = {"resources": {"num_nodes": 1, "ranks_per_node": 1, "gpus_per_node": 8}}
    ray = "python -m openrlhf.cli.train_ppo_ray --save_path {output_dir}/model --ckpt_path {output_dir}/ckpt"
    results = run_checks(command(ray, sections=sections, framework="openrlhf"))
    found = {one.id: one.status for one in results}
    assert (found["resources.gpus"], found["command.output"]) == (PASSED, PASSED)
    (idle,) = [one for one in run_checks(command(sections=sections)) if one.id == "resources.gpus"]
    assert (idle.status, "7 GPUs idle" in idle.found) == (WARNING, True)


def test_sources_that_see_nothing_of_a_program_on_ray_are_named() -> None:
    ray = command("python -m openrlhf.cli.train_ppo_ray --ckpt.path {output_dir}/ckpt", framework="openrlhf")
    results = found(ray, "command.progress")
    silent = {one.found.partition(":")[0] for one in results if one.status is SKIPPED}
    assert silent == {"callback", "collectives", "activity", "stacks"}
    (floor,) = [one for one in results if one.status is WARNING]
    assert "supervise.floor_s = 120" in floor.found
    raised = replace(ray, spec=with_changes(ray.spec, {"supervise.floor_s": 1800}))
    assert not [one for one in found(raised, "command.progress") if one.status is WARNING]


def with_deepspeed(content: Mapping[str, Any], more: str = "") -> Facts:
    return command(f"{TORCHRUN} --deepspeed /d/ds.json {more}", side={"deepspeed": content})


GATHER = "stage3_gather_16bit_weights_on_model_save"


def evaluated(facts: Facts) -> Facts:
    """The same with an evaluation after training."""
    return replace(facts, spec=with_changes(facts.spec, {"data.eval": "/d/eval.jsonl"}))


ONE_NODE = {"resources": {"num_nodes": 1}}
BROKEN: list[tuple[str, CheckStatus, Facts, str]] = [
    ("command.placeholders", BLOCKED, command(f"{TORCHRUN} --seed {{seeds}}"), "write {seed}"),
    ("command.placeholders", BLOCKED, command(f"{TORCHRUN} --n {{world_size}}"), "write {num_ranks}"),
    ("command.placeholders", BLOCKED, command(f"{TORCHRUN} --model {{model}}"), "model.path is not set"),
    ("command.placeholders", BLOCKED, command(variables={"OUT": "{outputdir}"}), "trainer.variables.OUT"),
    ("command.placeholders", WARNING, command(f"{TORCHRUN} --x $NODE_RANK"), "write {node_rank}"),
    ("command.placeholders", WARNING, command(variables={"WANDB_API_KEY": "$WANDB_TOKEN"}), "slurm.pass_environment"),
    ("command.environment", BLOCKED, command(side={"problem": "no /envs/trl; run `rlhf env create trl`"}),
     "env create"),
    ("command.environment", BLOCKED, command(side={"python_problem": "exit code 1"}), "an interpreter that starts"),
    ("command.environment", BLOCKED, command(side={"packages": {"torch": "2.13.0"}}), "trl is missing"),
    ("command.environment", SKIPPED, command(side={"unseen": "it is in the container x"}), "container x"),
    ("command.environment", SKIPPED, command(side={"python": ""}), "set trainer.environment"),
    ("command.environment", WARNING, command(side={"setup_problem": "module: command not found"}), "module: command"),
    ("command.environment", BLOCKED,
     replace(command(side={"setup_problem": "module: command not found"}), scheduler="local"), "correct trainer.setup"),
    ("command.program", BLOCKED, command(side={"program": ""}), "begins with torchrun"),
    ("command.program", WARNING, command(side={"program": "", "folder": ""}), "not on the PATH"),
    ("command.program", WARNING, command(argv=["bash", "-c", "python t.py 2>&1 |\n tee log\n"]), "set -o pipefail"),
    ("command.program", BLOCKED, command(side={"missing_modules": ("my.train",)}), "my.train"),
    ("command.program", BLOCKED, command(side={"missing_files": ("a/train.py",)}), "{code}/train.py"),
    ("command.output", BLOCKED, command(output_dir="/scratch/out"), "put {run_id} into it"),
    ("command.output", BLOCKED, command(TORCHRUN.replace("{output_dir}", "/elsewhere")), "/elsewhere"),
    ("command.output", WARNING, command(without("--output_dir {output_dir}")), "add --output_dir"),
    ("command.steps", BLOCKED, command(TORCHRUN.replace("{num_steps}", "90")), "90 steps"),
    ("command.steps", WARNING, command(TORCHRUN.replace("--max_steps {num_steps}", "--num_train_epochs 3")),
     "3 epochs"),
    ("command.steps", WARNING, command(without("--max_steps {num_steps}"), framework="script"), "put {num_steps}"),
    ("command.steps", SKIPPED, command(without("--max_steps {num_steps}"), framework="openrlhf"), "episodes"),
    ("command.saving", WARNING, command(TORCHRUN.replace("{checkpoint_every}", "50")), "--save_steps 50"),
    ("command.saving", WARNING, command(without("--save_steps {checkpoint_every}")), "every 500 steps"),
    ("command.saving", BLOCKED, command(f"{TORCHRUN} --save_strategy no"), "--save_strategy no"),
    ("command.saving", WARNING, command(f"{TORCHRUN} --save_strategy epoch"), "--save_strategy epoch"),
    ("command.saving", BLOCKED, command(f"{TORCHRUN} --load_best_model_at_end true --eval_strategy epoch"),
     "--load_best_model_at_end with --eval_strategy epoch and --save_strategy steps"),
    ("command.saving", BLOCKED, command(f"{TORCHRUN} --load_best_model_at_end --eval_strategy steps --eval_steps 15"),
     "--eval_steps 15 and --save_strategy steps --save_steps 20"),
    ("command.resume", BLOCKED, swift(without("--add_version false", SWIFT)), "add --add_version false"),
    ("command.resume", BLOCKED, command(checkpoint_name="step-{step}"), "checkpoint-{step}"),
    ("command.resume", BLOCKED, command(f"{TORCHRUN} --save_only_model"), "without optimizer state"),
    ("command.resume", BLOCKED, command(f"{TORCHRUN} --resume_from_checkpoint /a"), "remove it from trainer.argv"),
    ("command.resume", WARNING, command(resume="none"), "at step 0"),
    ("command.resume", BLOCKED, command(framework="openrlhf"), "ckpt/_actor/global_step{step}"),
    ("command.resume", BLOCKED, command(framework="openrlhf"), "--ckpt.load_enable"),
    ("command.nodes", BLOCKED, command(without("--nnodes {num_nodes}")), "configured for 1"),
    ("command.nodes", BLOCKED, command(without("--node_rank {node_rank}")), "gets no node rank"),
    ("command.nodes", BLOCKED, command(TORCHRUN.replace("{node_rank}", "0")), "gets 0 as the rank of every node"),
    ("command.nodes", BLOCKED, command(without("--master_addr {master_addr}")), "its own address"),
    ("command.nodes", BLOCKED, command(TORCHRUN.replace("{master_addr}", "127.0.0.1")), "127.0.0.1"),
    ("command.nodes", BLOCKED, command(f"torchrun --standalone --nproc_per_node 2 /d/train.py {STEPS}"),
     "configured for 1"),
    ("command.nodes", BLOCKED, command(f"python /d/train.py {STEPS}"), "per_rank"),
    ("command.nodes", BLOCKED, command(f"accelerate launch --num_processes 4 /d/train.py {STEPS}"), "--machine_rank"),
    ("command.nodes", BLOCKED, command(f"deepspeed --num_nodes 2 /d/train.py {STEPS}"), "--no_ssh"),
    ("command.nodes", BLOCKED,
     command(f"accelerate launch --use_deepspeed --num_machines 2 {ACCELERATE} /d/train.py {STEPS}"),
     "--deepspeed_multinode_launcher pdsh"),
    ("command.nodes", BLOCKED,
     command(f"accelerate launch --config_file /d/a.yaml --num_machines 2 {ACCELERATE} /d/train.py {STEPS}",
         side={"launcher_settings": {"distributed_type": "DEEPSPEED", "deepspeed_multinode_launcher": "nossh"}}),
     "write --deepspeed_multinode_launcher standard"),
    ("command.nodes", BLOCKED, swift(variables={"NNODES": "1"}), "configured for 1"),
    ("command.nodes", BLOCKED, swift(variables={"NODE_RANK": "0"}), "gets 0 as the rank"),
    ("command.nodes", BLOCKED, command(TORCHRUN.replace("{num_nodes}", "2"), sections=ONE_NODE), "never join"),
    ("command.nodes", WARNING, command(TORCHRUN.replace("{master_addr}", "gpu01")), "gpu01"),
    ("command.nodes", SKIPPED, command("bash /d/run.sh {num_steps} {output_dir}"), "is not a known launcher"),
    ("command.ranks", BLOCKED, command(TORCHRUN.replace("{ranks_per_node}", "8")), "starts 8 processes"),
    ("command.ranks", BLOCKED, command(without("--nproc_per_node {ranks_per_node}")), "starts 1 processes"),
    ("command.ranks", BLOCKED, command(launch="per_rank"), "several ranks for every rank"),
    ("command.ranks", BLOCKED, swift(variables={"NPROC_PER_NODE": "1"}), "starts 1 processes"),
    ("command.ranks", SKIPPED, command("bash /d/run.sh {num_steps} {output_dir}"), "cannot be read"),
    ("command.batch", BLOCKED, command(TORCHRUN.replace("--num_generations 4", "--num_generations 6")),
     "16 completions"),
    ("command.cpu", WARNING, command(without("--use_cpu true")), "every rank trains alone"),
    ("command.cpu", BLOCKED, swift(without("--use_cpu true", SWIFT)), "ACCELERATE_USE_CPU=true"),
    ("command.cpu", WARNING, command(sections={"resources": {"gpus_per_node": 2}}), "training on the requested GPUs"),
    ("command.batch", BLOCKED, command(TORCHRUN.replace("--num_generations 4", "--num_generations 1")), "at least 2"),
    ("command.batch", BLOCKED, command(f"{TORCHRUN} --generation_batch_size 30"), "--generation_batch_size = 30"),
    ("command.batch", BLOCKED, swift(without(BATCH, SWIFT)), "4 completions at once, --num_generations 8"),
    ("command.vllm", WARNING, command(f"{TORCHRUN} --use_vllm --vllm_mode colocate"), "resources.gpus_per_node = 0"),
    ("command.vllm", WARNING, on_gpus(f"{TORCHRUN} --use_vllm --vllm_mode server"), "--vllm_server_host"),
    ("command.vllm", BLOCKED, on_gpus(f"{SWIFT} --use_vllm true --vllm_mode server", framework="swift"),
     "--vllm_server_host"),
    ("command.vllm", BLOCKED, on_gpus(f"{TORCHRUN} --use_vllm --vllm_tensor_parallel_size 3"), "divisor of 4"),
    ("command.vllm", WARNING, on_gpus(f"{TORCHRUN} --use_vllm --vllm_tensor_parallel_size 4"), "split across nodes"),
    ("command.vllm", BLOCKED, on_gpus(f"{TORCHRUN} --use_vllm --vllm_gpu_memory_utilization 30"), "between 0 and 1"),
    ("command.vllm", WARNING, on_gpus(f"{TORCHRUN} --use_vllm --vllm_gpu_memory_utilization 0.9"), "sleep"),
    ("command.vllm", BLOCKED, on_gpus(f"{TORCHRUN} --use_vllm --vllm_gpu_memory_utilization 0.5", 4 * GIB), "16.0 GiB"),
    ("command.vllm", BLOCKED, on_gpus(f"{SWIFT} --use_vllm true", framework="swift"), "--vllm_mode"),
    ("command.deepspeed", BLOCKED, with_deepspeed({"train_batch_size": 64}), "4 per rank x 1 rounds x 4 ranks are 16"),
    ("command.deepspeed", BLOCKED, with_deepspeed({"gradient_accumulation_steps": 8}), "is 8"),
    ("command.deepspeed", BLOCKED, with_deepspeed({"bf16": {"enabled": True}, "fp16": {"enabled": True}}),
     "turns on bf16 and fp16"),
    ("command.deepspeed", BLOCKED, with_deepspeed({"bf16": {"enabled": True}}, "--bf16 false"), "--bf16 false"),
    ("command.resume", WARNING, command(side={"never_resumes": "/d/train.py"}),
     "write trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)"),
    ("command.logs", WARNING, command(TORCHRUN.replace("/d/train.py", "--log-dir logs /d/train.py")), "--log_dir"),
    ("command.logs", WARNING, command(f"trl grpo {STEPS} {BATCH} --log_dir logs"), "remove --log_dir"),
    ("command.logs", WARNING, command(variables={"PET_LOG_DIR": "/logs"}), "rlhf logs RUN --rank N"),
    ("command.container", WARNING, command(f"enroot start image {TORCHRUN}"), "run directory, which is in /runs"),
    ("command.container", WARNING, command(f"docker run -v /data:/data image {TORCHRUN}"), "mount {run_dir}"),
    *(
        ("command.weights", WARNING, evaluated(facts), message)
        for facts, message in (
            (with_deepspeed({"zero_optimization": {"stage": 3}}), "stage3_gather_16bit_weights_on_model_save"),
            (with_deepspeed({"zero_optimization": {"stage": 3, GATHER: False}}), "zero3_save_16bit_model"),
            (command(side={"launcher_settings": {"zero_stage": "3"}}), "leave data.eval out"),
            (command(framework="openrlhf"), "OpenRLHF"),
            (command("python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m", framework="script"), "verl"),
        )
    ),
    ("command.progress", WARNING, command(progress=("activity", "stacks")), "an endless loop"),
    ("command.progress", WARNING, command(progress=("tensorboard", "checkpoints")), "the rank that causes a hang"),
    ("command.progress", SKIPPED, command(TORCHRUN.replace("tensorboard", "wandb")), "--report_to wandb"),
    ("command.progress", SKIPPED, command(side={"has_callback": False}), "rlhf_core.callback is not found"),
    ("command.save_lead", WARNING, replace(command(), baseline=Baseline(seconds_per_step=400.5)),
     "set slurm.save_lead_s to at least 461"),
]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "set -o pipefail; python t.py | tee log",
        "export N=$(ls | wc -l); python t.py",
        "ls | head -n 1\npython t.py 2>&1 >log\n",
        "python t.py 'a | b'",
        "python t.py || exit 3",
    ],
)
def test_pipes_that_do_not_hide_the_exit_code_are_accepted(text: str) -> None:
    results = found(command(argv=["bash", "-c", text]), "command.program")
    assert results
    assert not any("pipe" in result.found for result in results)


@pytest.mark.parametrize(
    ("id", "status", "facts", "message"), BROKEN, ids=[f"{index}-{id}" for index, (id, *_) in enumerate(BROKEN)]
)
def test_what_cannot_work_is_found(id: str, status: CheckStatus, facts: Facts, message: str) -> None:
    findings = [result for result in found(facts, id) if result.status is status]
    assert findings, found(facts, id)
    assert any(message in f"{one.found} {one.expected} {one.advice}" for one in findings), findings


@pytest.mark.parametrize(
    ("id", "facts"),
    [
        ("command.weights", with_deepspeed({"zero_optimization": {"stage": 3}})),
        ("command.weights", evaluated(with_deepspeed({"zero_optimization": {"stage": 3, GATHER: True}}))),
        ("command.weights", evaluated(with_deepspeed({"zero_optimization": {"stage": 2}}))),
        (
            "command.weights",
            evaluated(command(side={"launcher_settings": {"zero_stage": "3", "zero3_save_16bit_model": "true"}})),
        ),
        ("command.container", command(f"enroot start --mount {{run_dir}}:{{run_dir}} image {TORCHRUN}")),
        ("command.container", command(f"docker run --volume=/runs:/runs image {TORCHRUN}")),
        ("command.container", command(f"apptainer exec --nv image.sif {TORCHRUN}")),
        ("command.resume", command(side={"never_resumes": "/d/train.py"}, resume="in_place")),
        ("command.logs", command(f"{TORCHRUN} --log_dir of_the_script")),
        ("command.logs", command(TORCHRUN.replace("/d/train.py", "--log-dir logs --tee 3 /d/train.py"))),
        ("command.logs", command(f"trl grpo {STEPS} {BATCH} --log_dir logs --tee 3")),
        ("command.logs", command(variables={"PET_LOG_DIR": "/logs", "PET_TEE": "3"})),
    ],
)
def test_what_works_is_not_reported(id: str, facts: Facts) -> None:
    assert [one for one in found(facts, id) if one.status is not PASSED] == []


def test_a_program_on_gpus_gets_enough_cores() -> None:
    """A config without cores requests one for every rank, and one for all actors of Ray on a node."""
    cores = {1: WARNING, 3: WARNING, 4: PASSED}
    for cpus, status in cores.items():
        facts = on_gpus(TORCHRUN)
        facts = replace(facts, spec=with_changes(facts.spec, {"resources.cpus_per_rank": cpus}))
        (result,) = found(facts, "resources.cores")
        assert (result.status, "cpus_per_rank=4" in result.advice) == (status, status is WARNING)
    assert [one.status for one in found(command(), "resources.cores")] == [PASSED], "no GPUs"


def test_steps_that_fit_before_the_limit_are_accepted() -> None:
    facts = replace(command(sections={"slurm": {"save_lead_s": 600}}), baseline=Baseline(seconds_per_step=400.5))
    assert [result.status for result in found(facts, "command.save_lead")] == [CheckStatus.PASSED]
    assert found(command(), "command.save_lead") == [], "without earlier runs nothing is predicted"


def test_another_program_has_no_best_checkpoint() -> None:
    (result,) = found(command(sections={"checkpoint": {"keep_best": True}}), "checkpoint.keep_best")
    assert result.status is CheckStatus.BLOCKED


def test_every_check_of_other_programs_has_a_run_that_fails_it() -> None:
    assert {one.id for one in CHECKS if one.trainer == "command"} == {id for id, *_ in BROKEN}


def test_checks_are_made_for_the_trainer_that_they_are_about() -> None:
    of_native, of_command = ({one.id for one in CHECKS if one.trainer == kind} for kind in ("native", "command"))
    assert {one.id for one in run_checks(command())}.isdisjoint(of_native)
    assert {one.id for one in run_checks(healthy())}.isdisjoint(of_command)
    assert of_native & {one.id for one in run_checks(healthy())}, "control: the checks run where they belong"


def test_what_cannot_be_read_is_not_judged() -> None:
    """An unreadable config file may contain the arguments that the line lacks."""
    line = without("--save_steps {checkpoint_every}", without(BATCH, f"{SWIFT} --config /d/more.yaml"))
    line = without("--add_version false", line)
    assert unwanted(swift(line, side={"unread": ("/d/more.yaml",)})) == []
    assert {one.id for one in unwanted(swift(line))} == {"command.saving", "command.batch", "command.resume"}


def test_settings_of_a_config_file_count_like_arguments_and_the_line_wins() -> None:
    line = without(BATCH)
    settings = {"per_device_train_batch_size": "4", "gradient_accumulation_steps": "1", "num_generations": "6"}
    assert [one.status for one in found(command(line, side={"settings": settings}), "command.batch")] == [BLOCKED]
    given = command(f"{line} --num_generations 8", side={"settings": settings})
    assert [one.status for one in found(given, "command.batch")] == [PASSED]


def test_braces_that_are_no_placeholders_are_left_alone() -> None:
    facts = command(f'{TORCHRUN} --template {{question}} --kwargs {{"a":1}}')
    (result,) = found(facts, "command.placeholders")
    assert result.status is PASSED
    assert "{question}" in result.found


def test_every_source_of_progress_says_what_it_sees_and_what_not() -> None:
    facts = command(stdout_patterns=("step (?P<step>\\d+)",))
    assert isinstance(facts.spec.trainer, CommandTrainer)
    messages = {one.found.partition(":")[0].partition(" ")[0]: one.found for one in found(facts, "command.progress")}
    assert list(messages) == [source.value for source in facts.spec.trainer.sources]
    assert messages.keys() == {source.value for source in ProgressSource}
    for source, sight in SIGHTS.items():
        assert sight.sees in messages[source]
        assert sight.blind in messages[source]
        assert ("before the first step" in messages[source]) == (not sight.is_strong)


def test_a_callback_that_the_script_does_not_have_does_not_tell_the_rank() -> None:
    """Negative control: there is no warning for a script that names it."""
    facts = command(progress=("callback", "checkpoints"))
    assert unwanted(facts) == []
    (result,) = unwanted(replace(facts, trainer=replace(SIDE, has_callback=False)))
    assert (result.id, result.status) == ("command.progress", WARNING)


TRL_HANG = {"trl": "0.16.1"}


@pytest.mark.parametrize(
    ("trl", "algorithm", "statuses"),
    [
        ("0.14.0", "cpo", [BLOCKED]),
        ("0.16.1", "orpo", [BLOCKED]),
        ("0.16.1", "grpo", [WARNING]),
        ("0.13.0", "cpo", []),
        ("0.17.0", "cpo", []),
        ("0.15.0", "sft", [BLOCKED, WARNING]),
        ("0.15.1", "sft", [WARNING]),
    ],
)
def test_the_hangs_of_trl_are_known(trl: str, algorithm: str, statuses: list[CheckStatus]) -> None:
    facts = command(algorithm=algorithm, side={"packages": {**SIDE.packages, "trl": trl}})
    reported = [
        one.status for one in found(facts, "environment.versions") if "logits of different lengths" in one.found
    ]
    assert sorted(reported) == sorted(statuses)


def test_only_the_text_that_a_shell_runs_may_have_variables() -> None:
    text = "torchrun --node_rank $NODE_RANK train.py --max_steps {num_steps}"
    assert [one.status for one in found(command(argv=["bash", "-c", text]), "command.placeholders")] == [PASSED]
    for facts in (
        command(argv=["bash", "-c", text, "$HOME"]),
        command(argv=["bash", "-c", text], variables={"OUT": "$HOME"}),
        command(argv=["python", "-c", text]),
    ):
        assert [one.status for one in found(facts, "command.placeholders")] == [WARNING]


def test_one_rank_cannot_hang_so() -> None:
    one = {"resources": {"num_nodes": 1, "ranks_per_node": 1}}
    facts = command(algorithm="cpo", side={"packages": {**SIDE.packages, **TRL_HANG}}, sections=one)
    assert [one.status for one in found(facts, "environment.versions")] == [WARNING]


def test_the_hang_of_trl_can_be_overridden() -> None:
    facts = command(algorithm="cpo", side={"packages": {**SIDE.packages, **TRL_HANG}})
    assert [one.id for one in unwanted(facts) if one.status is BLOCKED] == ["environment.versions"]
    off = {"environment.versions": "all answers have one length"}
    again = command(
        algorithm="cpo", side={"packages": {**SIDE.packages, **TRL_HANG}}, sections={"preflight": {"off": off}}
    )
    assert unwanted(again) == []


def test_commands_of_trl_that_do_not_resume_are_known() -> None:
    nodes = "--num_machines 2 --num_processes 4 --machine_rank {node_rank} --main_process_ip {master_addr}"
    line = f"trl grpo {nodes} {STEPS}"
    old = {**SIDE.packages, "trl": "1.14.0"}
    (finding,) = unwanted(command(f"{line} {BATCH}", side={"packages": old}))
    assert "restarts at step 0" in finding.found
    assert "is not affected" not in finding.found
    assert unwanted(command(side={"packages": old})) == [], "a user's own script may or may not pass it on"
    assert unwanted(swift(side={"packages": {**old, "trl": "0.29.1"}})) == [], "ms-swift pins it this way"
    assert unwanted(command(f"{line} {BATCH}", side={"packages": {**old, "trl": "1.14.1"}})) == []


def test_versions_are_those_of_the_environment_that_trains() -> None:
    facts = command(algorithm="cpo")
    ours = replace(facts, compute=replace(facts.compute, packages={**facts.compute.packages, **TRL_HANG}))
    assert unwanted(ours) == [], "the training environment does not have that version"


def test_training_data_of_another_program_need_not_have_our_columns() -> None:
    train = DataFile(Path("/d/train.jsonl"), num_rows=100, columns=frozenset({"messages"}))
    facts = command(sections={"data": {"train": "/d/train.jsonl"}})
    assert unwanted(replace(facts, files={"data.train": train})) == []
    torn = replace(train, malformed=BadRows(1))
    assert [one.id for one in unwanted(replace(facts, files={"data.train": torn}))] == ["data.lines"]


@pytest.mark.parametrize(
    ("line", "ranks", "gpus", "started", "advice"),
    [
        ("torchrun --nproc_per_node gpu", 4, 8, "one process per GPU (resources.gpus_per_node = 8)", "per_node=8"),
        (
            "torchrun --nproc_per_node gpu",
            4,
            0,
            "one process per GPU (resources.gpus_per_node = 0)",
            "into trainer.argv",
        ),
        (
            "accelerate launch --num_machines 2 --num_processes 3",
            2,
            2,
            "starts 3/2 processes on a node",
            "into trainer.argv",
        ),
    ],
)
def test_the_advice_on_the_number_of_ranks_is_a_number(
    line: str, ranks: int, gpus: int, started: str, advice: str
) -> None:
    resources = {"resources": {"ranks_per_node": ranks, "gpus_per_node": gpus}}
    (result,) = found(command(f"{line} /d/train.py {STEPS}", sections=resources), "command.ranks")
    assert result.status is BLOCKED
    assert started in result.found
    assert result.advice.endswith(advice)


def test_the_room_for_checkpoints_is_estimated_where_all_weights_are_trained() -> None:
    disk = replace(healthy().disk, free_bytes=2 * GIB)
    model = ModelFolder(Path("/m"), weight_bytes=GIB)
    full = replace(command(), disk=disk, model_folder=model)
    assert [one.id for one in unwanted(full)] == ["disk.space"]
    for option in ("--save_only_model true", "--optim adafactor"):
        (kept,) = found(replace(full, spec=command(f"{TORCHRUN} {option}").spec), "disk.space")
        assert "a checkpoint takes about 1.0 GiB" in kept.found, option
    adapters = replace(command(f"{TORCHRUN} --use_peft"), disk=disk, model_folder=model)
    assert [one.status for one in found(adapters, "disk.space")] == [SKIPPED]
