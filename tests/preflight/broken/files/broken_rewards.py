"""Reward functions with mistakes that people make."""


def same_for_all(*, completions, **columns):
    """Compares the completion with a column that is always there and never right."""
    return [float(text == "####") for text in completions]


def one_number(*, completions, answer, **columns):
    """Returns the mean instead of one number for each completion."""
    return [sum(float(text == right) for text, right in zip(completions, answer, strict=True)) / len(answer)]
