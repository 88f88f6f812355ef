"""Changes of single settings of a run."""

from collections.abc import Mapping

from pydantic import JsonValue

from rlhf_core.schemas.migration import current_name
from rlhf_core.schemas.run import RunSpec


def with_changes(spec: RunSpec, changes: Mapping[str, JsonValue]) -> RunSpec:
    """Return a spec with some settings changed.

    Args:
        spec: Spec to change.
        changes: Dotted name to new value, for instance ``trainer.micro_batch_size`` to 4. Names of rlhf-flows 0.1 are
            translated.

    Raises:
        ValueError: a changed setting is invalid (pydantic's ``ValidationError`` is one).
    """
    if not changes:
        return spec
    content = spec.model_dump(mode="json")
    for name, value in changes.items():
        *sections, field = current_name(name).split(".")
        table = content
        for section in sections:
            table = table[section]
        table[field] = value
    return RunSpec.model_validate(content)
