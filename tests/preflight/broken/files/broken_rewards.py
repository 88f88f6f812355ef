"""Reward functions with common mistakes."""


def same_for_all(*, completions, **columns):
    """Compare the completion with a column that always exists and never matches."""
    return [float(text == "####") for text in completions]


def one_number(*, completions, answer, **columns):
    """Return the mean instead of one number for each completion."""
    return [sum(float(text == right) for text, right in zip(completions, answer, strict=True)) / len(answer)]
