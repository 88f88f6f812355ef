"""Trackers that a program reports to: TensorBoard, which is read for progress, and Weights & Biases."""

from rlhf_core.launch.wrap.draft import Draft

_FOLDERS = ("logging_dir", "tensorboard_dir", "use_tensorboard", "logger.tensorboard_dir")
_WANDB = "wandb"
_ONE_RUN_OF_WANDB = {"WANDB_RUN_ID": "{run_id}", "WANDB_RESUME": "allow"}
"""Variables with which all starts of a program report to one run of W&B."""


def read_trackers(draft: Draft) -> None:
    """Read the options of trackers, and let every start of the program continue the same record."""
    if draft.given("argument", "report_to") == "none":
        draft.missing(
            "--report_to none: progress is only visible through checkpoints and outside observation of the ranks",
            "write --report_to tensorboard",
        )
    for option in [option for option in _FOLDERS if draft.given("argument", option)]:
        draft.put("argument", [option], "{output_dir}/runs", "")
        draft.report(f"--{option}", "folder of TensorBoard", "{output_dir}/runs, which is searched for progress")
    if _uses_wandb(draft) and not _ONE_RUN_OF_WANDB.keys() & draft.variables.keys():
        draft.variables |= _ONE_RUN_OF_WANDB
        draft.report("W&B", "a new run for every start", "WANDB_RUN_ID and WANDB_RESUME: one for all starts")


def _uses_wandb(draft: Draft) -> bool:
    """True if an option of the line or of its config files, or a variable, is about W&B."""
    named = [words for item, words in zip(draft.line.items, draft.words, strict=True) if item.role == "argument"]
    in_line = any(_WANDB in " ".join(words) for words in named)
    settings = [draft.settings_of(path) or {} for path in draft.line.config_files]
    in_files = any(_WANDB in f"{name} {value}" for found in settings for name, value in found.items() if value)
    return in_line or in_files or any(name.startswith("WANDB_") for name in draft.given_variables)
