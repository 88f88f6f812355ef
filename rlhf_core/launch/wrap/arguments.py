"""The program's options for steps, batch, output folder, checkpoints, seed, model and resume: read, or replaced by
placeholders."""

import posixpath
from collections.abc import Sequence

from rlhf_core.launch.wrap.draft import Draft, number
from rlhf_core.launch.wrap.frameworks import OF_VERL, Family
from rlhf_core.launch.wrap.trackers import read_trackers
from rlhf_core.launch.wrap.trainer_resume import read_resume_of_trainer
from rlhf_core.schemas.command_trainer import PLACEHOLDERS, named_placeholders

STEPS = (
    "max_steps", "max_train_steps", "max_iters", "train_iters", "num_train_steps", "num_training_steps", "total_steps",
    "num_steps", "num_iterations_total", "training_steps", "trainer.total_training_steps",
    "trainer.max_steps", "training.steps", "grpo.max_num_steps", "dpo.max_num_steps", "sft.max_num_steps",
    "steps", "iters", "num_iters", "iterations", "max_iterations", "n_steps",
)  # fmt: skip
_EPOCHS = (
    "num_train_epochs", "max_epochs", "num_epochs", "epochs", "n_epochs", "total_epochs",
    "trainer.total_epochs", "train.max_epochs", "train.num_episodes",
)  # fmt: skip
_OUTPUT = (
    "output_dir", "save_path", "out_dir", "save_dir", "checkpoint_dir", "ckpt_dir", "output", "save", "work_dir",
    "trainer.default_local_dir", "ckpt.output_dir", "checkpointing.checkpoint_dir",
)  # fmt: skip
_SAVE_EVERY = (
    "save_steps", "save_interval", "save_every", "save_freq", "checkpointing_steps", "checkpoint_every", "ckpt_every",
    "trainer.save_freq", "ckpt.save_steps", "checkpointing.save_period",
)  # fmt: skip
_KEEP = (
    "save_total_limit", "max_ckpt_num", "keep_last", "checkpoints_total_limit", "trainer.max_actor_ckpt_to_keep",
    "ckpt.max_num",
)  # fmt: skip
_MODEL = (
    "model", "model_name_or_path", "model_id_or_path", "model_path", "pretrain", "base_model", "model_name",
    "actor_rollout_ref.model.path", "actor.model_name_or_path", "model.model_name_or_path",
)  # fmt: skip
_DATA = (
    "dataset", "dataset_name", "prompt_data", "train_file", "train_data", "data_path", "data", "datasets",
    "data.train_files", "data.prompt_dataset", "data.dataset",
)  # fmt: skip
_RESUME = ("resume_from_checkpoint", "resume", "resume_from", "load_checkpoint", "trainer.resume_mode", "init_from")
_NEWEST_OR_NONE = frozenset((
    "", "true", "false", "yes", "no", "1", "0", "auto", "latest", "last", "none", "null", "resume", "must", "allow",
    "never", "disable",
))  # fmt: skip
"""Values of these options that select the newest checkpoint or none; any other names the weights to start from."""
_RATE = (
    "learning_rate", "lr", "actor_learning_rate", "actor_rollout_ref.actor.optim.lr", "optimizer.lr", "adam.lr",
    "actor.adam.lr",
)  # fmt: skip
_PER_DEVICE = (
    "per_device_train_batch_size", "micro_train_batch_size", "micro_batch_size", "batch_size", "train.micro_batch_size",
)  # fmt: skip
_ACCUMULATED = ("gradient_accumulation_steps", "grad_accum_steps", "accumulation_steps")
_WHOLE_BATCH = ("train_batch_size", "global_batch_size", "data.train_batch_size", "train.batch_size")
_STAYS = "stays in the launch line"
_VERL_METRICS = {
    "reward": "critic/score/mean",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "entropy": "actor/entropy",
    "completion_length": "response_length/mean",
    "step_time": "timing_s/step",
}
"""Names of verl by those of transformers and TRL, which are known to all programs."""
VERL_PATTERNS = (
    r"\bstep:(?P<step>\d+) - ",
    *(rf" - {theirs}:(?:np\.\w+\()?(?P<{name}>[-+.\w]+)" for name, theirs in _VERL_METRICS.items()),
)
"""The line of metrics that verl prints after every step; some versions print numbers as ``np.float64(0.5)``."""


def read_arguments(draft: Draft, family: Family, steps: int | None) -> None:
    """Read the program's options, and put placeholders in place of values that the run decides.

    Args:
        steps: Optimizer steps, if the user gave them separately from the line.
    """
    _read_steps(draft, family, steps)
    _read_output(draft, family)
    _read_checkpoints(draft, family)
    _read_resume(draft, family)
    _read_batch(draft, family)
    _read_seed(draft)
    _read_model(draft)
    _read_others(draft)
    read_trackers(draft)
    _former_folder(draft, family)
    _own_placeholders(draft)


