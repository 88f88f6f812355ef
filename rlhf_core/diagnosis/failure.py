"""The one record of a failure, between its evidence and the incident that is stored."""

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime

from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind, Incident


@dataclass(frozen=True)
class Failure:
    """A diagnosed failure or warning. :func:`rlhf_core.diagnosis.classify.classify` makes it from the evidence of ended
    workers, other observers from what they alone can see; the policy decides about it, and it is stored as an
    incident."""

    kind: FailureKind
    message: str
    """Description of the failure in one or two sentences."""
    fingerprint: str
    """Equal for the same fault: :func:`fingerprint`."""
    ranks: tuple[int, ...] = ()
    """Ranks that failed first; empty if none is suspected."""
    nodes: tuple[str, ...] = ()
    """Their nodes."""
    is_undecided: bool = False
    """True if something else may have happened: it rests on the text of a log, for instance, not on a comparison of
    ranks or one of our own errors."""
    phase: str = ""
    """Phase of the first rank to blame, or else of the first to exit; empty if there was none."""
    step: int | None = None
    """Step of that rank."""
    detected_after_s: float | None = None
    """Time from its last beat to the detection of the failure, in seconds."""
    collective: str = ""
    """Collective in which ranks hung or disagreed; empty if unknown."""
    collective_sequence: int | None = None
    """Number of that collective in its process group."""
    damaged_checkpoint: str = ""
    """Checkpoint from which the workers could not resume: it is damaged, or an external trainer could not load it."""
    health_rule: str = ""
    """Rule of ``[health]`` that detected it; empty for other failures."""

    def incident(
        self,
        attempt: int,
        restart: int,
        seen_at: datetime,
        *,
        number: int = 0,
        role: Role | None = None,
        evidence_dir: str = "",
    ) -> Incident:
        """Make the incident to store. The arguments are its fields of the same names."""
        return Incident(
            attempt=attempt,
            restart=restart,
            number=number,
            role=role,
            failure_kind=self.kind,
            message=self.message,
            phase=self.phase,
            step=self.step,
            suspect_ranks=self.ranks,
            suspect_nodes=self.nodes,
            collective=self.collective,
            collective_sequence=self.collective_sequence,
            detected_after_s=self.detected_after_s,
            damaged_checkpoint=self.damaged_checkpoint,
            health_rule=self.health_rule,
            is_undecided=self.is_undecided,
            seen_at=seen_at,
            fingerprint=self.fingerprint,
            evidence_dir=evidence_dir,
        )


def fingerprint(kind: FailureKind, subject: str) -> str:
    """Return 12 hexadecimal digits that are equal for the same fault, regardless of numbers, addresses and paths."""
    plain = re.sub(r"0x[0-9a-fA-F]+|/[^\s'\":,)]+|\d+(\.\d+)?(e[+-]?\d+)?", "#", subject)
    return hashlib.sha256(f"{kind}|{' '.join(plain.split())}".encode()).hexdigest()[:12]
