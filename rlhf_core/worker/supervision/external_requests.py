"""Requests to an agent from outside: of the user, of Slurm, of other agents. The supervising thread receives them."""

from dataclasses import dataclass

from rlhf_core.schemas.failures import FailureKind


@dataclass
class ExternalRequests:
    """External requests to this agent. Each is kept once received; empty means that there was none."""

    cancel: str = ""
    """Reason given by the user for cancelling the run."""
    end: str = ""
    """Signal that ends the agent, with the node if it is another one."""
    stop: str = ""
    """Source of a request to save and stop."""
    broken: str = ""
    """Reason why an agent cannot continue or is considered lost."""
    broken_kind: FailureKind = FailureKind.UNKNOWN
    broken_node: str = ""

    @property
    def to_end(self) -> bool:
        """True if all workers must be killed."""
        return bool(self.cancel or self.end or self.broken)
