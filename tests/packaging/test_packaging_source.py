"""Advice to install this program into another environment names the source of this installation."""

import json
from pathlib import Path

import pytest

from rlhf_core.machine.installation import pip_install

COMMIT = "5c7ad87c" * 5


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (None, "pip install 'rlhf-flows[training,vllm]==9.8'"),
        ({"url": "file:///opt/it", "dir_info": {}}, "pip install 'rlhf-flows[training,vllm] @ file:///opt/it'"),
        (
            {"url": "https://example.org/it", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"pip install 'rlhf-flows[training,vllm] @ git+https://example.org/it@{COMMIT}'",
        ),
    ],
    ids=["index", "folder", "repository"],
)
def test_the_advice_names_the_source(
    source: dict[str, object] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "rlhf_flows-9.8.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-flows\nVersion: 9.8\n")
    if source is not None:
        (installed / "direct_url.json").write_text(json.dumps(source))
    monkeypatch.syspath_prepend(tmp_path)
    assert pip_install("training", "vllm") == command
