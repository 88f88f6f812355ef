"""Facts about a node: hashes that change with the content, secrets that stay secret, and plug-ins that may fail."""

import os
import socket
from pathlib import Path

import pytest
from control_fakes import make_run, make_spec

from rlhf_core.diagnosis.nodes.checks import Plan, compare
from rlhf_core.files import fingerprints
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.worker.nodes import facts as node_facts
from rlhf_core.worker.nodes.membership import Nodes

ALONE = Nodes(("n1",), ("127.0.0.1",), 0)


def test_a_healthy_node_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of this file. A port that another program was given in the same shell is not used by a run."""
    run_dir = make_run(tmp_path / "runs")
    with socket.create_server(("", 0)) as other_program:
        monkeypatch.setenv("MASTER_PORT", str(other_program.getsockname()[1]))
        facts = node_facts.gather(run_dir, 1, ALONE, make_spec(preflight={"min_free_disk_gb": 0.001}), gpus=0)
    assert facts.complaints == ()
    assert {"python", "torch", "pydantic", "rlhf-flows"} <= facts.versions.keys()
    assert {"config (spec.json)", "rlhf_core", "user code"} <= facts.content.keys()
    blocked = [one for one in compare({0: facts}, {}, Plan(("n1",), 2)) if one.status is not CheckStatus.PASSED]
    assert blocked == []


def test_models_beside_the_policy_are_compared(tmp_path: Path) -> None:
    """Nodes with other weights of a teacher or a reward model would train towards something else."""
    folder = tmp_path / "model"
    folder.mkdir()
    main = {"num_steps": 1, "algorithm": {"name": "distillation"}, "optimizer": {"learning_rate": 1e-4}}
    spec = make_spec(reward={"models": {"judge": {"path": str(folder)}}})
    spec = with_changes(spec, {"loops.main": {**main, "reference": str(folder)}})

    def found() -> list[str]:
        content = node_facts.content(make_run(tmp_path / "runs"), 1, spec)
        return [content["loops.main.reference"], content["reward.models.judge.path"]]

    before = found()
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert all(old != new for old, new in zip(before, found(), strict=True))


@pytest.mark.parametrize("size", [10, 1000], ids=["whole", "in pieces"])
def test_a_file_that_differs_has_another_hash(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "WHOLE_FILE_BYTES", 100)
    monkeypatch.setattr(fingerprints, "PIECE_BYTES", 4)
    file = tmp_path / "data"
    file.write_bytes(bytes(size))
    before = fingerprints.fingerprint(file)
    assert before == fingerprints.fingerprint(file)
    file.write_bytes(b"x" + bytes(size - 1))
    assert fingerprints.fingerprint(file) != before
    file.write_bytes(bytes(size + 1))
    assert fingerprints.fingerprint(file) != before


def test_a_folder_is_hashed_with_its_file_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = fingerprints.fingerprint(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert fingerprints.fingerprint(tmp_path) != before
    assert fingerprints.fingerprint(tmp_path / "a") == "not there"


def test_an_unassigned_address_is_named(tmp_path: Path) -> None:
    nodes = Nodes(("n1", "n2"), ("192.0.2.1", "192.0.2.2"), 0)
    facts = node_facts.gather(make_run(tmp_path / "runs"), 1, nodes, make_spec(), gpus=0)
    found = [one.found for one in facts.complaints if one.id == "node.network"]
    assert any("192.0.2.1 is on none of the interfaces" in text for text in found)
    assert {one.node for one in facts.complaints} == {"n1"}


def plug_in(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with one node check."""
    info = folder / "site_checks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-checks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlhf_flows.node_checks]\nsite.licence = site_checks_here:look\n")
    (folder / "site_checks_here.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(os.sys.modules, "site_checks_here", raising=False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "id", "status", "message"),
    [
        (
            "def look(): return [dict(id='', status='blocked', found='no licence', expected='one', advice='buy')]",
            "site.licence",
            "blocked",
            "no licence",
        ),
        ("def look(): raise OSError('server away')", "node.plugin", "warning", "OSError: server away"),
        ("def look(): return [dict(status='perhaps')]", "node.plugin", "warning", "other than a finding"),
        ("raise ImportError('gone')", "node.plugin", "warning", "ImportError: gone"),
    ],
)
def test_a_site_adds_its_own_checks_of_nodes(
    code: str, id: str, status: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    plug_in(folder, code, monkeypatch)
    facts = node_facts.gather(make_run(tmp_path / "runs"), 1, ALONE, make_spec(), gpus=0)
    (found,) = [one for one in facts.complaints if one.id in ("site.licence", "node.plugin")]
    assert (found.id, found.status.value, found.node) == (id, status, "n1")
    assert message in found.found
