"""Settings in files of other programs, in JSON or YAML."""

import importlib
from typing import Any

from pydantic_core import from_json


def settings_in(text: str | bytes, name: str) -> dict[str, Any] | None:
    """Settings at the top level of a file; None if it is not valid, or holds something else.

    Args:
        name: name of the file. It is YAML unless the name ends in ``.json``.
    """
    try:
        content = from_json(text) if name.lower().endswith(".json") else _from_yaml(text)
    except (ValueError, ImportError, RecursionError):
        return None
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else None


def text_of(value: Any) -> str:
    """A setting as an option of a command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _from_yaml(text: str | bytes) -> Any:
    """Parse a YAML document with PyYAML, a dependency of Prefect.

    Raises:
        ValueError: the document is invalid.
        ImportError: PyYAML is not installed.
    """
    yaml: Any = importlib.import_module("yaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
