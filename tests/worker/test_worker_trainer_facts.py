"""Facts of a node about another program: versions in its environment, files of its launch line, missing parts."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from control_fakes import make_run

from rlhf_core.diagnosis.nodes.checks import NodeCheck, Plan, compare
from rlhf_core.files import fingerprints
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.probe import NodeFacts
from rlhf_core.schemas.run import RunSpec
from rlhf_core.worker.nodes import facts as node_facts
from rlhf_core.worker.nodes import trainer_facts
from rlhf_core.worker.nodes.membership import Nodes


def spec_of(argv: list[str], **trainer: Any) -> RunSpec:
    content = {"kind": "command", "argv": argv, "num_steps": 9, **trainer}
    preflight = {"min_free_disk_gb": 0.001}
    return RunSpec.model_validate({"name": "theirs", "trainer": content, "preflight": preflight})


def make_environment(folder: Path, trl: str) -> Path:
    """A virtual environment with one package."""
    info = folder / "packages" / f"trl-{trl}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {trl}\n")
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/packages exec {sys.executable} -S "$@"\n')
    trl_program = folder / "bin" / "trl"
    trl_program.write_text(f"#!{python}\n")
    for program in (python, trl_program):
        program.chmod(0o755)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs")


def on_nodes(run_dir: RunDir, *specs: RunSpec) -> dict[int, NodeFacts]:
    """Facts of several nodes, each with the content of its own file system."""
    names = tuple(f"n{index}" for index in range(len(specs)))
    return {
        index: node_facts.gather(run_dir, 1, Nodes(names, ("127.0.0.1",) * len(specs), index), spec, gpus=0)
        for index, spec in enumerate(specs)
    }


def troubles(facts: dict[int, NodeFacts]) -> list[tuple[str, str]]:
    names = tuple(one.node for one in facts.values())
    found = compare(facts, {}, Plan(names, 1))
    return [(one.id, one.node) for one in found if one.status is CheckStatus.BLOCKED]


def test_a_program_and_setup_with_relative_paths_are_in_the_working_folder(run_dir: RunDir, tmp_path: Path) -> None:
    make_environment(tmp_path / "code" / "venv", "1.16.0")
    (tmp_path / "code" / "env.sh").write_text("PATH=$PWD/venv/bin:$PATH\n")
    for argv, setup in ((["venv/bin/trl", "grpo"], []), (["trl", "grpo"], ["source ./env.sh"])):
        facts = on_nodes(run_dir, spec_of(argv, working_dir=str(tmp_path / "code"), setup=setup))
        assert facts[0].trainer_versions["trl"] == "1.16.0"
        assert troubles(facts) == []


def test_nodes_with_the_same_environment_agree(run_dir: RunDir, tmp_path: Path) -> None:
    """Negative control of this file."""
    spec = spec_of(["trl", "grpo"], environment=str(make_environment(tmp_path / "venv", "1.16.0")))
    facts = on_nodes(run_dir, spec, spec, spec)
    assert facts[0].trainer_versions == {"python": ".".join(map(str, sys.version_info[:3])), "trl": "1.16.0"}
    assert troubles(facts) == []


def test_a_node_whose_environment_differs_is_found(run_dir: RunDir, tmp_path: Path) -> None:
    """Each environment represents the disk of a node: the folder has the same name on all of them."""
    same = spec_of(["trl", "grpo"], environment=str(make_environment(tmp_path / "same", "1.16.0")))
    other = spec_of(["trl", "grpo"], environment=str(make_environment(tmp_path / "other", "0.16.1")))
    assert troubles(on_nodes(run_dir, same, other, same)) == [("node.versions", "n1")]


def test_a_node_without_the_environment_is_reported(run_dir: RunDir, tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "venv", "1.16.0")
    assert trainer_facts.gather(run_dir, spec_of(["trl"], environment=str(folder))).complaints == ()
    (missing,) = trainer_facts.gather(run_dir, spec_of(["swift", "rlhf"], environment=str(folder))).complaints
    assert (missing.id, missing.status) == (NodeCheck.TRAINER, CheckStatus.BLOCKED)
    assert "swift: not found" in missing.found
    shutil.rmtree(folder)
    (gone,) = trainer_facts.gather(run_dir, spec_of(["trl"], environment=str(folder))).complaints
    assert "without bin/python" in gone.found


def test_the_environment_is_read_after_the_shell_lines(run_dir: RunDir, tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "venv", "1.16.0")
    setup = ("echo loading modules", f"export PATH={folder}/bin:$PATH")
    assert trainer_facts.gather(run_dir, spec_of(["trl", "grpo"], setup=setup)).versions["trl"] == "1.16.0"
    assert trainer_facts.gather(run_dir, spec_of(["trl", "grpo"])).complaints != ()


def test_the_shell_lines_have_the_variables_and_placeholders_of_the_program(run_dir: RunDir, tmp_path: Path) -> None:
    make_environment(tmp_path / "venv", "1.16.0")
    (run_dir.root / "env.sh").write_text("export PATH=$MINE/bin:$PATH\n")
    spec = spec_of(["trl"], setup=("source {run_dir}/env.sh",), variables={"MINE": str(tmp_path / "venv")})
    assert trainer_facts.gather(run_dir, spec).versions["trl"] == "1.16.0"


def test_a_shell_line_that_fails_is_named(run_dir: RunDir, tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "venv", "1.16.0")
    spec = spec_of(["trl"], setup=("no-such-command load cuda",), environment=str(folder))
    (complaint,) = trainer_facts.gather(run_dir, spec).complaints
    assert "no-such-command: command not found" in complaint.found


def test_an_interpreter_that_never_answers_is_abandoned(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_environment(tmp_path / "venv", "1.16.0")
    (folder / "bin" / "python").write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(trainer_facts, "ANSWER_S", 0.5)
    (complaint,) = trainer_facts.gather(run_dir, spec_of(["trl"], environment=str(folder))).complaints
    assert "no answer within 0.5 s" in complaint.found


def test_files_of_the_launch_line_are_compared(run_dir: RunDir, tmp_path: Path) -> None:
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "train.py").write_text("pass")
        (tmp_path / node / "ds.json").write_text("{}")
    shared = tmp_path / "here"

    def facts(node: str) -> dict[str, str]:
        shared.unlink(missing_ok=True)
        shared.symlink_to(tmp_path / node)
        line = [sys.executable, f"{shared}/train.py", f"--deepspeed={shared}/ds.json", "--output_dir", f"{shared}/out"]
        return on_nodes(run_dir, spec_of(line))[0].content

    assert facts("a") == facts("b")
    assert {name for name in facts("a") if name.startswith("trainer.argv") and sys.executable not in name} == {
        f"trainer.argv {shared}/train.py",
        f"trainer.argv {shared}/ds.json",
    }
    (tmp_path / "b" / "ds.json").write_text('{"train_batch_size": 8}')
    differ = {name for name, value in facts("a").items() if facts("b")[name] != value}
    assert differ == {f"trainer.argv {shared}/ds.json"}


def test_files_of_the_run_and_relative_names_are_not_compared(run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a").mkdir()
    line = [sys.executable, "{run_dir}/trainer/x.json", "--model", "Qwen/Qwen3-0.6B", "--data", "a/b"]
    found = trainer_facts.gather(run_dir, spec_of(line, working_dir=str(tmp_path / "work"))).files
    assert [name for name in found if sys.executable not in name] == []
    (tmp_path / "work" / "a" / "b").touch()
    found = trainer_facts.gather(run_dir, spec_of(line, working_dir=str(tmp_path / "work"))).files
    assert found["trainer.argv a/b"] == tmp_path / "work" / "a" / "b"


def test_a_prompt_and_a_pattern_are_no_files(run_dir: RunDir, tmp_path: Path) -> None:
    """A sentence before a slash may be longer than any name, and the user named after a tilde may not exist."""
    line = [sys.executable, "--system", 20 * "You are helpful. " + "Think and/or ask.", "--pattern", "~no-such-user/x"]
    found = trainer_facts.gather(run_dir, spec_of(line, working_dir=str(tmp_path)))
    assert [name for name in found.files if sys.executable not in name] == []
    assert found.complaints == ()


def test_very_large_folders_are_compared_by_names_and_sizes(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("1")
    before = fingerprints.fingerprint(tmp_path, 2)
    (tmp_path / "a").write_text("2")
    assert fingerprints.fingerprint(tmp_path, 2) == before
    assert fingerprints.fingerprint(tmp_path, 3) != fingerprints.fingerprint(tmp_path, 2)
    (tmp_path / "a").write_text("22")
    assert fingerprints.fingerprint(tmp_path, 2) != before
    assert fingerprints.fingerprint(Path("/dev/null"), 2) == "not a regular file"
