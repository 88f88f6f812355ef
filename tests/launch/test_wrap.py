"""`rlhf wrap`: conversion of launch lines of many programs into configs."""

import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf_core.config.loading import load
from rlhf_core.errors import BadInput, RlhfError
from rlhf_core.launch.wrap.draft import Draft, WrapSurroundings
from rlhf_core.launch.wrap.slurm_options import options_in
from rlhf_core.launch.wrap.wrapping import WrapOptions, WrappedLine, wrap_line, wrap_script
from rlhf_core.schemas.command_trainer import PLACEHOLDERS, CommandTrainer, fill
from rlhf_core.schemas.slurm_values import slurm_seconds
from rlhf_core.shell.launch_line import LaunchItem, read_launch_line

VALUES = {name: f"<{name}>" for name in PLACEHOLDERS}
MEETING = {
    "NNODES": "{num_nodes}", "NODE_RANK": "{node_rank}", "NPROC_PER_NODE": "{ranks_per_node}",
    "MASTER_ADDR": "{master_addr}", "MASTER_PORT": "{master_port}",
}  # fmt: skip
PROCESSORS = {"ACCELERATE_USE_CPU": "{use_cpu}"}
TORCHRUN = "--nnodes={num_nodes} --node_rank={node_rank} --master_addr={master_addr} --master_port={master_port}"


def around(files: dict[str, str] | None = None, folders: tuple[str, ...] = ()) -> WrapSurroundings:
    return WrapSurroundings("/home/u", (files or {}).get, lambda path: path in folders)


def wrapped(
    text: str, files: dict[str, str] | None = None, folders: tuple[str, ...] = (), **options: Any
) -> WrappedLine:
    return wrap_line(shlex.split(text), around(files, folders), WrapOptions(**options))


def script(text: str, *arguments: str, **options: Any) -> WrappedLine:
    return wrap_script(text, "s.sh", around(), WrapOptions(**options), {}, arguments)


def content(found: WrappedLine) -> dict[str, Any]:
    return tomllib.loads(found.text)


def setting(found: WrappedLine, name: str) -> Any:
    value: Any = content(found)
    for part in name.split("."):
        value = value.get(part) if value else None
    return value


