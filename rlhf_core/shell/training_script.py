"""Text of a training script: its way to resume a ``transformers.Trainer``. Pure."""

RESUME_KEYWORD = "resume_from_checkpoint"
"""Argument of ``Trainer.train``. The option of the same name does nothing by itself: ``train`` does not read it
(transformers 5.19, ``trainer.py``)."""
RESUMING_CALL = f"trainer.train({RESUME_KEYWORD}=training_args.{RESUME_KEYWORD})"
"""Call with which a script resumes from the checkpoint that the option names."""


def may_resume(text: str) -> bool:
    """True for a script that names the argument with which a Trainer resumes."""
    return RESUME_KEYWORD in text


def never_resumes(text: str) -> bool:
    """True for a script that starts the training itself, without the argument with which a Trainer resumes."""
    return ".train(" in text and not may_resume(text)
