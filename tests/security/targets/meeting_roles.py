"""Role for real ranks with torch: they meet, exchange data, and stay until a file releases them."""

import time

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.distributed import init_process_group, leave_process_group
from rlhf_core.training.types import RoleResult, WorkerContext


def train(context: WorkerContext) -> RoleResult:
    """Exchange the data of a training run: sums, values of all ranks, and a text of the first rank."""
    ranks = init_process_group(context)
    gathered = ranks.gather({"rank": ranks.rank, "text": "é\u2028", "numbers": [0.1, float(ranks.rank)]})
    assert [one["rank"] for one in gathered] == list(range(ranks.num_ranks))
    assert gathered[-1] == {
        "rank": ranks.num_ranks - 1,
        "text": "é\u2028",
        "numbers": [0.1, float(ranks.num_ranks - 1)],
    }
    assert ranks.from_first(f"from {ranks.rank} é") == "from 0 é"
    facts = ranks.exchange("facts", {"rank": ranks.rank}, 5.0)
    assert facts == {rank: {"rank": rank} for rank in range(ranks.num_ranks)}
    if ranks.is_first:
        (context.run_dir.root / "met").write_text("")
    step = 0
    while not ranks.sum([float((context.run_dir.root / "go").exists())])[0]:
        step += 1
        context.reporter.beat(Phase.TRAIN, step)
        time.sleep(0.05)
    leave_process_group(ranks)
    return RoleResult.DONE