LINES: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    # line: words that the config's line has (or not, with !), settings, beginnings of what could not be read
    "torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --master_port=1234 train.py"
    " --max_iters=600 --out_dir=out --seed 7": (
        ["--nproc_per_node={ranks_per_node}", "--nnodes={num_nodes}", "--node_rank={node_rank}",
         "--master_addr={master_addr}", "--master_port={master_port}", "--max_iters={num_steps}",
         "--out_dir={output_dir}", "--seed {seed}"],
        {"resources.num_nodes": 2, "resources.ranks_per_node": 8, "trainer.num_steps": 600, "seed": 7,
         "trainer.framework": "script", "trainer.resume": "none", "trainer.working_dir": "/home/u"},
        ["GPUs", "algorithm", "checkpoints", "the way it resumes"],
    ),
    "torchrun --rdzv-id 1 --rdzv-backend c10d --rdzv-endpoint h:29500 --nnodes 1:4 --nproc-per-node gpu"
    " --max_restarts 3 --redirects 3 -m pkg.grpo --steps 10": (
        ["--nnodes {num_nodes}", "--master_addr={master_addr} --master_port={master_port} -m pkg.grpo",
         "--steps {num_steps}", "!rdzv", "!max_restarts", "!redirects"],
        {"resources.num_nodes": 4, "trainer.num_steps": 10, "trainer.algorithm": "grpo"},
        ["elastic number of nodes 1:4", "ranks on every node: gpu", "GPUs", "output folder"],
    ),
    "CUDA_VISIBLE_DEVICES=2,3 torchrun --standalone --nproc_per_node gpu t.py --learning_rate 1e-4 --max_steps 9"
    " --output_dir o --logging_steps 1 --save_steps 3 --save_total_limit 4": (
        ["!standalone", "--max_steps {num_steps}", "--save_steps {checkpoint_every}", "--save_total_limit {keep_last}"],
        {"resources.gpus_per_node": 2, "resources.ranks_per_node": 2, "trainer.framework": "transformers",
         "checkpoint.every_num_steps": 3, "checkpoint.keep_last": 4, "trainer.variables": None,
         "trainer.resume_argv": ["--resume_from_checkpoint", "{checkpoint}"]},
        ["algorithm"],
    ),
    "accelerate launch --num_machines 2 --num_processes 8 --machine_rank 0 --main_process_ip 1.2.3.4"
    " --main_process_port 9 --multi_gpu --gpu_ids 0,1,2,3 dpo.py --output_dir o --num_train_epochs 3 --bf16": (
        ["--num_machines {num_nodes}", "--num_processes {num_ranks}", "--machine_rank {node_rank}",
         "--main_process_ip {master_addr}", "--main_process_port {master_port}", "--multi_gpu", "!gpu_ids",
         "--bf16 --max_steps {num_steps} --save_steps {checkpoint_every}"],
        {"resources.num_nodes": 2, "resources.ranks_per_node": 4, "resources.gpus_per_node": 4,
         "trainer.algorithm": "dpo", "trainer.num_steps": None},
        ["optimizer steps: 3 epochs are given", "steps between checkpoints"],
    ),
    "deepspeed --include localhost:0,1,2,3 --module openrlhf.cli.train_sft --save_path ./c --max_epochs 1"
    " --train_batch_size 256 --micro_train_batch_size 2": (
        ["torchrun --nnodes={num_nodes} --nproc_per_node={ranks_per_node}", "-m openrlhf.cli.train_sft",
         "--save_path {output_dir}/model", "--ckpt_path {output_dir}/checkpoints", "--load_checkpoint", "!deepspeed"],
        {"resources.gpus_per_node": 4, "resources.ranks_per_node": 4, "trainer.framework": "openrlhf",
         "trainer.algorithm": "sft", "trainer.resume": "in_place",
         "trainer.checkpoint_name": "checkpoints/global_step{step}"},
        ["--local_rank", "optimizer steps: 1 epochs", "layout of the checkpoints"],
    ),
    "deepspeed --num_gpus 2 --module openrlhf.cli.train_opd --ckpt.output_dir o --ckpt.save_steps 9"
    " --train.batch_size 8 --train.max_epochs 1": (
        ["--ckpt.output_dir {output_dir}/model", "--ckpt.path {output_dir}/checkpoints",
         "--ckpt.save_steps {checkpoint_every}", "--ckpt.load_enable", "!--save_path"],
        {"checkpoint.every_num_steps": 9, "trainer.algorithm": "opd"},
        ["--local_rank", "optimizer steps"],
    ),
    "NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 swift rlhf --rlhf_type grpo --model Qwen/Q-1.7B --save_steps 100"
    " --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --num_train_epochs 1 --dataset a#9 b": (
        ["swift rlhf --rlhf_type grpo --model Qwen/Q-1.7B", "--dataset 'a#9' b", "--add_version false",
         "--output_dir {output_dir}", "--max_steps {num_steps}"],
        {"trainer.framework": "swift", "trainer.algorithm": "grpo", "trainer.variables": MEETING,
         "resources.ranks_per_node": 2, "resources.gpus_per_node": 2, "checkpoint.every_num_steps": 100,
         "name": "swift-rlhf-grpo-q-1-7b"},
        ["optimizer steps: 1 epochs"],
    ),
    "NNODES=$WORLD_SIZE NODE_RANK=$RANK torchrun --nproc_per_node=8 swift/cli/rlhf.py --rlhf_type dpo --max_steps 7"
    " --use_cpu true --save_strategy epoch": (
        ["swift/cli/rlhf.py", "--save_strategy steps", "--save_steps {checkpoint_every}"],
        {"trainer.framework": "swift", "trainer.algorithm": "dpo", "resources.gpus_per_node": 0,
         "trainer.variables": {"NNODES": "{num_nodes}", "NODE_RANK": "{node_rank}", **PROCESSORS}},
        ["steps between checkpoints"],
    ),
    "trl grpo --model_name_or_path m --output_dir g --num_generations 4 --num_processes 4 --max_steps 100"
    " --report_to none": (
        ["--num_processes {num_ranks}", "--num_machines {num_nodes}", "--machine_rank {node_rank}"],
        {"trainer.framework": "trl", "trainer.algorithm": "grpo", "resources.ranks_per_node": 4},
        ["GPUs", "steps between checkpoints", "--report_to none"],
    ),
    "FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=1 MASTER_ADDR=1.2.3.4 MASTER_PORT=9 llamafactory-cli train x.yaml": (
        ["llamafactory-cli train x.yaml max_steps={num_steps} output_dir={output_dir}"],
        {"trainer.framework": "transformers", "trainer.variables": {"FORCE_TORCHRUN": "1", **MEETING, **PROCESSORS},
         "resources.num_nodes": 2, "trainer.resume_argv": ["resume_from_checkpoint={checkpoint}"]},
        ["GPUs", "algorithm", "optimizer steps"],
    ),
    "axolotl train lora.yml": (
        ["axolotl train lora.yml --launcher torchrun --max-steps {num_steps}", "-- --nnodes={num_nodes}"],
        {"trainer.framework": "transformers", "trainer.algorithm": "sft"},
        ["ranks on every node", "GPUs", "optimizer steps"],
    ),
    "tune run --nproc_per_node 4 lora_dpo_distributed --config llama3/8B epochs=2 batch_size=4": (
        ["tune run --nproc_per_node {ranks_per_node}", "lora_dpo_distributed --config llama3/8B epochs=2 batch_size=4"],
        {"trainer.framework": "script", "trainer.algorithm": "dpo", "resources.ranks_per_node": 4},
        ["GPUs", "optimizer steps: 2 epochs", "output folder", "checkpoints", "the way it resumes"],
    ),
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.n_gpus_per_node=8 trainer.nnodes=1"
    " trainer.save_freq=20 trainer.total_epochs=15": (
        ["trainer.n_gpus_per_node={gpus_per_node} trainer.nnodes={num_nodes} trainer.save_freq={checkpoint_every}",
         "trainer.total_training_steps={num_steps} trainer.default_local_dir={output_dir}"],
        {"trainer.launch": "per_node", "resources.gpus_per_node": 8, "trainer.algorithm": "grpo",
         "trainer.checkpoint_name": "global_step_{step}", "trainer.resume": "argument", "supervise.floor_s": 1800.0},
        ["optimizer steps: 15 epochs"],
    ),
    "ray job submit --address=http://h:1 -- python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 2"
    " --actor_num_gpus_per_node 8 --advantage_estimator group_norm --colocate_all_models --bf16": (
        ["{drivers}/ray_node.sh {node_rank}", "!ray job", "--actor_num_nodes {num_nodes}",
         "--actor_num_gpus_per_node {gpus_per_node}"],
        {"trainer.algorithm": "grpo", "resources.num_nodes": 2, "resources.gpus_per_node": 8,
         "trainer.checkpoint_name": "checkpoints/_actor/global_step{step}",
         "trainer.checkpoint_complete": ["../latest"]},
        ["ray job submit", "optimizer steps"],
    ),
    "srun -N2 --ntasks-per-node=4 --gres=gpu:h100:4,lustre -p gpu -A proj -t 1-00:00:00 -c 8 --mem=64G"
    " --exclude=n[1,3],n9 --label --mcs-label=a python -u train.py --steps 9": (
        ["python -u train.py --steps {num_steps}", "!srun"],
        {"trainer.launch": "per_rank", "resources.num_nodes": 2, "resources.ranks_per_node": 4,
         "resources.gpus_per_node": 4, "resources.time_limit_s": 86_400, "resources.cpus_per_rank": 8,
         "resources.memory_gb": 64.0, "slurm.gres": "lustre", "slurm.gpu_type": "h100", "slurm.partition": "gpu",
         "slurm.account": "proj", "slurm.exclude": ["n[1,3]", "n9"]},
        ["srun --mcs-label=a", "algorithm"],
    ),
    "srun --nodes=2 --gpus-per-node=8 --container-image=a.sqsh --container-mounts=/a:/b torchrun"
    " --nproc_per_node 8 t.py": (
        ["!srun", "torchrun"],
        {"resources.num_nodes": 2, "resources.gpus_per_node": 8, "slurm.container_kind": "pyxis",
         "slurm.container_image": "a.sqsh", "slurm.container_mounts": ["/a:/b"]},
        ["algorithm", "optimizer steps"],
    ),
    "mpirun -np 8 -x DEBUG=1 python -u -m tool.train --max_steps 5": (
        ["python -u -m tool.train --max_steps {num_steps}", "!mpirun"],
        {"trainer.launch": "per_rank", "resources.ranks_per_node": 8, "trainer.variables": {"DEBUG": "1"}},
        ["mpirun", "GPUs"],
    ),
    "uv run --extra gpu torchrun --nproc-per-node 2 dpo.py --max_steps=9": (
        ["uv run --extra gpu torchrun --nproc-per-node {ranks_per_node}", "--max_steps={num_steps}"],
        {"trainer.algorithm": "dpo"},
        ["GPUs"],
    ),
    "bash -c 'cd /x && module load cuda && A=1 torchrun --nproc_per_node 2 t.py --max_steps 7'": (
        ["torchrun", "!bash"],
        {"trainer.working_dir": "/x", "trainer.setup": ["module load cuda"], "trainer.variables": {"A": "1"}},
        ["GPUs"],
    ),
    "srun -N 2 bash -c 'torchrun --nnodes $SLURM_NNODES --node_rank $SLURM_PROCID t.py --max_steps 7'": (
        ["torchrun --nnodes {num_nodes} --node_rank {node_rank}", "!SLURM"],
        {"resources.num_nodes": 2},
        ["ranks on every node"],
    ),
    "composer -n 8 train.py": (["composer -n 8 train.py"], {"trainer.launch": None}, ["the program composer"]),
    "python train.py": (
        ["python train.py"], {"trainer.launch": "per_rank", "resources.ranks_per_node": 1}, ["GPUs", "optimizer steps"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_a_line_becomes_a_config(text: str) -> None:
    words, settings_, unread = LINES[text]
    found = wrapped(text)
    line = _unquoted(found)
    for part in words:
        assert (part[1:] not in line) if part.startswith("!") else (part in line), (part, line)
    assert {name: setting(found, name) for name in settings_} == settings_
    missing = [part.what for part in found.unread]
    for beginning in unread:
        assert any(what.startswith(beginning) for what in missing), (beginning, missing)
    assert all(part.advice for part in found.unread)


def _unquoted(found: WrappedLine) -> str:
    """The line with quotes only around words in which more than placeholders needs them."""
    return " ".join(word if "{" in word else shlex.quote(word) for word in found.argv)


@pytest.mark.parametrize("text", LINES)
def test_the_config_loads_once_the_steps_are_known(text: str, tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    found = wrapped(text, steps=33)
    config.write_text(found.text)
    trainer = load(config).trainer
    assert isinstance(trainer, CommandTrainer)
    assert (found.num_steps, trainer.num_steps) == (33, 33)
    assert trainer.argv == found.argv
    # Without steps, the key is present as a comment, and the message requests it.
    bare = wrapped(text)
    assert (bare.num_steps is None) == ("\n# num_steps = \n" in bare.text)


def test_a_config_without_steps_does_not_load(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text(wrapped("swift sft --num_train_epochs 1").text)
    with pytest.raises(BadInput, match=r"trainer\.num_steps"):
        load(config)


def test_files_next_to_the_line_are_read() -> None:
    files = {
        "a.yaml": "num_machines: 2\nnum_processes: 16\n",
        "g.yaml": "# of TRL\nmax_steps: 40 # all\nsave_steps: 5\noutput_dir: 'o'\nper_device_train_batch_size: 2\n",
        "hosts": "n1 slots=4\n# n2 slots=4\nn3 slots=4\n",
    }
    found = wrapped(
        "accelerate launch --config_file a.yaml dpo.py --config g.yaml --logging_steps 1 --report_to none --x", files
    )
    assert setting(found, "resources") == {"gpus_per_node": 0, "num_nodes": 2, "ranks_per_node": 8}
    assert (found.num_steps, setting(found, "checkpoint.every_num_steps")) == (40, 5)
    assert "--max_steps" in found.argv
    found = wrapped("deepspeed --hostfile hosts t.py", files)
    assert setting(found, "resources") == {"gpus_per_node": 4, "num_nodes": 2, "ranks_per_node": 4}
    assert "the nodes of hosts" in [part.what for part in wrapped("deepspeed --hostfile hosts t.py").unread]


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("accelerate launch --config_file a.yaml t.py", ["a.yaml: there is no such file in /home/u"]),
        ("accelerate launch --config_file plain t.py", ["plain: there is no such file in /home/u"]),
        ("accelerate launch --use_deepspeed --deepspeed_config_file ds t.py", ["ds: there is no such file in /home/u"]),
        ("torchrun t.py --deepspeed /no/ds.json", ["/no/ds.json: there is no such file"]),
        ("deepspeed t.py --deepspeed_config ds.json", ["ds.json: there is no such file in /home/u"]),
        ("deepspeed --hostfile hosts t.py", ["the nodes of hosts: there is no such file"]),
        ("swift sft --deepspeed zero2 --config $CONFIG.yaml", []),
        ("accelerate launch --config_file there.yaml t.py --config there.yaml", []),
    ],
)
def test_a_config_file_that_does_not_exist_is_reported(line: str, missing: list[str]) -> None:
    places = WrapSurroundings("/home/u", exists=lambda path: "there" in path)
    found = wrap_line(shlex.split(line), places, WrapOptions())
    assert [part.what for part in found.unread if "no such file" in part.what] == missing


def test_a_config_file_is_looked_for_where_the_script_goes() -> None:
    places = WrapSurroundings("/home/u", exists=lambda path: path == "/data/a.yaml")
    text = "cd {}\naccelerate launch --config_file a.yaml t.py\n"
    found = {at: wrap_script(text.format(at), "s.sh", places, WrapOptions(), {}, ()) for at in ("/data", "/other")}
    reported = {at: [part.what for part in one.unread if "no such file" in part.what] for at, one in found.items()}
    assert reported == {"/data": [], "/other": ["a.yaml: there is no such file in /other"]}


def test_config_files_and_models_are_read_where_the_script_goes() -> None:
    files = {"/home/u/LF/a.yaml": "stage: dpo\nsave_steps: 7\nmax_steps: null  # none\noutput_dir: nullable\n"}
    places = WrapSurroundings("/home/u", files.get, lambda path: path == "/home/u/LF/m", exists=files.__contains__)
    found = wrap_script("cd LF\nllamafactory-cli train a.yaml model=m\n", "s.sh", places, WrapOptions(), {}, ())
    assert (setting(found, "trainer.algorithm"), setting(found, "checkpoint.every_num_steps")) == ("dpo", 7)
    assert setting(found, "model.path") == "/home/u/LF/m"
    assert "nullable" in [part.found for part in found.read]
    assert "optimizer steps" in [part.what for part in found.unread]


def test_config_files_in_json_are_read_as_well() -> None:
    files = {
        "c.yaml": "max_steps: 60\nsave_steps: 7\nper_device_train_batch_size: 2\nsave_strategy: epoch\n",
        "c.json": '{"max_steps": 60, "save_steps": 7, "per_device_train_batch_size": 2, "save_strategy": "epoch"}',
    }
    in_yaml, in_json = (wrapped(f"trl sft --config {name}", files) for name in files)
    assert (in_json.num_steps, setting(in_json, "checkpoint.every_num_steps")) == (60, 7)
    assert (in_json.read, in_json.unread) == (in_yaml.read, in_yaml.unread)


@pytest.mark.parametrize("content", ["{torn", "[1, 2]", "max_steps: [\n", None])
def test_a_config_file_that_cannot_be_read_is_reported(content: str | None) -> None:
    files = {} if content is None else {"c.json": content, "c.yaml": content}
    for name in ("c.json", "c.yaml"):
        unread = [part.what for part in wrapped(f"trl sft --config {name}", files).unread]
        assert f"{name}: not read, expected names with values in JSON or YAML" in unread


def test_settings_of_deepspeed_are_not_those_of_the_program() -> None:
    files = {"ds.json": '{"gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}'}
    line = "deepspeed --num_gpus 2 t.py --per_device_train_batch_size 3 --deepspeed ds.json"
    (batch,) = [part.found for part in wrapped(line, files).read if part.what == "batch"]
    assert batch == "6 = 3 on a rank x 1 accumulated x 2 ranks"


def test_the_batch_is_read_from_config_files_as_well() -> None:
    files = {"c.yaml": "gradient_accumulation_steps: 4\nlearning_rate: 1e-6\nlogging_steps: 5\n"}
    line = "accelerate launch --num_processes 2 grpo.py --config c.yaml --per_device_train_batch_size 3 --max_steps 9"
    (batch,) = [part.found for part in wrapped(line, files).read if part.what == "batch"]
    assert batch == "24 = 3 on a rank x 4 accumulated x 2 ranks"


def test_checkpoints_by_epoch_of_axolotl_give_way_to_those_of_the_run() -> None:
    """It refuses save_steps next to saves_per_epoch."""
    files = {"a.yaml": "saves_per_epoch: 1\n", "b.yaml": "save_steps: 4\n"}
    assert "--saves-per-epoch 0" in " ".join(wrapped("axolotl train a.yaml", files).argv)
    assert "--saves-per-epoch" not in wrapped("axolotl train b.yaml", files).argv


def test_llamafactory_starts_one_rank_on_every_gpu() -> None:
    job = "#SBATCH --gres=gpu:4\n"
    assert setting(script(f"{job}llamafactory-cli train a.yaml"), "resources.ranks_per_node") == 4
    given = script(f"{job}NPROC_PER_NODE=2 llamafactory-cli train a.yaml")
    assert setting(given, "resources.ranks_per_node") == 2
    assert setting(script(f"{job}swift sft --model q"), "resources.ranks_per_node") == 1


def test_a_program_with_a_loop_of_its_own_gets_no_options_of_another() -> None:
    options = "--per_device_train_batch_size 1 --num_train_epochs 2 --gradient_accumulation_steps 4"
    line = f"accelerate launch --num_processes 2 finetune.py {options} --max_train_steps 100 --output_dir o"
    found = wrapped(line)
    assert setting(found, "trainer.framework") == "script"
    assert not {"--max_steps", "--save_steps"} & {*found.argv}
    assert found.argv[found.argv.index("--max_train_steps") + 1] == "{num_steps}"


@pytest.mark.parametrize(
    "line", ["torchrun --nnodes 4 t.py", "accelerate launch --num_machines 4 --num_processes 8 t.py"]
)
def test_a_job_with_another_number_of_nodes_than_its_launch_line_is_reported(line: str) -> None:
    def reported(nodes: int) -> list[str]:
        found = script(f"#SBATCH -N {nodes}\n{line}")
        assert setting(found, "resources.num_nodes") == 4
        return [part.what for part in found.unread if part.what.startswith("nodes")]

    assert reported(2) == ["nodes: 4 in the launch line, but the job requests 2"]
    assert reported(4) == []


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python mason.py --gpus 8 --pure_docker_mode -- accelerate launch t.py --lr 1", ["accelerate", "launch"]),
        ("uv run mason.py --env A=1 -- source ray.sh '&&' python t.py --lr 1", ["uv", "run", "python", "t.py"]),
    ],
)
def test_a_program_that_submits_a_launch_line_is_removed(line: str, program: list[str]) -> None:
    found = wrapped(line)
    assert list(found.argv[: len(program)]) == program
    assert "mason.py" not in " ".join(found.argv)
    assert any(part.what.startswith("mason.py --env" if "uv" in line else "python mason.py") for part in found.unread)
    assert wrapped("python t.py -- data.yaml").argv[:2] == ("python", "t.py")


