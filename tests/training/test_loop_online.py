"""Several updates of a step, the value model and dynamic sampling on real processes: passes, collectives, resume."""

import dataclasses
import json
import math
import shutil
import signal
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rank_launcher import ONE_LAYER, TINY_MODEL, TrainingGroup, launch, make_context, tiny_spec, values
from test_loop_runs import Counting, final_state, killed_for_real, metrics_of

from rlhf_core.errors import DegenerateRl
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.algorithms import specs

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

SAMPLING = [name for name, spec in specs().items() if spec.samples]
TEACHER = "{grpo}"
"""Stands for the initial model of the run of that name, which is made before."""
SEVERAL: Any = {
    "num_epochs": 2,
    "num_minibatches": 3,
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.01,
    "dual_clip": 3.0,
    "correction": "sequence_truncate",
}
PPO = {"num_epochs": 2, "num_minibatches": 2, "kl_coefficient": 0.05, "critic_warmup_steps": 1}
DAPO: Any = {"max_sampling_rounds": 3, "overlong_buffer": 2, "mask_truncated": False}
IN_RANK = {"functions": ["rank_launcher:share_right"], "timeout_s": 0}
BESIDE_RANK = {"functions": ["rank_launcher:share_right"]}


def spec_of(
    name: str, num_steps: int = 2, schedule: str = "constant", config: Any = ONE_LAYER, **settings: Any
) -> dict[str, Any]:
    """Two steps of a warm start, and some of an algorithm on 4 prompts."""
    data = {"generator_args": {"num_digits": 3, "num_train": 40, "num_eval": 3}}
    spec = tiny_spec(model={"config": config}, data=data, evaluate={"samples_per_prompt": 1})
    spec = {key: value for key, value in spec.items() if key not in ("sft", "train", "grpo")}
    warm_start = {"num_steps": 2, "algorithm": {"name": "sft", "batch_size": 8}, "optimizer": {"learning_rate": 1e-2}}
    algorithm = {"name": name, "prompts_per_step": 4, "samples_per_prompt": 4, **settings}
    optimizer = {"learning_rate": 3e-3, "schedule": schedule}
    reference = TEACHER if specs()[name].distils else ""
    main = {"num_steps": num_steps, "reference": reference, "algorithm": algorithm, "optimizer": optimizer}
    loops = {"warm_start": warm_start, "main": main}
    return {**spec, "seed": 1, "loops": loops, "reward": IN_RANK, "trainer": {"micro_batch_size": 3}}