def _value(draft: Draft, family: Family, *names: str) -> str | None:
    name = _name_with_value(draft, names)
    if name is not None:
        return draft.given("argument", name)
    return draft.in_files(*names) if family.style != "hydra" else None


def _name_with_value(draft: Draft, names: Sequence[str]) -> str | None:
    """First of these options that the line has with a value; a flag of the same name means something else."""
    return next((name for name in names if draft.given("argument", name)), None)


def _put_in_first(draft: Draft, names: Sequence[str], value: str) -> bool:
    """Give the first of these options a value, and report the others; False if the line has none of them."""
    first = _name_with_value(draft, names)
    if first is None:
        return False
    for name in names:
        if name != first and (given := draft.given("argument", name)):
            draft.missing(f"--{name} {given}: unchanged, --{first} is {value}", f"write {value} if it means the same")
    draft.put("argument", [first], value, "")
    return True


def _put_either(draft: Draft, family: Family, old: str, new: str, value: str) -> None:
    """Give an OpenRLHF option a value, under its name in the version of the line."""
    option = family.either(draft, old, new)
    draft.put("argument", [option.lstrip("-")], value, option)


def _read_steps(draft: Draft, family: Family, steps: int | None) -> None:
    text = _value(draft, family, *STEPS)
    found = steps or number(text)
    if found is not None:
        draft.set("trainer.num_steps", found, "optimizer steps", f"{found} (--steps)" if steps else found)
    if (known := family.known) is not None:
        draft.put("argument", [known.steps], "{num_steps}", family.spelled(known.steps))
    elif not _put_in_first(draft, STEPS, "{num_steps}") and found is not None:
        draft.missing(
            "the option that sets the number of steps of the program",
            "make sure that it runs trainer.num_steps steps: ending earlier counts as a failure",
        )
    epochs = _value(draft, family, *_EPOCHS)
    if found is None:
        what = f"optimizer steps: {epochs} epochs are given" if epochs else "optimizer steps"
        draft.missing(
            what + (f" ({text})" if text and "$" in text else ""),
            "wrap again with --steps N, or set trainer.num_steps: rows x epochs / rows per step",
        )
    elif epochs:
        draft.report("epochs", epochs, _STAYS + (f"; {known.steps} has precedence" if known is not None else ""))


def _read_output(draft: Draft, family: Family) -> None:
    given = _value(draft, family, *_OUTPUT)
    if family.name == "openrlhf":
        _put_either(draft, family, "save_path", "ckpt.output_dir", "{output_dir}/model")
        _put_either(draft, family, "ckpt_path", "ckpt.path", "{output_dir}/checkpoints")
    elif (known := family.known) is not None:
        draft.put("argument", [known.output], "{output_dir}", family.spelled(known.output))
    elif not _put_in_first(draft, _OUTPUT, "{output_dir}"):
        draft.missing("output folder", "pass {output_dir} to the program in trainer.argv, or set trainer.output_dir")
        return
    draft.report("output folder", given or "its default", "trainer.output_dir, in the run directory")
    if family.name == "swift":
        draft.put("argument", ["add_version"], "false", "--add_version")
        draft.report("--add_version", "true, its default", "false: all attempts share one folder of checkpoints")


def _former_folder(draft: Draft, family: Family) -> None:
    """Report other options that name the output folder that the line had."""
    folder = (_value(draft, family, *_OUTPUT) or "").rstrip("/")
    for index, item in enumerate(draft.line.items):
        value = draft.value_at(index)
        is_unchanged = draft.words[index] == draft.line.argv[item.start : item.stop]
        is_there = value.rstrip("/") == folder or value.startswith(f"{folder}/")
        if folder and item.role == "argument" and is_unchanged and is_there:
            draft.missing(
                f"--{item.name} {value}: in the former output folder",
                "write {output_dir} instead of that folder if the program reads what it writes, for instance to resume",
            )