def test_a_secret_that_only_the_shell_knows_is_not_to_be_written_down() -> None:
    found = script("torchrun t.py --use_wandb ${WANDB_TOKEN} --lr $LR")
    advice = {part.what.partition(":")[0]: part.advice for part in found.unread if part.what.startswith("$")}
    assert "slurm.pass_environment" in advice["${WANDB_TOKEN}"]
    assert advice["$LR"].startswith("write its value")


def test_a_model_folder_goes_into_the_config_and_a_name_of_a_hub_stays() -> None:
    found = wrapped("swift sft --model /m --max_steps 1", folders=("/m",))
    assert setting(found, "model.path") == "/m"
    assert found.argv[3] == "{model}"
    assert wrapped("swift sft --model /m --max_steps 1").argv[3] == "/m"


def test_the_environment_of_a_named_python() -> None:
    found = wrapped("/e/bin/python t.py", {"/e/pyvenv.cfg": "home = /usr"})
    assert (setting(found, "trainer.environment"), found.argv[0]) == ("/e", "python")
    assert wrapped("/usr/bin/python t.py").argv[0] == "/usr/bin/python"


def test_deepspeed_of_accelerate_does_not_start_nodes_itself() -> None:
    """Its default is pdsh: without a file of hosts, each node would train alone."""
    line = "accelerate launch --num_machines 2 --num_processes 8 {} t.py --max_steps 5"
    with_option = "--use_deepspeed --deepspeed_multinode_launcher pdsh --deepspeed_hostfile hosts"
    by_option = wrapped(line.format(with_option)).argv
    assert by_option[by_option.index("--deepspeed_multinode_launcher") + 1] == "standard"
    assert "--deepspeed_hostfile" not in by_option
    files = {"a.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_multinode_launcher: pdsh\n"}
    assert "--deepspeed_multinode_launcher=standard" in wrapped(line.format("--config_file a.yaml"), files).argv
    assert "deepspeed" not in " ".join(wrapped(line.format("--multi_gpu")).argv)


