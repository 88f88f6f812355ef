"""`rlhf wrap` of launch scripts: the training behind arrays, functions, branches, other scripts and wrappers."""

import shlex
import tomllib
from typing import Any

import pytest

from rlhf_core.errors import BadInput
from rlhf_core.launch.wrap.draft import WrapSurroundings
from rlhf_core.launch.wrap.wrapping import WrapOptions, WrappedLine, wrap_line, wrap_script

JOB = "#SBATCH --nodes=2\n#SBATCH --gres=gpu:8\n#SBATCH --ntasks-per-node=1\n"
TRAIN = "torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 train.py --max_steps 300 --output_dir out"
MEGATRON = """
GPUS=8
DISTRIBUTED=(
    --nproc_per_node $GPUS   # of a node
    --nnodes 2
)
TRAINING=(--train-iters 500 --save ckpt/a --load ckpt/a --save-interval 50)
TRAINING+=(--lr 1e-5)
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py "${TRAINING[@]}"
"""


def around(files: dict[str, str] | None = None) -> WrapSurroundings:
    return WrapSurroundings("/home/u", (files or {}).get)


def script(text: str, *arguments: str, files: dict[str, str] | None = None) -> WrappedLine:
    return wrap_script(text, "s.sh", around(files), WrapOptions(), {"HOME": "/home/u"}, arguments)


def line(text: str, files: dict[str, str] | None = None) -> WrappedLine:
    return wrap_line(shlex.split(text), around(files), WrapOptions())


def config(found: WrappedLine) -> dict[str, Any]:
    return tomllib.loads(found.text)


def unread(found: WrappedLine) -> str:
    return "\n".join(f"{part.what} -> {part.advice}" for part in found.unread)


def test_arrays_of_options() -> None:
    found = script(MEGATRON)
    resources = config(found)["resources"]
    assert (resources["num_nodes"], resources["ranks_per_node"], found.num_steps) == (2, 8, 500)
    assert config(found)["checkpoint"]["every_num_steps"] == 50
    assert "pretrain_gpt.py" in found.argv
    assert "--lr" in found.argv
    assert "$" not in " ".join(found.argv)
    assert "--load ckpt/a: in the former output folder" in unread(found)


@pytest.mark.parametrize("call", ['eval "$CMD"', "eval $CMD", "$CMD", 'srun bash -c "$CMD"'])
def test_a_command_composed_in_a_variable(call: str) -> None:
    found = script(f'export RUN=r1\nexport CMD="{TRAIN.replace("$SLURM_NNODES", "2")} --run_name $RUN"\n{call}')
    assert found.num_steps == 300
    assert found.argv[-2:] == ("--run_name", "r1")
    assert "CMD" not in config(found)["trainer"].get("variables", {})


def test_options_that_a_script_reads_from_its_arguments() -> None:
    text = "LR=1\nwhile [[ $# -gt 0 ]]; do\n case $1 in\n  --lr | -l ) LR=$2; shift 2 ;;\n  *) exit 1 ;;\n esac\ndone\n"
    text += 'if [ "$LR" == "" ]; then LR=2; fi\ntorchrun t.py --learning_rate $LR --max_steps 9'
    assert script(text).argv[-3:-2] == ("1",)
    found = script(text, "--lr", "3e-4")
    assert found.argv[-3:-2] == ("3e-4",)
    assert "space after the backslash" not in unread(found)
    assert "line" not in unread(found)


def test_several_arguments_are_shifted_at_once() -> None:
    found = script(
        'N=$1; OUT=$2\nshift 2\ntorchrun --nproc_per_node $N t.py --max_steps 9 --output_dir $OUT "$@"', "4", "o", "--x"
    )
    assert found.argv[-1] == "--x"
    assert "o" not in found.argv


def test_arguments_that_are_missing_are_named() -> None:
    found = script("torchrun t.py --model $1 --max_steps 9 --seed ${2:-7}")
    assert "$1: the script has no such argument" in unread(found)
    assert "such argument" not in unread(script("if [[ $1 != slurm ]]; then torchrun t.py --max_steps 9; fi"))
    with pytest.raises(BadInput, match=r"\$1: the script has no such argument"):
        script('if [ "$1" = train ]; then torchrun t.py; fi')


