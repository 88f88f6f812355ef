"""Tasks whose data is made, not loaded: ``data.generator`` names one of these. Imports no torch."""

import random

from rlhf_core.errors import BadConfig


def sort_digits(
    split: str, seed: int, num_digits: int = 6, num_train: int = 20_000, num_eval: int = 512
) -> list[dict[str, str]]:
    """Sort the digits of a number: ``527301>`` is answered by ``012357``. Learned by a small model in minutes.

    No prompt occurs twice. The held-out prompts are the same for every seed, so that runs can be compared, and none of
    them is in the training split.

    Args:
        split: ``train`` or ``eval``.
        seed: which training prompts are drawn, and in which order.
        num_digits: digits of a number, leading zeros included.
        num_train: rows of the training split.
        num_eval: rows of the held-out split.

    Raises:
        BadConfig: there are not as many different numbers.
    """
    num_numbers = 10**num_digits
    if num_train + num_eval > num_numbers:
        raise BadConfig(
            f"sort_digits: found num_train + num_eval = {num_train + num_eval}, but {num_digits} digits make only "
            f"{num_numbers} different numbers"
        )
    held_out = random.Random(f"sort_digits {num_digits}").sample(range(num_numbers), num_eval)
    if split == "eval":
        numbers = held_out
    else:
        excluded = set(held_out)
        drawn = random.Random(f"sort_digits {num_digits} {seed}").sample(range(num_numbers), num_train + num_eval)
        numbers = [number for number in drawn if number not in excluded][:num_train]
    texts = [f"{number:0{num_digits}d}" for number in numbers]
    return [{"prompt": f"{text}>", "answer": "".join(sorted(text))} for text in texts]
