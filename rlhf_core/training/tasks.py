"""Synthetic tasks, whose data is generated instead of loaded; ``data.generator`` names one. Does not import torch."""

import itertools
import random
from collections.abc import Callable, Sequence

from rlhf_core.errors import BadConfig


def sorted_pairs(
    split: str,
    seed: int,
    num_digits: int = 6,
    num_train: int = 20_000,
    num_eval: int = 512,
    errors: Sequence[str] = ("order",),
) -> list[dict[str, str]]:
    """Generate pairs for the task of :func:`sort_digits`: chosen are the sorted digits, rejected a nearly correct
    answer.

    Args:
        errors: kinds of errors in the rejected completions, drawn at random: ``order`` swaps two different adjacent
            digits (numbers whose digits are all equal have none and are omitted), ``digit`` replaces one to three
            digits and stays sorted, ``length`` drops a digit or repeats one.

    Raises:
        BadConfig: an unknown kind of error, or too few numbers (:func:`sort_digits`).
    """
    if not errors or not set(errors) <= _ERRORS.keys():
        raise BadConfig(f"sorted_pairs: found errors = {list(errors)}, expected some of {', '.join(_ERRORS)}")
    rows = sort_digits(split, seed, num_digits, num_train, num_eval)
    chance = random.Random(f"sorted_pairs {split} {seed if split == 'train' else 0}")
    pairs = []
    for row in rows:
        kind = chance.choice(errors) if len(errors) > 1 else errors[0]
        wrong = _ERRORS[kind](row["answer"], chance)
        if wrong:
            pairs.append({**row, "chosen": row["answer"], "rejected": wrong})
    return pairs


def _in_wrong_order(right: str, chance: random.Random) -> str:
    places = [at for at in range(len(right) - 1) if right[at] != right[at + 1]]
    if not places:
        return ""
    at = chance.choice(places)
    return right[:at] + right[at + 1] + right[at] + right[at + 2 :]


def _with_wrong_digits(right: str, chance: random.Random) -> str:
    wrong = list(right)
    for at in chance.sample(range(len(right)), min(chance.randint(1, 3), len(right))):
        wrong[at] = chance.choice([digit for digit in "0123456789" if digit != right[at]])
    found = "".join(sorted(wrong))
    return found if found != right else ""


def _of_wrong_length(right: str, chance: random.Random) -> str:
    at = chance.randrange(len(right))
    return right[:at] + right[at + 1 :] if chance.random() < 0.5 else right[: at + 1] + right[at:]


_ERRORS: dict[str, Callable[[str, random.Random], str]] = {
    "order": _in_wrong_order,
    "digit": _with_wrong_digits,
    "length": _of_wrong_length,
}
"""Functions from a correct answer to a wrong one, by kind; an empty result means there is none."""


def sorted_or_not(
    split: str, seed: int, num_digits: int = 6, num_train: int = 20_000, num_eval: int = 512
) -> list[dict[str, str | bool]]:
    """Labelled completions for :func:`sort_digits`: one of each pair of :func:`sorted_pairs`, drawn at random."""
    chance = random.Random(f"sorted_or_not {split} {seed if split == 'train' else 0}")
    rows: list[dict[str, str | bool]] = []
    for pair in sorted_pairs(split, seed, num_digits, num_train, num_eval):
        right = chance.random() < 0.5
        completion = pair["chosen" if right else "rejected"]
        rows.append({"prompt": pair["prompt"], "answer": pair["answer"], "completion": completion, "label": right})
    return rows


def sort_digits(
    split: str, seed: int, num_digits: int = 6, num_train: int = 20_000, num_eval: int = 512
) -> list[dict[str, str]]:
    """Sort the digits of a number: ``527301>`` is answered by ``012357``. A small model learns it in minutes.

    No prompt occurs twice. The held-out prompts are the same for every seed, so that runs are comparable, and never
    occur in the training split.

    Args:
        split: ``train`` or ``eval``.
        seed: determines the training prompts drawn and their order.
        num_digits: digits of a number, leading zeros included.
        num_train: rows of the training split.
        num_eval: rows of the held-out split.

    Raises:
        BadConfig: too few distinct numbers exist.
    """
    num_numbers = 10**num_digits
    if num_train + num_eval > num_numbers:
        raise BadConfig(
            f"sort_digits: found num_train + num_eval = {num_train + num_eval}, but {num_digits} digits allow only "
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


def phone_book(
    split: str, seed: int, num_train: int = 8_000, num_eval: int = 512, call_share: float = 0.3
) -> list[dict[str, str]]:
    """Say the number of a name: ``kdo>`` is answered by three digits, which only :class:`PhoneBook` knows.

    Numbers are drawn at random, so a guess is right once in a thousand times. The targets of supervised training show
    both ways out: a share of the rows looks the number up, the others say ``unknown``. No name occurs twice, and no
    held-out one in the training split.

    Args:
        split: ``train`` or ``eval``.
        seed: determines the training rows; held-out rows are the same for every seed.
        num_train: rows of the training split.
        num_eval: rows of the held-out split.
        call_share: share of the training rows whose target looks the number up.

    Raises:
        BadConfig: there are not enough names.
    """
    names = ["".join(letters) for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=3)]
    if num_train + num_eval > len(names):
        raise BadConfig(
            f"phone_book: found num_train + num_eval = {num_train + num_eval}, but there are only {len(names)} names"
        )
    random.Random("phone_book").shuffle(names)
    chance = random.Random(f"phone_book {split} {seed if split == 'train' else 0}")
    rows = []
    for name in names[:num_eval] if split == "eval" else chance.sample(names[num_eval:], num_train):
        number = f"{chance.randrange(1000):03d}"
        target = f"{name}?{PhoneBook.MARK}{number};{number}" if chance.random() < call_share else "unknown"
        rows.append({"prompt": f"{name}>", "answer": number, "name": name, "number": number, "target": target})
    return rows


class PhoneBook:
    """Environment of :func:`phone_book`: a turn that ends with the name and ``?`` is answered by the number."""

    MARK = "="
    """Beginning of an observation."""

    def reset(self, name: str, number: str, **columns: object) -> None:
        """Open the book at one name."""
        self._name, self._number = name, number

    def respond(self, text: str) -> str | None:
        """Look a name up; any other turn is the answer to the prompt."""
        if not text.endswith("?"):
            return None
        return f"{self.MARK}{self._number};" if text.removesuffix("?") == self._name else f"{self.MARK}not found;"
