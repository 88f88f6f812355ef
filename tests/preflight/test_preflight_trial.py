"""Decision about a trial run: changes since the last good run, and the runs that need none."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from test_preflight_checks import found, healthy, train_file, with_algorithm, with_lora, with_spec
from test_preflight_command import SIDE, TORCHRUN, command

from rlhf_core.preflight.changes import basis_of, basis_text, changes_since, read_basis
from rlhf_core.preflight.facts import Baseline, Facts, GoodRun
from rlhf_core.preflight.registry import run_checks
from rlhf_core.preflight.trial import Rung, is_due, rungs, trial_spec
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.launch_values import filled_argv

RUN_ID = "small-20260301-120000-aaaaaa"


def after(past: Facts, present: Facts) -> Facts:
    """Build the facts of a run with the ``past`` facts of its last good run."""
    good = GoodRun(RUN_ID, past.spec.model_dump(mode="json"), basis_of(past))
    return replace(present, baseline=Baseline(last_good=good, known=True))


def needed(facts: Facts) -> CheckResult:
    (finding,) = found(facts, "trial.needed")
    return finding


def test_the_same_again_needs_no_trial() -> None:
    finding = needed(after(healthy(), healthy()))
    assert finding.status is CheckStatus.PASSED
    assert RUN_ID in finding.found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (with_spec(data={"train": "/d/other.jsonl"}), "data.train /d/train.jsonl -> /d/other.jsonl"),
        (with_spec(train={"algorithm": "sft"}, sft={"num_steps": 0}), "loops.main.algorithm.name grpo -> sft"),
        (with_spec(sft={"num_steps": 0}), "loops.warm_start.num_steps 2 -> 0"),
        (with_spec(reward={"functions": ["mine:score"]}), '["mine:score"]'),
        (with_spec(resources={"num_nodes": 4}), "resources.num_nodes 1 -> 4"),
        (
            with_spec(model={"config": {"model_type": "qwen3", "hidden_size": 128}}),
            "model.config.hidden_size 64 -> 128",
        ),
        (with_spec(model={"config": {"model_type": "qwen3"}}), "model.config.hidden_size 64 -> nothing"),
        (
            with_spec(data={"template_args": {"enable_thinking": False}}),
            "data.template_args.enable_thinking nothing -> false",
        ),
        (with_spec(evaluate={"completions": False}), "evaluate.completions true -> false"),
        (with_lora(rank=8), "model.lora null -> "),
        (with_spec(reward={"models": {"good": {"path": "/m"}}}), "reward.models.good nothing -> "),
        (healthy(control_version="0.2.0"), "rlhf-flows 0.1.0 -> 0.2.0"),
        (healthy(compute=replace(healthy().compute, packages={"torch": "2.14.0"})), "torch 2.13.0 -> 2.14.0"),
        (healthy(code_hash="ab12"), "code none -> ab12"),
        (train_file(num_rows=99), "rows of data.train 100, prompts"),
        (train_file(prompt_hashes=frozenset({b"z"})), "rows of data.train 100, prompts"),
    ],
    ids=range(16),
)
def test_changes_are_reported_with_old_and_new_value(changed: Facts, message: str) -> None:
    finding = needed(after(healthy(), changed))
    assert finding.status is CheckStatus.WARNING
    assert finding.found.startswith(f"changed since {RUN_ID}")
    assert message in finding.found
    assert "--set preflight.trial=run" in finding.advice


def test_what_is_taken_away_is_a_change_too() -> None:
    for past, message in (
        (with_lora(rank=8), " -> null"),
        (with_spec(reward={"models": {"good": {"path": "/m"}}}), " -> nothing"),
        (with_spec(data={"train": "", "eval": "", "sources": {"math": {"train": "m.jsonl"}}}), " -> nothing"),
    ):
        assert message in needed(after(past, healthy())).found


@pytest.mark.parametrize(
    "changed",
    [
        with_spec(train={"learning_rate": 1e-3, "num_steps": 500}),
        with_spec(sft={"num_steps": 4}),
        with_spec(checkpoint={"every_num_steps": 7}, evaluate={"num_prompts": 3}),
        with_spec(seed=5, supervise={"max_attempts": 9}, resources={"time_limit_s": 7200}),
    ],
    ids=range(4),
)
def test_what_a_trial_would_not_tell_asks_for_none(changed: Facts) -> None:
    assert needed(after(healthy(), changed)).status is CheckStatus.PASSED


def test_a_setting_that_the_older_version_did_not_have_is_no_change() -> None:
    content: dict[str, Any] = healthy().spec.model_dump(mode="json")
    del content["loops"]["main"]["algorithm"]["measure_kl"], content["rollout"]
    del content["model"]["lora"], content["reward"]["models"]
    good = GoodRun(RUN_ID, content, {"a package of then": "1"})
    now = with_spec(model={"lora": {}}, reward={"models": {"good": {"path": "/m"}}})
    assert changes_since(good, now.spec, basis_of(healthy())) == []


@pytest.mark.parametrize(("num_nodes", "status"), [(1, CheckStatus.PASSED), (2, CheckStatus.WARNING)])
def test_the_first_run_of_a_name_is_tried_out_on_several_nodes_only(num_nodes: int, status: CheckStatus) -> None:
    facts = replace(with_spec(resources={"num_nodes": num_nodes}), baseline=Baseline(known=True))
    assert needed(facts).status is status


def test_a_small_run_is_its_own_trial() -> None:
    small = with_spec(train={"num_steps": 7, "micro_batch_size": 4})
    assert needed(after(healthy(), small)).status is CheckStatus.PASSED
    assert (
        needed(after(healthy(), with_spec(train={"num_steps": 8, "micro_batch_size": 4}))).status is CheckStatus.WARNING
    )
    on_two = replace(small, spec=with_spec(train={"num_steps": 7}, resources={"num_nodes": 2}).spec)
    assert needed(after(healthy(), on_two)).status is CheckStatus.WARNING


@pytest.mark.parametrize(
    "facts",
    [
        replace(with_spec(preflight={"trial": "off"}, resources={"num_nodes": 2}), baseline=Baseline(known=True)),
        replace(with_spec(resources={"num_nodes": 2}), baseline=Baseline()),
    ],
    ids=["off", "no-history"],
)
def test_no_need_for_a_trial_is_reported(facts: Facts) -> None:
    assert found(facts, "trial.needed") == []


def test_an_automatic_trial_asks_nothing_of_the_user() -> None:
    facts = replace(with_spec(preflight={"trial": "run"}, resources={"num_nodes": 2}), baseline=Baseline(known=True))
    assert needed(facts).advice.startswith("nothing to do: 3 steps on one node, then on all 2 nodes")


def test_the_basis_survives_being_written_down() -> None:
    basis: Mapping[str, str] = basis_of(healthy(code_hash="ab12"))
    assert set(basis) == {"rows of data.train", "rows of data.eval", "code", "rlhf-flows", "torch", "transformers"}
    assert read_basis(basis_text(basis)) == basis
    assert read_basis("") == {}
    (finding,) = found(healthy(code_hash="ab12"), "trial.basis")
    assert read_basis(finding.found) == basis


# ---------------------------------------------------------------------------------------------------------------------
# The ladder


def test_the_ladder_has_two_rungs_and_one_on_one_node() -> None:
    assert rungs(with_spec(resources={"num_nodes": 4}).spec) == (Rung("trial.one_node", 1), Rung("trial.all_nodes", 4))
    assert rungs(healthy().spec) == (Rung("trial.all_nodes", 1),)


def test_a_trial_of_engines_with_nodes_of_their_own_has_one_of_each_kind() -> None:
    """The same number of engines on each node as in the run; with the control, engines beside the trainers."""
    spec = with_spec(resources={"num_nodes": 6}, rollout={"engines": 4, "nodes": 2}).spec
    small, whole = rungs(spec)
    assert (small.title, whole.title) == ("trial on one node for training and one for engines", "trial on all 6 nodes")
    tried = [trial_spec(spec, rung) for rung in (small, whole)]
    assert [(one.resources.num_nodes, one.rollout.nodes, one.rollout.engines) for one in tried] == [
        (2, 1, 2),
        (6, 2, 4),
    ]
    assert [one.num_trainer_nodes for one in tried] == [1, 4]
    assert len(rungs(tried[0])) == 1, "none has fewer nodes"
    beside = with_spec(resources={"num_nodes": 4}, rollout={"engines": 8}).spec
    one = trial_spec(beside, rungs(beside)[0])
    assert (one.resources.num_nodes, one.rollout.nodes, one.rollout.engines) == (1, 0, 2)


def test_a_trial_is_its_run_made_small() -> None:
    spec = with_spec(
        resources={"num_nodes": 4},
        train={"num_steps": 500, "warmup_steps": 50},
        evaluate={"num_prompts": 0, "every_num_steps": 100},
        checkpoint={"keep_best": True},
        preflight={"trial": "run", "trial_steps": 3, "off": {"data.overlap": "known"}},
    ).spec
    small = trial_spec(spec, Rung("trial.one_node", 1))
    assert (small.resources.num_nodes, small.warm_start_steps, small.loops.main.num_steps) == (1, 2, 3)
    assert (small.evaluate.num_prompts, small.evaluate.every_num_steps) == (8, 3)
    assert small.checkpoint.every_num_steps == small.total_steps == 5
    assert not small.checkpoint.keep_best, "its evaluation falls on no checkpoint"
    assert small.preflight.trial == "off"
    assert small.preflight.off["data.overlap"] == "known"
    assert small.loops.main.optimizer.warmup_steps == 50, "the trial makes the first steps of the run"
    unchanged = {"rollout", "model", "data", "reward", "supervise", "name", "seed"}
    assert small.model_dump(include=unchanged) == spec.model_dump(include=unchanged)


def test_a_trial_is_never_larger_than_its_run() -> None:
    spec = with_spec(train={"num_steps": 1}, sft={"num_steps": 0}, evaluate={"num_prompts": 4}).spec
    small = trial_spec(spec, Rung("trial.all_nodes", 1))
    assert (small.total_steps, small.evaluate.num_prompts, small.evaluate.every_num_steps) == (1, 4, 0)


@pytest.mark.parametrize("num_nodes", [2, 3, 8])
@pytest.mark.parametrize("ranks_per_node", [1, 3, 8])
def test_batches_divide_over_the_ranks_of_every_rung(num_nodes: int, ranks_per_node: int) -> None:
    ranks = num_nodes * ranks_per_node
    spec = with_spec(
        resources={"num_nodes": num_nodes, "ranks_per_node": ranks_per_node},
        grpo={"prompts_per_step": 2 * ranks},
        sft={"batch_size": ranks},
    ).spec
    for rung in rungs(spec):
        results = run_checks(healthy(spec=trial_spec(spec, rung)))
        divided = [one for one in results if one.id in ("batch.prompts_divide_ranks", "batch.rows_divide_ranks")]
        assert [one.status for one in divided] == [CheckStatus.PASSED] * 2


def test_settings_for_more_steps_or_ranks_than_those_of_a_trial_do_not_block_it() -> None:
    """A warm-up of the value model that is longer than the trial, and more senders than one node has ranks."""
    spec = with_algorithm(name="ppo", critic_warmup_steps=20).spec
    spec = with_changes(
        spec,
        {
            "loops.main.num_steps": 200,
            "resources.num_nodes": 4,
            "rollout.engines": 4,
            "rollout.sync.senders": spec.resources.ranks_per_node * 4,
            "trainer.sequence_parallel": spec.resources.ranks_per_node * 4,
        },
    )
    named = ("algorithm.critic_warmup", "rollout.sync")
    for rung, senders in zip(rungs(spec), (1, 4), strict=True):
        small = trial_spec(spec, rung)
        assert small.rollout.sync.senders == small.ranks_per_row == spec.resources.ranks_per_node * senders
        assert small.model_dump()["loops"]["main"]["algorithm"]["critic_warmup_steps"] == 2, "of three steps"
        results = [one for one in run_checks(healthy(spec=small)) if one.id in named]
        assert [one.status for one in results] == [CheckStatus.PASSED], results


def test_trials_are_due_when_the_check_says_so_and_the_config_wants_them() -> None:
    message = CheckResult(id="trial.needed", status=CheckStatus.WARNING, found="data changed")
    fine = CheckResult(id="trial.needed", status=CheckStatus.PASSED, found="nothing changed")
    wants = with_spec(preflight={"trial": "run"}).spec
    assert is_due(wants, [message])
    assert not is_due(wants, [fine])
    assert not is_due(wants, [])
    assert not is_due(healthy().spec, [message])


# ---------------------------------------------------------------------------------------------------------------------
# Other programs


def unknown_run(facts: Facts) -> Facts:
    """Facts of a run without an earlier good one."""
    return replace(facts, baseline=Baseline(known=True))


def test_a_trial_of_another_program_makes_fewer_steps_on_one_node() -> None:
    facts = unknown_run(command())
    finding = needed(facts)
    assert finding.status is CheckStatus.WARNING
    assert "no good run named theirs yet" in finding.found
    one, both = (trial_spec(facts.spec, rung) for rung in rungs(facts.spec))
    assert (one.resources.num_nodes, both.resources.num_nodes) == (1, 2)
    steps = facts.spec.preflight.trial_steps
    assert (one.total_steps, one.checkpoint.every_num_steps) == (steps, steps)
    assert filled_argv(one, {})[:3] == ("torchrun", "--nnodes", "1")
    assert str(steps) == filled_argv(one, {})[filled_argv(one, {}).index("--max_steps") + 1]
    assert one.preflight.trial == "off"
    tried = replace(facts, spec=one, trainer=facts.trainer)
    assert [result.id for result in run_checks(tried) if result.status is CheckStatus.BLOCKED] == []


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (command(TORCHRUN.replace("{num_steps}", "100")), "lacks {num_steps}"),
        (command(output_dir="/scratch/out"), "/scratch/out is also that of the run"),
        (command(TORCHRUN.replace("{num_nodes}", "2")), "a fixed --nnodes"),
    ],
)
def test_a_trial_that_cannot_be_made_is_not_proposed(facts: Facts, message: str) -> None:
    finding = needed(unknown_run(facts))
    assert finding.status is CheckStatus.SKIPPED
    assert "no trial can be made" in finding.found
    assert message in finding.found
    assert not is_due(with_changes(facts.spec, {"preflight.trial": "run"}), [finding])


def test_the_versions_of_the_environment_that_trains_count() -> None:
    before, now = command(), command(side={"packages": {**SIDE.packages, "trl": "1.15.0"}})
    assert needed(after(before, before)).status is CheckStatus.PASSED
    assert "trl 1.16.0 -> 1.15.0" in needed(after(before, now)).found
    ours = replace(before, compute=replace(before.compute, packages={"torch": "2.14.0"}))
    assert needed(after(before, ours)).status is CheckStatus.PASSED
    (basis,) = found(command(side={"problem": "it is not there"}), "trial.basis")
    assert basis.status is CheckStatus.SKIPPED


def test_more_steps_of_another_program_need_no_trial_and_other_arguments_do() -> None:
    past = command()
    assert needed(after(past, command(num_steps=200, metrics={"a": "b"}))).status is CheckStatus.PASSED
    assert "trainer.argv" in needed(after(past, command(f"{TORCHRUN} --bf16"))).found
    assert "trainer.variables.TOKENS nothing -> 8" in needed(after(past, command(variables={"TOKENS": "8"}))).found
