"""Faults of one line each, as data: ``mutations.py`` puts them in one at a time, and says which of them no test notices."""

from mutants import mathematics, use
from mutants.fault import Fault

PARTS = (mathematics.FAULTS, use.FAULTS)
FAULTS: dict[str, Fault] = {name: fault for part in PARTS for name, fault in part.items()}
