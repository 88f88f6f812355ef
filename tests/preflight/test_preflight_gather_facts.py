"""Gathering facts on this machine: bounded subprocesses, folders, requirements."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from control_fakes import FakeAgent, FakeScheduler, make_run, make_spec

import rlhf_core.preflight.checks  # noqa: F401 - importing it registers the checks
from rlhf_core.config.site import load_site
from rlhf_core.preflight import gather_facts, program_queries
from rlhf_core.preflight.data_file import scan
from rlhf_core.preflight.facts import ModelFolder
from rlhf_core.preflight.gather_facts import Surroundings
from rlhf_core.preflight.memory.shapes import shape_of
from rlhf_core.preflight.registry import CHECKS, run_checks
from rlhf_core.preflight.size_estimates import decoder_parameters, num_positions
from rlhf_core.schemas.model import ModelSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.site import PRIVATE_VARIABLES


def around(tmp_path: Path, python: str = sys.executable) -> Surroundings:
    return Surroundings(
        site=load_site({"RLHF_HOME": str(tmp_path), "RLHF_COMPUTE_PYTHON": python}),
        inventory=FakeScheduler().inventory(),
        scheduler="local",
        code_path=tmp_path / "code",
    )


def test_this_interpreter_answers() -> None:
    found = gather_facts.inspect_compute_python(sys.executable)
    assert found.problem == ""
    assert found.version == sys.version_info[:3]
    assert "pydantic" in found.packages


@pytest.mark.parametrize(
    ("script", "message"), [("", "cannot be started"), ("exit 3", "exit code 3"), ("echo hm", "hm")]
)
def test_a_program_that_is_no_interpreter_is_described(tmp_path: Path, script: str, message: str) -> None:
    path = tmp_path / "python"
    if script:
        path.write_text(f"#!/bin/sh\n{script} >&2\n")
        path.chmod(0o755)
    assert message in gather_facts.inspect_compute_python(str(path)).problem


def test_a_module_that_never_imports_is_given_up() -> None:
    endless = [sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(60)"]
    answer = program_queries.query_program(endless, lambda: None, timeout_s=1.0)
    assert isinstance(answer, str)
    assert "no answer within 1 s" in answer


def test_what_is_tried_out_does_not_see_the_secrets_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    prefect = ("PREFECT_API_KEY", "PREFECT_SERVER_DATABASE_PASSWORD", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
    prefect = (*prefect, "PREFECT_API_ENCRYPTION_KEY", "PREFECT_CLIENT_CUSTOM_HEADERS")
    for name in (*PRIVATE_VARIABLES, *prefect, "RLHF_PLAIN"):
        monkeypatch.setenv(name, "canary")
    code = "import json, os; print(json.dumps({name: 1 for name, value in os.environ.items() if value == 'canary'}))"
    assert program_queries.query_program([sys.executable, "-c", code], lambda: None) == {"RLHF_PLAIN": 1}


def test_waiting_can_be_stopped_and_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "pid"

    class Stop(Exception):
        pass

    def stop() -> None:
        if mark.exists():
            raise Stop

    code = f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(60)"
    with pytest.raises(Stop):
        program_queries.query_program([sys.executable, "-c", code], stop)
    assert not Path(f"/proc/{mark.read_text()}").exists()


def test_functions_are_imported_from_the_snapshot_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, here = tmp_path / "code", tmp_path / "here"
    for folder in (code, here):
        folder.mkdir()
    (code / "kept.py").write_text("import json\n\ndef score(**columns):\n    return []\n")
    (here / "forgotten.py").write_text("def score(**columns):\n    return []\n")
    (code / "uses_forgotten.py").write_text("import forgotten\n\ndef score(**columns):\n    return []\n")
    monkeypatch.chdir(here)
    spec = make_spec(reward={"functions": ["kept:score", "kept:missing", "uses_forgotten:score"]})
    found = gather_facts.try_imports(spec, around(tmp_path))
    assert found["kept:score"] == ""
    assert "missing" in found["kept:missing"]
    assert "forgotten" in found["uses_forgotten:score"], "the nodes would not have it either"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_message_names_the_file_of_the_user_and_not_its_copy(tmp_path: Path, is_known: bool) -> None:
    """The copy of ``rlhf check`` is gone when the message is read."""
    code, own = tmp_path / "code", tmp_path / "work" / "rewards"
    for folder in (code / "rewards", own):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise OSError(__file__)\n")
    site = replace(around(tmp_path), code_sources=[own] if is_known else ())
    found = gather_facts.try_imports(make_spec(reward={"functions": ["rewards:score"]}), site)
    named = own if is_known else code / "rewards"
    assert f"{named}/__init__.py" in found["rewards:score"]


def test_requirements_of_one_extra() -> None:
    lines = [
        "pydantic>=2",
        'Torch>=2.6; extra == "training"',
        'math_verify[antlr]>=0.8; extra == "training"',
        'ruff; extra == "dev"',
        'vllm; extra == "vllm" and python_version < "3"',
    ]
    found = gather_facts.select_requirements(lines, "training")
    assert [(one.name, one.accepts) for one in found] == [("torch", ">=2.6"), ("math-verify", ">=0.8")]


def test_code_is_told_apart_by_name_and_content(tmp_path: Path) -> None:
    assert gather_facts.hash_code(tmp_path / "none") == gather_facts.hash_code(tmp_path) == ""
    (tmp_path / "a.py").write_text("one")
    first = gather_facts.hash_code(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_text("compiled")
    assert gather_facts.hash_code(tmp_path) == first
    (tmp_path / "a.py").write_text("two")
    second = gather_facts.hash_code(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, gather_facts.hash_code(tmp_path)}) == 3


def test_disks(tmp_path: Path) -> None:
    good = gather_facts.inspect_disk(tmp_path / "not" / "yet")
    assert (good.problem, good.free_bytes > 0) == ("", True)
    assert good.free_files is None or good.free_files > 0
    assert list(tmp_path.iterdir()) == [], "inspection leaves nothing behind"
    file = tmp_path / "file"
    file.write_text("")
    assert gather_facts.inspect_disk(file / "runs").problem


def test_models_and_tokenizers(tmp_path: Path) -> None:
    empty, model = tmp_path / "empty", tmp_path / "model"
    empty.mkdir()
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 8}')
    size = safetensors(
        model / "model.safetensors", {"a.q_proj.weight": [2, 2], "a.norm.weight": [2], "a.q_proj.bias": [2]}
    )
    (model / "tokenizer.json").write_text("{}")

    def path(folder: Path) -> ModelSpec:
        return ModelSpec(path=str(folder))

    for folder, message in ((tmp_path / "none", "no such folder"), (empty, "no config.json")):
        found = gather_facts.inspect_model(path(folder))
        assert found is not None
        assert message in found.problem
    found = gather_facts.inspect_model(path(model))
    assert found is not None
    assert (found.problem, found.weight_bytes) == ("", size)
    assert found.matrices == {"q_proj"}
    assert gather_facts.model_config(path(model)) == {"hidden_size": 8}
    assert gather_facts.inspect_tokenizer(path(model)) == ""
    assert "no tokenizer" in gather_facts.inspect_tokenizer(path(empty))
    assert gather_facts.inspect_model(make_spec().model) is None


def test_a_name_on_the_hub_is_answered_with_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("Qwen/Qwen3-0.6B", "gpt2"):
        model = gather_facts.inspect_model(ModelSpec(path=str(tmp_path / name)))
        assert model is not None
        assert f"`hf download {name} --local-dir {name}`" in model.problem
    tokenizer = gather_facts.inspect_tokenizer(ModelSpec(tokenizer=str(tmp_path / "gpt2"), config={"model_type": "x"}))
    assert "hf download gpt2" in tokenizer
    assert "`hf download openai/gsm8k --repo-type dataset" in scan(tmp_path / "openai/gsm8k", make_spec().data).problem
    of_user = gather_facts.inspect_model(ModelSpec(path=str(tmp_path / "models" / "mine")))
    assert of_user is not None
    with_space = gather_facts.inspect_model(ModelSpec(path=str(tmp_path / "my model")))
    assert with_space is not None
    for problem in (of_user.problem, with_space.problem, scan(tmp_path / "train.jsonl", make_spec().data).problem):
        assert f"relative paths start at the current folder, {tmp_path}" in problem
        assert "hf download" not in problem
    assert f"relative paths start at the current folder, {tmp_path}" in tokenizer, "a name, or the wrong folder"
    assert scan(tmp_path.parent / "x.jsonl", make_spec().data).problem == "there is no such file", "absolute"
    monkeypatch.chdir("/")
    assert scan(tmp_path / "x", make_spec().data).problem == "there is no such file", "every path is below"


def test_a_model_that_cannot_be_looked_up_is_a_finding(tmp_path: Path) -> None:
    """By its name, as a folder of another user is by its rights."""
    folder = tmp_path / ("x" * 300)
    model = gather_facts.inspect_model(ModelSpec(path=str(folder)))
    assert model is not None
    assert model.problem == "it is not accessible: File name too long"
    assert gather_facts.inspect_reward_model(str(folder)).problem == model.problem
    assert gather_facts.inspect_tokenizer(ModelSpec(path=str(folder))) == "", "reported once"
    elsewhere = ModelSpec(path=str(tmp_path), tokenizer=str(folder))
    assert gather_facts.inspect_tokenizer(elsewhere) == model.problem


def safetensors(path: Path, tensors: Mapping[str, Sequence[int]]) -> int:
    """Write a file with tensors of these shapes in float32; return its size."""
    header, end = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end := end + 4 * math.prod(shape)]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def inspected(folder: Path) -> ModelFolder:
    found = gather_facts.inspect_model(ModelSpec(path=str(folder)))
    assert found is not None
    return found


def sharded(folder: Path, names: Sequence[str]) -> int:
    """Write a model of one matrix in each of these files, with their index; return the size of the weights."""
    (folder / "config.json").write_text("{}")
    weights = {f"a.{number}.weight": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**weights, "b": names[-1]}}))
    return sum(safetensors(folder / name, {weight: [2, 2]}) for weight, name in weights.items())


def test_the_dimensions_of_a_model_that_reads_images_are_those_of_its_language_model(tmp_path: Path) -> None:
    """As in Gemma 3 27B, abridged."""
    of_text = {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "max_position_embeddings": 131072}
    content = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": of_text | heads, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = gather_facts.model_config(ModelSpec(path=str(tmp_path)))
    assert config["model_type"] == "gemma3"
    shape = shape_of(config, 27_432_406_640, 262_208)
    assert shape is not None
    assert (shape.layers, shape.keys, num_positions(config)) == (62, 2048, 131072)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_weights_that_lie_twice_in_a_folder_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def weights() -> tuple[int, frozenset[str]]:
        found = inspected(tmp_path)
        return found.weight_bytes, found.matrices

    in_bins = sum((tmp_path / f"pytorch_model-{part}.bin").write_bytes(b"weights") for part in (1, 2))
    (tmp_path / "training_args.bin").write_bytes(b"no weights")
    assert weights() == (in_bins, frozenset())
    in_shards = sharded(tmp_path, SHARDS)
    safetensors(tmp_path / "consolidated.safetensors", {"a.wq.weight": [2, 2]})
    assert weights() == (in_shards, {"0", "1"})
    single = safetensors(tmp_path / "model.safetensors", {"a.q_proj.weight": [2, 2]})
    assert weights() == (single, {"q_proj"}), "transformers looks for it first"


def test_experts_are_no_layers_that_could_have_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = ("mlp.experts.0.gate_proj.weight", "mlp.shared_experts.up_proj.weight", "self_attn.q_proj.weight")
    safetensors(tmp_path / "model.safetensors", {f"model.layers.0.{name}": [2, 2] for name in names})
    assert inspected(tmp_path).matrices == {"q_proj", "up_proj"}


def test_a_model_whose_download_was_interrupted_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path, SHARDS)
    last = tmp_path / SHARDS[1]
    assert inspected(tmp_path).problem == ""
    whole = last.read_bytes()

    def problem() -> str:
        return inspected(tmp_path).problem.removeprefix("1 of its 2 weight files cannot be loaded: ")

    last.write_bytes(whole[:-1])
    assert problem() == f"{last.name} has {len(whole) - 1} of {len(whole)} bytes"
    last.write_bytes(whole[:20])
    assert problem() == f"{last.name} is cut off or no safetensors file (20 bytes)"
    last.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4932307584\n")
    assert "is a pointer of Git LFS" in problem()
    last.unlink()
    assert problem() == f"{last.name} is missing"
    last.symlink_to(tmp_path / "blobs" / "4d7a")
    assert problem() == f"{last.name} is missing", "as in a cache whose blobs were removed"


def test_a_checkpoint_with_a_missing_file_is_seen(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs")
    FakeAgent(run_dir).checkpoint(10, num_ranks=4)
    found = gather_facts.inspect_checkpoint(run_dir.checkpoint(10))
    assert found is not None
    assert (found.step, found.num_ranks, found.problems) == (10, 4, ())
    manifest = run_dir.checkpoint(10).complete
    manifest.write_text(manifest.read_text().replace('"files": {}', '"files": {"a": {"bytes": 3, "sha256": "x"}}'))
    found = gather_facts.inspect_checkpoint(run_dir.checkpoint(10))
    assert found is not None
    assert "a: No such file" in found.problems[0]


def test_the_size_of_a_known_model_is_about_right() -> None:
    """Qwen3-0.6B has 596 M parameters (its model card)."""
    config = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    found = decoder_parameters(config)
    assert found is not None
    assert abs(found / 596e6 - 1) < 0.02
    assert decoder_parameters({"hidden_size": 8}) is None


def test_a_family_that_ties_its_output_layer_without_saying_so_is_not_counted_twice() -> None:
    """Gemma-2B has 2,506,172,416 parameters; its config.json does not name tie_word_embeddings."""
    config = {
        "model_type": "gemma",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 256000,
    }
    found = decoder_parameters(config)
    assert found == 2_506_172_416
    assert decoder_parameters({**config, "tie_word_embeddings": False}) == found + 256000 * 2048


def test_everything_at_once(tmp_path: Path) -> None:
    """The content is read unless all of its checks are off."""
    spec = make_spec(preflight={"off": dict.fromkeys(gather_facts.CONTENT_CHECKS[1:], "known")})
    facts = gather_facts.gather(RunSpec.model_validate(spec.model_dump()), around(tmp_path))
    assert facts.compute.problem == ""
    assert facts.files == {}
    assert facts.disk.problem == ""
    assert facts.content is not None
    assert [inspection.problem for inspection in facts.content.splits] == ["", ""]


def test_the_content_is_not_read_when_its_checks_are_off(tmp_path: Path) -> None:
    spec = make_spec(preflight={"off": dict.fromkeys(gather_facts.CONTENT_CHECKS, "the data is on the nodes only")})
    assert gather_facts.gather(spec, around(tmp_path)).content is None


def test_the_listed_checks_of_the_content_exist() -> None:
    assert list(gather_facts.CONTENT_CHECKS) == [one.id for one in CHECKS if one.id.startswith("content.")]


def test_unreadable_content_has_a_reason(tmp_path: Path) -> None:
    spec = make_spec(reward={"functions": ["no_such_module:score"]})
    facts = gather_facts.gather(spec, around(tmp_path))
    assert facts.content is None
    assert "no_such_module:score does not import" in facts.content_problem
    assert "exit code" in str(gather_facts.inspect_content(spec, around(tmp_path, "/bin/false")))


def test_a_compute_interpreter_of_another_version_is_not_asked_about_the_data(tmp_path: Path) -> None:
    """It would answer in the words of its version, which this one does not understand."""
    listing = {"version": [3, 11, 0], "packages": {"pydantic": "2", "transformers": "5"}, "modules": {}}
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        """case "$*" in *check-*) echo '{"ok": true, "of_another_version": 1}';; """
        f"""*) echo '{json.dumps({**listing, "rlhf_flows": "0.0.1", "transformers": ""})}';; esac\n"""
    )
    python.chmod(0o755)
    facts = gather_facts.gather(make_spec(), around(tmp_path, str(python)))
    assert (facts.imports, facts.content, facts.content_problem) == ({}, None, "")
    blocked = [one for one in run_checks(facts) if one.id == "environment.rlhf_flows"]
    assert "rlhf-flows 0.0.1 in the compute interpreter" in blocked[0].found
