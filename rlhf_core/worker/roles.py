"""Functions that run for each role: the one place that names those of the training package, and imports them late.

Of that package the agent otherwise knows only the words that both speak (``training/types.py``), which need no torch.

A target is ``module:function``; the function takes a ``WorkerContext`` and returns a ``RoleResult``. It tells its
progress through ``context.reporter``; a worker that does not beat is taken for hung.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from rlhf_core.errors import BadInput
from rlhf_core.garbage import uncollected
from rlhf_core.schemas.resources import Role

if TYPE_CHECKING:
    from rlhf_core.training.types import RoleResult, WorkerContext

TARGETS: dict[Role, str] = {
    Role.TRAINER: "rlhf_core.training.trainers.run:run_trainer",
    Role.EVALUATOR: "rlhf_core.training.evaluation.evaluator:run_evaluator",
    Role.ROLLOUT: "rlhf_core.training.rollouts.server.process:run_engine",
}
"""The native targets. Roles without one need a target given to the agent."""

COMMAND = "rlhf_core.worker.command.follower:run_command_trainer"
"""Follows a trainer that is another program."""
PROBE = "rlhf_core.training.probes.node:run"
"""Measures a node."""
WARM = "rlhf_core.training.warm:import_libraries"
"""Makes the imports of a native worker ahead of it."""
CONTENT = "rlhf_core.training.probes.content:check_content"
"""Looks at the data before a run."""


def target_of(role: Role, given: dict[Role, str]) -> str:
    """The target of a role: what was given, or the native one.

    Raises:
        BadInput: neither is there.
    """
    target = given.get(role) or TARGETS.get(role)
    if target is None:
        raise BadInput(f"nothing runs for role {role} in this version; roles with a target: {', '.join(TARGETS)}")
    return target


def load(path: str) -> Callable[..., object]:
    """Import ``module:function``.

    Raises:
        BadInput: the path has another form, or leads to something that cannot be called.
        ImportError: the module cannot be imported, or has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise BadInput(f"found {path!r}, expected module:function")
    with uncollected():
        module = importlib.import_module(module_name)
    try:
        function = getattr(module, name)
    except AttributeError:
        raise ImportError(f"module {module_name} has no {name}") from None
    if not callable(function):
        raise BadInput(f"{path} is no function but {type(function).__name__}")
    return cast("Callable[..., object]", function)


def load_role(path: str) -> "Callable[[WorkerContext], RoleResult]":
    """Import what runs for a role; see :func:`load`."""
    return cast("Callable[[WorkerContext], RoleResult]", load(path))
