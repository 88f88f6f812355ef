"""Paths of a config at which there is nothing usable: the problem with the probable mistake, and the remedy."""

import os
import re
from pathlib import Path
from typing import Literal

from rlhf_core.schemas.scoring_models import PROMOTED


def missing(path: Path, kind: Literal["file", "folder"]) -> str:
    """Problem of a missing file of data or folder of a model.

    Below the current folder, the path was probably relative: it may start elsewhere, or be a name on the Hugging Face
    Hub, such as ``Qwen/Qwen3-0.6B`` or ``gpt2``.
    """
    problem = f"there is no such {kind}"
    folder = Path.cwd()
    if folder == Path("/") or not path.is_relative_to(folder):
        return problem
    problem += f" (relative paths start at the current folder, {folder})"
    parts = path.relative_to(folder).parts
    name = "/".join(parts)
    could_be_of_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII) and (
        # Unlike that of Path, this is false where nothing can be looked up.
        len(parts) == 1 or not os.path.exists(parts[0])  # noqa: PTH110
    )
    if not could_be_of_hub or path.suffix in (".csv", ".json", ".jsonl", ".parquet"):
        return problem
    if kind == "file":
        return (
            f"{problem}. For a data set of the Hugging Face Hub, `hf download {name} --repo-type dataset --local-dir "
            f"{name}` makes a folder; the setting names a file in it"
        )
    return f"{problem}. For a model of the Hugging Face Hub, `hf download {name} --local-dir {name}` makes it"


def folder_advice(setting: str, text: str) -> str:
    """Advice on a folder of a model that cannot be used, or on the name of runs of which none has promoted a model.

    Args:
        text: the value of the setting.
    """
    if text.startswith(PROMOTED):
        return f"train one first, with promote.when, or set {setting} to its folder"
    return f"correct {setting}; on a cluster it must be on a file system that the nodes see"
