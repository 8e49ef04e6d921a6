"""One fault."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``line``, exact text that ``file`` (in src/autosym) holds once, becomes ``broken``; ``tests`` are arguments of pytest in tests/."""

    file: str
    line: str
    broken: str
    tests: str
