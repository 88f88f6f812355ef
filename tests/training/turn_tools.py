"""Tools and environments for the tests, some of which misbehave."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the form of Qwen 2.5's."""

ENDLESS_S = 600.0


def add(one: int, other: int) -> int:
    """
    Add two numbers.

    Args:
        one: The first number.
        other: The second number.
    """
    return one + other


async def later(text: str) -> str:
    """
    Return a text after a while.

    Args:
        text: Any text.
    """
    import asyncio

    await asyncio.sleep(0)
    return f"later {text}"


def misbehave(how: str) -> str:
    """
    Misbehave.

    Args:
        how: The way in which.
    """
    if how == "endless":
        time.sleep(ENDLESS_S)
    if how == "crash":
        os._exit(3)
    if how == "fork":
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({ENDLESS_S})"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            time.sleep(ENDLESS_S)
        time.sleep(ENDLESS_S)
    if how == "exit":
        sys.exit(4)
    if how == "write":
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b"x" * 64)
            except OSError:
                continue
    return f"after {how}"


def undescribed(value):  # type: ignore[no-untyped-def]
    """A tool without type hints."""


class Counter:
    """Environment with a tool and a state of its own, as for TRL."""

    def __init__(self) -> None:
        self.total = 0

    def reset(self, **columns: Any) -> str | None:
        """Begin at the number of the row, if it has one."""
        self.total = int(columns.get("start", 0))
        return columns.get("hint")

    def increase(self, by: int) -> str:
        """
        Increase the counter.

        Args:
            by: The amount.
        """
        self.total += by
        return f"total {self.total}"

    def get_reward(self) -> float:
        """Return the value of the counter."""
        return float(self.total)


class Dice:
    """Environment that answers every turn with random digits, and ends after a turn with ``.``."""

    def reset(self, seed: int, **columns: Any) -> None:
        """Remember the seed."""
        self.own = random.Random(seed)
        self.rolled: list[int] = []

    def respond(self, text: str) -> str | None:
        """Roll."""
        if "." in text:
            return None
        self.rolled += [self.own.randrange(10), random.randrange(10)]
        return "".join(map(str, self.rolled[-2:]))

    def get_reward(self) -> float:
        """Return the sum of the digits."""
        return float(sum(self.rolled))


class Fragile(Counter):
    """Environment whose tool ends its process."""

    def increase(self, by: int) -> str:
        """
        End the process.

        Args:
            by: The amount.
        """
        os._exit(by)


class Waiting:
    """Environment that ends after three turns. For a row that ``waits``, it answers the first one only once the rollout
    of another row is over."""

    def reset(self, folder: str, waits: bool, **columns: Any) -> None:
        """Remember the row."""
        self.over, self.waits, self.num_turns = Path(folder) / "over", waits, 0

    def respond(self, text: str) -> str | None:
        """Answer with the number of the turn."""
        self.num_turns += 1
        while self.waits and not self.over.exists():
            time.sleep(0.01)
        if self.num_turns < 3:
            return str(self.num_turns)
        self.over.touch()
        return None


class Crashing:
    """Environment whose process ends in the first turn."""

    def reset(self, **columns: Any) -> None:
        """Do nothing."""

    def respond(self, text: str) -> str | None:
        """End the process."""
        os._exit(3)


class Resetless:
    """Environment that cannot begin."""


def by_first_word(text: str) -> list[dict[str, Any]]:
    """Parser of calls such as ``add 1 2``."""
    name, *numbers = text.split()
    return [{"name": name, "arguments": dict(zip(("one", "other"), map(int, numbers), strict=True))}] if numbers else []


class Uneven:
    """Environment that answers a number of turns that depends on the seed, with random digits."""

    def reset(self, seed: int, **columns: Any) -> None:
        """Draw the number of turns."""
        self.left = seed % 5
        self.total = 0.0

    def respond(self, text: str) -> str | None:
        """Answer with two digits, until there are no turns left."""
        self.total += sum(map(str.isdigit, text)) + random.random()
        self.left -= 1
        return None if self.left < 0 else f"={random.randrange(10, 100)};"

    def get_reward(self) -> float:
        """Return a reward that depends on all turns."""
        return self.total


class Unseeded(Uneven):
    """The same with another source of randomness, which no seed reaches."""

    def respond(self, text: str) -> str | None:
        """Answer with unseeded digits."""
        found = super().respond(text)
        return found and f"={random.SystemRandom().randrange(10, 100)};"
