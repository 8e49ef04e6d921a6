"""The page of promises is true: every test it names exists, and every fault of the list has a test with its mark."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"
FAULTS = range(1, 26)
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@cache
def marks(file: str) -> dict[str, set[int]]:
    """The faults that every test of a file is marked with, also where only some of its parameters are."""
    found = {}
    for node in ast.parse(next(TESTS.rglob(file)).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            calls = [call for decorator in node.decorator_list for call in ast.walk(decorator) if isinstance(call, ast.Call)]
            named = [call for call in calls if ast.unparse(call.func) in ("fault", "pytest.mark.fault")]
            found[node.name] = {ast.literal_eval(call.args[0]) for call in named}
    return found


def rows() -> dict[int, list[tuple[str, str]]]:
    """The tests that each row of the table names."""
    lines = re.findall(r"^\| (\d+) \|(.*)$", PAGE.read_text(), re.M)
    return {int(number): NAMED.findall(rest) for number, rest in lines}


def test_every_test_that_is_named_exists():
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 50
    assert not [f"{file}::{name}" for file, name in named if name not in marks(file)]


def test_the_table_has_every_fault():
    assert list(rows()) == list(FAULTS)


@pytest.mark.parametrize("number", FAULTS)
def test_every_fault_has_a_marked_test_in_its_row(number):
    named = rows()[number]
    assert any(number in marks(file)[name] for file, name in named), f"none of {named} is marked fault({number})"


def test_marks_are_of_the_list():
    everywhere = {number for path in TESTS.rglob("test_*.py") for found in marks(path.name).values() for number in found}
    assert everywhere == set(FAULTS)


def test_marks_are_read():
    assert marks("test_faults.py")["test_infinite_pixel"] == {2}
    assert marks("test_entry_points.py")["test_an_input_that_is_not_finite"] == {1, 2}
    assert marks("test_faults.py")["test_impossible_subsets"] == set()
