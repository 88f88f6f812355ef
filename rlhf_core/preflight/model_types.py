"""Model types of an installed transformers and the arguments of their configurations, read from its source files:
importing it takes seconds.

What cannot be read is left out, and is then not checked: another version may be arranged differently.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.preflight.facts import ModelTypes

_BASES = ("PreTrainedConfig", "PretrainedConfig")
"""Names of the base class of all configurations; the second one is older."""


def read_model_types(package: Path, config: Mapping[str, Any]) -> ModelTypes:
    """Read the model types, and the arguments of the type that a model's configuration names.

    Args:
        package: folder of transformers.
    """
    if not config:
        return ModelTypes()
    auto = package / "models" / "auto"
    try:
        trees = [_parse(auto / "configuration_auto.py"), *map(_parse, auto.glob("auto_mappings.py"))]
        classes = dict(pair for tree in trees for pair in _pairs(tree, "CONFIG_MAPPING_NAMES"))
        packages = dict(pair for tree in trees for pair in _pairs(tree, "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"))
    except (OSError, SyntaxError, ValueError):
        return ModelTypes()
    model_type = str(config["model_type"])
    if model_type not in classes:
        return ModelTypes(frozenset(classes))
    name = packages.get(model_type, model_type).replace("-", "_")
    file = package / "models" / name / f"configuration_{name}.py"
    try:
        # The trainer accepts rope_theta for every model: transformers moves it into rope_parameters.
        arguments = frozenset({"rope_theta", *_arguments(file, classes[model_type])})
    except (OSError, SyntaxError, ValueError, LookupError):
        arguments = frozenset()
    return ModelTypes(frozenset(classes), classes[model_type], arguments)


def read_causal_types(package: Path) -> frozenset[str]:
    """Read the types of models that ``AutoModelForCausalLM`` loads; empty if they cannot be read.

    Args:
        package: folder of transformers.
    """
    try:
        tree = _parse(package / "models" / "auto" / "modeling_auto.py")
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(name for name, _ in _pairs(tree, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"))


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _pairs(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """Pairs of texts that a module assigns to a mapping or adds to it."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield from _pairs_in(value)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                yield from _pairs_in(value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=target), attr="update")) as value) if (
                target == name
            ):
                yield from _pairs_in(value)


def _pairs_in(value: ast.expr) -> Iterator[tuple[str, str]]:
    for node in ast.walk(value):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(key)), ast.Constant(value=str(item))]):
                yield key, item
            case ast.Dict(keys=keys, values=values):
                for one, other in zip(keys, values, strict=True):
                    match one, other:
                        case ast.Constant(value=str(key)), ast.Constant(value=str(item)):
                            yield key, item


def _arguments(file: Path, name: str) -> Iterator[str]:
    """Arguments of a configuration class and of its base classes.

    Raises:
        LookupError: the class or one of its base classes is not where it is expected.
        OSError, SyntaxError, ValueError: a file cannot be read.
    """
    tree = _parse(file)
    found = next((one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name), None)
    if found is None:
        raise LookupError(name)
    yield from _own_arguments(found)
    if name in _BASES:
        return
    if any(isinstance(one, ast.Name) and one.id == "setattr" for one in ast.walk(found)):
        raise LookupError(f"{name} computes the names of its arguments")
    for base in found.bases:
        if not isinstance(base, ast.Name):
            raise LookupError(ast.unparse(base))
        yield from _arguments(_file_of(base.id, tree, file), base.id)


def _own_arguments(found: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(found):
        match node:
            # Fields, and what a method sets.
            case (
                ast.AnnAssign(target=ast.Name(id=name))
                | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
            ):
                yield name
            case ast.FunctionDef(name="__init__" | "__post_init__", args=taken):
                yield from (one.arg for one in (*taken.args[1:], *taken.kwonlyargs))
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="pop" | "get" | "setdefault"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name
            case ast.Subscript(value=ast.Name(id="kwargs"), slice=ast.Constant(value=str(name)), ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=value):
                yield from (name for pair in _pairs_in(value) for name in pair)


def _file_of(name: str, tree: ast.Module, file: Path) -> Path:
    """File that a name in a module's source comes from."""
    if any(isinstance(one, ast.ClassDef) and one.name == name for one in tree.body):
        return file
    for node in tree.body:
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=level) if level:
                if any(one.name == name and not one.asname for one in names):
                    return file.parents[level - 1].joinpath(*module.split(".")).with_suffix(".py")
    raise LookupError(name)
