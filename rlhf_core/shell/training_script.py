"""Text of a training script: its way to resume a ``transformers.Trainer``. Pure."""

import re

RESUME_KEYWORD = "resume_from_checkpoint"
"""Argument of ``Trainer.train``. The option of the same name does nothing by itself: ``train`` does not read it
(transformers 5.19, ``trainer.py``)."""
RESUMING_CALL = f"trainer.train({RESUME_KEYWORD}=training_args.{RESUME_KEYWORD})"
"""Call with which a script resumes from the checkpoint that the option names."""
_OWN_SEARCH = "get_last_checkpoint"
"""Function of transformers with which a script finds its newest checkpoint itself."""
_COMMENT = re.compile("#.*")
_CALL = re.compile(r"\b\w*trainer\w*\.train\((\s*\))?", re.IGNORECASE)
"""Call of a trainer's ``train``; not ``model.train()``, the mode of a torch module. Group 1: it has no arguments."""


def may_resume(text: str) -> bool:
    """True for a script that names the argument with which a Trainer resumes."""
    return RESUME_KEYWORD in text


def never_resumes(text: str) -> bool:
    """True for a script that starts its Trainer itself, always without an argument, so that it begins at step 0. False
    if its text leaves that open."""
    calls = _CALL.findall(_COMMENT.sub("", text))
    return bool(calls) and all(calls) and not may_resume(text) and _OWN_SEARCH not in text