def test_functions() -> None:
    text = 'launch() { torchrun --nproc_per_node $1 t.py "${ARGS[@]}"; }\nunused() { torchrun never.py; }\n'
    found = script(f"{text}main() {{ ARGS=(--max_steps 9); launch 4; }}\nmain")
    assert (found.num_steps, config(found)["resources"]["ranks_per_node"]) == (9, 4)
    assert "unused" not in unread(found)
    assert "never" not in unread(found)


@pytest.mark.parametrize(
    "call",
    [
        "bash scripts/inner.sh 4 --lr 1",
        "bash -x scripts/inner.sh 4 --lr 1",
        "scripts/inner.sh 4 --lr 1",
        "nohup bash -e -o pipefail scripts/inner.sh 4 --lr 1",
        "SEED=3 srun -N 2 scripts/inner.sh 4 --lr 1",
        "sbatch -N 2 --parsable scripts/inner.sh 4 --lr 1",
        "./launch 4 --lr 1",
    ],
)
def test_a_script_that_another_line_runs(call: str) -> None:
    inner = f'#!/usr/bin/env bash\n{JOB}N=$1\nshift\n{TRAIN.replace("8", "$N")} --seed ${{SEED:-3}} "$@"'
    files = {"/home/u/scripts/inner.sh": inner, "/home/u/launch": inner}
    for found in (line(call, files), script(f"cd /home/u\n{call} | tee log", files=files)):
        resources = config(found)["resources"]
        assert (resources["num_nodes"], resources["ranks_per_node"], resources["gpus_per_node"]) == (2, 4, 8)
        assert (found.num_steps, config(found)["seed"]) == (300, 3)
        assert found.argv[-2:] == ("--lr", "1")


def test_options_of_sbatch_precede_those_in_the_script() -> None:
    found = line("sbatch --nodes=4 --time 1:00 -J mine job.slurm", {"/home/u/job.slurm": JOB + TRAIN})
    assert config(found)["resources"]["num_nodes"] == 4
    assert config(found)["resources"]["time_limit_s"] == 60
    assert config(found)["name"] == "mine"


@pytest.mark.parametrize("call", ["sbatch <<EOF", "cat <<EOF | sbatch"])
def test_a_job_in_a_here_document(call: str) -> None:
    found = script(f"STEPS=40\n{call}\n#!/bin/bash\n{JOB}srun torchrun --nproc_per_node 8 t.py --max_steps $STEPS\nEOF")
    assert (found.num_steps, config(found)["resources"]["num_nodes"]) == (40, 2)


def test_a_script_that_the_script_writes_itself() -> None:
    export = "export MASTER_ADDR=$(scontrol show hostnames | head -n 1)\n"
    text = f"{JOB}cat > node.sh <<'EOF'\n{TRAIN} --addr $MASTER_ADDR\nEOF\nchmod +x node.sh\n{export}srun bash node.sh"
    found = script(text)
    assert (found.num_steps, config(found)["resources"]["num_nodes"]) == (300, 2)
    assert found.argv[-1] == "$MASTER_ADDR"
    assert "node.sh" not in unread(found)
    assert "file zero.json, written in line 1" in unread(script("cat > zero.json <<EOF\n{}\nEOF\ntorchrun t.py"))


def test_a_script_that_cannot_be_read_is_named() -> None:
    assert "the script train.sh: it could not be read" in unread(script("srun train.sh --max_steps 3"))


def test_lines_of_bash_that_do_not_train_are_not_chosen() -> None:
    text = f'{JOB}srun -N 1 bash -c "pip install ray && ray start --head --block" &\nsrun {TRAIN}\n'
    found = script(text)
    assert found.num_steps == 300
    assert "several lines train" not in unread(found)
    assert "it runs beside the training" in unread(found)


def test_a_container_around_a_shell_stays() -> None:
    found = script("singularity exec --nv /i.sif bash -c '\nsource /env.sh\npython t.py --max_steps 9\n'")
    assert found.argv[:6] == ("singularity", "exec", "--nv", "/i.sif", "python", "t.py")
    assert "line 2: source /env.sh" in unread(found)
    assert line("apptainer run --nv i.sif python t.py").argv[:4] == ("apptainer", "run", "--nv", "i.sif")


def test_docker_is_removed_with_advice() -> None:
    found = line(
        "docker run -it --rm --gpus all -v /a:/b grpo:dev accelerate launch --num_processes 4 t.py --max_steps 5"
    )
    assert found.argv[:2] == ("accelerate", "launch")
    assert config(found)["resources"]["ranks_per_node"] == 4
    assert "without the image grpo:dev" in unread(found)


