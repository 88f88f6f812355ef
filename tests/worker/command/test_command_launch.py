"""Launch lines and environments of other programs, filled in from the rank and node of a worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from program_contexts import context_of, trainer_of

from rlhf_core.presets import drivers_folder
from rlhf_core.schemas.command_trainer import PLACEHOLDERS
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command.launch import IN_RANK, LaunchOrder, LaunchPlace
from rlhf_core.worker.in_rank.rlhf_rank_file import PID, RankFile, rank_path

ORDER = LaunchOrder(address="10.0.0.1", port=29511)


def place_of(context: WorkerContext, order: LaunchOrder = ORDER) -> LaunchPlace:
    return LaunchPlace(context, trainer_of(context), order)


def test_every_placeholder_has_a_value(tmp_path: Path) -> None:
    values = place_of(context_of(tmp_path)).values
    assert set(values) == set(PLACEHOLDERS)


def test_a_line_is_filled_for_its_node(tmp_path: Path) -> None:
    argv = ["torchrun", "--nnodes={num_nodes}", "--node-rank={node_rank}", "--nproc={ranks_per_node}", '{"a": {x}}']
    line = place_of(context_of(tmp_path, rank=2, num_nodes=2, argv=argv)).arguments()
    assert line == ["torchrun", "--nnodes=2", "--node-rank=1", "--nproc=2", '{"a": {x}}']


def test_a_relative_output_folder_is_in_the_folder_that_the_program_starts_in(tmp_path: Path) -> None:
    context = context_of(
        tmp_path, argv=["run", "{output_dir}"], working_dir="/home/u", output_dir="out/{run_id}", launch="per_rank"
    )
    folder = f"/home/u/out/{context.run_dir.run_id}"
    assert place_of(context).arguments() == ["run", folder]
    assert str(place_of(context).output_dir) == folder


def test_a_program_with_a_relative_path_is_in_the_folder_that_it_starts_in(tmp_path: Path) -> None:
    """The worker itself is in the folder of its job."""
    script = tmp_path / "code" / "run.sh"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    place = place_of(context_of(tmp_path, argv=["./run.sh"], working_dir=str(script.parent)))
    assert place.program("/usr/bin") == str(script)
    assert place_of(context_of(tmp_path, argv=["./run.sh"])).program(str(script.parent)) is None
    assert place_of(context_of(tmp_path, argv=["run.sh"])).program(str(script.parent)) == str(script)


def test_variables_may_come_before_the_program(tmp_path: Path) -> None:
    """As preflight reads them."""
    argv = ["A=1", "RANKS={ranks_per_node}", "sh", "-c", "echo $A $RANKS"]
    for setup in ([], ["B=2"]):
        place = place_of(context_of(tmp_path, argv=argv, setup=setup))
        program = place.program("/usr/bin:/bin")
        assert program is not None
        done = subprocess.run([program, *place.arguments()[1:]], capture_output=True, text=True, check=True)
        assert done.stdout == "1 2\n"


def test_shell_lines_come_before_it_in_the_same_shell(tmp_path: Path) -> None:
    line = place_of(context_of(tmp_path, argv=["run", "a b"], setup=["module load cuda"])).arguments()
    assert line[:2] == ["bash", "-c"]
    assert line[2].splitlines() == ["set -e", "module load cuda", 'exec "$@"']
    assert line[4:] == ["run", "a b"]


def test_programs_of_the_environment_precede_those_of_the_shell_lines(tmp_path: Path) -> None:
    """As in the script of a user, who loads modules before the environment."""
    folder = tmp_path / "with space"
    setup = ["PATH=/modules/python/bin:$PATH"]
    line = place_of(context_of(tmp_path, argv=["/usr/bin/printenv", "PATH"], setup=setup, environment=str(folder)))
    done = subprocess.run(line.arguments(), env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder}/bin:/modules/python/bin:/usr/bin:/bin\n"


def test_a_launcher_does_not_inherit_the_rank_of_its_worker(tmp_path: Path) -> None:
    """With RANK and TORCHELASTIC_USE_AGENT_STORE, torchrun's ranks would wait for a store that no process opens."""
    base = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "GROUP_SIZE": "8",
        "RLHF_SLOTS": "/dev/shm/slots",
        "PATH": "/usr/bin",
        "HOME": "/root",
    }
    per_node = place_of(context_of(tmp_path)).environment("/s", base, Path("/venv"))
    assert not per_node.keys() & (base.keys() - {"GROUP_SIZE", "PATH", "HOME"})
    assert per_node["GROUP_SIZE"] == "8", "a variable of the user"
    assert (per_node["MASTER_ADDR"], per_node["MASTER_PORT"]) == ("10.0.0.1", "29511")
    assert (per_node["NNODES"], per_node["NODE_RANK"], per_node["NPROC_PER_NODE"]) == ("1", "0", "2")
    assert (per_node["PATH"], per_node["HOME"]) == ("/venv/bin:/usr/bin", "/root")
    per_rank = place_of(context_of(tmp_path, launch="per_rank")).environment("/s", base, None)
    assert (per_rank["RANK"], per_rank["TORCHELASTIC_USE_AGENT_STORE"]) == ("1", "True")
    assert "RLHF_SLOTS" not in per_rank


