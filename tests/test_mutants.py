"""The faults of ``mutants`` are of the present source: a line that has changed would never be put in."""

from pathlib import Path

import pytest

import autosym
from mutants import FAULTS, PARTS

TESTS = Path(__file__).parent
SOURCE = Path(autosym.__file__).parent


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_of_one_line_and_its_tests_are_there(name):
    fault = FAULTS[name]
    assert (SOURCE / fault.file).read_text().count(fault.line) == 1
    assert fault.broken != fault.line
    named = [word for word in fault.tests.split() if word.endswith(".py")]
    assert named
    assert all((TESTS / word).is_file() for word in named)


def test_there_are_faults_in_every_package():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {fault.file.split("/")[0] for fault in FAULTS.values()} == packages
    assert len(FAULTS) == sum(map(len, PARTS)) >= 60, "two faults of one name"