RAY = [
    ("srun --overlap -N 1 -n 1 -w h python -m verl.trainer.main_ppo trainer.nnodes=2 trainer.n_gpus_per_node=8", 2),
    ("ray job submit -- python -m recipe.dapo.src.main_dapo trainer.nnodes=16 trainer.n_gpus_per_node=8", 16),
    ("ray job submit -- python train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate", 1),
    ("uv run python examples/run_grpo.py cluster.num_nodes=3 cluster.gpus_per_node=8 grpo.max_num_steps=7", 3),
]


@pytest.mark.parametrize(("text", "nodes"), RAY)
def test_programs_of_ray_are_started_once_on_every_node(text: str, nodes: int) -> None:
    found = line(text)
    assert config(found)["trainer"]["launch"] == "per_node"
    assert config(found)["resources"] == {"num_nodes": nodes, "ranks_per_node": 1, "gpus_per_node": 8}
    assert ("{drivers}/ray_node.sh" in found.argv) == (nodes > 1)


def test_the_step_of_a_driver_does_not_take_the_nodes_of_its_job() -> None:
    found = script(f"{JOB}srun -N 1 -n 1 python -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --ref_num_nodes 1")
    assert config(found)["resources"]["num_nodes"] == 2


def test_variables_of_ray() -> None:
    found = line("""ray job submit --runtime-env-json='{"env_vars": {"NCCL_DEBUG": "WARN"}}' -- python train.py""")
    assert config(found)["trainer"]["variables"] == {"NCCL_DEBUG": "WARN"}
    assert "runtime-env-json" not in unread(found)
    assert "runtime-env-json" in unread(line("ray job submit --runtime-env-json='{' -- python train.py"))


def test_variables_that_extend_themselves_are_set_by_the_shell_of_the_job() -> None:
    found = script(
        'export PATH=/x/bin:$PATH\nexport A=$(date)\nexport PYTHONPATH="${PYTHONPATH}:src"\ntorchrun t.py --max_steps 9'
    )
    assert config(found)["trainer"]["setup"] == ['export PATH="/x/bin:$PATH"', 'export PYTHONPATH="$PYTHONPATH:src"']
    assert "variable A" in unread(found)


def test_an_environment_is_found_although_other_variables_are_unknown() -> None:
    found = script("export PATH=/x:$PATH\nsource venv/bin/activate\ncd work\ntorchrun t.py --max_steps 9")
    trainer = config(found)["trainer"]
    assert (trainer["environment"], trainer["working_dir"]) == ("/home/u/venv", "/home/u/work")


def test_preparations_in_a_subshell_end_with_it() -> None:
    before = "export M=a\n(cd tools && source venv/bin/activate && module load gcc && M=b pip install -e .)\n"
    found = script(f"{before}cd work\ntorchrun t.py --max_steps 9 --model $M")
    trainer = config(found)["trainer"]
    assert trainer["working_dir"] == "/home/u/work"
    assert "environment" not in trainer
    assert "setup" not in trainer
    assert found.argv[-1] == "a"
    inside = script(f"(cd tools; (cd other; make)\nmodule load gcc; {TRAIN}\n)")
    assert config(inside)["trainer"]["working_dir"] == "/home/u/tools"
    assert config(inside)["trainer"]["setup"] == ["module load gcc"]


def test_a_line_after_the_end_of_a_script_is_not_chosen() -> None:
    found = script(f"{TRAIN}\nexit 0\ntorchrun old.py --max_steps 9")
    assert "train.py" in found.argv
    assert "several lines train" not in unread(found)


def test_the_hook_of_conda_is_kept() -> None:
    found = script('eval "$(conda shell.bash hook)"\nconda activate llm\ntorchrun t.py --max_steps 9')
    assert config(found)["trainer"]["setup"] == ['eval "$(conda shell.bash hook)"', "conda activate llm"]


def test_conda_is_made_ready_in_the_order_of_the_script() -> None:
    """A job runs no ~/.bashrc, and `conda` may be on a PATH that the script sets."""
    found = script(
        "module load gcc\nexport PATH=/opt/conda/bin:$PATH\nsource ~/.bashrc\nconda activate llm\n"
        "export PYTHONPATH=/src:$PYTHONPATH\ntorchrun t.py --max_steps 9"
    )
    assert config(found)["trainer"]["setup"] == [
        "module load gcc",
        'export PATH="/opt/conda/bin:$PATH"',
        'eval "$(conda shell.bash hook)"',
        "conda activate llm",
        'export PYTHONPATH="/src:$PYTHONPATH"',
    ]


