"""Runs of a program that knows nothing of this project: a script that torchrun starts on four nodes."""

from fault_cases import CHAIN, NUM_RANKS, Expected, Kind, Scenario, repeated

PREFIX = "torchrun script"
STEPS_BEFORE = 20
"""Ranks that report no steps of their own count as being set up until they have made progress for some seconds."""
_IN_PLACE = frozenset({"restart_in_place"})
_HEALTHY = Expected()

KINDS: tuple[Kind, ...] = (
    Kind(
        f"{PREFIX}: SIGKILL a rank",
        Expected(frozenset({"worker_killed"}), _IN_PLACE, "rank", "death", same_numbers=False),
        outside="kill_program_rank",
        is_wrapped=True,
        first_step=STEPS_BEFORE,
    ),
    Kind(
        f"{PREFIX}: SIGSTOP a rank",
        Expected(frozenset({"hang"}), _IN_PLACE, "rank", "relayed", same_numbers=False),
        outside="stop_program_rank",
        is_wrapped=True,
        first_step=STEPS_BEFORE,
    ),
    Kind(
        f"{PREFIX}: a rank enters another collective",
        Expected(frozenset({"collective_mismatch"}), frozenset({"stop"}), same_numbers=False),
        inside=lambda chance: {"moment": "step", "what": "disagree", "rank": chance.randrange(NUM_RANKS)},
        ends_run=True,
        is_wrapped=True,
        first_step=STEPS_BEFORE,
    ),
    Kind(
        f"{PREFIX}: control: a step takes 3.5 s",
        _HEALTHY,
        inside=lambda chance: {"moment": "step", "what": "sleep", "rank": chance.randrange(NUM_RANKS), "seconds": 3.5},
        is_wrapped=True,
        first_step=STEPS_BEFORE,
    ),
)


def wrapped_scenarios(seed: int, times: int) -> list[Scenario]:
    """Runs with every kind this many times."""
    return repeated("torchrun-script", KINDS, seed, times, CHAIN)
