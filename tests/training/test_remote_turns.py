"""Rollouts of several turns over real engines: each goes on by itself, and depends neither on others nor on losses."""

import itertools
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_models import PROMPTS, SEEDS, char_tokenizer, tiny_model, tokens_of
from engine_groups import EngineGroup, conversations_of, no_beat
from process_tools import until

from rlhf_core.errors import ToolFailed
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.remote.engine import RemoteEngines
from rlhf_core.training.rollouts.transformers_engine import TransformersEngine
from rlhf_core.training.types import Completion, Row

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

DRAWN = Sampling(64, 1.0, 8, stop=tuple(string.ascii_letters + string.digits))
"""A turn ends with a letter or a digit."""
SHORT = replace(DRAWN, stop=tuple(string.printable))
STARTS = itertools.count(1)
Rollouts = Sequence[Sequence[Completion]]


@pytest.fixture
def trainer(group: EngineGroup) -> RemoteEngines:
    """A trainer whose version 1 is in force on both engines."""
    trainer = group.trainer(restart=next(STARTS))
    trainer.load(tiny_model(), 1, no_beat)
    return trainer


def rows_of(num: int, **columns: Sequence[Any]) -> list[Row]:
    return [Row(f"u{index}", "", "", "", {name: of[index] for name, of in columns.items()}) for index in range(num)]


def in_process(ranks: Ranks, rows: Sequence[Row], seed: int = 0, environment: str = "Dice") -> list[list[Completion]]:
    """Rollouts in rounds, by an engine in this process with the weights of this seed."""
    engine = TransformersEngine(char_tokenizer())
    engine.load(tiny_model(seed=seed), seed + 1, no_beat)
    with conversations_of(ranks, environment) as conversations:
        return conversations.sample(engine, rows, PROMPTS, SEEDS, DRAWN, seed + 1, no_beat)


def assert_same(found: Rollouts, expected: Rollouts) -> None:
    """Tokens, turns, observations and rewards; log-probabilities differ by how sequences were batched."""
    for made, right in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert (made.token_ids, made.episode) == (right.token_ids, right.episode)
        assert made.weight_version == right.weight_version
        assert made.logprobs == pytest.approx(right.logprobs, abs=1e-4)


class InRounds:
    """The engines of a group as one that takes no requests meanwhile."""

    continuous = None

    def __init__(self, trainer: RemoteEngines) -> None:
        self.sample = trainer.sample


def test_a_rollout_goes_on_while_another_waits_for_its_tool(
    trainer: RemoteEngines, ranks: Ranks, tmp_path: Path
) -> None:
    """The first one is only answered once the other is over, three turns later. Negative control: in rounds, that is
    never."""
    ends = []
    for name, engine in (("continuous", trainer), ("rounds", InRounds(trainer))):
        (tmp_path / name).mkdir()
        rows = rows_of(2, folder=[str(tmp_path / name)] * 2, waits=[True, False])
        with conversations_of(ranks, "Waiting", timeout_s=60.0 if name == "continuous" else 2.0) as conversations:
            made = conversations.sample(engine, rows, PROMPTS[:2], [[1], [2]], SHORT, 1, no_beat)  # type: ignore[arg-type]
        ends.append([one.episode.end for group in made for one in group if one.episode])
    assert ends == [["answer", "answer"], ["failure", "answer"]]


def test_an_engine_that_is_killed_in_mid_rollout_changes_nothing(
    group: EngineGroup, trainer: RemoteEngines, ranks: Ranks
) -> None:
    """Its turns go to the other engine, and to itself once it has been started again and given the same version."""
    gate = group.gate("decode", 1).close()
    with ThreadPoolExecutor() as pool, conversations_of(ranks, "Dice") as conversations:
        rows = rows_of(len(PROMPTS))
        arguments = (rows, PROMPTS, SEEDS, DRAWN, 1, no_beat)
        made = pool.submit(conversations.sample, trainer, *arguments)
        until(gate.reached.exists)
        group.kill(1)
        gate.open()
        group.start(1)
        found = made.result()
    expected = in_process(ranks, rows)
    assert_same(found, expected)
    assert max(len(one.episode.turns) for group in expected for one in group if one.episode) > 2
    counts = trainer.take_counts()
    assert counts["rollout/moved_prompts"] > 0
    assert counts["rollout/refused_completions"] == 0