@pytest.mark.parametrize("line", ["source activate llm", "mamba activate llm", "micromamba activate llm"])
def test_other_ways_to_activate_an_environment_are_kept(line: str) -> None:
    found = script(f"{line}\ntorchrun t.py --max_steps 9")
    assert config(found)["trainer"]["setup"] == [line]
    assert unread(found).count(line) == 1


@pytest.mark.parametrize(
    ("options", "nodes", "ranks"),
    [("--gres=gpu:4", 1, 4), ("--nodes=2 --gpus-per-task=4 --ntasks-per-node=1", 2, 4), ("-N 3 --gpus 12", 3, 4)],
)
def test_variables_that_slurm_sets(options: str, nodes: int, ranks: int) -> None:
    text = "torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE t.py --max_steps 9"
    found = script(f'#SBATCH {options}\ncd "$SLURM_SUBMIT_DIR"\n{text}')
    resources = config(found)["resources"]
    assert (resources["num_nodes"], resources["ranks_per_node"]) == (nodes, ranks)
    assert "cd" not in unread(found)


def test_a_step_knows_the_nodes_of_its_job() -> None:
    step = "srun --kill-on-bad-exit=1 bash -c 'torchrun --nnodes $SLURM_NNODES t.py --max_steps 9'"
    assert config(script(f"#SBATCH -N 4\n{step}"))["resources"]["num_nodes"] == 4


def test_scripts_that_run_each_other_come_to_an_end() -> None:
    files = {"/home/u/a.sh": "bash b.sh\n" * 8 + "source a.sh\n" * 8, "/home/u/b.sh": "bash a.sh\nbash b.sh\n" * 8}
    with pytest.raises(BadInput, match="found no line"):
        script("bash a.sh\n" * 8, files=files)


def test_an_unknown_word_before_the_options_of_a_launcher() -> None:
    found = script('accelerate launch $EXTRA "${MORE[@]}" --num_processes 4 t.py --max_steps 9')
    assert config(found)["resources"]["ranks_per_node"] == 4
    assert found.argv[-3:] == ("t.py", "--max_steps", "{num_steps}")


def test_arrays_of_jobs_and_abbreviated_options() -> None:
    found = script(
        "#SBATCH --array=0-3\n#SBATCH --err=x.err\n#SBATCH --container-writable\ntorchrun t.py --max_steps 9"
    )
    assert "#SBATCH --array=0-3 -> a run is one job" in unread(found)
    assert "err" not in unread(found)
    assert "#SBATCH --container-writable -> " in unread(found)


def test_options_in_the_recipe_of_a_program_of_trl() -> None:
    recipe = (
        "output_dir: data/out\nmax_steps: 80\nsave_steps: 20\nper_device_train_batch_size: 4\nnum_train_epochs: 1\n"
    )
    found = line("accelerate launch --num_processes 4 sft.py --config r.yaml", {"r.yaml": recipe})
    assert config(found)["trainer"]["framework"] == "transformers"
    assert found.num_steps == 80
    assert config(found)["checkpoint"]["every_num_steps"] == 20
    assert found.argv[-6:-4] == ("--max_steps", "{num_steps}")


def test_a_recipe_of_llamafactory_that_torchrun_starts() -> None:
    recipe = "stage: dpo\nfinetuning_type: lora\nmax_steps: 80\noutput_dir: saves\n"
    found = line("torchrun --nproc_per_node 4 src/train.py r.yaml", {"r.yaml": recipe})
    assert found.argv[-4:] == (
        "r.yaml",
        "max_steps={num_steps}",
        "output_dir={output_dir}",
        "save_steps={checkpoint_every}",
    )
    assert config(found)["trainer"]["algorithm"] == "dpo"


def test_the_model_is_that_of_the_first_name_for_it() -> None:
    found = line("swift sft --model Qwen/Q --model_name my-robot --gradient_accumulation_steps 16 --max_steps 9")
    assert [part.found for part in found.read if part.what == "model"] == ["Qwen/Q"]
    assert "batch: 16 accumulated" in unread(found)
