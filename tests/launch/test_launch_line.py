"""Parsing of launch lines."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.shell.launch_line import LaunchLine, read_launch_line

LINES = {
    # line: launcher, options of the launcher, program, some of its arguments
    "torchrun --standalone --nproc-per-node=4 -m pkg.cli.train_dpo --bf16 --lr 1e-6 --shift -1 --files a b": (
        "torchrun", {"standalone": "", "nproc_per_node": "4", "m": ""}, ["pkg.cli.train_dpo"],
        {"bf16": (), "lr": ("1e-6",), "shift": ("-1",), "files": ("a", "b")},
    ),
    "python -m torch.distributed.run --nnodes 2 train.py c.yaml --a=b": (
        "torchrun", {"nnodes": "2"}, ["train.py"], {"a": ("b",)},
    ),
    "python3.11 -u -m torch.distributed.launch --nproc_per_node=4 --use_env run.py": (
        "torchrun", {"nproc_per_node": "4", "use_env": ""}, ["run.py"], {},
    ),
    "torchrun --rdzv-id 1 --rdzv-endpoint h:1 -- t.py -x": (
        "torchrun", {"rdzv_id": "1", "rdzv_endpoint": "h:1"}, ["t.py"], {"x": ()},
    ),
    "accelerate launch --config_file z3.yaml --multi_gpu --num_processes 8 grpo.py --config g.yaml": (
        "accelerate", {"config_file": "z3.yaml", "multi_gpu": "", "num_processes": "8"}, ["grpo.py"],
        {"config": ("g.yaml",)},
    ),
    "accelerate launch --same_network --machine_rank 0 -m axolotl.cli.train lora.yml": (
        "accelerate", {"same_network": "", "machine_rank": "0", "m": ""}, ["axolotl.cli.train"], {},
    ),
    "deepspeed --include localhost:0,1 --module openrlhf.cli.train_sft --x 1": (
        "deepspeed", {"include": "localhost:0,1", "module": ""}, ["openrlhf.cli.train_sft"], {"x": ("1",)},
    ),
    "deepspeed --num_nodes=2 --hostfile=h.txt train.py --deepspeed ds.json": (
        "deepspeed", {"num_nodes": "2", "hostfile": "h.txt"}, ["train.py"], {"deepspeed": ("ds.json",)},
    ),
    "swift rlhf --rlhf_type grpo --report_to tensorboard swanlab": (
        "swift", {}, ["swift", "rlhf"], {"rlhf_type": ("grpo",), "report_to": ("tensorboard", "swanlab")},
    ),
    "trl grpo --config g.yaml": ("trl", {}, ["trl", "grpo"], {"config": ("g.yaml",)}),
    "llamafactory-cli train x.yaml lr=1e-5": ("llamafactory", {}, ["llamafactory-cli", "train"], {"lr": ("1e-5",)}),
    "tune run --nproc_per_node 2 full_finetune_distributed --config llama3/8B epochs=1": (
        "torchtune", {"nproc_per_node": "2"}, ["full_finetune_distributed"],
        {"config": ("llama3/8B",), "epochs": ("1",)},
    ),
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo +data.x=1": (
        "python", {"m": ""}, ["verl.trainer.main_ppo"], {"algorithm.adv_estimator": ("grpo",), "data.x": ("1",)},
    ),
    "mpirun -np 8 --allow-run-as-root python -u t.py --q": (
        "mpirun", {"np": "8", "allow_run_as_root": "", "u": ""}, ["t.py"], {"q": ()},
    ),
    "srun -N 2 --gres=gpu:4 --exclusive python -u t.py 1": ("srun", {"u": ""}, ["t.py"], {}),
    "torchrun -m --nproc_per_node=8 pkg.t --x": ("torchrun", {"m": "", "nproc_per_node": "8"}, ["pkg.t"], {"x": ()}),
    "accelerate launch -m --num_processes 8 pkg.t": ("accelerate", {"m": "", "num_processes": "8"}, ["pkg.t"], {}),
    "deepspeed --module --num_gpus 8 pkg.t": ("deepspeed", {"module": "", "num_gpus": "8"}, ["pkg.t"], {}),
    "mpirun --mca btl ^openib --report-bindings -np 4 -x A=1 python t.py": (
        "mpirun", {"mca": "btl", "report_bindings": "", "np": "4", "x": "A=1"}, ["t.py"], {},
    ),
    "python -Wignore -Xdev t.py": ("python", {"Wignore": "", "Xdev": ""}, ["t.py"], {}),
    "srun --label torchrun t.py": ("torchrun", {}, ["t.py"], {}),
    "/env/bin/python t.py --seed 3 --seed 4": ("python", {}, ["t.py"], {"seed": ("4",)}),
    "python -c 'import x' 1": ("python", {"c": "import x"}, ["1"], {}),
    "./run.sh a": ("", {}, ["./run.sh"], {}),
    "torchrun": ("torchrun", {}, [], {}),
    "swift": ("", {}, ["swift"], {}),
    "": ("", {}, [], {}),
}  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_parts_of_a_line(text: str) -> None:
    launcher, options, program, arguments = LINES[text]
    found = read_launch_line(shlex.split(text))
    assert found.launcher == launcher
    assert found.launcher_options == options
    assert [*found.program] == program
    assert found.arguments == arguments


def test_variables_and_programs_in_front() -> None:
    found = read_launch_line(shlex.split("A=1 env -i B=2 nohup nice -n 5 uv run --extra gpu torchrun t.py"))
    assert found.variables == {"A": "1", "B": "2"}
    assert [wrapper.name for wrapper in found.wrappers] == ["env", "nohup", "nice", "uv"]
    assert found.wrappers[-1].options == {"extra": "gpu"}
    assert (found.launcher, found.program) == ("torchrun", ("t.py",))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("srun -N 2 -p gpu --mem=0 --exclusive python t.py", {"N": "2", "p": "gpu", "mem": "0", "exclusive": ""}),
        ("srun -N2 -n=8 python t.py", {"N": "2", "n": "8"}),
        ("srun -K -l --kill-on-bad-exit torchrun t.py", {"K": "", "l": "", "kill_on_bad_exit": ""}),
        ("srun -K1 torchrun t.py", {"K": "1"}),
        ("uv run --all-extras --no-dev --extra gpu torchrun t.py", {"all_extras": "", "no_dev": "", "extra": "gpu"}),
        ("numactl -m 0 -N 0 -l torchrun t.py", {"m": "0", "N": "0", "l": ""}),
        ("sudo -E torchrun t.py", {"E": ""}),
        ("time -p torchrun t.py", {"p": ""}),
        ("stdbuf -oL python t.py", {"o": "L"}),
        ("ray job submit --address=http://h:1 --no-wait -- python t.py", {"address": "http://h:1", "no_wait": ""}),
        ("apptainer exec --nv --bind /a:/b image.sif python t.py", {"nv": "", "bind": "/a:/b"}),
        ("conda run -n e --no-capture-output python t.py", {"n": "e", "no_capture_output": ""}),
    ],
)
def test_options_of_programs_in_front(text: str, options: dict[str, str]) -> None:
    found = read_launch_line(shlex.split(text))
    assert found.wrappers[0].options == options
    assert found.program == ("t.py",)


def test_config_files() -> None:
    found = read_launch_line(
        shlex.split("accelerate launch --config_file a.yaml t.py b.json --deepspeed zero3 --lr x.y")
    )
    assert found.config_files == ("a.yaml", "b.json")


def words(found: LaunchLine) -> list[str]:
    return [word for item in found.items for word in found.argv[item.start : item.stop]]


PIECES = st.sampled_from(
    shlex.split(
        """torchrun accelerate launch deepspeed swift rlhf trl grpo srun -N env A=1 python -m -u -c -- - --x --y=1 -n 8
        ray job submit tune run mpirun -x t.py c.yaml nohup uv exec bash torch.distributed.run a.b=c image apptainer
        accelerate.commands.accelerate_cli --nproc_per_node -N2"""
    )
)


@given(st.lists(PIECES | st.text(max_size=6), max_size=14))
@settings(max_examples=600)
def test_any_words_are_parsed_and_each_belongs_to_one_part(argv: list[str]) -> None:
    found = read_launch_line(argv)
    assert words(found) == argv
    assert found.argv == tuple(argv)


def test_a_long_line_is_parsed_in_time() -> None:
    argv = ["torchrun", *(["--a"] * 100_000), "t.py", *(["x=1", "--b", "y"] * 100_000)]
    assert len(words(read_launch_line(argv))) == len(argv)
