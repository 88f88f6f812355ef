"""Values of placeholders of a launch line that follow from the spec and are the same on every node."""

import shlex
from collections.abc import Mapping, Sequence

from rlhf_core.schemas.command_trainer import fill
from rlhf_core.schemas.run import RunSpec


def values_of_spec(spec: RunSpec) -> dict[str, str]:
    """Values that follow from the spec, without those of a node, a rank, an attempt or a run."""
    resources = spec.resources
    return {
        "num_nodes": str(resources.num_nodes),
        "ranks_per_node": str(resources.ranks_per_node),
        "num_ranks": str(spec.num_ranks),
        "gpus_per_node": str(resources.gpus_per_node),
        "use_cpu": "false" if resources.gpus_per_node else "true",
        "num_steps": str(spec.total_steps),
        "checkpoint_every": str(spec.checkpoint.every_num_steps),
        "keep_last": str(spec.checkpoint.keep_last),
        "seed": str(spec.seed),
        "model": spec.model.path,
        "train": spec.data.train,
        "eval": spec.data.eval,
    }


def filled_argv(spec: RunSpec, further: Mapping[str, str]) -> tuple[str, ...]:
    """Launch line of a run with these values filled in; other placeholders are kept.

    Raises:
        ValueError: rlhf-flows trains itself.
    """
    values = {**values_of_spec(spec), **further}
    return tuple(fill(word, values) for word in spec.command_trainer.argv)


def after_setup(setup: Sequence[str], values: Mapping[str, str], environment: str, command: Sequence[str]) -> list[str]:
    """Command that runs shell lines and then another one in the same shell; without such lines, only the latter.

    Args:
        setup: The lines, such as ``trainer.setup``.
        values: Values of placeholders.
        environment: Folder of the trainer's Python environment, whose programs precede those of the lines; empty for
            none.
    """
    if not setup:
        return [*command]
    lines = ["set -e", *(fill(line, values) for line in setup)]
    if environment:  # `module load python` puts another one before it
        lines.append(f'export PATH={shlex.quote(f"{environment}/bin")}:"$PATH"')
    return ["bash", "-c", "\n".join([*lines, 'exec "$@"']), "setup", *command]
