"""Readable errors of a config: value found, value expected, and the setting that was probably meant.

The schemas of a run are imported late: the settings of a site, which every command reads, are explained here as well,
and importing those schemas would be a third of the work of a command like `rlhf up --status`.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.config.toml_files import SHOWN_CHARACTERS, readable, shortened
from rlhf_core.config.units import in_unit
from rlhf_core.schemas.migration import current_name
from rlhf_core.text.formatting import count

_NAME = r"[a-z0-9][a-z0-9_-]{0,62}"
MAX_PROBLEMS = 20
"""Maximum number of problems reported, each with the nearest valid name; the rest are only counted."""


def is_name(text: str) -> bool:
    """True if it is a valid name of a run, deployment or preset."""
    return re.fullmatch(_NAME, text) is not None


def name_of(override: str) -> str:
    """Setting of an override ``name=value``, as the user names it."""
    return override.partition("=")[0].strip()


def setting_of(override: str) -> str:
    """Setting of an override, by its current name."""
    return current_name(name_of(override))


def problems_in_words(found: Mapping[str, Sequence[str]]) -> str:
    """Format the problems by their source, one per line."""
    return "\n".join(
        f"{count(len(problems), 'problem')} in {source}:\n" + "\n".join(f"  {problem}" for problem in problems)
        for source, problems in found.items()
        if problems
    )


def override_of(location: str, overrides: Sequence[str]) -> str:
    """Find the override that caused a problem: the last one that set this setting, its section, or a part of it."""
    for override in reversed(overrides):
        name = setting_of(override)
        if f"{name}.".startswith(f"{location}.") or location.startswith(f"{name}."):
            return override
    return ""


def explain_override(detail: Any, override: str) -> str:
    """Build the message for a pydantic problem caused by an override ``name=value``."""
    name, given = name_of(override), override.partition("=")[2].strip()
    if location_of(detail).startswith(f"{setting_of(override)}."):  # of a table that is the override's value
        return with_old_name(explain(detail), location_of(detail), [name])
    if detail["type"] == "extra_forbidden":
        return (
            f'unknown setting "{readable(name)}" ({readable(override.strip())}){_nearest_setting(current_name(name))}'
        )
    found = detail.get("input")
    is_text = isinstance(found, str) and found == given
    unfinished = is_text and found[:1] in ("[", "{") and not detail["type"].startswith("string_")
    # A value that is not valid TOML is taken as text, which therefore needs no quotes.
    advice = "; it is not valid TOML, so it was read as text" if unfinished else ""
    is_value = not isinstance(found, list | dict) and location_of(detail) == setting_of(override)
    if detail["type"] == "string_type" and is_value:
        # With the outer quotes: a shell would remove the inner ones.
        advice = f"; as text it needs quotes: '{readable(name)}=\"{readable(given)}\"'"
    elif detail["type"] in ("list_type", "tuple_type") and is_text and is_value and not unfinished:
        advice = f"; as a list of one: '{readable(name)}=[\"{readable(given)}\"]'"
    elif setting_of(override).startswith("preflight.off"):
        check, reason = name.removeprefix("preflight.off").removeprefix("."), given
        if given.startswith(("[", "{")):
            check, reason = check or "CHECK", "the reason"
        elif not check:
            check, reason = given, "the reason"
        advice += f'; write \'preflight.off={{"{readable(check)}" = "{readable(reason)}"}}\''
    return with_old_name(explain(detail), location_of(detail), [name]) + advice


def with_old_name(problem: str, location: str, names: Iterable[str]) -> str:
    """Add the name in 0.1 to a problem in a setting that the user gave by that name: they know no other one.

    Args:
        problem: the message.
        location: dotted name of the setting, as the message contains it.
        names: names of all settings as the user gave them.
    """
    for old in names:
        now = current_name(old)
        if now != old and f"{location}.".startswith(f"{now}."):
            marked = next((shown for shown in (f'"{readable(location)}"', location) if shown in problem), "")
            written = f"{marked} (written as {readable(old + location[len(now) :])})"
            return problem.replace(marked, written, 1) if marked else problem
    return problem


def _meanings() -> dict[str, str]:
    from rlhf_core.config.fields import field_meanings

    return field_meanings()


def _nearest_setting(name: str) -> str:
    """Suggest the closest existing name for a name with errors in any of its parts."""
    name = name[:SHOWN_CHARACTERS]  # no name is similar to a longer one, and a comparison takes time
    if name in _MEANT or _settings_of_entry(name.split(".")[:-1]):
        return _nearest(name)
    near = difflib.get_close_matches(name, list(_meanings()), n=1, cutoff=0.7)
    if near and near[0] != name and name.rpartition(".")[2] not in _OTHER_NAMES:
        return f'; did you mean "{near[0]}"?'
    return _nearest(name)


def location_of(detail: Any) -> str:
    """Dotted name of the place of a problem, without pydantic's additions for union members and parts of types."""
    from rlhf_core.schemas.algorithms import specs
    from rlhf_core.schemas.trainers import trainer_kinds

    inner = ("function-", "literal[", "str-", "[key]")
    parts = [str(part) for part in detail["loc"] if not str(part).startswith(inner)]
    choices = {"algorithm": ("name", specs().keys()), "trainer": ("kind", trainer_kinds().keys())}
    kept = [
        part
        for part, before in zip(parts, ["", *parts], strict=False)
        if before not in choices or part not in choices[before][1]
    ]
    ends_at_name = detail["type"].startswith("union_tag_")
    return ".".join([*kept, choices.get(kept[-1], ("name",))[0]] if ends_at_name else kept)