TRANSFORMERS = "torchrun --nproc_per_node 2 t.py --per_device_train_batch_size 1 --load_best_model_at_end"


@pytest.mark.parametrize(
    ("options", "evaluations"),
    [
        (
            "true --eval_strategy epoch --save_strategy epoch",
            ("--eval_strategy steps --save_strategy steps", "--eval_steps {checkpoint_every}"),
        ),
        ("--evaluation_strategy=epoch", ("--evaluation_strategy=steps", "--eval_steps {checkpoint_every}")),
        ("--eval_strategy steps --eval_steps 500", ("--eval_steps {checkpoint_every}",)),
        ("--eval_strategy steps --eval_steps 50 --save_steps 100", ("--eval_steps 50",)),
        ("false --eval_strategy epoch --save_strategy steps", ("--eval_strategy epoch",)),
    ],
)
def test_the_best_checkpoint_has_an_evaluation(options: str, evaluations: tuple[str, ...]) -> None:
    """Otherwise transformers ends every rank at its start."""
    line = " ".join(wrapped(f"{TRANSFORMERS} {options} --save_total_limit 2 --max_steps 1000").argv)
    assert all(text in line for text in evaluations), line
    assert ("eval_steps" in line) == any("eval_steps" in text for text in evaluations)


def test_resume_options() -> None:
    assert "--resume_from_checkpoint" not in wrapped("swift sft --resume_from_checkpoint true --max_steps 1").argv
    kept = wrapped("swift sft --resume_from_checkpoint out/checkpoint-9 --max_steps 1")
    assert "out/checkpoint-9" in kept.argv
    assert any("the first attempt starts from it" in part.place for part in kept.read)


@pytest.mark.parametrize(
    "kept", ["--init_from=gpt2-xl", "--resume base.pth", "--resume_from_checkpoint checkpoint-9", "--init_from scratch"]
)
def test_the_weights_to_start_from_are_kept(kept: str) -> None:
    """Without them, the program would train from scratch or from its default model, and nothing would say so."""
    assert kept in " ".join(wrapped(f"torchrun --nproc_per_node 2 train.py {kept} --steps 5").argv)