def test_rollouts_that_lost_all_engines_begin_anew_with_the_next_weights(
    group: EngineGroup, trainer: RemoteEngines, ranks: Ranks, tmp_path: Path
) -> None:
    """Sampled ahead: what was begun with weights that no engine has any more is forgotten, with its environments, and
    no rollout has turns of two versions. Prompts whose rollouts are over are kept."""
    waits = [True, False, True, False, False]
    for name in ("held", "free"):
        (tmp_path / name).mkdir()
    rows = rows_of(len(waits), waits=waits, folder=[str(tmp_path / ("held" if one else "free")) for one in waits])
    with conversations_of(ranks, "Waiting", timeout_s=600.0) as conversations:
        source = conversations.source(rows, PROMPTS, SEEDS, DRAWN)
        trainer.continuous.begin(source, 1)
        until(lambda: len(source.made) == waits.count(False))
        for rank in range(2):
            group.kill(rank)
        group.start_missing()
        trainer.load(tiny_model(seed=1), 2, no_beat)
        assert not source.is_waiting
        (tmp_path / "held" / "over").touch()
        trainer.continuous.collect(no_beat)
        made = source.results()
    of_version = [in_process(ranks, rows, seed, "Waiting") for seed in range(2)]
    assert_same(made, [of_version[one][index] for index, one in enumerate(waits)])
    assert tokens_of(made) != tokens_of(of_version[0])
    assert tokens_of(made) != tokens_of(of_version[1])


def test_a_tool_that_fails_ends_the_run_from_the_background(trainer: RemoteEngines, ranks: Ranks) -> None:
    """With the error that it has in a rollout of the step itself, at every wait for it."""
    with conversations_of(ranks, "Crashing", on_failure="stop") as conversations:
        arguments = (rows_of(1), PROMPTS[:1], [[1]], SHORT)
        with pytest.raises(ToolFailed) as own:
            conversations.sample(trainer, *arguments, 1, no_beat)
        trainer.continuous.begin(conversations.source(*arguments), 1)
        for _ in range(2):
            with pytest.raises(ToolFailed, match="call ended its process, in a rollout of prompt u0") as found:
                trainer.continuous.wait(no_beat)
            assert str(found.value) == str(own.value)
        trainer.continuous.stop()


def test_a_rollout_that_is_stopped_keeps_what_is_over(trainer: RemoteEngines, ranks: Ranks, tmp_path: Path) -> None:
    """As for a checkpoint before the end of the process: it does not wait for tools, and ends them. The rest is begun
    anew if sampling goes on, with an environment of its own."""
    folders = [tmp_path / name for name in ("waits", "ends")]
    for folder in folders:
        folder.mkdir()
    (folders[1] / "over").touch()
    rows = rows_of(2, folder=[str(folder) for folder in folders], waits=[True, True])
    with conversations_of(ranks, "Waiting", timeout_s=600.0) as conversations:
        source = conversations.source(rows, PROMPTS[:2], [[1], [2]], SHORT)
        trainer.continuous.begin(source, 1)
        until(lambda: source.made)
        trainer.continuous.stop()
        assert list(source.made) == [1]
        assert not source.is_waiting
        (folders[0] / "over").touch()
        trainer.continuous.collect(no_beat)
        episodes = [made.episode for (made,) in source.results()]
    assert [(one.end, len(one.turns)) for one in episodes if one] == [("answer", 3), ("answer", 3)]
