"""What an answer of ``discover`` says beside its verdicts: what was left out or cut short, and what would change it."""

from collections.abc import Sequence

from autosym.answer import sampling
from autosym.answer.forecast import spoken

LATE = 1.1  # times the minutes that were given: what takes longer is said


def shortened(part: float, epochs: int, limit: str) -> list[str]:
    if part > 0.99:
        return []
    return [f"long runs had {part:.0%} of {epochs} epochs, to stay within the {limit}: more makes them longer"]


def idle(nothing: int, runs: int) -> list[str]:
    return [f"{nothing} of {runs} runs learned nothing: more epochs, or a larger budget, may change it"] if nothing else []


def unpriced(symmetries: Sequence[str]) -> list[str]:
    asked = f"in which layers {' and '.join(symmetries)} must be broken was not asked: a larger budget, or more minutes, would"
    return [asked] if symmetries else []


def few(samples: int) -> list[str]:
    few = f"{samples} samples are few, so margins are small whatever the budget: more samples tell more"
    return [few] if samples < sampling.LEAST[0] else []


def late(seconds: float, minutes: float | None) -> list[str]:
    late = minutes is not None and seconds > LATE * 60 * minutes
    return [f"it took {spoken(seconds)}, longer than the {minutes:g} min that were given"] if late else []