@pytest.mark.parametrize("dropped", ["--init_from=resume", "--resume", "--resume auto", "--resume_from latest"])
def test_the_newest_checkpoint_is_left_to_the_run(dropped: str) -> None:
    found = wrapped(f"torchrun --nproc_per_node 2 train.py --steps 5 {dropped}")
    assert found.argv[-3:] == ("train.py", "--steps", "{num_steps}")
    assert setting(found, "trainer.resume_argv") is None
    assert not any("resume_argv" in part.place for part in found.read)


def test_the_way_to_resume_of_verl() -> None:
    recipe = "python -m recipe.dapo.main_dapo actor_rollout_ref.model.path=m trainer.total_training_steps=9"
    given = " trainer.resume_mode=auto trainer.del_local_ckpt_after_load=True trainer.logger=['wandb']"
    found = wrapped(recipe + given)
    assert not {word for word in found.argv if "resume" in word or "del_local" in word}
    resume_argv = ("trainer.resume_mode=resume_path", "trainer.resume_from_path={checkpoint}")
    assert setting(found, "trainer.resume_argv") == [*resume_argv]
    assert any("console" in part.advice for part in found.unread)
    kept = wrapped(f"{recipe} trainer.resume_mode=resume_path trainer.resume_from_path=/old/global_step_7")
    assert {"trainer.resume_mode=resume_path", "trainer.resume_from_path=/old/global_step_7"} <= {*kept.argv}
    assert "trainer" not in " ".join(wrapped("python /home/u/verl/my_train.py --steps 9").argv)


def test_verl_removes_its_own_checkpoints() -> None:
    """By default it keeps all of them, and retention removes only the links of the run."""
    keeps = "trainer.max_actor_ckpt_to_keep={keep_last}"
    line = "python -m verl.trainer.main_ppo trainer.n_gpus_per_node=8 trainer.total_training_steps=9"
    assert {keeps, "trainer.max_critic_ckpt_to_keep={keep_last}"} <= {*wrapped(line).argv}
    given = wrapped(f"{line} trainer.max_actor_ckpt_to_keep=3")
    assert keeps in given.argv
    assert setting(given, "checkpoint.keep_last") == 3
    of_sft = wrapped("torchrun --nproc_per_node 2 -m verl.trainer.fsdp_sft_trainer trainer.total_training_steps=9")
    assert "ckpt_to_keep" not in " ".join(of_sft.argv), "it has no such option, and Hydra refuses it"


HF = "torchrun --nproc_per_node 2 train.py --max_steps 9 --output_dir o --save_steps 3 --report_to tensorboard"


@pytest.mark.parametrize(
    ("script", "resume", "is_found", "missing"),
    [
        ("trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)", None, True, ""),
        ("trainer.train()\ntrainer.save_model()", "none", False, "never names resume_from_checkpoint"),
        ("", None, False, "does not name resume_from_checkpoint"),
        ("trainer.train(get_last_checkpoint(out))", None, False, "does not name resume_from_checkpoint"),
        ("model.train()\nstart(model)", None, False, "does not name resume_from_checkpoint"),
        (None, None, False, "was not read"),
    ],
)
def test_a_trainer_resumes_only_if_its_script_says_so(
    script: str | None, resume: str | None, is_found: bool, missing: str
) -> None:
    """``Trainer.train`` does not read the option, and TRL's examples call it without an argument."""
    found = wrapped(HF, {} if script is None else {"train.py": script})
    assert setting(found, "trainer.resume") == resume
    assert ["resume"] * is_found == [part.what for part in found.read if "resume" in f"{part.what} {part.place}"]
    unread = [part.what for part in found.unread if part.what.startswith("the way it resumes")]
    assert len(unread) == (not is_found)
    assert all(missing in what for what in unread)


@pytest.mark.parametrize("line", ["trl grpo --output_dir o", "swift sft", "llamafactory-cli train x.yaml"])
def test_commands_that_resume_themselves_need_no_script(line: str) -> None:
    found = wrapped(f"{line} --max_steps 9")
    assert "resume" in [part.what for part in found.read]
    assert not [part for part in found.unread if part.what.startswith("the way it resumes")]


@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 2", "accelerate launch --num_processes 2"])
def test_the_output_of_ranks_is_left_to_the_run(launcher: str) -> None:
    """In a folder of the launcher, it would be in no log."""
    found = wrapped(f"{launcher} --log_dir logs --tee 3 train.py --steps 9 --log_dir mine")
    line = " ".join(found.argv)
    assert "--tee" not in line
    assert line.endswith("train.py --steps {num_steps} --log_dir mine")
    assert {"--log_dir", "--tee"} <= {part.what for part in found.read}
    assert "--log-dir" not in " ".join(wrapped("torchrun --log-dir=logs train.py --steps 9").argv)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("torchrun --nproc_per_node 8 train.py", "1 core for each rank"),
        ("python -m verl.trainer.main_ppo trainer.n_gpus_per_node=8", "1 core for Ray and all of its actors"),
        ("srun -N1 --gpus-per-node=8 -c 8 python train.py", ""),
        ("torchrun --nproc_per_node 8 train.py --use_cpu", ""),
    ],
)
def test_cores_are_requested_or_named(line: str, advice: str) -> None:
    advices = [part.advice for part in wrapped(line, steps=9).unread if part.what == "cores"]
    assert len(advices) == bool(advice)
    assert all(advice in text for text in advices)


def test_folders_that_an_image_may_lack_are_named() -> None:
    program = "torchrun --nproc_per_node 2 train.py --steps 9"
    for line in (f"apptainer exec --nv a.sif {program}", f"singularity run a.sif {program}"):
        found = wrapped(line)
        assert "bound by the run, with its scripts" in [part.place for part in found.read]
        assert [part.what for part in found.unread if "other folders" in part.what]
    enroot = wrapped(f"enroot start --rw --mount /data:/data image {program}")
    assert enroot.argv[:7] == ("enroot", "start", "--rw", "--mount", "/data:/data", "image", "torchrun")
    assert "{run_dir}" in " ".join(part.advice for part in enroot.unread if part.what.startswith("enroot"))


@pytest.mark.parametrize(
    ("line", "is_continued"),
    [
        (f"{HF.removesuffix('tensorboard')}wandb tensorboard", True),
        ("python -m verl.trainer.main_ppo trainer.logger=['console','wandb'] trainer.n_gpus_per_node=8", True),
        ("python -m openrlhf.cli.train_ppo_ray --use_wandb true", True),
        ("WANDB_PROJECT=x torchrun train.py", True),
        ("trl sft --config c.yaml", True),
        (HF, False),
        ("WANDB_RUN_ID=mine torchrun train.py --report_to wandb", False),
    ],
)
def test_all_starts_report_to_one_run_of_wandb(line: str, is_continued: bool) -> None:
    found = wrapped(line, {"c.yaml": "report_to: [wandb]\noutput_dir: o\n"}, steps=9)
    variables = setting(found, "trainer.variables") or {}
    assert (variables.get("WANDB_RUN_ID"), variables.get("WANDB_RESUME")) == (
        ("{run_id}", "allow") if is_continued else ("mine" if "mine" in line else None, None)
    )