def _read_checkpoints(draft: Draft, family: Family) -> None:
    text = _value(draft, family, *_SAVE_EVERY)
    every = number(text)
    if every is not None:
        draft.set("checkpoint.every_num_steps", every, "steps between checkpoints")
    if (known := family.known) is not None:
        draft.put("argument", [known.save_every], "{checkpoint_every}", family.spelled(known.save_every))
        if _value(draft, family, "save_strategy") not in (None, "steps"):
            draft.put("argument", ["save_strategy"], "steps", family.spelled("save_strategy"))
            draft.report("--save_strategy", _value(draft, family, "save_strategy"), "number of steps of the run")
        _evaluate_checkpoints(draft, family, every)
        if draft.line.launcher == "axolotl" and _value(draft, family, "saves_per_epoch"):  # refuses both
            draft.put("argument", ["saves_per_epoch"], "0", "--saves-per-epoch")
    elif family.name == "openrlhf":
        _put_either(draft, family, "save_steps", "ckpt.save_steps", "{checkpoint_every}")
    elif not _put_in_first(draft, _SAVE_EVERY, "{checkpoint_every}"):
        draft.settings["checkpoint.every_num_steps"] = every or _default_every(draft)
        draft.missing("checkpoints", "pass {checkpoint_every} to the program, and set trainer.checkpoint_name")
        return
    if every is None:
        chosen = _default_every(draft)
        draft.settings["checkpoint.every_num_steps"] = chosen
        draft.missing(
            "steps between checkpoints" + (f": {text}" if text else ""),
            f"set checkpoint.every_num_steps, currently {chosen}: a failure loses the steps since the last checkpoint",
        )
    keep = number(_value(draft, family, *_KEEP))
    if keep is not None and _put_in_first(draft, _KEEP, "{keep_last}"):
        draft.set("checkpoint.keep_last", keep, "checkpoints kept")
    if draft.given("argument", "save_only_model") in ("true", "True", ""):
        draft.missing(
            "--save_only_model: checkpoints lack the optimizer state", "remove it, or a retry resets the optimizer"
        )


def _evaluate_checkpoints(draft: Draft, family: Family, every: int | None) -> None:
    """Evaluate every checkpoint if the program loads the best one: transformers refuses other times of evaluation."""
    loads_best = draft.given("argument", "load_best_model_at_end")
    if loads_best is None:
        loads_best = draft.in_files("load_best_model_at_end") or "false"
    strategies = ("eval_strategy", "evaluation_strategy")
    strategy, steps = _value(draft, family, *strategies), _value(draft, family, "eval_steps")
    if loads_best.lower() not in ("", "true") or (strategy is None and steps is None):
        return
    between = number(steps)
    if strategy in (None, "steps") and every and between and every % between == 0:
        return
    if strategy not in (None, "steps"):
        draft.put("argument", strategies, "steps", family.spelled("eval_strategy"))
    draft.put("argument", ["eval_steps"], "{checkpoint_every}", family.spelled("eval_steps"))
    draft.report("evaluations", strategy or f"every {steps} steps", "with every checkpoint, for the best model")


