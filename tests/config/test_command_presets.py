"""Presets of external trainers: complete, and filled in to the launch line that was run by hand."""

import os
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from rlhf_core.cli.starter_config import starter_config
from rlhf_core.config import fields as config_fields
from rlhf_core.config import loading as config
from rlhf_core.machine import environments
from rlhf_core.presets import PRESETS, drivers_folder
from rlhf_core.render.config_text import as_toml
from rlhf_core.schemas.command_trainer import PLACEHOLDERS, CommandTrainer, fill, named_placeholders
from rlhf_core.schemas.run import RunSpec

COMMANDS = [name for name in PRESETS if config.load(name).trainer.kind == "command"]
DRIVERS = str(drivers_folder())


def trainer(spec: RunSpec) -> CommandTrainer:
    assert isinstance(spec.trainer, CommandTrainer)
    return spec.trainer


def texts(one: CommandTrainer) -> list[str]:
    return [*one.argv, *one.resume_argv, *one.variables.values(), one.working_dir, one.output_dir]


def filled(name: str, *overrides: str) -> tuple[str, dict[str, str]]:
    """Launch line and variables of the second of two nodes with four ranks each."""
    both = ("model.path=/models/m", "data.train=/data/t.jsonl", *overrides)
    spec = config.load(name, both)
    one = trainer(spec)
    values = {
        "num_nodes": "2",
        "node_rank": "1",
        "ranks_per_node": "4",
        "num_ranks": "8",
        "gpus_per_node": "4",
        "use_cpu": "true",
        "master_addr": "n0",
        "master_port": "29500",
        "num_steps": str(one.num_steps),
        "checkpoint_every": str(spec.checkpoint.every_num_steps),
        "keep_last": str(spec.checkpoint.keep_last),
        "seed": str(spec.seed),
        "output_dir": "/run/out",
        "attempt": "1",
        "restart": "0",
        "model": spec.model.path,
        "train": spec.data.train,
        "code": "/run/code",
        "drivers": "/drivers",
    }
    return shlex.join(fill(item, values) for item in one.argv), {
        key: fill(value, values) for key, value in one.variables.items()
    }


SWIFT = (
    "--seed 0 --logging_steps 1 --report_to tensorboard --output_dir /run/out --add_version false"
)  # fmt: skip
SAVING = "--max_steps 100 --save_steps 20 --save_total_limit 2"
TORCHRUN = "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr n0 --master-port 29500"
TRL = (
    "--max_steps 100 --save_strategy steps --save_steps 20 --save_total_limit 2 --seed 0 --logging_steps 1 "
    "--report_to tensorboard --output_dir /run/out"
)
TRL_FILES = "--model_name_or_path /models/m --train_file /data/t.jsonl"
LINES = {
    "swift-grpo": "swift rlhf --rlhf_type grpo --model /models/m --dataset /data/t.jsonl --split_dataset_ratio 0 "
    "--tuner_type full --learning_rate 1e-6 --max_length 2048 --per_device_train_batch_size 8 "
    "--gradient_accumulation_steps 1 --reward_funcs accuracy --num_generations 8 --max_completion_length 512 "
    f"--temperature 1.0 --beta 0.04 --use_vllm false {SAVING} {SWIFT}",
    "swift-dpo": "swift rlhf --rlhf_type dpo --model /models/m --dataset /data/t.jsonl --split_dataset_ratio 0 "
    "--tuner_type full --learning_rate 1e-6 --max_length 2048 --per_device_train_batch_size 4 "
    f"--gradient_accumulation_steps 2 --beta 0.1 {SAVING} {SWIFT}",
    "swift-cpo": "swift rlhf --rlhf_type cpo --model /models/m --dataset /data/t.jsonl --split_dataset_ratio 0 "
    "--tuner_type full --learning_rate 1e-6 --max_length 2048 --per_device_train_batch_size 4 "
    f"--gradient_accumulation_steps 2 --beta 0.1 --cpo_alpha 1.0 {SAVING} {SWIFT}",
    "swift-internvl": "swift rlhf --rlhf_type grpo --model /models/m --dataset /data/t.jsonl --split_dataset_ratio 0 "
    "--freeze_vit true --freeze_aligner true --tuner_type full --learning_rate 1e-6 --max_length 8192 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --reward_funcs accuracy --num_generations 8 "
    "--max_completion_length 1024 --temperature 1.0 --beta 0.001 --use_vllm true --vllm_mode colocate "
    f"--vllm_gpu_memory_utilization 0.4 --sleep_level 1 --gradient_checkpointing true {SAVING} {SWIFT}",
    "trl-grpo": f"{TORCHRUN} /drivers/trl_train.py grpo {TRL_FILES} --reward_functions accuracy_reward "
    "--num_generations 8 --max_completion_length 512 --temperature 1.0 --beta 0.0 --learning_rate 1e-6 "
    f"--per_device_train_batch_size 8 --gradient_accumulation_steps 1 {TRL}",
    "trl-cpo": f"{TORCHRUN} /drivers/trl_train.py cpo {TRL_FILES} --beta 0.1 --cpo_alpha 1.0 --learning_rate 1e-6 "
    f"--max_length 2048 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 {TRL}",
    "trl-orpo": f"{TORCHRUN} /drivers/trl_train.py orpo {TRL_FILES} --beta 0.1 --learning_rate 1e-6 "
    f"--max_length 2048 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 {TRL}",
    "torchrun": f"{TORCHRUN} /run/code/train.py --output-dir /run/out --steps 100 --seed 0",
    "openrlhf-grpo": "/drivers/ray_node.sh 1 2 n0 29500 4 /run/out/ray-1-0 python -m openrlhf.cli.train_ppo_ray "
    "--actor.num_nodes 2 --actor.num_gpus_per_node 4 --ref.num_nodes 2 --ref.num_gpus_per_node 4 "
    "--vllm.num_engines 8 --vllm.tensor_parallel_size 1 --vllm.gpu_memory_utilization 0.5 --vllm.sync_backend nccl "
    "--vllm.enable_sleep --ds.enable_sleep --train.colocate_all --actor.model_name_or_path /models/m "
    "--data.prompt_dataset /data/t.jsonl --data.input_key prompt --data.label_key answer --data.apply_chat_template "
    "--data.max_len 2048 --rollout.max_new_tokens 1024 --data.max_samples 1600 --rollout.batch_size 16 "
    "--rollout.n_samples_per_prompt 8 --train.batch_size 128 --rollout.micro_batch_size 4 --train.micro_batch_size 4 "
    "--train.num_episodes 1 --train.max_epochs 1 --train.seed 0 --algo.advantage.estimator group_norm "
    "--algo.kl.init_coef 0.001 --algo.kl.use_loss --algo.kl.estimator k3 --actor.adam.lr 1e-6 --ds.zero_stage 3 "
    "--ds.param_dtype bf16 --actor.gradient_checkpointing_enable --reward.remote_url /run/code/reward_func.py "
    "--ckpt.path /run/out/ckpt --ckpt.output_dir /run/out/model --ckpt.load_enable --ckpt.save_steps 20 "
    "--ckpt.max_num 2 --logger.logging_steps 1 --logger.tensorboard_dir /run/out/runs",
}