def explain(detail: Any) -> str:
    """Build the message for a pydantic problem."""
    location = location_of(detail)
    kind = detail["type"]
    found = detail.get("input")
    if kind == "extra_forbidden":
        return f'unknown key "{readable(location)}"{_nearest(location)}'
    if kind in ("missing", "union_tag_not_found"):
        return _explain_missing(location)
    if kind == "union_tag_invalid":
        return (
            f"{location}: found {shortened(detail['ctx']['tag'])}, expected {_listed(detail['ctx']['expected_tags'])}"
        )
    if kind == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{location}: {message}" if location else message
    expected = _expected(kind, detail)
    if kind == "string_pattern_mismatch" and "[\\w.]*:" in detail["ctx"]["pattern"]:
        expected = 'expected "module:function", for instance "my_rewards:score"'
    if kind == "string_pattern_mismatch" and location == "name":
        expected = expected_name(str(found))
    if kind.startswith(("int_", "float_")) and (number := in_unit(location, found)):
        expected += f"; {number}"
    if isinstance(found, str) and location.endswith(".algorithm"):
        expected += f"; the algorithm is chosen by {location}.name"
    return f"{location}: found {shortened(found)}, {expected}"


_EXPECTED: Mapping[str, str] = {
    "bool_": "true or false",
    "dict_type": "a table of settings",
    "finite_number": "a finite number",
    "float_": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list in square brackets",
    "literal_error": "{expected}",
    "model_": "a table of settings",
    "string_type": "text",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
    "tuple_type": "a list in square brackets",
}
"""Values that a setting takes, by the type of pydantic's problem or a prefix of it."""


def _expected(kind: str, detail: Any) -> str:
    name = (
        kind if kind in _EXPECTED else next((one for one in _EXPECTED if one[-1] == "_" and kind.startswith(one)), "")
    )
    if not name:
        return str(detail["msg"][0].lower() + detail["msg"][1:])
    return f"expected {_EXPECTED[name].format(**detail.get('ctx', {}))}"


def flags_for_numbers(content: Any, validated: Any, place: str = "") -> Iterator[tuple[str, bool]]:
    """Find values that are true or false although the setting takes a number: pydantic reads them as 1 and 0.

    Args:
        content: the config, or a part of it.
        validated: the same after validation.
        place: dotted name of the part.
    """
    if isinstance(content, bool):
        if not isinstance(validated, bool) and isinstance(validated, int | float):
            yield place, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            inner = validated.get(key) if isinstance(validated, Mapping) else getattr(validated, str(key), None)
            yield from flags_for_numbers(value, inner, f"{place}.{key}".lstrip("."))
    elif isinstance(content, list) and isinstance(validated, list | tuple):
        for value, inner in zip(content, validated, strict=False):
            yield from flags_for_numbers(value, inner, place)


def _settings_of_entry(parents: Sequence[str]) -> dict[str, str]:
    """Settings of an entry that the user named, such as ``reward.models.good``, and their meanings; empty for other
    tables."""
    from rlhf_core.config.fields import describe_named_tables

    _, fields = describe_named_tables().get(".".join([*parents[:-1], "<name>"]), ("", []))
    return {field.name: field.meaning for field in fields}


def _explain_missing(location: str) -> str:
    from rlhf_core.config.fields import describe_fields

    *parents, leaf = location.split(".")
    meaning = _meanings().get(location) or _settings_of_entry(parents).get(leaf)
    if meaning:
        return f'missing key "{location}": {meaning}'
    inner = [field.name for field in describe_fields() if field.required and field.name.startswith(f"{location}.")]
    return f'missing section "{location}"' + (f"; it needs {', '.join(inner)}" if inner else "")


def _listed(tags: str) -> str:
    """Format the tags of a union, which pydantic writes as ``'a', 'b', 'c'``, as a readable alternative."""
    *first, last = tags.split(", ")
    return f"{', '.join(first)} or {last}" if first else last


def expected_name(found: str) -> str:
    """Rule for names of runs, with a valid name similar to the one found."""
    like = re.sub(r"[^a-z0-9_-]+", "-", found[:SHOWN_CHARACTERS].lower()).strip("-_")[:63]
    example = f', for instance "{like}"' if is_name(like) else ""
    return "expected at most 63 lower-case letters, digits, - and _, starting with a letter or digit" + example