def _default_every(draft: Draft) -> int:
    """Steps between checkpoints if none are given: transformers' 500, but at least five checkpoints per run."""
    steps = draft.settings.get("trainer.num_steps")
    return max(1, min(500, steps // 5)) if isinstance(steps, int) else 500


def _read_resume(draft: Draft, family: Family) -> None:
    if family.name == "openrlhf":
        option = family.either(draft, "load_checkpoint", "ckpt.load_enable")
        draft.drop("argument", option.lstrip("-"))
        draft.last_words.append(option)
        of_actor = "_actor/" if draft.line.program[-1].endswith("_ray") else ""
        draft.settings |= {
            "trainer.checkpoint_name": f"checkpoints/{of_actor}global_step{{step}}",
            # DeepSpeed writes the states of the model first, and this file after those of the optimizer.
            "trainer.checkpoint_complete": ["../latest"],
            "trainer.resume": "in_place",
        }
        draft.report("resume", option, 'trainer.resume = "in_place"')
        draft.missing("layout of the checkpoints", "compare trainer.checkpoint_name with those of earlier runs")
        return
    if family.known is OF_VERL:
        _read_resume_of_verl(draft)
        return
    index = draft.find("argument", *_RESUME)
    name = draft.line.items[index].name if index is not None else "resume_from_checkpoint"
    if index is not None:
        value = draft.value_at(index)
        if value.lower() not in _NEWEST_OR_NONE:
            draft.report(f"--{name}", value, f"{_STAYS}: the first attempt starts from it")
        else:
            draft.drop("argument", name)
            instead = "trainer.resume_argv, if there is a checkpoint" if family.has_trainer else "removed"
            draft.report(f"--{name}", value or "(flag)", instead)
    if family.has_trainer:
        read_resume_of_trainer(draft, family)
        return
    draft.settings |= {"trainer.resume": "none"}
    draft.missing(
        "the way it resumes" + (f" (it has --{name})" if index is not None else ""),
        "set trainer.checkpoint_name, checkpoint_complete, resume and resume_argv; until then a retry starts at step 0",
    )


def _read_resume_of_verl(draft: Draft) -> None:
    """Settings for verl's checkpoints and output, as in its ``trainer/ppo/ray_trainer.py`` and ``utils/logger``.

    It saves to ``global_step_N``, ``data.pt`` last, and its console logger prints a line of metrics after every step.
    """
    if (start := draft.given("argument", "trainer.resume_from_path")) is not None:
        draft.report("trainer.resume_from_path", start, f"{_STAYS}: the first attempt starts from it")
    else:
        draft.drop("argument", "trainer.resume_mode")
    draft.drop("argument", "trainer.del_local_ckpt_after_load")
    if draft.line.is_of_ray:  # main_ppo and its likes: verl keeps all of its checkpoints by default
        for option in ("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"):
            if draft.given("argument", option) is None:
                draft.report(option, "all, its default", "{keep_last}, from checkpoint.keep_last")
            draft.put("argument", [option], "{keep_last}", f"{option}=")
    draft.settings |= {
        "trainer.checkpoint_name": "global_step_{step}",
        "trainer.checkpoint_complete": ["data*.pt"],
        "trainer.resume": "argument",
        "trainer.resume_argv": ["trainer.resume_mode=resume_path", "trainer.resume_from_path={checkpoint}"],
        "trainer.stdout_patterns": list(VERL_PATTERNS),
    }
    draft.report("resume", "trainer.resume_from_path", "trainer.resume_argv, if there is a checkpoint")
    draft.report("progress", "lines of its console logger", "trainer.stdout_patterns")
    logger = draft.given("argument", "trainer.logger")
    if logger is not None and "console" not in logger:
        draft.missing(f"trainer.logger={logger}: steps are read from the console", "add console to trainer.logger")


def _read_batch(draft: Draft, family: Family) -> None:
    one, accumulated = _value(draft, family, *_PER_DEVICE), _value(draft, family, *_ACCUMULATED)
    whole = draft.given("argument", *_WHOLE_BATCH)
    nodes, ranks = draft.settings.get("resources.num_nodes"), draft.settings.get("resources.ranks_per_node")
    if whole:
        draft.report("batch", f"{whole} of all ranks" + (f", {one} at once on a rank" if one else ""), _STAYS)
    elif number(one) and number(accumulated or "1") and isinstance(nodes, int) and isinstance(ranks, int):
        total = int(one or 1) * int(accumulated or 1) * nodes * ranks
        found = f"{total} = {one} on a rank x {accumulated or 1} accumulated x {nodes * ranks} ranks"
        draft.report("batch", found, _STAYS)
    elif one or accumulated:
        given = [f"{one} on a rank"] * bool(one) + [f"{accumulated} accumulated"] * bool(accumulated)
        advice = (
            "write numbers into the launch line or trainer.argv" if one else "the rest is the default of the program"
        )
        draft.missing(f"batch: {', '.join(given)}", advice)


def _read_seed(draft: Draft) -> None:
    text = draft.given("argument", "seed")
    if text is not None and text.isascii() and text.isdigit() and len(text) < 10:
        draft.put("argument", ["seed"], "{seed}", "")
        draft.set("seed", int(text), "seed")


def _read_model(draft: Draft) -> None:
    index = next((found for name in _MODEL if (found := draft.find("argument", name)) is not None), None)
    value = draft.value_at(index) if index is not None else ""
    if index is not None and value and draft.around.is_folder(value):
        draft.replace(index, "{model}")
        draft.set("model.path", posixpath.join(draft.around.folder, value), "model")
    elif value:
        draft.report("model", value, f"{_STAYS}: found no folder of this name")


def _read_others(draft: Draft) -> None:
    for what, names in (
        ("data", _DATA),
        ("learning rate", _RATE),
        (
            "completions of a prompt",
            ("num_generations", "n_samples_per_prompt", "actor_rollout_ref.rollout.n", "rollout.n_samples_per_prompt"),
        ),
        ("steps between log lines", ("logging_steps", "log_interval")),
    ):
        index = draft.find("argument", *names)
        if index is not None and draft.value_at(index):
            item = draft.line.items[index]
            words = draft.line.argv[item.start : item.stop]
            draft.report(what, draft.value_at(index) if item.is_joined else " ".join(words[1:]), _STAYS)


def _own_placeholders(draft: Draft) -> None:
    """Report placeholders in the user's own words, which a run fills in."""
    for index, item in enumerate(draft.line.items):
        if draft.words[index] == draft.line.argv[item.start : item.stop]:
            for word in draft.words[index]:
                for name in set(named_placeholders(word)) & PLACEHOLDERS.keys():
                    draft.report(f"{{{name}}} in the line", word, f"filled with: {PLACEHOLDERS[name]}")