def test_secrets_are_in_no_config() -> None:
    token = "hf_" + "a" * 20
    found = wrapped(f"HF_TOKEN={token} WANDB_API_KEY=abcdef python t.py --hub_token {token} --api_key=abcdef --lr 1")
    assert token not in found.text
    assert "abcdef" not in found.text
    assert setting(found, "slurm.pass_environment") == ["HF_TOKEN", "WANDB_API_KEY"]
    assert [*found.argv] == ["python", "t.py", "--lr", "1"]
    assert sum("it contains a secret" in part.what for part in found.unread) == 2


def test_options_that_name_a_column_or_a_special_token_are_no_secrets() -> None:
    line = "python t.py --input_key question --label_key answer --eos_token EOS"
    assert " ".join(wrapped(line).argv).startswith(line)


@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 2", "deepspeed --num_gpus 2", "accelerate launch"])
def test_a_mark_before_the_program_does_not_hide_the_options_of_the_launcher(launcher: str) -> None:
    assert wrapped(f"{launcher} -- t.py --steps 5").argv == wrapped(f"{launcher} t.py --steps 5").argv


def test_a_flag_gets_no_value() -> None:
    found = wrapped("python t.py --save --steps 5 --save_every --lr 1")
    assert found.argv == ("python", "t.py", "--save", "--steps", "{num_steps}", "--save_every", "--lr", "1")
    assert {"output folder", "checkpoints"} <= {part.what for part in found.unread}


def test_options_with_similar_names_are_not_all_replaced() -> None:
    """A folder of checkpoints may be that of the model to start from, and some steps those of a sampler."""
    found = wrapped("python t.py --num_steps 30 --max_train_steps 500 --checkpoint_dir models/m --out_dir out")
    assert found.num_steps == 500
    assert found.argv[2:] == (
        "--num_steps", "30", "--max_train_steps", "{num_steps}", "--checkpoint_dir", "models/m",
        "--out_dir", "{output_dir}",
    )  # fmt: skip
    unchanged = {part.what for part in found.unread if "unchanged" in part.what}
    assert unchanged == {
        "--num_steps 30: unchanged, --max_train_steps is {num_steps}",
        "--checkpoint_dir models/m: unchanged, --out_dir is {output_dir}",
    }


def test_placeholders_of_the_user_are_kept_and_shown() -> None:
    found = wrapped("python t.py --out {output_dir} --json '{\"a\": 1}' --x {thing}")
    assert found.argv[3] == "{output_dir}"
    assert any(part.what == "{output_dir} in the line" for part in found.read)


SWIFT = """#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=h100:4   # two
#SBATCH -t 02:30:00
#SBATCH --output=log
nproc_per_node=4
module load cuda/12
source venv/bin/activate
export NCCL_DEBUG=INFO
export MASTER_ADDR=$(scontrol show hostnames | head -n 1)
pip install -e .
CUDA_VISIBLE_DEVICES=7 swift rollout --model Q &
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
NPROC_PER_NODE=$nproc_per_node NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID \\
swift rlhf --rlhf_type grpo --max_steps ${STEPS:-50} --host $HOST_OF_SERVER \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) 2>&1 | tee log.txt
"""


def test_a_script_becomes_a_config() -> None:
    found = script(SWIFT)
    assert setting(found, "resources") == {
        "gpus_per_node": 4, "num_nodes": 2, "ranks_per_node": 4, "time_limit_s": 9000,
    }  # fmt: skip
    assert setting(found, "trainer.variables") == {"NCCL_DEBUG": "INFO", **MEETING}
    assert setting(found, "trainer.setup") == ["module load cuda/12"]
    assert setting(found, "trainer.environment") == "/home/u/venv"
    assert setting(found, "slurm.gpu_type") == "h100"
    assert found.num_steps == 50
    assert found.argv[found.argv.index("--gradient_accumulation_steps") + 1] == "4"
    missing = [part.what for part in found.unread]
    assert any(what.startswith("line 11: swift rollout") for what in missing)
    assert any(what.startswith("line 10: pip install") for what in missing)
    assert any(what.startswith("$HOST_OF_SERVER") for what in missing)
    # Settings decided by the run itself are no longer open.
    assert not any("SLURM" in what or "scontrol" in what for what in missing)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("srun hostname\npython t.py", "t.py"),
        ("srun torchrun --nproc_per_node 8 t.py\nsrun rm -rf /tmp/cache", "t.py"),
        ("srun --overlap -w $head ray start --head --block &\npython t.py", "t.py"),
        ("srun ./prepare.sh\ntorchrun --nproc_per_node 8 t.py\nsrun ./cleanup.sh", "t.py"),
        ("srun bash setup.sh\npython t.py", "t.py"),
        ("python t.py\nsrun --ntasks-per-node=1 ./clean_nodes.sh", "t.py"),
        # The negative controls: an own program in srun may train.
        ("python download.py\nsrun ./train --steps 5", "./train"),
        ("srun nvidia-smi\nsrun run.sh", "run.sh"),
        ("python download.py\nsrun bash train.sh", "train.sh"),
        ("python download.py\nsrun bash setup_and_train.sh\npython report.py", "setup_and_train.sh"),
        ("srun bash setup.sh", "setup.sh"),
    ],
)
def test_steps_of_srun_that_prepare_or_clean_nodes_do_not_train(text: str, program: str) -> None:
    assert program in script(text).argv


def test_a_limit_that_must_not_be_raised_does_not_end_the_run_either() -> None:
    """The setup of a run ends with the first error, the script does not."""
    found = script("ulimit -l unlimited || true\nmodule load cuda\ntorchrun train.py --max_steps 5\n")
    assert setting(found, "trainer.setup") == ["ulimit -l unlimited || true", "module load cuda"]


@pytest.mark.parametrize(
    ("lines", "environment"),
    [
        ("source /opt/conda/bin/activate", "/opt/conda"),
        ("source /opt/conda/bin/activate rl", "/opt/conda/envs/rl"),
        ("source /opt/conda/bin/activate ./rl", "/home/u/rl"),
        ("source /opt/conda/bin/activate\nconda activate rl", "/opt/conda/envs/rl"),
        (". /opt/conda/etc/profile.d/conda.sh && conda activate rl", "/opt/conda/envs/rl"),
        ("source /opt/conda/etc/profile.d/conda.sh\nconda activate", "/opt/conda"),
    ],
)
def test_a_conda_environment_is_found_by_name(lines: str, environment: str) -> None:
    found = script(f"{lines}\ntorchrun train.py --max_steps 5\n")
    assert setting(found, "trainer.environment") == environment
    assert not any("conda" in part.what for part in found.unread)


def test_an_environment_that_is_activated_in_a_branch_is_named() -> None:
    found = script(
        "if [ -d /a ]; then\n source /a/bin/activate\n module load x\nelse\n source /b/bin/activate\nfi\n"
        "torchrun t.py --max_steps 1"
    )
    assert setting(found, "trainer.environment") == "/b"
    assert [part.what for part in found.unread if "inside a branch" in part.what] == [
        "line 2 is inside a branch: source /a/bin/activate",
        "line 3 is inside a branch: module load x",
        "line 5 is inside a branch: source /b/bin/activate",
    ]


