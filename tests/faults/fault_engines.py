"""Runs with rollout engines beside the trainers: two nodes, each with two trainer ranks and an engine; or one node with
a vLLM engine in two processes."""

from fault_cases import CHAIN, Expected, Kind, Scenario, repeated

PREFIX = "rollout engines"
SPLIT_PREFIX = "split engine"
NUM_ENGINES = 2
SETTINGS = (
    f"rollout.engines={NUM_ENGINES}",
    # One group at a time: the numbers do not depend on which prompts arrive together, so moved prompts change nothing.
    "rollout.batch_size=4",
    "loops.main.algorithm.samples_per_prompt=4",
)
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
_SLURM = frozenset({"slurm"})
_ALONE = frozenset({"restart_workers"})
_KILLED, _HUNG = frozenset({"worker_killed"}), frozenset({"hang"})


def _kind(row: str, expected: Expected, **fields: object) -> Kind:
    # Slow steps: an engine is back before the next fault.
    return Kind(f"{PREFIX}: {row}", expected, num_nodes=2, compared=SETTINGS, more_steps=5, **fields)  # type: ignore[arg-type]


def _split(row: str, expected: Expected, outside: str) -> Kind:
    # The trainers wait for their only engine: they make no more steps than without a fault.
    return Kind(f"{SPLIT_PREFIX}: {row}", expected, num_nodes=1, outside=outside, compared=SPLIT)


KINDS: tuple[Kind, ...] = (
    _kind("SIGKILL an engine", Expected(_KILLED, _ALONE, "rank", "death"), outside="kill_engine"),
    _kind("SIGSTOP an engine", Expected(_HUNG, _ALONE, "rank", "hang"), outside="stop_engine"),
    _kind(
        "SIGKILL an engine in a sync of weights",
        Expected(_KILLED, _ALONE, "rank", "death"),
        inside=lambda chance: {"moment": "sync", "what": "SIGKILL", "rank": 0, "engine": chance.randrange(NUM_ENGINES)},
    ),
    _kind(
        "SIGSTOP an engine in a sync of weights",
        Expected(_HUNG, _ALONE, "rank", "hang"),
        inside=lambda chance: {"moment": "sync", "what": "SIGSTOP", "rank": 0, "engine": chance.randrange(NUM_ENGINES)},
    ),
    _kind(
        "SIGKILL a trainer rank",
        Expected(_KILLED, frozenset({"restart_in_place"}), "rank", "death"),
        outside="kill_rank",
    ),
    _kind(
        "agent killed",
        Expected(frozenset({"agent_killed"}), frozenset({"new_attempt"}), "node", "death"),
        outside="kill_agent",
        needs=_SLURM,
    ),
    _kind("control: an engine is stopped for 3 s", Expected(), outside="pause_engine"),
    _kind(
        "an engine computes something else in two syncs",
        Expected(frozenset({"engine"}), _ALONE, "rank", "death"),
        inside=lambda chance: {"moment": "probe", "what": "other", "rank": 0, "engine": chance.randrange(NUM_ENGINES)},
    ),
    _split("SIGKILL one of its two processes", Expected(_KILLED, _ALONE, "rank", "death"), "kill_engine_part"),
    _split("SIGSTOP one of its two processes", Expected(_HUNG, _ALONE, "rank", "hang"), "stop_engine_part"),
)


def engine_scenarios(seed: int, times: int, available: frozenset[str]) -> list[Scenario]:
    """Runs with every kind this many times.

    Args:
        available: see ``fault_cases.scenarios``.
    """
    possible = [kind for kind in KINDS if kind.needs <= available]
    return repeated(PREFIX.replace(" ", "-"), possible, seed, times, CHAIN - 1)