def shortened(spec: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """The same run with fewer steps of its main loop."""
    return {**spec, "loops": {**spec["loops"], "main": {**spec["loops"]["main"], "num_steps": num_steps}}}


def split(spec: dict[str, Any]) -> dict[str, Any]:
    """The same run with split weights: its first step, which is compared, and one from weights that were updated."""
    return {**shortened(spec, 2), "trainer": {**spec["trainer"], "zero_stage": 3}}


def shared(spec: dict[str, Any]) -> dict[str, Any]:
    """The same run, in which both ranks share each row. Each trains on twice as many, in about as many passes."""
    return {**spec, "trainer": {**spec["trainer"], "sequence_parallel": 2, "micro_batch_size": 6}}


RUNS: dict[str, dict[str, Any]] = {
    **{name: spec_of(name) for name in SAMPLING},
    "two passes": spec_of("grpo", num_epochs=2),
    "two parts": spec_of("grpo", num_minibatches=2, measure_kl=True),
    "several": spec_of("grpo", config=TINY_MODEL, **SEVERAL),
    "critic": spec_of("ppo", 4, "linear", **PPO),
    "dynamic": {**spec_of("dapo", 4, **DAPO), "reward": BESIDE_RANK},
}
SPLIT = ("several", "critic", "dynamic")
"""Runs that are made with split weights too: passes of every model are collectives then."""
RUNS |= {f"{name}, split": split(RUNS[name]) for name in SPLIT}
RUNS |= {f"{name}, shared": shared(RUNS[name]) for name in (*SPLIT, "critic, split")}
KILLED = ("critic", "dynamic")
TWO_CRITICS = spec_of("ppo")
"""A warm start with a value model, which ends with it: the main loop trains another one."""
TWO_CRITICS["loops"]["warm_start"] = TWO_CRITICS["loops"]["main"]
TWO_CRITICS["reward"] = {"functions": ["rank_launcher:noisy_reward"], "timeout_s": 0}  # never 0 throughout
TWO_CRITICS["trainer"] = {"micro_batch_size": 16}
RECURRING = spec_of("grpo", 3)
RECURRING["data"] = {**RECURRING["data"], "generator_args": {"num_digits": 3, "num_train": 1, "num_eval": 10}}
"""Each step takes its only row four times."""


class Held:
    """Weights that a rank has in place, whole: of all its models whenever one more was loaded, at most; and of those
    that DeepSpeed takes over, which it would move to the device as they are."""

    def __init__(self) -> None:
        self.largest_model = self.at_most = self.taken_over = 0
        self._parts: list[weakref.ref[Any]] = []

    def _load(self, *arguments: Any) -> Any:
        from rlhf_core.training.models.causal_lm import load_causal_lm

        model = load_causal_lm(*arguments)
        self._parts += map(weakref.ref, (model, model.base_model))  # a value model has the second alone
        living = [part() for part in self._parts]
        weights = {id(one): one.numel() for part in living if part is not None for one in part.parameters()}
        self.largest_model = max(self.largest_model, model.num_parameters())
        self.at_most = max(self.at_most, sum(weights.values()))
        return model

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count within the block."""
        from rlhf_core.training.trainers import models as models_module
        from rlhf_core.training.trainers.engine import load_deepspeed

        deepspeed = load_deepspeed(on_cpu=True)
        initialize = deepspeed.initialize

        def take_over(model: Any, **options: Any) -> Any:
            self.taken_over = max(self.taken_over, sum(one.numel() for one in model.parameters()))
            return initialize(model=model, **options)

        loading = mock.patch.object(models_module, "load_causal_lm", self._load)
        with loading, mock.patch.object(deepspeed, "initialize", take_over):
            yield


def every_scenario(rank: int, num_ranks: int, folder: str, names: list[str]) -> dict[str, Any]:
    """Runs of seconds, one after the other in one process group; passes over the models of each are counted.

    One rank makes only the first step of each, which is compared.
    """
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.models.causal_lm import PolicyModel
    from rlhf_core.training.trainers import context as context_module
    from rlhf_core.training.trainers.run import train_run
    from rlhf_core.training.trainers.updates import PolicyUpdates

    ranks = init_process_group(make_context(folder, tiny_spec(), rank, num_ranks))
    results: dict[str, Any] = {}
    passes: Counter[str] = Counter()
    forward = PolicyModel.forward

    def counted(model: PolicyModel, input_ids: Any, *arguments: Any, **options: Any) -> Any:
        import torch

        trains = any(parameter.requires_grad for parameter in model.parameters())
        kind = ("train" if torch.is_grad_enabled() else "score") if trains else "reference"
        passes[f"{kind} passes"] += 1
        passes[kind] += int(options["target_mask"].any(-1).sum())
        return forward(model, input_ids, *arguments, **options)

    def train(name: str, spec: dict[str, Any]) -> dict[str, Any]:
        passes.clear()
        counting = Counting()
        spec = shortened(spec, 1) if num_ranks == 1 else spec
        teacher = str(RunDir(Path(folder) / f"{num_ranks} grpo").initial_model)
        spec = json.loads(json.dumps(spec).replace(TEACHER, teacher))
        context = make_context(f"{folder}/{name}", spec, rank, num_ranks, reporter=counting)
        held = Held()
        with mock.patch.object(PolicyModel, "forward", counted), held.counted():
            result = str(train_run(context, dataclasses.replace(ranks, reporter=counting)))
        about = {"held": (held.largest_model, held.at_most, held.taken_over), "beats": counting.beats["setup 2"]}
        return {"result": result, "collectives": counting.collectives, **about, **passes}

    for name in names:
        results[name] = train(f"{num_ranks} {name}", RUNS[name])
    results["recurring"] = train(f"{num_ranks} recurring", RECURRING)
    if num_ranks == 2:  # negative controls
        with mock.patch.object(PolicyUpdates, "_padded", lambda self, group, count: self._micro_batches(group)):
            results["unpadded"] = train("unpadded", RUNS["several"])
        same_uids = mock.patch.object(context_module, "repeated", lambda row, number: row)
        with same_uids, pytest.raises(DegenerateRl) as ended:
            train("same uids", RECURRING)
        results["same uids"] = str(ended.value)
    else:
        results["between loops"] = resumed_between_loops(TrainingGroup(folder, ranks))
    leave_process_group(ranks)
    return results


def resumed(rank: int, num_ranks: int, folder: str) -> list[str]:
    """The killed runs as the agent starts them again, and one that takes up a new value model."""
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.trainers import models as models_module
    from rlhf_core.training.trainers.run import train_run

    ranks = init_process_group(make_context(folder, tiny_spec(), rank, num_ranks))
    real = models_module.load_value_model
    fresh = mock.patch.object(models_module, "load_value_model", lambda model, _, *more: real(model, None, *more))
    results = []
    for name in (*KILLED, "forgetful"):
        spec = RUNS["critic" if name == "forgetful" else name]
        context = make_context(f"{folder}/killed {name}", spec, rank, num_ranks, restart=1)
        with fresh if name == "forgetful" else nullcontext():
            results.append(str(train_run(context, ranks)))
    leave_process_group(ranks)
    return results


def resumed_between_loops(group: TrainingGroup) -> list[str]:
    """The run with two value models, and a copy of it that goes on from the checkpoint at the end of its warm start."""
    results = [group.train("two critics", TWO_CRITICS)]
    group.rewind("two critics", "two critics, resumed", 4)
    return [*results, group.train("two critics, resumed", TWO_CRITICS, restart=1)]


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return values(launch(every_scenario, 2, folder / "two", folder=str(folder), names=list(RUNS)))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> list[dict[str, Any]]:
    names = [*SAMPLING, "several", *KILLED]
    return values(launch(every_scenario, 1, folder / "one", folder=str(folder), names=names))


@pytest.mark.parametrize("name", RUNS)
def test_every_run_ends_and_ranks_go_through_the_same_collectives(two_ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (result[name] for result in two_ranks)
    assert first["result"] == second["result"] == "done"
    passes = [key for key in first if key == "collectives" or key.endswith("passes")]
    assert {key: first[key] for key in passes} == {key: second[key] for key in passes}


def test_negative_control_without_empty_micro_batches_ranks_differ(two_ranks: list[dict[str, Any]]) -> None:
    """8 completions of a rank in 3 parts are 2 or 3 each, and not the same ones on both ranks."""
    assert two_ranks[0]["several"]["train passes"] == two_ranks[1]["several"]["train passes"]
    plain = [{key: result["unpadded"][key] for key in ("train passes", "reference passes")} for result in two_ranks]
    assert plain[0] != plain[1] or two_ranks[0]["several"]["train passes"] > plain[0]["train passes"]


def test_no_pass_is_made_that_nothing_needs(two_ranks: list[dict[str, Any]]) -> None:
    """8 completions of a rank in each of 2 steps; 8 rows of it in the warm start."""
    made = {
        name: tuple(two_ranks[0][name].get(kind, 0) for kind in ("train", "score", "reference"))
        for name in ("grpo", "two passes", "two parts", "several")
    }
    assert made["grpo"] == (8 + 16, 0, 0)
    assert made["two passes"] == (8 + 32, 0, 0), "the first update has computed what the second needs"
    trained, scored, reference = made["two parts"]
    assert (trained, reference) == (8 + 16, 16)
    assert scored == 8, "the completions of the second part"
    trained, scored, reference = made["several"]
    assert (trained, reference) == (8 + 32, 16)
    assert 8 <= scored <= 12
    warmed = two_ranks[0]["critic"]
    assert (warmed["train"], warmed["score"]) == (8 + 3 * 16, 4 * 8 + 8), (
        "a pass to measure where only the critic learns"
    )


@pytest.mark.parametrize("name", [*SAMPLING, "several", *KILLED])
def test_one_rank_makes_the_same_first_step_as_two(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]], folder: Path, name: str
) -> None:
    one, two = metrics_of(folder, f"1 {name}")[3], metrics_of(folder, f"2 {name}")[3]
    assert one["rollout/completion_digest"] == two["rollout/completion_digest"]
    compared = [key for key in one if key.startswith(("train/", "policy/", "value/", "reward/"))]
    assert {"train/loss", "train/grad_norm", "train/changed_share"} <= set(compared)
    for key in compared:
        if key != "reward/std":  # of each rank where completions are not compared with each other
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=2e-5), key


@pytest.mark.parametrize("name", SPLIT)
def test_split_weights_make_the_same_first_step(two_ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    """ZeRO 3, with ranks whose micro-batches differ in number: it ends, and comes to the same figures."""
    plain, split = metrics_of(folder, f"2 {name}")[3], metrics_of(folder, f"2 {name}, split")[3]
    assert split["rollout/completion_digest"] == plain["rollout/completion_digest"]
    for key in ("train/loss", "train/grad_norm", "train/num_tokens", "policy/kl", "value/loss"):
        if key in plain:
            assert split[key] == pytest.approx(plain[key], rel=2e-3, abs=2e-5), key


@pytest.mark.parametrize("name", [*SPLIT, "critic, split"])
def test_ranks_that_share_rows_make_the_same_steps(two_ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    """Each samples as if it had rows of its own, and then trains on the completions of both: every figure of a step is
    the same, counted once. Groups of dynamic sampling may all be those of one rank."""
    apart, together = metrics_of(folder, f"2 {name}"), metrics_of(folder, f"2 {name}, shared")
    assert set(together) == set(apart)
    for step, line in together.items():
        # The sign of a tiny gradient decides a step of AdamW: after the first, rounding shows in a few weights.
        assert line == pytest.approx(apart[step], rel=1e-3, abs=1e-4), step


@pytest.mark.parametrize("name", ["several", "critic"])
def test_split_weights_are_whole_in_one_model_at_a_time(two_ranks: list[dict[str, Any]], name: str) -> None:
    """Policy, reference and value model follow each other; DeepSpeed would move a whole one to the device by itself."""
    for results in two_ranks:
        one, at_most, taken_over = results[f"{name}, split"]["held"]
        assert at_most < 1.1 * one, "the shares of the models before it are kept apart"
        assert taken_over < 0.1 * one
        one, at_most, taken_over = results[name]["held"]
        assert at_most >= 2 * one, "below ZeRO 3, all of them are whole"
        assert taken_over >= one


@pytest.mark.parametrize("name", ["several", "several, split"])
def test_every_tensor_is_a_beat_while_models_are_loaded_and_split(two_ranks: list[dict[str, Any]], name: str) -> None:
    """Of the reference of the main loop, and under ZeRO 3 of the policy too."""
    num_layers, in_layer, others = TINY_MODEL["num_hidden_layers"], 11, 2  # tied embeddings, last norm
    num_tensors = num_layers * in_layer + others
    for results in two_ranks:
        assert results[name]["beats"] > num_tensors * (3 if name.endswith("split") else 1)


def test_a_row_that_recurs_in_a_step_is_sampled_with_other_seeds(
    two_ranks: list[dict[str, Any]], one_rank: list[dict[str, Any]], folder: Path
) -> None:
    assert [result["recurring"]["result"] for result in (*two_ranks, *one_rank)] == ["done"] * 3
    one, two = metrics_of(folder, "1 recurring")[3], metrics_of(folder, "2 recurring")[3]
    assert one["rollout/seed_digest"] == two["rollout/seed_digest"]


def test_negative_control_a_row_that_recurs_with_the_same_uid_ends_the_run(two_ranks: list[dict[str, Any]]) -> None:
    assert "different prompts are sampled with the same seeds" in two_ranks[0]["same uids"]


def test_several_updates_learn_more_than_one(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    once, twice, several = (metrics_of(folder, f"2 {name}")[3] for name in ("grpo", "two passes", "several"))
    assert once["policy/clip_share"] == 0
    assert twice["train/num_tokens"] == 2 * once["train/num_tokens"]
    assert several["policy/mismatch_weight"] == pytest.approx(1, abs=1e-3), "one and the same engine"
    assert several["policy/kl"] > 0, "the second update has left the reference"
    assert several["policy/dual_clip_share"] == 0, "small updates"
    assert "policy/dual_clip_share" not in once


def test_the_critic_learns_alone_first(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    first, second = metrics_of(folder, "2 critic")[3], metrics_of(folder, "2 critic")[4]
    assert (first["train/changed_share"], first["train/learning_rate"]) == (0, 0)
    assert second["train/learning_rate"] == 3e-3, "the schedule of the policy begins with its first update"
    assert first["policy/kl"] == 0
    assert first["value/grad_norm"] == first["train/grad_norm"] > 0
    assert first["value/explained_variance"] == pytest.approx(0, abs=1e-6), "its values are 0 at the beginning"
    assert second["value/explained_variance"] != 0
    assert second["train/changed_share"] == 1
    assert second["value/grad_norm"] != second["train/grad_norm"]


def test_dynamic_sampling_takes_more_prompts(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    plain, dynamic = metrics_of(folder, "2 grpo")[3], metrics_of(folder, "2 dynamic")[3]
    assert 0 < plain["rollout/zero_std_groups"] < 1
    assert dynamic["rollout/completion_digest"] != plain["rollout/completion_digest"]
    assert math.isfinite(dynamic["train/loss"])


def test_a_step_may_have_nothing_to_train_on(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    """Overlong filtering leaves out every completion where each is cut off."""
    line = metrics_of(folder, "2 dapo")[3]
    assert line["rollout/truncated_share"] > 0.9
    assert (line["train/loss"], line["train/grad_norm"], line["train/num_tokens"]) == (0, 0, 0)


@pytest.fixture(scope="module")
def killed_and_resumed(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    for name in KILLED:
        run: dict[str, Any] = {"run_dir": str(folder / f"killed {name}"), "spec": RUNS[name]}
        ended = launch(killed_for_real, 2, folder / f"launch-{name}", **run)
        assert [rank.exit_code for rank in ended] == [1, -signal.SIGKILL], "the other rank finds its peer gone"
    shutil.copytree(folder / "killed critic", folder / "killed forgetful")
    assert values(launch(resumed, 2, folder / "launch-again", folder=str(folder))) == [["done"] * 3] * 2


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_goes_on_bitwise(killed_and_resumed: None, folder: Path, name: str) -> None:
    """Policy, value model, both optimizers, and the position in the data after as many rounds as it took."""
    before, after = metrics_of(folder, f"killed {name}"), metrics_of(folder, f"killed {name}", 1)
    assert (set(before), set(after)) == ({1, 2, 3, 4}, {5, 6})
    assert before | after == metrics_of(folder, f"2 {name}")
    assert final_state(folder, f"killed {name}") == final_state(folder, f"2 {name}")
    assert any(path.startswith("critic/") for path in final_state(folder, f"2 {name}")) == (name == "critic")


def test_a_value_model_of_the_warm_start_does_not_go_on_in_the_main_loop(
    one_rank: list[dict[str, Any]], folder: Path
) -> None:
    """A run that resumes between the two loops begins the second one with a new value model, as one that goes on."""
    from safetensors.torch import load_file

    assert one_rank[0]["between loops"] == ["done", "done"]
    learned = load_file(RunDir(folder / "two critics").checkpoint(2).critic / "model.safetensors")
    assert learned["head.weight"].any(), "the value model of the warm start is not a new one"
    assert final_state(folder, "two critics, resumed", 4) == final_state(folder, "two critics", 4)


def test_a_resume_that_forgets_the_value_model_is_caught(killed_and_resumed: None, folder: Path) -> None:
    """Negative control of the test above."""
    straight = metrics_of(folder, "2 critic")
    assert any(line != straight[step] for step, line in metrics_of(folder, "killed forgetful", 1).items())