def test_a_line_composed_by_a_script_for_slurm() -> None:
    found = script(
        "#SBATCH --nodes=4\n#SBATCH --gres=gpu:2 --ntasks-per-node=1\nexport GPUS=2\n"
        "head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n"
        'export LAUNCHER="accelerate launch --num_processes $((SLURM_NNODES * GPUS)) --num_machines $SLURM_NNODES \\\n'
        '  --rdzv_backend c10d --main_process_ip $head --main_process_port 29500 --machine_rank \\$SLURM_PROCID"\n'
        'export CMD="$LAUNCHER train.py --max_steps 3"\nsrun $CMD\n'
    )
    assert setting(found, "resources") == {"gpus_per_node": 2, "num_nodes": 4, "ranks_per_node": 2}
    assert found.argv[:2] == ("accelerate", "launch")
    assert found.argv[-3:] == ("train.py", "--max_steps", "{num_steps}")
    assert "--main_process_ip" in found.argv
    assert not any("scontrol" in word or "SLURM" in word for word in found.argv)


BY_SLURM: dict[str, tuple[dict[str, Any], list[str]]] = {
    # options of sbatch: settings, reports
    "--nodes=2 --gres=gpu:h100:8 --mem=0 --exclusive": (
        {"resources.num_nodes": 2, "resources.gpus_per_node": 8, "resources.memory_gb": None,
         "slurm.gpu_type": "h100", "slurm.extra": ["--mem=0", "--exclusive"]}, [],
    ),
    "--exclusive=user": ({"slurm.extra": ["--exclusive=user"]}, []),
    "--mem=lots --mem-per-cpu=4G --mem-per-gpu=0": (
        {"resources.memory_gb": None, "slurm.extra": None}, ["--mem=lots", "--mem-per-cpu=4G", "--mem-per-gpu=0"],
    ),
    "--nodes=2 --tasks-per-node=8": ({"resources.num_nodes": 2, "resources.ranks_per_node": 8}, []),
    "--ntasks=16 --ntasks-per-node=8": ({"resources.num_nodes": 2, "resources.ranks_per_node": 8}, []),
    "--ntasks=12 --ntasks-per-node=8": (
        {"resources.num_nodes": 2, "resources.ranks_per_node": 8}, ["--ntasks=12 with 2 nodes, 8 on each"],
    ),
    "--ntasks=4 --ntasks-per-node=8": ({"resources.num_nodes": 1, "resources.ranks_per_node": 4}, []),
    "--nodes=3 --ntasks=16": ({"resources.num_nodes": 3}, ["--ntasks=16 with 3 nodes"]),
    "--gpus=16 --gpus-per-node=h100:8": (
        {"resources.num_nodes": 2, "resources.gpus_per_node": 8, "slurm.gpu_type": "h100"}, [],
    ),
    "--gpus=12 --gres=gpu:8": (
        {"resources.num_nodes": 2, "resources.gpus_per_node": 8}, ["--gpus=12 with 2 nodes, 8 on each"],
    ),
    "--nodes=2 --gpus=16": ({"resources.num_nodes": 2, "resources.gpus_per_node": 8}, []),
    "--nodes=2 --gpus=3": ({"resources.num_nodes": 2, "resources.gpus_per_node": 0}, ["--gpus=3 with 2 nodes"]),
    "--ntasks=16 --gpus-per-task=1 --gpus-per-node=8": (
        {"resources.num_nodes": 2, "resources.gpus_per_node": 8, "resources.ranks_per_node": 8}, [],
    ),
    "--nodes=2 --ntasks=16 --gpus-per-task=1": ({"resources.num_nodes": 2, "resources.gpus_per_node": 8}, []),
}  # fmt: skip


@pytest.mark.parametrize("options", BY_SLURM)
def test_options_of_sbatch_have_their_slurm_meaning(options: str) -> None:
    settings_, reports = BY_SLURM[options]
    found = script(f"#SBATCH {options}\nsrun python t.py --max_steps 1\n")
    assert {name: setting(found, name) for name in settings_} == settings_
    unread = [part.what.removeprefix("#SBATCH ") for part in found.unread if part.what.startswith("#SBATCH")]
    assert unread == reports


def test_a_step_shares_the_nodes_and_the_memory_of_its_job() -> None:
    found = script("#SBATCH --nodes=2 --mem=64G\nsrun --ntasks=16 --gpus=16 --mem=0 python t.py --max_steps 1\n")
    assert setting(found, "resources") == {
        "gpus_per_node": 8, "memory_gb": 64.0, "num_nodes": 2, "ranks_per_node": 8,
    }  # fmt: skip
    assert setting(found, "slurm.extra") is None


def test_options_of_srun_without_a_value_do_not_swallow_the_launcher() -> None:
    found = script("srun -K -l -u torchrun --nproc_per_node 8 t.py --max_steps 1\n")
    assert found.argv[:3] == ("torchrun", "--nproc_per_node", "{ranks_per_node}")
    assert setting(found, "resources.ranks_per_node") == 8
    assert [part.what for part in found.unread if "srun" in part.what] == []


def test_the_number_of_nodes_is_derived_from_the_tasks() -> None:
    found = script("#SBATCH --ntasks=16 --ntasks-per-node=8\npython t.py --max_steps 1 --ranks $((SLURM_NNODES * 8))\n")
    assert found.argv[-2:] == ("--ranks", "16")


def test_variables_known_only_to_a_shell_are_left_out_and_named() -> None:
    found = script("export A=$(hostname) B=2\ntorchrun t.py --max_steps 1")
    assert setting(found, "trainer.variables") == {"B": "2"}
    assert "variable A = $(hostname)" in [part.what for part in found.unread]


def test_an_unconditional_line_is_preferred_to_one_in_a_branch() -> None:
    found = script("torchrun a.py --max_steps 1\nif x; then torchrun b.py --max_steps 2; fi")
    assert found.num_steps == 1
    found = script("if [ -d data ]; then torchrun b.py --max_steps 2; fi")
    assert found.num_steps == 2
    assert any("is inside a branch" in part.what for part in found.unread)


def test_a_script_of_openrlhf_with_its_here_document() -> None:
    found = script(
        "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_dpo \\\n --save_path ./c \\\n --bf16\nEOF\n"
        'if [[ ${1} != "slurm" ]]; then\n torchrun --standalone --nproc-per-node ${N:-8} -m $training_commands\nfi\n',
        steps=5,
    )
    assert setting(found, "resources.ranks_per_node") == 8
    assert "openrlhf.cli.train_dpo" in found.argv
    assert "--bf16" in found.argv


def test_a_space_after_a_backslash_is_named() -> None:
    found = script("torchrun t.py --max_steps 1 \\ \n  --lr 1\n")
    assert any("remove any space after the backslash" in part.advice for part in found.unread)


def test_arguments_of_a_script() -> None:
    found = script('N=$1\nshift\ntorchrun --nproc_per_node=$N train.py "$@"', "4", "--lr", "1e-3")
    assert setting(found, "resources.ranks_per_node") == 4
    assert found.argv[-2:] == ("--lr", "1e-3")


@pytest.mark.parametrize("text", ["", "echo hello", "swift rollout --model x", "x 'a", "\x00", "# torchrun a.py"])
def test_a_script_without_a_training_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"found no line in s\.sh"):
        script(text)


