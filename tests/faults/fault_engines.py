"""Runs with rollout engines beside the trainers: two nodes, each with two trainer ranks and an engine; or one node with
a vLLM engine in two processes."""

from dataclasses import replace

from fault_cases import CHAIN, SLURM, Expected, Inside, Kind, Scenario, expect, repeated

PREFIX = "rollout engines"
AHEAD_PREFIX = "engines several steps ahead"
SPLIT_PREFIX = "split engine"
NUM_ENGINES = 2
SETTINGS = (
    f"rollout.engines={NUM_ENGINES}",
    # One group at a time: the numbers do not depend on which prompts arrive together, so moved prompts change nothing.
    "rollout.batch_size=4",
    "loops.main.algorithm.samples_per_prompt=4",
)
AHEAD = (
    *SETTINGS,
    "rollout.max_staleness=2",
    'loops.main.algorithm.correction="token_truncate"',
)
"""Completions go on over changes of weights, so they depend on when those arrive."""
SPLIT = (
    'rollout.engine="vllm"',
    "rollout.engines=1",
    "rollout.vllm.tensor_parallel=2",
    "model.config.num_key_value_heads=2",
    "model.config.head_dim=32",  # the minimum for vLLM's attention on CPU
    # Seven processes share the cores of one machine.
    "supervise.rollout_floor_s=10",
    "supervise.setup_floor_s=600",
)
_KILLED = expect("worker_killed", "restart_workers", "rank", "death")
_HUNG = expect("hang", "restart_workers", "rank", "hang")


def _in_an_engine(moment: str, what: str) -> Inside:
    return lambda chance: {"moment": moment, "what": what, "rank": 0, "engine": chance.randrange(NUM_ENGINES)}


def _kind(row: str, expected: Expected, **fields: object) -> Kind:
    # Slow steps: an engine is back before the next fault.
    return Kind(f"{PREFIX}: {row}", expected, num_nodes=2, compared=SETTINGS, more_steps=5, **fields)  # type: ignore[arg-type]


def _ahead(kind: Kind) -> Kind:
    """The same fault in a run whose engines sample several steps ahead, which has not the same bits twice."""
    row = kind.row.replace(PREFIX, AHEAD_PREFIX)
    return replace(kind, row=row, expected=replace(kind.expected, same_numbers=False), compared=AHEAD)


def _split(row: str, expected: Expected, outside: str) -> Kind:
    # The trainers wait for their only engine: they make no more steps than without a fault.
    return Kind(f"{SPLIT_PREFIX}: {row}", expected, num_nodes=1, outside=outside, compared=SPLIT)


_BESIDE_TRAINERS = (
    _kind("SIGKILL an engine", _KILLED, outside="kill_engine"),
    _kind("SIGSTOP an engine", _HUNG, outside="stop_engine"),
    _kind("SIGKILL an engine in a sync of weights", _KILLED, inside=_in_an_engine("sync", "SIGKILL")),
    _kind("SIGSTOP an engine in a sync of weights", _HUNG, inside=_in_an_engine("sync", "SIGSTOP")),
    _kind("SIGKILL a trainer rank", expect("worker_killed", "restart_in_place", "rank", "death"), outside="kill_rank"),
    _kind("agent killed", expect("agent_killed", "new_attempt", "node", "death"), outside="kill_agent", needs=SLURM),
    _kind("control: an engine is stopped for 3 s", Expected(), outside="pause_engine"),
    _kind(
        "an engine computes something else in two syncs",
        expect("engine", "restart_workers", "rank", "death"),
        inside=_in_an_engine("probe", "other"),
    ),
)
KINDS: tuple[Kind, ...] = (
    *_BESIDE_TRAINERS,
    *map(_ahead, _BESIDE_TRAINERS),
    _split("SIGKILL one of its two processes", _KILLED, "kill_engine_part"),
    _split("SIGSTOP one of its two processes", _HUNG, "stop_engine_part"),
)


def engine_scenarios(seed: int, times: int, available: frozenset[str]) -> list[Scenario]:
    """Runs with every kind this many times.

    Args:
        available: see ``fault_cases.scenarios``.
    """
    possible = [kind for kind in KINDS if kind.needs <= available]
    return repeated(PREFIX.replace(" ", "-"), possible, seed, times, CHAIN - 1)
