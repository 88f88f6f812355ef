"""Entry functions of each role: the only place that names the training package's functions, which are imported lazily.

Otherwise the agent depends only on that package's shared types (``training/types.py``), which do not need torch.

A target is ``module:function``; the function takes a ``WorkerContext`` and returns a ``RoleResult``. It reports
progress through ``context.reporter``; a worker that does not beat counts as hung.
"""

import importlib
from collections.abc import Callable
from typing import cast

from rlhf_core.errors import BadInput
from rlhf_core.garbage import uncollected
from rlhf_core.schemas.attempts import Role

TARGETS: dict[Role, str] = {
    Role.TRAINER: "rlhf_core.training.trainers.run:run_trainer",
    Role.EVALUATOR: "rlhf_core.training.evaluation.run:run_evaluator",
    Role.ROLLOUT: "rlhf_core.training.rollouts.server.process:run_engine",
}
"""Native targets by role. Roles without one need a target passed to the agent."""

COMMAND = "rlhf_core.worker.command.follower:run_command_trainer"
"""Target that follows an external trainer."""
PROBE = "rlhf_core.training.probes.node:run"
"""Target that measures a node."""
WARM = "rlhf_core.training.warm:import_libraries"
"""Target that preloads a native worker's imports."""
WARM_PROBE = "rlhf_core.training.warm:import_probe"
"""Target that preloads the imports of :data:`PROBE`."""
CONTENT = "rlhf_core.training.probes.content:check_content"
"""Target that checks the data before a run."""
ROWS = "rlhf_core.training.probes.row_count:count_rows"
"""Target that counts the rows of the data before a run."""


def target_of(role: Role, given: dict[Role, str]) -> str:
    """The target of a role: the given one, otherwise the native one.

    Raises:
        BadInput: there is neither.
    """
    target = given.get(role) or TARGETS.get(role)
    if target is None:
        raise BadInput(f"found no target for role {role}, expected one of: {', '.join(TARGETS)}")
    return target


def load(path: str) -> Callable[..., object]:
    """Import ``module:function``.

    Raises:
        BadInput: the path is malformed, or names something that is not callable.
        ImportError: the module cannot be imported or has no such name.
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
        raise BadInput(f"{path} is not a function but {type(function).__name__}")
    return cast("Callable[..., object]", function)
