"""Resume of programs that ``transformers.Trainer`` runs: its option does nothing unless the program passes it on."""

from rlhf_core.launch.wrap.draft import Draft
from rlhf_core.launch.wrap.frameworks import Family
from rlhf_core.shell.training_script import RESUME_KEYWORD, RESUMING_CALL, may_resume, never_resumes

_SUITES = frozenset(("swift", "trl", "llamafactory", "axolotl"))
"""Commands that pass it on themselves; preflight knows the versions of TRL that do not."""


def read_resume_of_trainer(draft: Draft, family: Family) -> None:
    """Settings for a transformers.Trainer, which resumes only if the program tells it to."""
    spelling, program = family.spelled(RESUME_KEYWORD), draft.line.program[-1]
    is_script = program.endswith(".py") and not draft.line.is_module
    text = draft.around.read_file(program) if is_script else None
    if text is not None and never_resumes(text):
        draft.settings["trainer.resume"] = "none"
        draft.missing(
            f"the way it resumes: {program} never names {RESUME_KEYWORD}, which its Trainer does not read itself",
            f'write {RESUMING_CALL} and remove resume = "none"; until then a retry starts at step 0',
        )
        return
    joined = spelling.endswith("=")
    draft.settings["trainer.resume_argv"] = [f"{spelling}{{checkpoint}}"] if joined else [spelling, "{checkpoint}"]
    is_of_suite = draft.line.launcher in _SUITES or family.name == "swift" or family.style != "dashes"
    if is_of_suite or (text is not None and may_resume(text)):
        draft.report("resume", spelling, "trainer.resume_argv, if there is a checkpoint")
    else:
        draft.missing(
            f"the way it resumes: {program} " + ("was not read" if text is None else f"does not name {RESUME_KEYWORD}"),
            f"make sure that it calls {RESUMING_CALL}; otherwise a retry starts at step 0 and ends as incomplete",
        )