_OTHER_NAMES = {
    # Names used by TRL, verl, OpenRLHF or torchrun.
    "beta": "loops.main.algorithm.kl_coefficient",
    "clip_ratio_c": "loops.main.algorithm.dual_clip",
    "entropy_coef": "loops.main.algorithm.entropy_coefficient",
    "entropy_coeff": "loops.main.algorithm.entropy_coefficient",
    "epsilon": "loops.main.algorithm.clip_low",
    "epsilon_high": "loops.main.algorithm.clip_high",
    "environment_factory": "rollout.turns.environment",
    "gpus": "resources.gpus_per_node",
    "kl_coef": "loops.main.algorithm.kl_coefficient",
    "lr": "loops.main.optimizer.learning_rate",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_tool_calling_iterations": "rollout.turns.max_turns",
    "max_steps": "loops.main.num_steps",
    "min_lr_rate": "loops.main.optimizer.min_learning_rate_ratio",
    "model_name_or_path": "model.path",
    "nnodes": "resources.num_nodes",
    "nodes": "resources.num_nodes",
    "nproc_per_node": "resources.ranks_per_node",
    "num_train_epochs": "loops.main.epochs",
    "num_generations": "loops.main.algorithm.samples_per_prompt",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "reward_funcs": "reward.functions",
    "rpo_alpha": "loops.main.algorithm.sft_coefficient",
    "save_steps": "checkpoint.every_num_steps",
    "steps": "loops.main.num_steps",
    "stop": "rollout.stop_strings",
}


_MEANT = {
    # Names whose most similar setting means something else, by their full name.
    "algorithm": 'the algorithm is chosen by "loops.main.algorithm.name"',
    "batch_size": (
        'the sizes are "loops.main.algorithm.prompts_per_step", or "loops.main.algorithm.batch_size" if supervised, '
        'and "trainer.micro_batch_size"'
    ),
    "checkpoint.every": 'the name here is "checkpoint.every_num_steps"',
    "checkpoint.interval": 'the name here is "checkpoint.every_num_steps"',
    "checkpoint.steps": 'the name here is "checkpoint.every_num_steps"',
    "data.dataset": 'the names here are "data.train" and "data.eval", each the path of a file',
    "data.path": 'the names here are "data.train" and "data.eval", each the path of a file',
    "epochs": 'the length is "loops.main.epochs" or "loops.main.num_steps"',
    "eval_steps": 'the name here is "evaluate.every_num_steps"',
    "evaluate.every": 'the name here is "evaluate.every_num_steps"',
    "evaluate.steps": 'the name here is "evaluate.every_num_steps"',
    "resources.gpu_type": 'the name here is "slurm.gpu_type"',
    "scheduler": "set RLHF_SCHEDULER in the environment, or scheduler in rlhf.toml: it belongs to the site",
    "slurm.job_name": 'the name of the run is "name"',
    "slurm.mail_user": 'write slurm.extra = ["--mail-user=..."]',
    "slurm.mem": 'the name here is "resources.memory_gb"',
    "slurm.memory": 'the name here is "resources.memory_gb"',
    "slurm.nodelist": 'write slurm.extra = ["--nodelist=..."]',
    "slurm.time": 'the name here is "resources.time_limit_s"',
    "trainer.devices": 'the name here is "resources.gpus_per_node"',
    "wandb.project": "`rlhf export RUN --to wandb` writes a run for Weights & Biases",
}


def _nearest(location: str) -> str:
    if location in _MEANT:
        return f"; {_MEANT[location]}"
    names = list(_meanings())
    *parents, leaf = location[:SHOWN_CHARACTERS].split(".")
    if known := _settings_of_entry(parents):
        return f"; [{'.'.join(parents)}] has {', '.join(known)}"
    if leaf in _OTHER_NAMES:
        return f'; the name here is "{_OTHER_NAMES[leaf]}"'
    if location in names:
        return f"; it is a setting of another {'trainer' if parents == ['trainer'] else 'algorithm'}"
    # A valid name in the wrong section: loops.main.learning_rate for loops.main.optimizer.learning_rate.
    elsewhere = [name for name in names if name.split(".")[-1] == leaf]
    elsewhere = [name for name in elsewhere if name.split(".")[: len(parents)] == parents] or elsewhere
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    sections = sorted({name.split(".")[0] for name in names if "." in name})
    if not parents:
        near = difflib.get_close_matches(leaf, sections, n=1, cutoff=0.6)
        if near:
            return f"; did you mean the section [{near[0]}]?"
    siblings = [name for name in names if name.split(".")[:-1] == parents]
    near = difflib.get_close_matches(leaf, [name.split(".")[-1] for name in siblings], n=1, cutoff=0.7)
    if near:
        return f'; did you mean "{".".join([*parents, near[0]])}"?'
    inside = [name for name in names if name.startswith(f"{'.'.join(parents)}.")]
    for among in (inside, names):
        leaves = difflib.get_close_matches(leaf, [name.split(".")[-1] for name in among], n=1, cutoff=0.7)
        if leaves:
            return f'; did you mean "{next(name for name in among if name.split(".")[-1] == leaves[0])}"?'
    if parents and siblings:
        return f"; [{'.'.join(parents)}] has {', '.join(name.split('.')[-1] for name in siblings)}"
    return f"; the sections are {', '.join(sections)}"
