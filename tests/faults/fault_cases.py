"""Faults of the campaign: every kind, the expected outcome, and the number of faults per run.

A fault inside a worker is a row of ``saboteur.json``; one from outside is a function of ``fault_inject``. Faults after
which training continues are chained: one run suffers several, ten steps apart, with a checkpoint between any two.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fault_runs import CHECKPOINT_EVERY
from site_files import options

NUM_RANKS = 4
SPACING = 10
CHAIN = 5
"""Maximum number of faults in one run."""
PACE_S = 0.15
WRAPPED_PACE_S = 0.5
"""Pace of scripts: between two faults, a checkpoint has to be left alone for a while, and published."""
SLOW_PACE_S = 2.0

Inside = Callable[[random.Random], dict[str, Any]]
"""Makes a fault inside a worker, with what is left to chance."""


@dataclass(frozen=True)
class Expected:
    """Expected outcome of a fault."""

    kinds: frozenset[str] = frozenset()
    """Failure kinds that are right, with ``none`` among them if saving early is enough; empty: the fault must not be
    classified as a failure at all."""
    actions: frozenset[str] = frozenset()
    """Decisions that are right; empty if there is nothing to decide. With ``""`` among them, and ``none`` among the
    kinds, the fault may leave the run unharmed."""
    blame: str = ""
    """``rank`` or ``node``: the only thing that must be named; empty if no single one is to blame."""
    limit: str = ""
    """Target for the time to find it: ``death``, ``hang``, ``relayed`` (a hang of a program whose progress is polled),
    ``soon``, ``silence`` (of an agent), or none."""
    same_numbers: bool = True
    """True if the final parameters must be those of the undisturbed run, bit for bit."""


def expect(kinds: str, actions: str, blame: str = "", limit: str = "", *, same_numbers: bool = True) -> Expected:
    """An outcome; kinds and actions are words with spaces between them."""
    return Expected(frozenset(kinds.split()), frozenset(actions.split()), blame, limit, same_numbers)


@dataclass(frozen=True)
class Fault:
    """One fault that is injected into a run."""

    row: str
    """Row of the table."""
    expected: Expected
    step: int
    inside: dict[str, Any] | None = None
    """Row of ``saboteur.json``."""
    outside: str = ""
    """Name of a function of ``fault_inject``."""


@dataclass(frozen=True)
class Scenario:
    """One run and its faults."""

    name: str
    faults: tuple[Fault, ...]
    total_steps: int
    num_nodes: int = NUM_RANKS
    num_ranks: int = NUM_RANKS
    """Ranks on all nodes together."""
    overrides: tuple[str, ...] = ()
    needs: frozenset[str] = field(default_factory=frozenset)
    """``slurm``, ``namespaces``, ``postgres``, ``prefect``, ``small_disk``, ``memory_group``."""
    pace_s: float = PACE_S
    """Sleep in every call of the reward function, or in every step of the script."""
    is_wrapped: bool = False
    """True for a script of torchrun in place of the native trainer."""
    compared: tuple[str, ...] = ()
    """Settings shared with the undisturbed run that it is compared with."""

    @property
    def settings(self) -> list[str]:
        """The ``--set`` options of the run."""
        steps = f"loops.main.num_steps={self.total_steps - CHECKPOINT_EVERY}"
        own = [
            f"trainer.num_steps={self.total_steps}" if self.is_wrapped else steps,
            f"resources.num_nodes={self.num_nodes}",
            f"resources.ranks_per_node={self.num_ranks // self.num_nodes}",
            *self.compared,
            *self.overrides,
        ]
        return options(*own)


@dataclass(frozen=True)
class Kind:
    """A row of the table, and the way to make a fault of its kind."""

    row: str
    expected: Expected
    is_hang: bool = False
    inside: Inside | None = None
    outside: str = ""
    ends_run: bool = False
    """Training does not continue after it: one fault per run."""
    takes_node: bool = False
    """Its node stays away until the run is over: a run has at most as many as it has spare nodes."""
    num_nodes: int = NUM_RANKS
    overrides: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    fixed_step: int = 0
    """Step at which it strikes; 0 for any."""
    on_checkpoint: bool = False
    """Only at steps that are evaluated and saved."""
    first_step: int = 0
    """Steps that the run makes before the first fault may strike."""
    more_steps: int = 0
    """Additional, slow steps of the run, so that it outlasts the fault."""
    is_wrapped: bool = False
    """The fault is for a script of torchrun, not for the native trainer."""
    compared: tuple[str, ...] = ()
    """Settings shared with the undisturbed run that its run is compared with."""


# ---------------------------------------------------------------------------------------------------------------------
# Kinds

_IN_PLACE = "restart_in_place"
_STOPPED = expect("hang", _IN_PLACE, "rank", "hang")
_MISMATCH = expect("collective_mismatch", "stop", same_numbers=False)
SLURM = frozenset({"slurm"})
_LOST = expect("node_lost", "new_attempt", "node", "silence")


def in_a_rank(moment: str, what: str, **fields: Any) -> Inside:
    """A fault at a moment of any one rank."""
    return lambda chance: {"moment": moment, "what": what, "rank": chance.randrange(NUM_RANKS), **fields}


def in_a_collective(what: str) -> Inside:
    """A fault of any one rank in the collective for the metrics."""
    return lambda chance: {"moment": "metrics", "what": what, "rank": -1, "odd_rank": chance.randrange(NUM_RANKS)}


def _beat(what: str, phase: str, beats: int = 1) -> Inside:
    at_a_beat = in_a_rank("beat", what, phase=phase)
    return lambda chance: {**at_a_beat(chance), "after_beats": chance.randrange(beats)}


def _slow(phase: str, seconds: float, gap_s: float) -> Inside:
    return in_a_rank("slow", "slow", phase=phase, seconds=seconds, gap_s=gap_s)


KINDS: tuple[Kind, ...] = (
    Kind("SIGKILL a rank", expect("worker_killed", _IN_PLACE, "rank", "death"), outside="kill_rank"),
    Kind("SIGSTOP a rank", _STOPPED, is_hang=True, outside="stop_rank"),
    Kind("SIGSTOP in rollout", _STOPPED, is_hang=True, inside=_beat("stop", "rollout", beats=4)),
    Kind("SIGSTOP in checkpoint", _STOPPED, is_hang=True, inside=_beat("stop", "checkpoint", 2), on_checkpoint=True),
    Kind("SIGSTOP in evaluation", _STOPPED, is_hang=True, inside=_beat("stop", "evaluate", 4), on_checkpoint=True),
    Kind("endless Python loop in the reward function", _STOPPED, is_hang=True,
         inside=in_a_rank("reward", "endless_loop")),
    Kind("C call holding the GIL", _STOPPED, is_hang=True, inside=in_a_rank("reward", "hold_gil")),
    Kind("a rank skips a collective, equal shape", _MISMATCH, is_hang=True, inside=in_a_collective("skip_equal_shape"),
         ends_run=True),
    # Only gloo's words tell these two apart before the flight recorders are read: they are confirmed once.
    Kind("a rank skips a collective, another shape",
         expect("collective_mismatch", "restart_in_place stop", same_numbers=False), is_hang=True,
         inside=in_a_collective("skip_other_shape"), ends_run=True),
    Kind("a rank sends a wrong shape", expect("collective_mismatch", "restart_in_place stop", same_numbers=False),
         inside=in_a_collective("wrong_shape"), ends_run=True),
    Kind("raised CUDA OOM", expect("cuda_oom", "new_attempt restart_in_place", "rank", "death", same_numbers=False),
         inside=_beat("cuda_oom", "train"), ends_run=True),
    Kind("host OOM kill", expect("host_oom", _IN_PLACE, "rank", "death"), inside=_beat("host_oom", "train"),
         needs=frozenset({"memory_group"})),
    Kind("NaN in the loss", expect("non_finite", "new_attempt restart_in_place"),
         inside=in_a_rank("loss", "nan"), ends_run=True),
    Kind("disk full", expect("disk_full", "stop", same_numbers=False), outside="wait_for_full_disk", ends_run=True,
         fixed_step=-1, overrides=("checkpoint.keep_last=100", "checkpoint.every_num_steps=1"),
         needs=frozenset({"small_disk"})),
    Kind("bad config seen only at run time", expect("config", "stop", same_numbers=False), outside="nothing",
         ends_run=True, fixed_step=-1, overrides=('model.config.hidden_act="nosuch"',)),
    Kind("agent killed, the leader", expect("agent_killed", "new_attempt", "node", "death"), outside="kill_leader",
         needs=SLURM),
    Kind("agent killed, another", expect("agent_killed", "new_attempt", "node", "death"), outside="kill_agent",
         needs=SLURM),
    Kind("node down (scontrol)", expect("node_lost", "new_attempt", "node", "death"), outside="node_down",
         takes_node=True, num_nodes=2, needs=SLURM),
    Kind("slurmd killed with its tasks", expect("node_lost agent_killed", "new_attempt", "node", "death"),
         outside="kill_slurmd", takes_node=True, num_nodes=2, needs=SLURM),
    Kind(
        "a byte of the newest checkpoint flipped, then SIGKILL a rank",
        expect("checkpoint_corrupt", _IN_PLACE),
        outside="damage_and_kill_rank",
        overrides=('checkpoint.memory="off"',),  # otherwise the file is not read
    ),
    Kind("the newest checkpoint has no manifest, then an agent killed", expect("checkpoint_corrupt", _IN_PLACE),
         outside="damage_and_kill_agent", needs=SLURM),
    Kind("metrics and events deleted while they are written", Expected(), outside="delete_metrics"),
    Kind("SIGSTOP of agent 0", _LOST, outside="stop_leader", takes_node=True, num_nodes=2, needs=SLURM),
    Kind(
        "SIGSTOP of another agent",
        _LOST,
        outside="stop_agent",
        takes_node=True,
        num_nodes=2,
        more_steps=20,  # its ranks continue: the run must not be over before the agent is given up
        needs=SLURM,
    ),
    Kind("agent 0's node frozen", _LOST, outside="freeze_leader", takes_node=True, num_nodes=2, needs=SLURM),
    Kind("another node frozen", _LOST, outside="freeze_another", takes_node=True, num_nodes=2, needs=SLURM),
    Kind(
        "packets of agent 0's node swallowed",
        # If two nodes cannot hear each other, it is unknown which one is cut off, unless Slurm has noticed too.
        expect("network node_lost", "new_attempt", limit="silence"),
        outside="cut_leader",
        ends_run=True,
        num_nodes=2,
        needs=frozenset({"slurm", "namespaces"}),
    ),
    Kind("run directory removed", expect("file_system", "stop", same_numbers=False), outside="remove_directory",
         ends_run=True),
    Kind("agent and rank of a node stopped together", expect("hang node_lost", "restart_in_place new_attempt", "node"),
         outside="stop_agent_and_rank", takes_node=True, num_nodes=2, needs=SLURM),
    Kind("two ranks at once, one killed and one stopped", expect("worker_killed hang", _IN_PLACE, limit="death"),
         outside="kill_and_stop"),
    Kind("all ranks stopped", expect("hang collective_hang", _IN_PLACE, limit="hang"), outside="stop_all_ranks"),
    Kind("all agents killed", expect("agent_killed", "new_attempt", limit="death"), outside="kill_all_agents",
         needs=SLURM),
    Kind(
        "slurmstepd killed",
        # Slurm either ends the step, or has no process left to do so: the agent continues, and the run is unharmed.
        Expected(frozenset({"agent_killed", "node_lost", "none"}), frozenset({"new_attempt", ""})),
        outside="kill_stepd",
        takes_node=True,
        num_nodes=2,
        more_steps=20,
        needs=SLURM,
    ),
    Kind("controller stopped for 90 s while a rank dies", expect("worker_killed", _IN_PLACE, "rank", "death"),
         outside="kill_rank_without_controller", more_steps=40),
    Kind("database locked for 60 s while a rank dies", expect("worker_killed", _IN_PLACE, "rank", "death"),
         outside="kill_rank_with_locked_database", more_steps=30),
    Kind("300 processes forked by a reward function", Expected(), inside=in_a_rank("reward", "fork")),
    Kind("slurmctld away for 30 s", Expected(), outside="slurmctld_away", more_steps=10, needs=SLURM),
    Kind("database away for 60 s", Expected(), outside="database_away", more_steps=30, needs=frozenset({"postgres"})),
    Kind("Prefect server away for 60 s", Expected(), outside="prefect_away", more_steps=30,
         needs=frozenset({"prefect"})),
    Kind("flow process kill -9", Expected(), outside="kill_flow"),
    Kind("time limit", expect("none time_limit preemption", "new_attempt"), outside="wait_for_time_limit",
         ends_run=True, more_steps=40, overrides=("resources.time_limit_s=180", "slurm.save_lead_s=60"), needs=SLURM),
    Kind("preemption", expect("none preemption", "new_attempt"), outside="preempt", ends_run=True, needs=SLURM),
    Kind("scancel from outside", expect("user_cancel", "stop", same_numbers=False), outside="scancel", ends_run=True,
         needs=SLURM),
)  # fmt: skip

CONTROLS: tuple[Kind, ...] = (
    Kind("control: a rollout of 4 s, below the floor", Expected(), inside=_slow("rollout", 4.0, 0.8)),
    Kind("control: a rollout of 8 s, above the floor", Expected(), inside=_slow("rollout", 8.0, 2.0)),
    Kind("control: a silence of 3.5 s in a rollout", Expected(), inside=_slow("rollout", 3.5, 3.5)),
    Kind("control: a checkpoint of 7 s", Expected(), inside=_slow("checkpoint", 7.0, 5.5), on_checkpoint=True),
    Kind("control: an evaluation of 8 s", Expected(), inside=_slow("evaluate", 8.0, 2.0), on_checkpoint=True),
    Kind("control: a silence of 3.5 s in the reward", Expected(), inside=_slow("reward", 3.5, 3.5)),
    Kind("control: the first step compiles for 12 s", Expected(), inside=_slow("train", 12.0, 12.0), fixed_step=1),
    Kind("control: a suspended and resumed job", Expected(), outside="suspend", needs=SLURM),
)
"""Slow or unusual, but healthy behaviour. A chain of controls is one run."""


# ---------------------------------------------------------------------------------------------------------------------
# From kinds to runs


def scenarios(
    seed: int, times_hang: int, times_other: int, num_controls: int, available: frozenset[str]
) -> list[Scenario]:
    """All runs of a campaign. The same arguments give the same faults at the same moments.

    Args:
        available: available services out of ``slurm``, ``postgres`` and so on; kinds that need others are left out.
    """
    found: list[Scenario] = []
    for kind in (kind for kind in KINDS if kind.needs <= available):
        times = times_hang if kind.is_hang else times_other
        size = 1 if kind.ends_run or kind.more_steps else NUM_RANKS - kind.num_nodes if kind.takes_node else CHAIN
        for number, count in enumerate(_chunks(times, size)):
            found.append(chain(f"{_slug(kind.row)}-{number}", [kind] * count, seed))
    possible = [kind for kind in CONTROLS if kind.needs <= available]
    controls = [possible[number % len(possible)] for number in range(num_controls)]
    in_order = sorted(controls, key=lambda kind: kind.fixed_step != 1)
    for number, chunk in enumerate(_deal(in_order, CHAIN)):
        found.append(chain(f"controls-{number}", chunk, seed))
    return found


def repeated(name: str, kinds: Iterable[Kind], seed: int, times: int, size: int) -> list[Scenario]:
    """Runs with every kind this many times, at most ``size`` in one run; a kind that ends its run is alone in it."""
    found: list[Scenario] = []
    for number, kind in enumerate(kinds):
        length = 1 if kind.ends_run else min(size, times)
        for first in range(0, times, length):
            found.append(chain(f"{name}-{number}-{first}", [kind] * min(length, times - first), seed))
    return found


def on_one_node(scenario: Scenario) -> Scenario:
    """The scenario with all ranks on one node, where naming the node is no blame."""
    faults = tuple(
        replace(fault, expected=replace(fault.expected, blame=fault.expected.blame.replace("node", "")))
        for fault in scenario.faults
    )
    return replace(scenario, num_nodes=1, faults=faults)


def chain(name: str, kinds: Sequence[Kind], seed: int) -> Scenario:
    """One run that suffers these faults, one after another."""
    chance = random.Random(f"{seed} {name}")
    faults = tuple(_fault(kind, number, chance) for number, kind in enumerate(kinds))
    more_steps = max(kind.more_steps for kind in kinds)
    total = max(kind.first_step for kind in kinds) + SPACING * (len(kinds) + 1) + more_steps
    return Scenario(
        name=name,
        faults=faults,
        total_steps=total,
        num_nodes=min(kind.num_nodes for kind in kinds),
        overrides=tuple(dict.fromkeys(setting for kind in kinds for setting in kind.overrides)),
        needs=frozenset().union(*(kind.needs for kind in kinds)),
        pace_s=SLOW_PACE_S if more_steps else WRAPPED_PACE_S if kinds[0].is_wrapped else PACE_S,
        is_wrapped=kinds[0].is_wrapped,
        compared=kinds[0].compared,
    )


def _fault(kind: Kind, number: int, chance: random.Random) -> Fault:
    base = kind.first_step + SPACING * (number + 1)
    step = kind.fixed_step or base + chance.choice((0, 5) if kind.on_checkpoint else (1, 2, 3, 4))
    inside = None
    if kind.inside is not None:
        inside = {"name": f"fault-{number}", "step": step, **kind.inside(chance)}
    return Fault(kind.row, kind.expected, step, inside, kind.outside)


def _chunks(count: int, size: int) -> Iterator[int]:
    while count > 0:
        yield min(count, size)
        count -= size


def _deal(kinds: Sequence[Kind], size: int) -> Iterable[list[Kind]]:
    """Distribute faults over runs of at most ``size``; a fault with a fixed step comes first in its run, and is the
    only one of its kind there."""
    num_runs = -(-len(kinds) // size)
    return (list(kinds[index::num_runs]) for index in range(num_runs))


def _slug(row: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in row.lower()).split())