@pytest.mark.parametrize(
    "argv",
    [
        [], [""], ["A=1"], ["torchrun"], ["torchrun", "--nnodes"], ["python", "t.py\x00"], ["python", "\ud800"],
        ["python", "t.py", *(["--lr", "1"] * 20_000)], ["python", "t.py", "é" * 90_000], ["python", "x" * 200_000],
    ],
)  # fmt: skip
def test_hostile_lines_are_refused_with_a_message(argv: list[str]) -> None:
    with pytest.raises(BadInput, match="found"):
        wrap_line(argv, around(), WrapOptions())


def test_control_characters_survive_the_config() -> None:
    argv = ["python", "t.py", "a\tb\r\n\x1b[0m\\\"'", "\u2028{seed}", "--a", "="]
    assert [*wrap_line(argv, around(), WrapOptions()).argv] == argv
    assert content(wrap_line(argv, around(), WrapOptions()))["trainer"]["argv"] == argv


def test_a_variable_that_a_config_cannot_represent_is_named() -> None:
    found = wrap_line(["A=\x1b", "B=1", "python", "t.py"], around(), WrapOptions())
    assert setting(found, "trainer.variables") == {"B": "1"}
    assert any("'A'" in part.what for part in found.unread)


def test_a_name_given_by_the_user_is_used_or_refused() -> None:
    assert setting(wrapped("python t.py", name="my-run_1"), "name") == "my-run_1"
    with pytest.raises(BadInput, match="--name"):
        wrapped("python t.py", name="My Run")


def test_a_framework_given_by_the_user_is_used() -> None:
    found = wrapped("torchrun t.py", framework="transformers", steps=3)
    assert setting(found, "trainer.framework") == "transformers"
    assert "--max_steps" in found.argv


def test_options_of_a_script_for_slurm() -> None:
    text = "#!/bin/sh\n#SBATCH -N 4   # nodes\n  #SBATCH --time=1:00 -J 'a\n##SBATCH -n 2\n"
    assert options_in(text) == ["-N", "4", "--time=1:00", "-J", "'a"]


def test_times_of_slurm() -> None:
    assert [slurm_seconds(text) for text in ("90", "1:30", "1:00:00", "2-3", "1-0:30", "0", "UNLIMITED", "")] == [
        5400, 90, 3600, 183_600, 88_200, None, None, None,
    ]  # fmt: skip


WORDS = st.sampled_from(
    shlex.split("""--lr 1e-6 --max_steps 5 --output_dir o --seed 3 --save_steps 2 --bf16 a.b=c --data x y --model m
    --resume_from_checkpoint true --nproc_per_node 2 --save_total_limit --x=1 -y -1 {seed} $A
    --report_to none""")
)
LAUNCHES = st.sampled_from(
    [
        ["torchrun", "--nproc_per_node", "2", "t.py"], ["swift", "rlhf"], ["trl", "dpo"], ["python", "-m", "a.b"],
        ["accelerate", "launch", "t.py"], ["deepspeed", "t.py"], ["llamafactory-cli", "train", "x.yaml"],
        ["srun", "-N", "2", "python", "t.py"], ["axolotl", "train", "x.yml"], ["./own"], ["mpirun", "-np", "2", "./t"],
    ]
)  # fmt: skip


@given(LAUNCHES, st.lists(WORDS | st.text(max_size=5), max_size=12))
@settings(max_examples=300)
def test_unknown_arguments_are_passed_through_unchanged(launch: list[str], words: list[str]) -> None:
    """The line started by a run has the original program and arguments, apart from replaced ones."""
    argv = [*launch, *words]
    items = read_launch_line(argv).items
    # Words after the value of a removed option belong to the program and are kept.
    assume(all(item.stop - item.start <= 2 for item in items if item.name in REPLACED))
    # So are those before and after it, which then look like an option and its value.
    left = [item for item in items if item.name not in REPLACED]
    assume(not any(before.stop < after.start and may_join(argv, before, after) for before, after in pairwise(left)))
    try:
        found = wrap_line(argv, around(), WrapOptions(steps=9))
    except RlhfError:
        return
    require_same_arguments(argv, found)


def may_join(argv: list[str], option: LaunchItem, word: LaunchItem) -> bool:
    """True for an option without a value, and an argument without dashes."""
    return option.stop == option.start + 1 and not argv[word.start].startswith("-")


def test_words_around_a_removed_option_are_kept() -> None:
    words = ["--lr", "--resume_from_checkpoint", "", "a.b=c"]
    found = wrap_line(["torchrun", "--nproc_per_node", "2", "t.py", *words], around(), WrapOptions(steps=9))
    assert found.argv[-2:] == ("--lr", "a.b=c")


def require_same_arguments(argv: list[str], found: WrappedLine) -> None:
    before, after = read_launch_line(argv), read_launch_line([fill(word, VALUES) for word in found.argv])
    assert fill(" ".join(before.program), VALUES) == " ".join(after.program)
    places = " ".join(found.argv)
    for name, words_before in before.arguments.items():
        values = tuple(fill(word, VALUES) for word in words_before)
        if name in after.arguments:
            now = after.arguments[name]
            changed = name in ("add_version", "save_strategy", "launcher") or "<" in "".join(now[:1])
            assert now[1:] == values[1:], (name, places)
            assert changed or now == values, (name, places)
        elif name not in after.arguments:
            assert name in REPLACED, (name, places)


def test_the_check_of_arguments_detects_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["torchrun", "t.py", "--seed", "3", "more", "--lr", "1"]
    require_same_arguments(argv, wrap_line(argv, around(), WrapOptions(steps=9)))

    def short(draft: Draft, index: int, value: str) -> None:
        draft.words[index] = (draft.line.argv[draft.line.items[index].start], value)

    monkeypatch.setattr(Draft, "replace", short)
    with pytest.raises(AssertionError, match="seed"):
        require_same_arguments(argv, wrap_line(argv, around(), WrapOptions(steps=9)))


def test_the_check_of_secrets_detects_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "without_secrets", lambda draft: None)
    assert "hf_" + "a" * 20 in wrapped(f"A=hf_{'a' * 20} python t.py").text


REPLACED = {"resume_from_checkpoint", "launcher", "num_processes", "nproc_per_node", "load_checkpoint"}
"""Options that are taken out: the run gives them, or axolotl's launcher has them in another place."""


def test_accelerate_is_told_to_use_cpus_without_gpus() -> None:
    """Otherwise it would train each rank separately. With GPUs, or without transformers, no option is needed."""
    line = "NPROC_PER_NODE=2 {} swift sft --model m --dataset d --max_steps 5"
    assert setting(wrapped(line.format("")), "trainer.variables") == {**MEETING, **PROCESSORS}
    assert setting(wrapped(line.format("CUDA_VISIBLE_DEVICES=0,1")), "trainer.variables") == MEETING
    own = setting(wrapped(line.format("ACCELERATE_USE_CPU=1")), "trainer.variables")
    assert own == {**MEETING, "ACCELERATE_USE_CPU": "1"}
    assert "ACCELERATE" not in wrapped("torchrun --nproc_per_node 2 train.py --max_steps 5").text