def test_every_preset_of_another_program_has_its_line_here() -> None:
    assert set(LINES) == set(COMMANDS)


@pytest.mark.parametrize("name", LINES)
def test_a_preset_gives_the_line_that_is_expected(name: str) -> None:
    line, variables = filled(name)
    assert line == LINES[name]
    assert not [text for text in (line, *variables.values()) if "{" in text]
    if name.startswith("swift-"):
        assert variables.items() >= {
            "NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "29500",
            "ACCELERATE_USE_CPU": "true",
        }.items()  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_all_placeholders_of_a_preset_are_known(name: str) -> None:
    named = {word for text in texts(trainer(config.load(name))) for word in named_placeholders(text)}
    assert named <= PLACEHOLDERS.keys()
    assert {"num_nodes", "node_rank", "ranks_per_node"} - named == (
        {"ranks_per_node"} if "gpus_per_node" in named else set()
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_setting_of_a_preset_can_be_changed(name: str) -> None:
    line, _ = filled(name, "trainer.num_steps=47", "checkpoint.every_num_steps=13", "seed=59")
    words = line.split()
    assert "59" in words
    assert name == "openrlhf-grpo" or "47" in words, "its steps follow from the data"
    assert name == "torchrun" or "13" in words
    spec = config.load(name, ["trainer.variables.MINE=yes", "trainer.num_steps=7"])
    assert (trainer(spec).variables["MINE"], spec.total_steps) == ("yes", 7)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_of_rlhf_init_means_the_same_as_its_preset(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.toml"
    path.write_text(starter_config(name, path.name))
    assert config.load(path) == config.load(name)


def test_names_of_metrics_that_are_no_bare_keys_survive_writing() -> None:
    spec = config.load("trl-grpo", ['trainer.metrics={"train/reward" = "reward/mean"}'])
    for only_set in (False, True):
        shown = tomllib.loads(as_toml(spec, only_set=only_set))
        assert RunSpec.model_validate(shown) == spec
    assert tomllib.loads(f"value = {config_fields.to_toml({'train/reward': 1})}") == {"value": {"train/reward": 1}}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_preset_names_what_there_is(name: str) -> None:
    one = trainer(config.load(name))
    assert one.environment in ("", *environments.names())
    for item in one.argv:
        if item.startswith("{drivers}/"):
            assert (drivers_folder() / item.removeprefix("{drivers}/")).is_file()


def test_the_steps_of_openrlhf_are_those_that_its_data_give() -> None:
    spec = config.load("openrlhf-grpo")
    given = dict(zip(trainer(spec).argv, trainer(spec).argv[1:], strict=False))
    assert int(given["--data.max_samples"]) / int(given["--rollout.batch_size"]) == spec.total_steps
    rollout = int(given["--rollout.batch_size"]) * int(given["--rollout.n_samples_per_prompt"])
    assert int(given["--train.batch_size"]) == rollout, "one step per rollout"
    assert spec.resources.ranks_per_node == spec.resources.gpus_per_node, "one engine per GPU"


@pytest.mark.parametrize("name", [name for name in COMMANDS if "-grpo" in name or "internvl" in name])
def test_batches_of_a_preset_hold_whole_groups(name: str) -> None:
    spec = config.load(name)
    given = dict(zip(trainer(spec).argv, trainer(spec).argv[1:], strict=False))
    if "--num_generations" in given:
        batch = int(given["--per_device_train_batch_size"]) * int(given["--gradient_accumulation_steps"])
        assert batch * spec.num_ranks % int(given["--num_generations"]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Ray on the nodes of a job, with a stand-in for Ray

RAY = """#!/bin/bash
echo "$@" >>"$RAY_LOG"
case "$1 $*" in
  *--head*) trap 'rm -f "$RAY_LOG.head"; exit 0' TERM; touch "$RAY_LOG.head"; while :; do sleep 0.1; done ;;
  "start "*) touch "$RAY_LOG.node"; trap 'exit 0' TERM; while :; do sleep 0.1; done ;;
  "health-check "*) test -e "$RAY_LOG.head" ;;
  "list "*) printf '[{"node_id": "a"}'; test -e "$RAY_LOG.node" && printf ', {"node_id": "b"}'; printf ']\\n' ;;
esac
"""


@pytest.fixture
def ray(tmp_path: Path) -> dict[str, str]:
    """Environment in which `ray` is a stand-in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text(RAY)
    (tmp_path / "bin" / "ray").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RAY_LOG": str(tmp_path / "ray.log")}


def start_node(rank: int, folder: Path, env: dict[str, str], program: str) -> "subprocess.Popen[str]":
    line = [f"{DRIVERS}/ray_node.sh", str(rank), "2", "127.0.0.1", "6379", "8", str(folder), "bash", "-c", program]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [0, 7])
def test_all_nodes_end_with_the_exit_code_of_the_program(tmp_path: Path, ray: dict[str, str], code: int) -> None:
    folder = tmp_path / "ray"
    nodes = [start_node(rank, folder, ray, f"echo at $RAY_ADDRESS; exit {code}") for rank in (0, 1)]
    outputs = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [code, code]
    assert outputs == ["at 127.0.0.1:6379\n", ""], "the program runs once, when all nodes are present"
    calls = (tmp_path / "ray.log").read_text()
    assert "start --head --block --disable-usage-stats --node-ip-address=127.0.0.1 --port=6379 --num-gpus=8" in calls
    assert "start --block --disable-usage-stats --address=127.0.0.1:6379 --num-gpus=8" in calls
    assert "stop" not in calls, "it would end Ray of other jobs on the node"
    assert not (tmp_path / "ray.log.head").exists(), "the head has ended"


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "0 of 2 nodes have joined ray after 0 s (RLHF_RAY_TIMEOUT_S): 403 from the proxy"),
        (1, "ray's head is not reached at 127.0.0.1:6379 after 0 s (RLHF_RAY_TIMEOUT_S): no route"),
    ],
)
def test_nodes_that_do_not_find_each_other_end_with_the_error_of_ray(
    tmp_path: Path, ray: dict[str, str], rank: int, message: str
) -> None:
    (tmp_path / "bin" / "ray").write_text(
        'case "$1" in start) exec sleep 600 ;; list) echo 403 from the proxy >&2 ;; *) echo no route ;; esac\nexit 1\n'
    )
    node = start_node(rank, tmp_path / "ray", {**ray, "RLHF_RAY_TIMEOUT_S": "0"}, "exit 0")
    assert message in node.communicate(timeout=60)[1]
    assert node.returncode == 1


def test_a_program_that_is_ended_ends_ray_as_well(tmp_path: Path, ray: dict[str, str]) -> None:
    nodes = [start_node(rank, tmp_path / "ray", ray, "echo begun; exec sleep 600") for rank in (0, 1)]
    assert nodes[0].stdout is not None
    assert nodes[0].stdout.readline() == "begun\n"
    for node in nodes:
        node.terminate()
    for node in nodes:
        node.communicate(timeout=60)
    assert [node.returncode for node in nodes] == [143, 143]
    assert not (tmp_path / "ray.log.head").exists()
