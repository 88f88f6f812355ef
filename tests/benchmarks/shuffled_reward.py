"""A reward that is right on average and meaningless: exact match, assigned to other completions."""

import random

from rlhf_core.training.rewards.functions import exact_match


def shuffled_exact_match(
    *, prompts: list[str], completions: list[str], answer: list[str], **columns: object
) -> list[float]:
    """The same numbers as :func:`exact_match`, in an order unrelated to the completions."""
    scores = exact_match(prompts=prompts, completions=completions, answer=answer, **columns)
    random.Random("\n".join(completions)).shuffle(scores)
    return scores
