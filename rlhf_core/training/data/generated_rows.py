"""Rows that a function of the user makes (``data.generator``)."""

import contextlib
import importlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Literal

from pydantic import JsonValue

from rlhf_core.errors import BadConfig, BadData
from rlhf_core.files.data_rows import Malformed

Split = Literal["train", "eval"]

Record = tuple[str, Mapping[str, JsonValue] | Malformed]
"""An unmodified row of a source, with its place for error messages."""


def generated_rows(source: str, split: Split, seed: int, arguments: Mapping[str, JsonValue]) -> Iterator[Record]:
    """Rows of a function of the user.

    Args:
        source: ``module:function``.

    Raises:
        BadConfig: it does not import, or cannot be called so.
        BadData: it returns no rows.
    """
    module_name, _, name = source.partition(":")
    try:
        generator = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise BadConfig(f"data.generator = {source} does not import: {error}") from error
    with _seeded(f"{seed} {split}"):
        try:
            made = generator(split, seed, **arguments)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # by the code of the function, not by the call
            raise BadConfig(
                f"data.generator = {source} cannot be called as function(split, seed, **generator_args): {error}"
            ) from error
        if not isinstance(made, Iterable):
            raise BadData(f"data.generator = {source} returned {made!r:.80}; expected rows, each a dictionary")
        rows = list(made)
    for number, row in enumerate(rows):
        yield (
            f"{source}: row {number}",
            row if isinstance(row, Mapping) else Malformed(f"is not a dictionary but {row!r:.80}"),
        )


@contextlib.contextmanager
def _seeded(words: str) -> Iterator[None]:
    """Seed the global random number generators within the block, and restore them afterwards.

    User code that draws from them then makes the same rows on every rank, after a restart, and for the evaluation.
    """
    seed = int.from_bytes(blake2b(words.encode(), digest_size=4).digest(), "big")
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    before = random.getstate(), numpy and numpy.random.get_state(), torch and torch.default_generator.get_state()
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    if torch:
        torch.default_generator.manual_seed(seed)  # not those of GPUs, which torch.manual_seed would change as well
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])
        if torch:
            torch.default_generator.set_state(before[2])
