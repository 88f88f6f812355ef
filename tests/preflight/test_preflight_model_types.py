"""Model types and their arguments, read from the files of transformers."""

import sys
from pathlib import Path

import pytest

from rlhf_core.config import loading as config
from rlhf_core.preflight.gather_facts import inspect_compute_python
from rlhf_core.preflight.model_types import read_causal_types, read_model_types
from rlhf_core.presets import PRESETS

AUTO = (
    'CONFIG_MAPPING_NAMES = OrderedDict([("small", "SmallConfig")])\n'
    'CONFIG_MAPPING_NAMES.update({"tiny-x": "TinyConfig"})\n'
)
BASE = (
    "class PreTrainedConfig(Mixin):\n"
    "    def __init__(self, *, dtype=None, **kwargs):\n"
    "        self.id2label = kwargs.pop('labels')\n"
)
SMALL = (
    "from ...configuration_utils import PreTrainedConfig\n"
    "class SmallConfig(PreTrainedConfig):\n"
    "    attribute_map = {'width': 'hidden_size'}\n"
    "    hidden_size: int = 8\n"
)
TINY = "from ..small.configuration_small import SmallConfig\nclass TinyConfig(SmallConfig):\n    depth: int = 1\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A transformers with two models, one of which extends the other."""
    files = {
        "configuration_utils.py": BASE,
        "models/auto/configuration_auto.py": AUTO,
        "models/small/configuration_small.py": SMALL,
        "models/tiny_x/configuration_tiny_x.py": TINY,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_arguments_are_those_of_all_base_classes(package: Path) -> None:
    found = read_model_types(package, {"model_type": "tiny-x"})
    assert (found.names, found.config_class) == ({"small", "tiny-x"}, "TinyConfig")
    assert {"depth", "hidden_size", "width", "dtype", "id2label", "labels", "rope_theta"} == found.arguments


@pytest.mark.parametrize(
    "text",
    [
        "class TinyConfig(SmallConfig): pass",
        "import x\nclass TinyConfig(x.SmallConfig): pass",
        "class OtherConfig: pass",
        "class TinyConfig(",
        TINY + "    def f(self):\n        setattr(self, name, 1)\n",
    ],
)
def test_an_unfamiliar_source_has_no_arguments(package: Path, text: str) -> None:
    (package / "models/tiny_x/configuration_tiny_x.py").write_text(text)
    found = read_model_types(package, {"model_type": "tiny-x"})
    assert (len(found.names), found.arguments) == (2, frozenset())


def test_an_unfamiliar_layout_has_no_types(package: Path) -> None:
    (package / "models/auto/configuration_auto.py").write_text("MODELS = {}\n")
    assert not read_model_types(package, {"model_type": "tiny-x"}).names
    assert not read_model_types(package / "missing", {"model_type": "tiny-x"}).names
    assert not read_model_types(package, {}).names


@pytest.mark.training
def test_every_preset_names_what_the_installed_transformers_has() -> None:
    package = Path(inspect_compute_python(sys.executable).transformers)
    given = [config.load(name).model.config for name in PRESETS]
    for model_type in {one["model_type"] for one in given if one}:
        found = read_model_types(package, {"model_type": model_type})
        assert model_type in found.names
        arguments = {name for one in given if one.get("model_type") == model_type for name in one}
        assert arguments <= found.arguments | {"model_type"}, model_type
        assert "hiden_size" not in found.arguments
    # An argument that is another name of a field, and one that a method passes on.
    assert "num_local_experts" in read_model_types(package, {"model_type": "qwen3_moe"}).arguments
    assert "partial_rotary_factor" in read_model_types(package, {"model_type": "bamba"}).arguments


@pytest.mark.training
def test_causal_types_are_those_of_the_installed_transformers(package: Path) -> None:
    transformers = Path(inspect_compute_python(sys.executable).transformers)
    found = read_causal_types(transformers)
    assert {"qwen3", "llama", "gemma3", "mixtral", "gpt2"} <= found
    assert not {"t5", "vit", "whisper_encoder"} & found
    assert read_causal_types(package) == frozenset(), "another arrangement of files is not checked"
