"""Inspection of an external trainer's environment: nothing is imported, missing parts are named."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeScheduler

import rlhf_core.preflight.checks  # noqa: F401 - importing it registers the checks
from rlhf_core.config.site import load_site
from rlhf_core.machine.interpreters import find_program, interpreter_of
from rlhf_core.preflight import gather_facts
from rlhf_core.preflight.facts import TrainerSide
from rlhf_core.preflight.gather_facts import Surroundings
from rlhf_core.preflight.gather_trainer import inspect_trainer
from rlhf_core.preflight.registry import run_checks
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.run import RunSpec


def spec_of(argv: list[str], **trainer: Any) -> RunSpec:
    content = {"kind": "command", "argv": argv, "num_steps": 9, **trainer}
    return RunSpec.model_validate({"name": "theirs", "trainer": content})


def inspected(folder: Path, argv: list[str], slurm: SlurmSpec | None = None, **trainer: Any) -> TrainerSide:
    code = folder / "code"
    code.mkdir(exist_ok=True)
    return inspect_trainer(spec_of(argv, **trainer), folder / "home", code, slurm or SlurmSpec())


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with one package, whose import would fail."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    packages = folder / "packages"
    info = packages / "ms_swift-4.6.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ms-swift\nVersion: 4.6.0\n")
    (packages / "swift" / "cli").mkdir(parents=True)
    (packages / "swift" / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    (packages / "swift" / "cli" / "rlhf.py").write_text("raise SystemExit('it was imported')\n")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    swift = folder / "bin" / "swift"
    swift.write_text(f"#!{python}\n")
    swift.chmod(0o755)
    return folder


def test_an_environment_is_asked_for_its_packages_and_imports_none(tmp_path: Path, venv: Path) -> None:
    side = inspected(tmp_path, ["swift", "rlhf"], environment=str(venv))
    assert (side.problem, side.unseen, side.python_problem) == ("", "", "")
    assert side.program == str(venv / "bin" / "swift")
    assert side.packages == {"ms-swift": "4.6.0"}
    assert side.version == sys.version_info[:3]


@pytest.mark.parametrize(
    ("module", "missing"),
    [("swift.cli.rlhf", ()), ("swift.cli.none", ("swift.cli.none",)), ("none.at.all", ("none.at.all",)), ("mine", ())],
)
def test_a_module_is_looked_for_without_importing_it(
    module: str, missing: tuple[str, ...], tmp_path: Path, venv: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("raise SystemExit('it was imported')\n")
    side = inspected(tmp_path, ["python", "-m", module, "--lr", "1"], environment=str(venv))
    assert (side.missing_modules, side.python_problem) == (missing, "")


def test_an_environment_that_is_not_there_is_described(tmp_path: Path) -> None:
    assert "rlhf env create swift" in inspected(tmp_path, ["swift", "rlhf"], environment="swift").problem
    assert "without bin/python" in inspected(tmp_path, ["swift"], environment=str(tmp_path)).problem


def test_without_an_environment_the_programs_of_the_path_count(
    tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}")
    side = inspected(tmp_path, ["A=1", "swift", "rlhf"])
    assert (side.program, side.python) == (str(venv / "bin" / "swift"), str(venv / "bin" / "python"))
    assert side.packages["ms-swift"] == "4.6.0"
    assert inspected(tmp_path, ["no-such-program"]).program == ""


def test_a_program_with_a_relative_path_is_in_the_working_folder(tmp_path: Path, venv: Path) -> None:
    side = inspected(tmp_path, ["venv/bin/swift", "rlhf"], working_dir=str(tmp_path))
    assert (side.program, side.python) == (str(venv / "bin" / "swift"), str(venv / "bin" / "python"))


def test_shell_lines_before_the_program_make_its_environment(tmp_path: Path, venv: Path) -> None:
    (tmp_path / "env.sh").write_text("echo loaded\nexport PATH=$PWD/venv/bin:$PATH\n")
    for setup in ([f'export PATH="{venv}/bin:$PATH"'], ["source env.sh", "ulimit -n 64 || true"]):
        side = inspected(tmp_path, ["swift", "rlhf"], setup=setup, working_dir=str(tmp_path))
        assert (side.unseen, side.setup_problem) == ("", "")
        assert (side.program, side.packages) == (str(venv / "bin" / "swift"), {"ms-swift": "4.6.0"})
    before_agents = SlurmSpec(setup=(f"export PATH={venv}/bin:$PATH",))
    assert inspected(tmp_path, ["swift"], before_agents).program == str(venv / "bin" / "swift")


def test_the_environment_of_the_trainer_precedes_that_of_its_shell_lines(tmp_path: Path, venv: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "swift").symlink_to("/bin/true")
    side = inspected(tmp_path, ["swift"], setup=(f"export PATH={other}:$PATH",), environment=str(venv))
    assert side.program == str(venv / "bin" / "swift")


def test_shell_lines_that_fail_here_are_reported(tmp_path: Path, venv: Path) -> None:
    setup = ("true", "no-such-folder/activate || source no-such-folder/activate")
    assert inspected(tmp_path, ["swift"], setup=setup).setup_problem == ""  # not run: it might do anything
    side = inspected(tmp_path, ["swift"], setup=("source no-such-folder/activate",))
    assert "no-such-folder/activate: No such file" in side.setup_problem
    assert "source no-such-folder" in side.unseen
    with_folder = inspected(tmp_path, ["swift"], setup=("source no-such-folder/activate",), environment=str(venv))
    assert with_folder.setup_problem == side.setup_problem
    assert with_folder.packages == {"ms-swift": "4.6.0"}


@pytest.mark.parametrize(
    "line", ["touch {0}", "true && touch {0}", "if true; then touch {0}; fi", "f() {{ touch {0}; }}; f"]
)
def test_shell_lines_that_start_other_programs_run_on_the_nodes_only(line: str, tmp_path: Path) -> None:
    side = inspected(tmp_path, ["swift"], setup=(line.format(tmp_path / "made"),))
    assert (side.setup_problem, (tmp_path / "made").exists()) == ("", False)
    assert line[:5] in side.unseen


@pytest.mark.parametrize(
    ("text", "never"),
    [
        ("trainer.train()\n", True),
        ("model.train()\nself.grpo_trainer.train(\n)\n", True),
        ("trainer.train(get_last_checkpoint(out))\n", False),
        ("trainer.train(path) if path else trainer.train()\n", False),
        ("path = get_last_checkpoint(out)\ntrainer.load(path)\ntrainer.train()\n", False),
        ("model.train()\nstart(model)\n", False),
        ("# trainer.train()\n", False),
        ("trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)\n", False),
        ("from mine import main\nmain()\n", False),
    ],
)
def test_a_script_that_never_resumes_its_trainer_is_named(text: str, never: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    side = inspected(tmp_path, ["python", "train.py"], working_dir=str(tmp_path))
    assert side.never_resumes == ("train.py" if never else "")


def test_the_config_of_deepspeed_is_found_through_that_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("deepspeed_config:\n  deepspeed_config_file: ds/z3.json\n")
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    argv = ["accelerate", "launch", "--config_file", "acc.yaml", "train.py"]
    assert inspected(tmp_path, argv, working_dir=str(tmp_path)).deepspeed == {"zero_optimization": {"stage": 3}}


def test_a_module_is_looked_for_where_the_program_starts_and_on_its_path(tmp_path: Path) -> None:
    package = tmp_path / "repository" / "theirs"
    package.mkdir(parents=True)
    (package / "train.py").write_text("raise SystemExit('it was imported')\n")
    argv, folder = [sys.executable, "-m", "theirs.train"], str(package.parent)
    assert inspected(tmp_path, argv, working_dir=folder).missing_modules == ()
    assert inspected(tmp_path, argv, variables={"PYTHONPATH": folder}).missing_modules == ()
    assert inspected(tmp_path, argv, setup=(f"export PYTHONPATH={folder}:$PYTHONPATH",)).missing_modules == ()
    assert inspected(tmp_path, argv).missing_modules == ("theirs.train",)


def test_what_only_the_nodes_see_is_not_judged_here(tmp_path: Path) -> None:
    container = SlurmSpec(container_kind="pyxis", container_image="swift.sqsh")
    assert "swift.sqsh" in inspected(tmp_path, ["swift"], container).unseen


def test_a_program_whose_folder_only_the_run_knows_is_not_judged(tmp_path: Path) -> None:
    side = inspected(tmp_path, ["{run_dir}/start.sh", "{node_rank}"])
    assert (side.problem, side.program, side.missing_files) == ("", "", ())
    assert "{run_dir}/start.sh" in side.unseen


def test_scripts_and_configs_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    whole, there = str(tmp_path / "train.py"), str(tmp_path)
    assert inspected(tmp_path, ["torchrun", whole, "--deepspeed", "/no/ds.json"]).missing_files == ("/no/ds.json",)
    line = ["accelerate", "launch", "--config_file", "/no/config", whole]
    assert inspected(tmp_path, line).missing_files == ("/no/config",)
    assert inspected(tmp_path, ["torchrun", "train.py"]).missing_files == ("train.py",)
    assert inspected(tmp_path, ["torchrun", "train.py"], working_dir=there).missing_files == ()
    assert inspected(tmp_path, ["torchrun", "{code}/train.py"]).missing_files == (f"{tmp_path}/code/train.py",)
    assert inspected(tmp_path, ["torchrun", "{run_dir}/train.py"]).missing_files == ()


def test_config_files_are_read_each_for_its_reader(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("num_machines: 2\ndeepspeed_config:\n  deepspeed_multinode_launcher: pdsh\n")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": "auto"}))
    (tmp_path / "trl.yaml").write_text(
        "num_generations: 4\nreport_to: [tensorboard, wandb]\nbf16: false\nsave-steps: 7\nresume: null\n"
    )
    (tmp_path / "torn.yaml").write_text("a: [\n")
    argv = [
        "accelerate",
        "launch",
        "--config_file",
        str(tmp_path / "acc.yaml"),
        "train.py",
        str(tmp_path / "torn.yaml"),
    ]
    argv += ["--deepspeed", str(tmp_path / "ds.json"), "--config", str(tmp_path / "trl.yaml")]
    side = inspected(tmp_path, argv)
    found = side.launcher_settings
    assert (found["num_machines"], found["deepspeed_multinode_launcher"]) == ("2", "pdsh")
    assert "num_generations" not in found
    assert side.deepspeed == {"train_batch_size": "auto"}
    assert side.settings == {
        "num_generations": "4",
        "report_to": "tensorboard wandb",
        "bf16": "false",
        "save_steps": "7",
    }
    assert side.unread == (str(tmp_path / "torn.yaml"),)


def test_the_interpreter_of_a_program_is_in_its_first_line(tmp_path: Path) -> None:
    def script(text: str) -> Path:
        path = tmp_path / "program"
        path.write_text(text)
        return path

    assert interpreter_of(script("#!/opt/venv/bin/python3.11\n")) == Path("/opt/venv/bin/python3.11")
    long = """#!/bin/sh\n'''exec' "/opt/a b/bin/python" "$0" "$@"\n' '''\n"""
    assert interpreter_of(script(long)) == Path("/opt/a b/bin/python")
    assert interpreter_of(script("#!/usr/bin/env bash\n")) is None
    assert interpreter_of(script("\x7fELF")) is None
    assert interpreter_of(Path("/x/python3")) == Path("/x/python3")
    assert interpreter_of(tmp_path / "none") is None
    assert find_program("program-that-is-none", "", os.defpath) is None


