"""Check of the measure of the code base: each row counts what its label states."""

from pathlib import Path

import measure
import pytest

PROGRAM = '''"""What this is."""

LIMIT = 3
"""How many."""


class Twice:
    """A class."""

    def work(self) -> None:
        """Work."""
        try:
            pass
        except Exception:
            pass
        try:
            pass
        except (ValueError, Exception) as error:
            raise SystemExit from error
'''
TEST = """def helper():
    return 1


@pytest.mark.parametrize(
    "number", [1]
)
def test_one(number):
    assert helper() == number
"""
COMMAND = """def run():
    from flows import run
    import flows.tasks
    import flowsheet
"""


@pytest.fixture
def house(tmp_path: Path) -> measure.House:
    """A small checkout with one instance of everything that is counted."""
    files = {
        "rlhf_core/one.py": PROGRAM,
        "rlhf_core/two.py": "class Twice: ...\n" + "\n" * measure.LONG,
        "rlhf_core/schemas/rows.py": "class Row: ...\n",
        "rlhf_core/history/tables/rows.py": "class Row: ...\n",
        "rlhf_core/cli/main.py": COMMAND,
        "flows/run.py": "",
        "tests/test_one.py": TEST,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return measure.House(tmp_path)


def test_each_row_counts_one_thing(house: measure.House) -> None:
    assert measure.lines(house.tests) == 7
    assert measure.lines_of_helpers(house.tests) == 2
    assert measure.questions(house.program) == ["rlhf_core/one.py:1: What", "rlhf_core/one.py:4: How"]
    assert measure.share_of_questions(house.program) == "50.0 %"
    assert measure.repeated_classes(house.program) == ["Twice: rlhf_core/one.py, rlhf_core/two.py"]
    assert measure.broad_excepts(house.program) == ["rlhf_core/one.py:14"]
    assert measure.long_files(house.program) == ["rlhf_core/two.py (401)"]
    assert measure.flows_imports(house.program) == ["rlhf_core/cli/main.py:2", "rlhf_core/cli/main.py:3"]


def test_the_table_has_a_row_for_each_measure(house: measure.House) -> None:
    rows = measure.table(house).splitlines()
    assert rows[:2] == ["| | before | now | goal |", "|---|---|---|---|"]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == [one.title for one in measure.MEASURES]


def test_this_checkout_can_be_measured() -> None:
    house = measure.House(Path(__file__).parents[2])
    assert measure.lines(house.program) > 10_000
    assert not [module for module in house.program if module.num_lines == 0 and module.text]