def environment_with(folder: Path, **versions: str) -> str:
    """A virtual environment with packages and their programs, as pip leaves them."""
    (folder / "bin").mkdir(parents=True)
    for name, version in versions.items():
        program = folder / "bin" / name
        program.write_text(f"#!{folder}/bin/python\n")
        program.chmod(0o755)
        packages = folder / "lib" / "python3.11" / "site-packages" / f"{name}-{version}.dist-info"
        packages.mkdir(parents=True)
        (packages / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def test_accelerate_gets_the_folder_for_the_output_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads PET_REDIRECTS and not PET_LOG_DIR: torch would put the output into a temporary folder, unseen."""
    folder = environment_with(tmp_path / "venv", accelerate="1.2.0", trl="0.18.1")
    argv = ["accelerate", "launch", "--num_processes", "2", "-m", "theirs.train", "--log_dir", "of_the_program"]
    context = context_of(tmp_path, argv=argv, environment=folder, setup=["module load cuda"])
    logs = f"--log_dir={context.restart_dir.rank_output / context.node}"
    assert place_of(context).arguments()[4:] == [*argv[:2], logs, *argv[2:]]
    line = place_of(context_of(tmp_path, argv=["trl", "sft", "--bf16"], environment=folder)).arguments()
    assert (line[:3], line[-1].partition("=")[0]) == (["trl", "sft", "--bf16"], "--log_dir")
    for argv in (
        ["torchrun", "t.py"],
        ["trl", "sft", "--log_dir", "x"],
        ["accelerate", "launch", "--log_dir=x", "t.py"],
    ):
        place = place_of(context_of(tmp_path, argv=argv, environment=folder))
        assert place.arguments() == argv
        assert place.environment("/s", {}, None)["PET_REDIRECTS"] == "3"
    monkeypatch.setenv("PATH", f"{folder}/bin")
    assert "--log_dir=" in str(place_of(context_of(tmp_path, argv=["accelerate", "launch", "t.py"])).arguments())


@pytest.mark.parametrize(
    ("argv", "versions"),
    [
        (["accelerate", "launch", "t.py"], {"accelerate": "0.30.1"}),
        (["accelerate", "launch", "t.py"], {}),
        (["trl", "sft"], {"accelerate": "1.2.0", "trl": "0.17.0"}),
        (["trl", "sft"], {"trl": "0.18.0"}),
        (["apptainer", "exec", "a.sif", "accelerate", "launch", "t.py"], {"accelerate": "1.2.0"}),
    ],
)
def test_a_launcher_that_may_lack_the_option_prints_the_output_of_its_ranks(
    argv: list[str], versions: dict[str, str], tmp_path: Path
) -> None:
    """Accelerate before 0.31 and trl before 0.18 refuse ``--log_dir``."""
    folder = environment_with(tmp_path / "venv", **versions)
    place = place_of(context_of(tmp_path, argv=argv, environment=folder, variables={"PATH": "/nowhere"}))
    assert place.arguments() == argv
    assert not [name for name in place.environment("/s", {}, Path(folder)) if name.startswith("PET_")]


def test_the_folders_of_the_run_are_bound_into_an_image_of_apptainer(tmp_path: Path) -> None:
    context = context_of(tmp_path, argv=["apptainer", "exec", "--nv", "a.sif", "{drivers}/ray_node.sh", "python"])
    folders = [str(context.run_dir.root), str(drivers_folder()), str(IN_RANK)]
    found = place_of(context).environment("/s", {"APPTAINER_BIND": "/data"}, None)
    assert found["APPTAINER_BIND"].split(",") == ["/data", *folders]
    of_singularity = context_of(tmp_path, argv=["singularity", "run", "a.sif", "python", "t.py"])
    bound = place_of(of_singularity).environment("/s", {}, None)["SINGULARITY_BIND"].split(",")
    assert bound == [str(of_singularity.run_dir.root), *folders[1:]]
    assert not [name for name in place_of(context_of(tmp_path)).environment("/s", {}, None) if "BIND" in name]


@pytest.mark.parametrize("program", ["apptainer", "singularity"])
def test_folders_bound_under_either_name_stay_bound(program: str, tmp_path: Path) -> None:
    """Of two variables that differ, Apptainer reads only APPTAINER_BIND, also when it is installed as singularity."""
    context = context_of(tmp_path, argv=[program, "exec", "a.sif", "python"])
    given = {"SINGULARITY_BIND": "/data,/models:/m:ro", "APPTAINER_BIND": "/scratch,/data"}
    found = place_of(context).environment("/s", given, None)
    assert found["APPTAINER_BIND"] == found["SINGULARITY_BIND"]
    folders = [str(context.run_dir.root), str(drivers_folder()), str(IN_RANK)]
    assert found["APPTAINER_BIND"].split(",") == ["/scratch", "/data", "/models:/m:ro", *folders]


def test_a_rank_has_the_task_numbers_that_srun_would_have_given_it(tmp_path: Path) -> None:
    """The agent is one task on each node, and a program that reads its rank from Slurm would take the agent's."""
    base = {
        "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }  # fmt: skip
    place = place_of(context_of(tmp_path, rank=3, num_nodes=2, launch="per_rank"))
    found = place.environment("/s", base, None)
    assert {name: value for name, value in found.items() if name.startswith("SLURM_")} == {
        "SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }  # fmt: skip
    assert "SLURM_PROCID" not in place.environment("/s", {}, None)
    per_node = place_of(context_of(tmp_path, rank=2, num_nodes=2)).environment("/s", base, None)
    assert per_node["SLURM_PROCID"] == "1"


def test_helpers_of_actors_of_ray_do_not_report_as_ranks(tmp_path: Path) -> None:
    """An actor sets LOCAL_RANK after its start, and a Python program that it starts would report in its place."""
    programs = {"actors": ["python", "-m", "openrlhf.cli.train_ppo_ray"], "ranks": ["torchrun", "train.py"]}
    for name, argv in programs.items():
        prefix = str(tmp_path / name)
        status = RankFile(rank_path(prefix, 0), create=True)
        found = place_of(context_of(tmp_path / name, argv=argv)).environment(prefix, os.environ, None)
        subprocess.run([sys.executable, "-c", ""], env={**found, "LOCAL_RANK": "0"}, check=True)
        assert (status.get(PID) != 0) == (name == "ranks")


def test_older_versions_of_torch_record_collectives_as_well(tmp_path: Path) -> None:
    """They read the size of the recorder from another variable, of which later ones warn."""
    program = "import os; print(os.environ.get('TORCH_NCCL_TRACE_BUFFER_SIZE'))"
    for version, expected in (("2.5.1+cu121", "256"), ("2.6.0", "None")):
        packages = tmp_path / version
        (packages / "torch-0.dist-info").mkdir(parents=True)
        (packages / "torch-0.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        prefix = str(packages / "ranks")
        RankFile(rank_path(prefix, 0), create=True)
        base = {**os.environ, "PYTHONPATH": str(packages)}
        found = place_of(context_of(packages / "run")).environment(prefix, base, None)
        rank = [sys.executable, "-c", program]
        done = subprocess.run(rank, env={**found, "LOCAL_RANK": "0"}, capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected}\n"


def test_programs_of_the_environment_precede_the_path_of_the_trainer(tmp_path: Path) -> None:
    place = place_of(context_of(tmp_path, variables={"PATH": "/opt/bin:/usr/bin"}))
    with_folder = place.environment("/s", {"PATH": "/bin"}, Path("/venv"))
    assert with_folder["PATH"] == "/venv/bin:/opt/bin:/usr/bin"
    assert place.environment("/s", {"PATH": "/bin"}, None)["PATH"] == "/opt/bin:/usr/bin"


def test_a_path_of_the_user_does_not_hide_the_recorder(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": "{code}", "MINE": "{seed}"}
    found = place_of(context_of(tmp_path, variables=variables)).environment("/s", {}, None)
    first, code = found["PYTHONPATH"].split(":")
    assert first == str(IN_RANK)
    assert code.endswith("code/snapshot")
    assert found["MINE"] == "0"