def test_facts_of_such_a_run_load_no_model_and_no_rewards(tmp_path: Path, venv: Path) -> None:
    """End to end: an external script without a model, data and evaluation of rlhf-flows."""
    (tmp_path / "train.py").touch()
    argv = ["python", str(tmp_path / "train.py"), "--steps", "{num_steps}", "--out", "{output_dir}"]
    spec = spec_of(argv, environment=str(venv), launch="per_rank")
    site = load_site({"RLHF_HOME": str(tmp_path)})
    around = Surroundings(site, FakeScheduler().inventory(), "local", tmp_path / "code")
    facts = gather_facts.gather(spec, around)
    assert (facts.imports, facts.content, facts.content_problem, facts.tokenizer_problem) == ({}, None, "", "")
    assert facts.trainer is not None
    assert facts.training_packages == {"ms-swift": "4.6.0"}
    results = run_checks(facts)
    assert [one for one in results if one.status is CheckStatus.BLOCKED] == []
    assert not [one for one in results if one.id.startswith(("content.", "memory.", "batch."))]


def test_a_script_with_the_callback_is_told_from_one_without(tmp_path: Path) -> None:
    (tmp_path / "with.py").write_text("from rlhf_core.callback import SupervisionCallback\n")
    (tmp_path / "without.py").write_text("print('callback')\n")
    assert inspected(tmp_path, ["torchrun", f"{tmp_path}/with.py"]).has_callback
    assert inspected(tmp_path, ["torchrun", "with.py"], working_dir=str(tmp_path)).has_callback
    assert not inspected(tmp_path, ["torchrun", f"{tmp_path}/without.py"]).has_callback
    assert not inspected(tmp_path, ["torchrun", f"{tmp_path}/gone.py"]).has_callback
    assert not inspected(tmp_path, ["torchrun", "-m", "without"]).has_callback
