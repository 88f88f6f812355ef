"""Record of a failure: its fingerprint, and its incident."""

from dataclasses import fields, replace

import pytest

from rlhf_core.diagnosis.failure import Failure, fingerprint
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind

NOW = utc_now()
PLAIN = Failure(FailureKind.UNKNOWN, "", "")
FULL = Failure(
    kind=FailureKind.HANG,
    message="rank 1 was stopped",
    fingerprint="f1",
    ranks=(1,),
    nodes=("node1",),
    is_undecided=True,
    phase="train",
    step=7,
    detected_after_s=1.5,
    collective="gloo:all_reduce",
    collective_sequence=9,
    damaged_checkpoint="step-000005",
    health_rule="kl",
)


@pytest.mark.parametrize("name", [field.name for field in fields(Failure)])
def test_each_fact_about_a_failure_is_in_its_incident(name: str) -> None:
    changed = replace(PLAIN, **{name: getattr(FULL, name)})
    assert changed.incident(1, 0, NOW) != PLAIN.incident(1, 0, NOW)


def test_the_fingerprint_leaves_out_what_changes_from_time_to_time() -> None:
    unknown = FailureKind.UNKNOWN
    first = fingerprint(unknown, "boom at 0x7f3a in /tmp/a/b.py, step 12, loss 1.5e-3")
    assert first == fingerprint(unknown, "boom at 0x11ff in /home/u/b.py, step 999, loss 2.5e-9")
    assert first != fingerprint(unknown, "bang at 0x7f3a in /tmp/a/b.py, step 12, loss 1.5e-3")
    assert first != fingerprint(FailureKind.CONFIG, "boom at 0x7f3a in /tmp/a/b.py, step 12, loss 1.5e-3")
